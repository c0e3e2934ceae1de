"""What is to be sent by a step, read whole first: its digest is part of the request, and it may have to be sent again.

Contents of some size lie in an unnamed temporary file, so that memory stays bounded.
"""

from __future__ import annotations

import asyncio
import os
import stat
import tempfile
from collections.abc import AsyncIterable, AsyncIterator, Iterator

from blake3 import blake3

_IN_MEMORY = 8 * 1024 * 1024
_PIECE = 1024 * 1024

Content = dict[str, str | int]


def content_of(data: bytes) -> Content:
    """How a request names a content."""
    return {"blake3": blake3(data).hexdigest(), "size": len(data)}


class Spooled:
    """Bytes that can be read again and again. Closed when nobody has it any more."""

    def __init__(self) -> None:
        self._file = tempfile.SpooledTemporaryFile(max_size=_IN_MEMORY)  # noqa: SIM115 - it lives as long as this
        self._hasher = blake3()
        self.size = 0

    def __del__(self) -> None:
        self._file.close()

    @property
    def content(self) -> Content:
        return {"blake3": self._hasher.hexdigest(), "size": self.size}

    async def append(self, data: bytes) -> None:
        self._hasher.update(data)
        self.size += len(data)
        if self.size > _IN_MEMORY:
            await asyncio.to_thread(self._file.write, data)
        else:
            self._file.write(data)

    async def pieces(self) -> AsyncIterator[bytes]:
        """All of it. One reader at a time."""
        self._file.seek(0)
        while piece := await asyncio.to_thread(self._file.read, _PIECE):
            yield piece

    def whole(self) -> bytes:
        self._file.seek(0)
        return self._file.read()


async def spool(source: AsyncIterable[bytes]) -> Spooled:
    """Reads it to its end."""
    spooled = Spooled()
    async for piece in source:
        await spooled.append(bytes(piece))
    return spooled


def digest_of_file(path: bytes) -> tuple[str, int, int]:
    """(blake3, size, permission bits) of a local file."""
    hasher = blake3()
    with open(path, "rb", buffering=0) as file:
        found = os.fstat(file.fileno())
        while piece := file.read(_PIECE):
            hasher.update(piece)
    return hasher.hexdigest(), found.st_size, stat.S_IMODE(found.st_mode)


def digest_of_tree(top: bytes) -> str:
    """Of all that lies below a local directory: names, kinds, permission bits, targets and contents. Not of times and owners,
    which differ from one machine, or one check-out, to the next."""
    hasher = blake3()
    for name, path in _below(top, b""):
        found = os.lstat(path)
        mode = stat.S_IMODE(found.st_mode)
        if stat.S_ISLNK(found.st_mode):
            line = (b"l", name, os.readlink(path))
        elif stat.S_ISDIR(found.st_mode):
            line = (b"d", name, b"%o" % mode)
        elif stat.S_ISREG(found.st_mode):
            line = (b"f", name, b"%o %s" % (mode, digest_of_file(path)[0].encode()))
        else:
            line = (b"o", name, b"%o" % stat.S_IFMT(found.st_mode))
        for part in line:
            hasher.update(b"%d:" % len(part))
            hasher.update(part)
    return hasher.hexdigest()


def _below(top: bytes, prefix: bytes) -> Iterator[tuple[bytes, bytes]]:
    for name in sorted(os.listdir(top)):
        path = os.path.join(top, name)
        yield prefix + name, path
        if os.path.isdir(path) and not os.path.islink(path):
            yield from _below(path, prefix + name + b"/")
