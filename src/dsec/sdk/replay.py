"""Recorded steps of a rollout, fetched ahead in pages so that replaying them costs no round trips (report, 6).

What is held is bounded: reading a page stops when enough lies here, and goes on when that was used. A long content is not part
of its record and is asked for by its digest when its step is.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping

from blake3 import blake3

from dsec.protocol.rollouts import Blob, StepRecord

from .errors import ConnectionLost, DSecError, InternalError
from .transport import NDJSON, Transport, chunks, cut, decode, json_lines

PAGE = 1000  # steps asked for at once
MOST = 8 * 1024 * 1024  # bytes of records, as they came, that are held before reading stops
LESS = MOST // 2  # fetching goes on when no more than this is left
_RETRY_S = 0.2
_END = b'{"end":'

Contents = Mapping[str, bytes]
_NOTHING: Contents = {}


class Replay:
    """Steps of one rollout, from `start` to before `steps`. Each is taken once."""

    def __init__(self, transport: Transport, rollout: str, steps: int, *, start: int = 0) -> None:
        self._transport = transport
        self._path = f"/v1/rollouts/{rollout}"
        self._steps = steps
        self._held: dict[int, tuple[StepRecord, int]] = {}
        self._size = 0
        self._next = start
        self._page: asyncio.Task[None] | None = None
        self._broken: DSecError | None = None

    def take_held(self, number: int) -> StepRecord | None:
        """The step, if it is here already."""
        found = self._held.pop(number, None)
        if found is None:
            return None
        self._size -= found[1]
        if self._size <= LESS:
            self._fetch()
        return found[0]

    async def take(self, number: int) -> StepRecord:
        """The step. What is wrong with the log from there on is raised, such as damage."""
        while (record := self.take_held(number)) is None:
            if self._broken is not None:
                raise self._broken
            self._fetch()
            assert self._page is not None, f"step {number} was taken before"
            await asyncio.wait((self._page,))
        return record

    def place_of(self, digest: str) -> int | None:
        """Which of the steps that lie here is this request."""
        return next((number for number, (record, _) in self._held.items() if record.digest == digest), None)

    def start(self) -> None:
        """Begins to fetch."""
        self._fetch()

    def close(self) -> None:
        self._steps = 0
        self._held.clear()
        if self._page is not None:
            self._page.cancel()

    # -- pages --

    def _fetch(self) -> None:
        if self._page is None and self._next < self._steps and self._broken is None:
            self._page = asyncio.get_running_loop().create_task(self._fetched())
            self._page.add_done_callback(self._arrived)

    def _arrived(self, page: asyncio.Task[None]) -> None:
        self._page = None
        if not page.cancelled() and (error := page.exception()) is not None:
            self._broken = error if isinstance(error, DSecError) else InternalError(f"unreadable steps: {error}")
            self._broken.__cause__ = error.__cause__

    async def _fetched(self) -> None:
        """One page, or the part of it that there is room for. At least one step."""
        deadline: float | None = None
        first = self._next
        while self._next == first:
            try:
                await self._read()
                if self._next == first:
                    raise InternalError(
                        f"the service has {first} steps of {self._path} where it said {self._steps}",
                        hint="is its log damaged? `dsec rollout show` says so",
                    )
            except ConnectionLost:
                deadline = deadline or time.monotonic() + self._transport.request_timeout
                if time.monotonic() > deadline:
                    raise
                await asyncio.sleep(_RETRY_S)

    async def _read(self) -> None:
        limit = min(PAGE, self._steps - self._next)
        query = {"from": str(self._next), "limit": str(limit)}
        async with self._transport.stream(
            "GET", f"{self._path}/steps", query=query, accept=NDJSON, again=True
        ) as response:
            async for line in json_lines(response):
                if line.startswith(_END):
                    return
                record = decode(line, StepRecord)
                if record.step != self._next:
                    raise InternalError(f"step {record.step} of {self._path} came in the place of {self._next}")
                self._held[self._next] = (record, len(line))
                self._next += 1
                self._size += len(line)
                if self._next == self._steps or self._size >= MOST:
                    return

    # -- contents --

    async def contents(self, outputs: Mapping[str, Blob]) -> Contents:
        """All that is kept of a step's outputs."""
        return {name: await self.content(blob) for name, blob in outputs.items()}

    async def content(self, blob: Blob) -> bytes:
        """What is kept of one content. NotFound names a missing one."""
        if blob.data is not None or blob.size == 0:
            return blob.data or b""
        deadline: float | None = None
        while True:
            try:
                return b"".join([piece async for piece in self.pieces(blob)])
            except ConnectionLost:
                deadline = deadline or time.monotonic() + self._transport.request_timeout
                if time.monotonic() > deadline:
                    raise
                await asyncio.sleep(_RETRY_S)

    async def pieces(self, blob: Blob) -> AsyncIterator[bytes]:
        """The same as it comes; what is not what the digest says is an error."""
        if blob.data is not None or blob.size == 0:
            yield blob.data or b""
            return
        hasher = blake3()
        size = 0
        async with self._transport.stream("GET", f"{self._path}/blobs/{blob.digest}", again=True) as response:
            async for piece in chunks(response):
                hasher.update(piece)
                size += len(piece)
                yield piece
        if size < blob.size:
            raise cut(EOFError(f"{size} of {blob.size} bytes"), None)
        if hasher.hexdigest() != blob.digest:
            raise InternalError(
                f"content {blob.digest} of {self._path} is damaged: it is {hasher.hexdigest()}",
                hint="the step cannot be replayed; the log's disk may be failing",
            )


def inline(outputs: Mapping[str, Blob]) -> Contents | None:
    """The contents that came with a record, or None where one of them is yet to be fetched."""
    if not outputs:
        return _NOTHING
    found: dict[str, bytes] = {}
    for name, blob in outputs.items():
        if blob.data is None and blob.size:
            return None
        found[name] = blob.data or b""
    return found
