"""Rollouts for the tests: what a step asks, what comes of it, and a disk that makes durable when it is told to."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from dsec.protocol.rollouts import StepRecord
from dsec.protocol.specs import DSecContainerRunArgs
from dsec.rollout.trajectory import Trajectory, TrajectoryStore

ID = "ro-e1-0123456789ab"
ARGS = DSecContainerRunArgs("debian@12", env={"A": "ä"})


def asked(number: int, *, epoch: int = 1, line: str = "true") -> StepRecord:
    return StepRecord(
        step=number,
        kind="exec",
        digest=f"{number:064x}",
        request=msgspec.Raw(msgspec.json.encode({"kind": "exec", "line": line})),
        sandbox="sb-e1-1",
        incarnation=1,
        asked_at=float(number),
        epoch=epoch,
    )


async def told(trajectory: Trajectory, number: int, out: bytes = b"out") -> StepRecord:
    output = trajectory.output()
    for start in range(0, len(out), 1000):
        output.write(out[start : start + 1000])
    return await trajectory.outcome(
        number, result=b'{"exit_code":0}', error=None, outputs={"stdout": output}, inputs={}, done_at=number + 0.5
    )


async def do(trajectory: Trajectory, number: int, out: bytes = b"out") -> StepRecord:
    trajectory.intent(asked(number))
    return await told(trajectory, number, out)


def opened(root: Path, **options: int) -> TrajectoryStore:
    store = TrajectoryStore(root, **options)
    store.load()
    return store


async def filled(root: Path, steps: int, out: bytes = b"out", **options: int) -> list[StepRecord]:
    """A store with one rollout, closed as by a death: without its summary."""
    store = opened(root, **options)
    trajectory = store.create(ID, job="j", name="r", args=ARGS)
    await trajectory.opened()
    await trajectory.made("sb-e1-1", 1, ("x@sha256:1",))
    records = [await do(trajectory, number, out) for number in range(steps)]
    store.close()
    (root / ID / "summary").unlink(missing_ok=True)
    return records


class Disk:
    """In place of the syncer: nothing is durable before `settle`, and what is asked for after it began is not in it."""

    def __init__(self) -> None:
        self.waiting: list[asyncio.Future[None]] = []

    def sync(self, fd: int) -> asyncio.Future[None]:
        self.waiting.append(asyncio.get_running_loop().create_future())
        return self.waiting[-1]

    def settle(self, error: OSError | None = None) -> None:
        waiting, self.waiting = self.waiting, []
        for future in waiting:
            if error is None:
                future.set_result(None)
            else:
                future.set_exception(error)
                future.exception()

    def close(self) -> None:
        self.waiting.clear()


def with_disk(store: TrajectoryStore) -> Disk:
    disk = Disk()
    store._shelf.syncer.close()
    store._shelf.syncer = disk  # type: ignore[assignment]
    return disk


async def until(condition: Callable[[], object]) -> None:
    """Turns the loop until it holds."""
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, "it never came to that"
        await asyncio.sleep(0)


REAL = os.pwrite


class FullDisk:
    """Takes so many bytes more, and then none; what fits of a write is written."""

    def __init__(self, room: int) -> None:
        self.room, self.pwrite = room, REAL

    def __call__(self, fd: int, data: bytes | memoryview, offset: int) -> int:
        if not self.room:
            raise OSError(28, "No space left on device")
        written = self.pwrite(fd, memoryview(data)[: self.room], offset)
        self.room -= written
        return written
