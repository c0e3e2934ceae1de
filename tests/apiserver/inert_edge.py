"""A fake edge that is safe to be sent anything: commands are not run, and every path is a scratch file of its own."""

from __future__ import annotations

import hashlib
import os

import msgspec

from dsec.protocol.errors import ErrorBody, ErrorKind, Fault
from dsec.protocol.link import Call, pack_record
from dsec.protocol.rollouts import Blob, RolloutInfo, RolloutState, StepRecord
from dsec.protocol.specs import DSecContainerRunArgs, ExecDone, ProcessInfo, Reason, State
from dsec.rollout.jobs import Job, JobRecord

from .fake_edge import Attach, Box, ExecParams, FakeEdge, Path1, Target
from .fake_jobs import Params

LIVE = "sb-fake-000000000000"
COMMAND = "command"
ROLLOUT = "ro-fake-000000000000"
JOB = "job"


class InertEdge(FakeEdge):
    """It has one sandbox, `LIVE`, with one command, `COMMAND`, and one job, `JOB`; all come back when they were ended."""

    def _box(self, target: Target, *, ended: bool = False) -> Box:
        if target.sandbox == LIVE and target.incarnation in (None, 1):
            self._revive()
        return super()._box(target, ended=ended)

    def _revive(self) -> None:
        box = self.boxes.get(LIVE)
        if box is None or box.state is not State.RUNNING:
            root = self.directory / LIVE
            root.mkdir(exist_ok=True)
            self.boxes[LIVE] = Box(LIVE, DSecContainerRunArgs("debian@12"), root)

    def _of(self, call: Call) -> tuple[Params, Job]:
        self.jobs.setdefault(JOB, Job(JobRecord(id="jb-fake-000000000000", name=JOB, created_at=0.0, lease=60), 0.0))
        return super()._of(call)

    # -- commands --

    async def run(self, call: Call) -> object:
        """Ends at once, in a way that follows from what was asked."""
        params = call.params(ExecParams)
        box = self._box(Target(params.sandbox, params.incarnation))
        box.lines.append((0.0, params.exec_id))
        if params.detached and not params.follow:
            return {"pid": 2}
        await call.send(b"out\xff\n", 1)
        await call.send(b"err\n", 2)
        return _done(params.exec_id)

    def _known(self, call: Call) -> Attach:
        params = call.params(Attach)
        box = self._box(params)
        if params.exec_id != COMMAND and (0.0, params.exec_id) not in box.lines:
            raise Fault(ErrorKind.NOT_FOUND, f"no command {params.exec_id}")
        return params

    async def exec_attach(self, call: Call) -> object:
        return _done(self._known(call).exec_id)

    async def exec_write(self, call: Call) -> object:
        self._known(call)
        return {}

    async def exec_close_stdin(self, call: Call) -> object:
        self._known(call)
        return {}

    async def exec_signal(self, call: Call) -> object:
        self._known(call)
        return {}

    async def exec_list(self, call: Call) -> object:
        self._box(call.params(Target))
        return [ProcessInfo(exec_id=COMMAND, argv=(b"true", b"\xff"), running=False, started_at=0.0, exit_code=0)]

    # -- files --

    def _local(self, call: Call, path: bytes) -> bytes:
        root = os.fsencode(self._box(call.params(Target)).root)
        return root + b"/" + hashlib.sha256(path).hexdigest().encode()

    async def fs_tar(self, call: Call) -> object:
        self._file(self._local(call, call.params(Path1).path), b"")
        await call.send(bytes(1024))
        return {"entries": 0}

    async def fs_untar(self, call: Call) -> object:
        self._box(call.params(Target))
        async for _ in call.data():
            pass
        return {"entries": 0}

    # -- rollouts --

    async def rollout_open(self, call: Call) -> object:
        asked = call.params(_Named)
        return _rollout(asked.job, asked.name)

    async def rollout_find(self, call: Call) -> object:
        asked = call.params(_Named)
        return _rollout(asked.job, asked.name) if asked.name == "known" else None

    async def rollout_list(self, call: Call) -> object:
        await call.send(pack_record(_rollout("", "known")))
        return {"count": 1}

    async def rollout_info(self, call: Call) -> object:
        if call.params(_Rollout).rollout != ROLLOUT:
            raise Fault(ErrorKind.NOT_FOUND, "there is no such rollout")
        return _rollout("", "known")

    rollout_finish = rollout_info

    async def rollout_steps(self, call: Call) -> object:
        await self.rollout_info(call)
        record = StepRecord(
            step=0, kind="exec", digest="00", request=msgspec.Raw(b'{"kind":"exec"}'), sandbox=LIVE, incarnation=1, asked_at=0.0,
            error=ErrorBody(kind=ErrorKind.FILE_NOT_FOUND, message="none"),
            outputs={"stdout": Blob(digest="00", size=1, total=2)},
        )  # fmt: skip
        await call.send(msgspec.json.encode(record) + b"\n")
        return {"count": 1, "truncated": False}

    async def rollout_blob(self, call: Call) -> object:
        await self.rollout_info(call)
        await call.send(b"content")
        return {"size": 7}

    async def rollout_remove(self, call: Call) -> object:
        await self.rollout_info(call)
        return {}


class _Named(msgspec.Struct, frozen=True):
    job: str
    name: str


class _Rollout(msgspec.Struct, frozen=True):
    rollout: str


def _rollout(job: str, name: str) -> RolloutInfo:
    return RolloutInfo(
        id=ROLLOUT, job=job, name=name, state=RolloutState.LOST, epoch=1, sandbox=LIVE, incarnation=1, layers=("debian@12",),
        args=DSecContainerRunArgs("debian@12"), steps=1, unknown=(0,), reason=Reason.USER, finished_at=1.0,
    )  # fmt: skip


def _done(exec_id: str) -> ExecDone:
    return ExecDone(exec_id=exec_id, exit_code=137, signal="KILL", stdout_bytes=5, stderr_bytes=4, timed_out="deadline")
