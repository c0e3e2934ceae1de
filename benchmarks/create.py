"""`dsec bench create`: from nothing to the first command's result, and whole cycles of create, use, remove.

Every sandbox is of a combination of layers that was never asked for before, its first command reads a file of each layer,
and its answer is compared. A cycle ends when `stop` has been answered, which is when processes, groups and upper are gone.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from benchmarks import floor_run, machine
from benchmarks.processes import cpu_ms, machine_cpu_ms
from benchmarks.report import Peer, Report, percentile, result, show
from benchmarks.stage import POOL, Environment, Stage, run, stage

COUNT = 400
AT_ONCE = 32
_WARM_UP = 40
_FLOOR_COUNT = 500


def main(*, count: int | None, against: tuple[str, ...], json: bool) -> bool:
    report, pictures = run(_measure(count or COUNT, against))
    return show(report, json_output=json, pictures=pictures)


async def _measure(count: int, against: tuple[str, ...]) -> tuple[Report, list[tuple[str, list[float]]]]:
    described = machine.describe()
    count = max(count, 10 * POOL)
    async with stage(max_sandboxes=AT_ONCE + POOL) as place:
        one = floor_run.create(place.meta, place.data, count=_FLOOR_COUNT, workers=1)
        firsts, cycles = await _one_at_a_time(place, count)
        two = floor_run.create(place.meta, place.data, count=_FLOOR_COUNT, workers=2)
        before = {**cpu_ms(place.endpoint.state), "machine": machine_cpu_ms()}
        per_second, together = await _many_at_once(place, 3 * count)
        after = {**cpu_ms(place.endpoint.state), "machine": machine_cpu_ms()}
        alone = floor_run.create(place.meta, place.data, count=_FLOOR_COUNT, workers=2, pooled=False)
        peers: tuple[Peer, ...] = ()
        if against:
            from benchmarks.peers import measure

            peers = measure(against, place.meta, place.data, percentile(cycles, 50), per_second)
    results = (
        result("first_result_p50_ms", percentile(firsts, 50), "ms", floor=one.create_p50_ms),
        result("first_result_p99_ms", percentile(firsts, 99), "ms", floor=one.create_p99_ms),
        result("first_result_min_ms", min(firsts), "ms", floor=one.create_min_ms),
        result("cycle_p50_ms", percentile(cycles, 50), "ms"),
        result("cycles_per_s", per_second, "1/s", floor=two.cycles_per_s),
        result("cycle_at_32_p99_ms", percentile(together, 99), "ms"),
        result("floor_unpooled_cycles_per_s", alone.cycles_per_s, "1/s"),
        *(result(f"cpu_ms_per_cycle_{who}", (after[who] - before[who]) / (3 * count), "ms") for who in before),
    )
    notes = (
        f"{count} sandboxes one at a time, {3 * count} at {AT_ONCE} at once, each of layers in a combination of its own; "
        f"the pool holds {POOL}",
        "the floor answers a byte from its init; ours also runs a command that reads a file of each layer",
    )
    report = Report("create", described, results, notes, peers)
    return report, [("create to first result", firsts), (f"cycle, {AT_ONCE} at once", together)]


async def _one_at_a_time(place: Stage, count: int) -> tuple[list[float], list[float]]:
    """(create to first result, whole cycle), ms each."""
    firsts: list[float] = []
    cycles: list[float] = []
    for number in range(-_WARM_UP, count):
        first, cycle = await _cycle(place, place.environments.next())
        check_groups(place, 2 * POOL)
        if number >= 0:
            firsts.append(first)
            cycles.append(cycle)
    return firsts, cycles


async def _many_at_once(place: Stage, count: int) -> tuple[float, list[float]]:
    """(cycles a second, ms of each cycle) with AT_ONCE clients."""
    cycles: list[float] = []

    async def client(mine: int) -> None:
        for _ in range(mine):
            cycles.append((await _cycle(place, place.environments.next()))[1])

    started = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for number in range(AT_ONCE):
            group.create_task(client(count // AT_ONCE + (number < count % AT_ONCE)))
    elapsed = time.perf_counter() - started
    check_groups(place, AT_ONCE + 2 * POOL)
    return count / elapsed, cycles


async def _cycle(place: Stage, environment: Environment) -> tuple[float, float]:
    started = time.perf_counter()
    sandbox = await place.client.run_container(environment.args())
    answer = await sandbox.exec(environment.proof)
    first = time.perf_counter()
    if answer.stdout != environment.expected or answer.exit_code != 0:
        raise AssertionError(f"{environment.proof} printed {answer.stdout!r}, {answer.stderr!r}")
    await sandbox.stop()
    ended = time.perf_counter()
    if (Path(place.endpoint.run) / "sb" / f"{sandbox.id}.sock").exists():
        raise AssertionError(f"{sandbox.id} was stopped, but its socket is there")
    return (first - started) * 1e3, (ended - started) * 1e3


def check_groups(place: Stage, most: int) -> None:
    """Stopped sandboxes may not leave control groups behind: there are those of the pool, and of what lives."""
    for hierarchy in ("unified", "memory", "pids", "cpu", "."):
        parent = Path("/sys/fs/cgroup") / hierarchy / f"dsec-{place.edge}"
        groups = sum(1 for _ in parent.glob("s[0-9]*")) if parent.is_dir() else 0
        if groups > most:
            raise AssertionError(
                f"{groups} groups in {parent}, expected at most {most}: stopped sandboxes leave theirs"
            )
