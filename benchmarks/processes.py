"""The platform's processes as the host sees them: memory of its own, and the PID 1 of every sandbox."""

from __future__ import annotations

import os
from pathlib import Path

from dsec.cluster import embedded


def platform_pss_mb(state: str) -> float:
    """Proportional set size of API server, edge, and all their children (launcher, helpers) but the PID 1s of sandboxes."""
    roots = {process.pid for process in embedded.status(state).processes if process.pid is not None}
    if len(roots) != 2:
        raise AssertionError(f"the platform of {state} does not run whole: {roots}")
    return sum(_pss_kb(pid) for pid in _family(roots)) / 1024


def cpu_ms(state: str) -> dict[str, float]:
    """Processor time so far, user and system, of this process (as "sdk"), API server, edge and launcher; ms."""
    pids = {process.role: process.pid for process in embedded.status(state).processes if process.pid is not None}
    launcher = next(
        pid for pid in _family({pids["edge"]}) if b"launcher" in _text(pid, "cmdline").encode().split(b"\0")
    )
    found = {"sdk": os.getpid(), **pids, "launcher": launcher}
    tick = 1000 / os.sysconf("SC_CLK_TCK")
    return {
        role: sum(map(int, _text(pid, "stat").rpartition(")")[2].split()[11:13])) * tick for role, pid in found.items()
    }


def roles(state: str, aether: int) -> dict[str, int]:
    """This process, API server, edge, launcher, and the PID 1 of a sandbox, which is one of `agents`."""
    pids = {process.role: process.pid for process in embedded.status(state).processes if process.pid is not None}
    launcher = next(
        pid for pid in _family({pids["edge"]}) if b"launcher" in _text(pid, "cmdline").encode().split(b"\0")
    )
    return {"sdk": os.getpid(), **pids, "launcher": launcher, "aether": aether}


class ResidentPeak:
    """How far the resident set of a process rises above what it is now: the kernel keeps the mark, no sample misses it."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._before = int(_status(pid)["VmRSS"].split()[0])
        Path(f"/proc/{pid}/clear_refs").write_text("5", encoding="ascii")

    def grown_mb(self) -> float:
        return (int(_status(self._pid)["VmHWM"].split()[0]) - self._before) / 1024


def machine_cpu_ms() -> float:
    """Processor time that the whole machine has spent on anything; ms."""
    user, nice, system, _, _, irq, softirq, *_ = map(int, Path("/proc/stat").read_text().split("\n")[0].split()[1:])
    return (user + nice + system + irq + softirq) * 1000 / os.sysconf("SC_CLK_TCK")


def _family(roots: set[int]) -> set[int]:
    """The processes and their descendants in the host's PID namespace."""
    children: dict[int, list[int]] = {}
    for pid in _pids():
        status = _status(pid)
        if len(status.get("NSpid", "").split()) == 1:
            children.setdefault(int(status["PPid"]), []).append(pid)
    family, left = set(roots), list(roots)
    while left:
        for child in children.get(left.pop(), []):
            if child not in family:
                family.add(child)
                left.append(child)
    return family


def agents(edge: str) -> set[int]:
    """Host pids of processes that are PID 1 of a namespace, in a group of this edge, with an overlay as their root.

    Slots of the pool have no root of their own yet, so they are not counted.
    """
    found: set[int] = set()
    for pid in _pids():
        numbers = _status(pid).get("NSpid", "").split()
        if len(numbers) >= 2 and numbers[-1] == "1" and f"/dsec-{edge}" in _text(pid, "cgroup"):
            root = next((line for line in _text(pid, "mountinfo").splitlines() if line.split()[4] == "/"), "")
            if " - overlay " in root:
                found.add(pid)
    return found


def _pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _status(pid: int) -> dict[str, str]:
    return dict(line.split(":\t", 1) for line in _text(pid, "status").splitlines() if ":\t" in line)


def _text(pid: int, name: str) -> str:
    """Empty when the process has just ended."""
    try:
        return Path(f"/proc/{pid}/{name}").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _pss_kb(pid: int) -> int:
    for line in _text(pid, "smaps_rollup").splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1])
    return 0
