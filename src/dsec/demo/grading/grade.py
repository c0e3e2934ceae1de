#!/usr/bin/python3 -IS
"""grade: puts the hidden tests in place, runs them without privilege, prints what each did as one JSON object.

Runs as root in a fresh sandbox. The code under test runs in a child with no right to change anything but /tmp and files
of its own; its output and its results come over two pipes, so nothing it prints can be taken for a result.
docs/guide/demo.md says what this does not defend yet: the code under test shares a process with the plugin that reports.
"""

import json
import os
import selectors
import shutil
import signal
import subprocess
import sys
import time
from typing import TypedDict


class Task(TypedDict):
    """`/grading/task.json`; paths are relative to the workspace."""

    test_paths: list[str]
    pythonpath: str
    test_command: list[str]
    expected: list[str]
    timeout: float


NOBODY = 65534
MAX_RESULTS = 8 << 20
BUFFER = 256 << 10
TAIL = 6000
DRAIN_S = 2.0


def place_tests(task: Task) -> None:
    for path in task["test_paths"]:
        old, new = f"/workspace/{path}", f"/grading/tests/{path}"
        if os.path.isdir(old):
            shutil.rmtree(old)
        elif os.path.lexists(old):
            os.unlink(old)
        if os.path.isdir(new):
            shutil.copytree(new, old, symlinks=True)
        elif os.path.exists(new):
            os.makedirs(os.path.dirname(old), exist_ok=True)
            shutil.copy2(new, old)
    os.chmod("/workspace", 0o1777)  # tests may leave files where they run, but move or remove none that is here


def start(task: Task, results: int) -> subprocess.Popen[bytes]:
    home = "/tmp/grading-home"
    os.mkdir(home, 0o700)
    os.chown(home, NOBODY, NOBODY)
    env = {
        "PATH": "/opt/venv/bin:/usr/local/bin:/usr/bin:/bin",
        "HOME": home,
        "PYTHONPATH": f"/grading/lib:{os.path.normpath('/workspace/' + task['pythonpath'])}",
        "PYTHONHASHSEED": "0",
        "PYTHONDONTWRITEBYTECODE": "1",
        "LANG": "C.UTF-8",
        "TZ": "UTC",
        "DSEC_RESULTS_FD": str(results),
    }
    first, *rest = task["test_command"]
    program = "/opt/venv/bin/python" if first == "python" else first
    return subprocess.Popen(
        [program, *rest, "-p", "dsec_results"],
        cwd="/workspace",
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        pass_fds=(results,),
        user=NOBODY,
        group=NOBODY,
        extra_groups=[],
        start_new_session=True,
    )


def watch(child: subprocess.Popen[bytes], results: int, deadline: float) -> tuple[bytearray, bytearray, bool]:
    """Output, result lines and whether the deadline was met: both pipes are read until the child has ended."""
    assert child.stdout is not None
    output, lines = bytearray(), bytearray()
    chosen = selectors.DefaultSelector()
    ended = os.pidfd_open(child.pid)
    for descriptor in (results, child.stdout.fileno()):
        os.set_blocking(descriptor, False)
        chosen.register(descriptor, selectors.EVENT_READ, lines if descriptor == results else output)
    chosen.register(ended, selectors.EVENT_READ, None)
    over = False
    while True:
        left = deadline - time.monotonic()
        ready = chosen.select(0 if over else max(left, 0))
        progress = False
        for key, _ in ready:
            if key.data is None:
                if not over:  # what is in the pipes is still read, but a process left behind cannot keep us here
                    over, deadline = True, min(deadline, time.monotonic() + DRAIN_S)
                continue
            chunk = read_some(key.fd)
            if not chunk:
                chosen.unregister(key.fd)
            progress = progress or bool(chunk)
            key.data.extend(chunk)
            if key.data is output:
                del output[:-BUFFER]
            elif len(lines) > MAX_RESULTS:
                return output, lines, False
        if over and (not progress or left <= 0):
            return output, lines, False
        if not over and left <= 0:
            return output, lines, True


def read_some(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 65536)
    except BlockingIOError:
        return b""


def end_all() -> None:
    """Nothing of the code under test outlives the run."""
    for name in os.listdir("/proc"):
        try:
            if name.isdigit() and os.stat(f"/proc/{name}").st_uid == NOBODY:
                os.kill(int(name), signal.SIGKILL)
        except OSError:
            continue


def parse(lines: bytes) -> tuple[dict[str, str], list[str], int]:
    """Reported outcomes by id, and the ids that were reported more than once: an honest run reports each once."""
    outcomes: dict[str, str] = {}
    repeated: list[str] = []
    malformed = 0
    for line in lines.splitlines():
        try:
            entry = json.loads(line)
            name, outcome = entry["id"], entry["outcome"]
        except (ValueError, KeyError, TypeError):
            malformed += 1
            continue
        if not (isinstance(name, str) and isinstance(outcome, str)):
            malformed += 1
        elif name in outcomes:
            repeated.append(name)
        else:
            outcomes[name] = outcome
    return outcomes, repeated, malformed


def shown(output: str) -> str:
    """The end of what the run printed, without the lines of tests that passed."""
    return "\n".join(line for line in output.splitlines() if not line.startswith("PASSED "))[-TAIL:]


def main() -> None:
    with open("/grading/task.json", encoding="utf-8") as file:
        task: Task = json.load(file)
    place_tests(task)
    reader, writer = os.pipe()
    began = time.monotonic()
    child = start(task, writer)
    os.close(writer)
    output, lines, timed_out = watch(child, reader, began + task["timeout"])
    seconds = time.monotonic() - began
    if timed_out:
        os.killpg(child.pid, signal.SIGKILL)
    status = child.wait()
    end_all()
    outcomes, repeated, malformed = parse(bytes(lines))
    answer = {
        "outcomes": outcomes,
        "repeated": repeated,
        "malformed": malformed,
        "status": status,
        "timed_out": timed_out,
        "seconds": seconds,
        "output": shown(output.decode(errors="replace")),
    }
    json.dump(answer, sys.stdout)


main()
