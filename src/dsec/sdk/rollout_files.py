"""`rollout.files`: the same methods as `sandbox.files`, each a step."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from dsec.protocol.rollouts import StepRecord
from dsec.protocol.specs import FileInfo, FileKind

from . import archive, flow
from .archive import Downloaded
from .errors import DSecError, FileInvalid, FileMissing, InvalidRequest, NotADirectory
from .files import MAX_READ, Files, LocalPath, RemotePath
from .flow import Flow
from .replay import Contents
from .spool import Content, content_of, digest_of_file, digest_of_tree, spool
from .steps import Asked, Steps, records_of, request_of, result_of
from .transport import Target

T = TypeVar("T")
_MAX_PATH = 4096
_DEEPEST = 4096


class _Size(msgspec.Struct):
    size: int


class RolloutFiles(Files):
    """Files of a rollout's sandbox. Every method is a step but `watch`, which is not recorded.

    What is written is part of the request by its digest: an async iterable is therefore read to its end first, a directory
    counts by names, modes and contents, not by times.
    """

    def __init__(self, steps: Steps) -> None:
        super().__init__(steps.transport, steps.target)
        self._steps = steps

    def _at(self, target: Target) -> Files:
        return Files(self._transport, target)

    def read(
        self, path: RemotePath, *, offset: int = 0, length: int | None = None, user: str | None = None
    ) -> Coroutine[Any, Any, bytes]:
        """Contents of a regular file, or a range of them; TooLarge past 1 GiB.

        Contents too long for the log are read once more on replay; ReplayDivergence when they are not the same then.
        """
        return flow.whole(self._steps, self._contents(path, offset, length, user, MAX_READ), lambda data: data)

    def read_text(
        self, path: RemotePath, *, encoding: str = "utf-8", errors: str = "strict", user: str | None = None
    ) -> Coroutine[Any, Any, str]:
        """Contents as text."""
        contents = self._contents(path, 0, None, user, MAX_READ)
        return flow.whole(self._steps, contents, lambda data: data.decode(encoding, errors))

    def stream(
        self, path: RemotePath, *, offset: int = 0, length: int | None = None, user: str | None = None
    ) -> AsyncIterator[bytes]:
        """Contents in pieces, as they come. They are asked for when this is called, and the step goes on without a reader."""
        return flow.pieces(self._steps, self._contents(path, offset, length, user, None))

    def _contents(self, path: RemotePath, offset: int, length: int | None, user: str | None, most: int | None) -> Flow:
        request = request_of("fs.read", {"path": _path(path), "offset": offset, "length": length, "user": user})
        return Flow(request, lambda target: self._at(target)._stream(path, offset, length, user, most=most), most)

    def write(
        self,
        path: RemotePath,
        data: bytes | bytearray | memoryview | str | AsyncIterable[bytes],
        *,
        mode: int | None = None,
        owner: str | None = None,
        user: str | None = None,
    ) -> Coroutine[Any, Any, int]:
        """Replaces the file atomically and makes its parents; how many bytes there are now. Arguments as of `Sandbox.files`."""
        params = {"path": _path(path), "mode": _mode(mode), "owner": owner, "user": user}
        if isinstance(data, str):
            data = data.encode()
        if isinstance(data, bytes | bytearray | memoryview):
            whole = bytes(data)
            return self._steps.step(
                lambda _: Asked(
                    request_of("fs.write", {**params, "data": content_of(whole)}),
                    lambda target: self._at(target).write(path, whole, mode=mode, owner=owner, user=user),
                    _size,
                )
            )
        pieces = data

        async def read() -> Asked[int]:
            spooled = await spool(pieces)
            return Asked(
                request_of("fs.write", {**params, "data": spooled.content}),
                lambda target: self._at(target).write(path, spooled.pieces(), mode=mode, owner=owner, user=user),
                _size,
            )

        return self._steps.later(lambda _: read())

    def list(self, path: RemotePath, *, depth: int = 1, user: str | None = None) -> Coroutine[Any, Any, list[FileInfo]]:
        """Entries of a directory, depth levels down; symlinks are not followed. Paths are bytes."""
        if not 1 <= depth <= _DEEPEST:
            raise InvalidRequest(f"depth={depth} is not between 1 and {_DEEPEST}")
        params = {"path": _path(path), "depth": depth, "user": user}
        return self._step("fs.list", params, lambda files: files.list(path, depth=depth, user=user), _entries)

    def stat(self, path: RemotePath, *, follow: bool = True, user: str | None = None) -> Coroutine[Any, Any, FileInfo]:
        """Attributes of one file; follow=False describes a symlink itself."""
        params = {"path": _path(path), "follow": follow, "user": user}
        return self._step("fs.stat", params, lambda files: files.stat(path, follow=follow, user=user), _info)

    def exists(self, path: RemotePath, *, user: str | None = None) -> Coroutine[Any, Any, bool]:
        """Whether something is there (a dangling symlink is not)."""
        request = request_of("fs.stat", {"path": _path(path), "follow": True, "user": user})

        async def live(target: Target) -> bool:
            await self._at(target).stat(path, user=user)
            return True

        return self._steps.step(lambda _: Asked(request, live, lambda *_: True, _not_there))

    def mkdir(
        self, path: RemotePath, *, mode: int = 0o755, parents: bool = True, user: str | None = None
    ) -> Coroutine[Any, Any, None]:
        """Makes a directory; one that is there already is fine with parents=True, else FileExistsError."""
        params = {"path": _path(path), "mode": _mode(mode), "parents": parents, "user": user}
        return self._step(
            "fs.mkdir", params, lambda files: files.mkdir(path, mode=mode, parents=parents, user=user), _nothing
        )

    def move(self, source: RemotePath, target: RemotePath, *, user: str | None = None) -> Coroutine[Any, Any, None]:
        """Renames; a file at the target is replaced."""
        params = {"source": _path(source), "target": _path(target), "user": user}
        return self._step("fs.move", params, lambda files: files.move(source, target, user=user), _nothing)

    def remove(
        self, path: RemotePath, *, recursive: bool = False, user: str | None = None
    ) -> Coroutine[Any, Any, None]:
        """Removes a file, a symlink, an empty directory, or with recursive a whole tree."""
        params = {"path": _path(path), "recursive": recursive, "user": user}
        return self._step(
            "fs.remove", params, lambda files: files.remove(path, recursive=recursive, user=user), _nothing
        )

    def upload(self, local: LocalPath, remote: RemotePath, *, user: str | None = None) -> Coroutine[Any, Any, None]:
        """As of `Sandbox.files`. On replay the local file or directory must be there, and the same."""
        source, path = os.fsencode(local), _path(remote)

        async def read() -> Asked[None]:
            kind, params = await asyncio.to_thread(_uploaded, source, path)
            return Asked(
                request_of(kind, {**params, "user": user}),
                lambda target: self._at(target).upload(local, remote, user=user),
                _nothing,
            )

        return self._steps.later(lambda _: read())

    def download(
        self, remote: RemotePath, local: LocalPath, *, user: str | None = None
    ) -> Coroutine[Any, Any, Downloaded]:
        """As of `Sandbox.files`; two steps, of which the first looks what it is."""
        looked = self.stat(remote, user=user)
        return self._steps.begun(self._downloaded(looked, self._steps.next(), remote, Path(os.fsdecode(local)), user))

    async def _downloaded(
        self, looked: Coroutine[Any, Any, FileInfo], number: int, remote: RemotePath, local: Path, user: str | None
    ) -> Downloaded:
        tar = Flow(
            request_of("fs.tar", {"path": _path(remote), "user": user}),
            lambda target: self._at(target)._packed(remote, user),
        )
        try:
            found = await looked
        except DSecError:  # the second step is made all the same: its number is given
            with suppress(DSecError):
                async for _ in flow.of_step(self._steps, number, tar):
                    pass
            raise
        if found.kind is FileKind.DIRECTORY:
            return await archive.unpack_tree(flow.of_step(self._steps, number, tar), local)
        contents = self._contents(remote, 0, None, user, None)
        return await archive.write_file(flow.of_step(self._steps, number, contents), local)

    def _step(
        self, kind: str, params: Mapping[str, object], ask: _Ask[T], recorded: _Recorded[T]
    ) -> Coroutine[Any, Any, T]:
        return self._steps.step(
            lambda _: Asked(request_of(kind, params), lambda target: ask(self._at(target)), recorded)
        )


_Ask = Callable[[Files], Awaitable[T]]
_Recorded = Callable[[StepRecord, Contents], T]


def _path(path: RemotePath) -> bytes:
    """FileInvalid for what names no file anywhere: that is no step."""
    name = os.fsencode(path)
    if not name or len(name) > _MAX_PATH or b"\0" in name:
        what = "empty" if not name else f"longer than {_MAX_PATH} bytes" if len(name) > _MAX_PATH else "with a NUL byte"
        raise FileInvalid(f"a path that is {what} names no file")
    return name


def _mode(mode: int | None) -> int | None:
    if mode is not None and not 0 <= mode <= 0o7777:
        raise InvalidRequest(f"mode={mode} is not permission bits")
    return mode


def _uploaded(source: bytes, path: bytes) -> tuple[str, dict[str, object]]:
    """Kind and parameters of the step that sends it; see `Files.upload`."""
    if os.path.islink(source):
        parent, name = os.path.split(path.rstrip(b"/"))
        return "fs.untar", {"path": parent or b".", "name": name, "symlink": os.readlink(source)}
    if os.path.isdir(source):
        return "fs.untar", {"path": path, "tree": digest_of_tree(source)}
    digest, size, mode = digest_of_file(source)
    content: Content = {"blake3": digest, "size": size}
    return "fs.write", {"path": path, "mode": mode & 0o777, "data": content}


def _size(record: StepRecord, _: Contents) -> int:
    return result_of(record, _Size).size


def _info(record: StepRecord, _: Contents) -> FileInfo:
    return result_of(record, FileInfo)


def _nothing(_: StepRecord, __: Contents) -> None:
    return None


def _entries(record: StepRecord, contents: Contents) -> list[FileInfo]:
    return records_of(record, contents, FileInfo)


def _not_there(error: DSecError) -> bool:
    if isinstance(error, FileMissing | NotADirectory):
        return False
    raise error
