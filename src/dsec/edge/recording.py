"""Steps of rollouts: each request is in its rollout's log before it runs, and what came of it before anybody is told.

A step is one of the ordinary requests to a sandbox. Its handler is given a `Tape` in the caller's place, which writes down what
passes, and runs in a task of the edge: a caller that goes away leaves it running. The same step again is answered from the
log; one that is under way is waited for. When an earlier edge had it under way, the sandbox is asked: it knows a command by its
exec id and an operation by its op id, and does neither twice.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Mapping
from typing import NamedTuple

import msgspec

from dsec.protocol.errors import ErrorBody, ErrorKind, Fault
from dsec.protocol.ids import is_step_exec_id
from dsec.protocol.link import Call, Handler
from dsec.protocol.requests import canonical, digest_of, divergence
from dsec.protocol.rollouts import MAX_STEP, RolloutState, StepRecord, StepRef
from dsec.protocol.steps import step as durable
from dsec.rollout.trajectory import Trajectory, TrajectoryStore

from .kinds import FOLLOWED, NEVER_OUTCOMES, STEPS, UPLOADS, as_step, from_json, to_json, written
from .lifecycle import Lifecycle
from .rollouts import check_epoch
from .settling import Ended, Settler
from .tape import Tape, play, same_upload

ORDER_S = 30.0  # how long a step waits for the intents of those before it
ATTEMPTS = 3  # at a request to a sandbox whose connection broke
_FULL = 64 * 1024 * 1024  # free bytes of the node below which a full disk is the node's and not the sandbox's


class _Asked(msgspec.Struct, frozen=True):
    """The part of a request that the recorder looks at itself."""

    sandbox: str
    step_of: StepRef | None = None
    exec_id: str = ""
    cursor: int = 0


class _Intent(msgspec.Struct, frozen=True):
    """request: canonical JSON."""

    step_of: StepRef
    kind: str
    request: bytes


class _Outcome(msgspec.Struct, frozen=True):
    """result: JSON. One of them."""

    step_of: StepRef
    result: bytes | None = None
    error: ErrorBody | None = None


class Work(NamedTuple):
    """A step under way. None as its result: nothing is known of it, and whoever asks for it may run it."""

    task: asyncio.Task[StepRecord | None]
    caller: Call | None


class Recorder:
    def __init__(self, lifecycle: Lifecycle, store: TrajectoryStore) -> None:
        self._lifecycle = lifecycle
        self._store = store
        self._works: dict[tuple[str, int], Work] = {}
        self._intents: dict[str, asyncio.Event] = {}
        self._handlers: dict[str, Handler] = {}

    def over(self, handlers: Mapping[str, Handler]) -> dict[str, Handler]:
        """The same handlers; those of steps record them."""
        self._handlers = {**handlers, "exec.wait": handlers["exec.attach"]}
        table = {
            method: self._recorded(method) if method in STEPS else self._handlers[method] for method in self._handlers
        }
        table["exec.stage"] = self._stage
        table["rollout.intent"] = self.intent
        table["rollout.outcome"] = self.outcome
        return table

    def _recorded(self, kind: str) -> Handler:
        async def recorded(call: Call) -> object:
            asked = call.params(_Asked)
            if asked.step_of is not None:
                return await self._step(kind, call, asked, asked.step_of)
            if kind == "exec":
                _not_of_a_step(asked.exec_id)
            if kind == "exec.wait":
                raise Fault(
                    ErrorKind.INVALID, "exec.wait is a step of a rollout, and this is none", hint="attach instead"
                )
            return await self._handlers[kind](call)

        return recorded

    async def _stage(self, call: Call) -> object:
        """`exec.stage`: for a step that will not run, what is staged is not looked at."""
        asked = call.params(_Asked)
        if (ref := asked.step_of) is None:
            _not_of_a_step(asked.exec_id)
        else:
            trajectory = self._store.get(ref.rollout)
            known = trajectory.step(ref.step)
            if (known is not None and known.done_at is not None) or trajectory.state is not RolloutState.OPEN:
                return {}
        return await self._handlers["exec.stage"](call)

    # -- one step --

    async def _step(self, kind: str, call: Call, asked: _Asked, ref: StepRef) -> object:
        trajectory = self._checked(ref)
        if asked.sandbox != trajectory.sandbox:
            raise Fault(
                ErrorKind.CONFLICT, f"rollout {trajectory.id} runs in sandbox {trajectory.sandbox}, not {asked.sandbox}",
                hint="open the rollout, and ask the sandbox that it names", sandbox_id=asked.sandbox,
            )  # fmt: skip
        params: dict[str, object] = msgspec.msgpack.decode(call.raw)
        request = canonical(kind, params)
        record, live = None, False
        while record is None:
            found = await self._claimed(trajectory, ref, kind, request)
            if found is None:
                found = self._begin(trajectory, ref.step, kind, params, call)
            if isinstance(found, Work):
                record, live = await asyncio.shield(found.task), found.caller is call
            else:
                record, live = found, False
        if kind in UPLOADS and not live:
            await same_upload(call, record, trajectory.id, self._store.keep)
        if record.error is not None:
            raise Fault.from_body(record.error)
        if not (live and kind in FOLLOWED):
            await play(call, trajectory, record, asked.cursor)
        assert record.result is not None
        return from_json(kind, record.result, record.step, replayed=record.epoch < ref.epoch)

    def _checked(self, ref: StepRef) -> Trajectory:
        trajectory = self._store.get(ref.rollout)
        check_epoch(trajectory, ref.epoch)
        if not 0 <= ref.step <= MAX_STEP:
            raise Fault(ErrorKind.INVALID, f"step: {ref.step} is not between 0 and {MAX_STEP}")
        return trajectory

    async def _claimed(
        self, trajectory: Trajectory, ref: StepRef, kind: str, request: bytes
    ) -> Work | StepRecord | None:
        """The step as recorded, or under way. None: its intent is recorded, and the caller begins it before it waits for
        anything else."""
        deadline = asyncio.get_running_loop().time() + ORDER_S
        ready = False
        while True:
            check_epoch(trajectory, ref.epoch)
            known = trajectory.step(ref.step)
            if known is not None:
                _same(known, ref, request)
                if known.done_at is not None:
                    return known
                if (work := self._works.get((trajectory.id, ref.step))) is not None:
                    return work
            elif ref.step > trajectory.steps:
                await self._predecessor(trajectory, ref, deadline)
                continue
            if not ready:  # and then everything is looked at once more
                await self._ready(trajectory, ref)
                ready = True
                continue
            if known is None:
                self._intend(trajectory, ref, kind, request)
            return None

    async def _ready(self, trajectory: Trajectory, ref: StepRef) -> None:
        """Until its sandbox can work; else a fault that says what can still be had."""
        state = trajectory.state
        if state is RolloutState.FINISHED:
            raise Fault(
                ErrorKind.CONFLICT,
                f"rollout {trajectory.id} is finished with {trajectory.steps} steps, and step {ref.step} has no outcome",
                hint="open another rollout to go on",
                step=ref.step,
                steps=trajectory.steps,
            )
        try:
            await self._lifecycle.ready(trajectory.sandbox, trajectory.incarnation)
        except Fault as fault:
            if fault.body.kind not in (ErrorKind.UNAVAILABLE, ErrorKind.NOT_FOUND):
                raise
            raise _lost(trajectory, ref, fault.body) from fault

    async def _predecessor(self, trajectory: Trajectory, ref: StepRef, deadline: float) -> None:
        """Until another intent is recorded; Fault conflict at the deadline."""
        event = self._intents.setdefault(trajectory.id, asyncio.Event())
        try:
            async with asyncio.timeout_at(deadline):
                await event.wait()
        except TimeoutError:
            raise Fault(
                ErrorKind.CONFLICT,
                f"step {ref.step} of rollout {trajectory.id} came, but step {trajectory.steps} did not within {ORDER_S:g} s",
                hint="steps are numbered from 0 on, without gaps",
                step=ref.step,
                steps=trajectory.steps,
            ) from None

    def _intend(self, trajectory: Trajectory, ref: StepRef, kind: str, request: bytes) -> None:
        with durable("step.intent", trajectory.sandbox):
            trajectory.intent(
                StepRecord(
                    step=ref.step, kind=kind, digest=ref.digest or digest_of(request), request=msgspec.Raw(request),
                    sandbox=trajectory.sandbox, incarnation=trajectory.incarnation, asked_at=time.time(), epoch=ref.epoch,
                )
            )  # fmt: skip
        if (event := self._intents.pop(trajectory.id, None)) is not None:
            event.set()

    # -- running it --

    def _begin(self, trajectory: Trajectory, number: int, kind: str, params: Mapping[str, object], call: Call) -> Work:
        as_asked = as_step(kind, params, number, self._store.keep)
        return self._at_work(trajectory, number, self._run(trajectory, number, kind, as_asked, call), call)

    def _at_work(
        self, trajectory: Trajectory, number: int, work: Coroutine[None, None, StepRecord | None], call: Call | None
    ) -> Work:
        key = (trajectory.id, number)
        task = asyncio.get_running_loop().create_task(work)

        def ended(task: asyncio.Task[StepRecord | None]) -> None:
            del self._works[key]
            if not task.cancelled():
                task.exception()  # told to whoever waits

        task.add_done_callback(ended)
        self._works[key] = Work(task, call)
        return self._works[key]

    async def _run(
        self, trajectory: Trajectory, number: int, kind: str, params: Mapping[str, object], call: Call
    ) -> StepRecord:
        """The handler, again where the connection to the sandbox broke, and what came of it in the log."""
        caller, listener = call if kind in UPLOADS else None, call if kind in FOLLOWED else None
        for attempt in range(ATTEMPTS):
            tape = Tape(kind, params, trajectory, caller=caller, listener=listener)
            if (given := written(kind, params)) is not None:
                tape.take(*given)
            try:
                with durable("step.run", trajectory.sandbox):
                    reply = await self._handlers[kind](tape)
                return await self._record(trajectory, number, kind, Ended(tape, reply))
            except Fault as fault:
                if await self._is_outcome(fault.body):
                    return await self._record(trajectory, number, kind, Ended(tape, error=fault.body))
                again = fault.body.kind is ErrorKind.CONNECTION_LOST and caller is None and attempt + 1 < ATTEMPTS
                if not again:
                    raise
                listener = None  # it has had a part of what comes again
            finally:
                tape.discard()
        raise AssertionError("unreachable")

    async def _record(self, trajectory: Trajectory, number: int, kind: str, ended: Ended) -> StepRecord:
        tape, failed = ended.tape, ended.error is not None
        outputs, inputs = ({}, {}) if failed else (tape.outputs, tape.inputs)
        result = None if failed else to_json(kind, ended.reply, outputs)
        with durable("step.outcome", trajectory.sandbox):
            return await trajectory.outcome(
                number, result=result, error=ended.error, outputs=outputs, inputs=inputs, done_at=time.time()
            )

    async def _is_outcome(self, error: ErrorBody) -> bool:
        """Whether the sandbox's own state caused an error. What the platform lacks is no outcome."""
        if error.retryable or error.kind in NEVER_OUTCOMES:
            return False
        if error.kind is ErrorKind.NO_SPACE:
            return (await self._lifecycle.backend.status()).uppers.free > _FULL
        return True

    # -- steps that are no requests to a sandbox --

    async def intent(self, call: Call) -> object:
        """`rollout.intent`: a step that somebody else runs. The reply's `record` is its `StepRecord` (JSON) once its outcome is
        known; `sandbox` the rollout's."""
        asked = call.params(_Intent)
        ref = asked.step_of
        trajectory = self._checked(ref)
        deadline = asyncio.get_running_loop().time() + ORDER_S
        while (known := trajectory.step(ref.step)) is None:
            check_epoch(trajectory, ref.epoch)
            if ref.step > trajectory.steps:
                await self._predecessor(trajectory, ref, deadline)
            else:
                self._intend(trajectory, ref, asked.kind, asked.request)
        _same(known, ref, asked.request)
        record = msgspec.json.encode(known) if known.done_at is not None else None
        return {"record": record, "sandbox": trajectory.sandbox}

    async def outcome(self, call: Call) -> object:
        """`rollout.outcome`: what came of such a step. The first that is told counts, and is the reply (JSON)."""
        asked = call.params(_Outcome)
        trajectory = self._store.get(asked.step_of.rollout)
        with durable("step.outcome", trajectory.sandbox):
            record = await trajectory.outcome(
                asked.step_of.step, result=asked.result, error=asked.error, outputs={}, inputs={}, done_at=time.time()
            )
        return {"record": msgspec.json.encode(record)}

    # -- what an earlier edge left --

    def settle(self) -> None:
        """After a restart: learns what became of the steps that an earlier edge had under way, as far as it can."""
        settler = Settler(self._lifecycle, self._handlers)
        for info in self._store.list():
            if info.state is RolloutState.OPEN:
                trajectory = self._store.get(info.id)
                for number in info.unknown:
                    self._at_work(trajectory, number, self._settle(settler, trajectory, number), None)

    async def _settle(self, settler: Settler, trajectory: Trajectory, number: int) -> StepRecord | None:
        record = trajectory.step(number)
        assert record is not None
        ended = await settler.found(trajectory, record)
        if ended is None or (ended.error is not None and not await self._is_outcome(ended.error)):
            return None
        try:
            return await self._record(trajectory, number, record.kind, ended)
        finally:
            ended.tape.discard()


def _not_of_a_step(exec_id: str) -> None:
    if is_step_exec_id(exec_id):
        raise Fault(
            ErrorKind.INVALID, f"exec_id {exec_id[:80]!r}: such names are given by steps", hint="choose another"
        )


def _same(known: StepRecord, ref: StepRef, request: bytes) -> None:
    """Fault replay_divergence for another step than the recorded one. A digest of the caller's own has the last word."""
    recorded = bytes(known.request)
    if (ref.digest == known.digest) if ref.digest else (request == recorded):
        return
    raise divergence(ref.step, ref.rollout, recorded, request)


def _lost(trajectory: Trajectory, ref: StepRef, why: ErrorBody) -> Fault:
    reason = str(why.details.get("reason", "node_lost"))
    return Fault(
        ErrorKind.UNAVAILABLE,
        f"step {ref.step} of rollout {trajectory.id} needs its sandbox, which is gone ({reason}): {why.message}; "
        f"{trajectory.steps} steps are recorded and can be replayed",
        hint="a result of this rollout must not be rewarded; open another one",
        reason=reason,
        sandbox_id=trajectory.sandbox,
        step=ref.step,
        steps=trajectory.steps,
    )
