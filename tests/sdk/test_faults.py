"""What users see when processes between them and the sandbox die, and what the sandbox sees of it: nothing."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from dsec import ConnectionLost, DSecClient, DSecContainerRunArgs, Exit, State, Stdout
from tests.apiserver.fake_edge import FakeEdge
from tests.apiserver.serving import KEY, apiserver, free_port

BASE = DSecContainerRunArgs("debian@12")


@pytest.fixture
async def edge(tmp_path: Path) -> AsyncIterator[FakeEdge]:
    async with FakeEdge(tmp_path) as edge:
        yield edge


async def test_commands_survive_the_apiserver(edge: FakeEdge) -> None:
    port = free_port()
    async with apiserver(edge.directory, edge, port=port) as url:
        client = DSecClient(url, KEY, request_timeout=20)
        sandbox = await client.run(BASE)
        running = asyncio.ensure_future(sandbox.run_shell("echo one; until test -e go; do sleep 0.05; done; echo two"))
        process = await sandbox.start("echo a; until test -e go; do sleep 0.05; done; echo b")
        events = process.events()
        assert await anext(events) == Stdout(b"a\n", 0)
        while edge.runs != 2:
            await asyncio.sleep(0.01)
    (edge.boxes[sandbox.id].root / "go").touch()
    async with apiserver(edge.directory, edge, port=port):
        assert (await running).text == "one\ntwo\n"
        rest = [event async for event in events]
        assert rest[0] == Stdout(b"b\n", 2) and isinstance(rest[-1], Exit)
        assert edge.runs == 2, "nothing ran twice"
        await client.close()


async def test_commands_survive_the_edge(edge: FakeEdge) -> None:
    async with apiserver(edge.directory, edge) as url, DSecClient(url, KEY, request_timeout=20) as client:
        sandbox = await client.run(BASE)
        running = asyncio.ensure_future(sandbox.run_shell("echo one; until test -e go; do sleep 0.05; done; echo two"))
        while not edge.runs:
            await asyncio.sleep(0.01)
        await edge.silence()
        (edge.boxes[sandbox.id].root / "go").touch()
        await edge.listen()
        assert (await running).text == "one\ntwo\n"
        assert edge.runs == 1


async def test_a_lost_reply_makes_nothing_twice(edge: FakeEdge) -> None:
    async with apiserver(edge.directory, edge) as url, DSecClient(url, KEY, request_timeout=20) as client:
        edge.lose_replies.add("sandbox.create")
        sandbox = await client.run(BASE)
        assert list(edge.boxes) == [sandbox.id]
        edge.lose_replies.add("exec")
        assert (await sandbox.run_shell("echo x >> log; cat log")).text == "x\n"
        assert edge.runs == 1
        edge.lose_replies.add("sandbox.create_many")
        async with client.run_many(BASE, count=5) as burst:
            assert sorted([outcome.index async for outcome in burst]) == [0, 1, 2, 3, 4]
        assert len(edge.boxes) == 6


async def test_what_does_harm_twice_is_not_repeated(edge: FakeEdge) -> None:
    async with apiserver(edge.directory, edge) as url, DSecClient(url, KEY, request_timeout=20) as client:
        sandbox = await client.run(BASE)
        process = await sandbox.start("trap 'echo x >> log' USR1; : > ready; until test -e go; do sleep 0.05; done")
        while not await sandbox.files.exists("ready"):
            await asyncio.sleep(0.01)
        edge.lose_replies.add("exec.signal")
        with pytest.raises(ConnectionLost) as caught:
            await process.signal("USR1")
        assert caught.value.retryable
        await sandbox.files.write("go", b"")
        await process.wait()
        assert await sandbox.files.read("log") == b"x\n"
        edge.lose_replies.add("fs.remove")
        with pytest.raises(ConnectionLost):
            await sandbox.files.remove("log")
        assert not await sandbox.files.exists("log")


class Gate:
    """Lets the first creations pass; the others wait until it is opened."""

    def __init__(self, passing: int) -> None:
        self._passing = passing
        self.opened = asyncio.Event()

    async def wait(self) -> None:
        self._passing -= 1
        if self._passing < 0:
            await self.opened.wait()


async def test_a_burst_that_breaks_asks_only_for_what_is_missing(edge: FakeEdge) -> None:
    port = free_port()
    gate = Gate(2)
    edge.hold_creation = gate  # type: ignore[assignment]
    async with apiserver(edge.directory, edge, port=port) as url:
        client = DSecClient(url, KEY, request_timeout=20)
        burst = client.run_many(BASE, count=5)
        await burst.__aenter__()
        taken = [await anext(burst) for _ in range(2)]
        for outcome in taken:
            await outcome.sandbox.stop()
    gate.opened.set()
    async with apiserver(edge.directory, edge, port=port):
        rest = [outcome async for outcome in burst]
        assert sorted(outcome.index for outcome in taken + rest) == [0, 1, 2, 3, 4]
        assert all(outcome.ok for outcome in rest)
        await burst.__aexit__(None, None, None)
        alive = [info.id async for info in client.list(states=[State.CREATING, State.RUNNING])]
        assert sorted(alive) == sorted(outcome.sandbox.id for outcome in rest if outcome.claimed) == []
        assert len(edge.boxes) == 2 + 3 + 3, "two that were used, three that were cut off, three again"
        await client.close()


async def test_a_burst_of_one_that_is_left_is_stopped_by_its_key(edge: FakeEdge) -> None:
    async with apiserver(edge.directory, edge) as url, DSecClient(url, KEY) as client:
        async with client.run_many(BASE, count=1):
            while not any(box.args.idempotency_key for box in edge.boxes.values()):
                await asyncio.sleep(0.01)
        keys = [box.args.idempotency_key or "" for box in edge.boxes.values()]
        assert len(keys) == 1 and keys[0].startswith("bu-") and keys[0].endswith("/0")
        assert [info async for info in client.list(states=[State.RUNNING])] == []


class Clock:
    """The time module as a module under test sees it, with hours that pass at once."""

    def __init__(self) -> None:
        self.ahead = 0.0

    def monotonic(self) -> float:
        return time.monotonic() + self.ahead


async def test_a_silent_command_is_followed_across_a_restart(edge: FakeEdge, monkeypatch: pytest.MonkeyPatch) -> None:
    port, clock = free_port(), Clock()
    monkeypatch.setattr("dsec.sdk.process.time", clock)
    async with apiserver(edge.directory, edge, port=port) as url:
        client = DSecClient(url, KEY, request_timeout=20)
        sandbox = await client.run(BASE)
        process = await sandbox.start("echo a; until test -e go; do sleep 0.05; done; echo b")
        events = process.events()
        assert await anext(events) == Stdout(b"a\n", 0)
        clock.ahead = 3600
        following = asyncio.ensure_future(anext(events))
        while edge.calls.count("exec.attach") < 1:
            await asyncio.sleep(0.01)
    (edge.boxes[sandbox.id].root / "go").touch()
    async with apiserver(edge.directory, edge, port=port):
        assert await following == Stdout(b"b\n", 2)
        await client.close()


async def test_a_creation_that_took_long_is_still_found_after_a_restart(
    edge: FakeEdge, monkeypatch: pytest.MonkeyPatch
) -> None:
    port, clock = free_port(), Clock()
    monkeypatch.setattr("dsec.sdk.transport.time", clock)
    edge.hold_creation = asyncio.Event()
    async with apiserver(edge.directory, edge, port=port) as url:
        client = DSecClient(url, KEY, request_timeout=20)
        await client.open()
        creation = asyncio.ensure_future(client.run(BASE, timeout=600))
        while not edge.boxes:
            await asyncio.sleep(0.01)
        clock.ahead = 300
    edge.hold_creation.set()
    async with apiserver(edge.directory, edge, port=port):
        assert (await (await creation).info()).state is State.RUNNING
        await client.close()


async def test_without_an_edge_errors_are_typed_and_quick(edge: FakeEdge) -> None:
    async with apiserver(edge.directory, edge) as url:
        async with DSecClient(url, KEY, request_timeout=0.5) as client:
            sandbox = await client.run(BASE)
            await edge.silence()
            started = time.monotonic()
            with pytest.raises(ConnectionLost) as caught:
                await sandbox.info()
            assert caught.value.retryable and "dsec status" in str(caught.value) and caught.value.request_id
            with pytest.raises(ConnectionLost):
                await client.run(BASE)
            assert time.monotonic() - started < 10
            await edge.listen()
            async with asyncio.timeout(10):
                while True:
                    try:
                        assert (await sandbox.info()).state is State.RUNNING
                        break
                    except ConnectionLost:
                        continue


async def test_nobody_there() -> None:
    started = time.monotonic()
    with pytest.raises(ConnectionLost, match="dsec up"):
        await DSecClient(f"http://127.0.0.1:{free_port()}", KEY).open()
    assert time.monotonic() - started < 5, "a service that was never reached is not waited for"


async def test_a_silent_server_meets_the_request_timeout() -> None:
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    server = await asyncio.start_server(silent, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    with pytest.raises(TimeoutError) as caught:
        await DSecClient(f"http://127.0.0.1:{port}", KEY, request_timeout=0.3).open()
    assert isinstance(caught.value, ConnectionLost)
    server.close()


async def test_dead_connections_in_the_pool_are_not_the_users_business(edge: FakeEdge, tmp_path: Path) -> None:
    port = free_port()
    source = tmp_path / "tree"
    source.mkdir()
    (source / "f").write_bytes(bytes(1_000_000))
    client = DSecClient(f"http://127.0.0.1:{port}", KEY, request_timeout=20)
    async with apiserver(edge.directory, edge, port=port):
        sandbox = await client.run(BASE)
        await asyncio.gather(*(sandbox.info() for _ in range(8)))
    async with apiserver(edge.directory, edge, port=port):
        assert [info.id async for info in client.list()] == [sandbox.id]
        assert [line async for line in sandbox.logs()] == ["created"]
        await sandbox.files.upload(source, "/up")
        await sandbox.files.upload(source / "f", "/f")
        assert len((await sandbox.changes()).changes) == 2
        assert (await sandbox.files.download("/up", tmp_path / "down")).bytes == 1_000_000
        await client.close()
