"""Long bodies on raw connections: in pieces, in chunks, refused in the middle, left in the middle; and what follows them."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator

import pytest

from dsec.apiserver import records

from .fake_edge import FakeEdge
from .test_direct import Pipe, answer, pipe, request

__all__ = ["pipe"]
MIB = 1 << 20


@pytest.fixture
async def path(pipe: Pipe) -> str:
    pipe[1].write(request("POST", "/v1/sandboxes", b'{"args":{"container_image":"debian@12"}}'))
    return "/v1/sandboxes/" + (await answer(pipe))[2].decode().split('"')[3]


def head(path: str, length: int) -> bytes:
    return request("PUT", path, b"", f"Content-Length: {length}")


async def read(pipe: Pipe, path: str) -> bytes:
    pipe[1].write(request("GET", path))
    status, _, body = await answer(pipe)
    assert status == 200, body
    return body


async def test_a_body_in_uneven_pieces_is_the_file(pipe: Pipe, path: str) -> None:
    data = os.urandom(3 * MIB + 5)
    pipe[1].write(head(f"{path}/files?path=/f", len(data)))
    for start in range(0, len(data), 70_001):
        pipe[1].write(data[start : start + 70_001])
        await pipe[1].drain()
    status, headers, body = await answer(pipe)
    assert status == 201 and body == b'{"size":%d}' % len(data) and headers["x-request-id"].startswith("rq-")
    assert await read(pipe, f"{path}/files?path=/f") == data


async def test_a_body_in_chunks_and_an_empty_one(pipe: Pipe, path: str) -> None:
    pipe[1].write(request("PUT", f"{path}/files?path=/f", b"", "Transfer-Encoding: chunked"))
    for size in (1, 300_000, 7, 2 * MIB):
        pipe[1].write(b"%x\r\n" % size + b"c" * size + b"\r\n")
        await pipe[1].drain()
    pipe[1].write(b"0\r\n\r\n")
    assert (await answer(pipe))[0] == 201
    assert await read(pipe, f"{path}/files?path=/f") == b"c" * (300_008 + 2 * MIB)
    pipe[1].write(head(f"{path}/files?path=/f", 0))
    assert (await answer(pipe))[2] == b'{"size":0}'
    assert await read(pipe, f"{path}/files?path=/f") == b""


async def test_a_refusal_in_the_middle_leaves_a_usable_connection(pipe: Pipe, path: str) -> None:
    size = 8 * MIB
    pipe[1].write(head(f"{path}/files?path=/full", size))

    async def send() -> None:
        for _ in range(size // MIB):
            pipe[1].write(bytes(MIB))
            await pipe[1].drain()

    sending = asyncio.create_task(send())
    status, _, body = await answer(pipe)
    assert status == 507 and b"no_space" in body
    await sending
    assert await read(pipe, "/healthz")
    pipe[1].write(head(f"{path}/files?path=/after", 1) + b"x")
    assert (await answer(pipe))[0] == 201


async def test_requests_behind_a_long_one_wait_their_turn(pipe: Pipe, path: str) -> None:
    data = os.urandom(MIB)
    pipe[1].write(
        head(f"{path}/files?path=/f", len(data))
        + data
        + request("GET", "/healthz")
        + request("GET", f"{path}/files?path=/f")
    )
    assert [(await answer(pipe))[0] for _ in range(2)] == [201, 200]
    assert (await answer(pipe))[2] == data


async def test_who_leaves_in_the_middle_changes_nothing(pipe: Pipe, path: str, edge: FakeEdge, url: str) -> None:
    pipe[1].write(head(f"{path}/files?path=/f", 3) + b"old")
    assert (await answer(pipe))[0] == 201
    root = edge.boxes[path.rpartition("/")[2]].root
    pipe[1].write(head(f"{path}/files?path=/f", 5 * MIB) + bytes(MIB))
    await pipe[1].drain()
    while len(os.listdir(root)) == 1:  # the first of it is on its way
        await asyncio.sleep(0.01)
    pipe[1].close()
    while len(os.listdir(root)) == 2:
        await asyncio.sleep(0.01)
    assert (root / "f").read_bytes() == b"old"


async def test_a_wrong_key_is_told_before_the_body(pipe: Pipe, path: str) -> None:
    from .serving import KEY

    pipe[1].write(head(f"{path}/files?path=/f", MIB).replace(KEY.encode(), b"x" * len(KEY)))
    assert (await answer(pipe))[0] == 401


async def test_signs_of_life(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "SILENCE_S", 0.01)
    more, ended = asyncio.Event(), asyncio.Event()

    async def slow() -> AsyncGenerator[bytes, None]:
        try:
            yield b"first\n"
            await more.wait()
            yield b"second\n"
            await asyncio.Event().wait()
        finally:
            ended.set()

    lines = records.kept_alive(slow())
    assert [await anext(lines), await anext(lines)] == [b"first\n", b"\n"]
    more.set()
    while (line := await anext(lines)) == b"\n":
        pass
    assert line == b"second\n"
    await lines.aclose()
    assert ended.is_set()
