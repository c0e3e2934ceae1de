"""The supervisor outlives what happens around it: it is the one that starts again what died."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dsec.backends.runtime import runtime_path

DEADLINE = 20.0


@contextmanager
def supervised(place: Path, script: str, log: str, ready: int = -1) -> Iterator[None]:
    """One role, a shell script, with its supervisor's own log somewhere."""
    for name in ("pids", "logs"):
        (place / name).mkdir(exist_ok=True)
    command = [runtime_path(), "supervise", "--pids", place / "pids", "--logs", place / "logs", "--ready", str(ready),
               "--role", "script", "/bin/sh", "-c", script]  # fmt: skip
    keep = (ready,) if ready >= 0 else ()
    with open(log, "wb") as stderr, subprocess.Popen(command, stderr=stderr, pass_fds=keep) as process:
        try:
            yield
            assert process.poll() is None, "the supervisor died"
        finally:
            process.terminate()
            process.wait(DEADLINE)


def starts(place: Path, number: int) -> int:
    """So many starts, or fewer when they do not come in time."""
    deadline = time.monotonic() + DEADLINE
    file = place / "starts"
    while not file.exists() or len(file.read_bytes()) < number:
        if time.monotonic() > deadline:
            break
        os.sched_yield()
    return len(file.read_bytes())


def test_a_log_that_cannot_be_written_ends_no_supervisor(tmp_path: Path) -> None:
    with supervised(tmp_path, f"printf x >>{tmp_path}/starts; exit 1", "/dev/full"):
        assert starts(tmp_path, 3) >= 3


def test_what_a_dead_process_leaves_running_holds_up_no_restart(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    with supervised(tmp_path, f"printf x >>{tmp_path}/starts; cat {gate} & exit 1", "/dev/null"):
        assert starts(tmp_path, 3) >= 3
    ends = os.open(gate, os.O_RDWR)
    gate.unlink()  # one that has still to open it finds nothing,
    os.close(ends)  # and those that wait for it end


def test_one_that_is_dead_but_not_reaped_is_not_taken_over(tmp_path: Path) -> None:
    """Else the platform would be called ready before anybody serves."""
    dead = subprocess.Popen(["true"])
    os.waitid(os.P_PID, dead.pid, os.WEXITED | os.WNOWAIT)
    start = int(Path(f"/proc/{dead.pid}/stat").read_text().rpartition(")")[2].split()[19])
    (tmp_path / "pids").mkdir()
    (tmp_path / "pids" / "script").write_text(f'{{"pid":{dead.pid},"start":{start}}}')
    ours, theirs = os.pipe()
    script = f"printf x >>{tmp_path}/starts; printf ok >/proc/self/fd/$1; exec sleep 1000"
    with supervised(tmp_path, script, "/dev/null", ready=theirs):
        os.close(theirs)
        assert os.read(ours, 16)
        assert (tmp_path / "starts").read_bytes() == b"x"
    os.close(ours)
    dead.wait()
