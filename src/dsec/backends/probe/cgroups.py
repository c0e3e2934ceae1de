"""Which cgroup hierarchies there are, and what the unified one can do even without controllers."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dsec.backends.probe import syscalls
from dsec.backends.probe.model import Finding, probe

_NEEDED = ("cpu", "memory", "pids")


def _mounted() -> dict[str, Path]:
    """Mounted hierarchies: controller name -> mount point; the unified one under "unified"."""
    found: dict[str, Path] = {}
    for line in Path("/proc/self/mounts").read_text(encoding="utf-8").splitlines():
        _, where, kind, options, *_ = line.split()
        if kind == "cgroup2":
            found.setdefault("unified", Path(where))
        elif kind == "cgroup":
            for option in options.split(","):
                found.setdefault(option, Path(where))
    return found


def unified_root() -> Path | None:
    return _mounted().get("unified")


@contextmanager
def _child_group(parent: Path) -> Iterator[Path]:
    group = parent / f"dsec-probe-{os.getpid()}"
    group.mkdir()
    try:
        yield group
    finally:
        group.rmdir()


@probe("cgroups", remedy="mount cgroup v2 with the cpu, memory and pids controllers, or the three v1 hierarchies")
def cgroups(_: Path) -> Finding:
    mounted = _mounted()
    unified = mounted.get("unified")
    on_v2 = set((unified / "cgroup.controllers").read_text(encoding="ascii").split()) if unified else set()
    on_v1 = {name for name in _NEEDED if name in mounted}
    layout = "v2" if unified and not on_v1 else ("hybrid" if unified else "v1")
    missing = [name for name in _NEEDED if name not in on_v1 and name not in on_v2]
    where = ", ".join(f"{name} on {'v1' if name in on_v1 else 'v2'}" for name in _NEEDED if name not in missing)
    if missing:
        return Finding(False, f"{layout}: no {', '.join(missing)} controller")
    with _child_group(mounted["memory"] if "memory" in on_v1 else mounted["unified"]):
        return Finding(True, f"{layout}: {where}; child groups can be made")


@probe(
    "cgroup_kill",
    remedy="Linux 5.14 or later with a cgroup v2 mount is needed; without it trees are killed process by process",
)
def cgroup_kill(_: Path) -> Finding:
    root = unified_root()
    if root is None:
        return Finding(False, "no cgroup v2 mount", "mount -t cgroup2 none /sys/fs/cgroup/unified")
    with _child_group(root) as group:
        pid = os.fork()
        if pid == 0:
            signal.pause()
            os._exit(0)
        try:
            (group / "cgroup.procs").write_text(str(pid), encoding="ascii")
            (group / "cgroup.kill").write_text("1", encoding="ascii")
        finally:
            if not (group / "cgroup.kill").exists():
                os.kill(pid, signal.SIGKILL)
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        return Finding(code == -signal.SIGKILL, "one write kills every process of a group")


@probe("clone_into_cgroup", remedy="Linux 5.7 or later with a cgroup v2 mount is needed")
def clone_into_cgroup(_: Path) -> Finding:
    root = unified_root()
    if root is None:
        return Finding(False, "no cgroup v2 mount", "mount -t cgroup2 none /sys/fs/cgroup/unified")
    with _child_group(root) as group:
        descriptor = os.open(group, os.O_PATH | os.O_CLOEXEC)
        try:
            pid = syscalls.clone3(syscalls.CLONE_INTO_CGROUP, cgroup=descriptor)
            if pid == 0:
                os._exit(0 if f"0::/{group.name}" in Path("/proc/self/cgroup").read_text(encoding="ascii") else 1)
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        finally:
            os.close(descriptor)
    return Finding(code == 0, "clone3 starts a process inside a group")


@probe("cgroup_freeze", remedy="Linux 5.2 or later with a cgroup v2 mount is needed")
def cgroup_freeze(_: Path) -> Finding:
    root = unified_root()
    if root is None:
        return Finding(False, "no cgroup v2 mount", "mount -t cgroup2 none /sys/fs/cgroup/unified")
    with _child_group(root) as group:
        (group / "cgroup.freeze").write_text("1", encoding="ascii")
        frozen = "frozen 1" in (group / "cgroup.events").read_text(encoding="ascii")
        (group / "cgroup.freeze").write_text("0", encoding="ascii")
    return Finding(frozen, "groups can be frozen")
