"""Input that is wrong in every way that JSON, HTTP and a link allow: a typed 4xx, at once, from a process that goes on."""

from __future__ import annotations

import json
import time

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
