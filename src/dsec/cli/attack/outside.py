"""Attempts that need a second command: does the sandbox still answer, and what is left of it?"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import msgspec

from dsec import DSecError, Sandbox

_FORKS = 4000
_STORM = f"""
import os, sys, time
made = 0
for _ in range({_FORKS}):
    try:
        if os.fork() == 0:
            time.sleep(600)
            os._exit(0)
        made += 1
    except OSError:
        break
print(made, flush=True)
"""
_HOG = "held = []\nwhile True: held.append(b'x' * (8 << 20))"


class Outcome(msgspec.Struct, frozen=True):
    escaped: bool
    detail: str


Function = Callable[[Sandbox], Awaitable[Outcome]]


async def _answers(sandbox: Sandbox) -> bool:
    result = await sandbox.exec(["echo", "still here"], timeout=20)
    return result.stdout == b"still here\n"


async def kill_everything(sandbox: Sandbox) -> Outcome:
    await sandbox.run_shell("kill -9 -1", timeout=20)
    alive = await _answers(sandbox)
    return Outcome(not alive, "the sandbox answers" if alive else "the sandbox is gone")


async def fork_storm(sandbox: Sandbox) -> Outcome:
    """More processes than the limit, all left alive; the next command must still find room."""
    limit = (await sandbox.info()).limits.pids
    result = await sandbox.exec(["python3", "-c", _STORM], timeout=60)
    made = int(result.stdout or b"0")
    if made > limit:
        return Outcome(True, f"{made} processes against a limit of {limit}")
    await sandbox.run_shell("kill -9 -1", timeout=20)
    alive = await _answers(sandbox)
    return Outcome(
        not alive, f"stopped at {made} of {limit}" + ("" if alive else ", but the sandbox no longer answers")
    )


async def memory_hog(sandbox: Sandbox) -> Outcome:
    """Must die, and be seen to have died of memory."""
    before = (await sandbox.info()).usage.oom_kills
    result = await sandbox.exec(["python3", "-c", _HOG], timeout=60)
    usage = (await sandbox.info()).usage
    if result.signal != "KILL" or result.timed_out:
        return Outcome(
            True, f"the hog ended with {result.exit_code} ({result.signal or 'no signal'}), not by the memory limit"
        )
    if usage.oom_kills <= before or result.reason != "oom":
        return Outcome(
            True, f"the hog died, but not by name: reason {result.reason}, {usage.oom_kills - before} kills counted"
        )
    alive = await _answers(sandbox)
    return Outcome(not alive, "killed, counted, and the sandbox answers" if alive else "the sandbox is gone")


async def survive_deadline(sandbox: Sandbox) -> Outcome:
    """A daemonised child of a command must not outlive the command's deadline."""
    await sandbox.run_shell("setsid sh -c 'exec sleep 98765' > /dev/null 2>&1 < /dev/null & sleep 60", timeout=1)
    find = (
        "grep -l 98765 /proc/[0-9]*/cmdline 2>/dev/null | grep -v self | while read f; do tr '\\0' ' ' < $f; echo; done"
    )
    left = (await sandbox.run_shell(find, timeout=20)).stdout.decode(errors="replace")
    survivors = [line for line in left.splitlines() if line.startswith("sleep 98765")]
    return Outcome(bool(survivors), "a child outlived the deadline" if survivors else "the whole tree died")


async def files_follow_link(sandbox: Sandbox) -> Outcome:
    """The files interface is served by PID 1, which may read its own memory map: a link must not lead there."""
    for name in ("maps", "environ", "mem", "root/etc/hostname", "fd/0"):
        await sandbox.run_shell(f"ln -sf /proc/1/{name} /var/tmp/link", timeout=20)
        try:
            data = await sandbox.files.read("/var/tmp/link", length=64)
        except DSecError:
            continue
        if data:
            return Outcome(True, f"read {len(data)} bytes of PID 1's {name} through a link")
    return Outcome(False, "refused")


async def files_follow_dots(sandbox: Sandbox) -> Outcome:
    """Whatever dots and links say, the files interface stays below the sandbox's own root."""
    inside = (await sandbox.run_shell("cat /proc/sys/kernel/hostname; ls -id /", timeout=20)).stdout
    await sandbox.run_shell("ln -sfn ../../../../../../../.. /var/tmp/up", timeout=20)
    path = "/var/tmp/up/../../../../../../../../proc/sys/kernel/hostname"
    try:
        seen = await sandbox.files.read(path)
    except DSecError as error:
        return Outcome(False, f"refused: {error.message}")
    own = inside.splitlines()[0]
    return Outcome(
        seen.strip() != own, "reached only the sandbox's own root" if seen.strip() == own else "left the root"
    )


OUTSIDE: tuple[tuple[str, str, Function], ...] = (
    ("files.link", "read PID 1 through a link and the files interface", files_follow_link),
    ("files.dots", "leave the root through the files interface", files_follow_dots),
    ("limits.deadline", "outlive the deadline as a daemon", survive_deadline),
    ("limits.memory", "use more memory than the limit", memory_hog),
    ("limits.fork_storm", "make more processes than the limit", fork_storm),
    ("limits.kill_all", "kill -9 -1 as root", kill_everything),
)
