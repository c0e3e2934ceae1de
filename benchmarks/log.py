"""`dsec bench log`: what it costs that a command is a step of a rollout, whose intent and outcome are on the disk.

The same `true` in a plain sandbox and in a rollout, in turn, so that both see the same machine; then 64 of each at once, a
while without the log and a while with it, twice.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack

from benchmarks import machine
from benchmarks.report import Promise, Report, percentile, result, show
from benchmarks.stage import Stage, run, stage
from dsec import Rollout, Sandbox

COUNT = 2000
CROWD = 64
_WARM_UP = 100
_WINDOW_S = 5.0
_ROUNDS = 2

Place = Sandbox | Rollout


def main(*, count: int | None, against: tuple[str, ...], json: bool) -> bool:
    report, plain, logged = run(_measure(count or COUNT))
    return show(report, json_output=json, pictures=(("without the log", plain), ("with it", logged)))


async def _measure(count: int) -> tuple[Report, list[float], list[float]]:
    described = machine.describe()
    async with stage(max_sandboxes=2 * CROWD + 8) as place:
        plain, logged = await _alternating(place, count)
        without, with_log = await _crowds(place)
    cost = percentile(logged, 50) - percentile(plain, 50)
    results = (
        result("overhead_p50_ms", cost, "ms", promise=Promise("value", "most", 1)),
        result("overhead_ratio", with_log / without, "", promise=Promise("value", "least", 0.7)),
        result("plain_p50_ms", percentile(plain, 50), "ms"),
        result("logged_p50_ms", percentile(logged, 50), "ms"),
        result("logged_p99_ms", percentile(logged, 99), "ms"),
        result("plain_per_s", without, "/s"),
        result("logged_per_s", with_log, "/s"),
    )
    return Report("log", described, results, (f"the last two with {CROWD} at once",)), plain, logged


async def _alternating(place: Stage, count: int) -> tuple[list[float], list[float]]:
    """Milliseconds of each."""
    plain, logged = list[float](), list[float]()
    async with (
        place.client.run_container(place.environments.next().args()) as sandbox,
        place.client.rollout("one", place.environments.next().args()) as rollout,
    ):
        for number in range(-_WARM_UP, count):
            for where, samples in ((sandbox, plain), (rollout, logged)):
                started = time.perf_counter()
                await _true(where)
                if number >= 0:
                    samples.append((time.perf_counter() - started) * 1e3)
    return plain, logged


async def _crowds(place: Stage) -> tuple[float, float]:
    """Commands a second, without and with the log."""
    rates: dict[str, list[float]] = {"plain": [], "logged": []}
    async with AsyncExitStack() as stack:
        plain, logged = list[Place](), list[Place]()
        for number in range(CROWD):
            args = place.environments.next().args()
            plain.append(await stack.enter_async_context(place.client.run_container(args)))
            logged.append(await stack.enter_async_context(place.client.rollout(f"crowd-{number}", args)))
        for crowd in (plain, logged):
            await asyncio.gather(*(_loop(one, time.perf_counter() + 0.5) for one in crowd))
        for _ in range(_ROUNDS):
            rates["plain"].append(await _rate(plain))
            rates["logged"].append(await _rate(logged))
    return sum(rates["plain"]) / _ROUNDS, sum(rates["logged"]) / _ROUNDS


async def _rate(crowd: Sequence[Place]) -> float:
    started = time.perf_counter()
    done = await asyncio.gather(*(_loop(one, started + _WINDOW_S) for one in crowd))
    return sum(done) / (time.perf_counter() - started)


async def _loop(where: Place, until: float) -> int:
    done = 0
    while time.perf_counter() < until:
        await _true(where)
        done += 1
    return done


async def _true(where: Place) -> None:
    answer = await where.exec(["true"])
    if answer.exit_code != 0:
        raise AssertionError(f"true ended with {answer.exit_code}")
