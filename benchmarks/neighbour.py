"""`dsec bench neighbour`: what a quiet sandbox feels of hogs beside it.

One sandbox runs `true` again and again; beside it, one after the other, each hog of `hogs.py` runs in a sandbox of its own that
may have every core, and thousands of silent connections to the API stand open. Each hog's figures are put beside those of a
window without any hog, measured right before it, so that what else goes on at the machine is in both.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import msgspec

from benchmarks import machine
from benchmarks.hogs import HOGS
from benchmarks.report import Report, percentile, result, show
from benchmarks.stage import Stage, run, stage
from dsec import Sandbox

SECONDS = 6
CONNECTIONS = 3000
_WARM_UP_S = 1.0
_START_S = 1.5  # until a hog is at its limits


class Beside(msgspec.Struct, frozen=True):
    """p99 of the round trip of `true` beside a hog and just before it, milliseconds."""

    name: str
    quiet_ms: float
    p99_ms: float

    @property
    def ratio(self) -> float:
        return self.p99_ms / self.quiet_ms


def main(*, count: int | None, against: tuple[str, ...], json: bool) -> bool:
    report, samples = run(_measure(count or SECONDS))
    return show(report, json_output=json, pictures=samples)


async def _measure(seconds: int) -> tuple[Report, tuple[tuple[str, list[float]], ...]]:
    described = machine.describe()
    found: list[Beside] = []
    worst: tuple[float, str, list[float]] = (0.0, "nothing", [0.0])
    async with stage(max_sandboxes=8) as place:
        async with place.client.run_container(place.environments.next().args()) as quiet:
            await _sample(quiet, _WARM_UP_S)
            for name, at_work in _hogs(place, described.cpus):
                before = await _sample(quiet, seconds)
                async with at_work:
                    await asyncio.sleep(_START_S)
                    beside = await _sample(quiet, seconds)
                one = Beside(name, percentile(before, 99), percentile(beside, 99))
                found.append(one)
                worst = max(worst, (one.ratio, name, beside), key=lambda entry: entry[0])
                await _sample(quiet, _WARM_UP_S)  # what it left behind is not the next one's
    results = [result("worst_ratio", worst[0], "")]
    for one in found:
        results.append(result(f"{one.name}_p99_ms", one.p99_ms, "ms", floor=one.quiet_ms))
    notes = (
        f"p99 of `exec true` over {seconds} s beside each hog; the floor is the same without it, measured just before",
        f"the worst is {worst[1]}; connections: {CONNECTIONS} to the API, half of them with half a request",
    )
    return Report("neighbour", described, tuple(results), notes), ((f"beside {worst[1]}", worst[2]),)


def _hogs(place: Stage, cores: int) -> list[tuple[str, AbstractAsyncContextManager[None]]]:
    hogs = [(hog.name, _in_a_sandbox(place, hog.line, cores)) for hog in HOGS]
    return [*hogs, ("connections", _many_connections(place.endpoint.url))]


@asynccontextmanager
async def _in_a_sandbox(place: Stage, line: str, cores: int) -> AsyncIterator[None]:
    args = msgspec.structs.replace(place.environments.next().args(), cpu_cores_limit=cores)
    async with place.client.run_container(args) as sandbox:
        await sandbox.start(line, max_output_bytes=1 << 20)
        yield


@asynccontextmanager
async def _many_connections(url: str) -> AsyncIterator[None]:
    host, _, port = url.rpartition("//")[2].rpartition(":")
    opened: list[asyncio.StreamWriter] = []
    try:
        for number in range(CONNECTIONS):
            _, writer = await asyncio.open_connection(host, int(port))
            if number % 2:
                writer.write(b"POST /v1/sandboxes HTTP/1.1\r\nhost: x\r\ncontent-length: 10\r\n\r\n{")
            opened.append(writer)
        yield
    finally:
        for writer in opened:
            writer.close()


async def _sample(sandbox: Sandbox, seconds: float) -> list[float]:
    samples: list[float] = []
    end = time.perf_counter() + seconds
    while (started := time.perf_counter()) < end:
        answer = await sandbox.exec(["true"])
        samples.append((time.perf_counter() - started) * 1e3)
        if answer.exit_code != 0:
            raise AssertionError(f"true ended with {answer.exit_code}")
    return samples
