"""Local files and directories as byte streams and back. Tar runs in a thread, behind a pipe that bounds what lies in memory.

What comes out of a sandbox is not trusted: unpacking opens every path component by component without following symlinks, so no
archive, however made, writes outside the target directory.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import os
import posixpath
import stat
import tarfile
import tempfile
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import IO

import msgspec

from .errors import FileInvalid

_CHUNK = 1024 * 1024  # a turn in a thread costs as much as copying some hundred kilobytes
_PIPE = 1024 * 1024
_MAX_NAME = 4096
_MAX_EXTENSION = 1024 * 1024
_MAX_SKIPPED = 10_000  # names of members left out that are kept
_EXTENSIONS = (tarfile.XHDTYPE, tarfile.SOLARIS_XHDTYPE, tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK)
# What an entry may meet in the directory, because of another entry or of what was there before.
_IN_ITS_WAY = frozenset(
    (
        errno.ENOENT,
        errno.EEXIST,
        errno.EISDIR,
        errno.ENOTDIR,
        errno.ELOOP,
        errno.EPERM,
        errno.EACCES,
        errno.ENAMETOOLONG,
        errno.EMLINK,
    )
)


class Downloaded(msgspec.Struct, frozen=True):
    """files: regular files written; bytes: their size in all; skipped: names left out, and why."""

    files: int
    bytes: int
    skipped: dict[str, str] = {}


# -- up --


async def read_file(path: bytes, size: int) -> AsyncIterator[bytes]:
    """`size` bytes of a local file in pieces, however it grows meanwhile; FileInvalid when it shrinks."""
    file = await asyncio.to_thread(open, path, "rb", buffering=0)
    try:
        while size:
            chunk = await asyncio.to_thread(file.read, min(size, _CHUNK))
            if not chunk:
                raise FileInvalid(f"{os.fsdecode(path)} was cut short while it was read", hint="upload it again")
            size -= len(chunk)
            yield chunk
    finally:
        file.close()


def pack_tree(directory: bytes) -> AsyncIterator[bytes]:
    """The contents of a directory as a pax tar, names relative to it."""

    def add(tar: tarfile.TarFile) -> None:
        for name in sorted(os.listdir(directory)):
            tar.add(os.fsdecode(os.path.join(directory, name)), arcname=os.fsdecode(name), filter=_anonymous)

    return _packed(add)


def pack_one(path: bytes, name: bytes) -> AsyncIterator[bytes]:
    """One file or symlink as a tar."""

    def add(tar: tarfile.TarFile) -> None:
        tar.add(os.fsdecode(path), arcname=os.fsdecode(name), recursive=False, filter=_anonymous)

    return _packed(add)


def _anonymous(member: tarfile.TarInfo) -> tarfile.TarInfo:
    """Owners of this machine mean nothing in a sandbox."""
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    return member


async def _packed(add: Callable[[tarfile.TarFile], None]) -> AsyncIterator[bytes]:
    read_end, write_end = _wide_pipe()

    def pack() -> None:
        with open(write_end, "wb", buffering=_CHUNK) as sink:
            with tarfile.open(fileobj=sink, mode="w|", format=tarfile.PAX_FORMAT, bufsize=_CHUNK) as tar:
                add(tar)

    source = os.fdopen(read_end, "rb", buffering=0)
    packing = asyncio.ensure_future(asyncio.to_thread(pack))
    try:
        while chunk := await asyncio.to_thread(source.read, _CHUNK):
            yield chunk
        await packing
    finally:
        source.close()  # a packer that still writes gets EPIPE and ends
        with contextlib.suppress(BrokenPipeError):
            await packing


def _wide_pipe() -> tuple[int, int]:
    """A pipe that takes more than 64 KiB at a time, where that is to be had."""
    ends = os.pipe()
    if hasattr(fcntl, "F_SETPIPE_SZ"):
        with contextlib.suppress(OSError):  # this user has many wide pipes already
            fcntl.fcntl(ends[1], fcntl.F_SETPIPE_SZ, _PIPE)
    return ends


# -- down --


async def gathered(pieces: AsyncIterable[bytes]) -> AsyncIterator[list[bytes]]:
    """Pieces as they came, in lists of about a megabyte, so that a turn in a thread is worth it."""
    held: list[bytes] = []
    size = 0
    async for piece in pieces:
        held.append(piece)
        size += len(piece)
        if size >= _CHUNK:
            yield held
            held, size = [], 0
    if held:
        yield held


async def write_file(pieces: AsyncIterable[bytes], target: Path) -> Downloaded:
    """Written beside the target and renamed onto it when it is whole."""
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=".dsec-")
    size = 0
    try:
        with os.fdopen(handle, "wb", buffering=0) as file:
            async for some in gathered(pieces):
                size += await asyncio.to_thread(_write_all, file, some)
        os.chmod(name, 0o666 & ~_umask())
        os.replace(name, target)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)
        raise
    return Downloaded(1, size)


def _umask() -> int:
    """The process's umask; it can only be read by setting it, so it is read from /proc where there is one."""
    with contextlib.suppress(OSError), open("/proc/self/status", encoding="ascii") as status:
        for line in status:
            if line.startswith("Umask:"):
                return int(line.split()[1], 8)
    return 0o022


async def unpack_tree(pieces: AsyncIterable[bytes], target: Path) -> Downloaded:
    """A tar stream into a directory that is made if it is not there."""
    read_end, write_end = _wide_pipe()
    source = os.fdopen(read_end, "rb", buffering=0)
    sink = os.fdopen(write_end, "wb", buffering=0)
    unpacking = asyncio.ensure_future(asyncio.to_thread(_unpack, source, target))
    try:
        with contextlib.suppress(BrokenPipeError):  # the unpacker gave up: its own error says why
            async for some in gathered(pieces):
                await asyncio.to_thread(_write_all, sink, some)
    finally:
        sink.close()
        result = (await asyncio.gather(unpacking, return_exceptions=True))[0]
    if isinstance(result, BaseException):
        raise result
    return result


def _write_all(sink: IO[bytes], pieces: list[bytes]) -> int:
    """To a file without a buffer of its own; how many bytes."""
    for piece in pieces:
        view = memoryview(piece)
        while view:
            view = view[sink.write(view) :]
    return sum(map(len, pieces))


def _unpack(source: IO[bytes], target: Path) -> Downloaded:
    target.mkdir(parents=True, exist_ok=True)
    root = os.open(target, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with source, tarfile.open(fileobj=source, mode="r|", bufsize=_CHUNK, tarinfo=_Member) as tar:
            found = _Unpacker(root).run(tar)
            while source.read(_CHUNK):  # the writer must not see a broken pipe over the padding at the end
                pass
            return found
    except (tarfile.TarError, ValueError, ArithmeticError, LookupError, EOFError, RecursionError) as error:
        raise FileInvalid(f"the sandbox sent a damaged archive: {error or type(error).__name__}") from error
    finally:
        os.close(root)


class _Member(tarfile.TarInfo):
    """What tarfile would take into memory, or write, at a header's word is refused: none of it is in what a sandbox sends."""

    def _proc_member(self, tar: tarfile.TarFile) -> tarfile.TarInfo:
        if self.type in _EXTENSIONS and not 0 <= self.size <= _MAX_EXTENSION:
            raise tarfile.ReadError(f"an extended header of {self.size} bytes")
        if self.type in (tarfile.GNUTYPE_SPARSE, tarfile.XGLTYPE):
            raise tarfile.ReadError("a sparse file, or a header for the whole archive")
        made: tarfile.TarInfo = super()._proc_member(tar)  # type: ignore[misc]
        return made

    def _sparse(self, *_: object) -> None:
        raise tarfile.ReadError("a sparse file")

    _proc_gnusparse_00 = _proc_gnusparse_01 = _proc_gnusparse_10 = _sparse


class _Unpacker:
    """Members of a tar under one directory descriptor."""

    def __init__(self, root: int) -> None:
        self._root = root
        self._skipped: dict[str, str] = {}
        self._modes: list[tuple[list[str], int]] = []
        self._files = 0
        self._bytes = 0

    def run(self, tar: tarfile.TarFile) -> Downloaded:
        while (member := tar.next()) is not None:
            tar.members.clear()  # type: ignore[attr-defined]  # else it would keep them all
            parts = [part for part in member.name.split("/") if part not in ("", ".")]
            why = self._refusal(member, parts)
            if why:
                self._skip(member, why)
            elif parts:
                self._place(tar, member, parts)
        for parts, mode in reversed(self._modes):  # last, or a directory without w would refuse its own entries
            with self._parent([*parts, "."], make=False) as directory:
                os.fchmod(directory, mode)
        return Downloaded(self._files, self._bytes, self._skipped)

    def _skip(self, member: tarfile.TarInfo, why: str) -> None:
        if len(self._skipped) < _MAX_SKIPPED:
            self._skipped[member.name] = why

    @staticmethod
    def _refusal(member: tarfile.TarInfo, parts: list[str]) -> str:
        if member.name.startswith("/") or ".." in parts or len(member.name) > _MAX_NAME:
            return "its name leads out of the directory"
        if "\0" in member.name or "\0" in member.linkname:
            return "a NUL byte in its name"
        if member.issym():
            end = posixpath.normpath(posixpath.join(*parts[:-1], member.linkname) if parts[:-1] else member.linkname)
            if member.linkname.startswith("/") or end == ".." or end.startswith("../"):
                return f"a symlink that leads out of the directory, to {member.linkname[:200]!r}"
        elif not (member.isreg() or member.isdir() or member.islnk()):
            return "neither a regular file, a directory nor a link"
        return ""

    def _place(self, tar: tarfile.TarFile, member: tarfile.TarInfo, parts: list[str]) -> None:
        mode = member.mode & 0o755 | (0o700 if member.isdir() else 0o600)
        try:
            with self._parent(parts, make=True) as directory:
                name = parts[-1]
                if member.isdir():
                    self._directory(directory, name)
                    self._modes.append((parts, mode))
                    return
                if member.islnk():
                    self._hard_link(member, parts, directory)
                    return
                self._clear(directory, name)
                if member.issym():
                    os.symlink(member.linkname, name, dir_fd=directory)
                else:
                    self._file(tar, member, directory, name, mode)
        except OSError as error:
            if error.errno not in _IN_ITS_WAY:
                raise
            what = "a symlink or file" if error.errno in (errno.ENOTDIR, errno.ELOOP) else error.strerror
            self._skip(member, f"{what} stands in its way")

    @contextlib.contextmanager
    def _parent(self, parts: list[str], *, make: bool) -> Iterator[int]:
        """A descriptor of the directory that holds the last part, reached without following any symlink."""
        at = os.dup(self._root)
        try:
            for part in parts[:-1]:
                if make:
                    with contextlib.suppress(FileExistsError):
                        os.mkdir(part, 0o755, dir_fd=at)
                deeper = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=at)
                os.close(at)
                at = deeper
            yield at
        finally:
            os.close(at)

    @staticmethod
    def _directory(at: int, name: str) -> None:
        try:
            os.mkdir(name, 0o755, dir_fd=at)
        except FileExistsError:
            if not stat.S_ISDIR(os.stat(name, dir_fd=at, follow_symlinks=False).st_mode):
                os.unlink(name, dir_fd=at)
                os.mkdir(name, 0o755, dir_fd=at)

    @staticmethod
    def _clear(at: int, name: str) -> None:
        with contextlib.suppress(FileNotFoundError, IsADirectoryError, PermissionError):
            os.unlink(name, dir_fd=at)

    def _hard_link(self, member: tarfile.TarInfo, parts: list[str], at: int) -> None:
        source = [part for part in member.linkname.split("/") if part not in ("", ".")]
        if not source or ".." in source:
            self._skip(member, "a link that leads out of the directory")
            return
        if source != parts:  # a link to itself is there, or nowhere
            with self._parent(source, make=False) as holder:
                os.stat(source[-1], dir_fd=holder, follow_symlinks=False)
                self._clear(at, parts[-1])
                os.link(source[-1], parts[-1], src_dir_fd=holder, dst_dir_fd=at, follow_symlinks=False)
            self._files += 1

    def _file(self, tar: tarfile.TarFile, member: tarfile.TarInfo, at: int, name: str, mode: int) -> None:
        contents = tar.extractfile(member)
        assert contents is not None
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        with open(os.open(name, flags, 0o600, dir_fd=at), "wb", buffering=0) as file:
            while chunk := contents.read(_CHUNK):
                self._bytes += file.write(chunk)
            os.fchmod(file.fileno(), mode)
            with contextlib.suppress(OverflowError, ValueError):  # a time that no clock here shows
                os.utime(file.fileno(), (member.mtime, member.mtime))
        self._files += 1
