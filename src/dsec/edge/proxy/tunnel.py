"""CONNECT: TLS of the sandbox with a server, end to end, once its first message has named the server that was asked for."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from .hello import ACCESS_DENIED, UNRECOGNIZED_NAME, BadHello, alert, server_name
from .http1 import PIECE
from .limits import Limits
from .names import BadName, normal
from .rules import Target
from .source import Source
from .upstream import Connection

Write = Callable[[bytes], Awaitable[None]]


async def tunnel(source: Source, write: Write, upstream: Connection, target: Target, limits: Limits) -> str | None:
    """Passes bytes both ways until an end or idleness; or says why not a byte was passed, to the client as a TLS alert."""
    try:
        async with asyncio.timeout(limits.head):
            await _agree(source, target)
    except BadHello as error:
        async with asyncio.timeout(limits.linger):
            await write(alert(error.alert))
        return f"{error}, in the tunnel to {target}"
    except TimeoutError:
        return f"no TLS came through the tunnel to {target}"
    await Pipe(limits.idle).run(source, write, upstream)
    return None


async def _agree(source: Source, target: Target) -> None:
    """Until a ClientHello is there that names the target. It stays in the buffer."""
    while (found := server_name(source.buffer)) is None:
        if not await source.fill():
            raise BadHello("the ClientHello is cut off")
    try:
        name = normal(found.decode("ascii"))
    except (BadName, UnicodeDecodeError):
        raise BadHello("the ClientHello names no host (SNI)", UNRECOGNIZED_NAME) from None
    if name != target.name:
        raise BadHello(f"the ClientHello asks for {name} (SNI), which is not the host of CONNECT", ACCESS_DENIED)


class Pipe:
    """Both directions; either may end first."""

    def __init__(self, idle: float) -> None:
        self._idle = idle
        self._clock = asyncio.get_running_loop().time
        self._last = self._clock()

    async def run(self, source: Source, write: Write, upstream: Connection) -> None:
        out = asyncio.ensure_future(self._copy(source, upstream.write))
        back = asyncio.ensure_future(self._copy(upstream.source, write))
        try:
            while True:
                left = self._last + self._idle - self._clock()
                if left <= 0:
                    return
                pending = {task for task in (out, back) if not task.done()}
                await asyncio.wait(pending, timeout=left, return_when=asyncio.FIRST_COMPLETED)
                if back.done() or (out.done() and out.exception() is not None):
                    return
                if out in pending and out.done():
                    upstream.end()
        finally:
            for task in (out, back):
                task.cancel()
            await asyncio.gather(out, back, return_exceptions=True)

    async def _copy(self, source: Source, write: Write) -> None:
        while piece := await source.some(PIECE):
            self._last = self._clock()
            await write(piece)
            self._last = self._clock()
