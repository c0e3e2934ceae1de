"""`dsec bench adopt`: the edge is killed (SIGKILL) with 500 live sandboxes and 50 running commands, and nothing is lost.

The clock runs from the kill until the edge that the supervisor starts lists every sandbox as running and a command that is
sent then has its result. Lost is a sandbox that does not run afterwards, or does not answer a command, and a command whose
output or exit code is not what it would have been.
"""

from __future__ import annotations

import asyncio
import os
import select
import signal
import time
from pathlib import Path

from benchmarks import machine
from benchmarks.report import Report, result, show
from benchmarks.stage import Stage, run, stage
from dsec import DSecError, Process, Sandbox, State
from dsec.cluster import embedded

COUNT = 500
COMMANDS = 50
_AT_ONCE = 32
_LINES = 40
_LINE = f"for i in $(seq 1 {_LINES}); do echo line $i; sleep 0.1; done; exit 42"
_OUTPUT = b"".join(b"line %d\n" % number for number in range(1, _LINES + 1))


def main(*, count: int | None, against: tuple[str, ...], json: bool) -> bool:
    return show(run(_measure(count or COUNT)), json_output=json)


async def _measure(count: int) -> Report:
    described = machine.describe()
    async with stage(max_sandboxes=count + 8) as place:
        sandboxes = await _sandboxes(place, count)
        processes = [await sandbox.start(_LINE) for sandbox in sandboxes[: min(COMMANDS, count)]]
        adopt_s = await _restart(place, sandboxes)
        ends = await asyncio.gather(*(_intact(process) for process in processes))
        lost = ends.count(False) + await _silent(sandboxes)
    notes = (
        f"{count} sandboxes, {len(processes)} running commands of {_LINES / 10:g} s each",
        "the start of the edge's process, half a second and more, is part of it",
    )
    return Report("adopt", described, (result("adopt_s", adopt_s, "s"), result("lost", lost, "")), notes)


async def _sandboxes(place: Stage, count: int) -> list[Sandbox]:
    """Half of them have run a command, and so have all their control groups; the others have not."""
    turns = asyncio.Semaphore(_AT_ONCE)

    async def one(number: int) -> Sandbox:
        async with turns:
            sandbox = await place.client.run_container(place.environments.next().args())
            if number % 2:
                await sandbox.exec(["true"])
            return sandbox

    return await asyncio.gather(*(one(number) for number in range(count)))


async def _restart(place: Stage, sandboxes: list[Sandbox]) -> float:
    """Seconds from the end of one edge to the next one's full service."""
    wanted = {sandbox.id for sandbox in sandboxes}
    _kill(Path(place.endpoint.state))
    began = time.perf_counter()
    while True:
        try:
            found = {info.id async for info in place.client.list(states=[State.RUNNING])}
            if wanted <= found:
                await sandboxes[-1].exec(["true"])
                return time.perf_counter() - began
        except DSecError as error:
            if not error.retryable:
                raise
        if time.perf_counter() - began > 60:
            return time.perf_counter() - began  # what is missing counts as lost
        await asyncio.sleep(0.01)


def _kill(state: Path) -> None:
    [pid] = [process.pid for process in embedded.status(state).processes if process.role == "edge"]
    if pid is None:
        raise AssertionError("there is no edge to kill")
    pidfd = os.pidfd_open(pid)
    try:
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        select.select([pidfd], [], [])
    finally:
        os.close(pidfd)


async def _intact(process: Process) -> bool:
    try:
        ended = await process.wait()
    except DSecError:
        return False
    return (ended.exit_code, ended.stdout) == (42, _OUTPUT)


async def _silent(sandboxes: list[Sandbox]) -> int:
    """How many do not answer a command."""
    turns = asyncio.Semaphore(_AT_ONCE)

    async def answers(sandbox: Sandbox) -> bool:
        async with turns:
            try:
                return (await sandbox.exec(["true"])).exit_code == 0
            except DSecError:
                return False

    return (await asyncio.gather(*map(answers, sandboxes))).count(False)
