"""One small request, one whole answer, over aiohttp's pool and parser but without its session in between.

`ClientSession.request` prepares for redirects, cookies, proxies, traces, uploads and streamed answers anew each time, which
costs more than all the rest of a short request. Nothing of that happens here: the bytes of the request are put together from
what never changes, and what comes back is read to its end before anybody sees it.
"""

from __future__ import annotations

import asyncio
import re
from functools import cached_property
from typing import NamedTuple
from urllib.parse import quote_plus

import aiohttp
from aiohttp.client_proto import ResponseHandler
from aiohttp.client_reqrep import ConnectionKey
from aiohttp.http import HttpProcessingError
from multidict import CIMultiDictProxy
from yarl import URL

MAX_BODY = 64 * 1024  # more is sent at the pace of the other side, which is the session's work
READ_BUFFER = 256 * 1024
_PLAIN = re.compile(r"[!-~]+")
_RETRIED = frozenset(("GET", "PUT"))
"""Found dead in the pool, they are sent once more. Not a DELETE: the second of a file would not find what the first removed."""

FAILURES = (aiohttp.ClientError, TimeoutError, OSError)


class Reply(NamedTuple):
    status: int
    headers: CIMultiDictProxy[str]
    body: bytes


class Cut(Exception):
    """The answer began and broke off; the cause says why."""


class _Where(aiohttp.ClientRequest):
    """Tells the pool which service a connection is for."""

    @cached_property
    def connection_key(self) -> ConnectionKey:
        return super().connection_key


class Unary:
    """Small requests to one service."""

    def __init__(self, session: aiohttp.ClientSession, url: str, headers: dict[str, str], proxy: str = "") -> None:
        connector = session.connector
        assert connector is not None
        base = URL(url, encoded=True)
        self._connector = connector
        via = URL(proxy) if proxy else None
        self._where = _Where("GET", base, loop=asyncio.get_running_loop(), session=session, proxy=via)
        self._prefix = (str(base) if proxy else base.raw_path).rstrip("/")  # a proxy is told the whole address
        fixed = {"Host": self._where.headers["Host"], **headers, "Accept": "*/*"}
        for name, value in fixed.items():
            if re.search("[\r\n\0]", value):
                raise ValueError(f"the value of {name} is no header")
        self._fixed = " HTTP/1.1\r\n" + "".join(f"{name}: {value}\r\n" for name, value in fixed.items())

    def takes(self, path: str, body: object) -> bool:
        """Whether a request is small and plain enough to be made here."""
        fits = body is None or (isinstance(body, bytes) and len(body) <= MAX_BODY)
        return fits and _PLAIN.fullmatch(path) is not None

    async def ask(
        self, method: str, path: str, query: str, own: str, body: bytes | None, timeout: aiohttp.ClientTimeout
    ) -> Reply:
        """`own`: further header lines. Raises FAILURES when there is no answer, `Cut` when it is not whole."""
        head = f"{method} {self._prefix}{path}{query}{self._fixed}{own}"
        if body is not None:
            head += f"Content-Length: {len(body)}\r\nContent-Type: application/octet-stream\r\n\r\n"
            request = head.encode() + body
        elif method == "GET":
            request = f"{head}\r\n".encode()
        else:
            request = f"{head}Content-Length: 0\r\n\r\n".encode()
        try:
            return await self._exchange(request, timeout)
        except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError) as error:
            if method not in _RETRIED or isinstance(error, aiohttp.ClientConnectorError):
                raise
        return await self._exchange(request, timeout)

    async def _exchange(self, request: bytes, timeout: aiohttp.ClientTimeout) -> Reply:
        connection = await self._connector.connect(self._where, traces=[], timeout=timeout)
        try:
            protocol = connection.protocol
            assert protocol is not None
            reply = await _converse(protocol, request, timeout.sock_read)
        except BaseException:
            connection.close()
            raise
        connection.release()
        return reply


async def _converse(protocol: ResponseHandler, request: bytes, read_timeout: float | None) -> Reply:
    protocol.set_response_params(
        read_until_eof=True, auto_decompress=False, read_timeout=read_timeout, read_bufsize=READ_BUFFER
    )
    transport = protocol.transport
    if transport is None:
        raise aiohttp.ServerDisconnectedError
    transport.write(request)
    protocol.start_timeout()
    try:
        message, payload = await protocol.read()
        while message.code < 200:
            message, payload = await protocol.read()
    except HttpProcessingError as error:
        raise aiohttp.ClientPayloadError(f"the answer is not HTTP: {error.message}") from error
    try:
        body = payload.read_nowait() if payload.is_eof() else await payload.read()
    except FAILURES as error:
        raise Cut from error
    return Reply(message.code, message.headers, body)


def query_of(query: dict[str, str]) -> str:
    """As the session would write it."""
    return "?" + "&".join([f"{name}={quote_plus(value, safe='=')}" for name, value in query.items()])
