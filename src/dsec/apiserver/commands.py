"""Commands inside a sandbox: run, start, follow, write, signal.

A command belongs to aether, not to a request: requests attach to it by exec id and byte cursor, so a request that is cut,
repeated or answered early never touches it. The answers here are therefore short: after `wait_s` seconds or some MiB the
caller asks again, and no proxy in between sees a long silence.
"""

from __future__ import annotations

import asyncio
import contextlib
import struct
from typing import cast

import msgspec
from starlette.responses import Response
from starlette.websockets import WebSocket, WebSocketDisconnect

from dsec.protocol.errors import ErrorKind, Fault
from dsec.protocol.link import Data, LinkStream
from dsec.protocol.rollouts import STEP_HEADER
from dsec.protocol.signals import signal_number
from dsec.protocol.specs import ExecDone, ExecReply, ProcessInfo

from .bodies import MAX_WAIT_S, Done, ErrorReply, ExecRequest, ResizeRequest, SignalRequest, Started, checked_exec_id
from .exchange import INCARNATION, MAX_JSON, Exchange, encode, error_body
from .feeding import PIECE, Fed, feed, send_ahead, split_stdin, write

MAX_EXEC_BODY = 24 * MAX_JSON
MAX_REPLY = 4 * 1024 * 1024  # bytes of output in one answer; the rest is asked for with the cursor
MIN_WAIT_S = 0.1  # what is there already, or a refusal, must have time to come back from the sandbox
MAX_WRITER = 64
_Ended = cast("type[ExecDone | None]", ExecDone | None)
_EVENT_HEAD = struct.Struct("<BQ")


class _Pid(msgspec.Struct):
    pid: int = 0


async def run(x: Exchange) -> Response:
    """Runs a command, or attaches to the one with this exec_id: `ExecReply`."""
    asked = await x.json(ExecRequest, MAX_EXEC_BODY)
    link = await x.link()
    params = _exec_params(x, asked)
    rest = split_stdin(params)
    await send_ahead(link, params)
    params["cursor"] = asked.cursor
    params["follow"] = True
    stream = await link.open("exec", params)
    if rest:
        feed(link, params, rest, stream)
    reply = await _gather(stream, asked.wait_s)
    return x.reply(reply, incarnation=reply.done.incarnation if reply.done else x.asked_incarnation())


async def start(x: Exchange) -> Response:
    """Starts a detached command and answers with its pid."""
    asked = await x.json(ExecRequest, MAX_EXEC_BODY)
    own = _exec_params(x, asked)
    link, base, incarnation = await x.target()
    params = {**own, **base, "detached": True, "follow": False, "cursor": 0}
    rest = split_stdin(params)
    await send_ahead(link, params)
    pid = (await link.call("exec", params, _Pid)).pid
    if rest:
        feed(link, params, rest)
    return x.reply(Started(str(params["exec_id"]), pid), incarnation=incarnation, status=201)


async def poll(x: Exchange) -> Response:
    """Output from `cursor` on and, when it has ended, the end of a command: `ExecReply`, waiting at most `wait_s`.

    With `output=false` only whether it has ended, at once.
    """
    wait_s = x.number("wait_s", 0, high=int(MAX_WAIT_S)) or 0
    link, params, incarnation = await x.target()
    if not x.flag("output", True):
        done = await link.call("exec.poll", {**params, "exec_id": _exec_id(x)}, _Ended)
        return x.reply(ExecReply(done=done), incarnation=incarnation)
    wake = x.flag("wake", True)
    attach = {**params, "exec_id": _exec_id(x), "cursor": x.number("cursor", 0), "wake": wake}
    reply = await _gather(await link.open("exec.attach", attach), wait_s)
    return x.reply(reply, incarnation=incarnation)


async def wait(x: Exchange) -> Response:
    """The end of a detached command as a step of its rollout: `ExecReply`, with `done` null after `wait_s`: ask again.

    The output comes with the end, stdout before stderr; `cursor` counts the bytes of both.
    """
    cursor, wait_s = x.number("cursor", 0), x.number("wait_s", 0, high=int(MAX_WAIT_S)) or 0
    if x.step is None:
        raise Fault(
            ErrorKind.INVALID, f"header {STEP_HEADER} is missing", hint="without a rollout, GET the command itself"
        )
    link, params, incarnation = await x.target()
    stream = await link.open("exec.wait", {**params, "exec_id": _exec_id(x), "cursor": cursor})
    return x.reply(await _gather(stream, wait_s), incarnation=incarnation)


async def processes(x: Exchange) -> Response:
    link, params, incarnation = await x.target()
    return x.reply(await link.call("exec.list", params, list[ProcessInfo]), incarnation=incarnation)


async def send_signal(x: Exchange) -> Response:
    asked = await x.json(SignalRequest)
    link, params, incarnation = await x.target()
    await link.call("exec.signal", {**params, "exec_id": _exec_id(x), "signal": signal_number(asked.signal)})
    return x.reply(Done(), incarnation=incarnation)


async def resize(x: Exchange) -> Response:
    asked = await x.json(ResizeRequest)
    link, params, incarnation = await x.target()
    await link.call("exec.resize", {**params, "exec_id": _exec_id(x), "cols": asked.cols, "rows": asked.rows})
    return x.reply(Done(), incarnation=incarnation)


async def stdin(x: Exchange) -> Response:
    """Appends the body to the command's stdin; `close=1` then closes it. Answered when the sandbox holds the bytes.

    With `offset` (of this `writer`'s bytes) it may be repeated, and is answered after `wait_s` with what was taken until then.
    As a step of a rollout it has at most 256 KiB, and may be repeated in any case.
    """
    close, offset, writer = x.flag("close"), x.number("offset"), x.query("writer") or ""
    wait_s = None if offset is None else x.number("wait_s", high=int(MAX_WAIT_S))
    if len(writer) > MAX_WRITER:
        raise Fault(ErrorKind.INVALID, f"writer is longer than {MAX_WRITER} characters")
    if x.step is not None:
        return await _stdin_step(x, writer, offset, close=close)
    link, params, incarnation = await x.target()
    params["exec_id"] = _exec_id(x)
    at, pending, whole = offset, bytearray(), True
    told: Fed | None = None
    async for part in x.chunks():
        pending += part
        if whole and len(pending) >= PIECE:
            told = await write(link, params, bytes(pending), offset=at, writer=writer, wait_s=wait_s)
            at = None if at is None else at + len(pending)
            whole = at is None or told.accepted >= at  # else the rest of the body is read and dropped
            pending.clear()
        elif not whole:
            pending.clear()
    if whole and (pending or told is None):
        told = await write(link, params, bytes(pending), offset=at, writer=writer, wait_s=wait_s)
        at = None if at is None else at + len(pending)
        whole = at is None or told.accepted >= at
    if close and whole:
        end = {} if at is None else {"writer": writer, "offset": at}
        await link.call("exec.close_stdin", {**params, **end})
        told = Fed(told.accepted if told else 0, open=False)
    return x.reply(told, incarnation=incarnation)


async def _stdin_step(x: Exchange, writer: str, offset: int | None, *, close: bool) -> Response:
    """The same as a step of a rollout: a piece, or the end. Answered when all of it was taken."""
    data = await x.body(PIECE)
    if data and close:
        raise Fault(ErrorKind.INVALID, "a write to stdin and its close are two steps", hint="close with an empty body")
    link, params, incarnation = await x.target()
    params["exec_id"] = _exec_id(x)
    if offset is not None:
        params |= {"writer": writer, "offset": offset}
    if close:
        await link.call("exec.close_stdin", params)
        return x.reply(Fed(offset or 0, open=False), incarnation=incarnation)
    return x.reply(await link.call("exec.write", {**params, "data": data}, Fed), incarnation=incarnation)


async def follow(x: Exchange, socket: WebSocket) -> None:
    """WebSocket: binary messages of u8 channel, u64 LE offset, data; one text message at the end, `{"exit"}` or `{"error"}`."""
    cursor = x.number("cursor", 0) or 0
    link, params, incarnation = await x.target()
    wake = x.flag("wake", True)
    stream = await link.open("exec.attach", {**params, "exec_id": _exec_id(x), "cursor": cursor, "wake": wake})
    try:
        await socket.accept(headers=[(INCARNATION.encode(), str(incarnation).encode())])
    except BaseException:
        stream.cancel()
        raise
    sending = asyncio.ensure_future(_send_events(x, socket, stream, cursor))
    leaving = asyncio.ensure_future(_left(socket))
    try:
        await asyncio.wait({sending, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if sending.done():
            await sending
    finally:
        sending.cancel()
        leaving.cancel()
        await asyncio.gather(sending, leaving, return_exceptions=True)
        stream.cancel()


async def _send_events(x: Exchange, socket: WebSocket, stream: LinkStream, offset: int) -> None:
    try:
        async for item in stream:
            if isinstance(item, Data):
                await socket.send_bytes(_EVENT_HEAD.pack(item.channel, offset) + item.data)
                offset += len(item.data)
        last = encode({"exit": await stream.result(ExecDone)})
    except Fault as fault:
        last = encode(ErrorReply(error_body(fault.body, x.request_id, x.sandbox)))
    except WebSocketDisconnect:
        return
    with contextlib.suppress(WebSocketDisconnect):  # it left just before the end
        await socket.send_text(last.decode())
        await socket.close()


async def _left(socket: WebSocket) -> None:
    while (await socket.receive())["type"] != "websocket.disconnect":
        pass


async def _gather(stream: LinkStream, wait_s: float) -> ExecReply:
    """Output and end of a command, or what there is of them when the time or the answer's size is up."""
    out: list[bytes] = []
    err: list[bytes] = []
    size = 0
    done: ExecDone | None = None
    over = False

    def time_is_up() -> None:  # said by the timer, since it may come a little before its time
        nonlocal over
        over = True
        stream.wake()

    timer = asyncio.get_running_loop().call_later(max(wait_s, MIN_WAIT_S), time_is_up)
    try:
        while True:
            for item in stream.take():
                if isinstance(item, Data):
                    (err if item.channel == 2 else out).append(item.data)
                    size += len(item.data)
            if size >= MAX_REPLY:
                break
            if stream.ended:
                done = await stream.result(ExecDone)
                break
            if over:
                break
            await stream.change()
    finally:
        timer.cancel()
        stream.cancel()
    return ExecReply(done=done, stdout=b"".join(out), stderr=b"".join(err))


def _exec_params(x: Exchange, asked: ExecRequest) -> dict[str, object]:
    params = {**asked.params(x.step), **x.params()}
    incarnation = x.asked_incarnation()
    if incarnation is not None:
        params["incarnation"] = incarnation
    return params


def _exec_id(x: Exchange) -> str:
    return checked_exec_id(x.path_param("exec_id"))
