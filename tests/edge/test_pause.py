"""Pausing and resuming against a backend that is slow, fails and dies on command."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from dsec.backends.launcher import LauncherFailed, LauncherUsage, Reclaimed
from dsec.edge import lifecycle as module
from dsec.edge import pause
from dsec.edge.admission import Admission
from dsec.edge.journal import Journal
from dsec.edge.lifecycle import Lifecycle
from dsec.edge.sandbox import Sandbox
from dsec.layers import Environment
from dsec.protocol.errors import ErrorKind, Fault
from dsec.protocol.specs import DSecContainerRunArgs, Reason, State
from tests.edge.test_lifecycle import DEADLINE, Backend, until

ARGS = DSecContainerRunArgs("debian@12")


class Freezer(Backend):
    """Each verb has a gate that holds it, and can be made to fail."""

    VERBS = ("freeze", "thaw", "reclaim", "prefetch")

    def __init__(self) -> None:
        super().__init__()
        self.gates = {verb: asyncio.Event() for verb in self.VERBS}
        for gate in self.gates.values():
            gate.set()
        self.stopping = asyncio.Event()
        self.stopping.set()
        self.failing: set[str] = set()
        self.calls: list[str] = []
        self.frozen: set[str] = set()

    async def _verb(self, verb: str, sandbox: str) -> None:
        self.calls.append(verb)
        await self.gates[verb].wait()
        if verb in self.failing or sandbox not in self.alive:
            raise LauncherFailed(verb, "no")

    async def stop(self, sandbox: str, environment: object) -> LauncherUsage:
        await self.stopping.wait()
        return await super().stop(sandbox, environment)

    async def freeze(self, sandbox: str) -> None:
        await self._verb("freeze", sandbox)
        self.frozen.add(sandbox)

    async def thaw(self, sandbox: str) -> None:
        await self._verb("thaw", sandbox)
        self.frozen.discard(sandbox)

    async def reclaim(self, sandbox: str) -> Reclaimed:
        await self._verb("reclaim", sandbox)
        return Reclaimed()

    async def prefetch(self, sandbox: str) -> Reclaimed:
        await self._verb("prefetch", sandbox)
        return Reclaimed()


@pytest.fixture(autouse=True)
def any_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    empty = Environment(layers=(), env={}, workdir=None, user=None)
    monkeypatch.setattr(module, "compose", lambda store, image, layers: empty)


@pytest.fixture
async def backend() -> Freezer:
    return Freezer()


@pytest.fixture
async def life(tmp_path: Path, backend: Freezer) -> AsyncIterator[Lifecycle]:
    journal = Journal(tmp_path / "journal")
    life = Lifecycle("t", None, backend, journal, Admission(1000, 8))  # type: ignore[arg-type]
    yield life
    for gate in (backend.gate, backend.stopping, *backend.gates.values()):
        gate.set()
    await asyncio.wait_for(life.stop_all(Reason.USER), DEADLINE)
    assert not backend.alive and life.admission.held == 0
    journal.close()


async def running(life: Lifecycle, args: DSecContainerRunArgs = ARGS) -> Sandbox:
    return life.running((await life.create(args, 10)).id)


async def test_a_request_resumes_a_paused_sandbox_once(life: Lifecycle, backend: Freezer) -> None:
    sandbox = await running(life)
    await life.pause(sandbox.id)
    await life.pause(sandbox.id)
    assert sandbox.state is State.PAUSED and backend.frozen == {sandbox.id}
    assert backend.calls == ["freeze", "reclaim"], "the second one had nothing to do"
    assert set(await asyncio.gather(*(life.ready(sandbox.id) for _ in range(50)))) == {sandbox}
    assert sandbox.state is State.RUNNING and not backend.frozen
    assert backend.calls.count("thaw") == 1


async def test_pauses_and_resumes_happen_one_after_the_other(life: Lifecycle, backend: Freezer) -> None:
    sandbox = await running(life)
    backend.gates["freeze"].clear()
    pausing = asyncio.create_task(life.pause(sandbox.id))
    await until(lambda: backend.calls == ["freeze"])
    resuming = asyncio.create_task(life.resume(sandbox.id))
    again = asyncio.create_task(life.pause(sandbox.id))
    await asyncio.sleep(0)
    assert backend.calls == ["freeze"], "the resume waits until it is frozen"
    backend.gates["freeze"].set()
    await asyncio.wait_for(asyncio.gather(pausing, resuming, again), DEADLINE)
    order = [call for call in backend.calls if call in ("freeze", "thaw")]
    assert order == ["freeze", "thaw", "freeze"] and sandbox.state is State.PAUSED


async def test_a_resume_does_not_wait_for_memory_that_is_still_leaving(life: Lifecycle, backend: Freezer) -> None:
    sandbox = await running(life)
    backend.gates["reclaim"].clear()
    pausing = asyncio.create_task(life.pause(sandbox.id))
    await until(lambda: "reclaim" in backend.calls)
    await asyncio.wait_for(life.ready(sandbox.id), DEADLINE)
    assert sandbox.state is State.RUNNING and not pausing.done()
    backend.gates["reclaim"].set()
    await asyncio.wait_for(pausing, DEADLINE)
    assert sandbox.state is State.RUNNING


@pytest.mark.parametrize("verb", ["freeze", "thaw", "reclaim", "prefetch"])
async def test_a_stop_ends_it_in_the_middle_of_everything(life: Lifecycle, backend: Freezer, verb: str) -> None:
    sandbox = await running(life)
    if verb in ("thaw", "prefetch"):
        await life.pause(sandbox.id)
    backend.gates[verb].clear()
    work = life.ready(sandbox.id) if verb in ("thaw", "prefetch") else life.pause(sandbox.id)
    task = asyncio.create_task(work)  # type: ignore[arg-type]
    await until(lambda: verb in backend.calls)
    await asyncio.wait_for(life.stop(sandbox.id), DEADLINE)
    assert sandbox.state is State.STOPPED and sandbox.reason is Reason.USER
    backend.gates[verb].set()
    [outcome] = await asyncio.wait_for(asyncio.gather(task, return_exceptions=True), DEADLINE)
    if verb in ("freeze", "thaw"):
        assert isinstance(outcome, Fault) and outcome.body.kind is ErrorKind.UNAVAILABLE
    assert sandbox.state is State.STOPPED, "nothing brings it back"


async def test_one_that_cannot_be_frozen_runs_on(life: Lifecycle, backend: Freezer) -> None:
    sandbox = await running(life)
    backend.failing = {"freeze"}
    with pytest.raises(Fault) as caught:
        await life.pause(sandbox.id)
    assert caught.value.body.kind is ErrorKind.INTERNAL and caught.value.body.retryable
    assert sandbox.state is State.RUNNING and backend.calls == ["freeze", "thaw"]
    assert await life.ready(sandbox.id) is sandbox


async def test_one_of_which_nothing_is_certain_counts_as_paused(life: Lifecycle, backend: Freezer) -> None:
    sandbox = await running(life)
    backend.failing = {"freeze", "thaw"}
    with pytest.raises(Fault):
        await life.pause(sandbox.id)
    assert sandbox.state is State.PAUSED
    backend.failing.clear()
    assert await life.ready(sandbox.id) is sandbox and backend.calls[-2:].count("thaw") == 1


async def test_the_journal_never_calls_a_frozen_one_running(life: Lifecycle, backend: Freezer) -> None:
    sandbox = await running(life)
    recorded = []

    async def freeze(id: str) -> None:
        recorded.append(life.journal.record(id).state)  # type: ignore[union-attr]

    async def thaw(id: str) -> None:
        recorded.append(life.journal.record(id).state)  # type: ignore[union-attr]

    backend.freeze, backend.thaw = freeze, thaw  # type: ignore[method-assign]
    await life.pause(sandbox.id)
    await life.ready(sandbox.id)
    assert recorded == [State.PAUSED, State.PAUSED]
    assert life.journal.record(sandbox.id).state is State.RUNNING  # type: ignore[union-attr]


async def test_one_that_cannot_be_resumed_can_be_asked_again_and_removed(life: Lifecycle, backend: Freezer) -> None:
    sandbox = await running(life)
    await life.pause(sandbox.id)
    backend.failing = {"thaw"}
    for _ in range(2 * pause.AT_ONCE):  # no place is lost to a failure
        with pytest.raises(Fault) as caught:
            await asyncio.wait_for(life.ready(sandbox.id), DEADLINE)
        assert caught.value.body.kind is ErrorKind.INTERNAL and sandbox.state is State.PAUSED
    backend.failing.clear()
    assert await asyncio.wait_for(life.ready(sandbox.id), DEADLINE) is sandbox
    await life.pause(sandbox.id)
    backend.failing = {"thaw"}
    await asyncio.wait_for(life.stop(sandbox.id), DEADLINE)
    assert sandbox.state is State.STOPPED


async def test_memory_that_stays_does_not_keep_it_from_its_pause(life: Lifecycle, backend: Freezer) -> None:
    sandbox = await running(life)
    backend.failing = {"reclaim", "prefetch"}
    await life.pause(sandbox.id)
    assert sandbox.state is State.PAUSED
    await life.ready(sandbox.id)
    assert sandbox.state is State.RUNNING


async def test_a_pause_that_nobody_waits_for_any_more_is_whole(life: Lifecycle, backend: Freezer) -> None:
    sandbox = await running(life)
    backend.gates["freeze"].clear()
    pausing = asyncio.create_task(life.pause(sandbox.id))
    await until(lambda: backend.calls == ["freeze"])
    pausing.cancel()
    backend.gates["freeze"].set()
    await until(lambda: "reclaim" in backend.calls)
    assert sandbox.state is State.PAUSED and backend.frozen == {sandbox.id}
    await asyncio.wait_for(life.ready(sandbox.id), DEADLINE)


async def test_a_pause_right_after_a_resume_gives_the_memory_back_all_the_same(
    life: Lifecycle, backend: Freezer
) -> None:
    """The launcher moves the memory of a sandbox one way at a time, and refuses what comes too early."""
    sandbox = await running(life)
    await life.pause(sandbox.id)
    backend.gates["prefetch"].clear()
    await life.ready(sandbox.id)
    await until(lambda: "prefetch" in backend.calls)
    pausing = asyncio.create_task(life.pause(sandbox.id))
    await until(lambda: sandbox.id in backend.frozen)
    await asyncio.sleep(0)
    assert backend.calls.count("reclaim") == 1
    backend.gates["prefetch"].set()
    await asyncio.wait_for(pausing, DEADLINE)
    assert backend.calls.count("reclaim") == 2


async def test_one_in_the_making_is_paused_when_it_runs(life: Lifecycle, backend: Freezer) -> None:
    backend.gate.clear()
    creation = asyncio.create_task(life.create(ARGS, 10))
    await until(lambda: bool(life.live()))
    [sandbox] = life.live()
    pausing = asyncio.create_task(life.pause(sandbox.id))
    await asyncio.sleep(0)
    assert sandbox.state is State.CREATING
    backend.gate.set()
    await asyncio.wait_for(asyncio.gather(creation, pausing), DEADLINE)
    assert sandbox.state is State.PAUSED


async def test_a_paused_one_still_has_its_idempotency_key(life: Lifecycle) -> None:
    args = DSecContainerRunArgs("debian@12", idempotency_key="k")
    first = await life.create(args, 10)
    await life.pause(first.id)
    assert (await asyncio.wait_for(life.create(args, 10), DEADLINE)).id == first.id


async def test_the_death_of_a_paused_one_is_seen(life: Lifecycle, backend: Freezer) -> None:
    sandbox = await running(life)
    await life.pause(sandbox.id)
    backend.die(sandbox.id)
    await asyncio.wait_for(sandbox.ended.wait(), DEADLINE)
    assert sandbox.reason is Reason.AGENT_LOST
    with pytest.raises(Fault) as caught:
        await life.ready(sandbox.id)
    assert caught.value.body.details["reason"] == "agent_lost"


async def test_who_only_waits_wakes_nobody(life: Lifecycle) -> None:
    first, second = await running(life), await running(life)
    for sandbox in (first, second):
        await life.pause(sandbox.id)
    waiting = [asyncio.create_task(life.awake(sandbox.id)) for sandbox in (first, second)]
    await asyncio.sleep(0)
    assert first.state is State.PAUSED and not any(task.done() for task in waiting)
    await life.ready(first.id)
    assert await asyncio.wait_for(waiting[0], DEADLINE) is first
    await life.stop(second.id)
    with pytest.raises(Fault) as caught:
        await asyncio.wait_for(waiting[1], DEADLINE)
    assert caught.value.body.kind is ErrorKind.UNAVAILABLE


async def test_a_pause_lets_short_requests_end_first(life: Lifecycle, backend: Freezer) -> None:
    sandbox = await running(life)
    with sandbox.sleep.short():
        pausing = asyncio.create_task(life.pause(sandbox.id))
        await until(lambda: sandbox.state is State.PAUSED)
        assert "freeze" not in backend.calls
    await asyncio.wait_for(pausing, DEADLINE)
    assert backend.calls[0] == "freeze"


async def test_but_not_for_ever(life: Lifecycle, backend: Freezer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pause, "QUIET_S", 0.01)
    sandbox = await running(life)
    with sandbox.sleep.short():
        await asyncio.wait_for(life.pause(sandbox.id), DEADLINE)
        assert sandbox.state is State.PAUSED


async def test_the_idle_clock_of_a_paused_one_goes_on(life: Lifecycle) -> None:
    sandbox = await running(life, DSecContainerRunArgs("debian@12", ttl_running_stop=100, ttl_total=1000))
    with sandbox.activity():
        now = time.monotonic()
        assert sandbox.expired(now + 200) is None, "a command runs"
        await life.pause(sandbox.id)
        assert sandbox.expired(now + 99) is None
        assert sandbox.expired(now + 200) is Reason.TTL_IDLE, "it does not run any more, though somebody waits for it"
        await life.ready(sandbox.id)
        assert sandbox.expired(now + 200) is None
    await life.pause(sandbox.id)
    assert sandbox.expired(now + 1100) is Reason.TTL_TOTAL
    watch = asyncio.create_task(life.watch_ttls())
    sandbox.idle_limit = 0.001
    await asyncio.wait_for(sandbox.ended.wait(), DEADLINE)
    watch.cancel()
    assert sandbox.reason is Reason.TTL_IDLE


async def test_thousands_resumed_together_come_a_few_at_a_time(
    life: Lifecycle, backend: Freezer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pause, "FIRST_MOMENTS_S", 60.0)
    sandboxes = [await running(life) for _ in range(100)]
    await asyncio.gather(*(life.pause(sandbox.id) for sandbox in sandboxes))
    backend.gates["prefetch"].clear()
    resuming = asyncio.gather(*(life.ready(sandbox.id) for sandbox in sandboxes))
    await until(lambda: backend.calls.count("prefetch") == pause.AT_ONCE)
    assert sum(sandbox.state is State.RUNNING for sandbox in sandboxes) == pause.AT_ONCE
    backend.gates["prefetch"].set()
    await asyncio.wait_for(resuming, DEADLINE)
    assert not backend.frozen


async def test_a_slow_disk_holds_nobody_up_for_long(
    life: Lifecycle, backend: Freezer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pause, "FIRST_MOMENTS_S", 0.01)
    monkeypatch.setattr(pause, "RECLAIM_S", 0.01)
    sandboxes = [await running(life) for _ in range(3 * pause.AT_ONCE)]
    backend.gates["reclaim"].clear()
    await asyncio.wait_for(asyncio.gather(*(life.pause(sandbox.id) for sandbox in sandboxes)), DEADLINE)
    backend.gates["prefetch"].clear()
    await asyncio.wait_for(asyncio.gather(*(life.ready(sandbox.id) for sandbox in sandboxes)), DEADLINE)


async def test_the_journal_never_calls_an_ending_sandbox_paused_or_stopping(life: Lifecycle, backend: Freezer) -> None:
    """A stop while a pause waits for the last answers: whoever finds the record must know that it has to be removed."""
    sandbox = await running(life)
    backend.stopping.clear()
    with sandbox.sleep.short():
        pausing = asyncio.create_task(life.pause(sandbox.id))
        await until(lambda: sandbox.state is State.PAUSED)
        stopping = asyncio.create_task(life.stop(sandbox.id))
        await until(lambda: sandbox.state is State.STOPPING)
    with pytest.raises(Fault) as caught:
        await asyncio.wait_for(pausing, DEADLINE)
    record = life.journal.record(sandbox.id)
    assert caught.value.body.kind is ErrorKind.UNAVAILABLE
    assert record is not None and (record.state, record.stop_reason) == (State.RUNNING, Reason.USER)
    backend.stopping.set()
    await asyncio.wait_for(stopping, DEADLINE)
