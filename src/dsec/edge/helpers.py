"""Starting a helper of the runtime: a process that lives for milliseconds and says what it found on its stdout.

Not by the event loop: uvloop forks, and copying the page tables of an edge takes ten times as long as the helper's work, while
`subprocess` borrows them (vfork).
"""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

_SAID = 4096


class Helper:
    """A running one. stdout is for one reader."""

    def __init__(self, process: subprocess.Popen[bytes], stdout: asyncio.StreamReader) -> None:
        self.stdout = stdout
        self._process = process

    async def wait(self) -> int:
        """Its exit code (-n for signal n), when it has ended."""
        if (code := self._process.poll()) is not None:
            return code
        loop, ended = asyncio.get_running_loop(), asyncio.Event()
        pidfd = os.pidfd_open(self._process.pid)
        loop.add_reader(pidfd, ended.set)
        try:
            await ended.wait()
        finally:
            loop.remove_reader(pidfd)
            os.close(pidfd)
        return self._process.wait()

    def said(self) -> str:
        """What it had to say on stderr; to be asked when it has ended."""
        assert self._process.stderr is not None
        with suppress(BlockingIOError):
            os.set_blocking(self._process.stderr.fileno(), False)
            return os.read(self._process.stderr.fileno(), _SAID).decode(errors="replace").strip()
        return ""


@asynccontextmanager
async def helper(runtime: Path, arguments: Sequence[str], pass_fds: Sequence[int] = ()) -> AsyncIterator[Helper]:
    """Runs `dsec-runtime helper ARGUMENTS`; killed at the end of the block if it still runs."""
    process = _started(runtime, arguments, pass_fds)
    assert process.stdout is not None and process.stderr is not None
    running: Helper | None = None
    transport: asyncio.BaseTransport | None = None
    try:
        reader = asyncio.StreamReader()
        loop = asyncio.get_running_loop()
        transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), process.stdout)
        running = Helper(process, reader)
        yield running
    finally:
        if process.poll() is None:
            process.kill()
            if running is not None:
                await running.wait()
            process.wait()
        if transport is not None:
            transport.close()
        process.stderr.close()


def _started(runtime: Path, arguments: Sequence[str], pass_fds: Sequence[int]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [runtime, "helper", *arguments],
        pass_fds=pass_fds,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={},
    )
