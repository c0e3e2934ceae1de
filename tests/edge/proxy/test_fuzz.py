"""Anything from either side: the session ends in order, and no server is asked for what the rules do not allow."""

from __future__ import annotations

import asyncio
import re

from hypothesis import given, settings
from hypothesis import strategies as st

from dsec.edge.proxy.limits import Limits
from dsec.edge.proxy.session import Session, Shared
from dsec.edge.proxy.upstream import Connection, Unreachable, Upstreams
from dsec.protocol.mirrors import Mirror

from .talk import OK, Client, Proxy, get
from .test_hello import forged, sni

MIRROR = Mirror(name="files", url="http://127.0.0.1:9/pub/")
LIMITS = Limits(head=0.2, keep_alive=0.2, idle=0.2)
ALLOWED = re.compile(rb"(?:GET|HEAD) /pub(?:[/?][!-~]*)? HTTP/1\.1\r\nHost: 127\.0\.0\.1:9\r\n")

SEEDS = (
    get("http://files/pub/a", "Accept: */*"),
    get("http://files/pub/", "Connection: keep-alive, x", "Content-Length: 0"),
    b"HEAD http://files/pub/a HTTP/1.1\r\nHost: files\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n",
    b"POST http://files/pub/a HTTP/1.1\r\nHost: files\r\nContent-Length: 3\r\n\r\nabc",
    b"CONNECT example.com:443 HTTP/1.1\r\nHost: example.com:443\r\n\r\n" + forged(sni(b"example.com")),
    b"CONNECT 127.0.0.1:22 HTTP/1.1\r\nHost: 127.0.0.1:22\r\n\r\n",
)
SPLICES = (
    b"\r\n", b"\n", b"\r", b" ", b"\t", b"\0", b":", b"..", b"%2e", b"//", b"@", b"127.0.0.1", b"[::1]", b"chunked",
    b"Content-Length: 5\r\n", b"Transfer-Encoding: chunked\r\n", b"Host: other\r\n",
    b"GET http://files/secret HTTP/1.1\r\n",
)  # fmt: skip


class Recorded(Connection):
    """A server that answers `reply` to whatever it is sent."""

    def __init__(self, reply: bytes) -> None:
        self.asked = bytearray()
        self._reply = reply
        reader = asyncio.StreamReader()
        super().__init__(reader, None)  # type: ignore[arg-type]
        self._feed = reader

    async def write(self, data: bytes) -> None:
        if not self.asked:
            self._feed.feed_data(self._reply)
            self._feed.feed_eof()
        self.asked += data

    def end(self) -> None:
        pass

    @property
    def usable(self) -> bool:
        return False

    def close(self) -> None:
        pass


class Servers(Upstreams):
    def __init__(self, reply: bytes) -> None:
        super().__init__(LIMITS)
        self._reply = reply
        self.made: list[tuple[str, Recorded]] = []

    async def connect(self, route: object, turn: asyncio.Semaphore) -> Connection:
        if len(self.made) > 20:
            raise Unreachable("enough")
        made = Recorded(self._reply)
        self.made.append((str(route.target), made))  # type: ignore[attr-defined]
        return made


def talk(said: list[bytes], reply: bytes) -> tuple[bytes, list[tuple[str, Recorded]]]:
    """What the client got, and what each server was sent."""

    async def run() -> tuple[bytes, list[tuple[str, Recorded]]]:
        proxy, servers, client = Proxy({"files": True, "example.com": True}, [MIRROR]), Servers(reply), Client(said)
        shared = Shared(policy=lambda: proxy.policy, upstreams=servers, limits=LIMITS, turn=asyncio.Semaphore(4),
                        log=proxy.decided.append, crowded=lambda: False)  # fmt: skip
        await Session(client, shared).run()
        return bytes(client.got), servers.made

    with asyncio.Runner() as runner:
        return runner.run(run())


def well_formed(got: bytes) -> bool:
    return not got or got.startswith(b"HTTP/1.1 ")


@st.composite
def damaged(draw: st.DrawFn, seeds: tuple[bytes, ...] = SEEDS) -> bytes:
    data = bytearray(draw(st.sampled_from(seeds)))
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(data)))
        match draw(st.integers(0, 3)):
            case 0:
                data[at:at] = draw(st.sampled_from(SPLICES))
            case 1:
                del data[at : at + draw(st.integers(1, 8))]
            case 2:
                data[at : at + 1] = draw(st.binary(min_size=1, max_size=3))
            case _:
                data += draw(st.sampled_from(seeds))
    return bytes(data)


@settings(max_examples=300, deadline=None)
@given(damaged() | st.binary(max_size=200), st.integers(1, 80))
def test_any_client(data: bytes, size: int) -> None:
    got, servers = talk([data[at : at + size] for at in range(0, len(data), size)], OK)
    assert well_formed(got)
    for target, server in servers:
        if target == "files":
            requests = re.findall(rb"[A-Z]+ [^ ]* HTTP/1\.1\r\nHost: [^\r]*\r\n", bytes(server.asked))
            assert ALLOWED.match(server.asked) and len(requests) == 1, bytes(server.asked)
            assert b".." not in server.asked.partition(b" HTTP/1.1")[0]
            assert not re.search(rb"[^\r]\n|\r[^\n]", server.asked.partition(b"\r\n\r\n")[0])
        elif server.asked and server.asked[0] != 22:
            assert server.asked.startswith((b"GET ", b"HEAD ", b"POST ")) or b"Host: example.com\r\n" in server.asked


ANSWERS = (
    OK,
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n",
    b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:9/pub/x\r\nContent-Length: 0\r\n\r\n",
    b"HTTP/1.0 200 OK\r\n\r\nuntil the end",
    b"HTTP/1.1 100 Continue\r\n\r\n" + OK,
)


@settings(max_examples=300, deadline=None)
@given(damaged(ANSWERS) | st.binary(max_size=200))
def test_any_server(answer: bytes) -> None:
    got, _ = talk([get("http://files/pub/x")], answer)
    assert got.startswith(b"HTTP/1.1 ")
    head = got.partition(b"\r\n\r\n")[0]
    assert not re.search(rb"[^\r]\n|\r[^\n]|\0", head)
    assert (
        len(re.findall(rb"(?i)\r\ntransfer-encoding:", head)) + len(re.findall(rb"(?i)\r\ncontent-length:", head)) <= 1
    )
    assert not re.search(rb"\r\nLocation: http://[0-9.]+[:/\r]", head)
