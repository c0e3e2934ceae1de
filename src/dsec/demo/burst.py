"""Many rollouts at once: the plan, the bound on concurrency, and news for a progress bar."""

from __future__ import annotations

import asyncio
import random
import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import msgspec

from dsec import DSecClient, Job
from dsec.demo.records import Rollout
from dsec.demo.rollout import PreparedTask, run_one
from dsec.demo.scripts import Script, order


class Planned(msgspec.Struct, frozen=True):
    """One rollout to run: `index` counts the rollouts of its task."""

    prepared: PreparedTask
    script: Script
    index: int


def plan(tasks: Sequence[PreparedTask], rollouts: int, seed: int) -> list[Planned]:
    """`rollouts` of each task, its scripts taking turns, mixed by the seed: the same seed gives the same burst."""
    every = [
        Planned(prepared, script, index)
        for number, prepared in enumerate(tasks)
        for index, script in enumerate(order(rollouts, number, seed))
    ]
    random.Random(seed).shuffle(every)
    return every


@asynccontextmanager
async def job_of_a_burst(client: DSecClient, seed: int) -> AsyncIterator[Job]:
    """A job of its own, whose sandboxes end with the block, however that ends."""
    async with client.job(f"demo-{seed}-{secrets.token_hex(3)}") as job:
        try:
            yield job
        finally:
            await job.stop()


async def run_burst(
    client: DSecClient,
    job: Job,
    planned: Sequence[Planned],
    concurrency: int,
    *,
    on_start: Callable[[Planned], None] = lambda _: None,
    on_done: Callable[[Rollout], None] = lambda _: None,
    clock: Callable[[], float] = time.monotonic,
    began: float | None = None,
) -> list[Rollout]:
    """Run all of them, `concurrency` at a time; records in the order of the plan, times in seconds since `began` (now)."""
    began = clock() if began is None else began
    slots = asyncio.Semaphore(concurrency)

    async def one(item: Planned) -> Rollout:
        async with slots:
            on_start(item)
            rollout = await run_one(client, job, item.prepared, item.script, item.index, lambda: clock() - began)
            on_done(rollout)
            return rollout

    async with asyncio.TaskGroup() as group:
        running = [group.create_task(one(item)) for item in planned]
    return [task.result() for task in running]
