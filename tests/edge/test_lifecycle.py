"""The lifecycle's rules, with a backend that makes nothing but can be slow, fail and die on command."""

from __future__ import annotations

import asyncio
import errno
import os
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from dsec.backends.container import Kept, Started
from dsec.backends.launcher import LauncherFailed, LauncherUsage
from dsec.edge import lifecycle as module
from dsec.edge.admission import Admission
from dsec.edge.journal import Journal
from dsec.edge.lifecycle import Lifecycle
from dsec.edge.sandbox import Sandbox
from dsec.layers import Environment
from dsec.protocol.errors import ErrorKind, Fault
from dsec.protocol.specs import DSecContainerRunArgs, Reason, State

DEADLINE = 5.0


class Mounts:
    def hold(self, manifests: object) -> None:
        pass


class Backend:
    """Counts what is alive; `gate` holds creations, `broken` fails them."""

    name = "container"
    pid, start = 1000, 1  # nobody's

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.gate.set()
        self.broken = False
        self.alive: dict[str, int] = {}  # sandbox -> write end of the pipe that plays its pidfd
        self.made = 0
        self.kept: list[str] | None = None
        self.oom_kills = 0
        self.mounts = Mounts()

    async def create(self, sandbox: str, incarnation: int, args: object, environment: object) -> Started:
        await self.gate.wait()
        if self.broken:
            raise Fault(ErrorKind.CREATE_FAILED, "no", stage="launch.overlay")
        read, write = os.pipe()
        self.alive[sandbox] = write
        self.made += 1
        return Started(pid=self.pid, start=self.start, pidfd=read, socket=Path("/nowhere"), stages_us={})

    async def stop(self, sandbox: str, environment: object) -> LauncherUsage:
        write = self.alive.pop(sandbox, None)
        if write is None:
            raise LauncherFailed("stop", "unknown")
        os.close(write)
        return LauncherUsage(oom_kills=self.oom_kills)

    def die(self, sandbox: str) -> None:
        os.write(self.alive[sandbox], b"x")

    async def restore(self, kept: list[Kept]) -> dict[str, int]:
        self.kept = [one.sandbox for one in kept]
        return {}

    def socket_path(self, sandbox: str) -> Path:
        return Path("/nowhere") / sandbox


@pytest.fixture(autouse=True)
def any_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    empty = Environment(layers=(), env={}, workdir=None, user=None)
    monkeypatch.setattr(module, "compose", lambda store, image, layers: empty)


@pytest.fixture
async def backend() -> Backend:
    return Backend()


@pytest.fixture
async def life(tmp_path: Path, backend: Backend) -> AsyncIterator[Lifecycle]:
    journal = Journal(tmp_path / "journal.db")
    life = Lifecycle("t", None, backend, journal, Admission(100, 8))  # type: ignore[arg-type]
    yield life
    backend.gate.set()
    await asyncio.wait_for(life.stop_all(Reason.USER), DEADLINE)
    assert not backend.alive and life.admission.held == 0
    journal.close()


ARGS = DSecContainerRunArgs("debian@12")


async def test_exactly_the_limit_is_admitted_and_the_refusals_name_it(life: Lifecycle) -> None:
    args = DSecContainerRunArgs("debian@12", labels={"job": "grpo-17"})
    results = await asyncio.gather(*(life.create(args, 10) for _ in range(200)), return_exceptions=True)
    refused = [r for r in results if isinstance(r, Fault)]
    assert len(refused) == 100
    for fault in refused:
        assert fault.body.kind is ErrorKind.CAPACITY and fault.body.retryable
        assert fault.body.details["limit"] == "max_sandboxes" and fault.body.details["value"] == 100
        assert fault.body.details["holders"] == {"job=grpo-17": 100}
        assert "job=grpo-17: 100" in fault.body.message
    await life.stop_all(Reason.USER)
    await life.create(ARGS, 10)


async def test_stop_while_creating_ends_in_removal(life: Lifecycle, backend: Backend) -> None:
    backend.gate.clear()
    creation = asyncio.create_task(life.create(ARGS, 10))
    await until(lambda: bool(life.live()))
    [sandbox] = life.live()
    stop = asyncio.create_task(life.stop(sandbox.id))
    await asyncio.sleep(0)
    backend.gate.set()
    with pytest.raises(Fault) as caught:
        await creation
    assert caught.value.body.kind is ErrorKind.UNAVAILABLE
    await asyncio.wait_for(stop, DEADLINE)
    assert not backend.alive and sandbox.reason is Reason.USER and sandbox.state is State.STOPPED


async def test_of_a_burst_that_was_stopped_nothing_more_is_made(
    life: Lifecycle, backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    def of(key: str) -> DSecContainerRunArgs:
        return DSecContainerRunArgs("debian@12", idempotency_key=key)

    kept, other = await life.create(of("bu-1/0"), 10), await life.create(of("bu-1/1"), 10)
    assert await life.stop_burst("bu-1", frozenset([kept.id])) == 1
    assert life.get(other.id).reason is Reason.USER
    for late in ("bu-1/1", "bu-1/2"):
        with pytest.raises(Fault, match="bu-1") as caught:
            await life.create(of(late), 10)
        assert caught.value.body.kind is ErrorKind.UNAVAILABLE
    assert (await life.create(of("bu-1/0"), 10)).id == kept.id, "what was kept is there for who asks again"
    assert backend.made == 2
    await life.create(of("bu-10/0"), 10)
    await life.stop_burst("mine", frozenset())
    await life.create(of("mine/0"), 10)  # a key of the caller's own may be used again
    monkeypatch.setattr(module, "KEEP_BURSTS", 2)
    for burst in ("bu-2", "bu-3"):
        await life.stop_burst(burst, frozenset())
    await life.create(of("bu-1/2"), 10)


async def test_a_cancelled_creation_leaves_nothing(life: Lifecycle, backend: Backend) -> None:
    backend.gate.clear()
    creation = asyncio.create_task(life.create(ARGS, 10))
    await until(lambda: bool(life.live()))
    creation.cancel()
    with pytest.raises(asyncio.CancelledError):
        await creation
    await until(lambda: life.admission.held == 0)


async def test_a_creation_that_takes_too_long_names_its_stage(life: Lifecycle, backend: Backend) -> None:
    backend.gate.clear()
    with pytest.raises(Fault) as caught:
        await life.create(ARGS, 0.05)
    assert caught.value.body.kind is ErrorKind.CREATE_FAILED
    assert caught.value.body.details["stage"] == "timeout.launch"


async def test_a_failed_creation_gives_its_place_back(life: Lifecycle, backend: Backend) -> None:
    backend.broken = True
    with pytest.raises(Fault, match="no"):
        await life.create(ARGS, 10)
    await until(lambda: life.admission.held == 0)
    assert life.failed_total == 1


async def test_the_same_idempotency_key_gives_the_same_sandbox(life: Lifecycle, backend: Backend) -> None:
    args = DSecContainerRunArgs("debian@12", idempotency_key="k")
    first, second = await asyncio.gather(life.create(args, 10), life.create(args, 10))
    third = await life.create(args, 10)
    assert first.id == second.id == third.id and backend.made == 1
    await life.stop(first.id)
    assert (await life.create(args, 10)).id != first.id


async def test_a_death_is_seen_and_named(life: Lifecycle, backend: Backend) -> None:
    created = await life.create(ARGS, 10)
    backend.die(created.id)
    sandbox = life.running(created.id)
    await asyncio.wait_for(sandbox.ended.wait(), DEADLINE)
    with pytest.raises(Fault) as caught:
        life.running(created.id)
    assert caught.value.body.kind is ErrorKind.UNAVAILABLE and caught.value.body.details["reason"] == "agent_lost"


@pytest.mark.parametrize("days", [400, -400])
async def test_a_jump_of_the_hosts_clock_ends_nothing_and_keeps_nothing(
    life: Lifecycle, monkeypatch: pytest.MonkeyPatch, days: int
) -> None:
    lasting = await life.create(DSecContainerRunArgs("debian@12", ttl_running_stop=60, ttl_total=60), 10)
    short = await life.create(DSecContainerRunArgs("debian@12", ttl_running_stop=None, ttl_total=0.05), 10)
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + days * 86_400)
    watcher = asyncio.create_task(life.watch_ttls())
    ends = life.get(short.id)
    assert isinstance(ends, Sandbox)
    async with asyncio.timeout(DEADLINE):
        await ends.ended.wait()
    watcher.cancel()
    assert ends.reason is Reason.TTL_TOTAL
    assert life.running(lasting.id).state is State.RUNNING


async def test_ttls(life: Lifecycle) -> None:
    idle = await life.create(DSecContainerRunArgs("debian@12", ttl_running_stop=0.05), 10)
    total = await life.create(DSecContainerRunArgs("debian@12", ttl_running_stop=None, ttl_total=0.05), 10)
    busy = await life.create(DSecContainerRunArgs("debian@12", ttl_running_stop=0.05), 10)
    watcher = asyncio.create_task(life.watch_ttls())
    sandboxes = [life.running(c.id) for c in (idle, total, busy)]
    with sandboxes[2].activity():
        for sandbox, reason in zip(sandboxes, (Reason.TTL_IDLE, Reason.TTL_TOTAL), strict=False):
            await asyncio.wait_for(sandbox.ended.wait(), DEADLINE)
            assert sandbox.reason is reason
        assert sandboxes[2].expired(time.monotonic() + 1e6) is None, "a foreground command is activity"
    await asyncio.wait_for(sandboxes[2].ended.wait(), DEADLINE)
    watcher.cancel()


async def test_stop_is_idempotent_and_unknown_ids_are_not_found(life: Lifecycle) -> None:
    created = await life.create(ARGS, 10)
    await asyncio.gather(*(life.stop(created.id) for _ in range(5)))
    await life.stop(created.id)
    with pytest.raises(Fault) as caught:
        await life.stop("sb-t-000000000000")
    assert caught.value.body.kind is ErrorKind.NOT_FOUND


async def test_a_wrong_incarnation_is_unavailable(life: Lifecycle) -> None:
    created = await life.create(ARGS, 10)
    with pytest.raises(Fault) as caught:
        life.running(created.id, created.incarnation + 1)
    assert caught.value.body.details["reason"] == "replaced"


async def test_a_repeated_request_does_not_inherit_an_abandoned_creation(life: Lifecycle, backend: Backend) -> None:
    args = DSecContainerRunArgs("debian@12", idempotency_key="k")
    backend.gate.clear()
    lost = asyncio.create_task(life.create(args, 10))
    await until(lambda: bool(life.live()))
    again = asyncio.create_task(life.create(args, 10))
    await asyncio.sleep(0)
    lost.cancel()  # as when the connection that asked first breaks
    with pytest.raises(asyncio.CancelledError):
        await lost
    backend.gate.set()
    created = await asyncio.wait_for(again, DEADLINE)
    assert life.running(created.id) and backend.made == 1


async def test_a_twin_is_not_waited_for_without_end(life: Lifecycle, backend: Backend) -> None:
    args = DSecContainerRunArgs("debian@12", idempotency_key="k")
    backend.gate.clear()
    first = asyncio.create_task(life.create(args, 10))
    await until(lambda: bool(life.live()))
    with pytest.raises(Fault) as caught:
        await life.create(args, 0.05)
    assert caught.value.body.details["stage"] == "timeout.twin"
    backend.gate.set()
    await first


async def test_what_is_stopped_while_it_queues_is_never_made(life: Lifecycle, backend: Backend) -> None:
    backend.gate.clear()
    creations = [asyncio.create_task(life.create(ARGS, 10)) for _ in range(20)]  # for eight lanes
    await until(lambda: life.admission.queued == 12)
    stops = [asyncio.create_task(life.stop(s.id)) for s in life.live()[8:]]
    await asyncio.sleep(0)
    backend.gate.set()
    results = await asyncio.gather(*creations, return_exceptions=True)
    await asyncio.wait_for(asyncio.gather(*stops), DEADLINE)
    assert backend.made == 8
    assert [r.body.kind for r in results if isinstance(r, Fault)] == [ErrorKind.UNAVAILABLE] * 12


async def test_the_next_launcher_keeps_what_runs_and_not_what_was_being_made(life: Lifecycle, backend: Backend) -> None:
    running = await life.create(ARGS, 10)
    backend.gate.clear()
    waiting = asyncio.create_task(life.create(ARGS, 10))
    await until(lambda: len(life.live()) == 2)
    await life.restore_launcher()
    assert backend.kept == [running.id]
    backend.gate.set()
    created = await asyncio.wait_for(waiting, DEADLINE)
    assert life.running(running.id) and life.running(created.id)


async def test_memory_that_ran_out_is_the_reason_of_a_death(life: Lifecycle, backend: Backend) -> None:
    told, untold = await life.create(ARGS, 10), await life.create(ARGS, 10)
    backend.oom_kills = 2
    life.account_oom(life.running(told.id), 2)
    ends = {}
    for created in (told, untold):
        sandbox = life.running(created.id)
        backend.die(created.id)
        await asyncio.wait_for(sandbox.ended.wait(), DEADLINE)
        ends[created.id] = sandbox
    assert ends[told.id].reason is Reason.AGENT_LOST, "those kills were told as results of commands"
    assert ends[untold.id].reason is Reason.OOM
    assert "limit 1024 MiB" in ends[untold.id].detail and "2 killed" in ends[untold.id].detail


async def test_nothing_is_created_once_the_edge_stops(life: Lifecycle, backend: Backend) -> None:
    await life.create(ARGS, 10)
    assert await life.close(Reason.EDGE_RESTART) == 1
    with pytest.raises(Fault) as caught:
        await life.create(ARGS, 10)
    assert caught.value.body.retryable and not backend.alive


async def test_a_full_disk_neither_keeps_a_sandbox_nor_its_place(
    life: Lifecycle, backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    created = await life.create(ARGS, 10)

    def full(fd: int, data: bytes, offset: int) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    args = DSecContainerRunArgs("debian@12", env={"A": "x" * 30_000})
    refused = await asyncio.gather(*(life.create(args, 10) for _ in range(3)), return_exceptions=True)
    assert all(isinstance(r, Fault) and r.body.kind is ErrorKind.NO_SPACE for r in refused), refused
    await asyncio.wait_for(life.stop(created.id), DEADLINE)
    await until(lambda: life.admission.held == 0)
    assert not backend.alive


async def test_waiting_for_a_lane_is_no_idleness(life: Lifecycle, backend: Backend) -> None:
    backend.gate.clear()
    creation = asyncio.create_task(life.create(DSecContainerRunArgs("debian@12", ttl_running_stop=60), 10))
    await until(lambda: bool(life.live()))
    asked = time.monotonic()
    backend.gate.set()
    created = await creation
    assert life.running(created.id).expired(asked + 60) is None


@pytest.mark.parametrize(
    "field, value",
    [
        ("memory_limit_mb", -1), ("memory_limit_mb", 10**9), ("cpu_cores_limit", float("nan")), ("cpu_cores_limit", 0),
        ("cpu_cores_limit", 1e9), ("disk_limit_mb", 0), ("pids_limit", 0), ("pids_limit", 10**7), ("ttl_total", -5),
        ("ttl_running_stop", float("inf")), ("init_user", ""), ("workdir", "relative"), ("env", {"A=B": "x"}),
        ("env", {"A": "x\0"}), ("env", {"A": "x" * 100_000}), ("labels", {str(i): "" for i in range(65)}),
        ("idempotency_key", ""), ("network_rules", {"x" * 300: True}),
    ],
)  # fmt: skip
async def test_absurd_arguments_are_refused_by_name(life: Lifecycle, field: str, value: object) -> None:
    with pytest.raises(Fault) as caught:
        await life.create(DSecContainerRunArgs("debian@12", **{field: value}), 10)  # type: ignore[arg-type]
    assert caught.value.body.kind is ErrorKind.INVALID and caught.value.body.message.startswith(field)


async def until(condition: object, deadline: float = DEADLINE) -> None:
    assert callable(condition)
    async with asyncio.timeout(deadline):
        while not condition():
            await asyncio.sleep(0)
