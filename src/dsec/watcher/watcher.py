"""Polls edges for their status, twice a second, and knows which of them went quiet."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from typing import Protocol

from dsec.protocol.errors import Fault
from dsec.protocol.specs import EdgeStatus

INTERVAL = 0.5
SUSPECT_AFTER = 3  # missed beats
DEAD_AFTER = 10.0  # seconds without a beat


class StatusSource(Protocol):
    """An edge that can be asked, whether it answers or not."""

    @property
    def address(self) -> str: ...
    @property
    def connected(self) -> bool: ...
    async def status(self) -> EdgeStatus: ...


class EdgeView:
    """The last beat of one edge. Satisfies `placement.choice.Candidate`."""

    def __init__(self, source: StatusSource, status: EdgeStatus, asked_at: float) -> None:
        self.source = source
        self.status = status
        self.asked_at = asked_at
        self.seen_at = asked_at
        self.missed = 0

    @property
    def name(self) -> str:
        return self.status.edge

    @property
    def connected(self) -> bool:
        return self.source.connected

    @property
    def suspect(self) -> bool:
        return self.missed >= SUSPECT_AFTER


class Watcher:
    """Keeps one `EdgeView` per edge that ever answered; drops it when it is dead."""

    def __init__(
        self,
        sources: Callable[[], Iterable[StatusSource]],
        *,
        interval: float = INTERVAL,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._sources = sources
        self._interval = interval
        self._clock = clock
        self._views: dict[str, EdgeView] = {}  # by address
        self._changed = asyncio.Event()

    def view(self) -> list[EdgeView]:
        return list(self._views.values())

    def find(self, edge: str) -> EdgeView | None:
        for view in self._views.values():
            if view.name == edge:
                return view
        return None

    async def wait_for_first(self, timeout: float) -> bool:
        """Until any edge answered; False when none did in time (seconds)."""
        try:
            async with asyncio.timeout(timeout):
                while not self._views:
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            return False
        return True

    async def beat(self, source: StatusSource) -> None:
        """Asks one edge once; an edge that does not answer within an interval missed a beat."""
        asked_at = self._clock()
        view = self._views.get(source.address)
        try:
            async with asyncio.timeout(self._interval):
                status = await source.status()
        except (Fault, TimeoutError):
            if view is not None:
                view.missed += 1
                if self._clock() - view.seen_at > DEAD_AFTER:
                    del self._views[source.address]
            return
        if view is None or view.status.epoch != status.epoch:
            self._views[source.address] = EdgeView(source, status, asked_at)
        else:
            view.status, view.asked_at, view.missed = status, asked_at, 0
            view.seen_at = self._clock()
        self._changed.set()

    async def run(self) -> None:
        """Until cancelled: every edge once an interval, all at the same time."""
        while True:
            started = self._clock()
            await asyncio.gather(*(self.beat(source) for source in self._sources()))
            await asyncio.sleep(max(0.0, started + self._interval - self._clock()))
