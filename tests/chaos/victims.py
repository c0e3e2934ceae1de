"""The processes of one platform, found by what they were started with, and ended through pidfds."""

from __future__ import annotations

import os
import select
import signal
import time
from pathlib import Path

PATIENCE_S = 10.0
PROCESSES = ("apiserver", "edge", "launcher", "zygote", "helper", "aether", "supervisor")


def slot_of(socket: Path) -> tuple[int, int, int] | None:
    """Number, pid and start time of the slot whose listening socket has this name too; None when it is nobody's."""
    try:
        inode = socket.stat().st_ino
        names = [entry.name for entry in os.scandir(socket.parent) if entry.inode() == inode]
    except FileNotFoundError:
        return None
    named = next((name for name in names if name.startswith(".s")), None)
    if named is None:
        return None
    number, pid, start = map(int, named.removeprefix(".s").split("."))
    return number, pid, start


class Victims:
    def __init__(self, state: Path, run: Path) -> None:
        self._state = os.fsencode(state)
        self._run = run

    def pids(self, process: str, sandbox: str) -> list[int]:
        """Those of this platform that play this part now; aether is the one of the given sandbox."""
        if process == "aether":
            return [self.aether(sandbox)] if self.aether(sandbox) else []
        if process == "zygote":
            launchers = self._started_with(b"launcher")
            return [pid for pid, _ in _commands() if _parent(pid) in launchers and not _is_in_namespace(pid)]
        if process == "helper":
            edges = self._started_with(b"dsec.edge")
            return [pid for pid, words in _commands() if b"helper" in words[1:2] and _parent(pid) in edges]
        names = {
            "apiserver": b"dsec.apiserver",
            "edge": b"dsec.edge",
            "launcher": b"launcher",
            "supervisor": b"supervise",
        }
        return self._started_with(names[process])

    def aether(self, sandbox: str) -> int | None:
        served = slot_of(self._run / "sb" / f"{sandbox}.sock")
        return served[1] if served is not None and is_alive(*served[1:]) else None

    def _started_with(self, word: bytes) -> list[int]:
        where = (self._state + b"/", self._state + b"\0", os.fsencode(self._run))
        found = []
        for pid, words in _commands():
            line = b"\0".join(words) + b"\0"
            if _plays(words, word) and any(place in line for place in where):
                found.append(pid)
        return found

    def kill(self, process: str, sandbox: str) -> bool:
        """SIGKILL to each, gone when this returns. False: there was none."""
        killed = False
        for pid in self.pids(process, sandbox):
            killed = kill_one(pid) or killed
        return killed

    def kill_next(self, process: str, sandbox: str, patience_s: float) -> bool:
        """The same to one that is still to come."""
        deadline = time.monotonic() + patience_s
        while time.monotonic() < deadline:
            if self.kill(process, sandbox):
                return True
        return False


def _plays(words: list[bytes], word: bytes) -> bool:
    """Whether the program is `dsec-runtime WORD` or `python -m WORD`."""
    if word.startswith(b"dsec."):
        return words[1:3] == [b"-m", word]
    return words[0].endswith(b"dsec-runtime") and words[1:2] == [word]


def kill_one(pid: int) -> bool:
    """SIGKILL, and gone when this returns. False: there was none."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return False
    try:
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        return bool(select.select([pidfd], [], [], PATIENCE_S)[0])
    except ProcessLookupError:
        return False
    finally:
        os.close(pidfd)


def _commands() -> list[tuple[int, list[bytes]]]:
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                line = Path(f"/proc/{entry}/cmdline").read_bytes()
            except OSError:
                continue
            if line:
                found.append((int(entry), line.rstrip(b"\0").split(b"\0")))
    return found


def _stat(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _is_in_namespace(pid: int) -> bool:
    """Whether it has a number in another pid namespace too: a PID 1 has, the zygote has not."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return True
    return len(status.partition("NSpid:")[2].partition("\n")[0].split()) > 1


def _parent(pid: int) -> int:
    stat = _stat(pid)
    return int(stat[1]) if stat else 0


def is_alive(pid: int, start: int) -> bool:
    """Whether the process that started then runs."""
    stat = _stat(pid)
    return bool(stat) and stat[0] not in "ZX" and int(stat[19]) == start
