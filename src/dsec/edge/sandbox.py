"""One sandbox as its edge sees it: state, clock of idleness, connection to its aether."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from dsec.layers import Environment
from dsec.protocol.errors import ErrorKind, Fault
from dsec.protocol.link import LinkClient
from dsec.protocol.specs import DSecContainerRunArgs, Reason, State

from .journal import Before
from .pause import Sleep

_LOG_LINES = 200
_ENDED = (State.STOPPED, State.FAILED)


class Sandbox:
    def __init__(
        self,
        id: str,
        args: DSecContainerRunArgs,
        environment: Environment | None,
        incarnation: int,
        holder: str,
        edge_epoch: int = 0,
        job: str = "",
    ) -> None:
        self.id = id
        self.args = args
        self.environment = environment
        self.layers = environment.refs() if environment is not None else ()
        self.incarnation = incarnation
        self.holder = holder
        self.job = job  # its name; "" for none
        self.state = State.CREATING
        self.reason: Reason | None = None
        self.detail = ""
        self.created_at = time.time()
        self.pid = 0
        self.start = 0
        self.pidfd = -1
        self.oom_kills = 0
        self.detach: Callable[[], Awaitable[None]] | None = None  # what else holds on to it, until it disconnects
        self.services: dict[str, str] = {}  # names inside of the caller's services, and their addresses there
        self.hosts: Before | None = None  # what its /etc/hosts was before the first of them
        self.sealed = False  # nothing changes it any more
        self.seal_holds = False  # and nothing of it runs, as this edge has seen
        self.has_terminals = False  # as far as this edge knows
        self.mounting = asyncio.Lock()
        self.idle_limit = args.ttl_running_stop
        self.total_limit = args.ttl_total
        self.sleep = Sleep()
        self.dying = asyncio.Event()  # its removal has begun, or its PID 1 is dead
        self.ended = asyncio.Event()
        self.settled = asyncio.Event()  # no longer creating
        self.stop_reason: Reason | None = None  # asked to stop while creating, or stopping
        self.lines: deque[tuple[float, str]] = deque(maxlen=_LOG_LINES)
        self.born_at = time.monotonic()  # of this boot, so that it means the same to every process
        self._idle_since = time.monotonic()
        self._active = 0
        self._socket: Path | None = None
        self._link: LinkClient | None = None
        self._epoch = edge_epoch << 32  # a later start of the edge wins over every connection of an earlier one
        self._connecting = asyncio.Lock()

    def log(self, line: str) -> None:
        self.lines.append((time.time(), line))

    @property
    def lives(self) -> bool:
        """It can work: now, or as soon as it is resumed."""
        return self.state in (State.RUNNING, State.PAUSED)

    def fall_asleep(self) -> None:
        """Who waits for a paused one does not keep it from idling: nothing happens there."""
        self.state = State.PAUSED
        self.sleep.since = time.monotonic()
        self.sleep.awake.clear()
        if self._active:
            self._idle_since = self.sleep.since

    def wake_up(self) -> None:
        self.state = State.RUNNING
        self._idle_since = time.monotonic()
        self.sleep.awake.set()

    @contextmanager
    def activity(self) -> Iterator[None]:
        """A foreground request: the idle clock stands still while it lasts and starts anew when it ends."""
        self._active += 1
        try:
            yield
        finally:
            self._active -= 1
            self._idle_since = time.monotonic()

    def expired(self, now: float) -> Reason | None:
        """Which TTL has run out at `now` (monotonic seconds)."""
        if self.total_limit is not None and now - self.born_at >= self.total_limit:
            return Reason.TTL_TOTAL
        active = self._active and self.state is not State.PAUSED
        if self.idle_limit is not None and not active and now - self._idle_since >= self.idle_limit:
            return Reason.TTL_IDLE
        return None

    def unavailable(self) -> Fault:
        why = self.reason.value if self.reason else self.state.value
        return Fault(
            ErrorKind.UNAVAILABLE,
            f"sandbox {self.id} is {self.state.value}" + (f" ({why})" if self.reason else "")
            + (f": {self.detail}" if self.detail else ""),
            hint="make a new sandbox; a result of this one must not be rewarded",
            reason=why,
            sandbox_id=self.id,
        )  # fmt: skip

    # -- aether --

    def born(self, pid: int, start: int, pidfd: int, socket: Path) -> None:
        self.pid, self.start, self.pidfd, self._socket = pid, start, pidfd, socket
        self._idle_since = time.monotonic()  # waiting for a lane was no idleness

    async def link(self) -> LinkClient:
        """The connection to this sandbox's aether, made again when it was lost."""
        if self._link is not None and not self._link.closed:
            return self._link
        async with self._connecting:
            if self._link is not None and not self._link.closed:
                return self._link
            if self.state in _ENDED or self._socket is None:
                raise self.unavailable()
            self._epoch += 1
            try:
                self._link = await LinkClient.connect_unix(self._socket, self._epoch, greet=False)
            except Fault:
                if self.state in (State.STOPPING, *_ENDED):
                    raise self.unavailable() from None
                raise
            return self._link

    async def disconnect(self) -> None:
        if self.detach is not None:
            await self.detach()
        if self._link is not None:
            await self._link.close()
