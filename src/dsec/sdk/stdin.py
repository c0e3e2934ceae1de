"""Giving a command its stdin, piece by piece, over connections that may break.

Every piece says where it belongs, and the answer how far the sandbox got: so a piece is sent again until that is known to be
behind it, and no byte is lost, doubled or out of order. A command that does not read slows its writer.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable

import msgspec

from .errors import Conflict, NotFound
from .transport import Target, Transport

PIECE = 1024 * 1024
WAIT_S = 25  # one answer, as for output


class Fed(msgspec.Struct, frozen=True):
    """Bytes of this writer that stdin has taken, and whether it takes more."""

    accepted: int
    open: bool = True


class Feeder:
    """One writer of a command's stdin; writer "" goes on behind what the request that started the command carried."""

    def __init__(self, transport: Transport, target: Target, exec_id: str, writer: str, offset: int = 0) -> None:
        self._transport = transport
        self._target = target
        self._path = f"/v1/sandboxes/{target.sandbox_id}/processes/{exec_id}/stdin"
        self._writer = writer
        self._sent: int | None = offset  # None: not known, after a write that failed
        self._turn = asyncio.Lock()

    async def write(self, data: bytes) -> None:
        """Returns when the sandbox holds all of it. Conflict when stdin is closed or nobody reads it any more.

        After an error the bytes may have arrived in part; what is written next comes behind them.
        """
        async with self._turn:
            at, self._sent = await self._position(), None
            end, view = at + len(data), memoryview(data)
            done = at
            while done < end:
                piece = bytes(view[done - at : done - at + PIECE])
                done = (await self._post({"offset": str(done), "wait_s": str(WAIT_S)}, piece)).accepted
            self._sent = done

    async def close(self) -> None:
        async with self._turn:
            await self._post({"offset": str(await self._position()), "close": "1"}, b"")

    async def _position(self) -> int:
        return self._sent if self._sent is not None else (await self._post({}, b"")).accepted

    async def _post(self, query: dict[str, str], body: bytes) -> Fed:
        query = {**query, "writer": self._writer} if self._writer else query
        return await self._transport.call(
            "POST", self._path, Fed, query=query, body=body, target=self._target, wait=WAIT_S
        )


async def feed(feeder: Feeder, source: bytes | AsyncIterable[bytes]) -> None:
    """All of it, then the end. A command that leaves without reading everything is no error: its result tells."""
    try:
        if isinstance(source, bytes):
            await feeder.write(source)
        else:
            async for piece in source:
                await feeder.write(piece)
        await feeder.close()
    except (Conflict, NotFound):
        return
