"""Running a command to its end over connections that may break: one exec id, a cursor, and asking again."""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import AsyncIterable, Mapping, Sequence

import msgspec

from dsec.protocol.ids import new_exec_id
from dsec.protocol.specs import ExecLimits, ExecReply, ExecSpec, PtySize

from .errors import Conflict, InvalidRequest, NotFound
from .results import ExecResult, exec_result
from .stdin import Feeder, feed
from .transport import Target, Transport, encode

Stdin = bytes | bytearray | memoryview | str | AsyncIterable[bytes] | None

INLINE = 256 * 1024  # bytes of stdin that go with the command itself
_NOT_YET_S = 0.02
WAIT_S = 25  # one answer; shorter than what proxies between us and the service usually allow


class Started(msgspec.Struct, frozen=True):
    exec_id: str
    pid: int = 0


class ExecBody(ExecSpec, frozen=True, kw_only=True, omit_defaults=True):
    """`ExecSpec` as it is sent: only what differs from the defaults."""

    wait_s: float = 25
    cursor: int = 0


def seconds(name: str, value: float | None, *, low: float) -> None:
    """InvalidRequest for what is no span of time. JSON has no NaN: it would arrive as null, which means "never"."""
    if value is not None and not low <= value < math.inf:
        raise InvalidRequest(f"{name}={value} is not a number of seconds", hint="None means no limit")


def cells(size: PtySize) -> PtySize:
    """InvalidRequest for what is no size of a terminal."""
    for name, value in (("cols", size.cols), ("rows", size.rows)):
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= 4096:
            raise InvalidRequest(
                f"{name}={value!r} is not between 1 and 4096", hint="the size of a terminal, in characters"
            )
    return size


def source_of(stdin: Stdin) -> bytes | AsyncIterable[bytes] | None:
    if isinstance(stdin, str):
        return stdin.encode()
    return bytes(stdin) if isinstance(stdin, bytearray | memoryview) else stdin


def text_or_bytes(text: str | bytes) -> bytes:
    return os.fsencode(text)


def body_of(
    command: bytes | Sequence[str | bytes],
    *,
    cwd: str | bytes | None,
    env: Mapping[str, str] | None,
    user: str | None,
    stdin: Stdin,
    timeout: float | None,
    idle_timeout: float | None,
    max_output_bytes: int,
    merge_stderr: bool,
    exec_id: str | None,
    limits: ExecLimits | None,
    stdin_open: bool = False,
    session: str | None = None,
    pty: PtySize | None = None,
) -> ExecBody:
    """The request for a shell line (bytes) or an argv. Of a long stdin it carries the beginning."""
    seconds("timeout", timeout, low=0)
    seconds("idle_timeout", idle_timeout, low=0)
    if not isinstance(command, bytes) and (isinstance(command, str) or not command):
        raise InvalidRequest(f"argv is {command!r}, not a list of a program and its arguments")
    if pty is not None:
        cells(pty)
    source = source_of(stdin)
    inline = source[:INLINE] if isinstance(source, bytes) else None
    return ExecBody(
        exec_id=exec_id or new_exec_id(),
        line=command if isinstance(command, bytes) else None,
        argv=() if isinstance(command, bytes) else tuple(os.fsencode(word) for word in command),
        cwd=None if cwd is None else os.fsencode(cwd),
        env=dict(env or {}),
        user=user,
        stdin=inline,
        stdin_open=stdin_open or inline != source,
        timeout=timeout,
        idle_timeout=idle_timeout,
        max_output_bytes=max_output_bytes,
        merge_stderr=merge_stderr,
        limits=limits,
        session=session,
        pty=pty,
        wait_s=WAIT_S,
    )


async def run(transport: Transport, target: Target, body: ExecBody, stdin: Stdin = None) -> ExecResult:
    """Sends the command once, then asks for the rest of it until it has ended. No time limit of ours."""
    if target.step is not None:
        return await _run_step(transport, target, body, stdin)
    if body.stdin_open:
        return await _run_and_feed(transport, target, body, stdin)
    path = f"/v1/sandboxes/{target.sandbox_id}/exec"
    reply = await transport.call("POST", path, ExecReply, body=encode(body), target=target, wait=WAIT_S)
    if reply.done is not None:
        return exec_result(reply.done, reply.stdout, reply.stderr)
    return await rest(transport, target, body.exec_id, [reply.stdout], [reply.stderr])


async def _run_and_feed(transport: Transport, target: Target, body: ExecBody, stdin: Stdin) -> ExecResult:
    """For a long stdin: the command is started, then fed and followed side by side."""
    source = source_of(stdin)
    assert source is not None
    path = f"/v1/sandboxes/{target.sandbox_id}/processes"
    await transport.call("POST", path, Started, body=encode(body), target=target)
    inline = len(body.stdin or b"")
    feeder = Feeder(transport, target, body.exec_id, "", inline)
    feeding = asyncio.ensure_future(feed(feeder, source[inline:] if isinstance(source, bytes) else source))
    following = asyncio.ensure_future(rest(transport, target, body.exec_id, [], []))
    try:
        await asyncio.wait({feeding, following}, return_when=asyncio.FIRST_COMPLETED)
        if not following.done():
            await feeding
        return await following
    finally:
        for task in (feeding, following):
            task.cancel()
        await asyncio.gather(feeding, following, return_exceptions=True)


async def _run_step(transport: Transport, target: Target, body: ExecBody, stdin: Stdin) -> ExecResult:
    """A step of a rollout is asked for again until it is done: the service runs it once. What is long of a stdin goes beside."""
    source = source_of(stdin)
    if not body.stdin_open or not isinstance(source, bytes):
        return await _ask(transport, target, body)
    inline = len(body.stdin or b"")
    feeder = Feeder(transport, target._replace(step=None), body.exec_id, "", inline)
    asking = asyncio.ensure_future(_ask(transport, target, body))
    feeding = asyncio.ensure_future(_feed_when_there(feeder, source[inline:], asking))
    try:
        await asyncio.wait({feeding, asking}, return_when=asyncio.FIRST_COMPLETED)
        if not asking.done():
            await feeding
        return await asking
    finally:
        feeding.cancel()
        asking.cancel()
        await asyncio.gather(feeding, asking, return_exceptions=True)


async def _feed_when_there(feeder: Feeder, data: bytes, asking: asyncio.Future[ExecResult]) -> None:
    """As `feed`; the command may not have begun yet."""
    while True:
        try:
            await feeder.write(data)
            return await feeder.close()
        except NotFound:
            if asking.done():
                return None
            await asyncio.sleep(_NOT_YET_S)
        except Conflict:  # it left without reading everything: its result tells
            return None


async def _ask(transport: Transport, target: Target, body: ExecBody) -> ExecResult:
    path = f"/v1/sandboxes/{target.sandbox_id}/exec"
    out: list[bytes] = []
    err: list[bytes] = []
    while True:
        cursor = sum(map(len, out)) + sum(map(len, err))
        asked = msgspec.structs.replace(body, cursor=cursor) if cursor else body
        reply = await transport.call("POST", path, ExecReply, body=encode(asked), target=target, wait=WAIT_S)
        out.append(reply.stdout)
        err.append(reply.stderr)
        if reply.done is not None:
            return exec_result(reply.done, b"".join(out), b"".join(err))


async def rest(
    transport: Transport, target: Target, exec_id: str, out: list[bytes], err: list[bytes], *, wake: bool = False
) -> ExecResult:
    """Attaches behind what is there already. Attaching never starts anything, so this is safe however often it is repeated.

    wake: the first request resumes a paused sandbox. Going on to wait does not: who paused it meant us, too.
    """
    path = f"/v1/sandboxes/{target.sandbox_id}/processes/{exec_id}"
    cursor = sum(map(len, out)) + sum(map(len, err))
    while True:
        query = {"cursor": str(cursor), "wait_s": str(WAIT_S), "wake": "1" if wake else "0"}
        wake = False
        reply = await transport.call("GET", path, ExecReply, query=query, target=target, wait=WAIT_S)
        out.append(reply.stdout)
        err.append(reply.stderr)
        cursor += len(reply.stdout) + len(reply.stderr)
        if reply.done is not None:
            return exec_result(reply.done, b"".join(out), b"".join(err))
