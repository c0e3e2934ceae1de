"""Started commands: polled, followed, signalled, killed whole, listed; and deadlines, which leave nothing alive."""

from __future__ import annotations

import asyncio
import stat
import time
from pathlib import Path

import pytest

import dsec
from dsec import Exit, Sandbox, Stderr, Stdout

pytestmark = pytest.mark.e2e
DAEMON = "import os, sys, time\nif os.fork(): os._exit(0)\nos.setsid()\nif os.fork(): os._exit(0)\ntime.sleep(600)"


def alive(mark: str) -> int:
    """Processes of this machine, seen from outside, that have the mark in their command line."""
    count = 0
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            count += mark.encode() in entry.read_bytes()
        except OSError:
            continue
    return count


async def born(mark: str) -> bool:
    """A daemon that is just forking may be missed by a look at all processes: its parent is gone, and it was not yet listed."""
    async with asyncio.timeout(10):
        while not alive(mark):
            await asyncio.sleep(0.01)
    return True


async def gone(mark: str) -> bool:
    async with asyncio.timeout(10):
        while alive(mark):
            await asyncio.sleep(0.01)
    return True


async def test_poll_does_not_wait(sandbox: Sandbox) -> None:
    process = await sandbox.start("read x; echo $x; exit 3", stdin=True)
    started = time.monotonic()
    assert await process.poll() is None and time.monotonic() - started < 5
    await process.write("word\n")
    result = await process.wait()
    assert (result.exit_code, result.text) == (3, "word\n")
    polled = await process.poll()
    assert polled is not None and (polled.exit_code, polled.stdout_bytes, polled.stdout) == (3, 5, b"")


async def test_events_from_any_cursor_with_both_streams(sandbox: Sandbox) -> None:
    process = await sandbox.start("for i in 1 2 3; do echo out$i; sleep 0.02; echo err$i >&2; sleep 0.02; done")
    whole = [event async for event in process.events()]
    assert isinstance(whole[-1], Exit) and whole[-1].result.ok
    order = b"".join(event.data for event in whole if not isinstance(event, Exit))
    assert order == b"out1\nerr1\nout2\nerr2\nout3\nerr3\n"
    position = 0
    for event in whole[:-1]:
        assert isinstance(event, Stdout | Stderr) and event.offset == position
        position += len(event.data)
    for cursor in (1, 5, 12, 30, 99):
        again = [event async for event in process.events(cursor=cursor)]
        assert b"".join(event.data for event in again if not isinstance(event, Exit)) == order[cursor:]


async def test_a_deadline_kills_daemons_too(sandbox: Sandbox) -> None:
    mark = "mark-of-the-deadline"
    result = await sandbox.run_shell(f"python3 -c '{DAEMON}' {mark}; echo before; sleep 600", timeout=1)
    assert (result.timed_out, result.exit_code, result.signal, result.text) == ("deadline", 137, "KILL", "before\n")
    assert await gone(mark)


async def test_a_deadline_kills_what_ignores_signals_or_is_stopped(sandbox: Sandbox) -> None:
    for line in (
        "trap '' TERM INT HUP; while :; do sleep 0.1; done",
        "kill -STOP $$",
        "sleep 600 & kill -STOP $!; wait",
    ):
        result = await sandbox.run_shell(f"echo x; {line}", timeout=0.4)
        assert (result.timed_out, result.exit_code, result.text) == ("deadline", 137, "x\n"), line
    assert (await sandbox.run_shell("pgrep -x sleep | wc -l")).text == "0\n"


async def test_idle_time_out_counts_from_the_last_output(sandbox: Sandbox) -> None:
    result = await sandbox.run_shell("for i in 1 2 3 4; do echo $i; sleep 0.3; done; sleep 60", idle_timeout=1)
    assert result.timed_out == "idle" and result.text == "1\n2\n3\n4\n" and result.duration_s >= 1.8


async def test_kill_takes_the_whole_tree(sandbox: Sandbox) -> None:
    mark = "mark-of-the-tree"
    process = await sandbox.start(f"python3 -c '{DAEMON}' {mark}; echo up; sleep 600")
    assert isinstance(await anext(process.events()), Stdout) and await born(mark)
    await process.kill()
    assert (await process.wait()).signal == "KILL" and await gone(mark)


async def test_a_background_child_goes_on_and_sees_no_broken_pipe(sandbox: Sandbox) -> None:
    child = "for i in 1 2 3 4 5 6; do sleep 0.2; echo still $i || exit 1; done; echo done > /tmp/child"
    started = time.monotonic()
    result = await sandbox.run_shell(f"({child}) & echo main")
    assert result.text == "main\n" and time.monotonic() - started < 5
    async with asyncio.timeout(15):
        while not await sandbox.files.exists("/tmp/child"):
            await asyncio.sleep(0.05)
    assert await sandbox.files.read_text("/tmp/child") == "done\n"


async def test_a_started_command_has_no_deadline_unless_given(sandbox: Sandbox) -> None:
    process = await sandbox.start(["sleep", "60"])
    [info] = [info for info in await sandbox.processes() if info.exec_id == process.exec_id]
    assert info.running and info.detached and info.argv == (b"sleep", b"60") and info.exit_code is None
    bounded = await sandbox.start(["sleep", "60"], timeout=0.2)
    assert (await bounded.wait()).timed_out == "deadline"
    assert await process.poll() is None
    await process.signal("TERM")
    await process.wait()
    [info] = [info for info in await sandbox.processes() if info.exec_id == process.exec_id]
    assert (info.running, info.exit_code, info.signal) == (False, 143, "TERM")


async def test_one_exec_id_is_one_run(sandbox: Sandbox) -> None:
    line = "echo x >> /tmp/runs; echo out; exit 4"
    first = await sandbox.start(line, exec_id="only-once")
    results = await asyncio.gather(*(sandbox.run_shell(line, exec_id="only-once") for _ in range(5)))
    assert {(r.exit_code, r.text) for r in results} == {(4, "out\n")}
    assert (await first.wait()).exit_code == 4
    assert await sandbox.files.read_text("/tmp/runs") == "x\n"
    with pytest.raises(dsec.Conflict, match="only-once"):
        await sandbox.run_shell("echo y >> /tmp/runs", exec_id="only-once")
    for wrong in ("", "a b", "x" * 65, "a/b"):
        if wrong:
            with pytest.raises(dsec.InvalidRequest, match="exec_id"):
                await sandbox.run_shell("true", exec_id=wrong)


async def test_merged_streams_keep_their_order(sandbox: Sandbox) -> None:
    result = await sandbox.run_shell("for i in 1 2 3; do echo o$i; echo e$i >&2; done", merge_stderr=True)
    assert result.text == "o1\ne1\no2\ne2\no3\ne3\n" and result.stderr == b"" and result.stderr_bytes == 0


async def test_spilled_output_of_all_commands_is_bounded(sandbox: Sandbox) -> None:
    """Three commands that may each keep more than all may: what is kept stops at the sandbox's own bound."""
    keep = 256 << 20
    line = "head -c 300M /dev/zero; exec sleep 60"
    started = [await sandbox.start(line, max_output_bytes=keep) for _ in range(3)]
    async with asyncio.timeout(60):
        while sum(info.stdout_bytes for info in await sandbox.processes()) < 3 * (300 << 20):
            await asyncio.sleep(0.05)
    spilled = 0
    pid = await _host_pid(sandbox)
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        try:
            found = fd.stat()
            spilled += found.st_size if stat.S_ISREG(found.st_mode) and found.st_nlink == 0 else 0
        except OSError:
            continue
    assert keep < spilled <= 2 * keep
    for process in started:
        await process.kill()
    for process in started:
        async with asyncio.timeout(20):
            while (result := await process.poll()) is None:
                await asyncio.sleep(0.02)
        assert (result.stdout_bytes, result.stdout_truncated, result.signal) == (300 << 20, True, "KILL"), (
            "however little is kept"
        )


async def _host_pid(sandbox: Sandbox) -> int:
    marker = await sandbox.start(["sleep", "3.14159"])
    async with asyncio.timeout(10):
        while True:
            for entry in Path("/proc").glob("[0-9]*/cmdline"):
                try:
                    if entry.read_bytes() == b"sleep\x003.14159\0":
                        fields = (entry.parent / "stat").read_text().rsplit(")", 1)[1].split()
                        await marker.kill()
                        return int(fields[1])
                except OSError:
                    continue
            await asyncio.sleep(0.01)
