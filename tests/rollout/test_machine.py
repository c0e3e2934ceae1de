"""Random operations, deaths and power cuts, against a plain model of what must be there afterwards.

A death of the process keeps every byte that was written; a power cut keeps what was durable and any part of the rest.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from dsec.protocol.errors import Fault
from dsec.protocol.rollouts import RolloutState, StepRecord
from dsec.protocol.specs import Reason
from dsec.rollout import steplog
from dsec.rollout.trajectory import Trajectory, TrajectoryStore

from .logs import ARGS, ID, Disk, asked, opened, told, with_disk

OUTPUTS = st.sampled_from([b"", b"short", b"x" * 300, b"y" * 301, b"z" * 5000])


class Model:
    """What was told (durable), and what only the process knows."""

    def __init__(self) -> None:
        self.intents: list[StepRecord] = []
        self.outcomes: dict[int, bytes] = {}
        self.epoch = 0
        self.state = RolloutState.OPEN


class Machine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.root = Path(tempfile.mkdtemp(prefix="dsec-machine-"))
        self.generation = 0
        self.model = Model()
        self.telling: dict[int, tuple[asyncio.Task[StepRecord], bytes]] = {}
        self.maybe: dict[int, list[bytes]] = {}
        """Outcomes that are in the file or not: nobody was told of them."""
        self.durable_size = 0
        self.disk: Disk
        self.store: TrajectoryStore
        self.trajectory: Trajectory

    @initialize()
    def begin(self) -> None:
        self._start()
        self.trajectory = self.store.create(ID, job="j", name="r", args=ARGS)
        self.opening()

    def _home(self) -> Path:
        return self.root / str(self.generation)

    def _log(self) -> Path:
        return self._home() / ID / "log"

    def _start(self) -> None:
        self.store = opened(self._home(), inline=100, keep=4000)
        self.disk = with_disk(self.store)

    def _turn(self) -> None:
        for _ in range(4):
            self.loop.run_until_complete(asyncio.sleep(0))

    def _durably(self, doing: asyncio.Task[object]) -> None:
        """Runs to its end on a disk that makes everything durable at once."""

        async def until_done() -> None:
            while not doing.done():
                await asyncio.sleep(0)
                self.disk.settle()

        self.loop.run_until_complete(until_done())
        doing.result()
        self._settled()

    def _settled(self) -> None:
        """All that was written is durable, and who waited is told."""
        self._turn()
        self.durable_size = self._log().stat().st_size
        for number, (task, out) in list(self.telling.items()):
            if task.done():
                assert task.result().done_at is not None
                self.model.outcomes.setdefault(number, out)
                del self.telling[number]

    # -- operations --

    @rule()
    def opening(self) -> None:
        self._durably(self.loop.create_task(self.trajectory.opened()))
        self.model.epoch += 1
        assert self.trajectory.epoch == self.model.epoch

    @precondition(lambda self: self.model.state is RolloutState.OPEN)
    @rule(line=st.text(max_size=20))
    def intending(self, line: str) -> None:
        record = asked(len(self.model.intents), epoch=self.model.epoch, line=line)
        self.trajectory.intent(record)
        self.model.intents.append(record)

    @precondition(lambda self: self.trajectory.info().unknown)
    @rule(data=st.data(), out=OUTPUTS)
    def telling_an_outcome(self, data: st.DataObject, out: bytes) -> None:
        """It is under way; whether it becomes durable is the disk's affair."""
        number = data.draw(st.sampled_from(self.trajectory.info().unknown))
        if number not in self.telling:
            self.telling[number] = self.loop.create_task(told(self.trajectory, number, out)), out
            self._turn()

    @precondition(lambda self: self.disk.waiting)
    @rule()
    def settling(self) -> None:
        for _ in range(3):  # a long content takes a round of its own before its record
            self.disk.settle()
            self._turn()
        if not self.disk.waiting and all(task.done() for task, _ in self.telling.values()):
            self._settled()

    @precondition(lambda self: self.disk.waiting)
    @rule()
    def failing_to_settle(self) -> None:
        self.disk.settle(OSError(5, "Input/output error"))
        self._turn()
        for number, (task, _) in list(self.telling.items()):
            if task.done():
                assert isinstance(task.exception(), Fault)
                self.maybe.setdefault(number, []).append(self.telling.pop(number)[1])

    @rule(reward=st.sampled_from([None, 0.0, 1.0]))
    def finishing(self, reward: float | None) -> None:
        self._durably(self.loop.create_task(self.trajectory.finished(Reason.USER, reward, reward is not None)))
        self.model.state = RolloutState.FINISHED

    @rule()
    def closing(self) -> None:
        self._settle_all()
        self.store.close()
        self._reopen()

    def _settle_all(self) -> None:
        for _ in range(3):
            self.disk.settle()
            self._turn()
        self._settled()

    @rule()
    def dying(self) -> None:
        """Every byte that was written is there; who waited for an outcome was told nothing, but it may be there."""
        self._abandon()
        self._copied(self._log().stat().st_size)
        self._reopen()

    @rule(part=st.floats(0, 1))
    def losing_power(self, part: float) -> None:
        """Of what was not durable a part is there. A new epoch or an end is durable; intents and outcomes may be gone."""
        size = self._log().stat().st_size
        self._abandon()
        self._copied(self.durable_size + int((size - self.durable_size) * part))
        self._reopen()
        del self.model.intents[self.trajectory.steps :]

    def _abandon(self) -> None:
        for task, _ in self.telling.values():
            task.cancel()
            task.cancelled() or (task.done() and task.exception())
        for number, (_, out) in self.telling.items():
            self.maybe.setdefault(number, []).append(out)
        self.telling.clear()
        self._turn()

    def _copied(self, size: int) -> None:
        """As the next start finds it: nobody closed anything."""
        old, self.generation = self._home(), self.generation + 1
        shutil.copytree(old, self._home(), ignore=shutil.ignore_patterns("lock"))
        with open(self._log(), "r+b") as file:
            file.truncate(size)
        self.store.close()
        shutil.rmtree(old)

    def _reopen(self) -> None:
        self._start()
        self.trajectory = self.store.get(ID)
        self.durable_size = self._log().stat().st_size
        for record in self.trajectory.read(0, 10**6, 1 << 30):
            if record.done_at is not None and record.step not in self.model.outcomes:
                size = record.outputs["stdout"].total
                self.model.outcomes[record.step] = next(out for out in self.maybe[record.step] if len(out) == size)
        self.maybe.clear()
        assert not list((self._home() / ID).glob("blobs/.new-*"))

    # -- what must hold --

    @invariant()
    def all_is_as_the_model_has_it(self) -> None:
        info = self.trajectory.info()
        model = self.model
        assert (info.steps, info.epoch, info.state) == (len(model.intents), model.epoch, model.state)
        assert info.unknown == tuple(n for n in range(info.steps) if n not in model.outcomes)
        assert info.damaged is None
        found = self.trajectory.read(0, 10**6, 1 << 30)
        assert [record.request for record in found] == [record.request for record in model.intents]
        for record in found:
            if record.step in model.outcomes:
                out, blob = model.outcomes[record.step], record.outputs["stdout"]
                assert blob.total == len(out)
                kept = blob.data if blob.data is not None else self.trajectory.blob(blob.digest)
                assert kept == out[:4000]

    def teardown(self) -> None:
        self._abandon()
        self.store.close()
        self.loop.close()
        shutil.rmtree(self.root)


@pytest.fixture(autouse=True)
def compacts_early(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steplog, "_COMPACT_FROM", 1000)
    monkeypatch.setattr(steplog, "_SUMMARY_EVERY", 1500)


class TestMachine(Machine.TestCase):
    settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
