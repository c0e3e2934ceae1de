"""A client on the running platform, opened for one command and closed after it."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from dsec.cli.failure import CliFailure, not_running

if TYPE_CHECKING:
    from dsec import DSecClient
    from dsec.cluster.embedded import Endpoint

T = TypeVar("T")


def make_client(endpoint: Endpoint | None = None) -> DSecClient:
    """The one place where the CLI gets its client (tests put another one here)."""
    from dsec import DSecClient

    if endpoint is None:
        return DSecClient()
    return DSecClient(endpoint.url, Path(endpoint.key_file).read_text(encoding="ascii").strip())


def with_client(work: Callable[[DSecClient], Awaitable[T]], *, endpoint: Endpoint | None = None) -> T:
    """Open a client, do the work, close it. SIGTERM, and SIGHUP unless it is ignored, end the work as Ctrl-C does, so that
    clean-up runs."""
    return asyncio.run(_guarded(work, endpoint))


async def _guarded(work: Callable[[DSecClient], Awaitable[T]], endpoint: Endpoint | None) -> T:
    terminated = 0
    task = asyncio.current_task()
    assert task is not None

    def on_terminate(number: int) -> None:
        nonlocal terminated
        terminated = number
        task.cancel()

    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:
            asyncio.get_running_loop().add_signal_handler(number, on_terminate, number)
    try:
        async with make_client(endpoint) as client:
            return await work(client)
    except asyncio.CancelledError:
        if terminated:
            raise CliFailure("terminated", code=128 + terminated) from None
        raise


def explained(error: Exception) -> CliFailure | None:
    """A library's exception as a failure with a hint; None when it is not one that a user can cause."""
    from dsec import CapacityError, ConnectionLost, DSecError

    if isinstance(error, ConnectionLost):
        return not_running(error.message, hint=error.hint)
    if isinstance(error, CapacityError):
        held = ", ".join(f"{name} {count}" for name, count in sorted(error.holders.items()))
        return CliFailure(error.message + (f"; held by: {held}" if held else ""), hint=error.hint)
    if isinstance(error, DSecError):
        return CliFailure(error.message, hint=error.hint)
    from dsec.protocol.errors import Fault

    if isinstance(error, Fault):
        return CliFailure(error.body.message, hint=error.body.hint)
    if isinstance(error, OSError):
        where = f"{error.filename!r}: " if error.filename else ""
        return CliFailure(f"{where}{error.strerror or error}")
    return None
