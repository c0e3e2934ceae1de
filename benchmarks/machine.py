"""What this machine is, and how busy: numbers without it mean nothing."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import msgspec


class Machine(msgspec.Struct, frozen=True):
    """slab_mb: memory the kernel holds for its own objects at the start; memory cgroups of earlier runs stay in it."""

    cpus: int
    cpu: str
    memory_mb: int
    kernel: str
    cgroups: str
    load_1m: float
    slab_mb: float
    available_mb: float

    def __str__(self) -> str:
        return (
            f"{self.cpus} CPUs ({self.cpu}), {self.memory_mb:,} MB, Linux {self.kernel}, cgroups {self.cgroups}; "
            f"at the start load {self.load_1m:.2f}, slab {self.slab_mb:,.0f} MB, available {self.available_mb:,.0f} MB"
        )


def meminfo() -> dict[str, int]:
    """/proc/meminfo, in KB."""
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    return {line.split(":")[0]: int(line.split()[1]) for line in lines}


def describe() -> Machine:
    memory = meminfo()
    return Machine(
        cpus=len(os.sched_getaffinity(0)),
        cpu=_cpu_model(),
        memory_mb=memory["MemTotal"] // 1024,
        kernel=platform.release(),
        cgroups=_cgroups(),
        load_1m=round(os.getloadavg()[0], 2),
        slab_mb=round(memory["Slab"] / 1024, 1),
        available_mb=round(memory["MemAvailable"] / 1024, 1),
    )


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _cgroups() -> str:
    root = Path("/sys/fs/cgroup")
    if (root / "cgroup.controllers").exists():
        return "v2"
    return "hybrid" if (root / "unified" / "cgroup.procs").exists() else "v1"
