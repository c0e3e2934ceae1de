"""Terminals: a devpts of its own in a sandbox, mounted when a command first asks for one (each costs the kernel a filesystem).

A helper mounts it from outside, since nothing inside may mount, and nothing inside can keep it from ending: it has a time limit.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from pathlib import Path

from dsec.protocol.errors import ErrorKind, Fault

from .sandbox import Sandbox

_PATIENCE_S = 10.0
_AT_ONCE = 8  # helpers, however many sandboxes want terminals in one moment


class Terminals:
    def __init__(self, runtime: Path) -> None:
        self._runtime = runtime
        self._places = asyncio.Semaphore(_AT_ONCE)

    async def ready(self, sandbox: Sandbox) -> None:
        """Returns when the sandbox can have terminals. Fault INTERNAL with what the helper said; the next command tries anew."""
        async with sandbox.mounting:
            if sandbox.has_terminals:
                return
            async with self._places:
                await self._mount(sandbox)
            sandbox.has_terminals = True

    async def _mount(self, sandbox: Sandbox) -> None:
        if sandbox.pidfd < 0 or sandbox.dying.is_set():
            raise sandbox.unavailable()
        pidfd = os.dup(sandbox.pidfd)  # the sandbox may end, and its own be closed, before the helper has it
        try:
            code, said = await self._help("devpts", "--pidfd", str(pidfd), fd=pidfd)
        finally:
            os.close(pidfd)
        if code and sandbox.dying.is_set():
            raise sandbox.unavailable()
        if code:
            raise _failed(said or f"the helper ended with {code}")

    async def _help(self, *arguments: str, fd: int) -> tuple[int, str]:
        """A helper's exit status, and what it said."""
        process = await asyncio.create_subprocess_exec(
            self._runtime, "helper", *arguments, pass_fds=(fd,), env={}, cwd="/",
            stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        try:
            async with asyncio.timeout(_PATIENCE_S):
                _, said = await process.communicate()
        except TimeoutError:
            raise _failed(f"the helper did not end within {_PATIENCE_S:.0f} s") from None
        finally:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await asyncio.shield(process.wait())
        return await process.wait(), said.decode(errors="replace").strip()


def _failed(why: str) -> Fault:
    return Fault(
        ErrorKind.INTERNAL,
        f"no terminals in this sandbox: {why}",
        hint="try again, or run the command without a terminal",
        retryable=True,
    )
