"""Long bodies, both ways, with as few copies as uvicorn's parser and transport allow.

uvicorn gathers a request's body in one growing buffer of 64 KiB, and joins each piece of an answer with its chunk's frame. For
files that is most of what an apiserver does: here pieces stay as the socket brought them, and go as they came.
"""

from __future__ import annotations

from collections import deque
from typing import Final

from starlette.types import Message
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

HELD: Final = 1024 * 1024  # bytes of a request's body that wait for the handler before reading stops
WAITING: Final = 512 * 1024  # bytes of an answer that wait for the client before the handler does


class Bulk(RequestResponseCycle):
    """A request and its answer, in the place of uvicorn's own."""

    def widen(self) -> None:
        self._parts: deque[bytes] = deque()
        self._held = 0
        self._told = False  # the handler has had the end of the body
        self.transport.set_write_buffer_limits(high=WAITING)

    def take(self, part: bytes) -> None:
        """A piece of the body, from the parser."""
        if self.response_complete:
            return
        self._parts.append(part)
        self._held += len(part)
        if self._held > HELD:
            self.flow.pause_reading()
        self.message_event.set()

    async def receive(self) -> Message:  # type: ignore[override]
        while not (self.disconnected or self.response_complete) and not self._parts and (self.more_body or self._told):
            self.flow.resume_reading()
            await self.message_event.wait()
            self.message_event.clear()
        if self.disconnected or self.response_complete:
            return {"type": "http.disconnect"}
        part = self._parts.popleft() if self._parts else b""
        self._held -= len(part)
        self._told = not self._parts and not self.more_body
        return {"type": "http.request", "body": part, "more_body": not self._told}

    async def send(self, message: Message) -> None:  # type: ignore[override]
        body = message.get("body", b"")
        if not (body and message.get("more_body") and self.chunked_encoding):
            await super().send(message)  # type: ignore[arg-type]
            return
        if self.flow.write_paused and not self.disconnected:
            await self.flow.drain()
        if not self.disconnected:
            self.transport.writelines((b"%x\r\n" % len(body), body, b"\r\n"))
