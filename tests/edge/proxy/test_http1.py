"""HTTP/1.1 as it is read: one meaning or none."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsec.edge.proxy import http1
from dsec.edge.proxy.http1 import Body, Framing, Malformed, Request
from dsec.edge.proxy.source import Ended, Source


def source(*pieces: bytes) -> Source:
    rest = list(pieces)

    async def more() -> bytes:
        return rest.pop(0) if rest else b""

    return Source(more)


async def request(data: bytes) -> Request | None:
    return await http1.read_request(source(data))


HEAD = b"GET http://a.com/ HTTP/1.1\r\nHost: a.com\r\n"


async def test_a_request_in_any_pieces() -> None:
    whole = HEAD + b"X-Empty:\r\nX-Space: \t a b \t\r\n\r\nrest"
    for size in (1, 2, 3, 7, 1000):
        reader = source(*(whole[at : at + size] for at in range(0, len(whole), size)))
        found = await http1.read_request(reader)
        assert found == Request(
            "GET", "http://a.com/", 1, ((b"Host", b"a.com"), (b"X-Empty", b""), (b"X-Space", b"a b"))
        )
    assert await http1.read_request(source()) is None


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (HEAD.replace(b"\r\n", b"\n") + b"\n", "LF without CR"),
        (HEAD + b"A: b\n\r\n", "LF without CR"),
        (HEAD + b" folded: x\r\n\r\n", "folded"),
        (HEAD + b"A: b\r\n\tmore\r\n\r\n", "folded"),
        (HEAD + b"Content-Length : 5\r\n\r\n", "malformed header"),
        (HEAD + b"A b: c\r\n\r\n", "malformed header"),
        (HEAD + b": c\r\n\r\n", "malformed header"),
        (HEAD + b"nothing\r\n\r\n", "malformed header"),
        (HEAD + b"A: b\x00c\r\n\r\n", "malformed header"),
        (HEAD + b"A: b\rc\r\n\r\n", "malformed header"),
        (HEAD + b"A\x00: b\r\n\r\n", "malformed header"),
        (HEAD + "Hö: b\r\n\r\n".encode(), "malformed header"),
        (b"GET  http://a.com/ HTTP/1.1\r\n\r\n", "request line"),
        (b"GET http://a.com/ x HTTP/1.1\r\n\r\n", "request line"),
        (b"GET http://a.com/\r\n\r\n", "request line"),
        (b"G\xffT / HTTP/1.1\r\n\r\n", "request line"),
        (b"\r\nGET / HTTP/1.1\r\n\r\n", "request line"),
        (b"GET / HTTP/1.2\r\n\r\n", "request line"),
        (b"GET / http/1.1\r\n\r\n", "request line"),
        (b"GET / HTTP/2.0\r\n\r\n", "only HTTP/1"),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", "only HTTP/1"),
        (HEAD, "cut off"),
        (b"GET /" + b"a" * http1.MAX_REQUEST_HEAD + b" HTTP/1.1\r\n\r\n", "longer"),
        (HEAD + b"a: b\r\n" * 300 + b"\r\n", "header fields"),
    ],
)
async def test_what_is_no_request(data: bytes, why: str) -> None:
    with pytest.raises(Malformed, match=why):
        await request(data)


async def test_a_head_without_end_takes_bounded_memory() -> None:
    asked = 0

    async def more() -> bytes:
        nonlocal asked
        asked += 1
        return b"a" * 1000

    with pytest.raises(Malformed, match="longer"):
        await http1.read_request(Source(more))
    assert asked <= http1.MAX_REQUEST_HEAD / 1000 + 2


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ([("Transfer-Encoding", "chunked"), ("Content-Length", "5")], "both"),
        ([("Content-Length", "5"), ("Content-Length", "5")], "not one number"),
        ([("Content-Length", "5, 5")], "not one number"),
        ([("Content-Length", "+5")], "not one number"),
        ([("Content-Length", "-5")], "not one number"),
        ([("Content-Length", "0x5")], "not one number"),
        ([("Content-Length", "")], "not one number"),
        ([("Content-Length", "5 5")], "not one number"),
        ([("Content-Length", "9" * 20)], "not one number"),
        ([("Content-Length", "５")], "not one number"),
        ([("Transfer-Encoding", "gzip, chunked")], "other than chunked"),
        ([("Transfer-Encoding", "identity")], "other than chunked"),
        ([("Transfer-Encoding", "xchunked")], "other than chunked"),
        ([("Transfer-Encoding", "chunked"), ("transfer-encoding", "chunked")], "other than chunked"),
        ([("Transfer-Encoding", "")], "other than chunked"),
    ],
)
def test_two_ends_of_a_body_are_none(fields: list[tuple[str, str]], why: str) -> None:
    headers = tuple((name.encode(), value.encode()) for name, value in fields)
    with pytest.raises(Malformed, match=why):
        http1.request_body(Request("POST", "/", 1, headers))
    with pytest.raises(Malformed, match=why):
        http1.response_body(http1.Response(200, b"", 1, headers), "GET")


def test_chunked_is_not_of_http_1_0() -> None:
    with pytest.raises(Malformed):
        http1.request_body(Request("POST", "/", 0, ((b"Transfer-Encoding", b"chunked"),)))


async def body(data: bytes, kind: Body) -> bytes:
    return b"".join([piece async for piece in http1.pieces(source(data), kind)])


CHUNKED = Body(Framing.CHUNKED)


@pytest.mark.parametrize(
    "data",
    [b"5\r\nhello\r\n", b"5\r\nhel", b"5\r\nhello0\r\n\r\n", b"5\nhello\r\n0\r\n\r\n", b"5\r\nhello\n0\r\n\r\n", b"g\r\n\r\n",
     b"-5\r\nhello\r\n0\r\n\r\n", b"0x5\r\nhello\r\n0\r\n\r\n", b" 5\r\nhello\r\n0\r\n\r\n", b"\r\n", b"5" * 20 + b"\r\n",
     b"5;" + b"x" * 2000 + b"\r\nhello\r\n0\r\n\r\n", b"5;\x00\r\nhello\r\n0\r\n\r\n", b"0\r\nbad trailer\r\n\r\n",
     b"0\r\n" + b"a: b\r\n" * 4000 + b"\r\n", b"5\r\nhello world\r\n0\r\n\r\n"],
)  # fmt: skip
async def test_broken_chunks(data: bytes) -> None:
    with pytest.raises((Malformed, Ended)):
        await body(data, CHUNKED)


async def test_bodies() -> None:
    assert await body(b"5;ext=1\r\nhello\r\n1 \r\n!\r\n0\r\nTrailer: x\r\n\r\n", CHUNKED) == b"hello!"
    assert await body(b"hello", Body(Framing.LENGTH, 5)) == b"hello"
    assert await body(b"hello", Body(Framing.CLOSE)) == b"hello"
    with pytest.raises(Ended):
        await body(b"hell", Body(Framing.LENGTH, 5))


@given(st.lists(st.binary(min_size=1, max_size=60), max_size=6), st.integers(1, 40))
def test_chunks_round_trip_in_any_pieces(parts: list[bytes], size: int) -> None:
    data = b"".join(map(http1.chunk, parts)) + http1.LAST_CHUNK
    reader = source(*(data[at : at + size] for at in range(0, len(data), size)))

    async def read() -> bytes:
        return b"".join([piece async for piece in http1.pieces(reader, CHUNKED)])

    assert asyncio.new_event_loop().run_until_complete(read()) == b"".join(parts)
    assert not reader.buffer


@given(st.binary(max_size=300))
def test_any_bytes_are_a_request_or_refused(data: bytes) -> None:
    """What is taken is written anew to the same meaning."""

    async def read(data: bytes) -> Request | None:
        try:
            return await request(data)
        except (Malformed, Ended):
            return None

    run = asyncio.new_event_loop().run_until_complete
    for start in (b"", b"GET http://a/ HTTP/1.1\r\n"):
        found = run(read(start + data))
        if found is not None:
            line = f"{found.method} {found.target} HTTP/1.{found.minor}".encode()
            assert run(read(http1.write_head(line, found.headers))) == found


def test_what_stays_on_one_connection() -> None:
    headers = tuple(
        (name, b"x")
        for name in (
            b"Accept",
            b"Keep-Alive",
            b"Proxy-Authorization",
            b"Proxy-Connection",
            b"TE",
            b"Trailer",
            b"Upgrade",
            b"X-Own",
        )
    )
    assert http1.end_to_end((*headers, (b"Connection", b"close, x-own"))) == [(b"Accept", b"x")]
    for fixed in (b"Host", b"content-length", b"Transfer-Encoding", b"Authorization"):
        with pytest.raises(Malformed):
            http1.end_to_end(((b"Connection", b"close, " + fixed),))


async def test_a_value_of_spaces_is_read_in_no_time() -> None:
    value = b" " * 30_000 + b"x"
    async with asyncio.timeout(1):
        found = await request(HEAD + b"A:" + value + b"\r\n\r\n")
    assert found is not None and found.headers[1] == (b"A", b"x")
