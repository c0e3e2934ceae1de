"""Silent, slow and many connections: they give way, and nobody else notices."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

import dsec
from tests.apiserver.fake_edge import FakeEdge
from tests.apiserver.serving import DEADLINE_S, KEY, apiserver

MOST = 64
HEADER_S = 0.6
ARGS = dsec.DSecContainerRunArgs("debian@12")


@pytest.fixture
async def edge(tmp_path: Path) -> AsyncIterator[FakeEdge]:
    async with FakeEdge(tmp_path) as edge:
        yield edge


@pytest.fixture
async def port(tmp_path: Path, edge: FakeEdge) -> AsyncIterator[int]:
    bounds = ("--max-connections", str(MOST), "--header-timeout", str(HEADER_S))
    async with apiserver(tmp_path, edge, arguments=bounds) as url:
        yield int(url.rpartition(":")[2])


async def connect(port: int, data: bytes = b"") -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(data)
    return reader, writer


async def ended(reader: asyncio.StreamReader) -> bytes:
    """What came until the server closed it."""
    async with asyncio.timeout(DEADLINE_S):
        try:
            return await reader.read()
        except ConnectionResetError:
            return b""


@pytest.mark.parametrize("said", [b"", b"GET /healthz HTTP/1.1\r\nhost: x\r\nx-slow: "])
async def test_headers_that_do_not_come_end_the_connection(port: int, said: bytes) -> None:
    reader, writer = await connect(port, said)
    answer = await ended(reader)
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 408 ") and json.loads(body)["error"]["kind"] == "timeout"
    writer.close()


async def test_a_byte_now_and_then_is_not_in_time(port: int) -> None:
    reader, writer = await connect(port, b"GET /healthz HTTP/1.1\r\n")

    async def drip() -> None:
        while True:
            writer.write(b"x: y\r\n")
            await asyncio.sleep(0.05)

    dripping = asyncio.create_task(drip())
    assert (await ended(reader)).startswith(b"HTTP/1.1 408 ")
    dripping.cancel()
    writer.close()


async def test_a_connection_that_is_kept_for_the_next_request_is_not_late(port: int) -> None:
    reader, writer = await connect(port, b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n")
    for _ in range(2):
        assert (await asyncio.wait_for(reader.readline(), DEADLINE_S)).startswith(b"HTTP/1.1 200")
        length = 0
        while (line := await reader.readline()) != b"\r\n":
            if line.lower().startswith(b"content-length:"):
                length = int(line.split(b":")[1])
        await reader.readexactly(length)
        await asyncio.sleep(2 * HEADER_S)
        writer.write(b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n")
    writer.close()


async def test_the_rest_of_a_refused_body_is_no_header_and_must_come(tmp_path: Path, edge: FakeEdge) -> None:
    """It was answered in the middle: what still comes of it is taken, and when nothing comes the connection ends."""
    async with apiserver(tmp_path, edge, arguments=("--body-timeout", str(HEADER_S))) as url:
        head = "POST /v1/sandboxes/sb-fake-000000000000/ttl HTTP/1.1\r\nhost: x\r\n"
        head += f"authorization: Bearer {KEY}\r\ncontent-length: 4000000\r\n\r\n"
        reader, writer = await connect(int(url.rpartition(":")[2]), head.encode())
        writer.write(bytes(2_000_000))
        assert (await asyncio.wait_for(reader.readline(), DEADLINE_S)).startswith(b"HTTP/1.1 413 ")
        assert b" 431 " not in await ended(reader)
        writer.close()


async def test_many_silent_connections_starve_nobody(port: int) -> None:
    async with dsec.DSecClient(f"http://127.0.0.1:{port}", KEY) as client, client.run_container(ARGS) as sandbox:
        running = asyncio.create_task(sandbox.run_shell("sleep 1.5; echo done"))
        opened = []
        for number in range(10 * MOST):
            opened.append(await connect(port, b"POST /v1/sandboxes HTTP/1.1\r\n" if number % 2 else b""))
            if number % MOST == 0:
                assert (await sandbox.run_shell("echo hi")).text == "hi\n"
        assert (await running).text == "done\n", "a request that is at work is not cut off"
        for reader, writer in opened:
            await ended(reader)
            writer.close()
        assert (await sandbox.run_shell("echo hi")).text == "hi\n"


async def test_when_all_are_at_work_the_next_one_is_told(port: int, edge: FakeEdge) -> None:
    async with dsec.DSecClient(f"http://127.0.0.1:{port}", KEY) as client, client.run_container(ARGS) as sandbox:
        body = json.dumps({"line": "c2xlZXAgNjAw", "exec_id": "ID", "wait_s": DEADLINE_S})  # sleep 600
        head = f"POST /v1/sandboxes/{sandbox.id}/exec HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {KEY}\r\n"
        busy = []
        for number in range(MOST):
            text = body.replace("ID", f"ex-{number}")
            busy.append(await connect(port, f"{head}content-length: {len(text)}\r\n\r\n{text}".encode()))
        async with asyncio.timeout(DEADLINE_S):
            while edge.calls.count("exec") < MOST:
                await asyncio.sleep(0.01)

        async def refused() -> bytes:
            reader, writer = await connect(port)
            answer = await ended(reader)
            writer.close()
            return answer

        answer = await refused()
        assert answer.startswith(b"HTTP/1.1 503 ") and b'"capacity"' in answer and b'"retryable":true' in answer
        for command in edge.boxes[sandbox.id].commands.values():  # not earlier: one that ends makes room
            os.killpg((await command.started()).pid, signal.SIGKILL)
        for reader, writer in busy:
            assert (await asyncio.wait_for(reader.readline(), DEADLINE_S)).startswith(b"HTTP/1.1 200")
            writer.close()
