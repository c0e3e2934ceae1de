"""A platform's own API through the proxy: what the SDK needs passes, WebSockets too, and only where the mirror is an API."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from dsec import ConnectionLost, DSecClient, DSecContainerRunArgs, Exit, PermissionDenied, Stdout
from dsec.edge.config import from_arguments
from dsec.edge.proxy.limits import Limits
from dsec.protocol.mirrors import Mirror, MirrorKind
from tests.apiserver.fake_edge import FakeEdge
from tests.apiserver.serving import KEY, apiserver

from .talk import DEADLINE, OK, Client, Proxy, Server, get, serving

UPGRADE = ("Connection: Upgrade", "Upgrade: websocket", "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==")
SWITCHED = b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nX-Own: 1\r\n\r\n"


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    head = await reader.readuntil(b"\r\n\r\n")
    writer.write(SWITCHED + head)
    while data := await reader.read(1024):
        writer.write(data)
        await writer.drain()


def api(server: Server, **fields: object) -> Proxy:
    return Proxy({"dsec": True}, [server.mirror("dsec", kind=MirrorKind.API, **fields)])


async def test_a_websocket_passes_both_ways_until_its_end() -> None:
    async with serving(echo) as server:
        client = Client([get("http://dsec/v1/x", *UPGRADE, "X-Hop: 1", "Connection: x-hop")], ends=False)
        proxy = api(server, headers={"X-DSec-Inside": "1"})
        running = asyncio.create_task(proxy.session(client).run())
        got = await client.until(b"X-DSec-Inside: 1\r\n")
        assert got.startswith(b"HTTP/1.1 101 ") and b"X-Own: 1\r\n" in got and b"X-Hop" not in got
        assert b"GET /v1/x HTTP/1.1\r\n" in got and b"Upgrade: websocket\r\n" in got
        client.out.put_nowait(b"\x81\x02hi")
        await client.until(b"\x81\x02hi")
        client.out.put_nowait(b"")
        await asyncio.wait_for(running, DEADLINE)
    assert [decided.why for decided in proxy.decided] == ["WebSocket"]


@pytest.mark.parametrize("kind", [MirrorKind.HTTP, MirrorKind.PYPI])
async def test_no_other_mirror_becomes_a_websocket(kind: MirrorKind) -> None:
    async with serving(OK) as server:
        mirror = server.mirror(kind=kind, writable=True)
        answer = await Proxy({"files": True}, [mirror]).say(get("http://files/", *UPGRADE))
    assert answer.startswith(b"HTTP/1.1 200 OK") and b"Upgrade" not in server.connections[0]


@pytest.mark.parametrize(
    "answer",
    [
        SWITCHED.replace(b"websocket", b"h2c"),
        SWITCHED.replace(b"Upgrade: websocket\r\n", b""),
        SWITCHED.replace(b"Upgrade: websocket\r\n", b"Upgrade: websocket\r\nUpgrade: h2c\r\n"),
    ],
)
async def test_a_server_that_switches_to_something_else_is_refused(answer: bytes) -> None:
    async with serving(answer) as server:
        got = await api(server).say(get("http://dsec/", *UPGRADE))
    assert got.startswith(b"HTTP/1.1 502 ")


async def test_a_server_that_switches_unasked_is_refused() -> None:
    async with serving(SWITCHED) as server:
        for asked in (get("http://dsec/"), get("http://dsec/", "Connection: Upgrade", "Upgrade: h2c")):
            assert (await api(server).say(asked)).startswith(b"HTTP/1.1 502 ")


async def test_a_refused_websocket_is_an_answer_like_others() -> None:
    async with serving(b"HTTP/1.1 403 Forbidden\r\nX-DSec-Error: {}\r\nContent-Length: 2\r\n\r\nno") as server:
        got = await api(server).say(get("http://dsec/", *UPGRADE))
    assert got.startswith(b"HTTP/1.1 403 ") and b"X-DSec-Error: {}" in got and got.endswith(b"no")


async def test_without_the_rule_there_is_no_way() -> None:
    async with serving(echo) as server:
        mirror = server.mirror("dsec", kind=MirrorKind.API)
        for rules in ({}, {"dsec": False}, {"pypi": True}, {"dsec": True, "dsec:80": False, "DSEC": False}):
            got = await Proxy(rules, [mirror]).say(get("http://dsec/", *UPGRADE))
            assert got.startswith(b"HTTP/1.1 403 ")
    assert not server.connections


def test_the_edge_knows_the_api_of_its_platform(tmp_path: Path) -> None:
    def mirrors(*more: str) -> dict[str, Mirror]:
        where = ["--name", "e", "--state", str(tmp_path), "--run", str(tmp_path), "--store", str(tmp_path)]
        return {mirror.name: mirror for mirror in from_arguments([*where, *more]).configured_mirrors()}

    assert mirrors() == {}
    own = mirrors("--api", "http://127.0.0.1:7707")["dsec"]
    assert own.kind is MirrorKind.API and own.headers == {"X-DSec-Inside": "1"}
    (tmp_path / "mirrors.toml").write_text(
        '[dsec]\nurl = "http://balancer:80/"\nkind = "api"\n[pypi]\nurl = "http://p/"\n'
    )
    others = mirrors("--api", "http://127.0.0.1:7707")
    assert others["dsec"].url == "http://balancer:80/" and "pypi" in others, "the operator knows better"


# -- the SDK ------------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def behind(proxy: Proxy) -> AsyncIterator[str]:
    """The proxy as a sandbox has it: a port on loopback."""

    class Stream:
        def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            self._reader, self._writer = reader, writer

        async def read(self) -> bytes:
            return await self._reader.read(65536)

        async def write(self, data: bytes) -> None:
            self._writer.write(data)
            await self._writer.drain()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await proxy.session(Stream(reader, writer)).run()  # type: ignore[arg-type]
        finally:
            with suppress(OSError):
                writer.close()

    listening = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
    finally:
        listening.close()


@pytest.fixture(scope="module")
async def edge(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[FakeEdge]:
    async with FakeEdge(tmp_path_factory.mktemp("edge")) as edge:
        yield edge


async def test_the_sdk_works_through_it(edge: FakeEdge, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with apiserver(edge.directory, edge) as url:
        mirror = Mirror(name="dsec", url=url, kind=MirrorKind.API)
        async with behind(Proxy({"dsec": True}, [mirror], limits=Limits())) as proxy:
            monkeypatch.setenv("DSEC_PROXY", proxy)
            async with DSecClient("http://dsec", KEY) as client:
                sandbox = await client.run_container(DSecContainerRunArgs("debian@12"))
                assert (await sandbox.run_shell("echo hi")).text == "hi\n"
                large = os.urandom(20 << 20)
                await sandbox.files.write("/large", large)
                assert await sandbox.files.read("/large") == large
                process = await sandbox.start("read line; echo $line; exit 3", stdin=True)
                await process.write("over a socket\n")
                events = [event async for event in process.events()]
                assert isinstance(events[0], Stdout) and events[0].data == b"over a socket\n"
                assert isinstance(events[-1], Exit) and events[-1].result.exit_code == 3
                results = await asyncio.gather(*(sandbox.run_shell(f"echo {i}") for i in range(40)))
                assert [result.text for result in results] == [f"{i}\n" for i in range(40)]
                await sandbox.stop()


async def test_what_comes_from_inside_is_no_owner(edge: FakeEdge, monkeypatch: pytest.MonkeyPatch) -> None:
    async with apiserver(edge.directory, edge) as url:
        mirror = Mirror(name="dsec", url=url, kind=MirrorKind.API, headers={"X-DSec-Inside": "1"})
        async with behind(Proxy({"dsec": True}, [mirror], limits=Limits())) as proxy:
            monkeypatch.setenv("DSEC_PROXY", proxy)
            with pytest.raises(PermissionDenied, match="from inside a sandbox"):
                await DSecClient("http://dsec", KEY).open()


async def test_a_proxy_that_is_not_there_is_a_lost_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSEC_PROXY", "http://127.0.0.1:9")
    with pytest.raises(ConnectionLost):
        await DSecClient("http://dsec", KEY, request_timeout=1).open()
