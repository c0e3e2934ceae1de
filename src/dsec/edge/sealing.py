"""Sealing: what an agent did is over, and stays as it is until somebody has looked at it.

A sealed sandbox has no process but PID 1, takes no command and no change of files any more, and can still be read. The journal
says so before the first process is killed; a seal that an edge died over is made again when it is asked for again.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Protocol

import msgspec

from dsec.backends.launcher import LauncherFailed
from dsec.protocol.errors import ErrorKind, Fault
from dsec.protocol.specs import State
from dsec.protocol.steps import step

from .journal import Change, Journal
from .sandbox import Sandbox

READS = frozenset(
    (
        "exec.attach", "exec.poll", "exec.list", "session.list", "fs.stat", "fs.list", "fs.read", "fs.tar", "fs.watch",
        "clock.start", "clock.stop",
    )
)  # fmt: skip
"""What a sealed sandbox still answers."""
_ANSWER_S = 5.0


class Backend(Protocol):
    """The part of the container backend that is needed here."""

    async def freeze(self, sandbox: str) -> None: ...
    async def thaw(self, sandbox: str) -> None: ...
    async def kill(self, sandbox: str) -> None: ...


def refuse_if_sealed(sandbox: Sandbox, method: str) -> None:
    """Fault conflict for what would change a sealed sandbox. Nothing may wait between the asking and the doing."""
    if sandbox.sealed and method not in READS:
        raise Fault(
            ErrorKind.CONFLICT,
            f"sandbox {sandbox.id} is sealed for grading: {method} would change it",
            hint="read it, or make a new sandbox",
            sandbox_id=sandbox.id,
        )


class Seals:
    def __init__(self, backend: Backend, journal: Journal) -> None:
        self._backend = backend
        self._journal = journal

    async def seal(self, sandbox: Sandbox) -> None:
        """Sealed when it returns, whoever stays to hear it; idempotent. One that was paused stays so."""
        await asyncio.shield(asyncio.ensure_future(self._seal(sandbox)))

    async def _seal(self, sandbox: Sandbox) -> None:
        await sandbox.settled.wait()
        async with sandbox.sleep.turn:
            if not sandbox.lives:
                raise sandbox.unavailable()
            if sandbox.seal_holds:
                return
            if not sandbox.sealed:
                sandbox.sealed = True
                with step("seal.journal", sandbox.id):
                    self._journal.update(sandbox.id, Change(sealed=True))
                    await self._journal.commit()
            try:
                with step("seal.kill", sandbox.id):
                    await self._end_everything(sandbox)
            except LauncherFailed as failed:
                if not sandbox.lives:
                    raise sandbox.unavailable() from failed
                raise Fault(
                    ErrorKind.INTERNAL,
                    f"sandbox {sandbox.id} could not be sealed: {failed}",
                    hint="ask again; it takes no commands in any case",
                    retryable=True,
                    sandbox_id=sandbox.id,
                ) from failed
            sandbox.seal_holds = True
            sandbox.log("sealed for grading")

    async def _end_everything(self, sandbox: Sandbox) -> None:
        """Twice: what was on its way to PID 1 when the connection was cut may have started something since."""
        await sandbox.disconnect()
        await self._kill(sandbox)
        await self._backend.thaw(sandbox.id)
        with suppress(
            Fault, TimeoutError, msgspec.MsgspecError
        ):  # it reads an older connection to its end before a newer one
            async with asyncio.timeout(_ANSWER_S):
                await (await sandbox.link()).call("exec.list", {})
        await self._kill(sandbox)
        if sandbox.state is not State.PAUSED:
            await self._backend.thaw(sandbox.id)

    async def _kill(self, sandbox: Sandbox) -> None:
        """Frozen, nothing forks away from being killed."""
        await self._backend.freeze(sandbox.id)
        await self._backend.kill(sandbox.id)
