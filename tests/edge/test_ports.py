"""Ports as the edge sees them, against an aether in place of which a link server speaks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import cast

import msgspec
import pytest

from dsec.edge.ports import connect, listen
from dsec.edge.sandbox import Sandbox
from dsec.protocol.errors import ErrorKind, Fault
from dsec.protocol.link import Call, Handler, LinkClient, LinkServer


class _Port(msgspec.Struct):
    port: int = 0
    connection: int = 0


class Aether:
    """What aether does with ports, without sockets: connections echo, port 81 refuses, port 82 resets."""

    def __init__(self) -> None:
        self.closed = asyncio.Event()

    def handlers(self) -> dict[str, Handler]:
        return {"port.connect": self.connect, "port.listen": self.listen, "port.accept": self.accept}

    async def connect(self, call: Call) -> object:
        port = call.params(_Port).port
        if port == 81:
            raise Fault(ErrorKind.NOT_FOUND, "port 81 inside the sandbox refused the connection", retryable=True)
        call.note({"connected": True})
        if port == 82:
            await call.send(b"half a mess")
            raise Fault(ErrorKind.CONNECTION_LOST, "the connection was reset inside the sandbox")
        return await self.echo(call)

    async def accept(self, call: Call) -> object:
        call.note({"connected": True})
        return await self.echo(call)

    async def echo(self, call: Call) -> object:
        async for chunk in call.data():
            await call.send(chunk)
        call.end()
        return {}

    async def listen(self, call: Call) -> object:
        port = call.params(_Port).port
        call.note({"address": "127.0.0.1", "port": port or 4321})
        try:
            for number in (7, 8):
                call.note({"connection": number, "peer": "127.0.0.1:40000"})
            await asyncio.Event().wait()
        finally:
            self.closed.set()
        return {}


class Linked:
    """The one thing of a sandbox that ports need."""

    def __init__(self, client: LinkClient) -> None:
        self._client = client

    async def link(self) -> LinkClient:
        return self._client


@pytest.fixture
def aether() -> Aether:
    return Aether()


@pytest.fixture
async def sandbox(tmp_path: Path, aether: Aether) -> AsyncIterator[Sandbox]:
    server = LinkServer(aether.handlers())
    await server.listen_unix(tmp_path / "s")
    client = await LinkClient.connect_unix(tmp_path / "s")
    yield cast(Sandbox, Linked(client))
    await client.close()
    await server.close()


async def test_bytes_both_ways_and_both_ends(sandbox: Sandbox) -> None:
    async with await connect(sandbox, 80) as inside:
        await inside.write(b"ping")
        assert await inside.read() == b"ping"
        await inside.end()
        assert await inside.read() == b""
        await inside.finished()


async def test_a_refused_port_is_typed(sandbox: Sandbox) -> None:
    with pytest.raises(Fault) as caught:
        await connect(sandbox, 81)
    assert caught.value.body.kind is ErrorKind.NOT_FOUND and caught.value.body.retryable


async def test_a_reset_comes_behind_the_bytes(sandbox: Sandbox) -> None:
    async with await connect(sandbox, 82) as inside:
        assert await inside.read() == b"half a mess"
        with pytest.raises(Fault) as caught:
            await inside.read()
    assert caught.value.body.kind is ErrorKind.CONNECTION_LOST


async def test_a_listener_gives_connections_until_it_is_left(sandbox: Sandbox, aether: Aether) -> None:
    async with listen(sandbox, port=0) as listener:
        assert (listener.address, listener.port) == ("127.0.0.1", 4321)
        taken = 0
        async for inside in listener:
            async with inside:
                await inside.write(b"hello")
                assert await inside.read() == b"hello"
            taken += 1
            if taken == 2:
                break
    await asyncio.wait_for(aether.closed.wait(), 5)
