"""Ports of a sandbox: connections to servers inside, and listeners inside whose connections come to us.

Both end in a `Duplex`. Whoever holds one holds a socket inside, so each is a context manager: left before its end, the
connection is reset, and nobody inside takes half of a message for a whole one.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Self

from dsec.protocol.errors import ErrorKind, Fault
from dsec.protocol.link import Data, LinkStream, Note, decode
from dsec.protocol.specs import Arrival, Listening

from .sandbox import Sandbox

BACKLOG = 128


class Duplex:
    """A connection with something inside. Bytes both ways, each direction ends on its own."""

    def __init__(self, stream: LinkStream) -> None:
        self._stream = stream

    async def read(self) -> bytes:
        """The next bytes, b"" at their end. Fault connection_lost when the connection was reset."""
        while (item := await self._stream.receive()) is not None:
            if isinstance(item, Data):
                return item.data
        if self._stream.ended:
            await self._stream.result()
        return b""

    async def write(self, data: bytes) -> None:
        """Returns when it is on its way, at the pace of the reader inside; Fault when there is none any more."""
        await self._stream.send(data)

    async def end(self) -> None:
        """No more bytes from this side."""
        await self._stream.end()

    async def finished(self) -> None:
        """Until both directions have ended; Fault connection_lost when the connection was reset instead."""
        await self._stream.result()

    def close(self) -> None:
        """Resets the connection, unless it came to its end."""
        self._stream.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()


async def connect(sandbox: Sandbox, port: int, host: str | None = None) -> Duplex:
    """A connection to a server inside. host: a loopback address; by default 127.0.0.1, then ::1.

    Fault not_found (retryable) when nothing listens there, timeout when it does not accept, capacity when there are too many.
    """
    return await _opened(sandbox, "port.connect", {"port": port, "host": host})


async def accept(sandbox: Sandbox, connection: int) -> Duplex:
    """A connection that a listener of the sandbox told of. Fault not_found when it was taken or the listener is closed."""
    return await _opened(sandbox, "port.accept", {"connection": connection})


async def _opened(sandbox: Sandbox, method: str, params: dict[str, object]) -> Duplex:
    """A stream of aether's that has said that it is connected."""
    stream = await (await sandbox.link()).open(method, params, apart=True)
    try:
        if not isinstance(await stream.receive(), Note):
            await stream.result()
            raise Fault(ErrorKind.INTERNAL, f"{method}: no answer")
    except BaseException:
        stream.cancel()
        raise
    return Duplex(stream)


class Listener:
    """A port inside. Iterate over it for the connections; at most 64 wait to be taken, more wait in the kernel."""

    def __init__(self, sandbox: Sandbox, stream: LinkStream, at: Listening) -> None:
        self._sandbox = sandbox
        self._stream = stream
        self.address = at.address
        self.port = at.port

    async def arrivals(self) -> AsyncIterator[Arrival]:
        """Connections that wait, each to be taken with `take`; Fault when the listener or the sandbox is gone."""
        while (item := await self._stream.receive()) is not None:
            if isinstance(item, Note):
                yield decode(item.payload, Arrival)
        await self._stream.result()

    async def take(self, connection: int) -> Duplex:
        return await accept(self._sandbox, connection)

    async def __aiter__(self) -> AsyncIterator[Duplex]:
        async for arrival in self.arrivals():
            yield await self.take(arrival.connection)


@asynccontextmanager
async def listen(sandbox: Sandbox, address: str = "127.0.0.1", port: int = 0) -> AsyncIterator[Listener]:
    """Listens inside on a loopback address until the block is left; port 0 takes a free one.

    Connections that were taken outlive it. Fault conflict when the port is in use.
    """
    stream = await (await sandbox.link()).open("port.listen", {"address": address, "port": port, "backlog": BACKLOG})
    try:
        first = await stream.receive()
        if not isinstance(first, Note):
            await stream.result()
            raise Fault(ErrorKind.INTERNAL, f"port {port}: no answer to a listener")
        yield Listener(sandbox, stream, decode(first.payload, Listening))
    finally:
        stream.cancel()
