"""A sandbox's files: exact bytes, exact names, typed errors, nothing held whole that is streamed."""

from __future__ import annotations

import asyncio
import base64
import os
import stat
import time
from collections.abc import AsyncIterable, AsyncIterator, Callable
from pathlib import Path

import msgspec

from dsec.protocol.specs import FileChange, FileInfo, FileKind

from . import archive
from .archive import Downloaded
from .errors import ConnectionLost, FileInvalid, FileMissing, NotADirectory, TooLarge
from .transport import NDJSON, SIZE, Target, Transport, chunks, cut, decode, encode, json_lines

RemotePath = str | bytes | os.PathLike[str]
LocalPath = str | bytes | os.PathLike[str]
_CHUNK = 256 * 1024
_RETRY_S = 0.2


class _Size(msgspec.Struct):
    size: int


MAX_READ = 1024 * 1024 * 1024


class Files:
    """`sandbox.files`. Paths are text, bytes or path objects; relative ones start at the sandbox's working directory.

    user: who acts, by name or id (None: the sandbox's `init_user`); that user's permissions decide, and what is made is
    theirs. Errors are FileError and the builtin of their kind at once (FileNotFoundError, IsADirectoryError, ...).
    """

    def __init__(self, transport: Transport, target: Target) -> None:
        self._transport = transport
        self._target = target
        self._path = f"/v1/sandboxes/{target.sandbox_id}/files"

    async def read(
        self, path: RemotePath, *, offset: int = 0, length: int | None = None, user: str | None = None
    ) -> bytes:
        """Contents of a regular file, or a range of them; TooLarge past 1 GiB, since a sparse file of any size costs an
        agent nothing. `stream` has no such bound."""
        return b"".join([chunk async for chunk in self._stream(path, offset, length, user, most=MAX_READ)])

    async def read_text(
        self, path: RemotePath, *, encoding: str = "utf-8", errors: str = "strict", user: str | None = None
    ) -> str:
        """Contents as text."""
        return (await self.read(path, user=user)).decode(encoding, errors)

    def stream(
        self, path: RemotePath, *, offset: int = 0, length: int | None = None, user: str | None = None
    ) -> AsyncIterator[bytes]:
        """Contents in pieces, as they come, to the length that the file had when it was opened.

        A lost connection goes on behind the last byte.
        """
        return self._stream(path, offset, length, user, most=None)

    async def _stream(
        self, path: RemotePath, offset: int, length: int | None, user: str | None, *, most: int | None
    ) -> AsyncIterator[bytes]:
        """most: TooLarge when there is more. Of a step one attempt is made."""
        deadline = time.monotonic() + self._transport.request_timeout
        begun = offset
        while True:
            query = {**_query(path, user), "offset": str(offset)}
            if length is not None:
                query["length"] = str(length)
            try:
                async with self._transport.stream("GET", self._path, query=query, target=self._target) as response:
                    if most is not None:
                        self._check_size(path, int(response.headers.get(SIZE, 0)), most)
                    async for chunk in chunks(response, self._target):
                        deadline = time.monotonic() + self._transport.request_timeout
                        offset += len(chunk)
                        length = None if length is None else length - len(chunk)
                        if most is not None:
                            self._check_size(path, offset - begun, most)
                        yield chunk
                return
            except ConnectionLost:
                if self._target.step is not None:  # a step is asked for as it was, or it would be another one
                    raise
                if not self._transport.reached or time.monotonic() > deadline:
                    raise
                await asyncio.sleep(_RETRY_S)

    def _check_size(self, path: RemotePath, size: int, most: int) -> None:
        if size > most:
            raise TooLarge(
                f"{os.fsdecode(path)} has more than {most >> 20} MiB",
                hint="read a range of it (offset, length), or use files.stream",
                details={"sandbox_id": self._target.sandbox_id},
            )

    async def write(
        self,
        path: RemotePath,
        data: bytes | bytearray | memoryview | str | AsyncIterable[bytes],
        *,
        mode: int | None = None,
        owner: str | None = None,
        user: str | None = None,
    ) -> int:
        """Replaces the file atomically and makes its parents; how many bytes there are now.

        mode: permission bits (0o644 when new). owner: "user" or "user:group". An async iterable is streamed, and so it is
        not sent again when the connection is lost: the file is then as it was.
        """
        query = _query(path, user)
        if mode is not None:
            query["mode"] = f"{mode:o}"
        if owner is not None:
            query["owner"] = owner
        if isinstance(data, str):
            data = data.encode()
        if isinstance(data, bytes | bytearray | memoryview):
            whole = memoryview(data).cast("B")
            return decode(await self._put("", query, lambda: _slices(whole), length=len(whole)), _Size).size
        pieces = data
        return decode(await self._put("", query, lambda: _pieces(pieces), repeat=False), _Size).size

    async def list(self, path: RemotePath, *, depth: int = 1, user: str | None = None) -> list[FileInfo]:
        """Entries of a directory, depth levels down; symlinks are not followed. Paths are bytes."""
        query = {**_query(path, user), "depth": str(depth)}
        found: list[FileInfo] = []
        async with self._transport.stream(
            "GET", f"{self._path}/list", query=query, target=self._target, accept=NDJSON, again=True
        ) as response:
            async for line in json_lines(response, self._target):
                if line.startswith(b'{"end":'):
                    return found
                found.append(decode(line, FileInfo))
        raise cut(EOFError("no end of the list"), self._target)

    async def stat(self, path: RemotePath, *, follow: bool = True, user: str | None = None) -> FileInfo:
        """Attributes of one file; follow=False describes a symlink itself."""
        query = {**_query(path, user), "follow": "true" if follow else "false"}
        return await self._transport.call("GET", f"{self._path}/stat", FileInfo, query=query, target=self._target)

    async def exists(self, path: RemotePath, *, user: str | None = None) -> bool:
        """Whether something is there (a dangling symlink is not)."""
        try:
            await self.stat(path, user=user)
        except (FileMissing, NotADirectory):
            return False
        return True

    async def watch(
        self, path: RemotePath, *, recursive: bool = False, user: str | None = None
    ) -> AsyncIterator[FileChange]:
        """Changes of a directory's entries, or of a file, as they happen; the first, READY, says that none is missed any more.

        recursive: of all below, directories to come included. Ends when what is watched is gone, behind its DELETED.
        LOST: more happened than could be told. ConnectionLost when the connection is: what happens then is not known.
        """
        query = {**_query(path, user), "recursive": "true" if recursive else "false"}
        async with self._transport.stream(
            "GET", f"{self._path}/watch", query=query, target=self._target, accept=NDJSON, again=True
        ) as response:
            async for line in json_lines(response, self._target):
                if line.startswith(b'{"end":'):
                    return
                yield decode(line, FileChange)
        raise cut(EOFError("no end of the changes"), self._target)

    async def mkdir(
        self, path: RemotePath, *, mode: int = 0o755, parents: bool = True, user: str | None = None
    ) -> None:
        """Makes a directory; one that is there already is fine with parents=True, else FileExistsError."""
        asked = {"path": os.fsencode(path), "mode": mode, "parents": parents, "user": user}
        await self._post("mkdir", asked, repeat=parents)

    async def move(self, source: RemotePath, target: RemotePath, *, user: str | None = None) -> None:
        """Renames; a file at the target is replaced."""
        await self._post("move", {"source": os.fsencode(source), "target": os.fsencode(target), "user": user})

    async def remove(self, path: RemotePath, *, recursive: bool = False, user: str | None = None) -> None:
        """Removes a file, a symlink, an empty directory, or with recursive a whole tree."""
        query = {**_query(path, user), "recursive": "true" if recursive else "false"}
        await self._transport.request("DELETE", self._path, query=query, target=self._target, repeat=False)

    async def upload(self, local: LocalPath, remote: RemotePath, *, user: str | None = None) -> None:
        """A local file becomes the file `remote`; a directory's contents come to lie in the directory `remote`, which is made.

        Modes, times, symlinks and hard links are kept, a symlink given as `local` too; owners are not.
        """
        source = os.fsencode(local)
        if os.path.isdir(source) and not os.path.islink(source):
            await self._put("/archive", _query(remote, user), lambda: archive.pack_tree(source))
        elif os.path.islink(source):
            parent, name = os.path.split(os.fsencode(remote).rstrip(b"/"))
            await self._put("/archive", _query(parent or b".", user), lambda: archive.pack_one(source, name))
        else:
            found = await asyncio.to_thread(os.stat, source)
            if not stat.S_ISREG(found.st_mode):
                raise FileInvalid(f"{os.fsdecode(source)} is neither a regular file, a directory nor a symlink")
            query = {**_query(remote, user), "mode": f"{found.st_mode & 0o777:o}"}
            size = found.st_size
            await self._put("", query, lambda: archive.read_file(source, size), length=size)

    async def download(self, remote: RemotePath, local: LocalPath, *, user: str | None = None) -> Downloaded:
        """A file becomes the file `local`; a directory's contents come to lie in the directory `local`, which is made.

        Nothing is written outside `local` and nothing in it leads out: absolute and escaping symlinks, devices and FIFOs
        are left out and named in the result. Owners and set-uid bits are dropped.
        """
        target = Path(os.fsdecode(local))
        if (await self.stat(remote, user=user)).kind is FileKind.DIRECTORY:
            return await archive.unpack_tree(self._packed(remote, user), target)
        return await archive.write_file(self.stream(remote, user=user), target)

    async def _packed(self, path: RemotePath, user: str | None) -> AsyncIterator[bytes]:
        """A tar of a directory."""
        async with self._transport.stream(
            "GET", f"{self._path}/archive", query=_query(path, user), target=self._target, again=True
        ) as response:
            async for chunk in chunks(response, self._target):
                yield chunk

    async def _put(
        self,
        what: str,
        query: dict[str, str],
        make: Callable[[], AsyncIterator[bytes]],
        *,
        length: int | None = None,
        repeat: bool = True,
    ) -> bytes:
        """Sends a body that can be made anew, again when the connection is lost: it replaces, so nothing doubles.

        The time for that begins with the first loss, since a large body may rightly take long.
        """
        deadline: float | None = None
        while True:
            try:
                reply = await self._transport.request(
                    "PUT", self._path + what, query=query, body=make(), length=length, target=self._target, repeat=False
                )
            except ConnectionLost:
                deadline = deadline or time.monotonic() + self._transport.request_timeout
                if not (repeat and self._transport.reached) or time.monotonic() > deadline:
                    raise
                await asyncio.sleep(_RETRY_S)
            else:
                return reply.body

    async def _post(self, what: str, asked: dict[str, object], *, repeat: bool = False) -> None:
        """repeat: it does no harm twice, so a lost connection is no reason to give up."""
        await self._transport.request(
            "POST", f"{self._path}/{what}", body=encode(asked), target=self._target, repeat=repeat
        )


def _query(path: RemotePath, user: str | None) -> dict[str, str]:
    query = {"path_b64": base64.urlsafe_b64encode(os.fsencode(path)).decode()}
    return query if user is None else {**query, "user": user}


async def _slices(view: memoryview) -> AsyncIterator[bytes]:
    for start in range(0, len(view), _CHUNK):
        yield bytes(view[start : start + _CHUNK])


async def _pieces(data: AsyncIterable[bytes]) -> AsyncIterator[bytes]:
    async for piece in data:
        yield bytes(piece)
