"""What sandboxes use, sampled: for the accounts of jobs, and for who lists many sandboxes with their usage.

One request to the launcher costs it a few reads of control files, and it makes sandboxes meanwhile; so the members of jobs are
asked one after the other, spread over `ROUND_S`, at most `MOST_A_SECOND` of them in any second, and a paused one, which uses
nothing that could change, only now and then.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Sequence

from dsec.backends.launcher import LauncherFailed, LauncherUsage
from dsec.protocol.specs import State, Usage
from dsec.rollout.jobs import Sample

from .lifecycle import Lifecycle
from .sandbox import Sandbox

ROUND_S = 5.0
TICK_S = 0.1
MOST_A_SECOND = 200
PAUSED_S = 30.0
AT_ONCE = 16
KEEP_S = 30.0
"""How often the memory that jobs have used is written down: what a killed edge forgets of it."""


class Accounts:
    """The last usage of each live sandbox that somebody asked about."""

    def __init__(self, lifecycle: Lifecycle) -> None:
        self._lifecycle = lifecycle
        self._latest: dict[str, tuple[float, Usage]] = {}
        self._lanes = asyncio.Semaphore(AT_ONCE)

    async def run(self) -> None:
        """Samples the members of jobs, round after round, as long as the edge runs."""
        jobs = self._lifecycle.jobs
        kept_at = jobs.clock()
        while True:
            began = jobs.clock()
            due = self._due(began)
            ticks = max(ROUND_S / TICK_S, len(due) / (MOST_A_SECOND * TICK_S))
            for some in _parts(due, ticks):
                await self._sample(some)
                await asyncio.sleep(TICK_S)
            await asyncio.sleep(max(TICK_S, ROUND_S - (jobs.clock() - began)))
            self._forget_the_ended()
            if jobs.clock() - kept_at >= KEEP_S:
                kept_at = jobs.clock()
                for job in jobs.all():
                    if job.samples:
                        jobs.spent(job)

    async def measure(self, sandboxes: Iterable[Sandbox], max_age: float) -> dict[str, Usage]:
        """Usage of the live ones among these, none of it older than `max_age` seconds."""
        chosen = [sandbox for sandbox in sandboxes if sandbox.lives]
        now = self._lifecycle.jobs.clock()
        await self._sample([s for s in chosen if s.id not in self._latest or now - self._latest[s.id][0] > max_age])
        return {s.id: self._latest[s.id][1] for s in chosen if s.id in self._latest}

    def _due(self, now: float) -> list[Sandbox]:
        found = []
        for sandbox in self._lifecycle.live():
            if sandbox.job and sandbox.lives:
                last = self._latest.get(sandbox.id)
                if last is None or sandbox.state is not State.PAUSED or now - last[0] >= PAUSED_S:
                    found.append(sandbox)
        return found

    async def _sample(self, sandboxes: Sequence[Sandbox]) -> None:
        await asyncio.gather(*(self._one(sandbox) for sandbox in sandboxes))

    async def _one(self, sandbox: Sandbox) -> None:
        jobs = self._lifecycle.jobs
        async with self._lanes:
            if not sandbox.lives:
                return
            try:
                usage = usage_of(await self._lifecycle.backend.usage(sandbox.id))
            except LauncherFailed:
                return  # it ends just now
        now = jobs.clock()
        self._latest[sandbox.id] = (now, usage)
        if sandbox.job:
            sample = Sample(now, usage.cpu_s, usage.memory_bytes, usage.swap_bytes)
            jobs.get(sandbox.job).sampled(sandbox.id, sample)

    def _forget_the_ended(self) -> None:
        live = {sandbox.id for sandbox in self._lifecycle.live()}
        for id in self._latest.keys() - live:
            del self._latest[id]


def usage_of(raw: LauncherUsage) -> Usage:
    return Usage(
        memory_bytes=raw.memory,
        memory_peak_bytes=raw.memory_peak,
        swap_bytes=raw.swap,
        cpu_s=raw.cpu_ns / 1e9,
        pids=raw.pids,
        disk_bytes=raw.disk,
        oom_kills=raw.oom_kills,
        pids_hits=raw.pids_hits,
        sampled_at=time.time(),
    )


def _parts(items: Sequence[Sandbox], count: float) -> list[Sequence[Sandbox]]:
    """About so many parts of one size, none of them empty."""
    size = max(1, -(-len(items) // max(1, int(count))))
    return [items[start : start + size] for start in range(0, len(items), size)]
