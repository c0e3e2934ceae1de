"""A started command: follow it, feed it, signal it, wait for it."""

from __future__ import annotations

import asyncio
import secrets
import struct
import time
from collections.abc import AsyncIterator

import aiohttp
import msgspec

from dsec.protocol.errors import ErrorBody
from dsec.protocol.specs import ExecDone, ExecReply, PtySize

from .commands import cells, rest
from .errors import ConnectionLost, from_body
from .results import Event, ExecResult, Exit, Stderr, Stdout, exec_result
from .stdin import Feeder
from .transport import Target, Transport, cut, decode, encode

_HEAD = struct.Struct("<BQ")
_RETRY_S = 0.2
_REPEATABLE = ("KILL", "SIGKILL", "9")


class _Last(msgspec.Struct):
    """The text message at the end of a stream."""

    exit: ExecDone | None = None
    error: ErrorBody | None = None


class Process:
    """A command that runs on its own. It outlives this object, the connection and the program."""

    def __init__(self, transport: Transport, target: Target, exec_id: str, pid: int) -> None:
        self.exec_id = exec_id
        self.pid = pid
        self._transport = transport
        self._target = target
        self._path = f"/v1/sandboxes/{target.sandbox_id}/processes/{exec_id}"
        self._stdin = Feeder(transport, target, exec_id, secrets.token_hex(8))

    def __repr__(self) -> str:
        return f"Process({self.exec_id!r})"

    async def events(self, *, cursor: int = 0) -> AsyncIterator[Event]:
        """Stdout and Stderr as they come, then Exit. cursor counts the bytes of both streams already seen.

        A lost connection is made anew behind the last byte; ConnectionLost after `request_timeout` without contact.
        """
        deadline = time.monotonic() + self._transport.request_timeout
        wake = True
        while True:
            try:
                query = {"cursor": str(cursor), "wake": "1" if wake else "0"}
                wake = False  # going on to wait resumes no paused sandbox
                async for event in self._attached(query):
                    deadline = time.monotonic() + self._transport.request_timeout
                    yield event
                    if isinstance(event, Exit):
                        return
                    cursor = event.offset + len(event.data)
                deadline = time.monotonic() + self._transport.request_timeout  # it held until now, however silent
                raise ConnectionLost("the stream ended before the command", retryable=True)
            except ConnectionLost:
                if time.monotonic() > deadline:
                    raise
                await asyncio.sleep(_RETRY_S)

    async def _attached(self, query: dict[str, str]) -> AsyncIterator[Event]:
        """Events over one connection, until it ends."""
        try:
            async with self._transport.socket(f"{self._path}/stream", query, self._target) as socket:
                async for message in socket:
                    if message.type is aiohttp.WSMsgType.BINARY:
                        channel, offset = _HEAD.unpack_from(message.data)
                        yield (Stderr if channel == 2 else Stdout)(message.data[_HEAD.size :], offset)
                    elif message.type is aiohttp.WSMsgType.TEXT:
                        yield self._last(message.data)
                    elif message.type is aiohttp.WSMsgType.ERROR:
                        raise cut(message.data, self._target)
        except aiohttp.WSServerHandshakeError as refused:
            # The refusal's text does not reach us this way: the plain request answers with the same error.
            await self._transport.request("GET", self._path, query={"wait_s": "1", "wake": "0"}, target=self._target)
            raise ConnectionLost(f"the stream was refused: HTTP {refused.status}", retryable=True) from refused

    def _last(self, text: str) -> Exit:
        last = decode(text.encode(), _Last)
        if last.exit is None:
            assert last.error is not None
            raise from_body(last.error, self._target.sandbox_id)
        return Exit(exec_result(last.exit, b"", b""))

    async def write(self, data: bytes | str) -> None:
        """Appends to stdin; returns when the sandbox holds the bytes, so a command that does not read slows the writer.

        Nothing is lost or doubled when connections break meanwhile. Conflict when stdin is closed or nobody reads it.
        """
        await self._stdin.write(data.encode() if isinstance(data, str) else bytes(data))

    async def close_stdin(self) -> None:
        """No more bytes: the command reads end-of-file."""
        await self._stdin.close()

    async def resize(self, cols: int, rows: int) -> None:
        """The size of its terminal (`start` with `pty`) from now on, each 1 to 4096. What runs in front gets SIGWINCH."""
        body = encode(cells(PtySize(cols, rows)))
        await self._transport.request("POST", f"{self._path}/resize", body=body, target=self._target)

    async def signal(self, name: str | int) -> None:
        """Signals the command's process group, by name ("TERM") or number; KILL ends its whole tree.

        ConnectionLost when the connection is: then it has arrived once or not at all. Only KILL, which may arrive twice,
        is sent again.
        """
        body = encode({"signal": name})
        repeat = str(name).upper() in _REPEATABLE
        await self._transport.request("POST", f"{self._path}/signal", body=body, target=self._target, repeat=repeat)

    async def kill(self) -> None:
        """Ends the command's whole tree, whatever sessions and parents its processes made for themselves."""
        await self.signal("KILL")

    async def poll(self) -> ExecResult | None:
        """How it ended (without its output, which `wait` and `events` bring), or None while it runs. Does not wait."""
        reply = await self._transport.call("GET", self._path, ExecReply, query={"output": "false"}, target=self._target)
        return None if reply.done is None else exec_result(reply.done, b"", b"")

    async def wait(self, *, check: bool = False) -> ExecResult:
        """Its end with all output kept of it. May be called again, and from another program."""
        result = await rest(self._transport, self._target, self.exec_id, [], [], wake=True)
        return result.check() if check else result
