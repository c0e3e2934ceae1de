"""One HTTP request in the hands of a handler: who asks, what for, and the ways to answer."""

from __future__ import annotations

import asyncio
import base64
import binascii
import json
from collections.abc import AsyncIterator, Callable, Mapping
from functools import cached_property
from typing import TypeVar
from urllib.parse import parse_qs

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from dsec.iam.keys import KeyRing, Principal
from dsec.iam.scoped import Claims, Wanted
from dsec.placement.choice import Placement
from dsec.protocol import scopes
from dsec.protocol.errors import STATUS, ErrorBody, ErrorKind, Fault
from dsec.protocol.link import Data, LinkStream
from dsec.protocol.rollouts import STEP_HEADER, RolloutInfo, StepRef, step_ref
from dsec.protocol.specs import SandboxInfo

from .bodies import ErrorReply, decode_json
from .fleet import EdgeLink, Fleet
from .grades import Grades
from .scoped import ScopedFleet

T = TypeVar("T")
JSON = "application/json"
NDJSON = "application/x-ndjson"
BYTES = "application/octet-stream"
INCARNATION = "x-dsec-incarnation"
_INCARNATION = INCARNATION.encode()
_STEP = STEP_HEADER.encode()
ERROR_HEADER = "x-dsec-error"
FROM_INSIDE = b"x-dsec-inside"  # added by the network proxy to requests of sandboxes (`cluster/embedded.py`)
MAX_JSON = 1024 * 1024
MAX_PATH = 4096
MAX_PARAMETERS = 256  # of a query string
_encoder = msgspec.json.Encoder()
encode = _encoder.encode


class Services:
    """What every handler may use."""

    def __init__(
        self,
        fleet: Fleet,
        placement: Placement,
        version: str,
        keys: KeyRing | None = None,
        grades: Grades | None = None,
    ) -> None:
        self.keys = keys
        self.fleet = fleet
        self.placement = placement
        self.version = version
        self.grades = grades or Grades(fleet, placement)
        self.openapi = b""

    def scoped(self, scope: scopes.Scope) -> Services:
        """The same, for one whose every request to an edge says how far it may go."""
        return Services(ScopedFleet(self.fleet, scope), self.placement, self.version, grades=self.grades)


class Exchange:
    """A request; handlers take one and return a Starlette response or raise a Fault.

    services go as far as the caller's key does; platform as far as the platform's own. principal: None where no key is asked for;
    scope: how far a scoped key goes, None for others.
    """

    def __init__(
        self,
        services: Services,
        request_id: str,
        headers: dict[bytes, bytes],
        path_params: dict[str, str],
        query_string: bytes,
        body: bytes | Receive,
        principal: Principal | None,
    ) -> None:
        """body: whole, or where it comes from."""
        self._headers = headers
        self._path_params = path_params
        self._query_string = query_string
        self._body = body
        self.principal = principal
        self.platform = services
        claims = principal.claims if principal is not None else None
        self.scope = None if claims is None else claims.scope()
        self.services = services if self.scope is None else services.scoped(self.scope)
        self.request_id = request_id

    @classmethod
    def of(cls, scope: Scope, receive: Receive, services: Services) -> Exchange:
        headers, path_params, principal = scope["dsec.headers"], scope["path_params"], scope["dsec.principal"]
        return cls(services, scope["dsec.request_id"], headers, path_params, scope["query_string"], receive, principal)

    def issue(self, wanted: Wanted) -> tuple[str, Claims]:
        """A scoped key of what the caller holds, or less. Fault permission for more."""
        assert self.principal is not None and self.platform.keys is not None
        return self.platform.keys.issue(self.principal, wanted)

    # -- what was asked --

    def path_param(self, name: str) -> str:
        return self._path_params[name]

    @property
    def sandbox(self) -> str:
        return self.path_param("id")

    def header(self, name: str) -> str | None:
        value = self._headers.get(name.encode())
        return None if value is None else value.decode("latin-1")

    def wants_ndjson(self) -> bool:
        return NDJSON in (self.header("accept") or "")

    def query(self, name: str) -> str | None:
        """A parameter that is there once, or not at all."""
        values = self.queries(name)
        return values[0] if values else None

    def only(self, parameters: Mapping[str, bool]) -> None:
        """Fault invalid_request for other query parameters than these (name: may be repeated), and for one that is there
        twice: a misspelt one must not be taken for none."""
        if not self._query_string:
            return
        if unknown := self._queried.keys() - parameters:
            known = ", ".join(sorted(parameters)) or "none here"
            raise Fault(ErrorKind.INVALID, f"unknown query parameter {min(unknown)[:40]!r}", hint=f"known: {known}")
        for name, values in self._queried.items():
            if len(values) > 1 and not parameters[name]:
                raise Fault(ErrorKind.INVALID, f"query parameter {name} is there {len(values)} times")

    def queries(self, name: str) -> list[str]:
        """A parameter that may be repeated."""
        return self._queried.get(name, []) if self._query_string else []

    @cached_property
    def _queried(self) -> dict[str, list[str]]:
        try:
            text = self._query_string.decode("ascii")
            return parse_qs(text, keep_blank_values=True, errors="strict", max_num_fields=MAX_PARAMETERS)
        except ValueError as error:
            what = "text" if isinstance(error, UnicodeError) else f"at most {MAX_PARAMETERS} parameters"
            hint = "percent-encode UTF-8; bytes that are none go into path_b64"
            raise Fault(ErrorKind.INVALID, f"the query string is not {what}", hint=hint) from error

    def number(self, name: str, default: int | None = None, *, low: int = 0, high: int = 2**63 - 1) -> int | None:
        text = self.query(name)
        if text is None:
            return default
        value = int(text) if text.isascii() and text.isdigit() and len(text) < 20 else -1
        if not low <= value <= high:
            span = f"of {low} or more" if high == 2**63 - 1 else f"between {low} and {high}"
            raise Fault(ErrorKind.INVALID, f"query parameter {name}={text[:40]!r} is not a whole number {span}")
        return value

    def flag(self, name: str, default: bool = False) -> bool:
        text = self.query(name)
        if text is None:
            return default
        if text in ("0", "false"):
            return False
        if text in ("1", "true"):
            return True
        raise Fault(ErrorKind.INVALID, f"query parameter {name}={text[:40]!r} is neither true nor false")

    def file_path(self) -> bytes:
        """`path_b64` (base64 or base64url, any bytes) or `path` (UTF-8)."""
        encoded = self.query("path_b64")
        if encoded is None:
            text = self.query("path")
            if text is None:
                raise Fault(ErrorKind.INVALID, "query parameter path or path_b64 is missing")
            path = text.encode()
        else:
            try:
                path = base64.b64decode(
                    encoded.replace("-", "+").replace("_", "/") + "=" * (-len(encoded) % 4), validate=True
                )
            except (binascii.Error, ValueError) as error:
                raise Fault(ErrorKind.INVALID, f"query parameter path_b64 is not base64: {error}") from error
        return checked_path(path)

    async def body(self, limit: int = MAX_JSON) -> bytes:
        """The whole body; Fault too_large before reading more than `limit` bytes."""
        if isinstance(self._body, bytes) and len(self._body) <= limit:
            return self._body
        announced = self._headers.get(b"content-length", b"")
        if announced.isdigit() and int(announced) > limit:
            raise _too_large(int(announced), limit)
        parts: list[bytes] = []
        size = 0
        async for part in self.chunks():
            size += len(part)
            if size > limit:
                raise _too_large(size, limit)
            parts.append(part)
        return b"".join(parts)

    async def chunks(self) -> AsyncIterator[bytes]:
        """The body as it arrives; Fault connection_lost when the client goes away in the middle."""
        if isinstance(self._body, bytes):
            yield self._body
            return
        more = True
        while more:
            message = await self._body()
            if message["type"] == "http.disconnect":
                raise Fault(ErrorKind.CONNECTION_LOST, "the client went away while sending")
            if part := message.get("body"):
                yield part
            more = message.get("more_body", False)

    async def json(self, kind: type[T], limit: int = MAX_JSON) -> T:
        return decode_json(await self.body(limit), kind)

    # -- the sandbox it is about --

    async def link(self) -> EdgeLink:
        return await self.services.fleet.route(self.sandbox)

    def asked_incarnation(self) -> int | None:
        value = self._headers.get(_INCARNATION)
        if value is None:
            return None
        if not (value.isdigit() and len(value) < 20):
            text = value.decode("latin-1")
            raise Fault(ErrorKind.INVALID, f"header {INCARNATION}: {text[:40]!r} is not a whole number")
        return int(value)

    async def target(self) -> tuple[EdgeLink, dict[str, object], int]:
        """Link, base parameters and incarnation: the one that the caller named, else the present one."""
        link = await self.link()
        params = self.params()
        incarnation = self.asked_incarnation()
        if incarnation is None:
            incarnation = await self._present(link, params)
        params["incarnation"] = incarnation
        return link, params, incarnation

    async def _present(self, link: EdgeLink, params: dict[str, object]) -> int:
        """A rollout outlives its sandbox, and knows its incarnation."""
        if (step := self.step) is None:
            return (await link.call("sandbox.info", params, SandboxInfo)).incarnation
        asked = {"request_id": self.request_id, "rollout": step.rollout}
        return (await link.call("rollout.info", asked, RolloutInfo)).incarnation

    def params(self) -> dict[str, object]:
        """What every request to a sandbox says: which one, and which step of its rollout it is, if it is one."""
        if (step := self.step) is None:
            return {"request_id": self.request_id, "sandbox": self.sandbox}
        return {"request_id": self.request_id, "sandbox": self.sandbox, "step_of": step}

    @property
    def step(self) -> StepRef | None:
        text = self._headers.get(_STEP)
        return None if text is None else step_ref(text.decode("latin-1"))

    # -- answers --

    def reply(self, result: object, *, incarnation: int | None = None, status: int = 200) -> Response:
        return WholeReply(encode(result), status, incarnation)

    def stream(
        self, chunks: AsyncIterator[bytes], media_type: str, *, end: Callable[[], None], incarnation: int | None = None
    ) -> Response:
        """A streamed answer; `end` is called however it ends, a client that went away included."""
        return StreamedReply(chunks, media_type, _headers(incarnation), end)


def _headers(incarnation: int | None) -> dict[str, str] | None:
    return None if incarnation is None else {INCARNATION: str(incarnation)}


def _too_large(size: int, limit: int) -> Fault:
    return Fault(
        ErrorKind.TOO_LARGE,
        f"a body of {size} bytes or more is over this request's limit of {limit}",
        hint="send large contents as a file",
        limit=limit,
        value=size,
    )


def checked_path(path: bytes) -> bytes:
    if not path or len(path) > MAX_PATH or b"\0" in path:
        what = "empty" if not path else "longer than 4096 bytes" if len(path) > MAX_PATH else "with a NUL byte"
        raise Fault(ErrorKind.FILE_INVALID, f"a path that is {what} names no file")
    return path


def error_body(body: ErrorBody, request_id: str, sandbox: str | None = None) -> ErrorBody:
    """The body with what a reader of logs needs to find the request again."""
    details = {**body.details, "request_id": request_id}
    if sandbox is not None:
        details.setdefault("sandbox_id", sandbox)
    return msgspec.structs.replace(body, details=details)


def error_response(body: ErrorBody, request_id: str, sandbox: str | None = None) -> Response:
    status = STATUS[body.kind]
    headers = {"retry-after": "1"} if body.retryable and status in (429, 503) else {}
    if status == 401:
        headers["www-authenticate"] = "Bearer"
    return Response(encode(ErrorReply(error_body(body, request_id, sandbox))), status, headers, JSON)


def error_header(body: ErrorBody, request_id: str, sandbox: str | None) -> str:
    """The same in a header's ASCII, for WebSockets: clients hand out the headers of a refusal, but not its body."""
    short = msgspec.structs.replace(body, message=body.message[:1000], hint=body.hint[:500])
    return json.dumps(msgspec.to_builtins(error_body(short, request_id, sandbox)))


def error_line(body: ErrorBody, request_id: str) -> bytes:
    """An error in the middle of an NDJSON answer, whose status is already sent."""
    return encode(ErrorReply(error_body(body, request_id))) + b"\n"


class _Announced(msgspec.Struct):
    size: int


async def announced(stream: LinkStream) -> tuple[int | None, AsyncIterator[bytes]]:
    """As `first_item`, with the size that the sandbox says the data will have."""
    while not (stream.has_arrived or stream.ended):
        await stream.change()
    note = stream.first_note()
    return note.decode(_Announced).size if note is not None else None, await first_item(stream)


async def first_item(stream: LinkStream) -> AsyncIterator[bytes]:
    """Waits until the stream has data or its result, so that a refusal still gets its own status; then yields all data."""
    items = aiter(stream)
    head = await anext(items, None)
    if head is None:
        await stream.result()

    async def rest() -> AsyncIterator[bytes]:
        if isinstance(head, Data):
            yield head.data
        async for item in items:
            if isinstance(item, Data):
                yield item.data
        if head is not None:
            await stream.result()

    return rest()


class WholeReply(Response):
    """A JSON answer. Starlette's own response does more for each header than the busiest path can afford."""

    def __init__(self, body: bytes, status: int, incarnation: int | None) -> None:
        self.status_code = status
        self.body = body
        self.background = None
        self.raw_headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
        if incarnation is not None:
            self.raw_headers.append((_INCARNATION, b"%d" % incarnation))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": self.body})


class StreamedReply(Response):
    """Sends chunks as they come, at the client's pace, and stops as soon as the client is gone."""

    def __init__(
        self, chunks: AsyncIterator[bytes], media_type: str, headers: dict[str, str] | None, end: Callable[[], None]
    ) -> None:
        self.status_code = 200
        self.media_type = media_type
        self.background = None
        self._chunks = chunks
        self._end = end
        self.init_headers(headers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sending = asyncio.ensure_future(self._send(send))
        leaving = asyncio.ensure_future(_gone(receive))
        try:
            await asyncio.wait({sending, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                await sending
        finally:
            sending.cancel()
            leaving.cancel()
            await asyncio.gather(sending, leaving, return_exceptions=True)
            self._end()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async for chunk in self._chunks:
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
