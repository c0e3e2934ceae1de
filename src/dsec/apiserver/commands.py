"""Commands inside a sandbox: run, start, follow, write, signal.

A command belongs to aether, not to a request: requests attach to it by exec id and byte cursor, so a request that is cut,
repeated or answered early never touches it. The answers here are therefore short: after `wait_s` seconds or some MiB the
caller asks again, and no proxy in between sees a long silence.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import struct
from collections.abc import Coroutine

import msgspec
from starlette.responses import Response
from starlette.websockets import WebSocket, WebSocketDisconnect

from dsec.protocol.errors import ErrorKind, Fault
from dsec.protocol.link import Data, LinkStream
from dsec.protocol.specs import ExecDone, ExecReply, ProcessInfo

from .bodies import MAX_WAIT_S, Done, ErrorReply, ExecRequest, SignalRequest, Started, checked_exec_id
from .exchange import INCARNATION, MAX_JSON, Exchange, encode, error_body
from .fleet import EdgeLink

MAX_EXEC_BODY = 24 * MAX_JSON
MAX_REPLY = 4 * 1024 * 1024  # bytes of output in one answer; the rest is asked for with the cursor
MIN_WAIT_S = 0.1  # what is there already, or a refusal, must have time to come back from the sandbox
INLINE_STDIN = 256 * 1024  # more than this goes through exec.write, since a link message takes 1 MiB
_EVENT_HEAD = struct.Struct("<BQ")


class _Pid(msgspec.Struct):
    pid: int = 0


async def run(x: Exchange) -> Response:
    """Runs a command, or attaches to the one with this exec_id: `ExecReply`."""
    asked = await x.json(ExecRequest, MAX_EXEC_BODY)
    link = await x.link()
    params = _exec_params(x, asked)
    rest = _split_stdin(params)
    params["cursor"] = asked.cursor
    params["follow"] = True
    stream = await link.open("exec", params)
    feeding = _feed(params, _send_all(stream, rest)) if rest else None
    reply = await _gather(stream, asked.wait_s, feeding)
    return x.reply(reply, incarnation=reply.done.incarnation if reply.done else x.asked_incarnation())


async def start(x: Exchange) -> Response:
    """Starts a detached command and answers with its pid."""
    asked = await x.json(ExecRequest, MAX_EXEC_BODY)
    own = _exec_params(x, asked)
    link, base, incarnation = await x.target()
    params = {**own, **base, "detached": True, "follow": False, "cursor": 0}
    rest = _split_stdin(params)
    pid = (await link.call("exec", params, _Pid)).pid
    if rest:
        _feed(params, _write_all(link, params, rest))
    return x.reply(Started(str(params["exec_id"]), pid), incarnation=incarnation, status=201)


async def poll(x: Exchange) -> Response:
    """Output from `cursor` on and, when it has ended, the end of a command: `ExecReply`, waiting at most `wait_s`."""
    wait_s = x.number("wait_s", 0, high=int(MAX_WAIT_S)) or 0
    link, params, incarnation = await x.target()
    wake = x.flag("wake", True)
    attach = {**params, "exec_id": _exec_id(x), "cursor": x.number("cursor", 0), "wake": wake}
    reply = await _gather(await link.open("exec.attach", attach), wait_s)
    return x.reply(reply, incarnation=incarnation)


async def processes(x: Exchange) -> Response:
    link, params, incarnation = await x.target()
    return x.reply(await link.call("exec.list", params, list[ProcessInfo]), incarnation=incarnation)


async def send_signal(x: Exchange) -> Response:
    asked = await x.json(SignalRequest)
    link, params, incarnation = await x.target()
    await link.call("exec.signal", {**params, "exec_id": _exec_id(x), "signal": signal_number(asked.signal)})
    return x.reply(Done(), incarnation=incarnation)


async def stdin(x: Exchange) -> Response:
    """Appends the body to the command's stdin; `close=1` then closes it. Answered when the sandbox holds the bytes."""
    close = x.flag("close")
    link, params, incarnation = await x.target()
    params["exec_id"] = _exec_id(x)
    pending = bytearray()
    async for part in x.chunks():
        pending += part
        while len(pending) >= INLINE_STDIN:
            await link.call("exec.write", {**params, "data": bytes(pending[:INLINE_STDIN])})
            del pending[:INLINE_STDIN]
    if pending:
        await link.call("exec.write", {**params, "data": bytes(pending)})
    if close:
        await link.call("exec.close_stdin", params)
    return x.reply(Done(), incarnation=incarnation)


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


async def _gather(stream: LinkStream, wait_s: float, feeding: asyncio.Task[None] | None = None) -> ExecReply:
    """Output and end of a command, or what there is of them when the time or the answer's size is up.

    A stream that carries stdin is never cancelled, since bytes may be under way behind its feeder: it is drained instead.
    """
    out: list[bytes] = []
    err: list[bytes] = []
    size = 0
    done: ExecDone | None = None
    loop = asyncio.get_running_loop()
    deadline = loop.time() + max(wait_s, MIN_WAIT_S)
    timer = loop.call_at(deadline, stream.wake)
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
            if loop.time() >= deadline:
                break
            await stream.change()
    finally:
        timer.cancel()
        if feeding is None:
            stream.cancel()
        elif done is None:
            _in_background(_drain(stream))
    return ExecReply(done=done, stdout=b"".join(out), stderr=b"".join(err))


def _exec_params(x: Exchange, asked: ExecRequest) -> dict[str, object]:
    params = {**asked.params(), **x.params()}
    incarnation = x.asked_incarnation()
    if incarnation is not None:
        params["incarnation"] = incarnation
    return params


def _split_stdin(params: dict[str, object]) -> bytes:
    """Takes from the request what is too much for one message; the pipe is then held open until that was written."""
    data = params["stdin"]
    if not isinstance(data, bytes) or len(data) <= INLINE_STDIN:
        return b""
    params["stdin"] = data[:INLINE_STDIN]
    params["stdin_open"] = True
    return data[INLINE_STDIN:]


_draining: set[asyncio.Task[None]] = set()


def _in_background(work: Coroutine[None, None, None]) -> None:
    task = asyncio.create_task(work)
    _draining.add(task)
    task.add_done_callback(_draining.discard)


async def _drain(stream: LinkStream) -> None:
    """Drops what arrives until the command's end; the cursor finds it again."""
    with contextlib.suppress(Fault):
        await stream.result()


_feeders: dict[tuple[str, str], asyncio.Task[None]] = {}


def _feed(params: dict[str, object], work: Coroutine[None, None, None]) -> asyncio.Task[None]:
    """Gives a command the rest of its stdin beside the request, once: a repeated request finds the feeder at work."""
    key = (str(params["sandbox"]), str(params["exec_id"]))
    task = _feeders.get(key)
    if task is None:
        task = _feeders[key] = asyncio.create_task(work)
        task.add_done_callback(lambda _: _feeders.pop(key, None))
    else:
        work.close()
    return task


async def _send_all(stream: LinkStream, data: bytes) -> None:
    """On the stream of the command itself. Output that nobody reads here any more is dropped: the cursor finds it again."""
    try:
        await stream.send(data)
        await stream.end()
    except Fault:
        return  # the command ended without reading everything, or is gone: its own result says so


async def _write_all(link: EdgeLink, params: dict[str, object], data: bytes) -> None:
    """By separate requests, for a command whose stream has ended."""
    names = ("request_id", "sandbox", "incarnation", "exec_id")
    base = {name: params[name] for name in names if name in params}
    try:
        for start in range(0, len(data), INLINE_STDIN):
            await link.call("exec.write", {**base, "data": data[start : start + INLINE_STDIN]})
        await link.call("exec.close_stdin", base)
    except Fault:
        return


def signal_number(name: str | int) -> int:
    """`TERM`, `SIGTERM` or 15 -> 15. Fault invalid_request for anything else."""
    if isinstance(name, int):
        if 0 < name < signal.NSIG:
            return name
    else:
        upper = name.upper()
        found = getattr(signal, upper if upper.startswith("SIG") else f"SIG{upper}", None)
        if isinstance(found, signal.Signals):
            return int(found)
    raise Fault(
        ErrorKind.INVALID,
        f"signal {str(name)[:40]!r} is unknown",
        hint="use a name such as TERM, or a number from 1 to 64",
    )


def _exec_id(x: Exchange) -> str:
    return checked_exec_id(x.path_param("exec_id"))
