"""Connections of a sandbox through the proxy to servers on loopback: what passes, how, and what never does."""

from __future__ import annotations

import asyncio
import gzip
import re

import pytest

from dsec.edge.proxy.http1 import MAX_REQUEST_HEAD
from dsec.edge.proxy.limits import Limits
from dsec.edge.proxy.rules import Policy
from dsec.protocol.mirrors import MirrorKind

from .talk import DEADLINE, FAST, OK, Client, Proxy, Server, get, serving


def head_of(data: bytes) -> list[bytes]:
    return data.partition(b"\r\n\r\n")[0].split(b"\r\n")


def answers(data: bytes) -> int:
    return len(re.findall(rb"HTTP/1\.1 [0-9]{3} ", data))


async def through(server: Server, *pieces: bytes, path: str = "/", **fields: object) -> bytes:
    proxy = Proxy({"files": True}, [server.mirror(path=path, **fields)])
    return await proxy.say(*pieces)


# -- passing -----------------------------------------------------------------------------------------------------------


async def test_a_request_reaches_the_mirror_and_its_answer_the_client() -> None:
    async with serving(OK) as server:
        answer = await through(
            server,
            get(
                "http://files/a/b?c=d",
                "Accept: */*",
                "Proxy-Connection: keep-alive",
                "X-Hop: 1",
                "Connection: x-hop, close",
            ),
            headers={"Authorization": "Bearer secret"},
        )
    assert answer == b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\nok"
    [asked] = server.connections
    lines = head_of(asked)
    assert lines[0] == b"GET /a/b?c=d HTTP/1.1"
    assert lines[1:] == [f"Host: 127.0.0.1:{server.port}".encode(), b"Accept: */*", b"Authorization: Bearer secret"]


async def test_the_operators_credentials_replace_the_sandboxs() -> None:
    async with serving(OK) as server:
        await through(server, get("http://files/", "authorization: mine"), headers={"Authorization": "theirs"})
    assert b"mine" not in server.connections[0] and b"Authorization: theirs" in server.connections[0]


async def test_many_requests_use_one_connection_each_way() -> None:
    async with serving(OK) as server:
        answer = await through(server, get("http://files/1"), get("http://files/2") + get("http://files/3"))
    assert answer.count(b"200 OK") == 3 and len(server.connections) == 1


async def test_a_kept_connection_that_died_is_replaced() -> None:
    async def once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(OK)
        await writer.drain()

    async with serving(once) as server:
        proxy = Proxy({"files": True}, [server.mirror()])
        client = Client([get("http://files/1")], ends=False)
        running = asyncio.create_task(proxy.session(client).run())
        await client.until(b"\r\n\r\nok")
        client.got.clear()
        client.out.put_nowait(get("http://files/2"))
        await client.until(b"\r\n\r\nok")
        client.out.put_nowait(b"")
        await asyncio.wait_for(running, DEADLINE)
    assert len(server.connections) == 2


@pytest.mark.parametrize(
    ("answer", "status"),
    [
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2;x=y\r\nhi\r\n1\r\n!\r\n0\r\nT: x\r\n\r\n", b"200 OK"),
        (b"HTTP/1.1 203\r\nContent-Length: 3\r\n\r\nhi!", b"203 "),
    ],
)
async def test_answers_are_framed_anew(answer: bytes, status: bytes) -> None:
    async with serving(answer) as server:
        got = await through(server, get("http://files/"))
    head, _, body = got.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 " + status)
    assert body in (b"2\r\nhi\r\n1\r\n!\r\n0\r\n\r\n", b"hi!") and b"T: x" not in got


async def test_an_answer_that_ends_with_its_connection() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.0 200 OK\r\n\r\nall of it")
        await writer.drain()

    async with serving(answer) as server:
        chunked = await through(server, get("http://files/"))
        plain = await through(server, b"GET http://files/ HTTP/1.0\r\nConnection: keep-alive\r\n\r\n")
    assert chunked.endswith(b"9\r\nall of it\r\n0\r\n\r\n") and b"Transfer-Encoding: chunked" in chunked
    assert plain.endswith(b"\r\n\r\nall of it") and b"Connection: close" in plain


async def test_head_and_not_modified_have_no_body() -> None:
    async with serving(b"HTTP/1.1 304 Not Modified\r\nContent-Length: 99\r\n\r\n") as server:
        assert (await through(server, get("http://files/"))).endswith(b"\r\n\r\n")
    async with serving(b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n") as server:
        got = await through(server, b"HEAD http://files/ HTTP/1.1\r\nHost: files\r\n\r\n")
    assert b"Content-Length: 99" in got and got.endswith(b"\r\n\r\n")


async def test_interim_answers_are_dropped() -> None:
    async with serving(b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n" + OK) as server:
        assert b"Early" not in await through(server, get("http://files/"))
    async with serving(b"HTTP/1.1 100 Continue\r\n\r\n" * 20 + OK) as server:
        assert b"502 " in await through(server, get("http://files/"))
    async with serving(b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\n\r\n") as server:
        assert b"502 " in await through(server, get("http://files/", "Upgrade: x", "Connection: upgrade"))


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    head = await reader.readuntil(b"\r\n\r\n")
    if b"chunked" in head:
        body = await reader.readuntil(b"0\r\n\r\n")
    else:
        length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
        body = await reader.readexactly(length)
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
    await writer.drain()


async def test_bodies_go_up() -> None:
    async with serving(echo) as server:
        head = b"POST http://files/ HTTP/1.1\r\nHost: files\r\n"
        counted = await through(server, head + b"Content-Length: 5\r\n\r\n", b"he", b"llo", writable=True)
        chunked = await through(
            server, head + b"Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n", b"0\r\nX: y\r\n\r\n", writable=True
        )
        waiting = await through(
            server, head + b"Expect: 100-continue\r\nContent-Length: 2\r\n\r\n", b"hi", writable=True
        )
    assert counted.endswith(b"\r\n\r\nhello")
    assert chunked.endswith(b"\r\n\r\n3\r\nabc\r\n0\r\n\r\n")
    assert waiting.startswith(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK") and waiting.endswith(b"hi")


async def test_large_bodies_take_bounded_memory() -> None:
    """The server's bytes are read only as fast as the client takes them."""
    sent = 0

    async def endless(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000000\r\n\r\n")
        while True:
            writer.write(bytes(65536))
            await writer.drain()
            sent += 65536

    class Stuck(Client):
        async def write(self, data: bytes) -> None:
            await super().write(data)
            if len(self.got) > 1_000_000:
                await asyncio.Event().wait()

    async with serving(endless) as server:
        proxy = Proxy({"files": True}, [server.mirror()])
        client = Stuck([get("http://files/")], ends=False)
        await asyncio.wait_for(proxy.session(client).run(), DEADLINE)  # ends: a client that reads nothing for `idle`
    assert 1_000_000 < len(client.got) < 1_300_000 and sent < 12_000_000


# -- refusing ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (b"GET / HTTP/1.1\r\nHost: files\r\n\r\n", b"400 "),
        (b"GET http://files/ HTTP/1.1\r\n\r\n", b"400 "),
        (get("http://files/", "Host: files"), b"400 "),
        (get("http://files/", host="other"), b"400 "),
        (get("http://files/", host="files:81"), b"400 "),
        (get("http://files/", host="files, other"), b"400 "),
        (get("http://files/", host="127.0.0.1"), b"400 "),
        (get("https://files/"), b"400 "),
        (get("ftp://files/"), b"400 "),
        (get("file:///etc/passwd", host="x"), b"400 "),
        (b"OPTIONS * HTTP/1.1\r\nHost: files\r\n\r\n", b"400 "),
        (b"TRACE http://files/ HTTP/1.1\r\nHost: files\r\n\r\n", b"405 "),
        (b"CONNECT files HTTP/1.1\r\nHost: files\r\n\r\n", b"400 "),
        (get("http://files/", "Connection: host"), b"400 "),
        (get("http://files/", "Connection: content-length"), b"400 "),
        (get("http://files/" + "a" * MAX_REQUEST_HEAD), b"431 "),
        (b"GET http://files/ HTTP/1.1\nHost: files\n\n", b"400 "),
        (b"GET http://files/ HTTP/2.0\r\nHost: files\r\n\r\n", b"505 "),
        # two readings of one body
        (get("http://files/", "Content-Length: 4", "Transfer-Encoding: chunked") + b"0\r\n\r\n", b"400 "),
        (get("http://files/", "Content-Length: 4", "Content-Length: 5") + b"abcde", b"400 "),
        (get("http://files/", "Transfer-Encoding: chunked", "Transfer-Encoding: x") + b"0\r\n\r\n", b"501 "),
        (get("http://files/", "Transfer-Encoding : chunked") + b"0\r\n\r\n", b"400 "),
        (get("http://files/", "X: a\r\n b"), b"400 "),
        (get("http://files/", "X: a\nGET http://files/b HTTP/1.1"), b"400 "),
        # not below the mirror's path or not by reading
        (get("http://files/pub/../secret"), b"403 "),
        (get("http://files/secret"), b"403 "),
        (get("http://files/pub/%2e%2e/secret"), b"403 "),
        (get("http://files/pub/%252e%252e/secret"), b"403 "),
        (get("http://files/pub/..%2fsecret"), b"403 "),
        (get("http://files/pub/..;x/secret"), b"403 "),
        (get("http://files/pub/..\\secret"), b"403 "),
        (get("http://files/publicity"), b"403 "),
        (b"PUT http://files/pub/x HTTP/1.1\r\nHost: files\r\nContent-Length: 1\r\n\r\nx", b"403 "),
        (get("http://files/pub/x", "Content-Length: 18") + b"GET / HTTP/1.1\r\n\r\n", b"403 "),
        (get("http://files/pub/x", "Transfer-Encoding: chunked") + b"0\r\n\r\n", b"403 "),
        (b"DELETE http://files/pub/x HTTP/1.1\r\nHost: files\r\n\r\n", b"403 "),
        # elsewhere
        (get("http://example.com/"), b"403 "),
        (get("http://127.0.0.1/"), b"403 "),
        (get("http://[::1]/"), b"403 "),
        (get("http://2130706433/"), b"403 "),
        (get("http://files:8080/pub/"), b"403 "),
        (get("http://user@files/pub/", host="files"), b"403 "),
        (b"CONNECT files:443 HTTP/1.1\r\nHost: files:443\r\n\r\n", b"403 "),
        (b"CONNECT files:80 HTTP/1.1\r\nHost: files:80\r\n\r\n", b"403 "),
        (b"CONNECT 127.0.0.1:22 HTTP/1.1\r\nHost: 127.0.0.1:22\r\n\r\n", b"403 "),
        (b"CONNECT 169.254.169.254:80 HTTP/1.1\r\nHost: x\r\n\r\n", b"403 "),
        (b"CONNECT example.com:443 HTTP/1.1\r\nHost: example.com:443\r\n\r\n", b"403 "),
        (b"CONNECT example.com:443 HTTP/1.1\r\nHost: files:443\r\n\r\n", b"400 "),
    ],
)
async def test_nothing_of_these_reaches_a_server(request_: bytes, status: bytes) -> None:
    async with serving(OK) as server:
        proxy = Proxy({"files": True}, [server.mirror(path="/pub/")], names={})
        # What follows a refused request may be the second half of a smuggled one: the connection must not read it as such.
        answer = await proxy.say(request_, get("http://files/pub/next") if status == b"400 " else b"")
        assert answer.startswith(b"HTTP/1.1 " + status), answer
        assert answers(answer) == 1
        assert server.connections == [] and proxy.resolved == []


async def test_a_refusal_keeps_the_connection_and_is_logged() -> None:
    async with serving(OK) as server:
        proxy = Proxy({"files": True}, [server.mirror()])
        answer = await proxy.say(get("http://npm/"), get("http://files/"))
    assert answer.startswith(b"HTTP/1.1 403 Denied: npm is not reachable") and answer.endswith(b"ok")
    assert [(one.allowed, one.target) for one in proxy.decided] == [(False, "npm"), (True, "files")]


async def test_a_smuggled_request_stays_a_body() -> None:
    async with serving(echo) as server:
        inner = b"GET /secret HTTP/1.1\r\nHost: x\r\n\r\n"
        head = f"POST http://files/ HTTP/1.1\r\nHost: files\r\nContent-Length: {len(inner)}\r\n\r\n".encode()
        answer = await through(server, head + inner, writable=True)
    assert answer.endswith(inner) and answer.count(b"HTTP/1.1 200") == 1


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nabcdef",
        b"HTTP/1.1 200 OK\r\nX: a\r\n folded\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 200 OK\nContent-Length: 0\n\n",
        b"HTTP/1.1 200 OK\r\nX: " + b"a" * 70_000 + b"\r\n\r\n",
        b"SSH-2.0-OpenSSH_9.2\r\n\r\n",
        b"HTTP/1.1 2000 OK\r\n\r\n",
        b"HTTP/1.1 302 Found\r\nLocation: http://a/\r\nLocation: http://b/\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:9/\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 302 Found\r\nLocation: http://169.254.169.254/latest\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 302 Found\r\nLocation: //[::1]/\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 302 Found\r\nLocation: http://[::1\r\nContent-Length: 0\r\n\r\n",
    ],
)
async def test_answers_that_are_refused(answer: bytes) -> None:
    async with serving(answer) as server:
        got = await through(server, get("http://files/"))
    assert got.startswith(b"HTTP/1.1 502 ") and answers(got) == 1 and b"Connection: close" in got


@pytest.mark.parametrize(
    ("place", "told"),
    [
        ("http://127.0.0.1:{port}/b?c=%20d", b"http://files/b?c=%20d"),
        ("//127.0.0.1:{port}", b"http://files/"),
        ("/relative", b"/relative"),
        ("../up", b"../up"),
        ("https://elsewhere.example/x", b"https://elsewhere.example/x"),
    ],
)
async def test_redirects_are_the_clients_to_follow(place: str, told: bytes) -> None:
    port = 0

    async def redirect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(f"HTTP/1.1 302 Found\r\nLocation: {place.format(port=port)}\r\nContent-Length: 0\r\n\r\n".encode())
        await writer.drain()

    async with serving(redirect) as server:
        port = server.port
        got = await through(server, get("http://files/"))
    assert b"Location: " + told in head_of(got)
    assert len(server.connections) == 1


# -- names and addresses -----------------------------------------------------------------------------------------------


async def test_a_domain_is_resolved_once_and_its_address_is_what_is_connected_to() -> None:
    async with serving(OK) as server:
        asked: list[object] = []

        def public(address: object) -> bool:
            asked.append(address)
            return True

        proxy = Proxy({f"example.com:{server.port}": True}, names={"example.com": ["127.0.0.1"]}, public=public)
        url = f"http://EXAMPLE.com:{server.port}/x"
        answer = await proxy.say(get(url))
        assert answer.endswith(b"ok") and proxy.resolved == ["example.com"] and len(asked) == 1
        assert head_of(server.connections[0])[1] == f"Host: example.com:{server.port}".encode()


@pytest.mark.parametrize(
    "addresses", [["127.0.0.1"], ["10.0.0.1"], ["8.8.8.8", "127.0.0.1"], ["::1"], ["fd00::1"], ["169.254.169.254"]]
)
@pytest.mark.parametrize("tls", [False, True])
async def test_a_name_that_leads_inside_is_refused(addresses: list[str], tls: bool) -> None:
    async with serving(OK) as server:
        proxy = Proxy({f"evil.example:{server.port}": True}, names={"evil.example": addresses})
        authority = f"evil.example:{server.port}"
        plain = get(f"http://{authority}/")
        answer = await proxy.say(
            f"CONNECT {authority} HTTP/1.1\r\nHost: {authority}\r\n\r\n".encode() if tls else plain
        )
        assert answer.startswith(b"HTTP/1.1 403 Denied") and b"not public" in answer
        assert server.connections == []


async def test_names_that_do_not_resolve_and_servers_that_do_not_answer() -> None:
    proxy = Proxy(
        {"gone.example": True, "dead.example:1": True}, names={"dead.example": ["127.0.0.1"]}, public=lambda _: True
    )
    assert (await proxy.say(get("http://gone.example/"))).startswith(
        b"HTTP/1.1 502 Bad Gateway: the name gone.example does not"
    )
    assert b"could not be connected to" in await proxy.say(get("http://dead.example:1/"))


async def test_a_slow_resolver_holds_nobody_for_long() -> None:
    proxy = Proxy({"slow.example": True})

    async def never(name: str) -> list[object]:
        await asyncio.Event().wait()
        return []

    proxy.upstreams._resolve = never  # type: ignore[assignment]
    assert (await proxy.say(get("http://slow.example/"))).startswith(b"HTTP/1.1 504 ")


# -- bounds ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("said", [b"", b"GET http://fi", b"CONNECT "])
async def test_who_says_nothing_is_let_go(said: bytes) -> None:
    client = Client([said] if said else [], ends=False)
    await asyncio.wait_for(Proxy({"files": True}).session(client).run(), DEADLINE)


async def test_connections_are_not_kept_in_a_crowd() -> None:
    async with serving(OK) as server:
        proxy = Proxy({"files": True}, [server.mirror()])
        proxy.crowded = True
        answer = await proxy.say(get("http://files/"), get("http://files/"))
    assert answer.count(b"200 OK") == 1 and b"Connection: close" in answer


async def test_a_server_that_hangs_up_or_hangs() -> None:
    async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")

    async def hang(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()

    async def cut(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nhalf")
        await writer.drain()

    quick = Limits(head=FAST.head, keep_alive=FAST.keep_alive, idle=0.3)
    for answer, seen in ((hang_up, b"HTTP/1.1 502 "), (hang, b"HTTP/1.1 504 "), (cut, b"HTTP/1.1 200 ")):
        async with serving(answer) as server:
            proxy = Proxy({"files": True}, [server.mirror()], limits=quick)
            got = await proxy.say(get("http://files/"), get("http://files/"))
            assert got.startswith(seen) and answers(got) == 1


async def test_early_answers_end_an_upload() -> None:
    async def no_thanks(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 413 Too Large\r\nContent-Length: 2\r\n\r\nno")
        await writer.drain()
        await asyncio.sleep(0)

    async with serving(no_thanks) as server:
        proxy = Proxy({"files": True}, [server.mirror(writable=True)])
        client = Client(
            [b"POST http://files/ HTTP/1.1\r\nHost: files\r\nContent-Length: 100000000\r\n\r\n", b"x"], ends=False
        )
        await asyncio.wait_for(proxy.session(client).run(), DEADLINE)
    assert client.got.startswith(b"HTTP/1.1 413 ") and client.got.endswith(b"no") and b"Connection: close" in client.got


async def test_compressed_bodies_pass_untouched() -> None:
    packed = gzip.compress(b"x" * 1000)
    answer = b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: %d\r\n\r\n" % len(packed) + packed
    async with serving(answer) as server:
        assert (await through(server, get("http://files/", "Accept-Encoding: gzip"))).endswith(packed)


async def test_rules_that_change_between_requests_count() -> None:
    async with serving(OK) as server:
        mirror = server.mirror()
        proxy = Proxy({"files": True}, [mirror])
        client = Client([get("http://files/")], ends=False)
        running = asyncio.create_task(proxy.session(client).run())
        await client.until(b"\r\n\r\nok")
        proxy.policy = Policy({"files": False}, [mirror])
        client.out.put_nowait(get("http://files/"))
        await client.until(b"403 Denied")
        client.out.put_nowait(b"")
        await asyncio.wait_for(running, DEADLINE)
    assert len(server.connections[0].split(b"GET ")) == 2


async def test_index_links_by_the_upstreams_own_name() -> None:
    async with serving(OK) as server:
        mirror = server.mirror("pypi", "/simple/", kind=MirrorKind.PYPI)
        named = type(mirror)(
            **{
                **{f: getattr(mirror, f) for f in mirror.__struct_fields__},
                "url": f"http://localhost.example:{server.port}/simple/",
            }
        )
        proxy = Proxy({"pypi": True}, [named], names={"localhost.example": ["127.0.0.1"]})
        assert (await proxy.say(get(f"http://localhost.example:{server.port}/files/x.whl"))).endswith(b"ok")
        assert (await proxy.say(get(f"http://localhost.example:{server.port + 1}/files/x.whl"))).startswith(
            b"HTTP/1.1 403"
        )
