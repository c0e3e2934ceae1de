"""`dsec bench grade`: what a grade costs beside its tests, and how many there are in a second.

A grade seals the agent's sandbox, reads its changes, makes a fresh sandbox with the hidden tests, applies what counts, runs the
tests and judges. The same command in a sandbox that is ready, fix and tests in place, is what it is compared with, turn by turn.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from statistics import median

from benchmarks import machine
from benchmarks.report import Promise, Report, result, show
from benchmarks.stage import BASE, Stage, run, stage
from dsec import CommandRunner, DSecClient, DSecContainerRunArgs, GradeTimes, Sandbox
from dsec.layers import build_directory

OVERHEAD = Promise("value", "most", 60)
PARTS = ("seal", "create", "apply", "run")
COUNT = 40
AT_ONCE = 16
MANY = 160
WARM_UPS = 4
SOURCE = "/workspace/src/shop/__init__.py"
BUGGY, FIXED = "def total(prices): return sum(prices[1:])\n", "def total(prices): return sum(prices)\n"
CHECK = "import sys; sys.path.insert(0, '/workspace/src'); import shop; sys.exit(shop.total([1, 2, 3]) != 6)\n"
TESTS = ("python3", "-B", "/workspace/check.py")
RUNNER = CommandRunner(argv=TESTS)


def main(*, count: int | None, against: tuple[str, ...], json: bool) -> bool:
    return show(run(_measure(count or COUNT)), json_output=json)


async def _measure(count: int) -> Report:
    described = machine.describe()
    async with stage(max_sandboxes=MANY + 3 * AT_ONCE) as place:
        bench = _Bench(place)
        bare, graded, times = await bench.turns(count)
        rate, busy = await bench.rate()
    overhead = [one - median(bare) for one in graded]
    notes = (
        f"overhead: grade() less the median of the bare command in a ready sandbox, median of {count} turns, one at a time",
        f"grades_per_s: {MANY} agents' sandboxes graded, {AT_ONCE} at once; busy_share: of both processors meanwhile",
    )
    results = (
        result("overhead_p50_ms", median(overhead), "ms", promise=OVERHEAD),
        result("bare_p50_ms", median(bare), "ms"),
        result("grade_p50_ms", median(graded), "ms"),
        *(result(f"{part}_p50_ms", median(getattr(one, f"{part}_s") for one in times) * 1e3, "ms") for part in PARTS),
        result("grades_per_s", rate, "/s"),
        result("busy_share", busy, ""),
    )
    return Report("grade", described, results, notes)


class _Bench:
    def __init__(self, place: Stage) -> None:
        self._client: DSecClient = place.client
        self._tests = _publish(place, "grade-bench-tests", "toolkit", {"check.py": CHECK})
        workspace = _publish(place, "grade-bench", "workspace", {"src/shop/__init__.py": BUGGY})
        self._args = DSecContainerRunArgs(BASE, layers=(workspace,), memory_limit_mb=256)

    async def turns(self, count: int) -> tuple[list[float], list[float], list[GradeTimes]]:
        """Milliseconds of the bare command and of a grade, one after the other, and of what the service took for its parts."""
        bare: list[float] = []
        graded: list[float] = []
        times: list[GradeTimes] = []
        layers = (*self._args.layers, self._tests)
        ready = DSecContainerRunArgs(BASE, layers=layers, memory_limit_mb=256)
        async with self._client.run_container(ready) as sandbox:
            await sandbox.files.write(SOURCE, FIXED)
            for turn in range(-WARM_UPS, count):
                async with self._agent() as agent:
                    began = time.perf_counter()
                    await sandbox.exec(TESTS, user="65534:65534", check=True)
                    ran = time.perf_counter()
                    parts = await self._grade(agent)
                    over = time.perf_counter()
                if turn >= 0:
                    bare.append((ran - began) * 1e3)
                    graded.append((over - ran) * 1e3)
                    times.append(parts)
        return bare, graded, times

    async def rate(self) -> tuple[float, float]:
        """Grades a second, and how busy the processors were."""
        async with AsyncExitStack() as stack:
            agents = await asyncio.gather(*(stack.enter_async_context(self._agent()) for _ in range(MANY)))
            places = asyncio.Semaphore(AT_ONCE)

            async def one(agent: Sandbox) -> None:
                async with places:
                    await self._grade(agent)

            used, began = _processor_time(), time.perf_counter()
            await asyncio.gather(*map(one, agents))
            took = time.perf_counter() - began
            busy, idle = (after - before for after, before in zip(_processor_time(), used, strict=True))
        return MANY / took, busy / (busy + idle)

    @asynccontextmanager
    async def _agent(self) -> AsyncIterator[Sandbox]:
        """A sandbox whose agent has fixed the bug and left a process behind."""
        async with self._client.run_container(self._args) as sandbox:
            await sandbox.files.write(SOURCE, FIXED)
            await sandbox.start("sleep 1000")
            yield sandbox

    async def _grade(self, agent: Sandbox) -> GradeTimes:
        verdict = await self._client.grade(self._args, agent, tests=self._tests, runner=RUNNER, include=("src/**",))
        if verdict.reward != 1.0:
            raise AssertionError(f"a fix was not rewarded: {verdict}")
        return verdict.evidence.times


def _publish(place: Stage, name: str, kind: str, files: dict[str, str]) -> str:
    folder = Path(tempfile.mkdtemp(prefix="dsec-bench-grade-", dir="/var/tmp"))
    try:
        for path, text in files.items():
            where = folder / "workspace" / path
            where.parent.mkdir(parents=True, exist_ok=True)
            where.write_text(text, encoding="utf-8")
        for path in folder.rglob("*"):
            path.chmod(0o755 if path.is_dir() else 0o644)
        (folder / "workspace").chmod(0o755)
        folder.chmod(0o755)
        ref = build_directory(
            place.store, folder, name=name, version="1", kind="toolkit" if kind == "toolkit" else "workspace"
        )
        return f"{ref.name}@{ref.digest}"
    finally:
        shutil.rmtree(folder)


def _processor_time() -> tuple[int, int]:
    """Ticks that the processors have been busy, and idle."""
    with open("/proc/stat", encoding="ascii") as file:
        ticks = [int(word) for word in file.readline().split()[1:9]]
    idle = ticks[3] + ticks[4]
    return sum(ticks) - idle, idle
