"""`dsec bench density`: memory of idle sandboxes, and command latency when there are thousands.

Without --count two crowds, 1,000 and 3,200. Memory cgroups that a large run leaves behind make later ones dearer until the
machine restarts, so this bench goes before the others, the smaller crowd first; the slab at the start is printed.
"""

from __future__ import annotations

import asyncio
import random
import time

import msgspec

from benchmarks import floor_run, machine
from benchmarks.processes import agents, platform_pss_mb
from benchmarks.report import Promise, Report, Result, percentile, result, show
from benchmarks.stage import Stage, run, stage
from dsec import Sandbox

CROWDS = (1000, 3200)
CLIENTS = 32
COMMANDS_EACH = 100
_FLOOR_MOST = 1500  # the floor holds eight descriptors a sandbox in one process
_SETTLED_KB = 512  # free memory that changes by less within a second has settled: deferred frees have happened
_SETTLE_MOST_S = 30


class Crowd(msgspec.Struct, frozen=True):
    count: int
    kb_each: float
    kb_each_used: float | None
    created_per_s: float
    alive: int
    commands: list[float]


def main(*, count: int | None, against: tuple[str, ...], json: bool) -> bool:
    report, pictures = run(_measure((count,) if count else CROWDS))
    return show(report, json_output=json, pictures=pictures)


async def _measure(counts: tuple[int, ...]) -> tuple[Report, list[tuple[str, list[float]]]]:
    described = machine.describe()
    results: list[Result] = []
    notes: list[str] = []
    pictures: list[tuple[str, list[float]]] = []
    for count in counts:
        async with stage(max_sandboxes=count + 64) as place:
            before = _floor(place, count)
            await _warm_up(place)
            at_rest = platform_pss_mb(place.endpoint.state)
            crowd = await _crowd(place, count)
            after_use = platform_pss_mb(place.endpoint.state)
        after = await _floor_again(count)
        results += _results(crowd, before, at_rest, last=count == counts[-1])
        notes.append(
            f"{count:,}: floor {_kb(before)} KB before and {_kb(after)} KB after (the ratio is to the first); "
            f"{crowd.created_per_s:.0f} created a second; platform {at_rest:.0f} MB before, {after_use:.0f} MB after"
        )
        pictures.append((f"command among {count:,} sandboxes, {CLIENTS} clients", crowd.commands))
    return Report("density", described, tuple(results), tuple(notes)), pictures


def _results(crowd: Crowd, floor: float | None, at_rest: float, *, last: bool) -> list[Result]:
    found = [result(f"kb_per_sandbox_{crowd.count}", crowd.kb_each, "KB", floor=floor)]
    if crowd.kb_each_used is not None:
        found.append(result(f"kb_per_sandbox_used_{crowd.count}", crowd.kb_each_used, "KB", floor=floor))
    if last:
        found += [
            result("alive", crowd.alive, "sandboxes", promise=Promise("value", "least", crowd.count)),
            result("exec_p50_ms", percentile(crowd.commands, 50), "ms"),
            result("exec_p99_ms", percentile(crowd.commands, 99), "ms"),
            result("platform_pss_mb", at_rest, "MB"),
        ]
    return found


def _kb(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}"


def _floor(place: Stage, count: int) -> float | None:
    if count > _FLOOR_MOST:
        return None
    return floor_run.density(place.meta, place.data, count=count).kb_per_sandbox


async def _floor_again(count: int) -> float | None:
    """After the platform is gone: says how much dearer the run itself has made a memory cgroup."""
    if count > _FLOOR_MOST:
        return None
    from benchmarks.stage import base_blobs

    meta, data = base_blobs()
    return floor_run.density(meta, data, count=count).kb_per_sandbox


async def _warm_up(place: Stage) -> None:
    """Mounts every layer once and fills the caches that all sandboxes share, as one sandbox does for the floor."""
    for _ in range(place.environments.names // 2 + 8):
        environment = place.environments.next()
        async with place.client.run_container(environment.args()) as sandbox:
            answer = await sandbox.exec(environment.proof)
            if answer.stdout != environment.expected:
                raise AssertionError(f"{environment.proof} printed {answer.stdout!r}")


async def _crowd(place: Stage, count: int) -> Crowd:
    before = await _settled()
    started = time.perf_counter()
    sandboxes: list[Sandbox] = []
    args = [place.environments.next().args() for _ in range(count)]
    async with place.client.run_many(args, timeout=600) as burst:
        async for outcome in burst:
            sandboxes.append(outcome.sandbox)
    elapsed = time.perf_counter() - started
    try:
        kb_each = (before - await _settled()) / count
        alive = len(agents(place.edge))
        kb_each_used = None
        if count <= _FLOOR_MOST:
            await _use_all(sandboxes)
            kb_each_used = (before - await _settled()) / count
        commands = await _commands(sandboxes)
        still = len(agents(place.edge))
    finally:
        await place.client.stop_many(labels={"dsec": "bench"})
    if len({sandbox.id for sandbox in sandboxes}) != count or still < alive:
        raise AssertionError(f"{count} asked for, {len(sandboxes)} answered, {alive} alive, {still} after the commands")
    return Crowd(count, kb_each, kb_each_used, count / elapsed, alive, commands)


async def _use_all(sandboxes: list[Sandbox]) -> None:
    """One command in each: what a sandbox gets only then (its memory, CPU and pids groups) is there afterwards."""
    waiting = iter(sandboxes)

    async def client() -> None:
        for sandbox in waiting:
            (await sandbox.exec(["true"])).check()

    async with asyncio.TaskGroup() as group:
        for _ in range(CLIENTS):
            group.create_task(client())


async def _settled() -> int:
    """MemAvailable in KB once it no longer moves, or after a while on a machine that others use."""
    last = machine.meminfo()["MemAvailable"]
    for _ in range(_SETTLE_MOST_S):
        await asyncio.sleep(1)
        now = machine.meminfo()["MemAvailable"]
        if abs(now - last) < _SETTLED_KB:
            return now
        last = now
    return last


async def _commands(sandboxes: list[Sandbox]) -> list[float]:
    """Every client runs commands of its own in sandboxes drawn at random: write a file, read it back, compare."""
    draw = random.Random(11)
    samples: list[float] = []

    async def client(number: int) -> None:
        for turn in range(COMMANDS_EACH):
            sandbox = draw.choice(sandboxes)
            word = f"{number}-{turn}-{draw.getrandbits(32):08x}"
            started = time.perf_counter()
            answer = await sandbox.run_shell(f"echo {word} > /var/tmp/{word} && cat /var/tmp/{word}")
            samples.append((time.perf_counter() - started) * 1e3)
            if answer.stdout != f"{word}\n".encode():
                raise AssertionError(f"{sandbox.id} printed {answer.stdout!r} for {word}: {answer.stderr!r}")

    async with asyncio.TaskGroup() as group:
        for number in range(CLIENTS):
            group.create_task(client(number))
    return samples
