"""Starts of commands in order: a burst runs a few at a time instead of all at once.

Starting a command is all work for the processor; a hundred started together each take a hundred times as long, and the last
of them is unlucky besides. So only a few may be in their first moments at once, and the others wait in the order in which
they came. A command that is still there after `HOLD_S` gives its place up: it waits for something, or is long anyway.
"""

from __future__ import annotations

import asyncio
import os

LANES = 2 * (os.cpu_count() or 1)
HOLD_S = 0.03


class Place:
    """One of the places; free again at `free()`, or by itself after a while."""

    __slots__ = ("_lanes", "_timer")

    def __init__(self, lanes: asyncio.Semaphore, hold_s: float) -> None:
        self._lanes: asyncio.Semaphore | None = lanes
        self._timer = asyncio.get_running_loop().call_later(hold_s, self.free)

    def free(self) -> None:
        if self._lanes is not None:
            self._timer.cancel()
            self._lanes.release()
            self._lanes = None


class Starts:
    def __init__(self, lanes: int = LANES, hold_s: float = HOLD_S) -> None:
        self._lanes = asyncio.Semaphore(lanes)
        self._hold_s = hold_s

    async def take(self) -> Place:
        """Waits for a place, in the order of asking."""
        await self._lanes.acquire()
        return Place(self._lanes, self._hold_s)
