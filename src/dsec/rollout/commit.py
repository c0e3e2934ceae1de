"""Group commit: what is written in the same while is made durable together."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable


class Syncer:
    """fdatasync of many files at once, away from the event loop; who comes while a round is under way is in the next one."""

    def __init__(self) -> None:
        self._waiting: dict[int, asyncio.Future[None]] = {}
        self._rounds: set[asyncio.Task[None]] = set()
        self._busy = False

    def sync(self, fd: int) -> asyncio.Future[None]:
        """Done when all that was written to the file so far is durable; OSError. The descriptor stays open until then."""
        loop = asyncio.get_running_loop()
        future = self._waiting.get(fd)
        if future is None:
            future = self._waiting[fd] = loop.create_future()
            if not self._busy:
                self._busy = True
                loop.call_soon(self._begin)
        return future

    def _begin(self) -> None:
        taken, self._waiting = self._waiting, {}
        task = asyncio.get_running_loop().create_task(self._round(taken))
        self._rounds.add(task)
        task.add_done_callback(self._rounds.discard)

    async def _round(self, taken: dict[int, asyncio.Future[None]]) -> None:
        errors = await asyncio.to_thread(_all, list(taken))
        for future, error in zip(taken.values(), errors, strict=True):
            if future.done():
                continue
            if error is None:
                future.set_result(None)
            else:
                future.set_exception(error)
                future.exception()
        if self._waiting:
            self._begin()
        else:
            self._busy = False


def _all(fds: Iterable[int]) -> list[OSError | None]:
    return [_one(fd) for fd in fds]


def _one(fd: int) -> OSError | None:
    try:
        os.fdatasync(fd)
    except OSError as error:
        return error
    return None
