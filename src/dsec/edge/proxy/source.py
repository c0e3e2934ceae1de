"""Bytes in order, read ahead no further than needed: what every reader here reads from."""

from __future__ import annotations

from collections.abc import Awaitable, Callable


class Ended(EOFError):
    """The other side ended in the middle of something."""


class TooLong(ValueError):
    """What was looked for did not end within its limit."""


class Source:
    """`more` gives the next piece, empty at the end."""

    def __init__(self, more: Callable[[], Awaitable[bytes]]) -> None:
        self._more = more
        self.buffer = bytearray()
        self._ended = False

    async def fill(self) -> bool:
        """One more piece into the buffer; False at the end."""
        if self._ended:
            return False
        piece = await self._more()
        self._ended = not piece
        self.buffer += piece
        return not self._ended

    def take(self, count: int) -> bytes:
        piece = bytes(self.buffer[:count])
        del self.buffer[:count]
        return piece

    async def some(self, limit: int) -> bytes:
        """1 to `limit` bytes; empty at the end."""
        if not self.buffer:
            await self.fill()
        return self.take(limit)

    async def line(self, limit: int) -> bytes:
        """Up to and without CRLF. A lone LF ends nothing: it is part of the line, for the parser to refuse."""
        start = 0
        while (end := self.buffer.find(b"\r\n", start)) < 0:
            start = max(0, len(self.buffer) - 1)
            if len(self.buffer) > limit + 1:
                raise TooLong
            if not await self.fill():
                raise Ended
        if end > limit:
            raise TooLong
        line = self.take(end + 2)
        return line[:-2]

    async def head(self, limit: int) -> bytes:
        """Everything before an empty line. Ends early at a lone LF, which no head may have."""
        start = 0
        while (end := self.buffer.find(b"\r\n\r\n", start)) < 0:
            lone = self.buffer.find(b"\n", start)
            while lone >= 0 and lone > 0 and self.buffer[lone - 1] == 13:
                lone = self.buffer.find(b"\n", lone + 1)
            if lone >= 0:
                return self.take(lone + 1)
            start = max(0, len(self.buffer) - 3)
            if len(self.buffer) > limit + 3:
                raise TooLong
            if not await self.fill():
                raise Ended
        if end > limit:
            raise TooLong
        head = self.take(end + 4)
        return head[:-4]
