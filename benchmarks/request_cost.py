"""What one request costs the SDK and the apiserver in CPU time, over an edge that answers at once.

    python -m benchmarks.request_cost [--rounds 7] [--each 300] [--loop uvloop|asyncio]

Microseconds of CPU time (not of the clock: a busy machine stretches that) a cycle of create, exec and stop, and a stat;
the best of several rounds, one at a time and 32 at once. Run it before and after a change; it promises nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path

import uvloop

from dsec import DSecClient, DSecContainerRunArgs
from dsec.protocol.ids import new_sandbox_id
from dsec.protocol.link import Call, LinkServer
from dsec.protocol.specs import Created, EdgeStatus, ExecDone, FileInfo, FileKind

KEY = "key-of-a-benchmark-0123456789"
AT_ONCE = 32
Work = Callable[[], Awaitable[object]]


async def _create(call: Call) -> object:
    return Created(new_sandbox_id("e"), 1, "e", 1.0)


async def _exec(call: Call) -> object:
    await call.send(b"hello\n", 1)
    return ExecDone(exec_id="x", exit_code=0, stdout_bytes=6, incarnation=1)


async def _stop(call: Call) -> object:
    return {}


async def _stat(call: Call) -> object:
    return FileInfo(path=b"/bin/sh", kind=FileKind.FILE, size=1, mode=0o755, uid=0, gid=0, mtime=1.0)


async def _status(call: Call) -> object:
    return EdgeStatus("e", 1, "0", 0.0, {}, 10**6, 0, 0, 1, 2, 3)


async def _edge(path: str) -> None:
    """The other process: an edge without sandboxes."""
    handlers = {
        "sandbox.create": _create,
        "exec": _exec,
        "sandbox.stop": _stop,
        "fs.stat": _stat,
        "edge.status": _status,
    }
    await LinkServer(handlers).listen_unix(path)
    print("listening", flush=True)
    await asyncio.Event().wait()


def _cpu_us(pid: int) -> float:
    """CPU time of a process's threads, as the scheduler counts it."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1000


async def _round(work: Work, each: int, at_once: int) -> None:
    async def some() -> None:
        for _ in range(each // at_once):
            await work()

    await asyncio.gather(*(some() for _ in range(at_once)))


async def _measure(name: str, work: Work, apiserver: int, rounds: int, each: int) -> None:
    for at_once in (1, AT_ONCE):
        sums = []
        await _round(work, each, at_once)
        for _ in range(rounds):
            gc.collect()
            before = _cpu_us(os.getpid()), _cpu_us(apiserver)
            await _round(work, each, at_once)
            after = _cpu_us(os.getpid()), _cpu_us(apiserver)
            done = each // at_once * at_once
            sums.append([(late - early) / done for late, early in zip(after, before, strict=True)])
        sdk, server = (min(column) for column in zip(*sums, strict=True))
        print(f"{name:6} {at_once:3} at once: sdk {sdk:6.0f} us, apiserver {server:6.0f} us", flush=True)


async def _all(url: str, apiserver: int, arguments: argparse.Namespace) -> None:
    async with DSecClient(url, KEY) as client:

        async def cycle() -> None:
            async with client.run_container(DSecContainerRunArgs("image@1")) as sandbox:
                await sandbox.exec([b"/bin/true"])

        await _measure("cycle", cycle, apiserver, arguments.rounds, arguments.each)
        sandbox = await client.run_container(DSecContainerRunArgs("image@1"))
        await _measure("stat", lambda: sandbox.files.stat("/bin/sh"), apiserver, arguments.rounds, arguments.each)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.request_cost", description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--each", type=int, default=300, help="cycles a round")
    parser.add_argument("--loop", choices=("uvloop", "asyncio"), default="uvloop")
    parser.add_argument("--edge", metavar="PATH", help=argparse.SUPPRESS)
    return parser.parse_args()


def _run(arguments: argparse.Namespace, directory: Path) -> None:
    edge_socket, key = directory / "edge.sock", directory / "api.key"
    key.touch(0o600)
    key.write_text(KEY)
    edge = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.request_cost", "--edge", str(edge_socket)], stdout=subprocess.PIPE
    )
    assert edge.stdout is not None and edge.stdout.readline()
    ready, told = os.pipe()
    with socket.create_server(("127.0.0.1", 0)) as listening:
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        command = ["--fd", str(listening.fileno()), "--edge-socket", str(edge_socket), "--key-file", str(key)]
        apiserver = subprocess.Popen(
            [sys.executable, "-m", "dsec.apiserver", *command, "--ready", str(told)],
            pass_fds=(listening.fileno(), told),
        )
        os.close(told)
    try:
        if os.read(ready, 2) != b"ok":
            raise SystemExit("the apiserver did not start")
        runner = uvloop.run if arguments.loop == "uvloop" else asyncio.run
        runner(_all(url, apiserver.pid, arguments))
    finally:
        for process in (apiserver, edge):
            process.terminate()
            process.wait()


if __name__ == "__main__":
    given = _arguments()
    if given.edge:
        uvloop.run(_edge(given.edge))
    else:
        with tempfile.TemporaryDirectory() as made:
            _run(given, Path(made))
