"""The trainer: a process of its own that may die anywhere, and is started again. What it is told it writes down at once."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from pathlib import Path

import msgspec

from dsec import DSecClient, DSecError

from .script import Script, Task, Tell

PATIENCE_S = 60.0
FAILED = 3  # exit code: why is in what was told


class Order(msgspec.Struct, frozen=True):
    """One rollout to be made. told: a file to which it appends what it is told. stop: instead, its job is to be ended."""

    url: str
    key: str
    job: str
    name: str
    seed: int
    task: Task
    told: str
    stop: bool = False


class Told(msgspec.Struct, frozen=True):
    """life: which process. name: of what was asked."""

    life: int
    name: str
    answer: object


def main(order: Order) -> None:
    """Entry of the process."""
    with open(order.told, "ab", buffering=0) as file:
        file.write(b"\n")  # behind what an earlier process may have died over

        def tell(name: str, answer: object) -> None:
            file.write(msgspec.json.encode(Told(os.getpid(), name, answer)) + b"\n")

        try:
            asyncio.run(_whole(order, tell))
        except Exception as error:  # noqa: BLE001 - the outermost loop: whatever it is, the judge is told
            tell("failed", f"{type(error).__name__}: {error}")
            sys.exit(FAILED)


async def _whole(order: Order, tell: Tell) -> None:
    """As a trainer does it: what may be repeated is, by opening the rollout again."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            async with DSecClient(order.url, order.key) as client:
                await (_stop(client, order) if order.stop else _train(client, order, tell))
            return
        except DSecError as error:
            if not error.retryable or time.monotonic() > deadline:
                raise
        await asyncio.sleep(0.05)


async def _stop(client: DSecClient, order: Order) -> None:
    await client.job(order.job).stop()


async def _train(client: DSecClient, order: Order, tell: Tell) -> None:
    async with client.job(order.job, lease=600) as job:
        async with job.rollout(order.name, order.task.args()) as rollout:
            script = Script(client, job, rollout, order.task, order.seed, tell)
            await script.play()
            tell("tags", sorted(script.tags))


def read_told(path: Path) -> list[Told]:
    """What the processes wrote down; a line that one of them died over is none."""
    lines = path.read_bytes().split(b"\n") if path.exists() else []
    found = []
    for line in lines:
        try:
            found.append(msgspec.json.decode(line, type=Told))
        except msgspec.DecodeError:
            continue
    return found
