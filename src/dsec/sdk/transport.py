"""HTTP to the apiserver: one pool of connections, errors as exceptions, bounded retries of what may be repeated."""

from __future__ import annotations

import asyncio
import resource
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import NamedTuple, TypeVar, cast

import aiohttp
import msgspec
from yarl import URL

from dsec.protocol.errors import ErrorBody
from dsec.protocol.rollouts import STEP_HEADER, StepRef

from . import unary
from .discovery import Endpoint, discover
from .errors import ConnectionLost, ConnectTimeout, DSecError, InternalError, InvalidRequest, from_body, replaced

T = TypeVar("T")
INCARNATION = "X-DSec-Incarnation"
SIZE = "X-DSec-Size"  # bytes that an answer will have, as far as can be told when it begins
ERROR_HEADER = "X-DSec-Error"
NDJSON = "application/x-ndjson"
_POOL = 4096
_PROXY_POOL = 12  # of the connections that a sandbox has (`edge/proxy/limits.py`), most
_PROXY_KEEP_ALIVE_S = 25  # shorter than the proxy's
_KEEP_ALIVE_S = 55  # shorter than the server's, so that it is never the server that closes first
_CONNECT_S = 10.0
_CLOSE_S = 3.0
_FIRST_DELAY, _LAST_DELAY = 0.05, 0.25
_MAX_TIMEOUTS = 64  # kept made; callers use few different ones

Query = Mapping[str, str] | Sequence[tuple[str, str]] | None
Body = bytes | AsyncIterator[bytes] | None
_encoder = msgspec.json.Encoder()
_decoders: dict[object, msgspec.json.Decoder[object]] = {}


def encode(value: object) -> bytes:
    """The body of a request. InvalidRequest for text that is no Unicode (names of files are given as bytes)."""
    try:
        return _encoder.encode(value)
    except UnicodeEncodeError as error:
        text = error.object[max(0, error.start - 20) : error.end + 20]
        raise InvalidRequest(
            f"{text!r} holds a lone surrogate, which is no text", hint="decode it without surrogateescape"
        ) from error


class _ErrorReply(msgspec.Struct):
    error: ErrorBody


class _Source:
    """A body that is made while it is sent. When making it fails, that is the caller's error, not the connection's."""

    def __init__(self, body: AsyncIterator[bytes]) -> None:
        self._body = body
        self.error: Exception | None = None

    async def pieces(self) -> AsyncIterator[bytes]:
        try:
            async for piece in self._body:
                yield piece
        except Exception as error:
            self.error = error
            raise


class Target(NamedTuple):
    """The sandbox a request is about; every answer's incarnation is compared with it. step: which step of a rollout it is."""

    sandbox_id: str
    incarnation: int
    step: StepRef | None = None

    def headers(self) -> dict[str, str]:
        own = {INCARNATION: str(self.incarnation)}
        return own if self.step is None else {**own, STEP_HEADER: str(self.step)}


def decode(body: bytes, kind: type[T]) -> T:
    decoder = _decoders.get(kind)
    if decoder is None:
        decoder = _decoders[kind] = msgspec.json.Decoder(kind)
    try:
        return decoder.decode(body)  # type: ignore[return-value]
    except (msgspec.DecodeError, RecursionError) as error:
        raise InternalError(
            f"unreadable answer: {error}", hint="do the SDK and the service have the same version?"
        ) from error


def _error(status: int, body: bytes, sandbox_id: str | None) -> DSecError:
    try:
        return from_body(msgspec.json.decode(body, type=_ErrorReply).error, sandbox_id)
    except msgspec.DecodeError:
        pass
    text = body[:200].decode("utf-8", "replace")
    if status in (502, 503, 504):  # a proxy in between speaks for a service that is not there
        return ConnectionLost(f"HTTP {status}: {text}", retryable=True)
    return InternalError(
        f"HTTP {status} without a DSec error: {text}", hint="is DSEC_URL the address of a DSec service?"
    )


def _pool_size() -> int:
    """Many commands wait at once, each on a connection; but leave half of the descriptors to the program."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _POOL if soft == resource.RLIM_INFINITY else min(_POOL, max(64, soft // 2))


class Transport:
    """Connections to one service. Opened at first use; belongs to the event loop that opened it."""

    def __init__(self, url: str | None, api_key: str | None, project: str | None, request_timeout: float) -> None:
        self._wanted = (url, api_key, project)
        self.request_timeout = request_timeout
        self._endpoint: Endpoint | None = None
        self._session: aiohttp.ClientSession | None = None
        self._unary: unary.Unary | None = None
        self._timeouts: dict[float, aiohttp.ClientTimeout] = {}
        self.reached = False

    async def open(self) -> None:
        if self._session is not None:
            return
        self._endpoint = discover(*self._wanted)
        headers = {"Authorization": f"Bearer {self._endpoint.api_key}"}
        if self._endpoint.project:
            headers["X-DSec-Project"] = self._endpoint.project
        proxy = self._endpoint.proxy
        limit, keep_alive = (_PROXY_POOL, _PROXY_KEEP_ALIVE_S) if proxy else (_pool_size(), _KEEP_ALIVE_S)
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=limit, limit_per_host=0, keepalive_timeout=keep_alive),
            proxy=proxy or None,
            headers=headers,
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=self.timeout(),
            auto_decompress=False,
            read_bufsize=unary.READ_BUFFER,
            skip_auto_headers=("User-Agent", "Accept-Encoding"),
        )
        self._unary = unary.Unary(self._session, self._endpoint.url, headers, proxy)

    async def close(self) -> None:
        session, self._session, self._unary = self._session, None, None
        if session is not None:
            await session.close()

    def timeout(self, wait: float = 0.0) -> aiohttp.ClientTimeout:
        """Bounds of a request whose answer may rightly take `wait` seconds longer."""
        made = self._timeouts.get(wait)
        if made is None:
            limit = self.request_timeout
            made = aiohttp.ClientTimeout(total=None, sock_connect=min(_CONNECT_S, limit), sock_read=limit + wait)
            if len(self._timeouts) == _MAX_TIMEOUTS:
                self._timeouts.clear()
            self._timeouts[wait] = made
        return made

    def url(self, path: str, query: Query = None) -> URL:
        """path is already quoted; query is not."""
        assert self._endpoint is not None
        url = URL(self._endpoint.url + path, encoded=True)
        return url.with_query(query) if query else url

    async def request(
        self,
        method: str,
        path: str,
        *,
        query: Query = None,
        body: Body = None,
        length: int | None = None,
        target: Target | None = None,
        wait: float = 0.0,
        repeat: bool = True,
    ) -> unary.Reply:
        """One request, whole answer. With `repeat`, tried again while the connection is lost, for `request_timeout` at most.

        That time begins when the connection is lost, since the answer may rightly take `wait` seconds to come. length: of a
        body that is made while it is sent, where it is known.
        """
        if self._unary is None:
            await self.open()
        assert self._unary is not None
        small = self._unary.takes(path, body) and (query is None or isinstance(query, dict))
        deadline, lost = time.monotonic() + self.request_timeout, False
        delay = _FIRST_DELAY
        while True:
            try:
                if small:
                    return await self._ask(
                        method, path, cast("dict[str, str]", query), cast("bytes", body), target, wait
                    )
                async with self.stream(
                    method, path, query=query, body=body, length=length, target=target, wait=wait
                ) as response:
                    return unary.Reply(response.status, response.headers, await _read(response, target))
            except ConnectionLost as error:
                if not lost and not isinstance(error, ConnectTimeout):
                    deadline, lost = time.monotonic() + self.request_timeout, True
                if not (repeat and self.reached) or time.monotonic() + delay > deadline:
                    raise
            await asyncio.sleep(delay)
            delay = min(2 * delay, _LAST_DELAY)

    async def call(
        self,
        method: str,
        path: str,
        kind: type[T],
        *,
        query: Query = None,
        body: Body = None,
        target: Target | None = None,
        wait: float = 0.0,
        repeat: bool = True,
    ) -> T:
        reply = await self.request(method, path, query=query, body=body, target=target, wait=wait, repeat=repeat)
        return decode(reply.body, kind)

    async def _ask(
        self,
        method: str,
        path: str,
        query: dict[str, str] | None,
        body: bytes | None,
        target: Target | None,
        wait: float,
    ) -> unary.Reply:
        """As `stream`, for what `Unary` takes."""
        if self._unary is None:  # closed while this request waited to be repeated
            await self.open()
        assert self._unary is not None
        own = "" if target is None else f"{INCARNATION}: {target.incarnation}\r\n"
        if target is not None and target.step is not None:
            own += f"{STEP_HEADER}: {target.step}\r\n"
        try:
            reply = await self._unary.ask(
                method, path, unary.query_of(query) if query else "", own, body, self.timeout(wait)
            )
        except unary.Cut as error:
            self.reached = True
            assert error.__cause__ is not None
            raise cut(error.__cause__, target) from error.__cause__
        except unary.FAILURES as error:
            raise self._lost(error, target) from error
        self.reached = True
        if reply.status >= 300:
            raise _error(reply.status, reply.body, target.sandbox_id if target else None)
        if target is not None:
            _check_incarnation(reply.headers, target)
        return reply

    @asynccontextmanager
    async def stream(
        self,
        method: str,
        path: str,
        *,
        query: Query = None,
        body: Body = None,
        length: int | None = None,
        target: Target | None = None,
        wait: float = 0.0,
        accept: str | None = None,
        again: bool = False,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """A response whose body is still to come; errors are raised, the incarnation is checked.

        again: a request that does no harm twice, so one that found a dead connection in the pool is sent once more.
        """
        if self._session is None:
            await self.open()
        assert self._session is not None
        source = None if body is None or isinstance(body, bytes) else _Source(body)
        headers: dict[str, str] = {}
        if accept is not None:
            headers["Accept"] = accept
        if length is not None:
            headers["Content-Length"] = str(length)  # else each piece is framed, and copied for it
        if target is not None:
            headers.update(target.headers())
        data = body if source is None else source.pieces()
        while True:
            try:
                response = await self._session.request(
                    method,
                    self.url(path, query),
                    data=data,
                    headers=headers,
                    timeout=self.timeout(wait),
                    allow_redirects=False,
                )
                break
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                if source is not None and source.error is not None:
                    raise source.error from None
                if not (
                    again
                    and self.reached
                    and isinstance(error, aiohttp.ServerDisconnectedError | aiohttp.ClientOSError)
                ):
                    raise self._lost(error, target) from error
                again = False
        try:
            self.reached = True
            if response.status >= 300:
                raise _error(response.status, await _read(response, target), target.sandbox_id if target else None)
            if target is not None:
                _check_incarnation(response.headers, target)
            yield response
        finally:
            if response.content.at_eof():
                response.release()
            else:
                response.close()

    @asynccontextmanager
    async def socket(
        self, path: str, query: Mapping[str, str], target: Target, *, heartbeat: float | None = 20
    ) -> AsyncIterator[aiohttp.ClientWebSocketResponse]:
        """A WebSocket. A refusal raises what the service said of it.

        heartbeat: seconds; None where the service may rightly be slow to read.
        """
        if self._session is None:
            await self.open()
        assert self._session is not None
        try:
            socket = await self._session.ws_connect(
                self.url(path, query), headers=target.headers(), heartbeat=heartbeat, max_msg_size=4 * 1024 * 1024,
                timeout=aiohttp.ClientWSTimeout(ws_close=2.0),
            )  # fmt: skip
        except aiohttp.WSServerHandshakeError as refused:
            said = refused.headers.get(ERROR_HEADER) if refused.headers else None
            if said is None:  # a proxy in between: the caller may ask again in a way that gets the text
                raise
            self.reached = True
            raise from_body(decode(said.encode("latin-1"), ErrorBody), target.sandbox_id) from refused
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise self._lost(error, target) from error
        self.reached = True
        try:
            yield socket
        finally:
            with suppress(TimeoutError):
                async with asyncio.timeout(_CLOSE_S):  # a service that does not read does not take our farewell either
                    await socket.close()

    def _lost(self, error: BaseException, target: Target | None) -> ConnectionLost:
        assert self._endpoint is not None
        cls = ConnectTimeout if isinstance(error, TimeoutError) else ConnectionLost
        what = (
            f"no answer within {self.request_timeout:g} s"
            if cls is ConnectTimeout
            else str(error) or type(error).__name__
        )
        return cls(
            f"cannot reach DSec at {self._endpoint.url}: {what}",
            hint="run `dsec up`, or see `dsec status`",
            retryable=True,
            details={"sandbox_id": target.sandbox_id} if target else None,
        )


def _check_incarnation(headers: Mapping[str, str], target: Target) -> None:
    found = headers.get(INCARNATION)
    if found is not None and found != str(target.incarnation):
        raise replaced(target.sandbox_id, target.incarnation, int(found))


async def _read(response: aiohttp.ClientResponse, target: Target | None) -> bytes:
    try:
        return await response.read()
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        raise cut(error, target) from error


def cut(error: BaseException, target: Target | None) -> ConnectionLost:
    """An answer that broke off."""
    return ConnectionLost(
        f"the answer broke off: {str(error) or type(error).__name__}",
        retryable=True,
        details={"sandbox_id": target.sandbox_id} if target else None,
    )


async def chunks(response: aiohttp.ClientResponse, target: Target | None = None) -> AsyncIterator[bytes]:
    """The body as it arrives; ConnectionLost when it breaks off."""
    try:
        async for chunk in response.content.iter_any():
            yield chunk
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        raise cut(error, target) from error


async def json_lines(response: aiohttp.ClientResponse, target: Target | None = None) -> AsyncIterator[bytes]:
    """Lines of an NDJSON body; an `{"error"}` line is raised."""
    rest = b""
    async for chunk in chunks(response, target):
        *whole, rest = (rest + chunk).split(b"\n")
        for line in whole:
            if not line:  # only a sign of life
                continue
            if line.startswith(b'{"error":{"kind"'):
                raise from_body(decode(line, _ErrorReply).error, target.sandbox_id if target else None)
            yield line
    if rest:
        raise cut(EOFError("no end of line"), target)
