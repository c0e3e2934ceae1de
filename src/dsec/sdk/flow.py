"""Steps whose result is a content: a file, a range of one, an archive. They pass through in pieces, live or from the log."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

from blake3 import blake3

from dsec.protocol.rollouts import Blob, RolloutState, StepRecord

from .errors import ConnectionLost, DSecError, ReplayDivergence, TooLarge
from .steps import Patience, Request, Steps, given, refused
from .transport import Target

T = TypeVar("T")
_AHEAD = 16  # pieces that wait for their reader


@dataclass(frozen=True, slots=True)
class Flow:
    """pieces: all of the content, from its beginning, as the service gives it for the step or, without one, now.

    most: bytes that the caller takes.
    """

    request: Request
    pieces: Callable[[Target], AsyncIterator[bytes]]
    most: int | None = None


def whole(steps: Steps, flow: Flow, then: Callable[[bytes], T]) -> Coroutine[Any, Any, T]:
    """What `then` makes of the next step's content."""
    number = steps.next()
    record = steps.replay.take_held(number)
    if record is None:
        return steps.begun(_joined(of_step(steps, number, flow), then))
    blob = record.outputs.get("data")
    if record.error is not None or blob is None or blob.data is None or blob.size != blob.total:
        return steps.begun(_joined(of_step(steps, number, flow, record), then))
    try:
        steps.compare(record, flow.request)
        steps.answers(record)
        return given(number, then(blob.data))
    except (DSecError, ValueError) as error:  # undecodable text, too
        return refused(error)


def pieces(steps: Steps, flow: Flow) -> AsyncIterator[bytes]:
    """The next step's content as it comes. It is asked for at once; who reads slowly holds it up."""
    number = steps.next()
    queue: asyncio.Queue[bytes] = asyncio.Queue(_AHEAD)
    task = asyncio.get_running_loop().create_task(_pump(of_step(steps, number, flow), queue))
    steps.watched(task)
    return _drained(queue, task)


async def _joined(source: AsyncIterator[bytes], then: Callable[[bytes], T]) -> T:
    return then(b"".join([piece async for piece in source]))


async def _pump(source: AsyncIterator[bytes], queue: asyncio.Queue[bytes]) -> None:
    async for piece in source:
        await queue.put(piece)


async def _drained(queue: asyncio.Queue[bytes], task: asyncio.Task[None]) -> AsyncIterator[bytes]:
    try:
        while not (task.done() and queue.empty()):
            if queue.empty():
                getting = asyncio.ensure_future(queue.get())
                await asyncio.wait((getting, task), return_when=asyncio.FIRST_COMPLETED)
                if not getting.done():
                    getting.cancel()
                    continue
                yield getting.result()
            else:
                yield queue.get_nowait()
        await task
    finally:
        task.cancel()


async def of_step(steps: Steps, number: int, flow: Flow, record: StepRecord | None = None) -> AsyncIterator[bytes]:
    """The content of a step that has its number, and its record perhaps."""
    if record is None and number < steps.info.steps:
        record = await steps.replay.take(number)
    if record is not None:
        steps.compare(record, flow.request)
        if record.done_at is not None:
            async for piece in _kept(steps, record, flow):
                yield piece
            return
    target = await steps.live(number, flow.request)
    seen, patience = 0, Patience(steps.transport)
    while True:
        try:
            async for piece in _behind(seen, flow.pieces(target)):
                seen += len(piece)
                patience.renew()
                yield piece
            return
        except ConnectionLost as error:
            await patience.wait(error)
        except DSecError as error:
            raise await steps.seen(number, error) from error.__cause__


async def _behind(seen: int, source: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Without the first `seen` bytes."""
    async for piece in source:
        if seen < len(piece):
            yield piece[seen:]
        seen = max(0, seen - len(piece))


async def _kept(steps: Steps, record: StepRecord, flow: Flow) -> AsyncIterator[bytes]:
    steps.answers(record)
    blob = record.outputs.get("data")
    if blob is None:
        return
    if flow.most is not None and blob.total > flow.most:
        raise TooLarge(f"step {record.step} has {blob.total} bytes, more than {flow.most}", hint="use files.stream")
    source = steps.replay.pieces(blob) if blob.size == blob.total else _read_again(steps, record, blob, flow)
    async for piece in source:
        yield piece


async def _read_again(steps: Steps, record: StepRecord, blob: Blob, flow: Flow) -> AsyncIterator[bytes]:
    """A content too long to be kept is read once more. That it is not what it was is known, and said, at its end."""
    what = f"the {blob.total} bytes of step {record.step} ({record.kind}) were too many to be kept"
    if steps.info.state is not RolloutState.OPEN:
        raise steps.unavailable(record.step, f"{what}, and sandbox {steps.info.sandbox} is gone")
    check = _Check(blob)
    async for piece in flow.pieces(steps.target):
        check.take(piece)
        yield piece
    if not check.holds():
        error = ReplayDivergence(
            f"{what}, and read again they are not the same: {check.size} bytes, blake3 {check.found()[:16]}... "
            f"where {blob.total} bytes, {(blob.whole or blob.digest)[:16]}... were recorded",
            hint="it was changed by a later step or from outside; replay cannot go on from here",
            details={"step": record.step, "rollout": steps.info.id, "recorded": bytes(record.request).decode()[:2000]},
        )
        steps.end(error)
        raise error


class _Check:
    """Whether a content is the recorded one."""

    def __init__(self, blob: Blob) -> None:
        self._blob = blob
        self._hasher = blake3()
        self.size = 0

    def take(self, piece: bytes) -> None:
        self._hasher.update(piece)
        self.size += len(piece)

    def found(self) -> str:
        return self._hasher.hexdigest()

    def holds(self) -> bool:
        return self.size == self._blob.total and self.found() == (self._blob.whole or self._blob.digest)
