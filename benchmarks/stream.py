"""`dsec bench stream`: how soon the first byte of a command's output is with the client, and how fast much output comes."""

from __future__ import annotations

import subprocess
import time

from benchmarks import machine
from benchmarks.report import Promise, Report, percentile, result, show
from benchmarks.stage import run, stage
from dsec import Exit, Process, Sandbox, Stdout

COUNT = 300
SIZE = 100_000_000
RUNS = 3
_MB = 1e6
_WARM_UP = 20
_LINE = b"0123456789abcdef" * 64
# A line that is no power of two long, again and again: every byte's place can be told.
_POUR = f"yes {(_LINE + b'-')[:997].decode()} | head -c {SIZE}"


def main(*, count: int | None, against: tuple[str, ...], json: bool) -> bool:
    report, started, written = run(_measure(count or COUNT))
    pictures = (("from the start of the command", started), ("from its write", written))
    return show(report, json_output=json, pictures=pictures)


async def _measure(count: int) -> tuple[Report, list[float], list[float]]:
    described = machine.describe()
    async with stage(max_sandboxes=8) as place:
        async with place.client.run_container(place.environments.next().args()) as sandbox:
            started = [await _first_byte(sandbox) for _ in range(-_WARM_UP, count)][_WARM_UP:]
            written = await _written(sandbox, count)
            rates = [SIZE / await _pour(sandbox) / _MB for _ in range(RUNS)]
    results = (
        result("first_byte_p50_ms", percentile(written, 50), "ms"),
        result("first_byte_p99_ms", percentile(written, 99), "ms"),
        result("start_to_first_byte_p50_ms", percentile(started, 50), "ms"),
        result("mb_per_s", sorted(rates)[RUNS // 2], "MB/s", floor=_floor(), promise=Promise("value", "least", 100)),
    )
    notes = (
        "first_byte: from the command's own look at the clock, just before it writes, to the client's callback",
        "start_to_first_byte: from the call of `start`, a new command each time",
        f"mb_per_s: {SIZE / _MB:g} MB through process.events(), every byte compared; the floor is the same command and a pipe",
    )
    return Report("stream", described, results, notes), started, written


async def _first_byte(sandbox: Sandbox) -> float:
    """Milliseconds from asking for a command to having its first output."""
    began = time.perf_counter()
    process = await sandbox.start(["echo", "x"])
    async for event in process.events():
        if not isinstance(event, Stdout) or event.data != b"x\n":
            raise AssertionError(f"echo x: {event}")
        break
    return (time.perf_counter() - began) * 1e3


_WRITER = """
import sys, time
for line in sys.stdin.buffer:
    sys.stdout.write(f"{time.monotonic_ns()}\\n")
    sys.stdout.flush()
"""


async def _written(sandbox: Sandbox, count: int) -> list[float]:
    """Milliseconds from a command's write to the event, one write at a time."""
    process = await sandbox.start(["python3", "-c", _WRITER], stdin=True)
    samples: list[float] = []
    await process.write(b"\n")
    async for event in process.events():
        if isinstance(event, Exit):
            break
        samples.append((time.monotonic_ns() - int(event.data)) / 1e6)
        if len(samples) == count + _WARM_UP:
            await process.close_stdin()
        else:
            await process.write(b"\n")
    return samples[_WARM_UP:]


async def _pour(sandbox: Sandbox) -> float:
    """Seconds that much output takes from the start of its command to its last byte."""
    expected = memoryview((_line() * (2 + (1 << 20) // 998))[: 1 << 20])
    began = time.perf_counter()
    process: Process = await sandbox.start(_POUR, max_output_bytes=SIZE)
    size = 0
    async for event in process.events():
        if isinstance(event, Exit):
            break
        at = size % 998
        if event.data != expected[at : at + len(event.data)]:
            raise AssertionError(f"other bytes than the command wrote, near {size}")
        size += len(event.data)
    elapsed = time.perf_counter() - began
    if size != SIZE:
        raise AssertionError(f"{size} bytes came of {SIZE}")
    return elapsed


def _line() -> bytes:
    return (_LINE + b"-")[:997] + b"\n"


def _floor() -> float:
    """MB/s of the same command on the machine itself, into a pipe that is read at once."""
    began = time.perf_counter()
    with subprocess.Popen(["sh", "-c", _POUR], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        size = 0
        while piece := child.stdout.read1(1 << 16):
            size += len(piece)
    return size / (time.perf_counter() - began) / _MB
