"""Beats, silence and return of edges, on a clock of the test's own."""

from __future__ import annotations

import asyncio

from dsec.protocol.errors import ErrorKind, Fault
from dsec.protocol.specs import EdgeStatus
from dsec.watcher.watcher import DEAD_AFTER, Watcher


class Source:
    address = "one"
    connected = True

    def __init__(self) -> None:
        self.epoch = 1
        self.alive = True
        self.running = 0
        self.asked = asyncio.Event()

    async def status(self) -> EdgeStatus:
        self.asked.set()
        if not self.alive:
            raise Fault(ErrorKind.CONNECTION_LOST, "gone")
        return EdgeStatus(
            edge="e", epoch=self.epoch, version="0", started_at=0, sandboxes={"running": self.running}, max_sandboxes=9,
            creating=0, queued=0, memory_available=1, memory_total=1, disk_free=1,
        )  # fmt: skip


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


async def test_suspect_dead_and_back() -> None:
    source, clock = Source(), Clock()
    watcher = Watcher(lambda: [source], clock=clock)
    await watcher.beat(source)
    view = watcher.find("e")
    assert view is not None and not view.suspect
    source.alive = False
    for missed in range(1, 4):
        clock.now += 0.5
        await watcher.beat(source)
        assert view.missed == missed and view.suspect == (missed == 3)
    source.alive, source.running, clock.now = True, 4, 2.5
    await watcher.beat(source)
    assert not view.suspect and view.status.sandboxes == {"running": 4} and view.asked_at == 2.5
    source.alive, clock.now = False, 2.5 + DEAD_AFTER + 0.1
    await watcher.beat(source)
    assert watcher.find("e") is None and watcher.view() == []


async def test_a_restarted_edge_starts_afresh() -> None:
    source = Source()
    watcher = Watcher(lambda: [source])
    await watcher.beat(source)
    first = watcher.find("e")
    source.epoch = 2
    await watcher.beat(source)
    assert watcher.find("e") is not first


async def test_an_edge_that_does_not_answer_misses_its_beat() -> None:
    class Hanging(Source):
        async def status(self) -> EdgeStatus:
            if self.alive:
                return await super().status()
            return await asyncio.Future()

    source = Hanging()
    watcher = Watcher(lambda: [source], interval=0.01)
    await watcher.beat(source)
    source.alive = False
    await watcher.beat(source)
    view = watcher.find("e")
    assert view is not None and view.missed == 1


async def test_the_first_beat_is_waited_for() -> None:
    source = Source()
    watcher = Watcher(lambda: [source], interval=0.01)
    assert not await watcher.wait_for_first(0.01)
    running = asyncio.create_task(watcher.run())
    assert await watcher.wait_for_first(5)
    source.asked.clear()
    async with asyncio.timeout(5):
        await source.asked.wait()
    running.cancel()
