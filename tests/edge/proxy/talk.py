"""A session of the proxy driven in memory, and servers on loopback that it may reach."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from ipaddress import ip_address

from dsec.edge.proxy.limits import Limits
from dsec.edge.proxy.names import Address
from dsec.edge.proxy.rules import Policy
from dsec.edge.proxy.session import Decided, Session, Shared
from dsec.edge.proxy.upstream import Upstreams
from dsec.protocol.mirrors import Mirror

DEADLINE = 10.0
FAST = Limits(head=0.3, keep_alive=0.3, idle=1.0, resolve=0.3, connect=1.0)


class Client:
    """The sandbox's end: what it sends is given or fed, what it gets is kept."""

    def __init__(self, pieces: Iterable[bytes] = (), *, ends: bool = True) -> None:
        self.out: asyncio.Queue[bytes] = asyncio.Queue()
        for piece in pieces:
            self.out.put_nowait(piece)
        if ends:
            self.out.put_nowait(b"")
        self.got = bytearray()
        self.changed = asyncio.Event()

    async def read(self) -> bytes:
        return await self.out.get()

    async def write(self, data: bytes) -> None:
        self.got += data
        self.changed.set()

    async def until(self, mark: bytes) -> bytes:
        """What it got, when `mark` is in it."""
        async with asyncio.timeout(DEADLINE):
            while mark not in self.got:
                self.changed.clear()
                await self.changed.wait()
        return bytes(self.got)


class Proxy:
    """Sessions of one sandbox with these rules; `names` is all that resolves."""

    def __init__(
        self,
        rules: Mapping[str, bool],
        mirrors: Sequence[Mirror] = (),
        *,
        names: Mapping[str, Sequence[str]] | None = None,
        public: Callable[[Address], bool] | None = None,
        limits: Limits = FAST,
    ) -> None:
        self.policy = Policy(rules, mirrors)
        self.mirrors = mirrors
        self.decided: list[Decided] = []
        self.resolved: list[str] = []
        self.limits = limits
        self._names = names or {}
        self.upstreams = Upstreams(limits, resolve=self._resolve, public=public)
        self.crowded = False

    async def _resolve(self, name: str) -> list[Address]:
        self.resolved.append(name)
        if name not in self._names:
            raise OSError("no such name")
        return [ip_address(text) for text in self._names[name]]

    def session(self, client: Client) -> Session:
        return Session(
            client,
            Shared(
                policy=lambda: self.policy,
                upstreams=self.upstreams,
                limits=self.limits,
                turn=asyncio.Semaphore(4),
                log=self.decided.append,
                crowded=lambda: self.crowded,
            ),
        )

    async def say(self, *pieces: bytes) -> bytes:
        """Everything that a client gets that says this and then ends."""
        client = Client(pieces)
        await asyncio.wait_for(self.session(client).run(), DEADLINE)
        return bytes(client.got)


Answer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class Server:
    """What a server was sent, connection by connection."""

    def __init__(self) -> None:
        self.port = 0
        self.connections: list[bytearray] = []

    def mirror(self, name: str = "files", path: str = "/", **fields: object) -> Mirror:
        return Mirror(name=name, url=f"http://127.0.0.1:{self.port}{path}", **fields)  # type: ignore[arg-type]


@asynccontextmanager
async def serving(answer: bytes | Answer, *, tls: ssl.SSLContext | None = None) -> AsyncIterator[Server]:
    """A server that reads a head and says `answer`, as often as it is asked on one connection; or does what the function does."""
    server = Server()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        got = bytearray()
        server.connections.append(got)
        try:
            if not isinstance(answer, bytes):
                await answer(reader, writer)
                return
            while True:
                got += await reader.readuntil(b"\r\n\r\n")
                writer.write(answer)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    listening = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=tls)
    server.port = listening.sockets[0].getsockname()[1]
    try:
        yield server
    finally:
        listening.close()


OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


def get(url: str, *headers: str, host: str | None = None) -> bytes:
    host = host or url.split("/")[2]
    return "\r\n".join([f"GET {url} HTTP/1.1", f"Host: {host}", *headers, "", ""]).encode("latin-1")
