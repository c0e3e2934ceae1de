"""Run the floor program: in a mount namespace of its own, on a filesystem like that of the uppers, over the same base layer.

`run` starts this module as a script, which mounts a fresh btrfs image (made and mounted with the options of the launcher's)
and the base layer's EROFS, then executes the program. The mounts and the loop device go with the namespace; the
directory with the image is removed by `run`.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec

ROOT = Path(__file__).resolve().parent.parent
_SOURCE = ROOT / "benchmarks" / "floor" / "sandbox_floor.c"
_BINARY = ROOT / "build" / "floor" / "sandbox_floor"
_IMAGE_BYTES = 8 << 30
_MKFS = ("mkfs.btrfs", "-q", "-f", "-m", "single", "-d", "single", "-n", "16k")
_NOATIME = 1024
_OPTIONS = "nobarrier,nodatasum,discard=async,commit=120,space_cache=v2"


class FloorError(Exception):
    """The floor program could not be built or did not end well; its own words."""


class Create(msgspec.Struct, frozen=True):
    """`create`: times in ms."""

    create_min_ms: float
    create_p50_ms: float
    create_p99_ms: float
    cycles_per_s: float
    cpu_ms_per_cycle: float


class Exec(msgspec.Struct, frozen=True):
    p50_ms: float
    p99_ms: float


class Density(msgspec.Struct, frozen=True):
    kb_per_sandbox: float


def create(meta: Path, data: list[Path], *, count: int, workers: int, pooled: bool = True) -> Create:
    """pooled: network namespaces and control groups are used again and again; else made and destroyed with each cycle."""
    pool = ("--pooled",) if pooled else ()
    arguments = ("create", *pool, "--count", str(count), "--workers", str(workers))
    return msgspec.json.decode(_run(meta, data, arguments), type=Create)


def execute(meta: Path, data: list[Path], *, count: int) -> Exec:
    return msgspec.json.decode(_run(meta, data, ("exec", "--count", str(count))), type=Exec)


def density(meta: Path, data: list[Path], *, count: int) -> Density:
    return msgspec.json.decode(_run(meta, data, ("density", "--pooled", "--count", str(count))), type=Density)


def build() -> Path:
    """Compile the program unless it is newer than its source."""
    if _BINARY.exists() and _BINARY.stat().st_mtime >= _SOURCE.stat().st_mtime:
        return _BINARY
    _BINARY.parent.mkdir(parents=True, exist_ok=True)
    temporary = _BINARY.with_suffix(f".{os.getpid()}")
    command = ["gcc", "-O2", "-Wall", "-Wextra", "-o", str(temporary), str(_SOURCE)]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise FloorError("gcc is missing: apt-get install gcc libc6-dev") from None
    if answer.returncode != 0:
        raise FloorError(f"gcc failed: {answer.stderr.strip()}")
    temporary.rename(_BINARY)
    return _BINARY


def _run(meta: Path, data: list[Path], arguments: tuple[str, ...]) -> bytes:
    binary = build()
    with tempfile.TemporaryDirectory(prefix="dsec-floor-", dir="/var/tmp") as directory:
        script = [sys.executable, "-m", "benchmarks.floor_run", directory, str(binary), str(meta), str(len(data))]
        command = [*script, *map(str, data), *arguments]
        answer = subprocess.run(command, capture_output=True, cwd=ROOT, check=False)
    if answer.returncode != 0:
        raise FloorError(f"the floor program failed: {answer.stderr.decode(errors='replace').strip()[-500:]}")
    return answer.stdout


def _inside(directory: Path, binary: str, meta: str, data: list[str], arguments: list[str]) -> None:
    """In the new process: mount both filesystems where nobody else sees them, then become the floor program."""
    from dsec.backends.probe import syscalls
    from dsec.backends.probe.filesystems import enable_simple_quotas, loop_device
    from dsec.backends.probe.scratch import private_mounts

    directory.chmod(0o711)
    image, run, lower = directory / "uppers.btrfs", directory / "run", directory / "lower"
    with open(image, "wb") as handle:
        handle.truncate(_IMAGE_BYTES)
    subprocess.run([*_MKFS, str(image)], check=True, stdout=subprocess.DEVNULL)
    private_mounts()
    for target in (run, lower):
        target.mkdir()
    device = loop_device(image)
    syscalls.mount(os.readlink(f"/proc/self/fd/{device}"), str(run), "btrfs", _NOATIME, _OPTIONS)
    os.close(device)
    run.chmod(0o711)
    top = os.open(run, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    enable_simple_quotas(top)
    syscalls.mount(meta, str(lower), "erofs", syscalls.MS_RDONLY, ",".join(f"device={path}" for path in data))
    os.execv(binary, [binary, *arguments, "--lower", str(lower), "--run", str(run)])


if __name__ == "__main__":
    _directory, _binary, _meta, _number, *_rest = sys.argv[1:]
    _inside(Path(_directory), _binary, _meta, _rest[: int(_number)], _rest[int(_number) :])
