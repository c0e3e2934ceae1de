"""The ASGI application: request ids, keys, routing, and errors as the interface promises them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import structlog
from starlette.applications import Starlette
from starlette.routing import BaseRoute, Route, WebSocketRoute
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from starlette.websockets import WebSocket

from dsec.iam.keys import KeyRing, Principal
from dsec.placement.choice import Placement
from dsec.protocol.errors import ErrorBody, ErrorKind, Fault
from dsec.protocol.ids import new_request_id

from .admission import admit
from .commands import follow
from .exchange import ERROR_HEADER, FROM_INSIDE, Exchange, Services, error_header, error_response
from .fleet import Fleet
from .openapi import document
from .routes import OPERATIONS, PUBLIC_PATHS, SOCKETS, STREAM_PATH, Handler, SocketHandler

log = structlog.get_logger("dsec.apiserver")


class Endpoint:
    """All methods of one path."""

    def __init__(self, services: Services, handlers: dict[str, Handler]) -> None:
        self._services = services
        self._handlers = handlers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        handler = self._handlers.get(scope["method"])
        if handler is None:
            await self._refuse(scope, receive, send)
            return
        exchange = Exchange.of(scope, receive, self._services)
        admit(exchange, handler)
        response = await handler(exchange)
        await response(scope, receive, send)

    async def _refuse(self, scope: Scope, receive: Receive, send: Send) -> None:
        allowed = ", ".join(sorted(self._handlers))
        body = ErrorBody(kind=ErrorKind.INVALID, message=f"method {scope['method']} is not one of {allowed} here")
        response = error_response(body, scope["dsec.request_id"])
        response.status_code = 405
        response.headers["allow"] = allowed
        await response(scope, receive, send)


class Entry:
    """Outermost: gives every request an id, checks its key, and turns faults into answers."""

    def __init__(self, app: ASGIApp, keys: KeyRing, services: Services) -> None:
        self._app = app
        self._keys = keys
        self.services = services

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        request_id = scope["dsec.request_id"] = new_request_id()
        await self.guarded(self._checked, scope, receive, send, request_id)

    async def _checked(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = scope["dsec.headers"] = dict(scope["headers"])
        scope["dsec.principal"] = None if scope["path"] in PUBLIC_PATHS else self.check(headers)
        await self._app(scope, receive, send)

    def check(self, headers: dict[bytes, bytes]) -> Principal:
        """Whose key the request has; Fault authentication or permission unless it is valid. What it is good for: `admit`."""
        project = headers.get(b"x-dsec-project", b"").decode("latin-1")
        return self._keys.check(headers.get(b"authorization"), project, inside=FROM_INSIDE in headers)

    async def guarded(self, app: ASGIApp, scope: Scope, receive: Receive, send: Send, request_id: str) -> None:
        """Names the answer after the request, and turns what is raised into an answer."""
        started = False

        async def tracked(message: Message) -> None:
            nonlocal started
            if message["type"] in ("http.response.start", "websocket.accept", "websocket.http.response.start"):
                started = True
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", request_id.encode())]
            await send(message)

        try:
            await app(scope, receive, tracked)
        except (Fault, asyncio.CancelledError) as error:
            body = told(error)
        except Exception as error:
            log.error("request failed", request_id=request_id, path=scope["path"], exc_info=error)
            body = unforeseen(error, request_id)
        else:
            return
        if started:
            # The status is gone; ending without the last chunk is the only way left to say that this is not all.
            log.warning("answer cut short", request_id=request_id, kind=body.kind.value, message=body.message)
            return
        sandbox = scope.get("path_params", {}).get("id")
        response = error_response(body, request_id, sandbox)
        if scope["type"] == "websocket":
            response.headers[ERROR_HEADER] = error_header(body, request_id, sandbox)
            await WebSocket(scope, receive, tracked).send_denial_response(response)
        else:
            await response(scope, receive, tracked)


def told(error: Fault | asyncio.CancelledError) -> ErrorBody:
    """What the caller is told."""
    if isinstance(error, Fault):
        return error.body
    return ErrorBody(  # only the server's shutdown cancels requests
        kind=ErrorKind.CONNECTION_LOST,
        message="the apiserver is stopping",
        hint="ask again; commands and sandboxes go on",
        retryable=True,
    )


def unforeseen(error: Exception, request_id: str) -> ErrorBody:
    """What the caller is told of what the log says more about."""
    return ErrorBody(
        kind=ErrorKind.INTERNAL,
        message=f"{type(error).__name__} in the apiserver",
        hint=f"its log has the cause under {request_id}",
    )


async def _not_found(scope: Scope, receive: Receive, send: Send) -> None:
    raise Fault(ErrorKind.NOT_FOUND, f"no such path: {scope['path'][:200]}", hint="GET /openapi.json lists them")


def _endpoint(handler: SocketHandler, services: Services) -> Callable[[WebSocket], Awaitable[None]]:
    async def endpoint(socket: WebSocket) -> None:
        exchange = Exchange.of(socket.scope, socket.receive, services)
        admit(exchange, handler)
        await handler(exchange, socket)

    return endpoint


def build(fleet: Fleet, keys: KeyRing, *, version: str) -> ASGIApp:
    """The application over a fleet that it starts and stops itself."""
    services = Services(fleet, Placement(), version, keys)
    services.openapi = document(version)
    by_path: dict[str, dict[str, Handler]] = {}
    for operation in OPERATIONS:
        by_path.setdefault(operation.path, {})[operation.method] = operation.handler
    routes: list[BaseRoute] = [Route(path, Endpoint(services, handlers)) for path, handlers in by_path.items()]

    routes.append(WebSocketRoute(STREAM_PATH, _endpoint(follow, services)))
    routes += (WebSocketRoute(one.path, _endpoint(one.handler, services)) for one in SOCKETS)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        await fleet.start()
        try:
            yield
        finally:
            await services.grades.close()
            await fleet.stop()

    router = Starlette(routes=routes, lifespan=lifespan).router
    router.default = _not_found
    router.redirect_slashes = False
    return Entry(router, keys, services)
