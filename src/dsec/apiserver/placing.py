"""A request for something new goes to the edge that placement chooses; a refusal for want of room goes to another one."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import TypeVar

from dsec.protocol.errors import ErrorKind, Fault
from dsec.protocol.link import LinkStream

from .exchange import Exchange

T = TypeVar("T")
_GRACE = 10.0  # seconds that an edge may overrun a creation's deadline before we stop waiting for its own error


async def placed(
    x: Exchange, method: str, params: Mapping[str, object], timeout: float, reply: type[T], *, home: str = ""
) -> T:
    """The edge has the last word. timeout: seconds that the edge was told, too. home: the only edge that comes into question."""
    if not 0 < timeout <= 86_400:
        raise Fault(ErrorKind.INVALID, f"timeout={timeout} is not between 0 and 86400 seconds")
    fleet, refused = x.services.fleet, dict[str, Fault]()
    while True:
        views = await fleet.views()
        if refused and len(refused) >= len(views):
            raise next(iter(refused.values()))
        try:
            edge = home or x.services.placement.choose(views, exclude=refused)
        except Fault:
            if refused:
                raise next(iter(refused.values())) from None
            raise
        stream = await fleet.link(edge).open(method, params)
        timer = asyncio.get_running_loop().call_later(timeout + _GRACE, _give_up, stream, edge, timeout)
        try:
            return await stream.result(reply)
        except asyncio.CancelledError:
            stream.cancel()
            raise
        except Fault as fault:
            if home or fault.body.kind is not ErrorKind.CAPACITY:
                raise
            refused[edge] = fault
        finally:
            timer.cancel()


def _give_up(stream: LinkStream, edge: str, timeout: float) -> None:
    stream.cancel(
        Fault(
            ErrorKind.TIMEOUT,
            f"edge {edge} did not answer the creation within {timeout + _GRACE:g} s",
            hint="the same idempotency_key again returns the sandbox if it came to be",
            stage="edge",
        )
    )
