"""Pause and resume: a sandbox that nobody needs now gives its processor and its memory back, and is as it was when it is needed.

Pause: the clock of its aether is stopped, so that no deadline of a command passes meanwhile; every process is frozen; then the
launcher lets its memory go, to swap where there is any. Resume: thaw, clock, and what was in memory is brought in again beside
the first requests. A request that needs the processes resumes first (`Lifecycle.ready`). Pauses and resumes of one sandbox
happen one after the other; of all, a bounded number at once, so that thousands resumed together do not stall the node.

The journal says `paused` before the first process is frozen and `running` after the last one is thawed: whatever dies in
between, a sandbox that the journal calls running does run.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Protocol

import msgspec
import structlog

from dsec.backends.launcher import LauncherFailed, Reclaimed
from dsec.protocol.errors import ErrorKind, Fault
from dsec.protocol.specs import State
from dsec.protocol.steps import step

if TYPE_CHECKING:
    from .sandbox import Sandbox

AT_ONCE = 16
"""Pauses that freeze at once, and resumes in their first moments."""
QUIET_S = 1.0
"""How long a pause waits for short requests that are under way; a long upload is frozen."""
RECLAIM_S = 10.0
"""How long a pause waits for the memory to be gone; the rest goes on behind it."""
FIRST_MOMENTS_S = 0.25
"""How long a resume keeps its place while the working set comes back."""
_ANSWER_S = 1.0
_log = structlog.get_logger("edge")


class Backend(Protocol):
    """The part of the container backend that is needed here."""

    async def freeze(self, sandbox: str) -> None: ...
    async def thaw(self, sandbox: str) -> None: ...
    async def reclaim(self, sandbox: str) -> Reclaimed: ...
    async def prefetch(self, sandbox: str) -> Reclaimed: ...


class Sleep:
    """What a sandbox knows of its pauses."""

    def __init__(self) -> None:
        self.turn = asyncio.Lock()
        self.since = 0.0
        self.moving: asyncio.Task[None] | None = (
            None  # its memory: away since the last pause, or back since the last resume
        )
        self.awake = asyncio.Event()  # set: not paused (running, or on its way to its end)
        self.awake.set()
        self._short = 0
        self._quiet = asyncio.Event()
        self._quiet.set()

    @contextmanager
    def short(self) -> Iterator[None]:
        """A request that a pause waits for, instead of freezing its answer."""
        self._short += 1
        self._quiet.clear()
        try:
            yield
        finally:
            self._short -= 1
            if not self._short:
                self._quiet.set()

    async def quiet(self) -> None:
        with suppress(TimeoutError):
            await asyncio.wait_for(self._quiet.wait(), QUIET_S)


class Pauses:
    """Pauses and resumes the sandboxes of an edge. `record` puts a sandbox's state into the journal."""

    def __init__(self, backend: Backend, record: Callable[[Sandbox], Awaitable[None]]) -> None:
        self._backend = backend
        self._record = record
        self._pausing = asyncio.Semaphore(AT_ONCE)
        self._resuming = asyncio.Semaphore(AT_ONCE)
        self._tasks: set[asyncio.Task[None]] = set()

    async def pause(self, sandbox: Sandbox) -> None:
        """Frozen and recorded when it returns, and its memory given back as far as that takes no longer than RECLAIM_S."""
        await self.freeze(sandbox)
        await self.given_back(sandbox)

    async def freeze(self, sandbox: Sandbox) -> None:
        """Frozen and recorded when it returns; its memory is being given back."""
        await self._whole(self._pause(sandbox))

    async def given_back(self, sandbox: Sandbox) -> None:
        """Until the memory of a frozen one is gone, for RECLAIM_S at most, or it is resumed."""
        if sandbox.state is State.PAUSED and (moving := sandbox.sleep.moving) is not None:
            await asyncio.wait((moving,), timeout=RECLAIM_S)

    async def resume(self, sandbox: Sandbox) -> None:
        """Runs again when it returns. One that is not paused stays as it is."""
        if sandbox.state is State.PAUSED:
            await self._whole(self._resume(sandbox))

    async def _whole(self, work: Coroutine[None, None, None]) -> None:
        """To its end, whether or not the one who asked stays."""
        await asyncio.shield(self._in_background(work))

    def _in_background(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    # -- pause --

    async def _pause(self, sandbox: Sandbox) -> None:
        await sandbox.settled.wait()
        async with sandbox.sleep.turn, self._pausing:
            if sandbox.state is State.PAUSED:
                return
            if sandbox.state is not State.RUNNING:
                raise sandbox.unavailable()
            sandbox.fall_asleep()
            try:
                await sandbox.sleep.quiet()
                await self._freeze(sandbox)
            except (LauncherFailed, Fault) as error:
                await self._undo(sandbox)
                raise _failed(sandbox, "paused", error) from error
            if sandbox.lives:  # else it ends, as all of it
                sandbox.sleep.moving = self._in_background(self._reclaim(sandbox, sandbox.sleep.moving))

    async def _freeze(self, sandbox: Sandbox) -> None:
        with step("pause.journal", sandbox.id):
            await self._record(sandbox)
        await _tell_clock(sandbox, "clock.stop")
        with step("pause.freeze", sandbox.id):
            await self._backend.freeze(sandbox.id)

    async def _undo(self, sandbox: Sandbox) -> None:
        """It runs on. If not even that is certain it counts as paused, and the next request thaws it."""
        with suppress(LauncherFailed):
            await self._backend.thaw(sandbox.id)
            await self._run_on(sandbox)

    async def _reclaim(self, sandbox: Sandbox, before: asyncio.Task[None] | None) -> None:
        if before is not None:
            await asyncio.wait(
                (before,)
            )  # the freeze has cut it short; the launcher moves one's memory one way at a time
        try:
            done = await self._backend.reclaim(sandbox.id)
        except LauncherFailed as failed:  # it is paused all the same
            sandbox.log(f"paused; memory not given back: {failed}")
        else:
            sandbox.log(f"paused; memory {done.before >> 20} -> {done.after >> 20} MiB, {done.swap >> 20} MiB in swap")

    # -- resume --

    async def _resume(self, sandbox: Sandbox) -> None:
        async with sandbox.sleep.turn:
            if sandbox.state is not State.PAUSED:
                return
            await self._resuming.acquire()
            place = _Place(self._resuming)
            try:
                if sandbox.state is not State.PAUSED:
                    raise sandbox.unavailable()
                with step("resume.thaw", sandbox.id):
                    await self._backend.thaw(sandbox.id)
                slept = time.monotonic() - sandbox.sleep.since
                with step("resume.journal", sandbox.id):
                    await self._run_on(sandbox)
            except BaseException as error:
                place.free()
                if isinstance(error, LauncherFailed):
                    raise _failed(sandbox, "resumed", error) from error
                raise
            sandbox.log(f"resumed after {slept:.3f} s")
            moving = sandbox.sleep.moving
            sandbox.sleep.moving = self._in_background(self._prefetch(sandbox, place, moving))

    async def _run_on(self, sandbox: Sandbox) -> None:
        """The processes run: so do the clocks, and so say state and journal."""
        await _tell_clock(sandbox, "clock.start")
        if sandbox.state is not State.PAUSED:
            return  # it ends
        sandbox.wake_up()
        try:
            await self._record(sandbox)
        except Fault as fault:  # a restarted edge will pause it again
            _log.error("a resume is not in the journal", sandbox=sandbox.id, error=str(fault))

    async def _prefetch(self, sandbox: Sandbox, place: _Place, before: asyncio.Task[None] | None) -> None:
        try:
            if before is not None:
                await asyncio.wait((before,))  # which the thaw has cut short
            await self._backend.prefetch(sandbox.id)
        except LauncherFailed:
            pass  # the rest of its pause is just being ended, or it is: pages come as they are touched
        finally:
            place.free()

    async def asleep(self, sandbox: Sandbox) -> None:
        """After a restart of the edge: what the journal calls paused is made so, whatever there still was to do for it."""
        sandbox.fall_asleep()
        await _tell_clock(sandbox, "clock.stop", wait_s=0.05)
        await self._backend.freeze(sandbox.id)


class _Place:
    """One of the resumes in their first moments; free again at `free()`, or by itself after a while."""

    def __init__(self, places: asyncio.Semaphore) -> None:
        self._places: asyncio.Semaphore | None = places
        self._timer = asyncio.get_running_loop().call_later(FIRST_MOMENTS_S, self.free)

    def free(self) -> None:
        if self._places is not None:
            self._timer.cancel()
            self._places.release()
            self._places = None


async def _tell_clock(sandbox: Sandbox, method: str, *, wait_s: float = _ANSWER_S) -> None:
    """Both may be said twice. An aether that does not answer in time hears it when it can: requests are read in order."""
    try:
        async with asyncio.timeout(wait_s):
            await (await sandbox.link()).call(method, {})
    except (Fault, TimeoutError, msgspec.MsgspecError) as error:
        sandbox.log(f"{method}: {error or 'no answer'}")


def _failed(sandbox: Sandbox, what: str, error: Exception) -> Fault:
    if sandbox.state not in (State.RUNNING, State.PAUSED):
        return sandbox.unavailable()
    if isinstance(error, Fault):
        return error
    return Fault(
        ErrorKind.INTERNAL,
        f"sandbox {sandbox.id} could not be {what}: {error}",
        hint="ask again; it can be stopped in any case",
        retryable=True,
        sandbox_id=sandbox.id,
    )
