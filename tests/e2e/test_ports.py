"""`sandbox.forward` and `sandbox.expose`, with servers and clients that behave and that do not."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import shutil
import signal
import socket
import ssl
import struct
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path

import aiohttp
import aiohttp.web
import pytest

import dsec
import dsec.sync
from dsec import (
    Change,
    Conflict,
    DSecClient,
    DSecContainerRunArgs,
    InvalidRequest,
    LocalUrl,
    Process,
    Reason,
    Sandbox,
    SandboxUnavailable,
    State,
    Stdout,
)
from dsec.cluster import embedded
from dsec.layers import LayerStore
from tests.edge.proxy.certificates import Authority

from .command_line import command_line
from .conftest import BASE

pytestmark = pytest.mark.e2e
DEADLINE = 30.0
SERVERS = Path(__file__).parent / "servers.py"
HTTP, ECHO, EARLY, DEAF, POUR, POURED, WEBSOCKET, UNUSED = range(8000, 8008)


@pytest.fixture(scope="module")
async def inside(client: DSecClient) -> AsyncIterator[Sandbox]:
    """A sandbox with one server of each kind."""
    async with client.run_container(DSecContainerRunArgs(BASE)) as sandbox:
        await serve(sandbox)
        yield sandbox


async def serve(sandbox: Sandbox) -> Process:
    await sandbox.files.write("/srv/servers.py", SERVERS.read_bytes())
    process = await sandbox.start(["python3", "/srv/servers.py"])
    async with asyncio.timeout(DEADLINE):
        async for event in process.events():
            assert isinstance(event, Stdout), event
            if b"ready" in event.data:
                return process
    raise AssertionError("the servers did not start")


@asynccontextmanager
async def connection(
    url: LocalUrl, buffer: int | None = None
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    sock = socket.socket()
    if buffer is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
    sock.setblocking(False)
    await asyncio.get_running_loop().sock_connect(sock, (url.host, url.port))
    reader, writer = await asyncio.open_connection(sock=sock, limit=64 * 1024)
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


async def echoed(url: LocalUrl, data: bytes) -> bytes:
    async with connection(url) as (reader, writer):
        writer.write(data)
        writer.write_eof()
        return await reader.read(-1)


async def steady(look: Callable[[], Awaitable[int]]) -> int:
    """A number that has stopped growing."""
    async with asyncio.timeout(DEADLINE):
        before = -1
        while (now := await look()) != before:
            before = now
            await asyncio.sleep(0.5)  # its pace, not a wait for an event: the event is that nothing comes
    return now


def resident(platform: embedded.Endpoint) -> dict[str, int]:
    """MiB of every process of the platform, those in its sandboxes apart from aether left out."""
    status = {}
    for path in Path("/proc").glob("[0-9]*/status"):
        with suppress(OSError):
            status[int(path.parent.name)] = dict(line.split(":", 1) for line in path.read_text().splitlines())
    ours = {json.loads(path.read_text())["pid"] for path in (Path(platform.run) / "pids").iterdir()}
    found = {}
    for pid, fields in status.items():
        above = pid
        while above not in ours and above in status:
            above = int(status[above]["PPid"])
        name = fields["Name"].strip()
        if above in ours and "VmRSS" in fields and (pid in ours or name in ("aether", "dsec-runtime", "launcher")):
            found[f"{name} {pid}"] = int(fields["VmRSS"].split()[0]) >> 10
    assert any(name.startswith("aether") for name in found), found
    return found


# -- forward -----------------------------------------------------------------------------------------------------------


async def test_http_with_one_connection_and_with_many(inside: Sandbox) -> None:
    async with inside.forward(HTTP) as url, aiohttp.ClientSession() as session:
        assert str(url) == f"http://127.0.0.1:{url.port}" and url.host == "127.0.0.1"
        for _ in range(20):
            async with session.get(f"{url}/hello") as answer:
                assert (answer.status, await answer.text()) == (200, "GET /hello")
        async with session.post(f"{url}/there", data=b"x" * 300_000) as answer:
            assert await answer.text() == "POST /there 300000"


async def test_websocket(inside: Sandbox) -> None:
    async with inside.forward(WEBSOCKET) as url, aiohttp.ClientSession() as session, session.ws_connect(url) as talk:
        for size in (0, 1, 125, 126, 70_000):
            await talk.send_bytes(b"w" * size)
            assert await talk.receive_bytes(timeout=DEADLINE) == b"w" * size


async def test_each_direction_ends_on_its_own(inside: Sandbox) -> None:
    """The server answers when it has seen the client's end: without half-close this hangs."""
    async with inside.forward(ECHO) as url:
        assert await asyncio.wait_for(echoed(url, b"to be sorted"), DEADLINE) == b"to be sorted"
        assert await asyncio.wait_for(echoed(url, b""), DEADLINE) == b""


async def test_100_mb_are_exact_both_ways_at_once(inside: Sandbox) -> None:
    block, count = os.urandom(1024 * 1024), 100
    sent, received = hashlib.sha256(), hashlib.sha256()

    async def feed(writer: asyncio.StreamWriter) -> None:
        for number in range(count):
            data = struct.pack("<I", number) + block
            sent.update(data)
            writer.write(data)
            await writer.drain()
        writer.write_eof()

    async with inside.forward(ECHO) as url, connection(url) as (reader, writer), asyncio.timeout(60):
        feeding = asyncio.create_task(feed(writer))
        while data := await reader.read(256 * 1024):
            received.update(data)
        await feeding
    assert received.hexdigest() == sent.hexdigest()


async def test_200_connections_at_once(inside: Sandbox) -> None:
    together = asyncio.Barrier(200)

    async def one(number: int, url: LocalUrl) -> bytes:
        async with connection(url) as (reader, writer):
            writer.write(b"first")
            assert await reader.readexactly(5) == b"first"
            await together.wait()  # all of them are open now
            writer.write(b"%d" % number)
            writer.write_eof()
            return await reader.read(-1)

    async with inside.forward(ECHO) as url, asyncio.timeout(60):
        assert await asyncio.gather(*(one(n, url) for n in range(200))) == [b"%d" % n for n in range(200)]


async def test_a_port_that_nothing_listens_on_fails_at_once(inside: Sandbox) -> None:
    async with inside.forward(UNUSED) as url:
        started = time.monotonic()
        with pytest.raises(ConnectionResetError):  # and no end that looks like an empty answer
            async with connection(url) as (reader, _):
                await reader.read(1)
        assert time.monotonic() - started < 2


async def test_a_server_that_closes_early(inside: Sandbox) -> None:
    """What it said arrives, then the connection is over, however much there was still to send."""
    async with inside.forward(EARLY) as url, connection(url) as (reader, writer), asyncio.timeout(DEADLINE):
        writer.write(b"x" * 1_000_000)
        assert await reader.readexactly(5) == b"early"
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            await reader.readexactly(1)


async def test_a_client_that_leaves_is_a_reset_inside(inside: Sandbox) -> None:
    """The server must not take half of a message for a whole one."""
    async with inside.forward(ECHO) as url:
        async with connection(url) as (reader, writer):
            writer.write(b"half")
            assert await reader.readexactly(4) == b"half"
            linger = struct.pack("ii", 1, 0)
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        async with asyncio.timeout(DEADLINE):
            while b"ConnectionResetError" not in await inside.files.read("/srv/log"):
                await asyncio.sleep(0.05)


async def test_slow_readers_hold_the_sender_and_nobody_else(inside: Sandbox, platform: embedded.Endpoint) -> None:
    async def poured() -> int:
        return int(await echoed(counter, b""))

    async with inside.forward(POUR) as url, inside.forward(POURED) as counter, connection(url, 4096) as (reader, _):
        await reader.readexactly(1)
        before = resident(platform)
        held = await steady(poured)
        assert held < 64 << 20, f"{held} bytes were taken that nobody reads"
        grown = {name: size - before.get(name, size) for name, size in resident(platform).items()}
        assert max(grown.values()) < 32, grown
        assert (await inside.run_shell("head -c 3000000 /dev/zero")).stdout_bytes == 3_000_000
        await asyncio.wait_for(reader.readexactly(held + 1), DEADLINE)


async def test_forty_who_stopped_hold_up_nobody(inside: Sandbox) -> None:
    """Clients that do not read, and servers that do not: commands, files and other connections of the sandbox go on."""

    async def stuff(writer: asyncio.StreamWriter) -> None:
        while True:
            writer.write(bytes(256 * 1024))
            await writer.drain()

    async with (
        inside.forward(POUR) as pour,
        inside.forward(DEAF) as deaf,
        inside.forward(ECHO) as echo,
        AsyncExitStack() as stack,
    ):
        for _ in range(40):
            reader, _ = await stack.enter_async_context(connection(pour, 4096))
            await asyncio.wait_for(reader.readexactly(1), DEADLINE)
        writers = [(await stack.enter_async_context(connection(deaf)))[1] for _ in range(40)]
        stuffing = [asyncio.create_task(stuff(writer)) for writer in writers]

        async def waiting() -> int:
            return sum(writer.transport.get_write_buffer_size() for writer in writers)

        await steady(waiting)
        async with asyncio.timeout(DEADLINE):
            assert (await inside.run_shell("head -c 3000000 /dev/zero")).stdout_bytes == 3_000_000
            assert (await inside.run_shell("wc -c", stdin=b"x" * 3_000_000)).text == "3000000\n"
            await inside.files.write("/srv/file", bytes(3_000_000))
            assert await echoed(echo, bytes(3_000_000)) == bytes(3_000_000)
        for task in stuffing:
            task.cancel()
        await asyncio.gather(*stuffing, return_exceptions=True)


async def test_the_sync_facade(inside: Sandbox, platform: embedded.Endpoint) -> None:
    def work() -> bytes:
        key = Path(platform.key_file).read_text().strip()
        with dsec.sync.DSecClient(platform.url, key) as client:
            with client.attach(inside.id) as sandbox, sandbox.forward(ECHO) as url:
                with socket.create_connection((url.host, url.port), timeout=DEADLINE) as sock:
                    sock.sendall(b"hello")
                    sock.shutdown(socket.SHUT_WR)
                    return sock.recv(100)

    assert await asyncio.to_thread(work) == b"hello"


# -- expose ------------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def model(tls: ssl.SSLContext | None = None) -> AsyncIterator[str]:
    """An HTTP service of the caller."""

    async def answer(request: aiohttp.web.Request) -> aiohttp.web.Response:
        body = await request.read()
        return aiohttp.web.Response(text=f"{request.host} {request.path} {len(body)}\n")

    app = aiohttp.web.Application(client_max_size=1 << 30)
    app.router.add_route("*", "/{path:.*}", answer)
    runner = aiohttp.web.AppRunner(app)
    await runner.setup()
    await aiohttp.web.TCPSite(runner, "127.0.0.1", 0, ssl_context=tls).start()
    try:
        yield f"http{'s' if tls else ''}://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def test_a_service_of_the_caller_has_a_name_inside(sandbox: Sandbox) -> None:
    before = await sandbox.files.read("/etc/hosts")
    async with model() as url:
        async with sandbox.expose(url, name="model") as address:
            assert address == "http://model"
            result = await sandbox.run_shell(
                f"curl -sS {address}/v1/chat; curl -sS {address}/a {address}/b", check=True
            )
            assert result.text == "model /v1/chat 0\nmodel /a 0\nmodel /b 0\n"
            upload = "head -c 5000000 /dev/zero | curl -sS --data-binary @- -H Expect: http://model/up"
            assert (await sandbox.run_shell(upload, check=True)).text == "model /up 5000000\n"
            others = "for i in $(seq 20); do curl -sS http://model/$i & done; wait"
            assert len((await sandbox.run_shell(others, check=True)).text.splitlines()) == 20
        gone = await sandbox.run_shell("curl -sS http://model/")
        assert gone.exit_code == 6, gone
    assert await sandbox.files.read("/etc/hosts") == before


async def test_tls_is_spoken_on_this_side(sandbox: Sandbox, tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    ask = "curl -sS --data-binary @/etc/passwd http://model/up"
    size = len(await sandbox.files.read("/etc/passwd"))
    async with model(authority.server("IP:127.0.0.1")) as url:
        assert url.startswith("https://")
        async with sandbox.expose(url, name="model", ssl=authority.client()) as address:
            assert address == "http://model"
            assert (await sandbox.run_shell(ask, check=True)).text == f"model /up {size}\n"
        async with sandbox.expose(url, name="model"):
            refused = await sandbox.run_shell(ask)
            assert refused.exit_code in (52, 56), "an authority that nobody named is not trusted"
        async with sandbox.expose(url.replace("127.0.0.1", "localhost"), name="model", ssl=authority.client()):
            refused = await sandbox.run_shell(ask)
            assert refused.exit_code in (52, 56), "the certificate is of another name"
    with pytest.raises(InvalidRequest, match="https"):
        sandbox.expose("http://127.0.0.1:9", name="model", ssl=authority.client())


async def test_names_are_no_change_of_the_sandbox(sandbox: Sandbox) -> None:
    async def changed() -> dict[bytes, Change]:
        return {one.path: one for one in (await sandbox.changes()).changes if one.path.startswith(b"etc")}

    async with sandbox.expose("http://127.0.0.1:9", name="one"), sandbox.expose("http://127.0.0.1:9", name="two"):
        assert await changed() == {}
        assert (await sandbox.changes(max_bytes=0)).changes == ()
    assert await changed() == {}, "nor is the file that is as it was"
    async with sandbox.expose("http://127.0.0.1:9", name="one"):
        await sandbox.run_shell("echo 10.0.0.1 mine >> /etc/hosts", check=True)
        found = await changed()
        assert set(found) == {b"etc", b"etc/hosts"} or set(found) == {b"etc/hosts"}
        data = found[b"etc/hosts"].data
        assert data is not None and data.endswith(b"10.0.0.1 mine\n") and b"dsec" not in data
        assert found[b"etc/hosts"].size == len(data)


async def test_a_file_that_the_sandbox_had_changed_stays_its_change(sandbox: Sandbox) -> None:
    await sandbox.run_shell("echo 10.0.0.1 mine >> /etc/hosts", check=True)
    before = {one.path: one for one in (await sandbox.changes()).changes}
    async with sandbox.expose("http://127.0.0.1:9", name="one"):
        assert {one.path: one for one in (await sandbox.changes()).changes} == before
    assert {one.path: one for one in (await sandbox.changes()).changes} == before


async def test_names_share_a_port_and_are_unique(sandbox: Sandbox) -> None:
    async with model() as url, sandbox.expose(url, name="one"), sandbox.expose(f"{url}/v1", name="two") as two:
        assert two == "http://two/v1"
        text = (await sandbox.run_shell("curl -sS http://one/x http://two/y", check=True)).text
        assert text == "one /x 0\ntwo /y 0\n"
        with pytest.raises(Conflict, match="one"):
            async with sandbox.expose(url, name="one", port=81):
                pass
        async with sandbox.expose(url, name="api.example.com", port=8080) as dotted:
            assert dotted == "http://api.example.com:8080"
            assert "api.example.com:8080 /" in (await sandbox.run_shell(f"curl -sS {dotted}/")).text
    for name in ("", "Model", "a b", "a/b", "-x", "x-", "127.0.0.1", "7", "localhost", "a..b", "é", "x" * 64, "a\nb"):
        with pytest.raises(InvalidRequest):
            async with sandbox.expose("http://127.0.0.1:9", name=name):
                pass
    for wrong in ("", "model", "ftp://x", "http://", "http://u:p@x", "tcp://x", "http://x:99999"):
        with pytest.raises(InvalidRequest):
            sandbox.expose(wrong, name="model")


async def test_services_are_reached_beside_the_proxy(client: DSecClient) -> None:
    """With network rules, programs inside are told of a proxy: names of services are none of its business."""
    args = DSecContainerRunArgs(BASE, network_rules={"example.com": True})
    async with client.run_container(args) as sandbox, model() as url, sandbox.expose(url, name="model"):
        result = await sandbox.run_shell("env | grep -c http_proxy; curl -sS http://model/", check=True)
        assert result.text == "1\nmodel / 0\n"


async def test_a_port_that_is_taken_inside_is_a_conflict(inside: Sandbox) -> None:
    """The server listens on every address."""
    with pytest.raises(Conflict, match=str(HTTP)):
        async with inside.expose("http://127.0.0.1:9", name="model", port=HTTP):
            pass
    assert b"model" not in await inside.files.read("/etc/hosts")


async def test_an_upstream_that_is_not_there_resets(sandbox: Sandbox) -> None:
    async with sandbox.expose(f"tcp://127.0.0.1:{unused_port()}", name="nobody", port=80):
        result = await sandbox.run_shell("curl -sS -m 20 http://nobody/")
        assert result.exit_code in (52, 56), result


def unused_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


# -- ends and hostility ------------------------------------------------------------------------------------------------


async def test_the_end_of_the_sandbox_ends_everything(client: DSecClient) -> None:
    async with model() as url, client.run_container(DSecContainerRunArgs(BASE)) as sandbox:
        await serve(sandbox)
        async with sandbox.forward(ECHO) as local, sandbox.expose(url, name="model"):
            async with connection(local) as (reader, writer), asyncio.timeout(DEADLINE):
                writer.write(b"open")
                assert await reader.readexactly(4) == b"open"
                await sandbox.stop()
                with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
                    await reader.readexactly(1)
                with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
                    async with connection(local) as (late, _):
                        await late.readexactly(1)
        with pytest.raises(SandboxUnavailable):
            async with sandbox.expose(url, name="model"):
                pass


async def test_a_hostile_inside(sandbox: Sandbox) -> None:
    """Floods of connections, resets and silence at an exposed service: others go on, and afterwards so does it."""
    await sandbox.files.write("/srv/flood.py", FLOOD)
    async with model() as url, sandbox.expose(url, name="model"):
        flood = await sandbox.start(["python3", "/srv/flood.py"])
        async with asyncio.timeout(60):
            async for event in flood.events():
                assert isinstance(event, Stdout), event
                if b"open" in event.data:
                    break
            assert (await sandbox.run_shell("echo here")).text == "here\n"
            await flood.signal("KILL")
            await flood.wait()
            for _ in range(3):
                result = await sandbox.run_shell("curl -sS -m 20 http://model/after", check=True)
                assert result.text == "model /after 0\n"


FLOOD = """
import resource, socket, struct
resource.setrlimit(resource.RLIMIT_NOFILE, (4096, 4096))
for _ in range(500):  # storms
    s = socket.create_connection(("model", 80), 30)
    s.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    s.close()
held = []
for _ in range(700):  # more than are let through, never read
    s = socket.socket()
    s.settimeout(0.05)
    try:
        s.connect(("model", 80))
        s.sendall(b"GET /" + b"x" * 1000)
    except OSError:
        pass
    held.append(s)
print("open", len(held), flush=True)
import time
time.sleep(600)
"""


# -- life around them --------------------------------------------------------------------------------------------------


async def test_an_open_connection_is_activity(client: DSecClient) -> None:
    args = DSecContainerRunArgs(BASE, ttl_running_stop=1)
    async with client.run_container(args) as sandbox:
        await serve(sandbox)
        async with sandbox.forward(ECHO) as url, connection(url) as (reader, writer), asyncio.timeout(DEADLINE):
            for number in range(5):
                writer.write(b"x")
                assert await reader.readexactly(1) == b"x", number
                await asyncio.sleep(0.5)  # longer together than the sandbox may idle
        async with asyncio.timeout(DEADLINE):
            while (await sandbox.info()).reason is None:
                await asyncio.sleep(0.05)
        assert (await sandbox.info()).reason is Reason.TTL_IDLE


async def test_a_paused_sandbox_is_resumed_by_a_connection(inside: Sandbox) -> None:
    await inside.pause()
    async with inside.forward(ECHO) as url:
        assert await asyncio.wait_for(echoed(url, b"awake"), DEADLINE) == b"awake"
    assert (await inside.info()).state is State.RUNNING


async def test_an_answer_that_breaks_off_is_a_reset_here(inside: Sandbox) -> None:
    """Without a length half an answer looks like a whole one when its connection just ends."""
    async with asyncio.timeout(DEADLINE), AsyncExitStack() as stack:
        async with inside.forward(ECHO) as url:
            reader, writer = await stack.enter_async_context(connection(url))
            writer.write(b"half")
            assert await reader.readexactly(4) == b"half"
        with pytest.raises(ConnectionResetError):
            await reader.read(1)


async def test_who_is_lost_with_an_exposed_name_wakes_nobody(sandbox: Sandbox) -> None:
    before = await sandbox.files.read("/etc/hosts")
    async with model() as url:
        exposed = sandbox.expose(url, name="model")
        await exposed.__aenter__()
        await sandbox.pause()
        assert exposed._serving is not None
        exposed._serving.cancel()
        await asyncio.wait((exposed._serving,))
        async with sandbox.expose(url, name="other"):  # resumes, behind what the loss had to do
            hosts = b""
            async with asyncio.timeout(DEADLINE):
                while b"model" in (hosts := await sandbox.files.read("/etc/hosts")):
                    await asyncio.sleep(0.02)
            assert b"other" in hosts
    assert await sandbox.files.read("/etc/hosts") == before


@pytest.fixture
def endpoint(store: LayerStore) -> Iterator[embedded.Endpoint]:
    """A platform whose processes are started again when they die."""
    state = Path(tempfile.mkdtemp(prefix="dsec-", dir="/var/tmp"))
    try:
        yield embedded.up(state, port=0, store=store.root)
    finally:
        embedded.down(state)
        shutil.rmtree(state)


async def test_an_api_server_that_dies(endpoint: embedded.Endpoint) -> None:
    """Open connections break; the same block carries new ones, both ways, when it is back."""
    key = Path(endpoint.key_file).read_text().strip()
    async with DSecClient(endpoint.url, key) as client, model() as service, asyncio.timeout(90):
        async with client.run_container(DSecContainerRunArgs(BASE)) as sandbox:
            await serve(sandbox)
            async with sandbox.forward(ECHO) as url, sandbox.expose(service, name="model"):
                async with connection(url) as (reader, writer):
                    writer.write(b"x")
                    assert await reader.readexactly(1) == b"x"
                    [pid] = [p.pid for p in embedded.status(endpoint.state).processes if p.role == "apiserver"]
                    assert pid is not None
                    os.kill(pid, signal.SIGKILL)
                    with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
                        await reader.readexactly(1)
                assert await echoed(url, b"again") == b"again", "a new connection waits for the service"
                while (await sandbox.run_shell("curl -sS -m 5 http://model/again")).text != "model /again 0\n":
                    await asyncio.sleep(0.1)


async def test_a_loss_wakes_no_paused_sandbox(endpoint: embedded.Endpoint) -> None:
    """Whoever serves a name makes it anew after a loss; the sandbox that sleeps meanwhile has it when somebody wakes it."""
    key = Path(endpoint.key_file).read_text().strip()
    async with DSecClient(endpoint.url, key) as client, model() as service, asyncio.timeout(90):
        async with client.run_container(DSecContainerRunArgs(BASE)) as sandbox:
            await serve(sandbox)
            exposed, left = sandbox.expose(service, name="model"), sandbox.expose(service, name="left")
            await exposed.__aenter__()
            await left.__aenter__()
            for role in ("apiserver", "edge"):
                await sandbox.pause()
                before = exposed._control, left._control
                [pid] = [p.pid for p in embedded.status(endpoint.state).processes if p.role == role]
                assert pid is not None
                os.kill(pid, signal.SIGKILL)
                while exposed._control is before[0] or left._control is before[1]:  # asked for anew
                    await asyncio.sleep(0.02)
                assert (await sandbox.info()).state is State.PAUSED
                if role == "edge":
                    await asyncio.wait_for(left.__aexit__(None, None, None), 5)
                    assert (await sandbox.info()).state is State.PAUSED, (
                        "taking back what it does not have wakes nobody"
                    )
                while (await sandbox.run_shell("curl -sS -m 5 http://model/again")).text != "model /again 0\n":
                    await asyncio.sleep(0.1)
            assert b"left" not in await sandbox.files.read("/etc/hosts")
            await exposed.__aexit__(None, None, None)


async def test_the_command_line(inside: Sandbox, platform: embedded.Endpoint) -> None:
    dsec = command_line(platform)
    with dsec.start("forward", inside.id, str(ECHO), "--json") as process:
        assert process.stdout is not None
        told = json.loads(await asyncio.to_thread(process.stdout.readline))
        url = LocalUrl.of(told["host"], told["port"])
        assert await asyncio.wait_for(echoed(url, b"hello"), DEADLINE) == b"hello"
        process.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(process.wait, DEADLINE) == 143
    for wrong in ("x", "0", "1:70000", ":1"):
        assert dsec("forward", inside.id, wrong).code == 2
