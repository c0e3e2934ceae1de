"""`dsec bench files`: a gigabyte through the SDK, API server, edge and aether, each way, and what memory that takes."""

from __future__ import annotations

import filecmp
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks import machine, processes
from benchmarks.report import Report, Result, result, show
from benchmarks.stage import run, stage
from dsec import Sandbox

MIB = 1 << 20
SIZE_MIB = 1024
_MB = 1e6


def main(*, count: int | None, against: tuple[str, ...], json: bool) -> bool:
    """count: MiB instead of 1024."""
    return show(run(_measure(count or SIZE_MIB)), json_output=json)


async def _measure(mebibytes: int) -> Report:
    described = machine.describe()
    async with stage(max_sandboxes=8) as place:
        with _scratch(mebibytes) as local:
            source, back = local / "source", local / "back"
            floor = _pipe_floor(source, Path(place.endpoint.state) / "floor", local / "floor")
            async with place.client.run_container(place.environments.next().args()) as sandbox:
                watch = _Watch(processes.roles(place.endpoint.state, *processes.agents(place.edge)))
                size = mebibytes * MIB
                up = await watch.timed(sandbox.files.upload(source, "/bench/file"))
                down = await watch.timed(sandbox.files.download("/bench/file", back))
                drained = await watch.timed(_drain(sandbox, size))
            if not filecmp.cmp(source, back, shallow=False):
                raise AssertionError("what came back is not what was sent")
    results: list[Result] = [
        result("upload_mb_per_s", size / up / _MB, "MB/s", floor=size / floor[0] / _MB),
        result("download_mb_per_s", size / down / _MB, "MB/s", floor=size / floor[1] / _MB),
        result("stream_mb_per_s", size / drained / _MB, "MB/s"),
        result("rss_growth_mb", max(watch.growth.values()), "MB"),
    ]
    results += [result(f"rss_growth_mb_{role}", grown, "MB") for role, grown in sorted(watch.growth.items())]
    notes = (
        f"{mebibytes} MiB of random bytes between a file on {local.parent} and a file of the sandbox, compared afterwards",
        "stream: the same, dropped as it comes",
        "rss_growth_mb: how far the resident set of any process rose above its size before, by the kernel's own mark",
        "the floor is `cat source | cat > target`, to the disk of the sandboxes and back",
    )
    return Report("files", described, tuple(results), notes)


@contextmanager
def _scratch(mebibytes: int) -> Iterator[Path]:
    """A directory with the file, and room for two more; in memory if there is enough: the client's disk is not the question."""
    memory = Path("/dev/shm")
    roomy = memory.is_dir() and shutil.disk_usage(memory).free > 8 * mebibytes * MIB
    with tempfile.TemporaryDirectory(prefix="dsec-bench-", dir=memory if roomy else "/var/tmp") as directory:
        with (Path(directory) / "source").open("wb") as file:
            for _ in range(mebibytes):
                file.write(os.urandom(MIB))
        yield Path(directory)


def _pipe_floor(source: Path, stored: Path, back: Path) -> tuple[float, float]:
    """Seconds of two processes and a pipe: to the disk, and from it."""

    def timed(origin: Path, target: Path) -> float:
        started = time.perf_counter()
        subprocess.run(["sh", "-c", 'cat "$1" | cat > "$2"', "sh", origin, target], check=True)
        return time.perf_counter() - started

    try:
        return timed(source, stored), timed(stored, back)
    finally:
        stored.unlink(missing_ok=True)
        back.unlink(missing_ok=True)


async def _drain(sandbox: Sandbox, wanted: int) -> None:
    size = 0
    async for piece in sandbox.files.stream("/bench/file"):
        size += len(piece)
    if size != wanted:
        raise AssertionError(f"{size} bytes came of {wanted}")


class _Watch:
    """Times work, and notes how far the resident sets of the processes rise that bytes go through."""

    def __init__(self, pids: dict[str, int]) -> None:
        self._pids = pids
        self.growth = dict.fromkeys(pids, 0.0)

    async def timed(self, work: Awaitable[object]) -> float:
        peaks = {role: processes.ResidentPeak(pid) for role, pid in self._pids.items()}
        started = time.perf_counter()
        await work
        elapsed = time.perf_counter() - started
        for role, peak in peaks.items():
            self.growth[role] = max(self.growth[role], peak.grown_mb())
        return elapsed
