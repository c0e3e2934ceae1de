"""Numbering the requests of a rollout, and answering each from the log or live (report, 6).

A step gets its number when its method is called, before anything is awaited, so that steps made at once have the order in which
they were made. From then on it is the rollout's own: a caller that is cancelled leaves it, and it is asked for to its end.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NoReturn, TypeVar

import msgspec

from dsec.protocol.errors import ErrorKind
from dsec.protocol.link import MAX_RECORD, RecordReader
from dsec.protocol.requests import canonical, digest_of, divergence
from dsec.protocol.rollouts import RolloutInfo, RolloutState, StepRecord, StepRef

from .errors import (
    Conflict,
    ConnectionLost,
    DSecError,
    InvalidRequest,
    ReplayDivergence,
    RolloutFenced,
    SandboxUnavailable,
    Unsupported,
    from_body,
)
from .replay import Contents, Replay, inline
from .transport import Target, Transport, decode

T = TypeVar("T")
_RETRY_S = 0.2
_BREATH = 32  # replayed steps after which others of the loop have a turn


class Request(msgspec.Struct, frozen=True):
    """What a step asks for: its canonical form, and what identifies that."""

    text: bytes
    digest: str


def request_of(kind: str, params: Mapping[str, object]) -> Request:
    """InvalidRequest for text that is no Unicode."""
    try:
        text = canonical(kind, params)
    except UnicodeEncodeError as error:
        raise InvalidRequest(f"{error.object[:40]!r} holds a lone surrogate, which is no text") from error
    return Request(text, digest_of(text))


@dataclass(frozen=True, slots=True)
class Asked(Generic[T]):
    """A request that becomes a step.

    live: asks the service, as often as need be; recorded: the result that the log has; otherwise: what an error means, which it
    raises when it means nothing else.
    """

    request: Request
    live: Callable[[Target], Awaitable[T]]
    recorded: Callable[[StepRecord, Contents], T]
    otherwise: Callable[[DSecError], T] | None = None


class Steps:
    """The steps of one opening of a rollout."""

    def __init__(self, transport: Transport, info: RolloutInfo) -> None:
        self.info = info
        self.count = 0
        self.replayed = 0
        self.target = Target(info.sandbox, info.incarnation)
        self.replay = Replay(transport, info.id, info.steps)
        self.transport = transport
        self._order = _Order()
        self._running: set[asyncio.Task[Any]] = set()
        self._ended: DSecError | None = None
        self.replay.start()

    @property
    def replaying(self) -> bool:
        """Whether the next step has been made before."""
        return self.count < self.info.steps

    def check(self) -> None:
        """Raises what ended it."""
        if self._ended is not None:
            raise copy_of(self._ended)

    def end(self, error: DSecError) -> None:
        """No further step is made, nor one asked for that waits for its turn; `error` says why."""
        if self._ended is None:
            self._ended = error
            self._order.end(error)

    def close(self, error: DSecError) -> None:
        """The same, and what is under way is left to the service."""
        self.end(error)
        self.replay.close()
        for task in self._running:
            task.cancel()

    # -- one step --

    def next(self) -> int:
        """The number of the step that is made now."""
        self.check()
        number, self.count = self.count, self.count + 1
        return number

    def step(self, make: Callable[[int], Asked[T]]) -> Coroutine[Any, Any, T]:
        """The next step, which `make` is told the number of. What `make` raises is no step."""
        self.check()
        number = self.count
        asked = make(number)
        self.count += 1
        if (record := self.replay.take_held(number)) is None:
            return self.begun(self._run(number, asked))
        try:
            self.compare(record, asked.request)
            if record.done_at is None or (contents := inline(record.outputs)) is None:
                return self.begun(self._recorded(record, asked))
            return given(number, self._answer(record, asked, contents))
        except DSecError as error:
            return refused(error)

    def later(self, make: Callable[[int], Awaitable[Asked[T]]]) -> Coroutine[Any, Any, T]:
        """A step whose request is known only when something was read. When that fails there is no step."""
        number = self.next()
        return self.begun(self._made(number, make(number)))

    def series(self, asked: Sequence[Asked[None]]) -> Coroutine[Any, Any, None]:
        """The next steps, each begun when the one before is over. All of them are made, whatever comes of one."""
        numbered = [(self.next(), one) for one in asked]
        return self.begun(self._in_turn(numbered))

    async def _in_turn(self, numbered: Sequence[tuple[int, Asked[None]]]) -> None:
        failed: DSecError | None = None
        for number, asked in numbered:
            try:
                await self._run(number, asked)
            except DSecError as error:
                failed = failed or error
        if failed is not None:
            raise failed

    async def _made(self, number: int, making: Awaitable[Asked[T]]) -> T:
        try:
            asked = await making
        except BaseException as error:
            self._never(number, error)
            raise
        return await self._run(number, asked)

    def _never(self, number: int, error: BaseException) -> None:
        """Its number is free again, unless there are later ones, which would wait for it."""
        if self.count == number + 1:
            self.count = number
        else:
            what = f"step {number} of rollout {self.info.id} was never made: {error!r}"
            self.end(Conflict(what, hint="open the rollout again"))

    def begun(self, work: Coroutine[Any, Any, T]) -> Coroutine[Any, Any, T]:
        """Work that goes on when who waits for it is cancelled."""
        task = asyncio.get_running_loop().create_task(work)
        self.watched(task)
        return self._result(task)

    def watched(self, task: asyncio.Task[Any]) -> None:
        self._running.add(task)
        task.add_done_callback(self._over)

    def _over(self, task: asyncio.Task[Any]) -> None:
        self._running.discard(task)
        if not task.cancelled():
            task.exception()  # a caller that left never looks

    async def _result(self, task: asyncio.Task[T]) -> T:
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled():  # it was not the caller who was
                self.check()
            raise

    async def _run(self, number: int, asked: Asked[T]) -> T:
        if number >= self.info.steps:
            return await self._ask(number, asked)
        record = await self.replay.take(number)
        self.compare(record, asked.request)
        return await self._recorded(record, asked)

    async def _recorded(self, record: StepRecord, asked: Asked[T]) -> T:
        if record.done_at is None:
            return await self._ask(record.step, asked)
        return self._answer(record, asked, await self.replay.contents(record.outputs))

    def _answer(self, record: StepRecord, asked: Asked[T], contents: Contents) -> T:
        try:
            self.answers(record)
        except DSecError as error:
            if asked.otherwise is None:
                raise
            return asked.otherwise(error)
        return asked.recorded(record, contents)

    def answers(self, record: StepRecord) -> None:
        """Counts it, and raises the error that it is the record of."""
        self.replayed += 1
        if record.error is not None:
            raise from_body(record.error, record.sandbox)

    def compare(self, record: StepRecord, request: Request) -> None:
        """ReplayDivergence unless this is what was recorded; no step follows it then."""
        if record.digest == request.digest:
            self._order.compared(record.step)
            return
        error = from_body(
            divergence(record.step, self.info.id, with_contents(record, request.text), request.text).body,
            record.sandbox,
        )
        if (other := self.replay.place_of(request.digest)) is not None:
            error.hint = f"this is step {other} of the log: steps were left out or changed their order; {error.hint}"
        self.end(error)
        raise error

    # -- live --

    async def _ask(self, number: int, asked: Asked[T]) -> T:
        """Until it is done: the same number is the same step, so asking again is always safe."""
        target = await self.live(number, asked.request)
        patience = Patience(self.transport)
        while True:
            try:
                return await asked.live(target)
            except ConnectionLost as error:
                await patience.wait(error)
            except DSecError as error:
                seen = await self.seen(number, error)
                if asked.otherwise is None:
                    raise seen from error.__cause__
                return asked.otherwise(seen)

    async def live(self, number: int, request: Request) -> Target:
        """How to ask for it, when every recorded step before it has been found to be the same."""
        await self._order.turn(min(number, self.info.steps))
        info = self.info
        if info.state is RolloutState.LOST:
            raise self.unavailable(number, f"sandbox {info.sandbox} is gone")
        if info.state is RolloutState.FINISHED:
            raise Conflict(
                f"rollout {info.name!r} ({info.id}) is finished and has {info.steps} steps: step {number} cannot be made",
                hint="open it with restart=True to begin anew, or under another name",
                details={"rollout": info.id, "step": number},
            )
        return self.target._replace(step=StepRef(info.id, info.epoch, number, request.digest))

    def unavailable(self, number: int, what: str) -> SandboxUnavailable:
        """For a step that cannot be had from the log, and has no sandbox to be had from."""
        info = self.info
        reason = info.reason.value if info.reason else ""
        why = f" ({reason})" if reason else ""
        return SandboxUnavailable(
            f"{what}{why}: {self.replayed} steps of rollout {info.name!r} were replayed, step {number} needs a live one",
            hint="nothing of it may be rewarded; restart=True begins the rollout anew",
            details={"sandbox_id": info.sandbox, "reason": reason, "replayed": self.replayed, "step": number},
        )

    async def seen(self, number: int, error: DSecError) -> DSecError:
        """What the service says of a step, for who made it. After some of it there can be no further step."""
        if isinstance(error, SandboxUnavailable):
            error.message += (
                f"; {self.replayed} steps of rollout {self.info.name!r} were replayed, step {number} needed it"
            )
            error.args = (error.message,)
            error.details = {**error.details, "replayed": self.replayed, "step": number}
        elif isinstance(error, RolloutFenced | ReplayDivergence):
            self.end(error)
        elif error.kind in _PERHAPS_REFUSED and not await self._has(number):
            what = f"step {number} of rollout {self.info.name!r} was refused before it was recorded: {error.message}"
            self.end(
                Conflict(what, hint="no step can follow it; open the rollout again and make another one in its place")
            )
        return error

    async def _has(self, number: int) -> bool:
        """Whether the step is recorded. Those after it would wait for one that is not."""
        try:
            info = await self.transport.call("GET", f"/v1/rollouts/{self.info.id}", RolloutInfo)
        except DSecError:
            return True
        return info.steps > number


_PERHAPS_REFUSED = frozenset(
    (
        ErrorKind.AUTHENTICATION, ErrorKind.PERMISSION, ErrorKind.QUOTA, ErrorKind.INVALID, ErrorKind.NOT_FOUND,
        ErrorKind.CONFLICT, ErrorKind.CAPACITY, ErrorKind.OUTCOME_UNKNOWN, ErrorKind.TOO_LARGE, ErrorKind.UNSUPPORTED,
        ErrorKind.INTERNAL, ErrorKind.NO_SPACE, ErrorKind.FILE_INVALID,
    )
)  # fmt: skip
"""What may come of a request before anybody has looked which step it is."""


class Patience:
    """How long a step is asked for again while the connection is lost."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._deadline: float | None = None

    def renew(self) -> None:
        """Something came."""
        self._deadline = None

    async def wait(self, error: ConnectionLost) -> None:
        """Raises it when that is enough."""
        if self._deadline is None:
            self._deadline = time.monotonic() + self._transport.request_timeout
        if not self._transport.reached or time.monotonic() > self._deadline:
            raise error
        await asyncio.sleep(_RETRY_S)


class _Order:
    """How many steps, from the first on without a gap, were found to be the recorded ones, and who waits for how many."""

    def __init__(self) -> None:
        self._done = 0
        self._beyond: set[int] = set()
        self._waiting: list[tuple[int, asyncio.Future[None]]] = []
        self._ended: DSecError | None = None

    def compared(self, number: int) -> None:
        self._beyond.add(number)
        while self._done in self._beyond:
            self._beyond.discard(self._done)
            self._done += 1
        if self._waiting:
            self._let()

    def end(self, error: DSecError) -> None:
        self._ended = error
        self._let()

    async def turn(self, steps: int) -> None:
        """When so many were."""
        if self._ended is None and self._done < steps:
            future = asyncio.get_running_loop().create_future()
            self._waiting.append((steps, future))
            await future
        if self._ended is not None:
            raise copy_of(self._ended)

    def _let(self) -> None:
        waiting, self._waiting = self._waiting, []
        for steps, future in waiting:
            if self._ended is None and self._done < steps:
                self._waiting.append((steps, future))
            elif not future.done():
                future.set_result(None)


def with_contents(record: StepRecord, like: bytes = b"") -> bytes:
    """The recorded request with the contents that it wrote, for comparing by eye. like: a request, to have those that it has."""
    fields = dict[str, msgspec.Raw]
    asked = msgspec.json.decode(record.request, type=fields)
    names = msgspec.json.decode(like, type=fields) if like else record.inputs
    for name, blob in record.inputs.items():
        if name in names and name not in asked and blob.size == blob.total:
            asked[name] = msgspec.Raw(msgspec.json.encode({"blake3": blob.digest, "size": blob.total}))
    return msgspec.json.encode(asked, order="sorted")


def copy_of(error: DSecError) -> DSecError:
    """To be raised once more."""
    return type(error)(
        error.message, kind=error.kind, hint=error.hint, retryable=error.retryable, details=error.details
    )


async def given(number: int, value: T) -> T:
    """An answer that is there."""
    if number % _BREATH == 0:
        await asyncio.sleep(0)
    return value


async def refused(error: Exception) -> NoReturn:
    """The same of an error."""
    raise error


def result_of(record: StepRecord, kind: type[T]) -> T:
    """What the recorded step returned."""
    return decode(bytes(record.result or b"null"), kind)


def records_of(record: StepRecord, contents: Contents, kind: type[T], most: int = MAX_RECORD) -> list[T]:
    """The same of one that returned a list. Unsupported where it was too long to be kept whole."""
    blob = record.outputs.get("data")
    if blob is not None and blob.size < blob.total:
        raise Unsupported(
            f"step {record.step} ({record.kind}) gave {blob.total} bytes, of which the log has {blob.size}: no replay of it",
            hint="ask for less in one step: a smaller depth, narrower globs, a smaller max_bytes",
        )
    return list(RecordReader(kind, most).feed(contents.get("data", b"")))
