"""One connection out of a sandbox: requests, each decided by name, until it is closed or becomes a tunnel."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from typing import NamedTuple, Protocol
from urllib.parse import unquote_to_bytes, urlsplit

from dsec.protocol.mirrors import Mirror, MirrorKind

from . import refusals
from .http1 import (
    LAST_CHUNK,
    NO_BODY,
    Body,
    Framing,
    Headers,
    Malformed,
    Request,
    Response,
    chunk,
    end_to_end,
    keeps_alive,
    pieces,
    read_request,
    read_response,
    request_body,
    response_body,
    tokens,
    values,
    write_head,
)
from .limits import Limits
from .names import BadName, normal, split_authority
from .rules import HTTP, TLS, Denial, Policy, Route, Target, method_allowed, prefix
from .source import Ended, Source
from .tunnel import Pipe, tunnel
from .upstream import Connection, Server, Unreachable, Upstreams, server_of

_SAFE = frozenset(("GET", "HEAD", "OPTIONS"))
_SWITCH = ((b"Connection", b"Upgrade"), (b"Upgrade", b"websocket"))
_INTERIM = 8  # 1xx answers before the final one
_ABSOLUTE = re.compile(r"(?i)([a-z][a-z0-9+.-]*)://([^/?#]*)([/?][^#]*)?")


class Client(Protocol):
    """The sandbox's end. read gives an empty piece at the end; OSError or Fault from either when it is gone."""

    async def read(self) -> bytes: ...
    async def write(self, data: bytes) -> None: ...


class Decided(NamedTuple):
    """For the sandbox's log."""

    allowed: bool
    target: str
    why: str


class Shared(NamedTuple):
    """What the connections of one sandbox have in common. policy gives the rules of now."""

    policy: Callable[[], Policy]
    upstreams: Upstreams
    limits: Limits
    turn: asyncio.Semaphore
    log: Callable[[Decided], None]
    crowded: Callable[[], bool]


class _Close(Exception):
    """Nothing more can be done on this connection."""


class Session:
    def __init__(self, client: Client, shared: Shared) -> None:
        self._client = client
        self._shared = shared
        self._source = Source(client.read)
        self._upstream: Connection | None = None
        self._leads_to: tuple[Server, Mirror | None] | None = None
        self.target: Target | None = None  # what is being reached just now

    async def run(self) -> None:
        """Until the connection is done with. What a client or server does wrong ends here."""
        try:
            while await self._one():
                pass
        except (_Close, Ended, OSError):
            pass
        finally:
            self._drop()

    def _drop(self) -> None:
        if self._upstream is not None:
            self._upstream.close()
            self._upstream = None

    async def _one(self) -> bool:
        """One request and its answer; is the connection good for another?"""
        self.target = None
        limits = self._shared.limits
        try:
            if not self._source.buffer:
                async with asyncio.timeout(limits.keep_alive):
                    if not await self._source.fill():
                        return False
            async with asyncio.timeout(limits.head):
                request = await read_request(self._source)
        except Malformed as error:
            return await self._refuse(refusals.failed(error.status, str(error)))
        if request is None:
            return False
        try:
            target, path = _asked(request)
            body = request_body(request)
            headers = end_to_end(request.headers)
        except Malformed as error:
            return await self._refuse(refusals.failed(error.status, str(error)))
        except BadName as error:
            return await self._deny(request, Denial(request.target[:120], str(error)), body=Body(Framing.CLOSE))
        decision = self._shared.policy().decide(target)
        if isinstance(decision, Route) and not target.tls and not _reads(decision.mirror, request, body):
            decision = Denial(str(target), "a mirror is for reading: GET and HEAD, without a body")
        if isinstance(decision, Denial):
            return await self._deny(request, decision, body)
        self.target = target
        if target.tls:
            return await self._tunnel(decision)
        return await self._forward(request, decision, path, body, headers)

    # -- refusing --

    async def _deny(self, request: Request, denial: Denial, body: Body) -> bool:
        self._shared.log(Decided(False, denial.target, denial.why))
        keep = body.framing is Framing.NONE and request.method != "CONNECT" and self._may_keep(request)
        answer = refusals.denied(denial, self._shared.policy(), keep=keep, head_only=request.method == "HEAD")
        if keep:
            await self._write(answer)
            return True
        return await self._refuse(answer)

    async def _refuse(self, answer: bytes) -> bool:
        """The last answer on this connection."""
        await self._write(answer)
        return False

    def _may_keep(self, request: Request) -> bool:
        return keeps_alive(request.minor, request.headers) and not self._shared.crowded()

    async def _write(self, data: bytes) -> None:
        async with asyncio.timeout(self._shared.limits.idle):
            await self._client.write(data)

    # -- CONNECT --

    async def _tunnel(self, route: Route) -> bool:
        shared = self._shared
        try:
            upstream = self._upstream = await shared.upstreams.connect(route, shared.turn)
        except Unreachable as error:
            return await self._unreachable(route, error)
        await self._write(b"HTTP/1.1 200 Connection established\r\n\r\n")
        refused = await tunnel(self._source, self._client.write, upstream, route.target, shared.limits)
        shared.log(Decided(refused is None, str(route.target), refused or "tunnel"))
        return False

    async def _unreachable(self, route: Route, error: Unreachable, *, head_only: bool = False) -> bool:
        self._shared.log(Decided(False, str(route.target), str(error)))
        if error.denied:
            policy, denial = self._shared.policy(), Denial(str(route.target), str(error))
            return await self._refuse(refusals.denied(denial, policy, keep=False, head_only=head_only))
        return await self._refuse(refusals.failed(error.status, str(error), head_only=head_only))

    # -- plain requests --

    async def _forward(
        self, request: Request, route: Route, path: str, body: Body, headers: list[tuple[bytes, bytes]]
    ) -> bool:
        head_only = request.method == "HEAD"
        if route.mirror is not None and not _within(path, route.mirror):
            denial = Denial(
                f"http://{route.target}{path[:100]}", f"this mirror has nothing outside {prefix(route.mirror)}"
            )
            return await self._deny(request, denial, body)
        if _asks_for_websocket(request, route, body):
            return await self._switch(request, route, path, headers)
        head = _upstream_head(request, route, path, body, headers)
        try:
            response, sending = await self._exchange(request, route, head, body)
        except Unreachable as error:
            return await self._unreachable(route, error, head_only=head_only)
        self._shared.log(Decided(True, str(route.target), request.method))
        try:
            reusable = await self._answer(request, route, response, whole=sending is None or sending.done())
            if sending is not None and (not sending.done() or sending.exception() is not None):
                return False  # the server answered without wanting the rest
            return reusable
        except Malformed as error:  # the body broke off: the client sees it cut
            raise _Close from error
        finally:
            if sending is not None and not sending.done():
                sending.cancel()

    async def _switch(self, request: Request, route: Route, path: str, headers: list[tuple[bytes, bytes]]) -> bool:
        """A WebSocket, where the server agrees; its answer, where it does not."""
        self._drop()
        head = _upstream_head(request, route, path, NO_BODY, [*headers, *_SWITCH])
        try:
            upstream = await self._connect(route)
            await self._send(upstream, head)
            response = await self._final_head(upstream, switching=True)
        except Unreachable as error:
            return await self._unreachable(route, error)
        except (OSError, Ended, Malformed, TimeoutError) as error:
            status = 504 if isinstance(error, TimeoutError) else 502
            return await self._unreachable(route, Unreachable(_failure(route, error), status))
        self._shared.log(Decided(True, str(route.target), "WebSocket" if response.status == 101 else request.method))
        if response.status != 101:
            return await self._answer(request, route, response, whole=True)
        await self._write(write_head(b"HTTP/1.1 101 Switching Protocols", [*end_to_end(response.headers), *_SWITCH]))
        await Pipe(self._shared.limits.idle).run(self._source, self._client.write, upstream)
        return False

    async def _exchange(
        self, request: Request, route: Route, head: bytes, body: Body
    ) -> tuple[Response, asyncio.Task[None] | None]:
        """Sends the request and reads the answer's head. A connection that was kept and turned out dead is replaced once."""
        while True:
            kept = self._kept(route)
            upstream = kept or await self._connect(route)
            try:
                await self._send(upstream, head)
                sending = self._start_body(request, body, upstream)
                return await self._response_head(upstream, sending), sending
            except (OSError, Ended, Malformed, TimeoutError) as error:
                self._drop()
                if kept and body.framing is Framing.NONE and request.method in _SAFE:
                    continue
                raise Unreachable(_failure(route, error), 504 if isinstance(error, TimeoutError) else 502) from error

    def _kept(self, route: Route) -> Connection | None:
        upstream = self._upstream
        if upstream is not None and upstream.usable and self._leads_to == (server_of(route), route.mirror):
            return upstream
        self._drop()
        return None

    async def _connect(self, route: Route) -> Connection:
        self._upstream = await self._shared.upstreams.connect(route, self._shared.turn)
        self._leads_to = server_of(route), route.mirror
        return self._upstream

    def _start_body(self, request: Request, body: Body, upstream: Connection) -> asyncio.Task[None] | None:
        if body.framing is Framing.NONE:
            return None
        return asyncio.get_running_loop().create_task(self._send_body(request, body, upstream))

    async def _send(self, upstream: Connection, data: bytes) -> None:
        async with asyncio.timeout(self._shared.limits.idle):
            await upstream.write(data)

    async def _send_body(self, request: Request, body: Body, upstream: Connection) -> None:
        if b"100-continue" in tokens(request.headers, b"expect") and not self._source.buffer:
            await self._write(b"HTTP/1.1 100 Continue\r\n\r\n")
        async with aclosing(pieces(self._source, body)) as read:
            async for piece in self._patient(read):
                await self._send(upstream, chunk(piece) if body.framing is Framing.CHUNKED else piece)
        if body.framing is Framing.CHUNKED:
            await self._send(upstream, LAST_CHUNK)

    async def _response_head(self, upstream: Connection, sending: asyncio.Task[None] | None) -> Response:
        """The final answer's head; a body that breaks while it is sent ends the wait."""
        reading = asyncio.get_running_loop().create_task(self._final_head(upstream))
        try:
            waiting: set[asyncio.Task[Response] | asyncio.Task[None]] = (
                {reading} if sending is None else {reading, sending}
            )
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            if sending is not None and sending in done and sending.exception() is not None and not reading.done():
                if isinstance(sending.exception(), ConnectionError):
                    return await reading  # the server stopped listening: it may have answered why
                raise _Close from sending.exception()
            return await reading
        except BaseException:
            if sending is not None:
                sending.cancel()
            raise
        finally:
            reading.cancel()

    async def _final_head(self, upstream: Connection, *, switching: bool = False) -> Response:
        for _ in range(_INTERIM):
            async with asyncio.timeout(self._shared.limits.idle):
                response = await read_response(upstream.source)
            if response.status >= 200:
                return response
            if response.status == 101:
                if not switching or values(response.headers, b"upgrade") != [b"websocket"]:
                    raise Malformed("the server switches protocols unasked")
                return response
        raise Malformed("the server sends interim answers without end")

    async def _answer(self, request: Request, route: Route, response: Response, *, whole: bool) -> bool:
        """The server's answer to the client, framed anew; is the client's connection good for another request?"""
        try:
            body = response_body(response, request.method)
            headers = _answer_headers(response, route)
        except Malformed as error:
            self._drop()
            return await self._refuse(refusals.failed(502, f"the answer of {route.target} is refused: {error}"))
        framing = body.framing
        if framing is Framing.CLOSE and request.minor == 1:
            framing = Framing.CHUNKED
        if framing is Framing.CHUNKED and request.minor == 0:
            framing = Framing.CLOSE
        keep = framing is not Framing.CLOSE and whole and self._may_keep(request)
        headers += _framing_headers(framing, body, response, request.method)
        headers.append((b"Connection", b"keep-alive" if keep else b"close"))
        await self._write(write_head(b"HTTP/1.1 %d %s" % (response.status, response.reason), headers))
        upstream = self._upstream
        assert upstream is not None
        async with aclosing(pieces(upstream.source, body)) as read:
            async for piece in self._patient(read):
                await self._write(chunk(piece) if framing is Framing.CHUNKED else piece)
        if framing is Framing.CHUNKED:
            await self._write(LAST_CHUNK)
        if body.framing is Framing.CLOSE or not keeps_alive(response.minor, response.headers):
            self._drop()
        return keep

    async def _patient(self, read: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        """Pieces, each within the idle time."""
        while True:
            async with asyncio.timeout(self._shared.limits.idle):
                piece = await anext(read, None)
            if piece is None:
                return
            yield piece


def _failure(route: Route, error: BaseException) -> str:
    if isinstance(error, Malformed):
        return f"{route.target} answered with something that is refused: {error}"
    return f"{route.target} " + (
        "did not answer in time" if isinstance(error, TimeoutError) else "ended the connection"
    )


# -- what was asked for ------------------------------------------------------------------------------------------------


def _asked(request: Request) -> tuple[Target, str]:
    """Target and path of a request whose parts all say the same."""
    if request.method == "TRACE":
        raise Malformed("TRACE is not passed on", 405)
    if request.method == "CONNECT":
        name, port = split_authority(request.target)
        if port is None:
            raise Malformed("CONNECT needs host:port")
        target, path = Target(name, port, True), ""
    else:
        target, path = _absolute(request.target)
    hosts = values(request.headers, b"host")
    if len(hosts) > 1 or (not hosts and request.minor == 1):
        raise Malformed("there must be exactly one Host header")
    if hosts and not _same(hosts[0].decode("latin-1"), target):
        raise Malformed(f"the Host header {hosts[0][:80].decode('latin-1')!a} is not the host of the request, {target}")
    return target, path


def _absolute(text: str) -> tuple[Target, str]:
    match = _ABSOLUTE.fullmatch(text)
    if match is None:
        raise Malformed("this is a proxy: requests name a whole URL, http://name/path (set http_proxy)")
    if match[1].lower() == "https":
        raise Malformed("https is reached by CONNECT (set https_proxy), not by a plain request")
    if match[1].lower() != "http":
        raise Malformed(f"only http and https are reachable, not {match[1][:20]}")
    name, port = split_authority(match[2])
    path = match[3] or "/"
    return Target(name, port or HTTP, False), path if path.startswith("/") else "/" + path


def _same(host: str, target: Target) -> bool:
    try:
        name, port = split_authority(host)
    except BadName:
        return False
    return name == target.name and (port or (TLS if target.tls else HTTP)) == target.port


def _reads(mirror: Mirror | None, request: Request, body: Body) -> bool:
    """A mirror is for reading. A server may take the body of a GET, which few expect, for another request."""
    return method_allowed(mirror, request.method) and (
        mirror is None or mirror.takes_writes or body.framing is Framing.NONE
    )


def _asks_for_websocket(request: Request, route: Route, body: Body) -> bool:
    """Only of a server that the operator says is one to talk to: what passes then is looked at no more."""
    return (
        route.mirror is not None
        and route.mirror.kind is MirrorKind.API
        and (request.method, request.minor, body.framing) == ("GET", 1, Framing.NONE)
        and b"upgrade" in tokens(request.headers, b"connection")
        and [value.lower() for value in values(request.headers, b"upgrade")] == [b"websocket"]
    )


def _within(path: str, mirror: Mirror) -> bool:
    """Below the mirror's prefix, and no way of reading it climbs out."""
    plain = path.partition("?")[0]
    if not plain.startswith(prefix(mirror)) and plain + "/" != prefix(mirror):
        return False
    decoded = plain.encode("latin-1")
    for _ in range(3):
        if b"\\" in decoded or any(part.partition(b";")[0] in (b"..", b".") for part in decoded.split(b"/")):
            return False
        decoded = unquote_to_bytes(decoded)
    return True


# -- what is passed on -------------------------------------------------------------------------------------------------


def _upstream_head(request: Request, route: Route, path: str, body: Body, headers: list[tuple[bytes, bytes]]) -> bytes:
    added = [(name.encode(), value.encode("latin-1")) for name, value in _added(route).items()]
    replaced = {b"host", *(name.lower() for name, _ in added)}
    fields = [(b"Host", server_of(route).authority.encode())]
    fields += [(name, value) for name, value in headers if name.lower() not in replaced]
    fields += added
    if body.framing is Framing.CHUNKED:
        fields.append((b"Transfer-Encoding", b"chunked"))
    elif body.framing is Framing.LENGTH or values(request.headers, b"content-length"):
        fields.append((b"Content-Length", b"%d" % body.length))
    return write_head(b"%s %s HTTP/1.1" % (request.method.encode(), path.encode("latin-1")), fields)


def _added(route: Route) -> dict[str, str]:
    return route.mirror.headers if route.mirror is not None else {}


def _answer_headers(response: Response, route: Route) -> list[tuple[bytes, bytes]]:
    headers = end_to_end(response.headers)
    places = [value for name, value in headers if name.lower() == b"location"]
    if len(places) > 1:
        raise Malformed("more than one Location")
    if not places:
        return headers
    place = _location(places[0].decode("latin-1"), route)
    return [(name, place if name.lower() == b"location" else value) for name, value in headers]


def _location(text: str, route: Route) -> bytes:
    """Where a redirect leads, as the sandbox can ask for it. The client follows it, and is then decided anew by name.

    Into a mirror's own server: under the mirror's name. To an address: refused here, since no rule can allow it.
    """
    server = server_of(route)
    scheme = "https" if server.encrypted else "http"
    try:
        url = urlsplit(text)
        host, port = url.hostname, url.port
    except ValueError:
        raise Malformed("a Location that is no URL") from None
    if host is None:
        return text.encode("latin-1")
    port = port or (TLS if (url.scheme or scheme) == "https" else HTTP)
    if route.mirror is not None and (url.scheme or scheme, host, port) == (scheme, server.host.lower(), server.port):
        rest = (url.path or "/") + (f"?{url.query}" if url.query else "")
        return f"http://{route.mirror.name}{rest}".encode("latin-1")
    try:
        normal(host)
    except BadName:
        raise Malformed(f"it redirects to {host[:60]!a}, which is no name and cannot be reached") from None
    return text.encode("latin-1")


def _framing_headers(framing: Framing, body: Body, response: Response, method: str) -> Headers:
    if framing is Framing.CHUNKED:
        return ((b"Transfer-Encoding", b"chunked"),)
    if framing is Framing.LENGTH:
        return ((b"Content-Length", b"%d" % body.length),)
    declared = values(response.headers, b"content-length")
    if framing is Framing.NONE and response.status not in (204,) and response.status >= 200:
        if method == "HEAD" or response.status == 304:
            return ((b"Content-Length", declared[0]),) if declared else ()
        return ((b"Content-Length", b"0"),)
    return ()
