"""The DSec client of an evaluation: one for each event loop, open while a task or a sample needs it."""

from __future__ import annotations

import asyncio
import secrets
import weakref
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager

from dsec import DSecClient

MADE_BY = {"made_by": "inspect_ai"}
_LAST_WORK_S = 10.0


class Platform:
    """Its sandboxes carry `labels`, so that what an interrupted sample left behind is found."""

    def __init__(self) -> None:
        self.client = DSecClient()
        self.labels = {**MADE_BY, "inspect_run": secrets.token_hex(8)}
        self.tasks = 0
        self.samples = 0
        self._opening = asyncio.Lock()
        self._opened = False
        self._work: set[asyncio.Task[None]] = set()

    async def open(self) -> None:
        async with self._opening:
            if not self._opened:
                await self.client.open()
                self._opened = True

    def in_background(self, work: Coroutine[None, None, None]) -> None:
        """For what must be done although its caller was cancelled; `close` waits for it."""
        task = asyncio.create_task(work)
        self._work.add(task)
        task.add_done_callback(self._work.discard)

    async def close(self) -> None:
        if self._work:
            await asyncio.wait(self._work, timeout=_LAST_WORK_S)
        await self.client.close()


_platforms: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Platform] = weakref.WeakKeyDictionary()


def _current() -> Platform:
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError as error:
        raise RuntimeError("the dsec sandbox needs Inspect's asyncio backend: unset INSPECT_ASYNC_BACKEND") from error
    platform = _platforms.get(loop)
    if platform is None:
        platform = _platforms[loop] = Platform()
    return platform


@asynccontextmanager
async def _failing_closed(platform: Platform) -> AsyncIterator[None]:
    try:
        yield
    except BaseException:
        await _close_if_idle(platform)
        raise


async def _close_if_idle(platform: Platform) -> None:
    if platform.tasks <= 0 and platform.samples <= 0:
        loop = asyncio.get_running_loop()
        if _platforms.get(loop) is platform:
            del _platforms[loop]
        await platform.close()


async def for_task() -> Platform:
    """For the time of a task; `task_done` gives it back. DSecError when no service answers, or no key is known."""
    platform = _current()
    async with _failing_closed(platform):
        await platform.open()
        platform.tasks += 1
    return platform


async def for_sample() -> Platform:
    """For the time of a sample, whether in a task or not; `sample_done` gives it back."""
    platform = _current()
    platform.samples += 1
    try:
        await platform.open()
    except BaseException:
        await sample_done(platform)
        raise
    return platform


def of_task() -> Platform | None:
    return _platforms.get(asyncio.get_running_loop())


async def sample_done(platform: Platform) -> None:
    platform.samples -= 1
    await _close_if_idle(platform)


async def task_done(platform: Platform) -> bool:
    """True: this was the last task, and samples that are still counted will never be cleaned up."""
    platform.tasks -= 1
    return platform.tasks <= 0


async def end(platform: Platform) -> None:
    platform.samples = 0
    await _close_if_idle(platform)
