"""A second edge on the journal of a first: who goes on, who ends and why, with the clocks and places of before."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from dsec.edge import lifecycle as module
from dsec.edge import recovery
from dsec.edge.admission import Admission
from dsec.edge.journal import Change, Journal, Record
from dsec.edge.lifecycle import Lifecycle
from dsec.layers import Environment
from dsec.protocol.errors import ErrorKind, Fault
from dsec.protocol.specs import DSecContainerRunArgs, Reason, State

from .test_lifecycle import DEADLINE, Backend, until


class Alive(Backend):
    """Every sandbox of it is a process that lives: this one."""

    pid, start = os.getpid(), recovery._start_time(os.getpid()) or 0


class Edges:
    """Starts edges one after the other on one journal; each but the last dies without a word."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._last: Lifecycle | None = None

    def start(self, backend: Backend) -> Lifecycle:
        if self._last is not None:
            self._die(self._last)
        journal = Journal(self._path)
        epoch = journal.next_epoch()
        self._last = Lifecycle("t", NoStore(), backend, journal, Admission(3, 8), epoch)  # type: ignore[arg-type]
        return self._last

    def _die(self, life: Lifecycle) -> None:
        for sandbox in life.live():
            life._close_pidfd(sandbox)
        life.journal.close()

    async def end(self) -> None:
        if self._last is not None:
            await asyncio.wait_for(self._last.stop_all(Reason.USER), DEADLINE)
            self._last.journal.close()


class NoStore:
    def resolve(self, ref: str) -> object:
        raise Fault(ErrorKind.NOT_FOUND, ref)


@pytest.fixture
async def edges(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Edges]:
    empty = Environment(layers=(), env={}, workdir=None, user=None)
    monkeypatch.setattr(module, "compose", lambda store, image, layers: empty)
    edges = Edges(tmp_path / "j")
    yield edges
    await edges.end()


ARGS = DSecContainerRunArgs("debian@12", idempotency_key="k", labels={"job": "j"}, ttl_total=500)


async def test_what_lives_goes_on_with_its_key_place_and_clock(edges: Edges) -> None:
    first = Alive()
    created = await edges.start(first).create(ARGS, 10)
    before = edges._last.running(created.id)  # type: ignore[union-attr]
    second = Alive()
    second.alive = first.alive
    after = edges.start(second)
    await after.recover()
    sandbox = after.running(created.id, created.incarnation)
    assert second.kept == [created.id] and after.admission.held == 1
    assert (sandbox.created_at, sandbox.born_at) == (before.created_at, before.born_at)
    assert sandbox.expired(before.born_at + 500.1) is Reason.TTL_TOTAL, "its age counts from its creation"
    assert (await after.create(ARGS, 10)).id == created.id and second.made == 0, "the same key is the same sandbox"


async def test_places_are_taken_even_beyond_a_limit_that_is_lower_now(edges: Edges) -> None:
    first = Alive()
    life = edges.start(first)
    for _ in range(3):
        await life.create(DSecContainerRunArgs("debian@12"), 10)
    second = Alive()
    second.alive = first.alive
    after = edges.start(second)
    after.admission.max_sandboxes = 2
    await after.recover()
    assert after.admission.held == 3
    with pytest.raises(Fault) as caught:
        await after.create(DSecContainerRunArgs("debian@12"), 10)
    assert caught.value.body.kind is ErrorKind.CAPACITY


async def test_changed_limits_and_counters_are_those_of_before(edges: Edges) -> None:
    first = Alive()
    life = edges.start(first)
    created = await life.create(ARGS, 10)
    await life.set_ttl(life.running(created.id), Change(idle_limit=None, total_limit=7))
    life.account_oom(life.running(created.id), 3)
    await life.journal.commit()
    second = Alive()
    second.alive = first.alive
    after = edges.start(second)
    await after.recover()
    sandbox = after.running(created.id)
    assert (sandbox.idle_limit, sandbox.total_limit, sandbox.oom_kills) == (None, 7, 3)


async def test_a_removal_that_was_under_way_is_finished_with_its_reason(edges: Edges) -> None:
    first = Alive()
    life = edges.start(first)
    created = await life.create(ARGS, 10)
    life.journal.update(created.id, Change(stop_reason=Reason.TTL_IDLE, detail="after 5 s"))
    await life.journal.commit()
    second = Alive()
    second.alive = first.alive
    after = edges.start(second)
    await after.recover()
    await until(lambda: not after.live())
    ended = after.get(created.id)
    assert (ended.state, ended.reason, ended.detail) == (State.STOPPED, Reason.TTL_IDLE, "after 5 s")
    assert not second.alive and after.admission.held == 0


async def test_what_died_meanwhile_ends_by_name(edges: Edges) -> None:
    first = Backend()  # whose sandboxes are nobody's processes
    life = edges.start(first)
    lost, full = await life.create(DSecContainerRunArgs("debian@12"), 10), await life.create(ARGS, 10)
    life.account_oom(life.running(lost.id), 1)
    await life.journal.commit()
    second = Backend()
    second.alive, second.oom_kills = first.alive, 1
    after = edges.start(second)
    await after.recover()
    await until(lambda: not after.live())
    assert after.get(lost.id).reason is Reason.AGENT_LOST
    assert after.get(full.id).reason is Reason.OOM
    with pytest.raises(Fault) as caught:
        after.running(lost.id)
    assert caught.value.body.kind is ErrorKind.UNAVAILABLE


async def test_a_restart_of_the_machine_ends_them_all(edges: Edges, monkeypatch: pytest.MonkeyPatch) -> None:
    first = Alive()
    created = await edges.start(first).create(ARGS, 10)
    monkeypatch.setattr(module, "boot_id", lambda: "another boot")
    second = Alive()
    after = edges.start(second)
    await after.recover()
    assert second.kept == [] and after.get(created.id).reason is Reason.NODE_LOST
    third = edges.start(Alive())
    await third.recover()
    assert third.get(created.id).reason is Reason.NODE_LOST, "and it is in the journal"


def test_a_process_is_known_by_its_start_too() -> None:
    start = recovery._start_time(os.getpid())
    assert start is not None and recovery.open_process(os.getpid(), start + 1) == -1
    os.close(recovery.open_process(os.getpid(), start))


def test_a_record_of_an_older_version_is_no_node_failure() -> None:
    record = Record(
        id="sb-t-1", state=State.RUNNING, created_at=time.time(), incarnation=1, args=ARGS, layers=(), pid=1, start=1
    )
    assert recovery.ended_with_the_node(record, "b") == (Reason.EDGE_RESTART, "the edge was restarted")


async def test_a_removal_is_finished_whatever_state_the_record_has(edges: Edges) -> None:
    first = Alive()
    life = edges.start(first)
    created = await life.create(ARGS, 10)
    life.journal.update(created.id, Change(state=State.STOPPING, stop_reason=Reason.USER))
    await life.journal.commit()
    second = Alive()
    second.alive = first.alive
    after = edges.start(second)
    await after.recover()
    await until(lambda: not after.live())
    assert not second.alive and after.get(created.id).reason is Reason.USER
