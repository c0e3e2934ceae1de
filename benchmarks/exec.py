"""`dsec bench exec`: the round trip of `true` through the SDK, the API server and the edge."""

from __future__ import annotations

import time

from benchmarks import floor_run, machine
from benchmarks.report import Report, percentile, result, show
from benchmarks.stage import run, stage

COUNT = 2000
_WARM_UP = 100


def main(*, count: int | None, against: tuple[str, ...], json: bool) -> bool:
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
