"""The same burst twice: undisturbed, and with its trainer and its edge killed in the middle. Nothing may show in the rewards.

Everything that is said at the end is measured: what ran twice by marks that commands leave in their sandboxes, what is lost by
the platform's own records of the rollouts, rewards by comparison with the undisturbed burst.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import ExitStack, asynccontextmanager, suppress
from functools import partial
from pathlib import Path

import msgspec

from dsec import ConnectionLost, DSecClient, RolloutInfo, RolloutState
from dsec.cluster import embedded
from dsec.cluster.embedded import Endpoint
from dsec.demo.burst import job_of_a_burst, plan, run_burst
from dsec.demo.errors import DemoError
from dsec.demo.records import Chaos, Kill, Rollout
from dsec.demo.rollout import PreparedTask, reruns
from dsec.demo.trainer import Told, records, tell

_LOOK_S = 0.1
_PATIENCE_S = 120.0
_WINDOWS = ((0.08, 0.26), (0.30, 0.48), (0.52, 0.70), (0.72, 0.88))  # shares of all steps, one kill in each
TRAINER, EDGE = "trainer", "edge"


class Seen(msgspec.Struct, frozen=True):
    """How far a job's rollouts are, as the platform has it."""

    steps: int
    openings: int
    finished: int
    open: int


class Disturbed(msgspec.Struct, frozen=True):
    """The disturbed burst: records in the order of the plan, and what befell it."""

    rollouts: list[Rollout]
    chaos: Chaos


News = Callable[[str, Seen], None]


@asynccontextmanager
async def private_platform() -> AsyncIterator[tuple[Endpoint, DSecClient]]:
    """One of our own: nobody else's edge is killed."""
    with ExitStack() as stack:
        endpoint = await asyncio.to_thread(stack.enter_context, embedded.private())
        try:
            async with DSecClient(endpoint.url, Path(endpoint.key_file).read_text().strip()) as client:
                yield endpoint, client
        finally:
            await asyncio.to_thread(stack.close)


def moments(seed: int) -> list[tuple[float, str]]:
    """Share of the steps and victim of each kill: each victim twice, spread over the burst, the same for the same seed."""
    dice = random.Random(f"chaos {seed}")
    victims = [TRAINER, TRAINER, EDGE, EDGE]
    dice.shuffle(victims)
    return [(dice.uniform(*window), victim) for window, victim in zip(_WINDOWS, victims, strict=True)]


async def run_twice(
    endpoint: Endpoint,
    client: DSecClient,
    tasks: list[PreparedTask],
    rollouts: int,
    concurrency: int,
    seed: int,
    news: News,
) -> Disturbed:
    """news: what just happened ("" for nothing new), and how far the burst is."""
    calm, calm_steps, calm_wall_s = await _calm(client, tasks, rollouts, concurrency, seed, news)
    async with job_of_a_burst(client, seed) as job:
        with tempfile.TemporaryDirectory(prefix="dsec-demo-chaos-") as name:
            folder = Path(name)
            began = time.monotonic()
            tell(folder, Told(job.name, tasks, rollouts, concurrency, seed, began))
            storm = _Storm(endpoint, client, job.name, folder, news)
            await storm.run(moments(seed), calm_steps)
            wall_s = time.monotonic() - began
            done = records(folder)
        infos = await _rollouts(client, job.name)
    return Disturbed(done, _measured(calm, done, infos, tuple(storm.kills), calm_wall_s, wall_s))


async def _calm(
    client: DSecClient, tasks: list[PreparedTask], rollouts: int, concurrency: int, seed: int, news: News
) -> tuple[list[Rollout], int, float]:
    planned = plan(tasks, rollouts, seed)
    count = 0

    def done(_: Rollout) -> None:
        nonlocal count
        count += 1
        news("", Seen(0, 0, count, 0))

    news("undisturbed", Seen(0, 0, 0, 0))
    async with job_of_a_burst(client, seed) as job:
        began = time.monotonic()
        found = await run_burst(client, job, planned, concurrency, on_done=done)
        wall_s = time.monotonic() - began
        steps = (await seen(client, job.name)).steps
    return found, steps, wall_s


async def _rollouts(client: DSecClient, job: str) -> list[RolloutInfo]:
    """As the platform has them; asked again while its edge is on its way back."""
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        try:
            return [info async for info in client.rollouts.list(job=job)]
        except ConnectionLost:
            if time.monotonic() > deadline:
                raise
        await asyncio.sleep(_LOOK_S)


async def seen(client: DSecClient, job: str) -> Seen:
    infos = await _rollouts(client, job)
    finished = sum(info.state is RolloutState.FINISHED for info in infos)
    return Seen(
        sum(info.steps for info in infos), sum(info.epoch for info in infos), finished, len(infos) - finished
    )  # fmt: skip


def _is_there(steps: float, now: Seen) -> bool:
    return now.steps >= steps


def _is_back(victim: str, before: Seen, now: Seen) -> bool:
    """A trainer opens its rollouts again (steps that its predecessor had under way go on by themselves), an edge takes steps."""
    return now.openings > before.openings if victim == TRAINER else now.steps > before.steps


class _Storm:
    def __init__(self, endpoint: Endpoint, client: DSecClient, job: str, folder: Path, news: News) -> None:
        self._endpoint = endpoint
        self._client = client
        self._job = job
        self._folder = folder
        self._news = news
        self._trainer: asyncio.subprocess.Process | None = None
        self.kills: list[Kill] = []

    async def run(self, kills: Sequence[tuple[float, str]], steps: int) -> None:
        """steps: how many there will be."""
        self._news("disturbed", Seen(0, 0, 0, 0))
        try:
            await self._start()
            for share, victim in kills:
                now = await self._until(partial(_is_there, share * steps))
                began = time.monotonic()
                await self._kill(victim)
                self._news(f"{victim} killed", now)
                await self._until(partial(_is_back, victim, now))
                self.kills.append(Kill(victim, round(now.steps / steps, 3), round(time.monotonic() - began, 3)))
            await self._until(lambda _: False, to_the_end=True)
        finally:
            if self._trainer is not None and self._trainer.returncode is None:
                self._trainer.kill()
                await self._trainer.wait()

    async def _start(self) -> None:
        key = Path(self._endpoint.key_file).read_text().strip()
        with (self._folder / "trainer.log").open("ab") as log:
            self._trainer = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "dsec.demo.trainer", str(self._folder), stdin=asyncio.subprocess.DEVNULL,
                stdout=log, stderr=log, env={**os.environ, "DSEC_URL": self._endpoint.url, "DSEC_API_KEY": key},
            )  # fmt: skip

    async def _kill(self, victim: str) -> None:
        if victim == TRAINER:
            assert self._trainer is not None
            self._trainer.kill()
            await self._trainer.wait()
            await self._start()
            return
        found = {process.role: process.pid for process in embedded.status(self._endpoint.state).processes}
        if (pid := found[EDGE]) is not None:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    async def _until(self, reached: Callable[[Seen], bool], *, to_the_end: bool = False) -> Seen:
        """Looks again and again. DemoError when the trainer ends before, or badly, or nothing moves any more."""
        last, moved = Seen(0, 0, 0, 0), time.monotonic()
        while True:
            assert self._trainer is not None
            ended = self._trainer.returncode
            now = await seen(self._client, self._job)
            self._news("", now)
            if reached(now):
                return now
            if ended is not None:
                if to_the_end and ended == 0:
                    return now
                raise DemoError(
                    f"the trainer ended with {ended}: {self._last_words()}", hint="more rollouts last longer"
                )
            if now != last:
                last, moved = now, time.monotonic()
            elif time.monotonic() - moved > _PATIENCE_S:
                raise DemoError(f"nothing has moved for {_PATIENCE_S:g} s: {self._last_words()}")
            await asyncio.sleep(_LOOK_S)

    def _last_words(self) -> str:
        lines = (self._folder / "trainer.log").read_text(errors="replace").strip().splitlines()
        return lines[-1][:500] if lines else "it said nothing"


def _measured(
    calm: Sequence[Rollout], storm: Sequence[Rollout], infos: Sequence[RolloutInfo], kills: tuple[Kill, ...],
    calm_wall_s: float, wall_s: float,
) -> Chaos:  # fmt: skip
    """lost: without a verdict that counts in the platform's records, or with a command that never started."""
    ended_well = {
        info.name for info in infos if info.state is RolloutState.FINISHED and info.valid and info.reward is not None
    }
    lost = [one for one in storm if name_of(one) not in ended_well or set(range(one.asked)) - set(one.ran)]
    rewards = {name_of(one): (one.reward, one.naive_reward, one.valid) for one in calm}
    return Chaos(
        kills=kills,
        commands=sum(one.asked for one in storm),
        reruns=sum(map(reruns, storm)),
        lost=len(lost) + len(calm) - len(storm),
        different=tuple(
            name_of(one) for one in storm if rewards.get(name_of(one)) != (one.reward, one.naive_reward, one.valid)
        ),
        calm_wall_s=round(calm_wall_s, 3),
        wall_s=round(wall_s, 3),
    )


def name_of(rollout: Rollout) -> str:
    return f"{rollout.task}/{rollout.script.value}/{rollout.index}"
