"""A trajectory store gives back what it was told, after any end of its process."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from dsec.protocol.errors import ErrorKind, Fault
from dsec.protocol.rollouts import RolloutState, StepRecord
from dsec.protocol.specs import DSecContainerRunArgs, Reason
from dsec.rollout.trajectory import Trajectory, TrajectoryStore

ID = "ro-e1-0123456789ab"
ARGS = DSecContainerRunArgs("debian@12", env={"A": "ä"})


def asked(number: int, *, kind: str = "exec") -> StepRecord:
    return StepRecord(
        step=number, kind=kind, digest=f"{number:064x}", request=msgspec.Raw(b'{"kind":"exec","line":"true"}'),
        sandbox="sb-e1-1", incarnation=1, asked_at=float(number), epoch=1,
    )  # fmt: skip


async def do(trajectory: Trajectory, number: int, out: bytes = b"out") -> StepRecord:
    trajectory.intent(asked(number))
    output = trajectory.output()
    output.write(out)
    return await trajectory.outcome(
        number, result=b'{"exit_code":0}', error=None, outputs={"stdout": output}, inputs={}, done_at=number + 0.5
    )


async def test_what_was_recorded_is_read_back(tmp_path: Path) -> None:
    store = TrajectoryStore(tmp_path)
    store.load()
    trajectory = store.create(ID, job="j", name="r", args=ARGS)
    assert await trajectory.opened() == 1
    await trajectory.made("sb-e1-1", 1, ("x@sha256:1",))
    records = [await do(trajectory, number, b"x" * (number * 5000)) for number in range(10)]
    trajectory.intent(asked(10))
    store.close()
    again = TrajectoryStore(tmp_path)
    again.load()
    found = again.find("j", "r")
    assert found is not None and found.id == ID and found.args == ARGS
    assert found.read(0, 100, 1 << 30)[:10] == records
    long = records[9].outputs["stdout"]
    assert long.data is None and found.blob(long.digest) == b"x" * 45000
    info = found.info()
    assert (info.steps, info.unknown, info.state, info.epoch) == (11, (10,), RolloutState.OPEN, 1)
    assert await found.opened() == 2
    await found.finished(Reason.USER, 1.0, True)
    with pytest.raises(Fault) as refused:
        found.intent(asked(11))
    assert refused.value.body.kind is ErrorKind.CONFLICT
    again.close()
