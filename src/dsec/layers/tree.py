"""Writing a directory tree from untrusted entries, as root, without ever leaving the tree.

Names come from archives that anyone may have made. Every step goes through a directory descriptor with O_NOFOLLOW, so
neither `..`, nor absolute names, nor links planted by earlier entries lead outside; files are only ever created anew
(O_EXCL), never opened for writing through a name that exists.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

from dsec.layers.scan import Bounds, private_attribute
from dsec.protocol.errors import ErrorKind, Fault

OPAQUE = "user.overlay.opaque"  # what a `userxattr` overlay looks at
_MAX_PATH = 4096
_MAX_NAME = 255
_MAX_DEPTH = 256
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_WHITEOUT = os.makedev(0, 0)

Name = tuple[bytes, ...]  # path components below the root; () is the root


class Metadata(msgspec.Struct, frozen=True):
    """mode: permission bits (setuid and the like included); mtime in nanoseconds; attributes: extended ones."""

    mode: int = 0o755
    uid: int = 0
    gid: int = 0
    mtime_ns: int = 0
    attributes: Mapping[str, bytes] = {}


class Piece(msgspec.Struct, frozen=True):
    """Bytes of a file at an offset; what no piece covers is a hole."""

    offset: int
    data: bytes


def parse_name(path: bytes) -> Name:
    """Components of an archive's name, which must stay below the root: Fault INVALID for absolute names and `..`."""
    if path.startswith(b"/"):
        raise hostile(path, "is absolute")
    parts = tuple(part for part in path.split(b"/") if part not in (b"", b"."))
    if b".." in parts:
        raise hostile(path, "has a '..' in it")
    if (
        b"\0" in path
        or len(path) > _MAX_PATH
        or len(parts) > _MAX_DEPTH
        or any(len(part) > _MAX_NAME for part in parts)
    ):
        raise hostile(path, "is longer or deeper than a file system can hold, or has a NUL in it")
    return parts


def hostile(path: bytes, why: str) -> Fault:
    return Fault(
        ErrorKind.INVALID,
        f"the entry {path[:200].decode(errors='backslashreplace')!r} {why}",
        hint="layers are made from names below their root only; repack the archive",
    )


class TreeWriter:
    """Builds one tree below `root` (an empty directory that nobody else uses). Call `finish` at the end.

    `keep_whiteouts`: removals must also hide what layers below this one have, so they leave marks (0/0 devices, opaque
    directories); without, they only remove from the tree. Later entries replace earlier ones of the same name.
    """

    def __init__(
        self, root: Path, *, prefix: Name = (), bounds: Bounds = Bounds(), keep_whiteouts: bool = False
    ) -> None:
        self._bounds = bounds
        self._keep_whiteouts = keep_whiteouts
        self._prefix = prefix
        self._open: list[tuple[bytes, int]] = []  # descriptors along the path that was used last
        self._root = os.open(root, _DIRECTORY)
        # Applied at the end: modes may forbid, and children change their parents' times.
        self._directories: dict[Name, Metadata] = {(): Metadata()}
        self._layer: set[Name] = set()
        self._size = self._entries = 0

    def __enter__(self) -> TreeWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self._close_from(0)
        os.close(self._root)

    # -- entries ------------------------------------------------------------------------------------------------------

    def directory(self, name: Name, metadata: Metadata) -> None:
        name = self._prefix + name
        self._count(name)
        if name:
            self._make_directory(self._parent(name), name)
        self._directories[name] = metadata

    def file(self, name: Name, metadata: Metadata, size: int, pieces: Iterable[Piece]) -> None:
        """A regular file of `size` bytes; pieces may come from a stream, in order."""
        name = self._prefix + name
        self._size += size
        parent = self._vacant(name)
        fd = os.open(
            name[-1], os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=parent
        )
        try:
            for piece in pieces:
                _write_at(fd, piece)
            os.truncate(fd, size)
            os.fchown(fd, metadata.uid, metadata.gid)
            os.fchmod(fd, metadata.mode)
            self._attributes(fd, name, metadata)
            os.utime(fd, ns=_times(metadata))
        finally:
            os.close(fd)

    def symlink(self, name: Name, metadata: Metadata, target: bytes) -> None:
        name = self._prefix + name
        if not target or b"\0" in target or len(target) >= _MAX_PATH:
            raise hostile(b"/".join(name), "is a symbolic link without a possible target")
        parent = self._vacant(name)
        os.symlink(target, name[-1], dir_fd=parent)
        os.chown(name[-1], metadata.uid, metadata.gid, dir_fd=parent, follow_symlinks=False)
        os.utime(name[-1], ns=_times(metadata), dir_fd=parent, follow_symlinks=False)

    def hard_link(self, name: Name, target: Name) -> None:
        """Another name of an entry that is in the tree already."""
        name, target = self._prefix + name, self._prefix + target
        if name == target:
            return
        status = self._status(target)
        if status is None or stat.S_ISDIR(status.st_mode):
            raise hostile(b"/".join(name), "is a hard link to something that is not in the archive")
        self._vacant(name)
        if self._status(target) is None:  # `name` was a directory that held the target
            raise hostile(b"/".join(name), "is a hard link to something below itself")
        source = os.dup(self._parent(target))  # making room may have closed it
        try:
            os.link(target[-1], name[-1], src_dir_fd=source, dst_dir_fd=self._parent(name), follow_symlinks=False)
        finally:
            os.close(source)

    def special(self, name: Name, metadata: Metadata, kind: int, device: int = 0) -> None:
        """A device node, FIFO or socket (kind: stat.S_IFCHR, ...), which is only stored, never opened."""
        name = self._prefix + name
        parent = self._vacant(name)
        os.mknod(name[-1], kind | 0o600, device, dir_fd=parent)
        os.chown(name[-1], metadata.uid, metadata.gid, dir_fd=parent, follow_symlinks=False)
        os.chmod(name[-1], metadata.mode, dir_fd=parent)  # made a moment ago by us in a private directory: no link
        os.utime(name[-1], ns=_times(metadata), dir_fd=parent, follow_symlinks=False)

    # -- layers on layers ---------------------------------------------------------------------------------------------

    def next_layer(self) -> None:
        """What follows belongs to the next archive of a stack: its removals touch only what came before it."""
        self._layer = set()

    def remove(self, name: Name) -> None:
        """A whiteout: hide what earlier layers have at `name`."""
        name = self._prefix + name
        if not name:
            raise hostile(b".", "removes the whole tree")
        self._remove_earlier(name)
        if self._keep_whiteouts and self._status(name) is None:
            parent = self._parent(name, make=True)
            os.mknod(name[-1], stat.S_IFCHR | 0o000, _WHITEOUT, dir_fd=parent)
            os.utime(name[-1], ns=(0, 0), dir_fd=parent, follow_symlinks=False)
        elif self._keep_whiteouts:
            self._make_opaque(self._parent(name), name)

    def opaque(self, name: Name) -> None:
        """An opaque directory: hide what earlier layers have in it."""
        name = self._prefix + name
        for child in os.listdir(self._descriptor(name, make=True)):
            self._remove_earlier((*name, os.fsencode(child)))
        if self._keep_whiteouts:
            if not name:
                raise hostile(b".", "hides everything below this layer, which an overlay cannot")
            self._make_opaque(self._parent(name), name)

    def finish(self) -> None:
        """Give directories their owners, modes and times, the deepest first."""
        if self._keep_whiteouts:
            self._drop_idle_whiteouts()
        for name in sorted(self._directories, key=len, reverse=True):
            metadata = self._directories[name]
            fd = self._descriptor(name)
            os.fchown(fd, metadata.uid, metadata.gid)
            os.fchmod(fd, metadata.mode)
            self._attributes(fd, name, metadata)
            os.utime(fd, ns=_times(metadata))

    def _drop_idle_whiteouts(self) -> None:
        """Remove whiteouts at and below opaque directories: there is nothing left to hide, and an overlay would list them
        (it filters only directories that it merges) as names that do not exist."""
        opaque: set[Name] = set()
        for name in sorted(self._directories, key=len):
            fd = self._descriptor(name)
            if not (name[:-1] in opaque and name) and OPAQUE not in os.listxattr(fd):
                continue
            opaque.add(name)
            for child in os.listdir(fd):
                if _is_whiteout(os.stat(child, dir_fd=fd, follow_symlinks=False)):
                    os.unlink(child, dir_fd=fd)

    # -- finding the way ----------------------------------------------------------------------------------------------

    def _descriptor(self, name: Name, *, make: bool = False) -> int:
        """The descriptor of a directory of the tree (owned by the writer, valid until the next call)."""
        shared = 0
        while shared < min(len(self._open), len(name)) and self._open[shared][0] == name[shared]:
            shared += 1
        self._close_from(shared)
        fd = self._open[-1][1] if self._open else self._root
        for depth in range(shared, len(name)):
            fd = self._enter(fd, name[: depth + 1], make)
            self._open.append((name[depth], fd))
        return fd

    def _enter(self, parent: int, name: Name, make: bool) -> int:
        """Open one directory on the way; what is missing (or hidden by a whiteout) is made, a link is never followed."""
        try:
            return os.open(name[-1], _DIRECTORY, dir_fd=parent)
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ELOOP, errno.ENOTDIR):
                raise
            present = error.errno != errno.ENOENT
        if present and not _is_whiteout(os.stat(name[-1], dir_fd=parent, follow_symlinks=False)):
            raise hostile(b"/".join(name), "is used as a directory, but is none (a link?)")
        if not make:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), b"/".join(name))
        self._make_directory(parent, name)
        return os.open(name[-1], _DIRECTORY, dir_fd=parent)

    def _parent(self, name: Name, *, make: bool = True) -> int:
        return self._descriptor(name[:-1], make=make)

    def _close_from(self, depth: int) -> None:
        while len(self._open) > depth:
            os.close(self._open.pop()[1])

    def _status(self, name: Name) -> os.stat_result | None:
        """lstat of an entry; None when there is none."""
        if not name:
            return os.fstat(self._root)
        try:
            return os.stat(name[-1], dir_fd=self._parent(name, make=False), follow_symlinks=False)
        except FileNotFoundError:
            return None

    # -- making room --------------------------------------------------------------------------------------------------

    def _count(self, name: Name) -> None:
        self._entries += 1
        self._layer.add(name)
        self._bounds.check(self._size, self._entries, "the archive")

    def _vacant(self, name: Name) -> int:
        """The parent's descriptor, with nothing at `name` any more."""
        if not name:
            raise hostile(b".", "is the root, but no directory")
        self._count(name)
        parent = self._parent(name)
        try:
            os.unlink(name[-1], dir_fd=parent)
        except FileNotFoundError:
            pass
        except (IsADirectoryError, PermissionError):
            self._remove_tree(name)
            parent = self._parent(name)
        return parent

    def _make_directory(self, parent: int, name: Name) -> None:
        """A directory at `name`; one that is there stays, anything else gives way."""
        hidden = False
        try:
            status = os.stat(name[-1], dir_fd=parent, follow_symlinks=False)
        except FileNotFoundError:
            pass
        else:
            if stat.S_ISDIR(status.st_mode):
                return
            hidden = _is_whiteout(status)
            os.unlink(name[-1], dir_fd=parent)
        os.mkdir(name[-1], 0o700, dir_fd=parent)
        self._layer.add(name)
        self._directories.setdefault(name, Metadata())
        if self._keep_whiteouts and hidden:
            self._make_opaque(parent, name)  # what the whiteout hid must stay hidden

    @staticmethod
    def _make_opaque(parent: int, name: Name) -> None:
        """Mark the entry if it is a directory: other kinds hide what is below them anyway."""
        try:
            fd = os.open(name[-1], _DIRECTORY, dir_fd=parent)
        except OSError as error:
            if error.errno in (errno.ENOTDIR, errno.ELOOP):
                return
            raise
        try:
            os.setxattr(fd, OPAQUE, b"y")
        finally:
            os.close(fd)

    def _remove_earlier(self, name: Name) -> None:
        """Remove what earlier layers put at and below `name`, and leave what this one did."""
        status = self._status(name)
        if status is None:
            return
        if name not in self._layer:
            self._remove_tree(name)
        elif stat.S_ISDIR(status.st_mode):
            for child in os.listdir(self._descriptor(name)):
                self._remove_earlier((*name, os.fsencode(child)))

    def _remove_tree(self, name: Name) -> None:
        status = self._status(name)
        if status is None:
            return
        if stat.S_ISDIR(status.st_mode):
            for child in os.listdir(self._descriptor(name)):
                self._remove_tree((*name, os.fsencode(child)))
            os.rmdir(name[-1], dir_fd=self._parent(name))
            self._directories.pop(name, None)
        else:
            os.unlink(name[-1], dir_fd=self._parent(name))
        self._layer.discard(name)

    def _attributes(self, fd: int, name: Name, metadata: Metadata) -> None:
        for key, value in metadata.attributes.items():
            if private_attribute(key):
                continue
            try:
                os.setxattr(fd, key, value)
            except OSError as error:
                if error.errno in (errno.EOPNOTSUPP, errno.EINVAL, errno.EPERM, errno.ERANGE):
                    raise hostile(b"/".join(name), f"has an attribute {key!r} that cannot be stored") from None
                raise


def _is_whiteout(status: os.stat_result) -> bool:
    return stat.S_ISCHR(status.st_mode) and status.st_rdev == _WHITEOUT


def _times(metadata: Metadata) -> tuple[int, int]:
    moment = min(max(metadata.mtime_ns, 0), 2**33 * 10**9)  # an image holds no times before 1970
    return (moment, moment)


def _write_at(fd: int, piece: Piece) -> None:
    view = memoryview(piece.data)
    offset = piece.offset
    while view:
        written = os.pwrite(fd, view, offset)
        view, offset = view[written:], offset + written
