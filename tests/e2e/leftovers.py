"""Everything on this machine that could be a leftover of ours, as sets that can be compared."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

_CGROUPS = Path("/sys/fs/cgroup")


class Traces(msgspec.Struct, frozen=True):
    processes: frozenset[str] = frozenset()
    mounts: frozenset[str] = frozenset()
    cgroups: frozenset[str] = frozenset()
    loops: frozenset[str] = frozenset()
    directories: frozenset[str] = frozenset()

    def minus(self, before: Traces) -> Traces:
        return Traces(**{name: getattr(self, name) - getattr(before, name) for name in self.__struct_fields__})


def traces() -> Traces:
    return Traces(
        processes=frozenset(_processes()),
        mounts=frozenset(Path("/proc/self/mounts").read_text().splitlines()),
        cgroups=frozenset(_cgroups()),
        loops=frozenset(_loops()),
        directories=frozenset(str(p) for p in Path("/var/tmp").glob("dsec-*")),
    )


def _processes() -> list[str]:
    """Ours by what they execute; every namespace lives only as long as a process or descriptor of these."""
    found = []
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            line = Path(f"/proc/{entry}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if "dsec-runtime" in line or "dsec.edge" in line or "dsec.apiserver" in line or line.startswith("aether"):
            found.append(f"{entry} {line}")
    return found


def _cgroups() -> list[str]:
    found = []
    for hierarchy in [_CGROUPS, *_CGROUPS.iterdir()]:
        if hierarchy.is_dir():
            found += [str(p) for p in hierarchy.glob("dsec-*") if p.is_dir()]
    return found


def _loops() -> list[str]:
    found = []
    for device in Path("/sys/block").glob("loop*/loop/backing_file"):
        try:
            found.append(f"{device.parts[3]} {device.read_text().strip()}")
        except OSError:
            continue
    return found
