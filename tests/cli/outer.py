"""A user's terminal with a program in it: keys go in, the screen comes out, the size changes."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import select
import signal
import termios
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager

DEADLINE_S = 30


def _leads() -> None:
    """In the child: the terminal becomes the one of its session."""
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


class Outer:
    """The side of the screen and the keyboard."""

    def __init__(self, master: int, slave: int, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.screen = bytearray()  # all that was shown and not yet looked at
        self._master, self._slave = master, slave
        self._changed = asyncio.Event()
        asyncio.get_running_loop().add_reader(master, self._read)

    def _read(self) -> None:
        with contextlib.suppress(OSError):
            self.screen += os.read(self._master, 1 << 20)
        self._changed.set()

    def type(self, keys: bytes) -> None:
        assert os.write(self._master, keys) == len(keys)

    async def paste(self, text: bytes) -> None:
        """More than the terminal holds: the rest is given as the program takes it."""
        async with asyncio.timeout(DEADLINE_S):
            while text:
                try:
                    text = text[os.write(self._master, text) :]
                except BlockingIOError:
                    await asyncio.sleep(0)

    def cook(self, modes: list[object]) -> None:
        """Another program has the terminal and sets its modes."""
        termios.tcsetattr(self._slave, termios.TCSANOW, modes)  # type: ignore[arg-type]

    async def until(self, wanted: bytes) -> bytes:
        """What was shown before `wanted`, which is shown within the deadline; both count as looked at."""
        seen = 0
        try:
            async with asyncio.timeout(DEADLINE_S):
                while (at := self.screen.find(wanted, max(0, seen - len(wanted)))) < 0:
                    seen = len(self.screen)
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            raise AssertionError(f"{wanted!r} was not shown, but {bytes(self.screen[-2000:])!r}") from None
        shown = bytes(self.screen[:at])
        del self.screen[: at + len(wanted)]
        return shown

    async def rest(self) -> bytes:
        """All that is shown until nothing more is under way, when the program has ended."""
        while self._pending():
            await asyncio.sleep(0)
        return bytes(self.screen)

    def _pending(self) -> bool:
        return bool(select.select([self._master], [], [], 0)[0])

    def resize(self, cols: int, rows: int) -> None:
        termios.tcsetwinsize(self._master, (rows, cols))

    def modes(self) -> list[object]:
        """Of the terminal, as programs in it see them."""
        return termios.tcgetattr(self._slave)  # type: ignore[no-any-return]

    async def code(self) -> int:
        """Its exit code, when it has ended within the deadline."""
        async with asyncio.timeout(DEADLINE_S):
            return await self.process.wait()

    async def is_raw(self) -> None:
        """Returns when the program has taken the keyboard for itself."""
        async with asyncio.timeout(DEADLINE_S):
            while self.modes()[3] & termios.ICANON:  # type: ignore[operator]
                await asyncio.sleep(0.005)

    def hang_up(self) -> None:
        """The window is closed."""
        asyncio.get_running_loop().remove_reader(self._master)
        os.close(self._master)
        self._master = -1

    def close(self) -> None:
        if self._master >= 0:
            self.hang_up()
        os.close(self._slave)


@asynccontextmanager
async def outer(
    argv: Sequence[str], environment: Mapping[str, str], cols: int = 100, rows: int = 30
) -> AsyncIterator[Outer]:
    master, slave = os.openpty()
    os.set_blocking(master, False)
    termios.tcsetwinsize(master, (rows, cols))
    process = await asyncio.create_subprocess_exec(
        *argv, stdin=slave, stdout=slave, stderr=slave, env=dict(environment), start_new_session=True, preexec_fn=_leads
    )
    window = Outer(master, slave, process)
    try:
        yield window
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGKILL)
        await process.wait()
        window.close()
