"""A command in a terminal: ours becomes the window to the one in the sandbox.

While it lasts our terminal is raw: every key goes to the command as it is typed, every byte that comes back to the screen as
it is. Whatever ends it, the terminal is as before afterwards.
"""

from __future__ import annotations

import asyncio
import os
import signal
import termios
import tty
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import TYPE_CHECKING

from dsec.cli.failure import CliFailure, usage

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dsec import ExecResult, Process, PtySize

_CHUNK = 65_536
_HELD = 256 * 1024  # bytes typed (or pasted) that the command has not taken; beyond that nothing is read
_DETACH = b"\x10\x11"  # Ctrl-P Ctrl-Q
_DETACH_S = 0.5  # a Ctrl-P waits so long for a Ctrl-Q before it is the command's
_MOST = 4096


def check(*, typing: bool) -> None:
    """A usage error when stdout, or with `typing` stdin, is no terminal."""
    for descriptor, name in ((0, "stdin"), (1, "stdout")):
        if not os.isatty(descriptor) and (typing or descriptor == 1):
            raise usage(f"-t needs a terminal, and {name} is not one", hint="leave -t out; -i alone pipes stdin")


def both() -> bool:
    return os.isatty(0) and os.isatty(1)


def size() -> PtySize:
    """Of our terminal; 80 by 24 when it does not say."""
    from dsec import PtySize

    try:
        cols, rows = os.get_terminal_size(1)
    except OSError:
        cols = rows = 0
    return PtySize(min(cols, _MOST), min(rows, _MOST)) if cols > 0 and rows > 0 else PtySize()


async def resized(process: Process) -> bool:
    """Whether it has a terminal, whose size is now that of ours."""
    from dsec import Conflict

    ours = size()
    try:
        await process.resize(ours.cols, ours.rows)
    except Conflict:  # none, or not any more
        return False
    return True


async def converse(process: Process, *, cursor: int = 0, redraw: bool = False) -> ExecResult | None:
    """Until the command has ended: its result. None when the user detached. When cancelled, the command's tree is killed.

    cursor: bytes of output to leave out. redraw: what runs there draws its screen anew (it is told of a change of size).
    """
    try:
        with _raw():
            async with _sized(process, redraw=redraw):
                return await _converse(process, cursor)
    except (asyncio.CancelledError, CliFailure):
        await process.signal("KILL")
        raise


async def _converse(process: Process, cursor: int) -> ExecResult | None:
    keys = _Keys(process)
    showing = asyncio.ensure_future(_show(process, cursor))
    typing = asyncio.ensure_future(keys.run())
    try:
        await asyncio.wait({showing, typing}, return_when=asyncio.FIRST_COMPLETED)
        if not showing.done() and await typing:
            return None
        return await showing
    finally:
        for task in (showing, typing):
            task.cancel()
        await asyncio.gather(showing, typing, return_exceptions=True)


@contextmanager
def _raw() -> Iterator[None]:
    """What was typed before stays, and what is shown is not waited for: neither may hang or get lost."""
    before = termios.tcgetattr(0)
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGCONT, _make_raw)  # whoever had stopped us had the terminal meanwhile
    _make_raw()
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGCONT)
        with suppress(termios.error):  # it is gone
            termios.tcsetattr(0, termios.TCSANOW, before)


def _make_raw() -> None:
    with suppress(termios.error):
        tty.setraw(0, termios.TCSANOW)


# -- size --


@asynccontextmanager
async def _sized(process: Process, *, redraw: bool) -> AsyncIterator[None]:
    """The command's terminal has the size of ours."""
    changed = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGWINCH, changed.set)
    changed.set()  # it may have changed since the command was started
    following = asyncio.ensure_future(_follow_size(process, changed, redraw=redraw))
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGWINCH)
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)


async def _follow_size(process: Process, changed: asyncio.Event, *, redraw: bool) -> None:
    from dsec import DSecError

    while True:
        await changed.wait()
        changed.clear()
        ours = size()
        with suppress(DSecError):  # ended just now, or lost: who follows its output says so
            if redraw:
                await process.resize(ours.cols, max(1, ours.rows - 1))
                redraw = False
            await process.resize(ours.cols, ours.rows)


# -- screen --


async def _show(process: Process, cursor: int) -> ExecResult:
    from dsec import Exit

    with _Screen() as screen:
        async for event in process.events(cursor=cursor):
            if isinstance(event, Exit):
                return event.result
            await screen.write(event.data)
    return await process.wait()


class _Screen:
    """Our terminal for writing, opened anew: it must not block, and blocking is a matter of who has it open, our shell too."""

    def __enter__(self) -> _Screen:
        self._descriptor = os.open("/proc/self/fd/1", os.O_WRONLY | os.O_NOCTTY | os.O_NONBLOCK | os.O_CLOEXEC)
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)

    async def write(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            try:
                view = view[os.write(self._descriptor, view) :]
            except BlockingIOError:
                await _writable(self._descriptor)
            except OSError as error:
                raise CliFailure(f"the terminal is gone: {error.strerror}") from error


async def _writable(descriptor: int) -> None:
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    loop.add_writer(descriptor, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_writer(descriptor)


# -- keyboard --


class _Keys:
    """What is typed goes to the command in the order of typing; what comes while a write is under way goes with the next."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._typed = bytearray()
        self._changed = asyncio.Event()
        self._gone: CliFailure | None = None

    async def run(self) -> bool:
        """True when the user detached, False when the command takes nothing any more."""
        from dsec import Conflict, NotFound

        try:
            return await self._feed()
        except (Conflict, NotFound):
            return False
        finally:
            asyncio.get_running_loop().remove_reader(0)

    async def _feed(self) -> bool:
        asyncio.get_running_loop().add_reader(0, self._read)
        while True:
            await self._changed.wait()
            self._changed.clear()
            at = self._typed.find(_DETACH)
            if at < 0 and self._typed.endswith(_DETACH[:1]):
                await self._second_key()
                at = self._typed.find(_DETACH)
            data = bytes(self._typed if at < 0 else self._typed[:at])
            self._typed.clear()
            asyncio.get_running_loop().add_reader(0, self._read)
            if data:
                await self._process.write(data)
            if at >= 0:
                return True
            if self._gone is not None:
                raise self._gone

    async def _second_key(self) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(_DETACH_S):
                await self._changed.wait()

    def _read(self) -> None:
        """Takes what was typed. Of more than the command takes, the rest stays in the terminal."""
        try:
            data = os.read(0, _CHUNK)
        except OSError:
            data = b""
        self._typed += data
        self._changed.set()
        if not data:
            self._gone = CliFailure("the terminal is gone")
        if not data or len(self._typed) > _HELD:
            asyncio.get_running_loop().remove_reader(0)
