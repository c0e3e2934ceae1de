"""Ports of a sandbox: `sandbox.forward` and `sandbox.expose`.

Both carry bytes, one WebSocket to the service for each connection, so HTTP, WebSockets and any protocol over TCP pass
unchanged, at the pace of the slower end. Each direction ends on its own; a connection that breaks on one side is reset on the
other.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
import struct
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from types import TracebackType
from typing import Self

import aiohttp
import msgspec
from yarl import URL

from dsec.protocol.errors import ErrorBody

from .errors import Conflict, ConnectionLost, DSecError, InvalidRequest, from_body
from .transport import Target, Transport, decode

CHUNK = 256 * 1024
MAX_CONNECTIONS = 256  # of one exposed service at once; the rest waits inside
_PATIENCE_S = 10.0  # a service that restarts is waited for so long, by a new connection
_FIRST_DELAY, _LAST_DELAY = 0.05, 1.0
_END_S = 10.0
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER: what is unsent is dropped
_END = '{"end":true}'
_SCHEMES = {"http": 80, "https": 443, "tcp": None}
_log = logging.getLogger("dsec.ports")


class LocalUrl(str):
    """`http://127.0.0.1:PORT`, with `.host` and `.port` for protocols other than HTTP."""

    host: str
    port: int

    @classmethod
    def of(cls, host: str, port: int) -> Self:
        made = cls(f"http://{host}:{port}")
        made.host, made.port = host, port
        return made


class _Said(msgspec.Struct):
    """A text message of the service."""

    end: bool = False
    error: ErrorBody | None = None
    port: int = 0
    connection: int = 0
    peer: str = ""


class _Broken(Exception):
    """A connection did not come to its end."""


class Forward:
    """`async with sandbox.forward(8000) as url:` - a port inside as a port of this machine."""

    def __init__(self, transport: Transport, target: Target, port: int, local_port: int, local_host: str) -> None:
        _check_port("port", port, 1)
        _check_port("local_port", local_port, 0)
        self._transport = transport
        self._target = target
        self._path = f"/v1/sandboxes/{target.sandbox_id}/forward/{port}"
        self._local = (local_host, local_port)
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> LocalUrl:
        await self._transport.open()
        host, port = self._local
        self._server = await asyncio.start_server(self._accepted, host, port, limit=CHUNK, backlog=512)
        return LocalUrl.of(host, self._server.sockets[0].getsockname()[1])

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._server is not None
        self._server.close()
        await _ended(self._connections)
        await self._server.wait_closed()

    def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.get_running_loop().create_task(self._carry(reader, writer))
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with _closing(writer), _connected(self._transport, self._path, self._target) as socket:
                await _splice(reader, writer, socket)
        except (DSecError, _Broken, OSError, aiohttp.ClientError) as error:
            _log.info("%s: a connection ended early: %s", self._path, error)


class Exposed:
    """`async with sandbox.expose("http://127.0.0.1:9000", name="model") as url:` - a service of ours, reachable inside."""

    def __init__(
        self, transport: Transport, target: Target, url: str, name: str, port: int, tls: ssl.SSLContext | None = None
    ) -> None:
        _check_port("port", port, 1)
        self._transport = transport
        self._target = target
        self._upstream = _Upstream(url, tls)
        self._path = f"/v1/sandboxes/{target.sandbox_id}/expose/{_quoted(name)}"
        self._query = {"port": str(port)}
        self._url = self._upstream.inside(name, port)
        self._control: aiohttp.ClientWebSocketResponse | None = None
        self._leaving = False
        self._serving: asyncio.Task[None] | None = None
        self._connections: set[asyncio.Task[None]] = set()
        self._slots = asyncio.Semaphore(MAX_CONNECTIONS)

    async def __aenter__(self) -> str:
        ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._serving = asyncio.create_task(self._serve(ready))
        try:
            await ready
        except BaseException:
            self._serving.cancel()
            raise
        return self._url

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Returns when the name is gone. Connections that are still open are reset."""
        assert self._serving is not None
        self._leaving = True
        try:
            async with asyncio.timeout(_END_S):
                if self._control is not None and not self._control.closed:
                    with suppress(OSError, aiohttp.ClientError):
                        await self._control.send_str(_END)
                        await self._serving
        except TimeoutError:
            _log.warning("%s: no answer to its end", self._path)
        finally:
            self._serving.cancel()
            await asyncio.gather(self._serving, return_exceptions=True)
            await _ended(self._connections)

    async def _serve(self, ready: asyncio.Future[None]) -> None:
        """The name inside, made anew whenever the service was lost, until it is taken back or the sandbox ends."""
        delay = _FIRST_DELAY
        while not self._leaving:
            try:
                await self._listen(ready)
                return
            except (DSecError, aiohttp.ClientError, OSError) as error:
                if not ready.done():
                    ready.set_exception(error)
                    return
                if not isinstance(error, ConnectionLost | Conflict | aiohttp.ClientError | OSError):
                    _log.warning("%s ended: %s", self._path, error)
                    return
            await asyncio.sleep(delay)
            delay = min(2 * delay, _LAST_DELAY)

    async def _listen(self, ready: asyncio.Future[None]) -> None:
        """Only the first time is the caller's wish: after a loss a sandbox that sleeps goes on sleeping."""
        query = self._query | {"wake": "false"} if ready.done() else self._query
        async with self._transport.socket(self._path, query, self._target, heartbeat=None) as control:
            self._control = control
            async for message in control:
                if message.type is not aiohttp.WSMsgType.TEXT:
                    continue
                said = decode(message.data.encode(), _Said)
                if said.error is not None:
                    raise from_body(said.error, self._target.sandbox_id)
                if said.connection:
                    self._arrived(said.connection)
                elif not ready.done():
                    ready.set_result(None)
            if not self._leaving:
                raise ConnectionLost("the service is gone", retryable=True)

    def _arrived(self, connection: int) -> None:
        task = asyncio.create_task(self._carry(connection))
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)

    async def _carry(self, connection: int) -> None:
        """One connection from inside. When the upstream does not take it, it is reset there."""
        path = f"{self._path}/{connection}"
        try:
            async with self._slots, self._transport.socket(path, {}, self._target, heartbeat=None) as socket:
                reader, writer = await self._upstream.connect()
                async with _closing(writer):
                    await _splice(reader, writer, socket)
        except (DSecError, _Broken, OSError, aiohttp.ClientError, TimeoutError) as error:
            _log.info("%s: a connection ended early: %s", path, error)


class _Upstream:
    """Where the connections of an exposed service go."""

    def __init__(self, url: str, tls: ssl.SSLContext | None) -> None:
        try:
            parsed = URL(url)
            port = parsed.port
        except ValueError as error:
            raise InvalidRequest(f"url={url!r} is none: {error}", hint="for example http://127.0.0.1:9000") from error
        if parsed.scheme not in _SCHEMES or not parsed.host or parsed.user or parsed.password or not port:
            raise InvalidRequest(
                f"url={url!r} is not http://HOST[:PORT], https://HOST[:PORT] or tcp://HOST:PORT",
                hint="credentials belong into the requests that are made inside, or better into a proxy of yours",
            )
        self._host, self._port = parsed.host, port
        if tls is not None and parsed.scheme != "https":
            raise InvalidRequest(f"ssl is given, and url={url!r} is not https", hint="with tcp, speak TLS inside")
        self._tls = (tls or ssl.create_default_context()) if parsed.scheme == "https" else None
        self._scheme = "tcp" if parsed.scheme == "tcp" else "http"
        self._rest = parsed.raw_path_qs if parsed.raw_path_qs != "/" else ""

    def inside(self, name: str, port: int) -> str:
        """The URL that code inside uses."""
        where = name if port == 80 and self._scheme == "http" else f"{name}:{port}"
        return f"{self._scheme}://{where}{self._rest}"

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        async with asyncio.timeout(_PATIENCE_S):
            return await asyncio.open_connection(self._host, self._port, ssl=self._tls, limit=CHUNK)


def _check_port(name: str, port: int, least: int) -> None:
    if not least <= port <= 65535:
        raise InvalidRequest(f"{name}={port} is not between {least} and 65535")


def _quoted(name: str) -> str:
    """A name as one segment of a path; what cannot be one is refused by the service with its reason."""
    from urllib.parse import quote

    return quote(name, safe="") or "%20"


async def _ended(tasks: set[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@asynccontextmanager
async def _closing(writer: asyncio.StreamWriter) -> AsyncIterator[None]:
    """A connection that came to its end is closed; any other is reset, so that nobody takes half of it for the whole."""
    try:
        yield
        writer.close()
        await writer.wait_closed()
    except BaseException:
        with suppress(OSError):
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        raise
    finally:
        writer.transport.abort()  # without effect on one that is closed


@asynccontextmanager
async def _connected(transport: Transport, path: str, target: Target) -> AsyncIterator[aiohttp.ClientWebSocketResponse]:
    """A WebSocket, waited for while the service restarts."""
    deadline, delay = time.monotonic() + _PATIENCE_S, _FIRST_DELAY
    while True:
        manager = transport.socket(path, {}, target, heartbeat=None)
        try:
            socket = await manager.__aenter__()
            break
        except ConnectionLost:
            if time.monotonic() + delay > deadline:
                raise
        await asyncio.sleep(delay)
        delay = min(2 * delay, _LAST_DELAY)
    try:
        yield socket
    finally:
        await manager.__aexit__(None, None, None)


async def _splice(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, socket: aiohttp.ClientWebSocketResponse
) -> None:
    """Bytes both ways until both directions have ended; raises when the connection broke before."""
    sending = asyncio.create_task(_send(reader, socket))
    receiving = asyncio.create_task(_receive(socket, writer))
    try:
        await asyncio.wait((sending, receiving), return_when=asyncio.FIRST_COMPLETED)
        if sending.done() and not receiving.done():
            sending.result()
        await receiving
    finally:
        for task in (sending, receiving):
            task.cancel()
        await asyncio.gather(sending, receiving, return_exceptions=True)


async def _send(reader: asyncio.StreamReader, socket: aiohttp.ClientWebSocketResponse) -> None:
    while data := await reader.read(CHUNK):
        await socket.send_bytes(data)
    await socket.send_str(_END)


async def _receive(socket: aiohttp.ClientWebSocketResponse, writer: asyncio.StreamWriter) -> None:
    ended = False
    async for message in socket:
        if message.type is aiohttp.WSMsgType.BINARY:
            writer.write(message.data)
            await writer.drain()
        elif message.type is aiohttp.WSMsgType.TEXT:
            said = decode(message.data.encode(), _Said)
            if said.error is not None:
                raise _Broken(said.error.message)
            if said.end:
                ended = True
                if writer.can_write_eof():  # TLS has no half of an end: the other side sees it with the rest
                    writer.write_eof()
    if not ended or socket.close_code != aiohttp.WSCloseCode.OK:
        raise _Broken("the service is gone")
