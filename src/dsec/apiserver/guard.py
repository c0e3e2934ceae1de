"""Connections that ask for nothing: bounded in number, time and size of their headers, so that thousands of them starve nobody.

Who connects and says nothing, or says it a byte a minute, costs a descriptor and some memory. Headers must be there in time;
a body must go on coming as long as we are willing to take it; and when there are too many connections, one that no request
is at work on gives way to the new one, the longest silent first. A request that is at work is never cut off for that: when
all are at work, the new connection is refused with a typed error.
"""

from __future__ import annotations

import asyncio
from typing import ClassVar

import msgspec
from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from dsec.protocol.errors import STATUS, ErrorBody, ErrorKind
from dsec.protocol.ids import new_request_id

from .bodies import ErrorReply
from .direct import DirectProtocol
from .exchange import encode, error_body

_SWEEP_S = 0.5
_PART = 64
MAX_HEAD = 64 * 1024  # bytes of a request's first line and headers
MAX_HEADERS = 128
_HEAD_TOO_LARGE = 431


class Bounds(msgspec.Struct, frozen=True):
    """connections: at once, WebSockets included. header_s: from the first byte (or the connection) to the end of the headers.
    body_s: between two pieces of a body. stalled_s: a body that has said nothing for so long gives way when room is needed.
    """

    connections: int = 8192
    header_s: float = 15.0
    body_s: float = 120.0
    stalled_s: float = 10.0


class GuardedProtocol(DirectProtocol):
    """One connection, with an eye on the clock."""

    bounds: ClassVar[Bounds] = Bounds()
    _sweeping: ClassVar[bool] = False

    _heard = 0.0
    _head_since: float | None = None  # headers are awaited since then
    _head_size = 0  # bytes of what came meanwhile, more or less
    _coming = 0  # bytes of what is being looked at
    _in_body = False  # between a request's headers and its end, be it answered already or not
    _refused = False  # whatever else comes is not looked at

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._heard = self._head_since = self.loop.time()
        if len(self.connections) > self.bounds.connections and not self._make_room():
            self._refuse(
                ErrorKind.CAPACITY,
                f"all {self.bounds.connections} connections are at work",
                "close some, or ask again in a moment",
            )
            return
        if not GuardedProtocol._sweeping:
            GuardedProtocol._sweeping = True
            self.loop.call_later(_SWEEP_S, self._sweep)

    def data_received(self, data: bytes) -> None:
        self._heard = self.loop.time()
        if self._refused:
            return
        self._coming = len(data)
        super().data_received(data)
        if self._head_since is not None:
            self._head_size += len(data)
            if self._head_size > MAX_HEAD:
                self._refuse_head()
        elif not self._at_work() and not self._in_body:
            self._head_since = self._heard  # something came, but no request

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._head_since = self._heard
        self._head_size = 0

    def on_headers_complete(self) -> None:
        self._head_since = None
        self._in_body = True
        too_large = self._head_size + self._coming > MAX_HEAD and self._head_bytes() > MAX_HEAD
        if too_large or len(self.headers) > MAX_HEADERS:
            self._refuse_head()
        elif not self._refused:
            super().on_headers_complete()

    def _head_bytes(self) -> int:
        """Of what came, how much is this head: a body may have come with it."""
        return len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)

    def on_body(self, body: bytes) -> None:
        if not self._refused:
            super().on_body(body)

    def on_message_complete(self) -> None:
        self._in_body = False
        if not self._refused:
            super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """What is no HTTP; the parser does not say more."""
        self._refuse(ErrorKind.INVALID, "this is no HTTP/1.1 request", "GET /openapi.json describes every request")

    def _refuse_head(self) -> None:
        text = f"first line and headers are more than {MAX_HEAD} bytes, or more than {MAX_HEADERS} headers"
        self._refuse(ErrorKind.TOO_LARGE, text, "send large contents as a body", _HEAD_TOO_LARGE)

    # -- who gives way --

    def _make_room(self) -> bool:
        """Ends some that nothing is at work on, the longest silent first: a few at once, so that this is not done for each."""
        now = self.loop.time()
        others = (one for one in self.connections if isinstance(one, GuardedProtocol) and one is not self)
        idle = [one for one in others if one._gives_way(now)]
        idle.sort(key=lambda one: one._heard)
        for one in idle[: max(1, self.bounds.connections // _PART)]:
            one._end()
        return bool(idle)

    def _gives_way(self, now: float) -> bool:
        if self.transport.is_closing():
            return False
        return not self._at_work() or self._stalled(now, self.bounds.stalled_s)

    def _at_work(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _stalled(self, now: float, patience: float) -> bool:
        """A body that does not come, though we would take it."""
        return self._at_work() and self.cycle.more_body and not self.flow.read_paused and now - self._heard >= patience

    def _drags_on(self, now: float) -> bool:
        """The rest of a body whose request has its answer does not come."""
        return self._in_body and not self._at_work() and now - self._heard >= self.bounds.body_s

    # -- time --

    def _sweep(self) -> None:
        now = self.loop.time()
        ours = [one for one in self.connections if isinstance(one, GuardedProtocol)]
        for one in ours:
            one._check(now)
        GuardedProtocol._sweeping = bool(ours)
        if ours:
            self.loop.call_later(_SWEEP_S, self._sweep)

    def _check(self, now: float) -> None:
        if self.transport.is_closing():
            return
        if self._head_since is not None and not self._at_work() and now - self._head_since >= self.bounds.header_s:
            text = f"no whole request came within {self.bounds.header_s:g} s"
            self._refuse(ErrorKind.TIMEOUT, text, "send the headers at once")
        elif self._stalled(now, self.bounds.body_s) or self._drags_on(now):
            self._end()  # its handler, if there is one, sees the end of the connection

    def _refuse(self, kind: ErrorKind, message: str, hint: str, status: int = 0) -> None:
        """Instead of an answer to what was asked, or to nothing; then the connection ends."""
        if self._refused or self.transport.is_closing():
            return
        self._refused = True
        body = ErrorBody(
            kind=kind, message=message, hint=hint, retryable=kind in (ErrorKind.CAPACITY, ErrorKind.TIMEOUT)
        )
        request_id = new_request_id()
        answer = encode(ErrorReply(error_body(body, request_id, None)))
        head = f"content-type: application/json\r\ncontent-length: {len(answer)}\r\nconnection: close\r\n\r\n"
        status = status or (408 if kind is ErrorKind.TIMEOUT else STATUS[kind])
        self.transport.write(STATUS_LINE[status] + head.encode() + answer)
        self.transport.close()

    def _end(self) -> None:
        """Out of the count at once; the kernel may take its time."""
        self.connections.discard(self)
        self.transport.abort()
