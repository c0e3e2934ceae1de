"""`dsec bench replay`: a rollout of 10,000 steps, recorded for real, is opened again and fast-forwarded, step after step.

The steps are an agent's: commands, files written, read and looked at. Every command appends a line to a file in the sandbox;
what there is more of these lines after the fast-forward than commands were made was run twice. The clock runs from the opening
to the last recorded step's result; each result is compared with the live one.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec

from benchmarks import machine
from benchmarks.report import Report, result, show
from benchmarks.stage import Stage, run, stage
from dsec import DSecContainerRunArgs, ExecResult, FileInfo, Rollout

COUNT = 10_000
_AT_ONCE = 32  # while it is recorded
_NAME = "fast forward"
Answer = ExecResult | FileInfo | bytes | int


def main(*, count: int | None, against: tuple[str, ...], json: bool) -> bool:
    return show(run(_measure(count or COUNT)), json_output=json)


async def _measure(count: int) -> Report:
    described = machine.describe()
    async with stage(max_sandboxes=4) as place:
        args = place.environments.next().args()
        live, record_s = await _recorded(place, args, count)
        rates = []
        for _ in range(3):
            seconds, reruns = await _fast_forward(place, args, live)
            rates.append(count / seconds)
    notes = (
        f"{count} steps, half of them commands; recorded at {count / record_s:,.0f} steps/s, {_AT_ONCE} at once",
        f"the slowest of three fast-forwards; all: {', '.join(f'{rate:,.0f}' for rate in rates)}",
    )
    return Report("replay", described, (result("steps_per_s", min(rates), "/s"), result("reruns", reruns, "")), notes)


def _step(rollout: Rollout, number: int) -> Coroutine[Any, Any, Answer]:
    made: tuple[Callable[[], Coroutine[Any, Any, Answer]], ...] = (
        lambda: rollout.run_shell(f"echo {number} >> /lines; seq 20"),
        lambda: rollout.files.write(f"/root/f{number % 97}.py", f"x = {number}\n" * 50),
        lambda: rollout.exec(["sh", "-c", "echo $0 >> /lines; exit 3", str(number)], env={"STEP": str(number)}),
        lambda: rollout.files.read(f"/root/f{(number - 2) % 97}.py") if number > 97 * 4 else rollout.files.stat("/"),
    )
    return made[number % 4]()


async def _recorded(place: Stage, args: DSecContainerRunArgs, count: int) -> tuple[list[Answer], float]:
    """Makes all the steps, and leaves the rollout open."""
    rollout = await place.client.rollout(_NAME, args)
    live: list[Answer] = []
    began = time.perf_counter()
    for start in range(0, count, _AT_ONCE):
        steps = [_step(rollout, number) for number in range(start, min(count, start + _AT_ONCE))]
        live += await asyncio.gather(*steps)
    seconds = time.perf_counter() - began
    await rollout.close()
    return live, seconds


async def _fast_forward(place: Stage, args: DSecContainerRunArgs, live: list[Answer]) -> tuple[float, int]:
    """Seconds, and how many commands ran again."""
    began = time.perf_counter()
    rollout = await place.client.rollout(_NAME, args)
    found = [await _step(rollout, number) for number in range(len(live))]
    seconds = time.perf_counter() - began
    for number, (one, other) in enumerate(zip(found, live, strict=True)):
        if isinstance(one, ExecResult):
            assert one.replayed, f"step {number} was not replayed"
            one = msgspec.structs.replace(one, replayed=False)
        assert one == other, f"step {number} is another one than it was: {one}, {other}"
    lines = int((await rollout.sandbox.run_shell("wc -l < /lines")).text)
    await rollout.close()
    return seconds, lines - sum(isinstance(one, ExecResult) for one in live)
