"""CONNECT: end-to-end TLS through the proxy, and everything that is not."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path

import pytest

from dsec.edge.proxy.hello import ACCESS_DENIED, DECODE_ERROR, UNRECOGNIZED_NAME
from dsec.edge.proxy.limits import Limits
from dsec.protocol.mirrors import Mirror, MirrorKind

from .certificates import Authority
from .talk import DEADLINE, FAST, OK, Client, Proxy, get, serving
from .test_hello import extension, forged, real, sni

NAME = "secure.example"


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


class Handshake:
    """The sandbox's own TLS, spoken through a session."""

    def __init__(self, context: ssl.SSLContext, name: str) -> None:
        self.incoming, self.outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self.tls = context.wrap_bio(self.incoming, self.outgoing, server_hostname=name)

    async def run(self, client: Client, done: bytes) -> bytes:
        """Asks for / and reads until `done`."""
        await client.until(b"established\r\n\r\n")
        client.got.clear()
        said, got = False, b""
        while done not in got:
            try:
                if not said:
                    self.tls.do_handshake()
                    self.tls.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
                    said = True
                got += self.tls.read(4096)
            except ssl.SSLWantReadError:
                if self.outgoing.pending:
                    client.out.put_nowait(self.outgoing.read())
                while not client.got:
                    client.changed.clear()
                    await asyncio.wait_for(client.changed.wait(), DEADLINE)
                self.incoming.write(bytes(client.got))
                client.got.clear()
        return got


def connect(authority_: str) -> bytes:
    return f"CONNECT {authority_} HTTP/1.1\r\nHost: {authority_}\r\n\r\n".encode()


async def test_tls_end_to_end(authority: Authority) -> None:
    async with serving(OK, tls=authority.server(NAME)) as server:
        proxy = Proxy({f"{NAME}:{server.port}": True}, names={NAME: ["127.0.0.1"]}, public=lambda _: True)
        client = Client([connect(f"{NAME}:{server.port}")], ends=False)
        running = asyncio.create_task(proxy.session(client).run())
        got = await Handshake(authority.client(), NAME).run(client, b"\r\n\r\nok")
        client.out.put_nowait(b"")
        await asyncio.wait_for(running, DEADLINE)
    assert got.endswith(b"ok")
    assert [(one.allowed, one.why) for one in proxy.decided] == [(True, "tunnel")]


async def test_a_mirror_of_its_own_tls(authority: Authority) -> None:
    """A tunnel leads to where the operator said, under the mirror's name."""
    async with serving(OK, tls=authority.server("git.corp")) as server:
        mirror = Mirror(name="git.corp", kind=MirrorKind.TUNNEL, url=f"https://127.0.0.1:{server.port}")
        client = Client([connect("git.corp:443")], ends=False)
        running = asyncio.create_task(Proxy({"git.corp": True}, [mirror]).session(client).run())
        await Handshake(authority.client(), "git.corp").run(client, b"\r\n\r\nok")
        client.out.put_nowait(b"")
        await asyncio.wait_for(running, DEADLINE)


async def test_a_mirror_with_tls_outside(authority: Authority) -> None:
    async with serving(OK, tls=authority.server("IP:127.0.0.1")) as server:
        mirror = Mirror(name="npm", kind=MirrorKind.NPM, url=f"https://127.0.0.1:{server.port}/", ca=str(authority.pem))
        proxy = Proxy({"npm": True}, [mirror])
        proxy.upstreams.trust(mirror, Path(mirror.ca).read_text())
        assert (await proxy.say(get("http://npm/left-pad"))).endswith(b"ok")
        untrusting = Proxy({"npm": True}, [mirror])
        answer = await untrusting.say(get("http://npm/left-pad"))
        assert answer.startswith(b"HTTP/1.1 502 ") and b"certificate is not valid" in answer
        assert len(server.connections) <= 2


@pytest.mark.parametrize(
    ("said", "alert"),
    [
        (real("other.example"), ACCESS_DENIED),
        (real("SECURE.example.evil"), ACCESS_DENIED),
        (real(None), UNRECOGNIZED_NAME),
        (forged(sni(b"127.0.0.1")), UNRECOGNIZED_NAME),
        (forged(sni(b"\xff\xfe")), UNRECOGNIZED_NAME),
        (forged(sni(NAME.encode()), extension(0xFE0D, b"x")), ACCESS_DENIED),
        (b"GET / HTTP/1.1\r\nHost: secure.example\r\n\r\n", DECODE_ERROR),
        (b"SSH-2.0-x\r\n", DECODE_ERROR),
        (b"\x16\x03\x01\x00\x05\x01\x00", DECODE_ERROR),
    ],
)
async def test_not_a_byte_passes_before_the_names_agree(said: bytes, alert: int) -> None:
    seen = bytearray()

    async def listen(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.extend(await reader.read())

    async with serving(listen) as server:
        proxy = Proxy({f"{NAME}:{server.port}": True}, names={NAME: ["127.0.0.1"]}, public=lambda _: True)
        answer = await proxy.say(connect(f"{NAME}:{server.port}"), said)
        assert answer.startswith(b"HTTP/1.1 200 ")
        assert answer.endswith(bytes((21, 3, 3, 0, 2, 2, alert)))
    assert not seen
    assert [one.allowed for one in proxy.decided] == [False]


async def test_the_name_may_be_spelled_otherwise() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(10)
        writer.write(b"got it")
        await writer.drain()

    async with serving(answer) as server:
        proxy = Proxy({f"{NAME}:{server.port}": True}, names={NAME: ["127.0.0.1"]}, public=lambda _: True)
        said = await proxy.say(connect(f"{NAME.upper()}.:{server.port}"), forged(sni(b"Secure.Example")))
        assert said.endswith(b"got it")


async def test_a_tunnel_that_says_nothing_is_let_go() -> None:
    async def listen(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()

    async with serving(listen) as server:
        limits = Limits(head=0.2, idle=0.3, keep_alive=0.2)
        for said in ([], [forged(sni(NAME.encode()))]):
            proxy = Proxy(
                {f"{NAME}:{server.port}": True}, names={NAME: ["127.0.0.1"]}, public=lambda _: True, limits=limits
            )
            client = Client([connect(f"{NAME}:{server.port}"), *said], ends=False)
            await asyncio.wait_for(proxy.session(client).run(), DEADLINE)


async def test_both_directions_end_on_their_own() -> None:
    """The client's end reaches the server; what the server still says reaches the client."""

    async def after(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        data = await reader.read()
        writer.write(b"%d bytes" % len(data))
        await writer.drain()

    async with serving(after) as server:
        proxy = Proxy({f"{NAME}:{server.port}": True}, names={NAME: ["127.0.0.1"]}, public=lambda _: True, limits=FAST)
        hello = forged(sni(NAME.encode()))
        answer = await proxy.say(connect(f"{NAME}:{server.port}"), hello, b"x" * 1000)
    assert answer.endswith(b"%d bytes" % (len(hello) + 1000))
