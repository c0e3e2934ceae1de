"""Ports of a sandbox over WebSockets: connections to servers inside, and services of the caller that code inside reaches.

One WebSocket is one connection, so each has its own pace: what is not read on one side is not read from the other, and
nothing piles up here. Binary messages are the bytes; text messages are JSON: `{"end": true}` for the end of a direction (TCP's
half-close), `{"error": ...}` when the connection broke. A WebSocket that closes without an end of its direction means a reset.
"""

from __future__ import annotations

import asyncio
import contextlib

import msgspec
from starlette.websockets import WebSocket, WebSocketDisconnect

from dsec.protocol.errors import ErrorKind, Fault
from dsec.protocol.link import Data, LinkStream, Note, decode
from dsec.protocol.specs import Arrival, Listening

from .bodies import ErrorReply, decode_json
from .exchange import INCARNATION, Exchange, encode, error_body

STALL_S = 30.0
_STILL = encode({"still": True}).decode()
_END = encode({"end": True}).decode()


class _Said(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A text message of the client."""

    end: bool = False


async def forward(x: Exchange, socket: WebSocket) -> None:
    """WebSocket: one connection to a port inside. Accepted once that is made; a refusal gets its own status."""
    port = _port(x.path_param("port"))
    link, params, incarnation = await x.target()
    stream = await link.open("port.connect", {**params, "port": port})
    await _first(stream)
    await _Pipe(x, socket, stream).run(incarnation)


async def expose(x: Exchange, socket: WebSocket) -> None:
    """WebSocket: a name and port inside for a service of the caller, told of each connection to it, until `{"end": true}`.

    With `wake=false` it is accepted at once, so that a caller who leaves while the sandbox sleeps is seen to.
    """
    port, wake = x.number("port", 80, low=1, high=65535), x.flag("wake", True)
    link, params, incarnation = await x.target()
    asked = {**params, "name": x.path_param("name"), "port": port, "wake": wake}
    stream = await link.open("port.listen", asked)
    first = decode((await _first(stream)).payload, Listening) if wake else None
    await _Listener(x, socket, stream, first).run(incarnation)


async def exposed_connection(x: Exchange, socket: WebSocket) -> None:
    """WebSocket: one connection that code inside made to an exposed service."""
    number = _number(x.path_param("connection"))
    link, params, incarnation = await x.target()
    stream = await link.open("port.accept", {**params, "connection": number})
    await _first(stream)
    await _Pipe(x, socket, stream).run(incarnation)


def _port(text: str) -> int:
    port = int(text) if text.isascii() and text.isdigit() and len(text) <= 5 else 0
    if not 1 <= port <= 65535:
        raise Fault(ErrorKind.INVALID, f"port {text[:20]!r} is not between 1 and 65535")
    return port


def _number(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 10):
        raise Fault(ErrorKind.INVALID, f"connection {text[:20]!r} is not a number that the listener told")
    return int(text)


async def _first(stream: LinkStream) -> Note:
    """The event that comes first when the edge could do it; else its Fault."""
    try:
        first = await stream.receive()
        if isinstance(first, Note):
            return first
        await stream.result()
        raise Fault(ErrorKind.INTERNAL, "the edge ended a stream before it began")
    except BaseException:
        stream.cancel()
        raise


class _Talk:
    """A WebSocket and a stream of the edge that belong together, for as long as either lives."""

    def __init__(self, x: Exchange, socket: WebSocket, stream: LinkStream) -> None:
        self._x = x
        self._socket = socket
        self._stream = stream
        self._ended = False  # by the client

    async def run(self, incarnation: int) -> None:
        tasks: list[asyncio.Task[None]] = []
        try:
            await self._socket.accept(headers=[(INCARNATION.encode(), str(incarnation).encode())])
            parts = (self._speak, self._listen, self._watch)
            tasks = [asyncio.create_task(part()) for part in parts]
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                if task.done():
                    task.result()
            await self._close(None)
        except Fault as fault:
            await self._close(fault)
        except WebSocketDisconnect:
            pass
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._stream.cancel()

    async def _close(self, fault: Fault | None) -> None:
        with contextlib.suppress(WebSocketDisconnect, RuntimeError):  # it has left, or was closed by the server's end
            if fault is not None:
                body = error_body(fault.body, self._x.request_id, self._x.sandbox)
                await self._socket.send_text(encode(ErrorReply(body)).decode())
            await self._socket.close()

    async def _speak(self) -> None:
        """To the client, until nothing more comes."""
        raise NotImplementedError

    async def _listen(self) -> None:
        """Until the client leaves."""
        while (message := await self._socket.receive())["type"] != "websocket.disconnect":
            data, text = message.get("bytes"), message.get("text")
            if self._ended:
                raise Fault(ErrorKind.INVALID, "a message after the end of this direction")
            if data is not None:
                await self._take(data)
            elif text is not None and decode_json(text.encode(), _Said).end:
                self._ended = True
                await self._stream.end()
        raise WebSocketDisconnect

    async def _take(self, data: bytes) -> None:
        raise NotImplementedError

    async def _watch(self) -> None:
        await asyncio.Event().wait()


class _Listener(_Talk):
    def __init__(self, x: Exchange, socket: WebSocket, stream: LinkStream, first: Listening | None) -> None:
        super().__init__(x, socket, stream)
        self._first = first

    async def _speak(self) -> None:
        first = self._first or decode((await _first(self._stream)).payload, Listening)
        await self._socket.send_text(encode(first).decode())
        async for item in self._stream:
            if isinstance(item, Note):
                await self._socket.send_text(encode(decode(item.payload, Arrival)).decode())
        await self._stream.result()

    async def _take(self, data: bytes) -> None:
        raise Fault(ErrorKind.INVALID, "a listener takes no bytes: open a WebSocket for each connection")


class _Pipe(_Talk):
    _sending_since: float | None = None

    async def _speak(self) -> None:
        while (item := await self._stream.receive()) is not None:
            if isinstance(item, Data):
                await self._socket.send_bytes(item.data)
        if self._stream.ended:
            await self._stream.result()  # no end is told of what broke
        await self._socket.send_text(_END)
        await self._stream.result()

    async def _take(self, data: bytes) -> None:
        self._sending_since = asyncio.get_running_loop().time()
        try:
            await self._stream.send(data)
        except Fault:
            await asyncio.Event().wait()  # the stream is over, and `_speak` says how
        self._sending_since = None

    async def _watch(self) -> None:
        """While nothing is taken inside, nothing is read of the client, its leaving included: talking to it shows that."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(STALL_S)
            if self._sending_since is not None and loop.time() - self._sending_since >= STALL_S:
                await self._socket.send_text(_STILL)
