"""Files of the platform inside a sandbox: written when rules become active, known to `changes`, removed with the rules.

Nothing of the image's or the agent's is overwritten: a file counts as ours only when its first lines say so.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping

import structlog
from blake3 import blake3

from dsec.protocol.errors import ErrorKind, Fault
from dsec.protocol.link import Data, LinkClient
from dsec.protocol.specs import Change, ChangeKind, FileInfo, FileKind

from .reach import is_ours
from .sandbox import Sandbox

_ROOT = "0"
_READ = 64 * 1024
_log = structlog.get_logger("edge")


class Residue:
    def __init__(self) -> None:
        self._files: dict[bytes, bytes] = {}  # path relative to / -> content
        self._directories: dict[bytes, tuple[int, int, int]] = {}  # -> mode, uid, gid before we wrote there

    def know_directory(self, path: bytes, mode: int, uid: int, gid: int) -> None:
        """How a directory looked before others of the platform wrote there."""
        self._directories.setdefault(path, (mode, uid, gid))

    async def write(self, sandbox: Sandbox, contents: Mapping[str, bytes | None]) -> None:
        """Makes the files so, a None gone. What cannot be written is left out: the variables say the same."""
        link = await sandbox.link()
        await asyncio.gather(*(self._one(link, path, data) for path, data in contents.items()))

    async def _one(self, link: LinkClient, path: str, data: bytes | None) -> None:
        relative = path.lstrip("/").encode()
        try:
            if data is not None and not await self._look_at_parents(link, path):
                return
            held = await _content(link, path)
            if held is not None and not is_ours(held):
                return
            if held == data:
                if data is not None:
                    self._files[relative] = data  # by an earlier edge
                return
            if data is None:
                await link.call("fs.remove", {"path": path.encode(), "recursive": False, "user": _ROOT})
                self._files.pop(relative, None)
                return
            stream = await link.open("fs.write", {"path": path.encode(), "mode": 0o644, "owner": None, "user": _ROOT})
            try:
                await stream.send(data)
                await stream.end()
                await stream.result()
            finally:
                stream.cancel()
            self._files[relative] = data
        except Fault as fault:
            if fault.body.kind is ErrorKind.CONNECTION_LOST:
                raise
            _log.info("a file of the network's was not written", path=path, error=fault.body.message)

    async def _look_at_parents(self, link: LinkClient, path: str) -> bool:
        """Does the directory exist? Remembers how it and those above it look, before they are copied up."""
        parts = path.strip("/").split("/")[:-1]
        for depth in range(1, len(parts) + 1):
            where = "/".join(parts[:depth]).encode()
            if where in self._directories:
                continue
            try:
                params = {"path": b"/" + where, "follow": False, "user": _ROOT}
                info = await link.call("fs.stat", params, FileInfo)
            except Fault as fault:
                if fault.body.kind is ErrorKind.CONNECTION_LOST:
                    raise
                return False
            if info.kind is not FileKind.DIRECTORY:
                return False
            self._directories[where] = (info.mode, info.uid, info.gid)
        return True

    def _is_file_of_ours(self, change: Change) -> bool:
        data = self._files.get(change.path)
        if data is None or change.kind is not ChangeKind.WRITE or change.size != len(data):
            return False
        return not change.digest or change.digest == blake3(data).hexdigest()

    async def without(self, changes: AsyncIterator[Change | bool]) -> AsyncIterator[Change | bool]:
        """Changes but ours: our files, and directories that are there only for them."""
        held: list[Change] = []
        async for item in changes:
            if isinstance(item, bool):
                yield item
                continue
            held = [parent for parent in held if item.path.startswith(parent.path + b"/")]
            if self._is_file_of_ours(item):
                continue
            if self._is_directory_as_it_was(item):
                held.append(item)
                continue
            for parent in held:
                yield parent
            held = []
            yield item

    def _is_directory_as_it_was(self, change: Change) -> bool:
        before = self._directories.get(change.path)
        if before is None or change.kind is not ChangeKind.MKDIR or change.opaque:
            return False
        return before == (change.mode, change.uid, change.gid)


async def _content(link: LinkClient, path: str) -> bytes | None:
    """The beginning of a file; None when there is none."""
    stream = await link.open("fs.read", {"path": path.encode(), "offset": 0, "length": _READ, "user": _ROOT})
    held = bytearray()
    try:
        async for item in stream:
            if isinstance(item, Data):
                held += item.data
        await stream.result()
    except Fault as fault:
        if fault.body.kind is ErrorKind.FILE_NOT_FOUND:
            return None
        raise
    finally:
        stream.cancel()
    return bytes(held)
