"""The busiest requests without ASGI in between: from the parser to the handler, and the answer in one write.

A sandbox that is made, used once and removed is three short requests. Scope, messages, events and two writes for each of them
cost more than what the apiserver does for them, and a second write wakes the caller a second time. So requests of a few
routes, whose body is short and announced, are handed to their handlers as soon as they are whole. All others, and all that is
unusual about these, go through ASGI as before; so does an answer that turns out to be a stream.
"""

from __future__ import annotations

import asyncio
import re
from typing import Final

import structlog
from starlette.responses import Response
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from dsec.protocol.errors import Fault
from dsec.protocol.ids import new_request_id

from . import commands, files, sandboxes
from .admission import admit
from .app import Entry, told, unforeseen
from .bulk import Bulk
from .exchange import Exchange, StreamedReply, error_response
from .routes import Handler

log = structlog.get_logger("dsec.apiserver")

MAX_BODY = 64 * 1024  # uvicorn stops reading at as much, until the application asks for it

_SANDBOXES: Final = b"/v1/sandboxes"
_PLAIN = re.compile(rb"[A-Za-z0-9._~/-]+")
_OF_ALL: dict[bytes, Handler] = {b"POST": sandboxes.create}
_OF_ONE: dict[tuple[bytes, bytes], Handler] = {  # by method and what follows the sandbox's id
    (b"POST", b"exec"): commands.run,
    (b"POST", b"processes"): commands.start,
    (b"DELETE", b""): sandboxes.stop,
    (b"GET", b""): sandboxes.info,
    (b"GET", b"files/stat"): files.stat,
    (b"GET", b"files"): files.read,
    (b"GET", b"files/list"): files.listing,
    (b"GET", b"files/archive"): files.archive_read,
    (b"PUT", b"files"): files.write,
    (b"PUT", b"files/archive"): files.archive_write,
}
_TAKES_ITS_BODY_AS_IT_COMES = frozenset((files.write, files.archive_write))


def find(method: bytes, path: bytes) -> tuple[Handler, dict[str, str]] | None:
    """Handler and path parameters of a request that may be answered directly. The router would find the same."""
    if not path.startswith(_SANDBOXES) or _PLAIN.fullmatch(path) is None:
        return None
    if len(path) == len(_SANDBOXES):
        handler = _OF_ALL.get(method)
        return None if handler is None else (handler, {})
    root, slash, rest = path[len(_SANDBOXES) :].partition(b"/")
    id, slash, rest = rest.partition(b"/")
    handler = _OF_ONE.get((method, rest))
    if root or not id or handler is None or (slash and not rest):
        return None
    return handler, {"id": id.decode("ascii")}


class _Unheard(asyncio.Event):
    """Nobody waits for more of a request that is whole."""

    def set(self) -> None:
        pass


_unheard = _Unheard()


class Asked(RequestResponseCycle):
    """A request that is answered directly, in the place of uvicorn's own; only what the protocol looks at is there."""

    def __init__(
        self,
        handler: Handler,
        path_params: dict[str, str],
        method: str,
        url: bytes,
        headers: dict[bytes, bytes],
        keep_alive: bool,
    ) -> None:
        self.handler = handler
        self.method = method
        self.path_params = path_params
        self.url = url
        self.headers = headers
        self.keep_alive = keep_alive
        self.body = bytearray()
        self.more_body = True
        self.disconnected = False
        self.response_complete = False
        self.message_event = _unheard


def _exchange(entry: Entry, asked: Asked, request_id: str, query: bytes, body: bytes | Receive) -> Exchange:
    """Fault when the caller may not ask for it."""
    principal = entry.check(asked.headers)
    exchange = Exchange(entry.services, request_id, asked.headers, asked.path_params, query, body, principal)
    admit(exchange, asked.handler)
    return exchange


class DirectProtocol(HttpToolsProtocol):
    """uvicorn's protocol, with a short way for some requests."""

    _asked: Asked | None = None  # whose body is still to come
    _bulk: Bulk | None = None  # the same, of a long one

    def on_message_begin(self) -> None:
        self.url = b""
        self.expect_100_continue = False
        self.headers = []

    def on_headers_complete(self) -> None:
        asked = self._direct()
        self._bulk = None
        if asked is not None and asked.handler in _TAKES_ITS_BODY_AS_IT_COMES:
            self._receive(asked)
            return
        if asked is None:
            url, headers, expected = self.url, self.headers, self.expect_100_continue
            super().on_message_begin()
            self.url, self.headers, self.expect_100_continue = url, headers, expected
            self.scope["headers"] = headers
            super().on_headers_complete()
            return
        self._asked = self.cycle = asked

    def _direct(self) -> Asked | None:
        """What was asked, if it is one of ours, short, and not waiting behind another request of its connection."""
        if (self.cycle is not None and not self.cycle.response_complete) or self.pipeline:
            return None
        parser = self.parser
        found = find(parser.get_method(), self.url.partition(b"?")[0])
        if found is None or self.expect_100_continue or parser.should_upgrade() or self.limit_concurrency is not None:
            return None
        headers = dict(self.headers)
        length = headers.get(b"content-length", b"0")
        short = length.isdigit() and int(length) <= MAX_BODY and b"transfer-encoding" not in headers
        if not short and found[0] not in _TAKES_ITS_BODY_AS_IT_COMES:
            return None
        if parser.get_http_version() != "1.1" or self.root_path or b"#" in self.url:
            return None
        method = parser.get_method().decode("ascii")
        return Asked(*found, method, self.url, headers, parser.should_keep_alive())

    def on_body(self, body: bytes) -> None:
        if self._asked is not None:
            self._asked.body += body
        elif self._bulk is not None:
            self._bulk.take(body)
        else:
            super().on_body(body)

    def on_message_complete(self) -> None:
        asked = self._asked
        if asked is None:
            super().on_message_complete()
            return
        self._asked = None
        asked.more_body = False
        task = self.loop.create_task(self._answer(asked))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def _answer(self, asked: Asked) -> None:
        entry = self.app
        assert isinstance(entry, Entry)
        request_id = new_request_id()
        path, _, query = asked.url.partition(b"?")
        response: Response
        try:
            exchange = _exchange(entry, asked, request_id, query, bytes(asked.body))
            response = await asked.handler(exchange)
        except (Fault, asyncio.CancelledError) as error:
            response = error_response(told(error), request_id, asked.path_params.get("id"))
        except Exception as error:
            log.error("request failed", request_id=request_id, path=path.decode("ascii"), exc_info=error)
            response = error_response(unforeseen(error, request_id), request_id, asked.path_params.get("id"))
        if isinstance(response, StreamedReply):
            await self._stream(asked, response, request_id)
            return
        if self.flow.write_paused and not asked.disconnected:
            await self.flow.drain()
        if not asked.disconnected:
            self._write(asked, response, request_id)

    def _write(self, asked: Asked, response: Response, request_id: str) -> None:
        parts = [STATUS_LINE[response.status_code]]
        for name, value in response.raw_headers:
            parts += (name, b": ", value, b"\r\n")
        parts += (
            b"x-request-id: ",
            request_id.encode(),
            b"\r\n\r\n" if asked.keep_alive else b"\r\nconnection: close\r\n\r\n",
        )
        parts.append(bytes(response.body))
        self.transport.write(b"".join(parts))
        asked.response_complete = True
        if not asked.keep_alive:
            self.transport.close()
        self.on_response_complete()

    async def _stream(self, asked: Asked, response: StreamedReply, request_id: str) -> None:
        """By uvicorn's own cycle, which knows how to send at the client's pace and when it is gone."""
        entry = self.app
        assert isinstance(entry, Entry)
        cycle = self._cycle(asked)
        cycle.more_body = False
        cycle.disconnected = asked.disconnected
        if cycle.disconnected:
            cycle.message_event.set()
        if self.cycle is asked:
            self.cycle = cycle

        async def answer(scope: Scope, receive: Receive, send: Send) -> None:
            await entry.guarded(response, scope, receive, send, request_id)

        await cycle.run_asgi(answer)  # type: ignore[arg-type]

    def _receive(self, asked: Asked) -> None:
        """A request whose body is still to come: its handler takes the body as it does."""
        entry = self.app
        assert isinstance(entry, Entry)
        self.cycle = self._bulk = cycle = self._cycle(asked)

        async def handled(scope: Scope, receive: Receive, send: Send) -> None:
            exchange = _exchange(entry, asked, request_id, asked.url.partition(b"?")[2], receive)
            response = await asked.handler(exchange)
            await response(scope, receive, send)

        async def answer(scope: Scope, receive: Receive, send: Send) -> None:
            await entry.guarded(handled, scope, receive, send, request_id)

        request_id = new_request_id()
        self._start_asgi_task(cycle, answer)  # type: ignore[arg-type]

    def _cycle(self, asked: Asked) -> Bulk:
        scope = {
            "type": "http",
            "method": asked.method,
            "http_version": "1.1",
            "path": asked.url.decode("ascii"),
            "path_params": asked.path_params,
            "headers": [],
        }
        cycle = Bulk(
            scope=scope,  # type: ignore[arg-type]
            transport=self.transport,
            flow=self.flow,
            logger=self.logger,
            access_logger=self.access_logger,
            access_log=self.access_log,
            default_headers=self.server_state.default_headers,
            message_event=asyncio.Event(),
            expect_100_continue=False,
            keep_alive=asked.keep_alive,
            on_response=self.on_response_complete,
        )
        cycle.widen()
        return cycle
