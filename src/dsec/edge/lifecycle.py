"""Lifecycle of sandboxes: creating -> running -> stopping -> stopped(reason), and failed(reason).

Every change is in the journal before it is answered. A stop that comes while a sandbox is being made is remembered, and the
creation ends in removal; a death seen on the pidfd of PID 1 ends the sandbox by name.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import OrderedDict, deque
from collections.abc import Iterator

import structlog

from dsec.backends.container import ContainerBackend
from dsec.backends.launcher import LauncherFailed, LauncherUsage
from dsec.layers import LayerStore, compose
from dsec.protocol.errors import ErrorKind, Fault
from dsec.protocol.ids import new_sandbox_id
from dsec.protocol.specs import Created, DSecContainerRunArgs, Reason, State

from .admission import Admission
from .checks import check_args
from .journal import Journal, Record
from .pause import Pauses
from .sandbox import Sandbox

KEEP_ENDED = 10_000
KEEP_LINES = 1_000  # ended sandboxes whose log lines are kept
TTL_TICK_S = 0.25
_log = structlog.get_logger("edge")


class Lifecycle:
    def __init__(
        self,
        edge: str,
        store: LayerStore,
        backend: ContainerBackend,
        journal: Journal,
        admission: Admission,
        epoch: int = 0,
    ) -> None:
        self.edge = edge
        self.epoch = epoch
        self._store = store
        self.backend = backend
        self._journal = journal
        self.admission = admission
        self.pauses = Pauses(backend, self._record_state)
        self._live: dict[str, Sandbox] = {}
        self._ended: OrderedDict[str, Sandbox | Record] = OrderedDict()
        self._by_key: dict[str, Sandbox] = {}
        self._with_lines: deque[Sandbox] = deque()
        self._closing = False
        self._removals: set[asyncio.Task[None]] = set()
        self.created_total = 0
        self.failed_total = 0

    # -- look-up --

    def get(self, id: str) -> Sandbox | Record:
        found = self._live.get(id) or self._ended.get(id)
        if found is None:
            raise Fault(
                ErrorKind.NOT_FOUND,
                f"no sandbox {id} on edge {self.edge}",
                hint="`dsec ps -a` lists them",
                sandbox_id=id,
            )
        return found

    def running(self, id: str, incarnation: int | None = None) -> Sandbox:
        """The sandbox, running or paused; else `sandbox_unavailable` with its reason."""
        sandbox = self.get(id)
        if isinstance(sandbox, Record):
            raise ended_record(sandbox)
        if incarnation is not None and incarnation != sandbox.incarnation:
            raise Fault(
                ErrorKind.UNAVAILABLE,
                f"sandbox {id} is incarnation {sandbox.incarnation}, not {incarnation}",
                hint="it was replaced; a result of this one must not be rewarded",
                reason="replaced",
                sandbox_id=id,
            )
        if not sandbox.lives:
            raise sandbox.unavailable()
        return sandbox

    async def ready(self, id: str, incarnation: int | None = None) -> Sandbox:
        """The sandbox for a request that needs its processes to run: a paused one is resumed first."""
        while (sandbox := self.running(id, incarnation)).state is State.PAUSED:
            await self.pauses.resume(sandbox)
        return sandbox

    async def awake(self, id: str, incarnation: int | None = None) -> Sandbox:
        """The same for one who only waits for something: until somebody else resumes it."""
        while (sandbox := self.running(id, incarnation)).state is State.PAUSED:
            await sandbox.sleep.awake.wait()
        return sandbox

    async def pause(self, id: str, incarnation: int | None = None) -> None:
        """Idempotent; one that is still being made is paused when it runs."""
        sandbox = self.get(id)
        if isinstance(sandbox, Sandbox) and sandbox.state is State.CREATING:
            await sandbox.settled.wait()
        await self.pauses.pause(self.running(id, incarnation))

    async def resume(self, id: str, incarnation: int | None = None) -> None:
        await self.pauses.resume(self.running(id, incarnation))

    async def _record_state(self, sandbox: Sandbox) -> None:
        await self._journal.commit()

    def all(self) -> Iterator[Sandbox | Record]:
        yield from list(self._live.values())
        yield from list(self._ended.values())

    def live(self) -> list[Sandbox]:
        return list(self._live.values())

    # -- creation --

    async def create(self, args: DSecContainerRunArgs, timeout: float) -> Created:
        """A running sandbox; the same idempotency key gives the same one."""
        started = time.perf_counter()
        check_args(args)
        if args.idempotency_key is not None and (twin := await self._twin(args.idempotency_key, timeout)) is not None:
            return self._created(twin, started)
        self._refuse_when_closing()
        environment = compose(self._store, args.container_image, args.layers)
        holder = self.admission.reserve(args.labels)
        sandbox = Sandbox(new_sandbox_id(self.edge), args, environment, 1, holder, self.epoch)
        self._live[sandbox.id] = sandbox
        if args.idempotency_key is not None:
            self._by_key[args.idempotency_key] = sandbox
        stage = "admission"
        try:
            async with asyncio.timeout(timeout):
                async with self.admission.lane():
                    stage = "launch"
                    if sandbox.stop_reason is None:  # else it ended while it waited, and nothing must be made of it
                        await self._launch(sandbox)
        except TimeoutError:
            fault = Fault(
                ErrorKind.CREATE_FAILED,
                f"creation took longer than {timeout:g} s, at stage {stage}",
                hint="the node is busy: ask with a longer timeout or for fewer at once",
                retryable=True,
                stage=f"timeout.{stage}",
                sandbox_id=sandbox.id,
            )
            self._schedule_removal(sandbox, Reason.CREATE_FAILED, fault.body.message)
            raise fault from None
        except BaseException as error:
            self._schedule_removal(sandbox, Reason.CREATE_FAILED, str(error))
            raise
        if sandbox.stop_reason is not None:
            self._schedule_removal(sandbox, sandbox.stop_reason, "stopped while it was being made")
            raise Fault(ErrorKind.UNAVAILABLE, f"sandbox {sandbox.id} was stopped while it was being made",
                        reason=sandbox.stop_reason.value, sandbox_id=sandbox.id)  # fmt: skip
        self.created_total += 1
        return self._created(sandbox, started)

    async def _twin(self, key: str, timeout: float) -> Sandbox | None:
        """The running sandbox of this key. One whose creation failed or was abandoned is waited out, so that a request that is
        repeated after a lost connection makes a new one instead of inheriting the loss."""
        try:
            async with asyncio.timeout(timeout):
                while (twin := self._by_key.get(key)) is not None:
                    await twin.settled.wait()
                    if twin.lives:
                        return twin
                    if twin.stop_reason is not None:
                        raise twin.unavailable()
                    await twin.ended.wait()
        except TimeoutError:
            raise Fault(
                ErrorKind.CREATE_FAILED,
                f"the creation with the same idempotency_key did not end within {timeout:g} s",
                hint="the node is busy: ask again, or with a longer timeout",
                retryable=True,
                stage="timeout.twin",
            ) from None
        return None

    def _refuse_when_closing(self) -> None:
        if self._closing:
            raise Fault(
                ErrorKind.CONNECTION_LOST, f"edge {self.edge} is stopping", hint="see `dsec status`", retryable=True
            )

    async def _launch(self, sandbox: Sandbox) -> None:
        assert sandbox.environment is not None
        started = await self.backend.create(sandbox.id, sandbox.incarnation, sandbox.args, sandbox.environment)
        sandbox.born(started.pid, started.pidfd, started.socket)
        asyncio.get_running_loop().add_reader(started.pidfd, self._died, sandbox)
        if sandbox.stop_reason is None:
            sandbox.state = State.RUNNING
        sandbox.log("running; " + ", ".join(f"{name} {us} us" for name, us in started.stages_us.items()))
        self._journal.running(
            Record(
                id=sandbox.id,
                state=State.RUNNING,
                created_at=sandbox.created_at,
                incarnation=sandbox.incarnation,
                args=sandbox.args,
                layers=sandbox.layers,
                pid=started.pid,
                start=started.start,
            )
        )
        await self._journal.commit()
        sandbox.settled.set()

    def _created(self, sandbox: Sandbox, started: float) -> Created:
        elapsed = (time.perf_counter() - started) * 1000
        return Created(id=sandbox.id, incarnation=sandbox.incarnation, edge=self.edge, create_ms=elapsed)

    # -- ends --

    async def stop(self, id: str, reason: Reason = Reason.USER, *, wait: bool = True) -> None:
        """Idempotent; with wait, answered when processes, cgroups, mounts and upper are gone."""
        sandbox = self.get(id)
        if isinstance(sandbox, Record):
            return
        if sandbox.stop_reason is None and not sandbox.ended.is_set():
            sandbox.stop_reason = reason
            if sandbox.lives:
                self._schedule_removal(sandbox, reason, "")
        if wait:
            await sandbox.ended.wait()

    def end(self, sandbox: Sandbox, reason: Reason, detail: str) -> None:
        """The edge itself ends a running sandbox, by name."""
        if sandbox.stop_reason is None and sandbox.lives:
            sandbox.stop_reason = reason
            self._schedule_removal(sandbox, reason, detail)

    def _died(self, sandbox: Sandbox) -> None:
        self._close_pidfd(sandbox)
        if sandbox.lives or sandbox.state is State.CREATING:
            self._schedule_removal(sandbox, Reason.AGENT_LOST, "PID 1 of the sandbox ended by itself")

    def _close_pidfd(self, sandbox: Sandbox) -> None:
        if sandbox.pidfd >= 0:
            asyncio.get_running_loop().remove_reader(sandbox.pidfd)
            os.close(sandbox.pidfd)
            sandbox.pidfd = -1

    def _schedule_removal(self, sandbox: Sandbox, reason: Reason, detail: str) -> None:
        if sandbox.state is State.STOPPING or sandbox.ended.is_set():
            return
        sandbox.state = State.STOPPING
        sandbox.sleep.awake.set()
        task = asyncio.get_running_loop().create_task(self._remove(sandbox, reason, detail))
        self._removals.add(task)
        task.add_done_callback(self._removals.discard)

    async def _remove(self, sandbox: Sandbox, reason: Reason, detail: str) -> None:
        was_born = sandbox.pid > 0
        self._close_pidfd(sandbox)
        await sandbox.disconnect()
        usage = LauncherUsage()
        try:
            usage = await self.backend.stop(sandbox.id, sandbox.environment if was_born else None)
        except LauncherFailed as failed:
            if was_born:
                detail = f"{detail}; removal: {failed}".lstrip("; ")
                _log.error("removal failed", sandbox=sandbox.id, error=str(failed))
        if reason is Reason.AGENT_LOST and usage.oom_kills > sandbox.oom_kills:
            detail = f"{detail}; {usage.oom_kills} out-of-memory kills in its group"
        failed_to_start = reason is Reason.CREATE_FAILED
        self.failed_total += failed_to_start
        sandbox.state = State.FAILED if failed_to_start else State.STOPPED
        sandbox.reason, sandbox.detail = reason, detail
        sandbox.log(f"{sandbox.state.value}: {reason.value} {detail}".rstrip())
        self._journal.ended(sandbox.id, sandbox.state, reason, detail)
        try:
            await self._journal.commit()
        except Fault as fault:  # it is gone all the same; the next start calls it edge_restart
            _log.error("an end is not in the journal", sandbox=sandbox.id, error=str(fault))
        finally:
            self._forget(sandbox)

    def _forget(self, sandbox: Sandbox) -> None:
        self._live.pop(sandbox.id, None)
        if sandbox.args.idempotency_key is not None:
            self._by_key.pop(sandbox.args.idempotency_key, None)
        self._ended[sandbox.id] = sandbox
        sandbox.environment = None
        self._with_lines.append(sandbox)
        if len(self._with_lines) > KEEP_LINES:
            self._with_lines.popleft().lines.clear()
        while len(self._ended) > KEEP_ENDED:
            self._ended.popitem(last=False)
        self.admission.release(sandbox.holder)
        sandbox.ended.set()
        sandbox.settled.set()

    async def stop_all(self, reason: Reason) -> int:
        """Every live sandbox, and what is still being removed."""
        live = self.live()
        await asyncio.gather(*(self.stop(sandbox.id, reason) for sandbox in live))
        if self._removals:
            await asyncio.wait(list(self._removals))
        return len(live)

    async def close(self, reason: Reason) -> int:
        """The same for good: from now on nothing is created."""
        self._closing = True
        return await self.stop_all(reason)

    # -- time and restarts --

    async def watch_ttls(self) -> None:
        """Ends what idles or lives too long; runs as long as the edge."""
        while True:
            await asyncio.sleep(TTL_TICK_S)
            now = time.monotonic()
            for sandbox in self.live():
                if sandbox.lives and (reason := sandbox.expired(now)) is not None:
                    sandbox.stop_reason = reason
                    limit = sandbox.idle_limit if reason is Reason.TTL_IDLE else sandbox.total_limit
                    self._schedule_removal(sandbox, reason, f"after {limit:g} s")

    async def recover(self) -> None:
        """After a restart: what earlier edges of this name left is removed, and said so in its record."""
        removed = await self.backend.sweep([])
        if any(removed.values()):
            _log.warning("removed what an earlier edge left", **removed)
        for record in self._journal.records():
            if record.ended_at is None:
                record.state, record.reason = State.STOPPED, Reason.EDGE_RESTART
                self._journal.ended(record.id, record.state, record.reason, "the edge was restarted")
            self._ended[record.id] = record
        while len(self._ended) > KEEP_ENDED:
            self._ended.popitem(last=False)
        await self._journal.commit()

    async def launcher_lost(self, why: str) -> None:
        """The launcher died: its sandboxes can no longer be controlled, so they end, by name.

        A creation that was with it has failed already; one that still waits goes on with the next launcher.
        """
        for sandbox in self.live():
            if sandbox.lives:
                sandbox.stop_reason = sandbox.stop_reason or Reason.EDGE_RESTART
                self._schedule_removal(sandbox, Reason.EDGE_RESTART, f"the launcher was lost: {why}")


def ended_record(record: Record) -> Fault:
    reason = record.reason.value if record.reason else record.state.value
    return Fault(
        ErrorKind.UNAVAILABLE,
        f"sandbox {record.id} is {record.state.value} ({reason})",
        hint="make a new sandbox; a result of this one must not be rewarded",
        reason=reason,
        sandbox_id=record.id,
    )
