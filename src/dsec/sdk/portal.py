"""The event loop behind `dsec.sync`: one background thread, shared by all sync objects of a process."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Iterator
from typing import TypeVar

import uvloop

T = TypeVar("T")
_END = object()
_lock = threading.Lock()
_loop: asyncio.AbstractEventLoop | None = None
_forgotten: list[asyncio.AbstractEventLoop | None] = []


def _running() -> asyncio.AbstractEventLoop:
    """The loop, started when it is first needed. It is a daemon: a program may end while it waits."""
    global _loop
    with _lock:
        if _loop is None:
            _loop = uvloop.new_event_loop()
            threading.Thread(target=_loop.run_forever, name="dsec-sync", daemon=True).start()
        return _loop


def _forget() -> None:
    """After a fork the thread is not there: a child starts its own, with clients of its own.

    The parent's loop is kept as it is: taking it apart would touch what the parent still uses.
    """
    global _loop, _lock
    _forgotten.append(_loop)
    _loop, _lock = None, threading.Lock()


os.register_at_fork(after_in_child=_forget)


async def _result(awaitable: Awaitable[T]) -> T:
    return await awaitable


def run(awaitable: Awaitable[T]) -> T:
    """Waits for something of the loop; interrupting the wait cancels it there."""
    future = asyncio.run_coroutine_threadsafe(_result(awaitable), _running())
    try:
        return future.result()
    except BaseException:
        future.cancel()
        raise


async def _call(make: Callable[[], T]) -> T:
    return make()


def call(make: Callable[[], T]) -> T:
    """Runs a function on the loop's thread, for objects that belong to it."""
    return run(_call(make))


async def _begun(make: Callable[[], Awaitable[T]]) -> T:
    return await make()


def begin(make: Callable[[], Awaitable[T]]) -> T:
    """Calls something on the loop's thread, and waits for what it gives."""
    return run(_begun(make))


async def _step(items: AsyncIterator[T]) -> T | object:
    return await anext(items, _END)


def iterate(items: AsyncIterator[T]) -> Iterator[T]:
    """An async iterator as an iterator; leaving it early closes it on the loop."""
    try:
        while (item := run(_step(items))) is not _END:
            yield item  # type: ignore[misc]
    finally:
        if isinstance(items, AsyncGenerator):
            run(items.aclose())


async def feed(items: Iterable[bytes]) -> AsyncIterator[bytes]:
    """An iterable as an async one; it may block, so each step takes a thread of its own."""
    steps = iter(items)
    while (item := await asyncio.to_thread(next, steps, _END)) is not _END:
        assert isinstance(item, bytes | bytearray | memoryview)
        yield bytes(item)
