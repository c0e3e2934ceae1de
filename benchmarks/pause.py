"""`dsec bench pause`: how long a pause takes, what it gives back, and how soon a resumed sandbox has its first result.

The sandbox holds 100 MB of random bytes, all touched. Swap is set up for the run and removed after it: a file on a disk, and
beside it zram, compressed memory, which has nothing to compress here.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager
from pathlib import Path
from statistics import median

import msgspec

from benchmarks import machine
from benchmarks.report import Report, Result, result, show
from benchmarks.stage import Stage, run, stage
from benchmarks.swap import NoSwap, swap_file, zram
from dsec import DSecClient, Process, Sandbox, Stdout
from dsec.edge.admission import memory

COUNT = 9
MEGABYTES = 100
_MB = 1e6
_SETTLE_S = 3.0
# "fill": new random bytes, so that no page is still in swap from the pause before; "sum": reads a byte of every page.
_HOLDER = f"""
$| = 1;
open F, '/dev/urandom';
while (<STDIN>) {{
  if (/fill/) {{ read F, $b, {MEGABYTES}_000_000; print "filled\\n" }}
  elsif (/sum/) {{ $s = 0; for ($i = 0; $i < length $b; $i += 4096) {{ $s += ord substr $b, $i, 1 }} print "$s\\n" }}
  else {{ print "got $_" }}
}}
"""


class Round(msgspec.Struct, frozen=True):
    """Milliseconds (those after the resume all from its beginning) and shares of what the sandbox held."""

    pause_ms: float
    first_result_ms: float
    program_ms: float
    all_back_ms: float
    returned: float
    node_returned: float


def main(*, count: int | None, against: tuple[str, ...], json: bool) -> bool:
    report = run(_measure(count or COUNT))
    return show(report, json_output=json)


async def _measure(count: int) -> Report:
    described = machine.describe()
    results: tuple[Result, ...] = ()
    notes = [
        f"the sandbox holds {MEGABYTES} MB of random bytes; the median of {count} rounds",
        "returned_share: the smaller one of what left the sandbox's group and what the node has more available",
        "resume_first_result: `true` as the first request to the paused sandbox",
        "program_answer: the program that holds the memory answers a line; all_back: it has touched every page of it",
    ]
    async with stage(max_sandboxes=4) as place:
        for name, make in (("", swap_file), ("zram_", zram)):
            try:
                rounds = await _with_swap(place, make, count)
            except NoSwap as why:
                notes.append(f"{name or 'swap file'}: {why}")
                continue
            results += _results(name, rounds)
    notes.append(
        "zram keeps swapped pages in memory, and random bytes do not shrink: there the group gets free and the node does not"
    )
    if not any(one.name == "pause_ms" for one in results):
        raise SystemExit("error: no swap, nothing to measure: " + "; ".join(notes))
    return Report("pause", described, results, tuple(notes))


def _results(name: str, rounds: list[Round]) -> tuple[Result, ...]:
    def middle(of: Callable[[Round], float]) -> float:
        return median(of(one) for one in rounds)

    shares = middle(lambda one: min(one.returned, one.node_returned)), middle(lambda one: one.returned)
    return (
        result(f"{name}pause_ms", middle(lambda one: one.pause_ms), "ms"),
        result(f"{name}resume_first_result_ms", middle(lambda one: one.first_result_ms), "ms"),
        result(f"{name}returned_share", shares[0] if not name else shares[1], ""),
        result(f"{name}node_returned_share", middle(lambda one: one.node_returned), ""),
        result(f"{name}program_answer_ms", middle(lambda one: one.program_ms), "ms"),
        result(f"{name}all_back_ms", middle(lambda one: one.all_back_ms), "ms"),
    )


async def _with_swap(place: Stage, make: Callable[[int], AbstractContextManager[Path]], count: int) -> list[Round]:
    with make(4 * MEGABYTES):
        return await _rounds(place.client, place, count)


async def _rounds(client: DSecClient, place: Stage, count: int) -> list[Round]:
    async with client.run_container(place.environments.next().args()) as sandbox:
        process = await sandbox.start(["perl", "-e", _HOLDER], stdin=True)
        lines = _lines(process)
        rounds = []
        for number in range(-1, count):
            await _ask(process, lines, "fill")
            one = await _round(sandbox, process, lines)
            if number >= 0:
                rounds.append(one)
        return rounds


async def _round(sandbox: Sandbox, process: Process, lines: AsyncIterator[str]) -> Round:
    checksum = await _ask(process, lines, "sum")
    held = (await sandbox.metrics()).memory_bytes
    available = memory()[0]
    began = time.perf_counter()
    await sandbox.pause()
    paused = time.perf_counter()
    left = (await sandbox.metrics()).memory_bytes
    freed = await _settled(available, held)
    resumed = time.perf_counter()
    answer = await sandbox.exec(["true"])
    first = time.perf_counter()
    if await _ask(process, lines, "hello") != "got hello" or answer.exit_code:
        raise AssertionError("the program is not what it was before the pause")
    program = time.perf_counter()
    if await _ask(process, lines, "sum") != checksum:
        raise AssertionError("the memory is not what it was before the pause")
    whole = time.perf_counter()
    return Round(
        pause_ms=(paused - began) * 1e3,
        first_result_ms=(first - resumed) * 1e3,
        program_ms=(program - resumed) * 1e3,
        all_back_ms=(whole - resumed) * 1e3,
        returned=(held - left) / held,
        node_returned=freed / held,
    )


async def _settled(available: int, held: int) -> int:
    """Bytes that the node has more available, once the disk has taken what is on its way to it."""
    deadline = time.monotonic() + _SETTLE_S
    while (freed := memory()[0] - available) < 0.9 * held and time.monotonic() < deadline:
        await asyncio.sleep(0.02)
    return freed


async def _ask(process: Process, lines: AsyncIterator[str], what: str) -> str:
    await process.write(what.encode() + b"\n")
    return await anext(lines)


async def _lines(process: Process) -> AsyncIterator[str]:
    buffer = b""
    async for event in process.events():
        if isinstance(event, Stdout):
            *lines, buffer = (buffer + event.data).split(b"\n")
            for line in lines:
                yield line.decode()
