"""A fake edge that records: the contract of rollouts over real trajectory logs and the fake edge's sandboxes.

Steps run in tasks of the edge's own, once each, in the order of their numbers; the same step again is answered from the log.
Its switches make faults.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec

from dsec.protocol.errors import ErrorKind, Fault
from dsec.protocol.ids import new_rollout_id
from dsec.protocol.link import Call, Handler, decode, pack_record
from dsec.protocol.requests import canonical, difference, digest_of, divergence, told
from dsec.protocol.rollouts import RolloutState, StepRecord, StepRef
from dsec.protocol.specs import DSecContainerRunArgs, Network, Reason
from dsec.rollout.trajectory import Output, Trajectory, TrajectoryStore
from tests.apiserver.fake_edge import FakeEdge, Target

STEPS = frozenset(
    (
        "exec", "exec.wait", "exec.write", "exec.close_stdin", "exec.signal", "exec.resize", "session.open", "session.close",
        "session.interrupt", "fs.stat", "fs.list", "fs.read", "fs.write", "fs.mkdir", "fs.move", "fs.remove", "fs.tar",
        "fs.untar", "sandbox.network", "sandbox.changes",
    )
)  # fmt: skip
_UPLOADS = frozenset(("fs.write", "fs.untar"))
_NO_OUTCOME = frozenset((ErrorKind.UNAVAILABLE, ErrorKind.CONNECTION_LOST, ErrorKind.TIMEOUT, ErrorKind.CAPACITY))
_OUTPUTS = {0: "data", 1: "stdout", 2: "stderr"}


class _Stepped(msgspec.Struct):
    sandbox: str
    step_of: StepRef | None = None


class _Open(msgspec.Struct):
    name: str
    job: str = ""
    args: DSecContainerRunArgs = DSecContainerRunArgs()


class _Rollout(msgspec.Struct):
    rollout: str
    start: int = 0
    limit: int = 1000
    max_bytes: int = 8 << 20
    digest: str = ""
    epoch: int = 0
    reward: float | None = None
    valid: bool | None = None
    stop: bool = True


class _Network(Target, frozen=True, kw_only=True):
    rules: dict[str, bool]


class Own(Call):
    """A step's request in the hands of the edge itself: what it gives is kept, whoever asked for it."""

    def __init__(self, method: str, raw: msgspec.Raw, given: list[bytes]) -> None:
        self.method = method
        self.raw = raw
        self.given = given
        self.sent: list[tuple[int, bytes]] = []
        self.notes: list[object] = []
        self.over = asyncio.Event()
        self.result: object = None
        self.fault: Fault | None = None

    async def send(self, data: bytes, channel: int = 0) -> None:
        self.sent.append((channel, bytes(data)))

    def note(self, event: object) -> None:
        self.notes.append(event)

    async def data(self) -> AsyncIterator[bytes]:
        for piece in self.given:
            yield piece
        if self.method not in _UPLOADS:  # whoever asked never says that this was all
            await self.over.wait()
            raise Fault(ErrorKind.CONNECTION_LOST, "over")


class RecordingEdge(FakeEdge):
    """drop_outcomes: steps that run, but whose outcome nobody gets to know, as when an edge dies. pages: how many were sent."""

    def __init__(self, directory: Path, *, keep: int = 16 << 20) -> None:
        super().__init__(directory)
        self.store = TrajectoryStore(directory / "rollouts", keep=keep)
        self.asked: Counter[str] = Counter()
        self.running: dict[tuple[str, int], asyncio.Task[Own]] = {}
        self.moved = asyncio.Condition()
        self.drop_outcomes: set[int] = set()
        self.pages = 0

    def _handlers(self) -> dict[str, Handler]:
        table = super()._handlers()
        named = {"session.open": self._session, "session.close": self._nothing, "session.interrupt": self._interrupted}
        table = {**table, **named, "sandbox.network": self._network, "exec.wait": self.exec_attach}
        return {method: self._recorded(handler) if method in STEPS else handler for method, handler in table.items()}

    # -- rollouts --

    async def rollout_open(self, call: Call) -> object:
        asked = call.params(_Open)
        trajectory = self.store.find(asked.job, asked.name)
        if trajectory is None:
            trajectory = self.store.create(new_rollout_id(self.name), job=asked.job, name=asked.name, args=asked.args)
            await trajectory.opened()
            created = await self._create(msgspec.structs.replace(asked.args, idempotency_key=trajectory.id), asked.job)
            await trajectory.made(created.id, created.incarnation, ())
        else:
            old, new = (canonical("args", msgspec.structs.asdict(args)) for args in (trajectory.args, asked.args))
            if old != new:
                raise Fault(ErrorKind.DIVERGED, f"opened with other arguments:\n{told(difference(old, new))}")
            await trajectory.opened()
        return trajectory.info()

    async def rollout_find(self, call: Call) -> object:
        asked = call.params(_Open)
        found = self.store.find(asked.job, asked.name)
        return None if found is None else found.info()

    async def rollout_list(self, call: Call) -> object:
        found = self.store.list()
        for info in found:
            await call.send(pack_record(info))
        return {"count": len(found)}

    async def rollout_info(self, call: Call) -> object:
        return self._trajectory(call)[1].info()

    async def rollout_steps(self, call: Call) -> object:
        asked, trajectory = self._trajectory(call)
        self.pages += 1
        records = trajectory.read(asked.start, asked.limit, asked.max_bytes)
        await call.send(b"".join(msgspec.json.encode(record) + b"\n" for record in records))
        return {"count": len(records), "truncated": asked.start + len(records) < trajectory.steps}

    async def rollout_blob(self, call: Call) -> object:
        asked, trajectory = self._trajectory(call)
        data = trajectory.blob(asked.digest)
        for start in range(0, len(data), 65_000):
            await call.send(data[start : start + 65_000])
        return {"size": len(data)}

    async def rollout_finish(self, call: Call) -> object:
        asked, trajectory = self._trajectory(call)
        self._check_epoch(trajectory, asked.epoch)
        info = trajectory.info()
        if info.state is not RolloutState.FINISHED:
            await trajectory.finished(None, asked.reward, asked.valid)
        elif (info.reward, info.valid) != (asked.reward, asked.valid):
            raise Fault(ErrorKind.CONFLICT, f"finished with reward {info.reward}")
        if asked.stop and trajectory.sandbox in self.boxes:
            await self._end(self.boxes[trajectory.sandbox], Reason.USER)
        return trajectory.info()

    async def rollout_remove(self, call: Call) -> object:
        asked, trajectory = self._trajectory(call)
        if trajectory.info().state is RolloutState.OPEN:
            raise Fault(ErrorKind.CONFLICT, "it is open")
        await self.store.remove(asked.rollout)
        return {}

    def _trajectory(self, call: Call) -> tuple[_Rollout, Trajectory]:
        asked = call.params(_Rollout)
        return asked, self.store.get(asked.rollout)

    @staticmethod
    def _check_epoch(trajectory: Trajectory, epoch: int) -> None:
        if epoch != trajectory.epoch:
            raise Fault(ErrorKind.FENCED, f"opened again: epoch {trajectory.epoch}, not {epoch}")

    async def lose(self, rollout: str, reason: Reason = Reason.NODE_LOST) -> None:
        """Its sandbox dies."""
        trajectory = self.store.get(rollout)
        await self._end(self.boxes[trajectory.sandbox], reason)
        await trajectory.lost(reason)

    # -- steps --

    def _recorded(self, handler: Handler) -> Handler:
        async def stepped(call: Call) -> object:
            ref = call.params(_Stepped).step_of
            if ref is None:
                return await handler(call)
            self.asked[call.method] += 1
            given = [piece async for piece in call.data()] if call.method in _UPLOADS else []
            own = await self._step(call, ref, given, handler)
            return await self._answered(call, own, ref)

        return stepped

    async def _step(self, call: Call, ref: StepRef, given: list[bytes], handler: Handler) -> Own | StepRecord:
        trajectory = self.store.get(ref.rollout)
        self._check_epoch(trajectory, ref.epoch)
        request = canonical(call.method, decode(call.raw, dict[str, object]))
        async with asyncio.timeout(10), self.moved:
            await self.moved.wait_for(lambda: trajectory.steps >= ref.step)
        key = (ref.rollout, ref.step)
        record = trajectory.step(ref.step)
        if record is not None and record.digest != (ref.digest or digest_of(request)):
            raise divergence(ref.step, ref.rollout, bytes(record.request), request)
        if record is not None and record.done_at is not None:
            return record
        self._box(Target(trajectory.sandbox, trajectory.incarnation))
        if record is None:
            trajectory.intent(StepRecord(
                step=ref.step, kind=call.method, digest=ref.digest or digest_of(request), request=msgspec.Raw(request),
                sandbox=trajectory.sandbox, incarnation=1, asked_at=time.time(), epoch=ref.epoch,
            ))  # fmt: skip
        if key not in self.running:
            self.running[key] = asyncio.create_task(self._run(trajectory, ref.step, call, given, handler))
            self.running[key].add_done_callback(lambda task: task.cancelled() or task.exception())
        async with self.moved:
            self.moved.notify_all()
        return await asyncio.shield(self.running[key])

    async def _run(self, trajectory: Trajectory, step: int, call: Call, given: list[bytes], handler: Handler) -> Own:
        own = Own(call.method, call.raw, given)
        result, error = b"", None
        try:
            own.result = await handler(own)
            result = msgspec.json.encode(own.result)
        except Fault as fault:
            own.fault = fault
            error = fault.body
        finally:
            own.over.set()
        if (error is not None and error.kind in _NO_OUTCOME) or step in self.drop_outcomes:
            del self.running[trajectory.id, step]
            return own
        outputs: dict[str, Output] = {}
        for channel, data in own.sent:
            name = _OUTPUTS[channel]
            outputs.setdefault(name, trajectory.output()).write(data)
        inputs = {"data": trajectory.output()} if call.method in _UPLOADS else {}
        for piece in given:
            inputs["data"].write(piece)
        await trajectory.outcome(
            step, result=None if error else result, error=error, outputs=outputs, inputs=inputs, done_at=time.time()
        )
        return own

    async def _answered(self, call: Call, own: Own | StepRecord, ref: StepRef) -> object:
        if isinstance(own, Own):
            for channel, data in own.sent:
                await call.send(data, channel)
            if own.fault is not None:
                raise own.fault
            return own.result
        if own.error is not None:
            raise Fault.from_body(own.error)
        for name, blob in own.outputs.items():
            channel = next(number for number, known in _OUTPUTS.items() if known == name)
            data = blob.data if blob.data is not None else self.store.get(ref.rollout).blob(blob.digest)
            await call.send(data, channel)
        result = msgspec.json.decode(own.result or b"{}", type=dict[str, object])
        return {**result, "replayed": True} if own.kind == "exec" and "exit_code" in result else result

    # -- what the fake edge has not --

    async def _session(self, call: Call) -> object:
        name = call.params(dict[str, msgspec.Raw])["name"]
        return {"name": msgspec.msgpack.decode(name), "pid": 5, "shell": "sh", "started_at": 0.0}

    async def _nothing(self, call: Call) -> object:
        self._box(call.params(Target))
        return {}

    async def _interrupted(self, call: Call) -> object:
        self._box(call.params(Target))
        return {"ended": True}

    async def _network(self, call: Call) -> object:
        params = call.params(_Network)
        self._box(params)
        return Network("proxy", params.rules, dict.fromkeys(params.rules, "allowed"))
