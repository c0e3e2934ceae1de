"""What a sandbox changed: its upper directory, walked by a helper that can do nothing else.

The content is hostile: the walk happens in `dsec-runtime helper walk`, chrooted into the upper, with one capability.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import msgspec
from blake3 import blake3

from dsec.protocol.errors import ErrorKind, Fault
from dsec.protocol.link import RecordReader
from dsec.protocol.specs import Change, ChangeKind

from .helpers import helper

_READ = 256 * 1024


class _Record(msgspec.Struct):
    """One map of the helper's stream: an entry, a piece of the last entry's data, or the end."""

    path: bytes = b""
    kind: ChangeKind | None = None
    mode: int = 0
    uid: int = 0
    gid: int = 0
    size: int = 0
    target: bytes | None = None
    opaque: bool = False
    links: int = 1
    xattrs: bool = False
    data: bytes | None = None
    end: bool = False
    truncated: bool = False


async def walk(
    runtime: Path,
    upper: int,
    include: Sequence[str],
    max_bytes: int,
    contents: Sequence[str] = (),
    bare: Sequence[str] = (),
) -> AsyncIterator[Change | bool]:
    """Changes in order of path; the last item is a bool, whether data was left out. Closes `upper`.

    contents: globs of the files whose data is read, () for all; bare: of those whose data is not. Data that is not asked for is
    not missing.
    """
    arguments = ["walk", "--dir-fd", str(upper), "--data", str(max_bytes)]
    for option, patterns in (("--include", include), ("--contents", contents), ("--bare", bare)):
        for pattern in patterns:
            arguments += [option, pattern]
    async with AsyncExitStack() as stack:
        try:
            process = await stack.enter_async_context(helper(runtime, arguments, (upper,)))
        finally:
            os.close(upper)
        ended = False
        async for item in _changes(process.stdout):
            ended = isinstance(item, bool)
            yield item
        if not ended or await process.wait():
            await process.wait()
            raise Fault(
                ErrorKind.INTERNAL,
                f"the changes could not be read: {process.said() or 'the helper died'}",
                retryable=True,
            )


async def _changes(stdout: asyncio.StreamReader) -> AsyncIterator[Change | bool]:
    """Puts entries and the pieces of their data together."""
    entry: _Record | None = None
    pieces: list[bytes] = []
    async for record in _records(stdout):
        if record.data is not None:
            pieces.append(record.data)
            continue
        if entry is not None:
            yield _change(entry, pieces)
        entry, pieces = (None if record.end else record), []
        if record.end:
            yield record.truncated
            return


async def _records(stdout: asyncio.StreamReader) -> AsyncIterator[_Record]:
    reader = RecordReader(_Record)
    while piece := await stdout.read(_READ):
        for record in reader.feed(piece):
            yield record


def _change(entry: _Record, pieces: list[bytes]) -> Change:
    assert entry.kind is not None
    data = b"".join(pieces)
    complete = entry.kind is ChangeKind.WRITE and len(data) == entry.size
    return Change(
        path=entry.path,
        kind=entry.kind,
        mode=entry.mode,
        uid=entry.uid,
        gid=entry.gid,
        size=entry.size,
        digest=blake3(data).hexdigest() if complete else "",
        data=data if complete else None,
        target=entry.target,
        opaque=entry.opaque,
        links=entry.links,
        xattrs=entry.xattrs,
    )
