"""Records of an edge's answer: gathered into one JSON value, or passed on a line at a time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import TypeVar

import msgspec

from dsec.protocol.errors import ErrorKind, Fault
from dsec.protocol.link import MAX_RECORD, Data, LinkStream, RecordReader
from dsec.protocol.specs import Change

from .exchange import encode, error_line

T = TypeVar("T")
SILENCE_S = 15.0  # shorter than any client or proxy waits
MAX_COLLECTED = 64 * 1024 * 1024
MAX_CHANGE = 257 * 1024 * 1024  # what the edge lets a set of changes carry, and a path


def _limit(kind: type) -> int:
    """Bytes of one record: a change carries the contents of a whole file."""
    return MAX_CHANGE if kind is Change else MAX_RECORD


class ListReply(msgspec.Struct, frozen=True):
    """The REPLY behind a stream of records."""

    count: int
    truncated: bool = False


async def collect(stream: LinkStream, kind: type[T]) -> tuple[list[T], ListReply]:
    """Every record at once. Fault too_large beyond 64 MiB."""
    reader = RecordReader(kind, _limit(kind))
    found: list[T] = []
    size = 0
    try:
        async for item in stream:
            if isinstance(item, Data):
                size += len(item.data)
                if size > MAX_COLLECTED:
                    raise Fault(
                        ErrorKind.TOO_LARGE,
                        f"the answer is over {MAX_COLLECTED} bytes",
                        hint="ask for less (a smaller depth, narrower globs, a smaller max_bytes) or for NDJSON",
                        limit=MAX_COLLECTED,
                    )
                found.extend(reader.feed(item.data))
        reply = await stream.result(ListReply)
        _complete(len(found), reply)
        return found, reply
    finally:
        stream.cancel()


async def lines(stream: LinkStream, kind: type[T], request_id: str) -> AsyncGenerator[bytes, None]:
    """NDJSON: a line each, then `{"end": ListReply}` or `{"error": ...}`, so that a cut answer is never taken for a whole one."""
    reader = RecordReader(kind, _limit(kind))
    count = 0
    try:
        async for item in stream:
            if isinstance(item, Data):
                records = list(reader.feed(item.data))
                count += len(records)
                if records:
                    yield b"".join(encode(record) + b"\n" for record in records)
        reply = await stream.result(ListReply)
        _complete(count, reply)
        yield encode({"end": reply}) + b"\n"
    except Fault as fault:
        yield error_line(fault.body, request_id)


async def lines_from(stream: LinkStream, kind: type[T], request_id: str) -> AsyncGenerator[bytes, None]:
    """As `lines`, once there is something: a refusal before it is raised and gets a status of its own."""
    while not stream.has_arrived:
        if stream.ended:
            await stream.result()
            break
        await stream.change()
    return lines(stream, kind, request_id)


async def kept_alive(source: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    """The same lines, and an empty one when there was none for a while: who waits knows that the connection is there."""
    coming: asyncio.Future[bytes | None] = asyncio.ensure_future(anext(source, None))
    try:
        while True:
            done, _ = await asyncio.wait((coming,), timeout=SILENCE_S)
            if not done:
                yield b"\n"
            elif (line := coming.result()) is None:
                return
            else:
                yield line
                coming = asyncio.ensure_future(anext(source, None))
    finally:
        coming.cancel()
        await asyncio.gather(coming, return_exceptions=True)
        await source.aclose()


def _complete(found: int, reply: ListReply) -> None:
    """A list that came without an error but not whole must not pass for a shorter one."""
    if found != reply.count:
        raise Fault(ErrorKind.INTERNAL, f"{found} records arrived of {reply.count} announced")
