"""HTTP/1.1 messages, strictly: what two readers could understand in two ways is refused (RFC 9112).

Heads are parsed whole and written anew, bodies are taken apart and framed again, so nothing of how a message was spelled
reaches the other side.
"""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Iterable
from enum import Enum
from typing import NamedTuple

from .source import Ended, Source, TooLong

MAX_REQUEST_HEAD = 32 * 1024
MAX_RESPONSE_HEAD = 64 * 1024
MAX_HEADERS = 256
PIECE = 64 * 1024
_MAX_CHUNK_LINE = 1024
_MAX_TRAILERS = 8 * 1024

_TOKEN = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_FIELD = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+):([^\x00-\x08\x0a-\x1f\x7f]*)")
_REQUEST_LINE = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]{1,32}) ([\x21-\x7e]+) HTTP/1\.([01])")
_STATUS_LINE = re.compile(rb"HTTP/1\.([01]) ([1-9][0-9]{2})(?: ([^\x00-\x08\x0a-\x1f\x7f]*))?")
_LENGTH = re.compile(rb"[0-9]{1,15}")
_CHUNK = re.compile(rb"([0-9A-Fa-f]{1,15})[ \t]*(?:;[^\x00-\x08\x0a-\x1f\x7f]*)?")
# Of one connection, never passed on; Expect is answered here, trailers are dropped.
_HOP = frozenset((b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"proxy-connection", b"te",
                  b"trailer", b"transfer-encoding", b"upgrade", b"expect", b"http2-settings"))  # fmt: skip
# What frames or routes a message cannot be declared to be of one connection.
_FIXED = frozenset((b"host", b"content-length", b"transfer-encoding", b"authorization", b"cookie", b"cache-control"))


class Malformed(ValueError):
    """A message that is refused: with which status, and why."""

    def __init__(self, why: str, status: int = 400) -> None:
        super().__init__(why)
        self.status = status


Headers = tuple[tuple[bytes, bytes], ...]


class Request(NamedTuple):
    method: str
    target: str
    minor: int  # of HTTP/1.x
    headers: Headers


class Response(NamedTuple):
    status: int
    reason: bytes
    minor: int
    headers: Headers


class Framing(Enum):
    NONE = "none"
    LENGTH = "length"
    CHUNKED = "chunked"
    CLOSE = "close"  # until the connection ends


class Body(NamedTuple):
    framing: Framing
    length: int = 0


NO_BODY = Body(Framing.NONE)


# -- heads -------------------------------------------------------------------------------------------------------------


async def read_request(source: Source) -> Request | None:
    """The next request's head; None when the client ended before one began."""
    if not source.buffer and not await source.fill():
        return None
    lines = await _head(source, MAX_REQUEST_HEAD)
    match = _REQUEST_LINE.fullmatch(lines[0])
    if match is None:
        if re.search(rb" HTTP/[^1]|^PRI \* ", lines[0]):
            raise Malformed("only HTTP/1.0 and HTTP/1.1 are spoken here", 505)
        raise Malformed("the request line is not `METHOD target HTTP/1.1`")
    return Request(match[1].decode(), match[2].decode(), int(match[3]), _fields(lines[1:]))


async def read_response(source: Source) -> Response:
    lines = await _head(source, MAX_RESPONSE_HEAD)
    match = _STATUS_LINE.fullmatch(lines[0])
    if match is None:
        raise Malformed("the server's status line is not HTTP/1.1")
    return Response(int(match[2]), match[3] or b"", int(match[1]), _fields(lines[1:]))


async def _head(source: Source, limit: int) -> list[bytes]:
    try:
        head = await source.head(limit)
    except TooLong:
        raise Malformed(f"the head is longer than {limit} bytes", 431) from None
    except Ended:
        if not source.buffer:
            raise
        raise Malformed("the head is cut off") from None
    if b"\n" in head.replace(b"\r\n", b""):
        raise Malformed("a line that ends in LF without CR")
    lines = head.split(b"\r\n")
    if len(lines) > MAX_HEADERS + 1:
        raise Malformed(f"more than {MAX_HEADERS} header fields", 431)
    return lines


def _fields(lines: list[bytes]) -> Headers:
    found: list[tuple[bytes, bytes]] = []
    for line in lines:
        match = _FIELD.fullmatch(line)
        if match is None:
            folded = line[:1] in (b" ", b"\t")
            raise Malformed("a folded header line" if folded else f"a malformed header line: {_shown(line)}")
        found.append((match[1], match[2].strip(b" \t")))
    return tuple(found)


def _shown(line: bytes) -> str:
    return ascii(line[:60].decode("latin-1"))


def values(headers: Headers, name: bytes) -> list[bytes]:
    """Every value of a field, in order; `name` in lower case."""
    return [value for key, value in headers if key.lower() == name]


def tokens(headers: Headers, name: bytes) -> set[bytes]:
    """Members of a comma-separated field, lower case."""
    found = b",".join(values(headers, name)).lower().split(b",")
    return {token.strip(b" \t") for token in found} - {b""}


def keeps_alive(minor: int, headers: Headers) -> bool:
    options = tokens(headers, b"connection") | tokens(headers, b"proxy-connection")
    return b"close" not in options and (minor == 1 or b"keep-alive" in options)


def end_to_end(headers: Headers) -> list[tuple[bytes, bytes]]:
    """Without what belongs to one connection only, or was declared to. Malformed when that would change the message."""
    declared = tokens(headers, b"connection")
    if not declared.isdisjoint(_FIXED):
        raise Malformed("Connection names a header that is not of the connection")
    dropped = _HOP | declared | {b"content-length"}
    return [(name, value) for name, value in headers if name.lower() not in dropped]


def write_head(first: bytes, headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    return b"\r\n".join([first, *(b"%s: %s" % field for field in headers), b"", b""])


# -- bodies ------------------------------------------------------------------------------------------------------------


def request_body(request: Request) -> Body:
    return _declared(request.minor, request.headers) or NO_BODY


def response_body(response: Response, method: str) -> Body:
    declared = _declared(response.minor, response.headers)
    if method == "HEAD" or response.status in (204, 304) or response.status < 200:
        return NO_BODY
    return declared or Body(Framing.CLOSE)


def _declared(minor: int, headers: Headers) -> Body | None:
    """What the head says of the body's end; Malformed when it says two things, or one in an odd way."""
    codings, lengths = values(headers, b"transfer-encoding"), values(headers, b"content-length")
    if codings:
        if lengths:
            raise Malformed("both Transfer-Encoding and Content-Length")
        if minor == 0:
            raise Malformed("Transfer-Encoding in HTTP/1.0")
        if len(codings) != 1 or codings[0].lower() != b"chunked":
            raise Malformed("a Transfer-Encoding other than chunked", 501)
        return Body(Framing.CHUNKED)
    if not lengths:
        return None
    if len(lengths) != 1 or _LENGTH.fullmatch(lengths[0]) is None:
        raise Malformed("a Content-Length that is not one number")
    length = int(lengths[0])
    return Body(Framing.LENGTH, length) if length else NO_BODY


async def pieces(source: Source, body: Body) -> AsyncGenerator[bytes, None]:
    """The body's bytes as they come. Malformed or Ended when it is not whole."""
    if body.framing is Framing.LENGTH:
        left = body.length
        while left:
            piece = await source.some(min(left, PIECE))
            if not piece:
                raise Ended
            left -= len(piece)
            yield piece
    elif body.framing is Framing.CHUNKED:
        async for piece in _chunks(source):
            yield piece
    elif body.framing is Framing.CLOSE:
        while piece := await source.some(PIECE):
            yield piece


async def _chunks(source: Source) -> AsyncGenerator[bytes, None]:
    try:
        while left := _chunk_size(await source.line(_MAX_CHUNK_LINE)):
            while left:
                piece = await source.some(min(left, PIECE))
                if not piece:
                    raise Ended
                left -= len(piece)
                yield piece
            if await source.line(0):
                raise Malformed("a chunk that does not end where it says")
        budget = _MAX_TRAILERS
        while trailer := await source.line(budget):
            budget -= len(trailer)
            _fields([trailer])
    except TooLong:
        raise Malformed("a chunk or its trailers are malformed or too long") from None


def _chunk_size(line: bytes) -> int:
    match = _CHUNK.fullmatch(line)
    if match is None:
        raise Malformed("a malformed chunk size")
    return int(match[1], 16)


def chunk(piece: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(piece), piece)


LAST_CHUNK = b"0\r\n\r\n"
