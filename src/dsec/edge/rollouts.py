"""Rollouts on their edge: a trajectory log and the sandbox that its steps run in, opened by name, again and again.

The job of a rollout is named or given by its id, and recorded by its id, so that a later job of that name begins afresh.
The log is there before the sandbox, whose idempotency key is the rollout's id: whoever dies in between, the next opening
goes on with what there is and makes nothing twice. Each opening is durable with a higher epoch, which fences earlier clients.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import structlog

from dsec.protocol.errors import ErrorKind, Fault
from dsec.protocol.ids import home_of, new_rollout_id
from dsec.protocol.link import Call, Handler, pack_record
from dsec.protocol.requests import canonical, difference, told
from dsec.protocol.rollouts import MAX_STEP, RolloutInfo, RolloutState
from dsec.protocol.scopes import Right, Scope
from dsec.protocol.specs import DSecContainerRunArgs, Reason
from dsec.protocol.steps import step
from dsec.rollout.trajectory import Trajectory, TrajectoryStore

from .checks import check_args
from .journal import Record
from .lifecycle import Lifecycle
from .sandbox import Sandbox
from .tape import send_content

MAX_NAME = 256
MAX_PAGE = 100_000
PAGE_BYTES = 64 * 1024 * 1024
_SENT = 128 * 1024
_log = structlog.get_logger("edge")


class _Open(msgspec.Struct, frozen=True):
    name: str
    job: str = ""
    args: DSecContainerRunArgs = DSecContainerRunArgs()
    timeout: float = 120
    scope: Scope | None = None  # of a caller who may not everything


class _Find(msgspec.Struct, frozen=True):
    name: str
    job: str = ""


class _List(msgspec.Struct, frozen=True):
    job: str | None = None
    states: tuple[RolloutState, ...] = ()


class _Rollout(msgspec.Struct, frozen=True):
    rollout: str


class _Steps(_Rollout, frozen=True):
    start: int = 0
    limit: int = 1000
    max_bytes: int = 8 * 1024 * 1024


class _Blob(_Rollout, frozen=True):
    digest: str


class _Finish(_Rollout, frozen=True):
    epoch: int
    reward: float | None = None
    valid: bool | None = None
    stop: bool = True


class Rollouts:
    def __init__(self, lifecycle: Lifecycle, store: TrajectoryStore) -> None:
        self._lifecycle = lifecycle
        self._store = store
        self._opening: dict[tuple[str, str], asyncio.Lock] = {}
        self._wanting: Counter[tuple[str, str]] = Counter()
        self._tasks: set[asyncio.Task[RolloutInfo] | asyncio.Task[None]] = set()
        lifecycle.when_ended.append(self._ended)

    def handlers(self) -> dict[str, Handler]:
        return {
            "rollout.open": self.open,
            "rollout.find": self.find,
            "rollout.list": self.list,
            "rollout.info": self.info,
            "rollout.steps": self.steps,
            "rollout.blob": self.blob,
            "rollout.finish": self.finish,
            "rollout.remove": self.remove,
        }

    # -- opening --

    async def open(self, call: Call) -> object:
        """A caller that goes away leaves the opening to its end: it comes back and finds it."""
        asked = call.params(_Open)
        _check_names(asked.job, asked.name)
        if asked.job:
            asked = msgspec.structs.replace(asked, job=self._lifecycle.jobs.get(asked.job).record.id)
        task = asyncio.get_running_loop().create_task(self._open(asked))
        self._hold(task)
        return await asyncio.shield(task)

    async def _open(self, asked: _Open) -> RolloutInfo:
        async with self._one_at_a_time(asked.job, asked.name):
            trajectory = self._store.find(asked.job, asked.name)
            if new := trajectory is None:
                if asked.scope is not None:
                    asked.scope.require_creation(asked.args)
                check_args(asked.args)
                id = new_rollout_id(self._lifecycle.edge)
                with step("rollout.create", id):
                    trajectory = self._store.create(id, job=asked.job, name=asked.name, args=asked.args)
            else:
                if asked.scope is not None:
                    asked.scope.require(Right.USE)
                _check_same(trajectory, asked.args)
            with step("rollout.open", trajectory.id):
                await trajectory.opened()
            if not trajectory.sandbox and trajectory.state is RolloutState.OPEN:
                try:
                    await self._make(trajectory, asked.timeout)
                except Fault:
                    if new:  # nothing came of it: another edge, or a later opening, begins afresh
                        await self._store.remove(trajectory.id)
                    raise
            return trajectory.info()

    async def _make(self, trajectory: Trajectory, timeout: float) -> None:
        """Its sandbox, or the one that an opening which broke off has made."""
        args = msgspec.structs.replace(trajectory.args, idempotency_key=trajectory.id)
        created = await self._lifecycle.create(args, timeout, trajectory.job)
        sandbox = self._lifecycle.running(created.id)
        with step("rollout.made", sandbox.id):
            await trajectory.made(sandbox.id, sandbox.incarnation, sandbox.layers)
        if sandbox.ended.is_set():
            await self._lose(trajectory, sandbox.reason)

    @asynccontextmanager
    async def _one_at_a_time(self, job: str, name: str) -> AsyncIterator[None]:
        key = (job, name)
        self._wanting[key] += 1
        try:
            async with self._opening.setdefault(key, asyncio.Lock()):
                yield
        finally:
            self._wanting[key] -= 1
            if not self._wanting[key]:
                del self._wanting[key], self._opening[key]

    # -- which is whose --

    def of_sandbox(self, found: Sandbox | Record) -> Trajectory | None:
        """The rollout that runs in it: its id made the sandbox, and its log names it."""
        trajectory = self.known(found.args.idempotency_key or "")
        return trajectory if trajectory is not None and trajectory.sandbox == found.id else None

    def known(self, id: str) -> Trajectory | None:
        try:
            return self._store.get(id) if home_of(id) is not None else None
        except Fault:
            return None

    # -- ends --

    def _ended(self, sandbox: Sandbox) -> None:
        """A sandbox has ended: if a rollout ran in it, only what is recorded can be had from now on."""
        if (trajectory := self.of_sandbox(sandbox)) is not None:
            self._hold(asyncio.get_running_loop().create_task(self._lose(trajectory, sandbox.reason)))

    async def _lose(self, trajectory: Trajectory, reason: Reason | None) -> None:
        try:
            await trajectory.lost(reason or Reason.AGENT_LOST)
        except Fault as fault:  # the next start of the edge finds out again
            _log.error("the end of a rollout's sandbox is not in its log", rollout=trajectory.id, error=str(fault))

    async def recover(self) -> None:
        """After a restart: a rollout whose sandbox did not live through it is lost, by the reason of the sandbox's end."""
        for info in self._store.list():
            if info.state is not RolloutState.OPEN or not info.sandbox:
                continue
            try:
                found = self._lifecycle.get(info.sandbox)
            except Fault:
                await self._lose(self._store.get(info.id), Reason.NODE_LOST)
                continue
            if isinstance(found, Record) or found.ended.is_set():
                await self._lose(self._store.get(info.id), found.reason)

    async def close(self) -> None:
        """What is still being recorded is."""
        while self._tasks:
            await asyncio.wait(list(self._tasks))

    def _hold(self, task: asyncio.Task[RolloutInfo] | asyncio.Task[None]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._let_go)

    def _let_go(self, task: asyncio.Task[RolloutInfo] | asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # told to whoever waits

    async def finish(self, call: Call) -> object:
        """By the client of the present epoch, once; the same again is the same. Stops the sandbox unless told otherwise."""
        asked = call.params(_Finish)
        if asked.reward is not None and not math.isfinite(asked.reward):
            raise Fault(ErrorKind.INVALID, f"reward: {asked.reward} is not a finite number")
        trajectory = self._store.get(asked.rollout)
        check_epoch(trajectory, asked.epoch)
        info = trajectory.info()
        if info.state is not RolloutState.FINISHED:
            with step("rollout.finish", trajectory.sandbox):
                await trajectory.finished(info.reason, asked.reward, asked.valid)
        elif (info.reward, info.valid) != (asked.reward, asked.valid):
            raise Fault(
                ErrorKind.CONFLICT,
                f"rollout {info.id} was finished with reward {info.reward}, valid {info.valid}",
                hint="its outcome stands; open one of another name for another",
            )
        if asked.stop and trajectory.sandbox:
            await self._stop(trajectory.sandbox)
        return trajectory.info()

    async def _stop(self, sandbox: str) -> None:
        try:
            await asyncio.shield(self._lifecycle.stop(sandbox))
        except Fault as fault:
            if fault.body.kind is not ErrorKind.NOT_FOUND:  # gone so long ago that its record is gone, too
                raise

    async def remove(self, call: Call) -> object:
        """Log and contents, for good. One that may still go on is refused."""
        info = self._store.get(call.params(_Rollout).rollout).info()
        if info.state is RolloutState.OPEN and info.sandbox:
            raise Fault(
                ErrorKind.CONFLICT,
                f"rollout {info.id} is open, and its sandbox {info.sandbox} lives",
                hint="finish it, or stop its sandbox, first",
            )
        async with self._one_at_a_time(info.job, info.name):
            await self._store.remove(info.id)
        return {}

    # -- looking --

    def count(self, job: str) -> tuple[int, int]:
        """Rollouts of a job (by its id), and steps recorded in them."""
        return self._store.count(job)

    async def find(self, call: Call) -> object:
        """`RolloutInfo`, or nil."""
        asked = call.params(_Find)
        found = self._store.find(self._lifecycle.jobs.id_of(asked.job), asked.name)
        return None if found is None else found.info()

    async def list(self, call: Call) -> object:
        asked = call.params(_List)
        count, batch = 0, bytearray()
        job = None if asked.job is None else self._lifecycle.jobs.id_of(asked.job)
        for info in self._store.list(job):
            if asked.states and info.state not in asked.states:
                continue
            count += 1
            batch += pack_record(info)
            if len(batch) > _SENT:
                await call.send(bytes(batch))
                batch.clear()
        if batch:
            await call.send(bytes(batch))
        return {"count": count}

    async def info(self, call: Call) -> object:
        return self._store.get(call.params(_Rollout).rollout).info()

    async def steps(self, call: Call) -> object:
        """Steps from `start` on as lines of JSON (`StepRecord`): at most `limit`, and about `max_bytes`."""
        asked = call.params(_Steps)
        if not 0 <= asked.start <= MAX_STEP or not 0 < asked.limit <= MAX_PAGE or not 0 < asked.max_bytes <= PAGE_BYTES:
            raise Fault(ErrorKind.INVALID, f"steps from {asked.start}, {asked.limit} of them, {asked.max_bytes} bytes",
                        hint=f"from 0 on, at most {MAX_PAGE} and {PAGE_BYTES} bytes at a time")  # fmt: skip
        trajectory = self._store.get(asked.rollout)
        records = trajectory.read(asked.start, asked.limit, asked.max_bytes)
        batch = bytearray()
        for record in records:
            batch += msgspec.json.encode(record)
            batch += b"\n"
            if len(batch) > _SENT:
                await call.send(bytes(batch))
                batch.clear()
        if batch:
            await call.send(bytes(batch))
        return {"count": len(records), "truncated": asked.start + len(records) < trajectory.steps}

    async def blob(self, call: Call) -> object:
        """A content that is too long for its record."""
        asked = call.params(_Blob)
        trajectory = self._store.get(asked.rollout)
        try:
            trajectory.blob_path(asked.digest)
        except Fault:  # it may be a short one, which is in its record
            data = await asyncio.to_thread(trajectory.blob, asked.digest)
            call.note({"size": len(data)})
            await call.send(data)
            return {"size": len(data)}
        return {"size": await send_content(call, trajectory, asked.digest, announce=True)}


def check_epoch(trajectory: Trajectory, epoch: int) -> None:
    """Fault rollout_fenced unless it is the present one."""
    if epoch == trajectory.epoch:
        return
    if epoch > trajectory.epoch:
        raise Fault(ErrorKind.INVALID, f"rollout {trajectory.id} has had {trajectory.epoch} openings, not {epoch}")
    raise Fault(
        ErrorKind.FENCED,
        f"rollout {trajectory.id} was opened again (epoch {trajectory.epoch}) since this client opened it (epoch {epoch})",
        hint="another client has taken it over; this one must stop",
        rollout=trajectory.id,
        epoch=trajectory.epoch,
    )


def _check_names(job: str, name: str) -> None:
    for what, text in (("job", job), ("name", name)):
        if len(text) > MAX_NAME or not (text.isprintable() and (text or what == "job")):
            raise Fault(
                ErrorKind.INVALID, f"{what}: {text[:80]!r} is not 1 to {MAX_NAME} printable characters", hint="such as task-3/7"
            )  # fmt: skip


def _check_same(trajectory: Trajectory, args: DSecContainerRunArgs) -> None:
    """Fault replay_divergence when it was opened with other arguments."""
    recorded, asked = (canonical("rollout.open", msgspec.structs.asdict(one)) for one in (trajectory.args, args))
    if recorded != asked:
        raise Fault(
            ErrorKind.DIVERGED,
            f"rollout {trajectory.name!r} was opened with other arguments:\n{told(difference(recorded, asked))}",
            hint="open it with the same arguments, or under another name",
            rollout=trajectory.id,
            recorded=recorded.decode()[:2000],
            asked=asked.decode()[:2000],
        )
