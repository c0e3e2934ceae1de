"""`dsec bench job`: 500 sandboxes of one job paused, their memory given back, and all of them answering again.

Each sandbox runs a Python program that has read files of its standard library, each other ones, into lists of words until it
holds 20 MB: small objects and pointers, all touched, nothing of it zeros. Swap is a file on a disk, made for the run and
removed after it. What is returned is what the node has more available, so that memory which only went elsewhere in memory
does not count.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from benchmarks import machine
from benchmarks.report import Report, Result, result, show
from benchmarks.stage import run
from benchmarks.swap import NoSwap, swap_file
from dsec import DSecClient, DSecContainerRunArgs, Job, Process, Sandbox, Stdout
from dsec.cluster import embedded
from dsec.edge.admission import memory

COUNT = 500
MEGABYTES = 20
BASE = "debian@12"
_FILLING = 4
_CHECKED = 24
_SETTLE_S = 60.0
_STILL_S = 5.0
_HOLDER = f"""
import glob, hashlib, os, sys

def held():
    for line in open("/proc/self/smaps_rollup"):
        if line.startswith("Anonymous:"):
            return int(line.split()[1]) * 1024

files = sorted(glob.glob(os.path.dirname(os.__file__) + "/**/*.py", recursive=True))
number, kept = int(sys.argv[1]) * 7, []
while held() < {MEGABYTES}_000_000:
    text = open(files[number % len(files)], "rb").read()
    number += 1
    if len(text) < 150_000:
        kept.append([line.split() for line in text.splitlines()])
print("up", flush=True)
for _ in sys.stdin:
    whole = hashlib.sha256()
    for lines in kept:
        for words in lines:
            whole.update(b" ".join(words))
    print(whole.hexdigest(), flush=True)
"""


class Paused(msgspec.Struct, frozen=True):
    """Seconds, and shares of what the sandboxes held: when the pause was answered, and when the disk had taken the rest."""

    pause_s: float
    at_answer: float
    returned: float
    returned_70_s: float


class Held(msgspec.Struct, frozen=True):
    sandbox: Sandbox
    process: Process


def main(*, count: int | None, against: tuple[str, ...], json: bool) -> bool:
    return show(run(_measure(count or COUNT)), json_output=json)


async def _measure(count: int) -> Report:
    described = machine.describe()
    try:
        with swap_file(count * (MEGABYTES + 8) + 512), embedded.private(max_sandboxes=count + 8) as endpoint:
            key = Path(endpoint.key_file).read_text(encoding="ascii").strip()
            async with DSecClient(endpoint.url, key) as client, client.job("bench", lease=600) as job:
                results, notes = await _round(job, count)
                await job.stop()
    except NoSwap as why:
        raise SystemExit(f"error: no swap, nothing to measure: {why}") from why
    return Report("job", described, results, notes)


async def _round(job: Job, count: int) -> tuple[tuple[Result, ...], tuple[str, ...]]:
    holding = await _filled(job, count)
    checked = holding[:: max(1, count // _CHECKED)]
    before = [await _digest(one.process, 0) for one in checked]
    bytes_held = (await job.usage()).memory_bytes
    paused = await _paused(job, bytes_held)
    resumed = time.perf_counter()
    await job.resume()
    resume_s = time.perf_counter() - resumed
    answers = await asyncio.gather(*(one.sandbox.exec(["true"]) for one in holding))
    answered_s = time.perf_counter() - resumed
    if not all(answer.ok for answer in answers):
        raise AssertionError("a sandbox did not answer after the resume")
    if [await _digest(one.process, 1) for one in checked] != before:
        raise AssertionError("the memory is not what it was before the pause")
    results = (
        result("pause_s_500", paused.pause_s, "s"),
        result("resume_s_500", answered_s, "s"),
        result("mb_returned_share", paused.returned, ""),
        result("returned_share_at_answer", paused.at_answer, ""),
        result("returned_70_s", paused.returned_70_s, "s"),
        result("resume_call_s", resume_s, "s"),
        result("held_mb", bytes_held / 1e6, "MB"),
    )
    return results, (
        f"{count} sandboxes, {bytes_held / count / 1e6:.1f} MB each: words of Python's library in lists of small objects",
        "pause_s: from the request until the pause is answered; resume_s: from the request until all have answered `true`",
        "mb_returned_share: the smaller one of what left the sandboxes and what the node has more, when the disk has taken all",
        "returned_70_s: when the node had 0.7 of it more",
        f"{len(checked)} of the programs walked all they hold afterwards, and found it as it was",
    )


async def _filled(job: Job, count: int) -> list[Held]:
    args = DSecContainerRunArgs(BASE, memory_limit_mb=4 * MEGABYTES, ttl_running_stop=None)
    async with job.run_many(args, count=count, timeout=600) as burst:
        sandboxes = [outcome.sandbox async for outcome in burst]
    turns = asyncio.Semaphore(_FILLING)

    async def one(number: int, sandbox: Sandbox) -> Held:
        async with turns:
            process = await sandbox.start(["python3", "-c", _HOLDER, str(number)], stdin=True)
            await _line(process, 0)
            return Held(sandbox, process)

    return list(await asyncio.gather(*(one(number, sandbox) for number, sandbox in enumerate(sandboxes))))


async def _paused(job: Job, held: int) -> Paused:
    available, began = memory()[0], time.perf_counter()
    seen: list[tuple[float, float]] = []

    async def watch() -> None:
        while True:
            seen.append((time.perf_counter() - began, (memory()[0] - available) / held))
            await asyncio.sleep(0.05)

    watching = asyncio.create_task(watch())
    await job.pause()
    pause_s = time.perf_counter() - began
    at_answer = (memory()[0] - available) / held
    await _still(seen)
    watching.cancel()
    left = (await job.usage()).memory_bytes
    reached = next((at for at, share in seen if share >= 0.7), float("nan"))
    return Paused(pause_s, at_answer, min(seen[-1][1], (held - left) / held), reached)


async def _still(seen: Sequence[tuple[float, float]]) -> None:
    """Until nothing more is given back."""
    best, since = 0.0, time.monotonic()
    began = since
    while time.monotonic() - since < _STILL_S and time.monotonic() - began < _SETTLE_S:
        await asyncio.sleep(0.1)
        if seen[-1][1] > best + 0.005:
            best, since = seen[-1][1], time.monotonic()


async def _digest(process: Process, asked: int) -> str:
    """Of all that the program holds; asked: how often before."""
    await process.write(b"\n")
    return await _line(process, 1 + asked)


async def _line(process: Process, number: int) -> str:
    """One line of its output, as soon as it is there."""
    output = b""
    async for event in process.events():
        if isinstance(event, Stdout):
            output += event.data
            if output.count(b"\n") > number:
                return output.splitlines()[number].decode()
    raise AssertionError(f"a program ended: {output!r}")
