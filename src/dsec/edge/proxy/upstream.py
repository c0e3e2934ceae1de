"""The way to a server: a name is resolved once, its addresses are judged, and one of them is connected to.

No second look-up happens after the judgement, so a name cannot lead elsewhere in between (DNS rebinding).
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Awaitable, Callable, Sequence
from ipaddress import ip_address
from typing import NamedTuple
from urllib.parse import urlsplit

from dsec.protocol.mirrors import Mirror, MirrorKind

from .limits import Limits
from .names import Address, is_of_this_machine, is_public
from .rules import HTTP, TLS, Route
from .source import Source

Resolve = Callable[[str], Awaitable[Sequence[Address]]]
_READ = 128 * 1024


class Unreachable(Exception):
    """No connection: with the status a client is told, and why. `denied`: by policy, not by the network."""

    def __init__(self, why: str, status: int = 502, *, denied: bool = False) -> None:
        super().__init__(why)
        self.status = status
        self.denied = denied


class Server(NamedTuple):
    """Where a route leads: host and port to connect to, whether to speak TLS, what Host to say there."""

    host: str
    port: int
    encrypted: bool
    authority: str


def server_of(route: Route) -> Server:
    if route.mirror is None:
        return Server(route.target.name, route.target.port, False, str(route.target))
    url = urlsplit(route.mirror.url)
    assert url.hostname is not None
    encrypted = url.scheme == "https"
    port = url.port or (TLS if encrypted else HTTP)
    return Server(url.hostname, port, encrypted and route.mirror.kind is not MirrorKind.TUNNEL, url.netloc)


class Connection:
    """An open connection to a server."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self.source = Source(self._more)

    async def _more(self) -> bytes:
        return await self._reader.read(_READ)

    async def write(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()

    def end(self) -> None:
        """No more from us; what comes may still be read."""
        if self._writer.can_write_eof() and not self._writer.is_closing():
            self._writer.write_eof()

    @property
    def usable(self) -> bool:
        """Nothing unasked came on it and it was not closed, as far as one can see."""
        return not (self._writer.is_closing() or self._reader.at_eof() or self.source.buffer)

    def close(self) -> None:
        self._writer.transport.abort()


async def resolve(name: str) -> Sequence[Address]:
    """By this machine's resolver; OSError when it knows no address."""
    found = await asyncio.get_running_loop().getaddrinfo(name, None, type=socket.SOCK_STREAM)
    return [ip_address(str(entry[4][0]).partition("%")[0]) for entry in found]


class Upstreams:
    """Makes connections for every sandbox. resolve and public are what a test replaces."""

    def __init__(
        self, limits: Limits, *, resolve: Resolve = resolve, public: Callable[[Address], bool] | None = None
    ) -> None:
        self._limits = limits
        self._resolve = resolve
        self._public = public or _may_be_reached
        self._contexts: dict[str, ssl.SSLContext] = {}

    def trust(self, mirror: Mirror, pem: str) -> None:
        """The authorities for a mirror; read before this process gives up its privilege."""
        self._contexts[mirror.name] = ssl.create_default_context(cadata=pem) if pem else ssl.create_default_context()

    async def connect(self, route: Route, turn: asyncio.Semaphore) -> Connection:
        """turn bounds the look-ups of one sandbox at a time."""
        server = server_of(route)
        addresses = await self._addresses(server.host, turn, private=route.mirror is not None)
        context = self._context(route.mirror) if server.encrypted else None
        problem = "no address"
        for address in addresses[: self._limits.addresses]:
            try:
                async with asyncio.timeout(self._limits.connect):
                    reader, writer = await asyncio.open_connection(
                        str(address), server.port, ssl=context, server_hostname=server.host if context else None
                    )
                return Connection(reader, writer)
            except TimeoutError:
                problem = "no answer in time"
            except ssl.SSLCertVerificationError as error:
                problem = f"its certificate is not valid: {error.verify_message}"
            except (OSError, ssl.SSLError) as error:
                problem = (error.strerror or type(error).__name__).lower()
        raise Unreachable(f"{route.target} could not be connected to: {problem}")

    def _context(self, mirror: Mirror | None) -> ssl.SSLContext:
        assert mirror is not None
        if mirror.name not in self._contexts:
            self.trust(mirror, "")
        return self._contexts[mirror.name]

    async def _addresses(self, host: str, turn: asyncio.Semaphore, *, private: bool) -> Sequence[Address]:
        try:
            return [ip_address(host)]  # only an operator writes one: names in requests are none
        except ValueError:
            pass
        try:
            async with asyncio.timeout(self._limits.resolve), turn:
                found = list(dict.fromkeys(await self._resolve(host)))
        except TimeoutError:
            raise Unreachable(f"the name {host} was not resolved in time", 504) from None
        except (OSError, UnicodeError):
            raise Unreachable(f"the name {host} does not resolve") from None
        if not found:
            raise Unreachable(f"the name {host} has no address")
        if not private and not all(map(self._public, found)):
            raise Unreachable(f"{host} leads to an address that is not public", 403, denied=True)
        return found


def _may_be_reached(address: Address) -> bool:
    return is_public(address) and not is_of_this_machine(address)
