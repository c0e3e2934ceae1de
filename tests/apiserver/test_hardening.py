"""Input that is wrong in every way that JSON, HTTP and a link allow: a typed 4xx, at once, from a process that goes on."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from urllib.parse import urlsplit

import aiohttp
import pytest

from .serving import KEY

_HEADERS = {"Authorization": f"Bearer {KEY}"}
_DEADLINE = aiohttp.ClientTimeout(total=10)
_NOWHERE = "sb-fake-zzzzzzzzzzzz"

BODIES = {
    "no JSON": b"{",
    "trailing bytes": b'{"timeout":1}x',
    "a list": b"[]",
    "null": b"null",
    "not UTF-8": b'{"exec_id":"\xff"}',
    "a lone surrogate": b'{"exec_id":"\\ud800"}',
    "a byte order mark": b"\xef\xbb\xbf{}",
    "NaN": b'{"timeout":NaN}',
    "infinity": b'{"timeout":Infinity}',
    "a number that overflows": b'{"timeout":1e999}',
    "digits without end": b'{"timeout":' + b"9" * 60_000 + b"}",
    "more than 64 bits": b'{"cursor":99999999999999999999999}',
    "a negative number": b'{"command":"true","cursor":-1}',
    "a fraction for a count": b'{"command":"true","cursor":1.5}',
    "text for a number": b'{"command":"true","cursor":"1"}',
    "a number for text": b'{"command":"true","user":1}',
    "an unknown field": b'{"command":"true","nosuch":1}',
    "a key twice": b'{"command":"true","timeout":1,"timeout":2}',
    "a key twice, once escaped": b'{"command":"true","timeout":1,"time\\u006fut":2}',
    "a key twice further down": b'{"command":"true","env":{"A":"1","A":"2"}}',
    "no base64": b'{"command":"true","stdin":"!!!"}',
    "half of base64": b'{"command":"true","stdin":"QQ"}',
    "brackets without end": b"[" * 60_000,
    "objects without end": b'{"env":' * 10_000,
    "deep nesting in a value": b'{"env":{"A":' + b"[" * 20_000 + b"]" * 20_000 + b"}}",
    "quotes without end": b'{"command":"' + b'\\"' * 30_000,
}
JSON_ROUTES = (
    ("POST", "/v1/sandboxes"), ("POST", "/v1/sandboxes/stop"), ("POST", f"/v1/sandboxes/{_NOWHERE}/exec"),
    ("POST", f"/v1/sandboxes/{_NOWHERE}/processes"), ("POST", f"/v1/sandboxes/{_NOWHERE}/ttl"),
    ("POST", f"/v1/sandboxes/{_NOWHERE}/changes"), ("POST", f"/v1/sandboxes/{_NOWHERE}/files/move"),
    ("POST", f"/v1/sandboxes/{_NOWHERE}/files/mkdir"), ("POST", f"/v1/sandboxes/{_NOWHERE}/processes/x/signal"),
)  # fmt: skip


async def _asked(url: str, method: str, target: str, body: bytes = b"", **headers: str) -> tuple[int, str]:
    """Status and kind of the error."""
    async with aiohttp.ClientSession(timeout=_DEADLINE, headers={**_HEADERS, **headers}) as session:
        async with session.request(method, url + target, data=body) as answer:
            found = json.loads(await answer.read())
            return answer.status, found["error"]["kind"] if "error" in found else ""


@pytest.mark.parametrize("what", BODIES)
async def test_a_wrong_body_is_an_invalid_request_everywhere(url: str, what: str) -> None:
    for method, target in JSON_ROUTES:
        for headers in ({}, {"Expect": "100-continue"}):  # by the short way, and by the long one
            started = time.monotonic()
            answer = await _asked(url, method, target, BODIES[what], **headers)
            assert answer == (400, "invalid_request"), f"{target}: {what}"
            assert time.monotonic() - started < 2


QUERIES = (
    "path=/x&offset=-1", "path=/x&offset=1.5", "path=/x&offset=%201", "path=/x&offset=1_0", "path=/x&offset=",
    "path=/x&offset=" + "9" * 19, "path=/x&offset=" + "9" * 6000, "path=/x&offset=%D9%A3", "path=/x&length=1e3",
    "path=/x&length=0x10", "path=/x&offset=1&offset=2", "path=/x&path=/y", "path=/x&nosuch=1", "path_b64=!!!",
    "path_b64=Q", "path=%ff", "path=", "path=a%00b", "", "path=/x&user=a&user=b", "=", "&".join(["path=/x"] * 5000),
    "path=" + "x" * 5000, "path=\u00e9\u20ac",
)  # fmt: skip


@pytest.mark.parametrize("query", QUERIES, ids=range(len(QUERIES)))
async def test_a_wrong_query_is_an_invalid_request(url: str, query: str) -> None:
    if query == "path=\u00e9\u20ac":  # well-formed: the sandbox is what is missing
        assert await _asked(url, "GET", f"/v1/sandboxes/{_NOWHERE}/files?{query}") == (404, "not_found")
        return
    status, kind = await _asked(url, "GET", f"/v1/sandboxes/{_NOWHERE}/files?{query}")
    assert (status, kind) in ((400, "invalid_request"), (400, "file_invalid"))


@pytest.mark.parametrize("value", ["-1", "x", "", "1.0", "9" * 20, "9" * 6000, "\u0663"])
async def test_a_wrong_incarnation_is_an_invalid_request(url: str, value: str) -> None:
    header = {"X-DSec-Incarnation": value}
    assert await _asked(url, "GET", f"/v1/sandboxes/{_NOWHERE}", **header) == (400, "invalid_request")


@pytest.mark.parametrize(
    "id", ["..", "%00", "sb", "x" * 5000, "sb-fake-", "%ff", "sb-nosuch-000000000000", "sb-fake-%0a"]
)
async def test_what_is_no_sandbox_is_not_found(url: str, id: str) -> None:
    for tail in ("", "/processes", "/processes/x"):
        assert (await _asked(url, "GET", f"/v1/sandboxes/{id}{tail}"))[0] in (400, 404)


_AUTH = f"Authorization: Bearer {KEY}\r\n".encode()
_GET = b"GET /v1/status HTTP/1.1\r\nHost: x\r\n" + _AUTH
RAW = {
    "no HTTP": (b"\x16\x03\x01\x02\x00" + bytes(100), 400),
    "another version": (b"GET / HTTP/9.9\r\n\r\n", 400),
    "a NUL in a header": (_GET + b"X: a\0b\r\n\r\n", 400),
    "bytes that are no ASCII in the path": (b"GET /v1/\xff\xfe HTTP/1.1\r\nHost: x\r\n" + _AUTH + b"\r\n", 400),
    "a length that is none": (_GET + b"Content-Length: x\r\n\r\n", 400),
    "a length beyond 64 bits": (_GET + b"Content-Length: " + b"9" * 30 + b"\r\n\r\n", 400),
    "two lengths": (_GET + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\n", 400),
    "length and chunks": (_GET + b"Content-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n", 400),
    "a header without end": (_GET + b"X: " + b"a" * 5_000_000, 431),
    "a first line without end": (b"GET /" + b"a" * 5_000_000, 431),
    "a header that ends too late": (_GET + b"X: " + b"a" * 70_000 + b"\r\n\r\n", 431),
    "many headers": (_GET + b"".join(b"X-%d: a\r\n" % i for i in range(1000)) + b"\r\n", 431),
    "a long query": (b"GET /v1/sandboxes?label=" + b"a" * 70_000 + b" HTTP/1.1\r\nHost: x\r\n" + _AUTH + b"\r\n", 431),
}


@pytest.mark.parametrize("what", RAW)
async def test_what_is_no_request_is_refused_with_a_typed_error(url: str, what: str) -> None:
    sent, status = RAW[what]
    address = urlsplit(url)
    async with asyncio.timeout(10):
        reader, writer = await asyncio.open_connection(address.hostname, address.port)
        writer.write(sent)
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        error = json.loads(await reader.readexactly(length))["error"]
        assert int(head.split()[1]) == status, head
        assert error["kind"] == ("too_large" if status == 431 else "invalid_request")
        assert error["details"]["request_id"]
        with contextlib.suppress(ConnectionError):  # it did not read all that we sent
            assert await reader.read() == b""  # and that was all
        writer.close()
    async with aiohttp.ClientSession(timeout=_DEADLINE) as session, session.get(f"{url}/healthz") as answer:
        assert answer.status == 200
