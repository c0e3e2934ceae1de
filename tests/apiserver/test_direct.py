"""Requests that are answered without ASGI, and what is unusual about connections that carry them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from urllib.parse import urlsplit

import pytest
from starlette.routing import Match, Route
from starlette.types import Scope

from dsec.apiserver.direct import MAX_BODY, find
from dsec.apiserver.routes import OPERATIONS

from .fake_edge import FakeEdge
from .serving import KEY

Pipe = tuple[asyncio.StreamReader, asyncio.StreamWriter]
Answer = tuple[int, dict[str, str], bytes]


@pytest.fixture
async def pipe(url: str) -> AsyncIterator[Pipe]:
    where = urlsplit(url)
    assert where.hostname is not None and where.port is not None
    async with asyncio.timeout(20):
        reader, writer = await asyncio.open_connection(where.hostname, where.port)
        yield reader, writer
        writer.close()


def request(method: str, path: str, body: bytes = b"", *lines: str, version: str = "1.1") -> bytes:
    head = [f"{method} {path} HTTP/{version}", "Host: x", f"Authorization: Bearer {KEY}", *lines]
    if body or method == "POST":
        head.append(f"Content-Length: {len(body)}")
    return "\r\n".join([*head, "", ""]).encode() + body


async def answer(pipe: Pipe) -> Answer:
    head = (await pipe[0].readuntil(b"\r\n\r\n")).decode().split("\r\n")
    headers = dict(line.split(": ", 1) for line in head[1:-2])
    if headers.get("transfer-encoding") != "chunked":
        return int(head[0].split()[1]), headers, await pipe[0].readexactly(int(headers["content-length"]))
    body = b""
    while size := int(await pipe[0].readline(), 16):
        body += (await pipe[0].readexactly(size + 2))[:-2]
    await pipe[0].readline()
    return int(head[0].split()[1]), headers, body


async def test_the_router_would_find_the_same() -> None:
    routes = [(Route(o.path, lambda _: None, methods=[o.method]), o) for o in OPERATIONS]
    found = 0
    for method in ("GET", "POST", "PUT", "DELETE", "HEAD"):
        for path in (
            "/v1/sandboxes", "/v1/sandboxes/", "/v1/sandboxes/sb-e-000000000000", "/v1/sandboxes/sb-e-000000000000/",
            "/v1/sandboxes/x/exec", "/v1/sandboxes/x/exec/", "/v1/sandboxes//exec", "/v1/sandboxes/x/y/exec",
            "/v1/sandboxes/x/files/stat", "/v1/sandboxes/x/files",
            "/v1/sandboxes/x/processes",
            "/v1/sandboxes/x/files/list", "/v1/sandboxes/x/files/archive", "/v1/sandboxesx/x", "/v1/sandboxes/x%2Fexec",
            "/v1/sandboxes/stop", "/v1/layers", "/",
        ):  # fmt: skip
            direct = find(method.encode(), path.encode())
            if direct is None:
                continue
            found += 1
            scope: Scope = {"type": "http", "method": method, "path": path, "root_path": "", "headers": []}
            matched = ((route.matches(scope), operation) for route, operation in routes)
            first = next(
                (child["path_params"], operation.handler)
                for (match, child), operation in matched
                if match is Match.FULL
            )
            assert first == (direct[1], direct[0])
    assert found == 13


async def test_one_connection_takes_all_kinds_in_turn(pipe: Pipe, edge: FakeEdge) -> None:
    pipe[1].write(request("POST", "/v1/sandboxes", b'{"args":{"container_image":"debian@12"}}'))
    status, headers, body = await answer(pipe)
    assert status == 201 and headers["x-dsec-incarnation"] == "1" and headers["x-request-id"].startswith("rq-")
    id = body.decode().split('"')[3]
    path = f"/v1/sandboxes/{id}"
    pipe[1].write(request("GET", "/healthz"))
    assert (await answer(pipe))[0] == 200
    pipe[1].write(request("POST", f"{path}/exec", b'{"command":["echo","a"],"exec_id":"one"}'))
    status, headers, body = await answer(pipe)
    assert status == 200 and b'"stdout":"YQo="' in body and headers["content-type"] == "application/json"
    pipe[1].write(request("GET", f"{path}/files/stat?path=/nothing&follow=0"))
    status, headers, body = await answer(pipe)
    assert status == 404 and headers["x-request-id"].encode() in body and id.encode() in body
    pipe[1].write(request("DELETE", path))
    assert (await answer(pipe))[2] == b"{}"
    assert edge.boxes[id].state.value == "stopped"


async def test_pipelined_requests_are_answered_in_turn(pipe: Pipe) -> None:
    create = request("POST", "/v1/sandboxes", b'{"args":{"container_image":"debian@12"}}')
    pipe[1].write(create + request("GET", "/healthz") + create + create)
    answers = [await answer(pipe) for _ in range(4)]
    assert [status for status, _, _ in answers] == [201, 200, 201, 201]
    assert len({body for _, _, body in answers}) == 4


async def test_a_burst_is_a_stream_here_too(pipe: Pipe) -> None:
    for _ in range(2):
        pipe[1].write(request("POST", "/v1/sandboxes", b'{"args":{"container_image":"debian@12"},"count":3}'))
        status, headers, body = await answer(pipe)
        assert status == 200 and headers["content-type"] == "application/x-ndjson" and len(body.splitlines()) == 3
        assert headers["x-request-id"].startswith("rq-")


async def test_a_burst_whose_caller_leaves_is_cancelled(pipe: Pipe, edge: FakeEdge) -> None:
    before = edge.cancelled
    edge.hold_creation = asyncio.Event()
    try:
        calls = edge.calls.count("sandbox.create_many")
        pipe[1].write(request("POST", "/v1/sandboxes", b'{"args":{"container_image":"debian@12"},"count":2}'))
        while edge.calls.count("sandbox.create_many") == calls:
            await asyncio.sleep(0.01)
        pipe[1].close()
        while edge.cancelled < before + 2:
            await asyncio.sleep(0.01)
    finally:
        edge.hold_creation = None


async def test_bodies_in_pieces_and_large_ones(pipe: Pipe) -> None:
    whole = request("POST", "/v1/sandboxes", b'{"args":{"labels":{"a":"' + b"x" * MAX_BODY + b'"}}}')
    small = request("POST", "/v1/sandboxes", b'{"args":{"labels":{"a":"b"}}}')
    for raw in (whole, small):
        for start, end in ((0, 20), (20, len(raw) - 9), (len(raw) - 9, len(raw))):
            pipe[1].write(raw[start:end])
            await pipe[1].drain()
            await asyncio.sleep(0)
        assert (await answer(pipe))[0] == 201
    pipe[1].write(
        request("POST", "/v1/sandboxes", b"", "Transfer-Encoding: chunked").replace(b"Content-Length: 0\r\n", b"")
    )
    pipe[1].write(b"2\r\n{}\r\n0\r\n\r\n")
    assert (await answer(pipe))[0] == 201


@pytest.mark.parametrize(("version", "line"), [("1.1", "Connection: close"), ("1.0", "X-None: 1")])
async def test_connections_close_when_asked(pipe: Pipe, version: str, line: str) -> None:
    pipe[1].write(request("GET", "/v1/sandboxes/sb-fake-000000000000", b"", line, version=version))
    status, headers, _ = await answer(pipe)
    assert status == 404 and headers["connection"] == "close"
    assert await pipe[0].read() == b""


async def test_keys_are_asked_for(pipe: Pipe) -> None:
    pipe[1].write(request("DELETE", "/v1/sandboxes/sb-fake-000000000000").replace(KEY.encode(), b"x" * len(KEY)))
    status, headers, _ = await answer(pipe)
    assert status == 401 and headers["www-authenticate"] == "Bearer"
