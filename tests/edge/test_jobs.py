"""Jobs on an edge whose backend is slow, fails and dies on command, and which is started again from its journal."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TypeVar

import msgspec
import pytest

from dsec.backends.launcher import LauncherUsage
from dsec.edge import accounting
from dsec.edge.accounting import Accounts
from dsec.edge.admission import Admission
from dsec.edge.jobs import JobService
from dsec.edge.journal import Journal
from dsec.edge.lifecycle import Lifecycle
from dsec.edge.membership import Jobs
from dsec.protocol.errors import ErrorKind, Fault
from dsec.protocol.rollouts import JobInfo, JobLimits, JobState, JobUsage, JobWork
from dsec.protocol.specs import DSecContainerRunArgs, Reason, State
from dsec.rollout.jobs import EMPTY_S, KEEP_STOPPED_S
from tests.edge.test_lifecycle import DEADLINE, until
from tests.edge.test_pause import Freezer, any_environment  # noqa: F401 (a fixture)

T = TypeVar("T")
ARGS = DSecContainerRunArgs("debian@12")


class Metered(Freezer):
    """Its sandboxes use what the test says."""

    def __init__(self) -> None:
        super().__init__()
        self.used = LauncherUsage(memory=64 << 20, cpu_ns=2_000_000_000)
        self.asked = 0

    async def usage(self, sandbox: str) -> LauncherUsage:
        self.asked += 1
        return self.used

    async def stop(self, sandbox: str, environment: object) -> LauncherUsage:
        await super().stop(sandbox, environment)
        return self.used


class FakeCall:
    """A request whose answer is taken as it is."""

    def __init__(self, params: object) -> None:
        self.raw = msgspec.msgpack.encode(params)

    def params(self, kind: type[T]) -> T:
        return msgspec.msgpack.decode(self.raw, type=kind)


class Place:
    """An edge's part that has to do with jobs; `again` is what another process would make of the journal."""

    def __init__(self, directory: Path, backend: Metered) -> None:
        self.directory, self.backend = directory, backend
        self.recorded: dict[str, tuple[int, int]] = {}
        self.now = 1000.0
        self.wall = 1_000_000.0
        self.journal = Journal(directory / "journal")
        self.life = Lifecycle("t", None, backend, self.journal, Admission(100, 8))  # type: ignore[arg-type]
        self.life.jobs = Jobs("t", self.journal, lambda: self.now, lambda: self.wall)
        self.accounts = Accounts(self.life)
        self.service = JobService(self.life, self.accounts, lambda job: self.recorded.get(job, (0, 0)))
        self.timers = asyncio.create_task(self.service.run())

    async def ask(self, method: str, name: str = "j", **params: object) -> JobInfo:
        answer = await self.service.handlers()[f"job.{method}"](FakeCall({"name": name, **params}))  # type: ignore[arg-type]
        assert isinstance(answer, JobInfo)
        return answer

    async def usage(self, name: str = "j") -> JobUsage:
        answer = await self.service.usage(FakeCall({"name": name}))  # type: ignore[arg-type]
        assert isinstance(answer, JobUsage)
        return answer

    def state(self, name: str = "j") -> JobState:
        return self.life.jobs.get(name).record.state

    def states(self) -> list[State]:
        return [sandbox.state for sandbox in self.life.live()]

    def die(self) -> None:
        """As by SIGKILL: what is in the journal is all that stays."""
        self.timers.cancel()
        self.journal.close()


@pytest.fixture
async def place(tmp_path: Path) -> AsyncIterator[Place]:
    made = Place(tmp_path, Metered())
    yield made
    made.timers.cancel()
    for gate in (made.backend.gate, made.backend.stopping, *made.backend.gates.values()):
        gate.set()
    await asyncio.wait_for(made.life.stop_all(Reason.USER), DEADLINE)
    made.journal.close()


async def test_a_burst_never_exceeds_the_jobs_limit(place: Place) -> None:
    await place.ask("open", limits=JobLimits(max_sandboxes=17))
    results = await asyncio.gather(*(place.life.create(ARGS, 10, "j") for _ in range(90)), return_exceptions=True)
    refused = [one for one in results if isinstance(one, Fault)]
    assert len(refused) == 73 and place.backend.made == 17
    assert {fault.body.details["limit"] for fault in refused} == {"job j max_sandboxes"}
    assert {fault.body.kind for fault in refused} == {ErrorKind.CAPACITY}
    await place.life.create(ARGS, 10)  # the node has room
    await place.life.stop(place.life.live()[0].id)
    await place.life.create(ARGS, 10, "j")


async def test_the_same_key_is_the_same_sandbox_though_the_job_is_full(place: Place) -> None:
    await place.ask("open", limits=JobLimits(max_sandboxes=1))
    args = DSecContainerRunArgs("debian@12", idempotency_key="k")
    first = await place.life.create(args, 10, "j")
    assert (await place.life.create(args, 10, "j")).id == first.id


async def test_nothing_is_made_in_a_job_that_is_not_there_or_over(place: Place) -> None:
    with pytest.raises(Fault) as caught:
        await place.life.create(ARGS, 10, "nope")
    assert caught.value.body.kind is ErrorKind.NOT_FOUND
    await place.ask("open")
    assert (await place.ask("stop")).state is JobState.STOPPED, "a job with nothing in it"
    for attempt in (place.life.create(ARGS, 10, "j"), place.ask("renew"), place.ask("pause"), place.ask("resume")):
        with pytest.raises(Fault) as caught:
            await attempt
        assert caught.value.body.kind is ErrorKind.CONFLICT
    assert place.life.admission.held == 0


async def test_a_stopped_name_begins_a_new_job(place: Place) -> None:
    old = await place.ask("open", labels={"a": "b"})
    await place.ask("stop")
    new = await place.ask("open")
    assert new.id != old.id and new.state is JobState.RUNNING and new.labels == {} and new.epoch == 1
    with pytest.raises(Fault, match="another one") as caught:
        await place.ask("renew", id=old.id)
    assert caught.value.body.kind is ErrorKind.CONFLICT
    assert (await place.ask("renew", id=new.id)).id == new.id


async def test_a_vanished_client_pauses_its_job(place: Place) -> None:
    await place.ask("open", lease=60)
    for _ in range(30):
        await place.life.create(ARGS, 10, "j")
    place.now += 59
    await place.ask("renew")
    place.now += 59
    await place.life.create(ARGS, 10)  # somebody else's
    assert place.state() is JobState.RUNNING
    place.now += 2
    await until(lambda: place.states().count(State.PAUSED) == 30)
    info = await place.ask("info")
    assert (info.state, info.paused_by) == (JobState.PAUSED, "lease")
    assert place.states().count(State.RUNNING) == 1


async def test_a_client_that_comes_back_goes_on(place: Place) -> None:
    await place.ask("open", lease=60)
    created = await place.life.create(ARGS, 10, "j")
    for back in ("renew", "open", "resume"):
        place.now += 100
        await until(lambda: place.states() == [State.PAUSED])
        assert (await place.ask(back)).state is JobState.RUNNING
        assert place.states() == [State.RUNNING if back == "resume" else State.PAUSED]
        await place.life.ready(created.id)
    assert place.state() is JobState.RUNNING


async def test_a_request_keeps_it_paused_whoever_renews(place: Place) -> None:
    await place.ask("open")
    await place.life.create(ARGS, 10, "j")
    assert (await place.ask("pause")).paused_by == "request"
    assert (await place.ask("renew")).state is JobState.PAUSED
    await place.life.create(ARGS, 10, "j")  # but who makes something in it needs it
    assert place.state() is JobState.RUNNING and sorted(place.states()) == [State.PAUSED, State.RUNNING]
    await place.ask("pause")
    assert place.states() == [State.PAUSED] * 2


async def test_what_is_being_made_is_paused_too(place: Place) -> None:
    await place.ask("open")
    await place.life.create(ARGS, 10, "j")
    place.backend.gate.clear()
    making = [asyncio.create_task(place.life.create(ARGS, 10, "j")) for _ in range(20)]  # some of them wait for a lane
    await until(lambda: len(place.life.live()) == 21)
    info = await place.ask("pause", wait_s=0)
    assert info.under_way is JobWork.PAUSE
    await until(lambda: place.states().count(State.PAUSED) == 1)
    place.backend.gate.set()
    await asyncio.wait_for(asyncio.gather(*making), DEADLINE)
    assert (await place.ask("pause")).under_way is JobWork.NONE
    assert place.states() == [State.PAUSED] * 21


async def test_all_stand_still_before_anybody_waits_for_memory(place: Place) -> None:
    await place.ask("open")
    for _ in range(50):
        await place.life.create(ARGS, 10, "j")
    place.backend.gates["reclaim"].clear()
    pausing = asyncio.create_task(place.ask("pause"))
    await until(lambda: len(place.backend.frozen) == 50)
    assert not pausing.done()
    place.backend.gates["reclaim"].set()
    assert (await asyncio.wait_for(pausing, DEADLINE)).under_way is JobWork.NONE


async def test_a_slow_disk_does_not_hold_up_the_answer(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dsec.edge.jobs.GIVEN_BACK_S", 0.01)
    await place.ask("open")
    for _ in range(5):
        await place.life.create(ARGS, 10, "j")
    place.backend.gates["reclaim"].clear()
    info = await asyncio.wait_for(place.ask("pause"), DEADLINE)
    assert info.under_way is JobWork.NONE and len(place.backend.frozen) == 5


async def test_a_resume_does_not_wait_for_the_pause_to_be_through(place: Place) -> None:
    await place.ask("open")
    for _ in range(50):
        await place.life.create(ARGS, 10, "j")
    place.backend.gates["reclaim"].clear()
    pausing = asyncio.create_task(place.ask("pause"))
    await until(lambda: len(place.backend.frozen) > 20)
    resumed = await asyncio.wait_for(place.ask("resume"), DEADLINE)
    assert resumed.state is JobState.RUNNING and place.states() == [State.RUNNING] * 50 and not place.backend.frozen
    await asyncio.wait_for(pausing, DEADLINE)
    assert place.states() == [State.RUNNING] * 50, "nothing is paused behind it"


async def test_a_resume_overtakes_creations_that_a_pause_waits_for(place: Place) -> None:
    await place.ask("open")
    place.backend.gate.clear()
    making = asyncio.create_task(place.life.create(ARGS, 10, "j"))
    await until(lambda: len(place.life.live()) == 1)
    await place.ask("pause", wait_s=0)
    resuming = asyncio.create_task(place.ask("resume"))
    await until(lambda: place.state() is JobState.RUNNING)
    place.backend.gate.set()
    await asyncio.wait_for(asyncio.gather(making, resuming), DEADLINE)
    assert place.states() == [State.RUNNING]


async def test_one_that_fails_does_not_keep_the_others(place: Place) -> None:
    await place.ask("open")
    ids = [(await place.life.create(ARGS, 10, "j")).id for _ in range(20)]
    for id in ids[:3]:
        place.backend.die(id)
    assert (await place.ask("pause")).under_way is JobWork.NONE
    await until(lambda: place.states() == [State.PAUSED] * 17)


async def test_stop_ends_all_by_name_and_refuses_what_comes_late(place: Place) -> None:
    await place.ask("open")
    done = [(await place.life.create(ARGS, 10, "j")).id for _ in range(5)]
    await place.life.pause(done[0])
    place.backend.gate.clear()
    making = [asyncio.create_task(place.life.create(ARGS, 10, "j")) for _ in range(5)]
    await until(lambda: len(place.life.live()) == 10)
    stopping = [asyncio.create_task(place.ask("stop")) for _ in range(2)]
    await until(lambda: place.state() is JobState.STOPPING)
    for attempt in (place.life.create(ARGS, 10, "j"), place.ask("open")):
        with pytest.raises(Fault) as caught:
            await attempt
        assert caught.value.body.kind is ErrorKind.CONFLICT and caught.value.body.retryable
    place.backend.gate.set()
    refused = await asyncio.wait_for(asyncio.gather(*making, return_exceptions=True), DEADLINE)
    assert all(isinstance(one, Fault) and one.body.kind is ErrorKind.UNAVAILABLE for one in refused)
    assert [one.state for one in await asyncio.wait_for(asyncio.gather(*stopping), DEADLINE)] == [JobState.STOPPED] * 2
    assert not place.life.live() and not place.backend.alive
    assert {place.life.get(id).reason for id in done} == {Reason.JOB_END}


async def test_its_account_survives_its_sandboxes(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    place.recorded[(await place.ask("open")).id] = (7, 70)
    for _ in range(3):
        await place.life.create(ARGS, 10, "j")
    place.now += 10
    usage = await place.usage()
    assert (usage.cpu_s, usage.memory_bytes, usage.memory_mb_s) == (6.0, 3 * 64 << 20, 3 * 64 * 10)
    assert place.backend.asked == 3
    await place.usage()
    assert place.backend.asked == 3, "that was just now"
    await place.life.stop(place.life.live()[0].id)
    place.backend.die(place.life.live()[0].id)
    await until(lambda: len(place.life.live()) == 1)
    usage = await place.usage()
    assert (usage.cpu_s, usage.created, usage.ended, usage.invalid) == (6.0, 3, 2, 0)
    assert (usage.rollouts, usage.steps, usage.sandboxes) == (7, 70, {"running": 1})


async def test_samples_come_in_rounds_and_paused_ones_seldom(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ROUND_S", "TICK_S"):
        monkeypatch.setattr(accounting, name, 0.001)
    await place.ask("open")
    awake, asleep = await place.life.create(ARGS, 10, "j"), await place.life.create(ARGS, 10, "j")
    await place.life.create(ARGS, 10)  # in no job
    sampled: list[str] = []

    async def usage(sandbox: str) -> LauncherUsage:
        sampled.append(sandbox)
        return place.backend.used

    monkeypatch.setattr(place.backend, "usage", usage)
    await place.life.pause(asleep.id)
    running = asyncio.create_task(place.accounts.run())
    await until(lambda: sampled.count(awake.id) >= 5)
    assert sampled.count(asleep.id) == 1 and set(sampled) == {awake.id, asleep.id}
    place.now += accounting.PAUSED_S
    await until(lambda: sampled.count(asleep.id) == 2)
    running.cancel()


async def test_what_is_over_is_forgotten(place: Place) -> None:
    await place.ask("open", name="left", lease=60)
    await place.ask("open", name="kept", lease=60)
    place.recorded[(await place.ask("open", name="replayable", lease=60)).id] = (1, 0)
    await place.life.create(ARGS, 10, "kept")
    place.now += 61
    await until(lambda: {place.state(name) for name in ("left", "kept", "replayable")} == {JobState.PAUSED})
    place.wall += EMPTY_S + 1
    await until(lambda: place.state("left") is JobState.STOPPED)
    place.wall += KEEP_STOPPED_S + 1
    await until(lambda: [job.name for job in place.life.jobs.all()] == ["kept", "replayable"])
    assert [record.name for record in place.journal.jobs()] == ["kept", "replayable"]
    assert place.state("replayable") is JobState.PAUSED


# -- another edge takes over --


async def taken_over(place: Place, directory: Path) -> Place:
    """What a restarted edge has; its sandboxes are not this test's matter, so all of them are gone."""
    await place.journal.commit()
    place.die()
    after = Place(directory, Metered())
    after.now = place.now + 1e6  # however long it was away
    after.life.jobs = Jobs("t", after.journal, lambda: after.now, lambda: after.wall)
    after.service = JobService(after.life, after.accounts, lambda job: (0, 0))
    return after


async def test_a_restart_keeps_jobs_and_their_accounts_and_begins_leases_anew(tmp_path: Path) -> None:
    place = Place(tmp_path, Metered())
    await place.ask("open", name="a", lease=60, limits=JobLimits(max_sandboxes=5), labels={"team": "x"})
    await place.ask("open", name="b", lease=60)
    await place.ask("open", name="c", lease=60)
    for _ in range(3):
        await place.life.create(ARGS, 10, "a")
    await place.life.stop(place.life.live()[0].id)
    await place.ask("pause", name="b")
    await place.ask("stop", name="c")
    after = await taken_over(place, tmp_path)
    after.timers.cancel()
    infos = {job.name: await after.ask("info", name=job.name) for job in after.life.jobs.all()}
    assert {name: info.state for name, info in infos.items()} == {
        "a": JobState.RUNNING, "b": JobState.PAUSED, "c": JobState.STOPPED
    }  # fmt: skip
    a = infos["a"]
    assert a.limits == JobLimits(max_sandboxes=5) and a.labels == {"team": "x"} and a.epoch == 1
    assert (a.usage.created, a.usage.ended, a.usage.cpu_s) == (3, 1, 2.0)
    job = after.life.jobs.get("a")
    assert not job.lapsed(after.now + 59) and job.lapsed(after.now + 61)
    place.backend.alive.clear()
    after.die()


@pytest.mark.parametrize(
    "method, ends", [("pause", JobState.PAUSED), ("resume", JobState.RUNNING), ("stop", JobState.STOPPED)]
)
async def test_what_was_under_way_is_gone_on_with(tmp_path: Path, method: str, ends: JobState) -> None:
    place = Place(tmp_path, Metered())
    await place.ask("open")
    await place.life.create(ARGS, 10, "j")
    if method == "resume":
        await place.ask("pause")
    for gate in (place.backend.stopping, *place.backend.gates.values()):
        gate.clear()
    await place.ask(method, wait_s=0)
    after = await taken_over(place, tmp_path)
    assert after.life.jobs.get("j").record.under_way == method
    await after.service.go_on()
    await until(lambda: after.life.jobs.get("j").record.under_way is JobWork.NONE)
    assert after.state() is ends
    after.die()


async def test_jobs_survive_the_compaction_of_the_journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dsec.edge.journal.COMPACT_FROM", 4096)
    place = Place(tmp_path, Metered())
    await place.ask("open", name="gone")
    await place.ask("stop", name="gone")
    place.life.jobs.forget(place.life.jobs.get("gone"))
    for number in range(200):
        await place.ask("open", labels={"n": str(number)})
    assert (tmp_path / "journal").stat().st_size < 16 * 1024
    after = await taken_over(place, tmp_path)
    assert [(job.name, job.record.labels, job.record.epoch) for job in after.life.jobs.all()] == [
        ("j", {"n": "199"}, 200)
    ]
    after.die()
