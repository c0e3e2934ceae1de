"""A command's output and input, live: events to our stdout and stderr, our stdin to the command."""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import sys
import threading
from collections.abc import Coroutine
from typing import TYPE_CHECKING

from dsec.cli.output import note

if TYPE_CHECKING:
    from dsec import ExecResult, Process

_CHUNK = 65_536


def stdin_is_piped() -> bool:
    """Whether somebody feeds us: a pipe or a file, but not a terminal and not a closed descriptor."""
    try:
        return not os.isatty(0) and os.readlink("/proc/self/fd/0") != os.devnull
    except OSError:
        return False


async def follow(process: Process, *, forward_stdin: bool) -> ExecResult:
    """Copy output until the command has ended; its result. When cancelled (Ctrl-C), the command's tree is killed first."""
    from dsec import Exit, Stderr, Stdout

    if forward_stdin:
        _pump_stdin(process, asyncio.get_running_loop())
    try:
        async for event in process.events():
            match event:
                case Stdout():
                    _write(sys.stdout.fileno(), event.data)
                case Stderr():
                    _write(sys.stderr.fileno(), event.data)
                case Exit():
                    return event.result
    except (asyncio.CancelledError, BrokenPipeError):
        await process.signal("KILL")
        raise
    return await process.wait()


async def collect(process: Process, *, forward_stdin: bool) -> ExecResult:
    """Wait for the command without copying its output; the same care as `follow` when cancelled."""
    if forward_stdin:
        _pump_stdin(process, asyncio.get_running_loop())
    try:
        return await process.wait()
    except asyncio.CancelledError:
        await process.signal("KILL")
        raise


def _write(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def _pump_stdin(process: Process, loop: asyncio.AbstractEventLoop) -> None:
    """Feed the command from a thread, because reading a file or a pipe blocks. The thread dies with us."""

    def pump() -> None:
        from dsec import DSecError

        def wait(sending: Coroutine[None, None, None]) -> None:
            try:
                asyncio.run_coroutine_threadsafe(sending, loop).result()
            finally:
                sending.close()  # when the loop is gone

        try:
            while data := os.read(0, _CHUNK):
                wait(process.write(data))
            wait(process.close_stdin())
        except (DSecError, RuntimeError, OSError, concurrent.futures.CancelledError):
            return  # the command ended without reading everything, or the loop is gone: not an error, as in a shell

    threading.Thread(target=pump, name="stdin", daemon=True).start()


def remark(result: ExecResult) -> None:
    """Say what the exit code alone does not: a deadline, output that was cut, a limit."""
    if result.timed_out == "deadline":
        note(f"dsec: killed at its deadline after {result.duration_s:.1f} s")
    elif result.timed_out == "idle":
        note("dsec: killed because it was silent for too long")
    if result.reason:
        note(f"dsec: ended by a limit: {result.reason}" + (f" ({result.detail})" if result.detail else ""))
    for name, cut, size in (
        ("stdout", result.stdout_truncated, result.stdout_bytes),
        ("stderr", result.stderr_truncated, result.stderr_bytes),
    ):
        if cut:
            note(f"dsec: {name} was cut at the output limit; the command wrote {size:,} bytes")
