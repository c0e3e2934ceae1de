"""`dsec bench exec`: the round trip of `true` through the SDK, the API server and the edge.

With `--sandboxes N`: how many commands a second N sandboxes run, each one `true` after the other.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack

from benchmarks import floor_run, machine
from benchmarks.report import Report, percentile, result, show
from benchmarks.stage import run, stage
from dsec import Sandbox

COUNT = 2000
_WARM_UP = 100


_WINDOW_S = 10.0


def main(*, count: int | None, against: tuple[str, ...], json: bool, sandboxes: int | None = None) -> bool:
    if sandboxes is not None:
        return show(run(_crowd(sandboxes, count)), json_output=json)
    report, samples = run(_measure(count or COUNT))
    return show(report, json_output=json, pictures=(("round trip", samples),))


async def _measure(count: int) -> tuple[Report, list[float]]:
    described = machine.describe()
    async with stage(max_sandboxes=8) as place:
        floor = floor_run.execute(place.meta, place.data, count=count)
        samples: list[float] = []
        environment = place.environments.next()
        async with place.client.run_container(environment.args()) as sandbox:
            for number in range(-_WARM_UP, count):
                started = time.perf_counter()
                answer = await sandbox.exec(["true"])
                elapsed = (time.perf_counter() - started) * 1e3
                if answer.exit_code != 0:
                    raise AssertionError(f"true ended with {answer.exit_code}")
                if number >= 0:
                    samples.append(elapsed)
    p50, p99 = percentile(samples, 50), percentile(samples, 99)
    results = (
        result("round_trip_p50_ms", p50, "ms", floor=floor.p50_ms),
        result("round_trip_p99_ms", p99, "ms", floor=floor.p99_ms),
    )
    notes = ("the floor runs a static program of a few hundred bytes without any protocol in between",)
    return Report("exec", described, results, notes), samples


async def _crowd(sandboxes: int, count: int | None) -> Report:
    """count: commands in all; without it, as many as there are in the window."""
    described = machine.describe()
    async with stage(max_sandboxes=sandboxes + 8) as place, AsyncExitStack() as stack:
        crowd = []
        for _ in range(sandboxes):
            crowd.append(await stack.enter_async_context(place.client.run_container(place.environments.next().args())))
        await asyncio.gather(*(_loop(sandbox, float("inf"), 5) for sandbox in crowd))
        started = time.perf_counter()
        until = started + _WINDOW_S if count is None else float("inf")
        most = None if count is None else -(-count // sandboxes)
        done = await asyncio.gather(*(_loop(sandbox, until, most) for sandbox in crowd))
        rate = sum(done) / (time.perf_counter() - started)
    return Report("exec", described, (result("execs_per_s", rate, "/s"),), (f"{sandboxes} sandboxes at once",))


async def _loop(sandbox: Sandbox, until: float, most: int | None) -> int:
    done = 0
    while time.perf_counter() < until and (most is None or done < most):
        answer = await sandbox.exec(["true"])
        if answer.exit_code != 0:
            raise AssertionError(f"true ended with {answer.exit_code}")
        done += 1
    return done
