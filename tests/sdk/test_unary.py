"""Small requests, as a server without manners sees them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from urllib.parse import parse_qsl, urlsplit

import pytest

from dsec import ConnectionLost
from dsec.protocol.specs import Created
from dsec.sdk.transport import Target, Transport

WHOLE = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}"
CREATED = b'{"id":"sb-e-1","incarnation":7,"edge":"e","create_ms":1}'


class Server:
    """Gives the next of its answers to each request; None closes the connection instead."""

    def __init__(self, answers: Sequence[bytes | None]) -> None:
        self.answers = list(answers)
        self.requests: list[bytes] = []
        self.connections = 0
        self.url = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length: ")]
                body = await reader.readexactly(int(length[0].split()[1])) if length else b""
                self.requests.append(head + body)
                answer = self.answers.pop(0)
                if answer is None:
                    return
                writer.write(answer)
                if not answer.endswith((b"}", b"0\r\n\r\n")):
                    return
        except asyncio.IncompleteReadError:
            return
        finally:
            writer.close()


@asynccontextmanager
async def talking(*answers: bytes | None) -> AsyncIterator[tuple[Server, Transport]]:
    server = Server(answers)
    listening = await asyncio.start_server(server.serve, "127.0.0.1", 0)
    server.url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
    transport = Transport(f"{server.url}/below/", "key-0123456789abcdef", "default", 1.0)
    try:
        yield server, transport
    finally:
        await transport.close()
        listening.close()


async def test_the_request_is_what_the_session_would_send() -> None:
    async with talking(WHOLE, WHOLE) as (server, transport):
        target = Target("sb-e-1", 7)
        query = {"path_b64": "L2E_Yg==", "user": "a b&c=é"}
        await transport.request("POST", "/v1/x", query=query, body=b"{}", target=target)
        async with transport.stream("POST", "/v1/x", query=query, body=b"{}", target=target) as response:
            await response.read()
        small, whole = (request.split(b"\r\n") for request in server.requests)
        for line in (small[0], whole[0]):
            asked = urlsplit(line.decode().split(" ")[1])
            assert asked.path == "/below/v1/x" and dict(parse_qsl(asked.query)) == query
        assert sorted(line.lower() for line in small[1:]) == sorted(line.lower() for line in whole[1:])
        assert server.connections == 1, "both take their connections from one pool"


async def test_early_hints_and_chunks_are_read_through() -> None:
    chunked = b"HTTP/1.1 201 Created\r\ntransfer-encoding: chunked\r\n\r\n"
    chunked += b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in (CREATED[:9], CREATED[9:])) + b"0\r\n\r\n"
    async with talking(b"HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n" + chunked, WHOLE) as (server, transport):
        assert (await transport.call("POST", "/v1/sandboxes", Created, body=b"{}")).incarnation == 7
        await transport.request("GET", "/v1/x")
        assert server.connections == 1


async def test_an_answer_that_breaks_off_is_asked_for_again() -> None:
    cut = b"HTTP/1.1 200 OK\r\ncontent-length: 20\r\n\r\n{"
    async with talking(cut, WHOLE) as (server, transport):
        assert (await transport.request("POST", "/v1/x", body=b"{}")).body == b"{}"
        assert len(server.requests) == 2
    async with talking(cut) as (server, transport):
        with pytest.raises(ConnectionLost, match="broke off"):
            await transport.request("POST", "/v1/x", body=b"{}", repeat=False)


async def test_a_dead_connection_is_noticed_once_more_only_where_it_does_no_harm() -> None:
    async with talking(WHOLE, None, WHOLE, None, WHOLE, None) as (server, transport):
        await transport.request("PUT", "/v1/x", repeat=False)
        await transport.request("GET", "/v1/x", repeat=False)
        assert [request.split()[0] for request in server.requests] == [b"PUT", b"GET", b"GET"]
        for method, count in (("POST", 4), ("DELETE", 6)):
            with pytest.raises(ConnectionLost):
                await transport.request(method, "/v1/x", body=b"{}", repeat=False)
            assert len(server.requests) == count
            if method == "POST":
                await transport.request("GET", "/v1/x", repeat=False)


async def test_what_is_no_http_is_no_answer() -> None:
    async with talking(b"220 mail.example ESMTP {}") as (_, transport):
        with pytest.raises(ConnectionLost, match="cannot reach"):
            await transport.request("GET", "/v1/x")


async def test_a_path_with_odd_characters_adds_no_header() -> None:
    async with talking(WHOLE) as (server, transport):
        await transport.request("GET", "/v1/x HTTP/1.1\r\nX-Other: 1\r\n\r\n", repeat=False)
        assert b"\nX-Other" not in server.requests[0]


async def test_a_request_that_is_given_up_leaves_no_connection_behind() -> None:
    async with talking(b"HTTP/1.1 103 Early Hints\r\nlink: {}", WHOLE) as (server, transport):
        waiting = asyncio.ensure_future(transport.request("GET", "/v1/x"))
        while not server.requests:
            await asyncio.sleep(0.005)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await transport.request("GET", "/v1/x")
        assert server.connections == 2
