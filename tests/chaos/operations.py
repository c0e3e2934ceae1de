"""One operation each as a client would do it, and how its outcome is judged: exactly once, whole, and with the right code.

A client may repeat what failed with an error that says so (`retryable`), as often as it takes within a deadline. The death of
the sandbox itself (`SandboxUnavailable`) is an outcome with a name, never a loss.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable
from typing import NamedTuple, TypeVar

import msgspec

import dsec
from dsec import DSecClient, DSecContainerRunArgs, DSecError, Sandbox, SandboxUnavailable, State

T = TypeVar("T")
DEADLINE_S = 40.0
LINES = 200_000
STEPS = {
    "create": ("create.mount", "create.launch", "create.journal"),
    "exec": ("step.intent", "step.run", "step.outcome"),
    "stream": ("exec.run",),
    "write": ("write.file",),
    "pause": ("pause.freeze", "pause.journal"),
    "resume": ("resume.thaw", "resume.journal"),
    "remove": ("remove.journal", "remove.teardown", "remove.ended"),
}


class Verdict(NamedTuple):
    """What went wrong: words for each, none when all is well. died: the sandbox ended by name."""

    lost: str = ""
    doubled: str = ""
    wrong_code: str = ""
    died: bool = False


class Point(NamedTuple):
    number: int
    client: DSecClient
    args: DSecContainerRunArgs
    sandbox: Sandbox


async def again(work: Callable[[], Awaitable[T]]) -> T:
    """As a client does it: what may be repeated is."""
    async with asyncio.timeout(DEADLINE_S):
        while True:
            try:
                return await work()
            except DSecError as error:
                if not error.retryable or isinstance(error, SandboxUnavailable):
                    raise
            await asyncio.sleep(0.1)


async def create(point: Point) -> Verdict:
    name = str(point.number)
    args = msgspec.structs.replace(point.args, idempotency_key=f"chaos-{name}", labels={"chaos": name})
    made = await again(lambda: point.client.run(args))
    found = [info async for info in point.client.list(labels={"chaos": name}) if info.state is State.RUNNING]
    try:
        text = (await again(lambda: made.run_shell("echo here"))).text
    except SandboxUnavailable:
        return Verdict(died=True)
    finally:
        await again(made.stop)
    return Verdict(
        lost="" if found and text == "here\n" else f"create: {len(found)} sandboxes, said {text!r}",
        doubled=f"create: {len(found)} sandboxes" if len(found) > 1 else "",
    )


async def exec(point: Point) -> Verdict:
    """A command as a step of a rollout, which a client that lost its connection opens again."""
    name, mark = f"chaos-{point.number}", "/var/once"

    async def asked() -> tuple[int, int]:
        async with point.client.rollout(name, point.args) as rollout:
            code = (await rollout.run_shell(f"echo x >> {mark}; sleep 0.05; exit 37")).exit_code
            return code, len((await rollout.files.read(mark)).splitlines())

    try:
        code, count = await again(asked)
    except SandboxUnavailable:
        return Verdict(died=True)
    return Verdict(
        lost="" if count else "exec: it never ran",
        doubled=f"exec: it ran {count} times" if count > 1 else "",
        wrong_code="" if code == 37 else f"exec: {code} instead of 37",
    )


async def stream(point: Point) -> Verdict:
    wanted = hashlib.blake2b(b"".join(b"%d\n" % n for n in range(1, LINES + 1))).digest()
    try:
        process = await again(lambda: point.sandbox.start(f"seq 1 {LINES}; exit 5"))
        seen, code, offset = hashlib.blake2b(), -1, 0
        async with asyncio.timeout(DEADLINE_S):
            async for event in process.events():
                if isinstance(event, dsec.Exit):
                    code = event.result.exit_code
                    continue
                if event.offset != offset:
                    return Verdict(lost=f"stream: at byte {event.offset} instead of {offset}")
                seen.update(event.data)
                offset += len(event.data)
    except SandboxUnavailable:
        return Verdict(died=True)
    return Verdict(
        lost="" if seen.digest() == wanted else f"stream: other bytes ({offset} of them)",
        wrong_code="" if code == 5 else f"stream: {code} instead of 5",
    )


async def write(point: Point) -> Verdict:
    path, old, new = "/var/whole", b"o" * 300_000, b"%d\n" % point.number * 60_000
    try:
        await again(lambda: point.sandbox.files.write(path, old))
        await again(lambda: point.sandbox.files.write(path, new))
        found = await again(lambda: point.sandbox.files.read(path))
        beside = await again(lambda: point.sandbox.run_shell("ls -A /var | grep -c whole"))
    except SandboxUnavailable:
        return Verdict(died=True)
    return Verdict(
        lost="" if found == new else f"write: {len(found)} bytes of another content",
        doubled="" if beside.text.strip() == "1" else f"write: {beside.text.strip()} files beside it",
    )


async def pause(point: Point) -> Verdict:
    try:
        process = await again(lambda: point.sandbox.start("read line; exit 9", stdin=True))
        await again(point.sandbox.pause)
        state = (await again(point.sandbox.info)).state
        await again(lambda: process.write(b"on\n"))
        result = await again(process.wait)
    except SandboxUnavailable:
        return Verdict(died=True)
    return Verdict(
        lost="" if state is State.PAUSED else f"pause: {state.value} after it",
        wrong_code="" if result.exit_code == 9 else f"pause: {result.exit_code} instead of 9",
    )


async def resume(point: Point) -> Verdict:
    try:
        await again(point.sandbox.pause)
        await again(point.sandbox.resume)
        state = (await again(point.sandbox.info)).state
        result = await again(lambda: point.sandbox.run_shell("exit 11"))
    except SandboxUnavailable:
        return Verdict(died=True)
    return Verdict(
        lost="" if state is State.RUNNING else f"resume: {state.value} after it",
        wrong_code="" if result.exit_code == 11 else f"resume: {result.exit_code} instead of 11",
    )


async def remove(point: Point) -> Verdict:
    await again(point.sandbox.stop)
    info = await again(point.sandbox.info)
    return Verdict(lost="" if info.state is State.STOPPED else f"remove: {info.state.value} after it")


OPERATIONS: dict[str, Callable[[Point], Awaitable[Verdict]]] = {
    "create": create, "exec": exec, "stream": stream, "write": write, "pause": pause, "resume": resume, "remove": remove,
}  # fmt: skip
