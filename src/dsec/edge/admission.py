"""Admission: the edge has the last word on how many sandboxes it carries (report, 3).

A place is reserved in one step, before anything is made, and given back when everything is gone; so no stale count can
let a burst exceed the limit. Creations then queue for a bounded number of lanes: a burst waits, it does not fail.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from dsec.protocol.errors import ErrorKind, Fault

MIN_AVAILABLE_SHARE = 0.03
_FRESH_S = 0.1


def holder_of(labels: Mapping[str, str], job: str = "") -> str:
    """Who holds a place, as the refusal names it: the job, else the first label, else "unlabelled"."""
    if job:
        return f"job={job}"
    if "job" in labels:
        return f"job={labels['job']}"
    return next((f"{key}={value}" for key, value in sorted(labels.items())), "unlabelled")


def memory() -> tuple[int, int]:
    """(available, total) bytes of the node."""
    fields = {}
    with open("/proc/meminfo", encoding="ascii") as lines:
        for line in lines:
            name, _, rest = line.partition(":")
            if name in ("MemTotal", "MemAvailable"):
                fields[name] = int(rest.split()[0]) * 1024
                if len(fields) == 2:
                    break
    return fields["MemAvailable"], fields["MemTotal"]


class Admission:
    def __init__(self, max_sandboxes: int, lanes: int) -> None:
        self.max_sandboxes = max_sandboxes
        self._lanes = asyncio.Semaphore(lanes)
        self._holders: Counter[str] = Counter()
        self.held = 0
        self.queued = 0
        self.creating = 0
        self._memory = (0, 0)
        self._memory_at = -1.0

    def _node_memory(self) -> tuple[int, int]:
        """Read at most ten times a second: a burst does not change it faster than the kernel accounts it."""
        now = time.monotonic()
        if now - self._memory_at > _FRESH_S:
            self._memory, self._memory_at = memory(), now
        return self._memory

    def reserve(self, labels: Mapping[str, str], job: str = "") -> str:
        """Takes one place or raises `capacity`, naming the limit and who holds it."""
        if self.held >= self.max_sandboxes:
            holders = dict(self._holders.most_common(5))
            named = ", ".join(f"{who}: {count}" for who, count in holders.items())
            raise Fault(
                ErrorKind.CAPACITY,
                f"this edge carries {self.held} of max_sandboxes={self.max_sandboxes} sandboxes (held by {named})",
                hint="stop some, wait for them to end, or raise max_sandboxes",
                retryable=True,
                limit="max_sandboxes",
                value=self.max_sandboxes,
                holders=holders,
            )
        available, total = self._node_memory()
        if available < total * MIN_AVAILABLE_SHARE:
            raise Fault(
                ErrorKind.CAPACITY,
                f"the node is under memory pressure: {available >> 20} MiB of {total >> 20} MiB available",
                hint="stop sandboxes or add an edge",
                retryable=True,
                limit="node_memory",
                value=total,
                holders=dict(self._holders.most_common(5)),
            )
        return self.restore(labels, job)

    def restore(self, labels: Mapping[str, str], job: str = "") -> str:
        """Takes a place for what is there already, whatever the limits say now."""
        holder = holder_of(labels, job)
        self._holders[holder] += 1
        self.held += 1
        return holder

    def release(self, holder: str) -> None:
        self.held -= 1
        self._holders[holder] -= 1
        if not self._holders[holder]:
            del self._holders[holder]

    @asynccontextmanager
    async def lane(self) -> AsyncIterator[None]:
        """One of the creations that may be under way at once."""
        self.queued += 1
        try:
            await self._lanes.acquire()
        finally:
            self.queued -= 1
        self.creating += 1
        try:
            yield
        finally:
            self.creating -= 1
            self._lanes.release()
