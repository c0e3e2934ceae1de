"""Lifecycle of sandboxes: creating -> running -> stopping -> stopped(reason), and failed(reason).

Every change is in the journal before it is answered. A stop that comes while a sandbox is being made is remembered, and the
creation ends in removal; a death seen on the pidfd of PID 1 ends the sandbox by name.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator

import structlog
from msgspec import UNSET

from dsec.backends.container import ContainerBackend, Kept
from dsec.backends.launcher import LauncherFailed, LauncherUsage
from dsec.layers import LayerStore, compose
from dsec.protocol.errors import ErrorKind, Fault
from dsec.protocol.ids import new_sandbox_id
from dsec.protocol.specs import Created, DSecContainerRunArgs, Reason, State
from dsec.protocol.steps import step

from .admission import Admission
from .checks import check_args
from .journal import Before, Change, Journal, Record
from .membership import Jobs
from .pause import Pauses
from .recovery import Revival, boot_id, ended_with_the_node, record_of
from .sandbox import Sandbox
from .sealing import Seals

KEEP_ENDED = 10_000
KEEP_BURSTS = 4_096
BURST_KEY = "bu-"  # what keys begin with that the SDK makes up for bursts
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
        self.journal = journal
        self._boot = boot_id()
        self.admission = admission
        self.pauses = Pauses(backend, self._record_state)
        self.jobs = Jobs(edge, journal)
        self.seals = Seals(backend, journal)
        self._live: dict[str, Sandbox] = {}
        self._ended: OrderedDict[str, Sandbox | Record] = OrderedDict()
        self._by_key: dict[str, Sandbox] = {}
        self._ended_bursts: OrderedDict[str, None] = OrderedDict()
        self._with_lines: deque[Sandbox] = deque()
        self._closing = False
        self._removals: set[asyncio.Task[None]] = set()
        self.when_ended: list[Callable[[Sandbox], None]] = []  # told of each end, once
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

    async def seal(self, id: str, incarnation: int | None = None) -> None:
        """No process but PID 1, no command and no change of files any more; idempotent."""
        await self.seals.seal(self.running(id, incarnation))

    async def _record_state(self, sandbox: Sandbox) -> None:
        """Running or paused. The journal knows of an end by its reason: one that began meanwhile is there already."""
        if not sandbox.lives:
            raise sandbox.unavailable()
        self.journal.update(sandbox.id, Change(state=sandbox.state))
        await self.journal.commit()

    def all(self) -> Iterator[Sandbox | Record]:
        yield from list(self._live.values())
        yield from list(self._ended.values())

    def live(self) -> list[Sandbox]:
        return list(self._live.values())

    # -- creation --

    async def create(self, args: DSecContainerRunArgs, timeout: float, job: str = "") -> Created:
        """A running sandbox, in the job of that name or id; the same idempotency key gives the same one."""
        started = time.perf_counter()
        check_args(args)
        if args.idempotency_key is not None and (twin := await self._twin(args.idempotency_key, timeout)) is not None:
            return self._created(twin, started)
        self._refuse_when_closing()
        self._refuse_of_ended_burst(args.idempotency_key)
        environment = compose(self._store, args.container_image, args.layers)
        job = self.jobs.admit(job, args)
        holder = self.admission.reserve(args.labels, job)
        sandbox = Sandbox(new_sandbox_id(self.edge), args, environment, 1, holder, self.epoch, job)
        self._live[sandbox.id] = sandbox
        self.jobs.enter(sandbox)
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
        if key not in self._by_key:
            return None
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

    def _refuse_of_ended_burst(self, key: str | None) -> None:
        if key is not None and (burst := key.rpartition("/")[0]) in self._ended_bursts:
            raise Fault(ErrorKind.UNAVAILABLE, f"burst {burst} was stopped before this sandbox of it was made",
                        hint="its caller had gone away; ask with a new key", reason=Reason.USER.value)  # fmt: skip

    async def stop_burst(self, burst: str, keep: frozenset[str]) -> int:
        """Ends every sandbox of it that is not to be kept, and makes no more, should requests for them still be on their way.

        Only keys that the SDK made up are remembered, since those are never used for another burst.
        """
        if burst.startswith(BURST_KEY):
            self._ended_bursts[burst] = None
            while len(self._ended_bursts) > KEEP_BURSTS:
                self._ended_bursts.popitem(last=False)
        of_it = [s.id for s in self.live() if (s.args.idempotency_key or "").startswith(f"{burst}/")]
        chosen = [id for id in of_it if id not in keep]
        await asyncio.gather(*(self.stop(id, Reason.USER) for id in chosen))
        return len(chosen)

    async def _launch(self, sandbox: Sandbox) -> None:
        assert sandbox.environment is not None
        started = await self.backend.create(sandbox.id, sandbox.incarnation, sandbox.args, sandbox.environment)
        sandbox.born(started.pid, started.start, started.pidfd, started.socket)
        asyncio.get_running_loop().add_reader(started.pidfd, self._died, sandbox)
        if sandbox.stop_reason is None:
            sandbox.state = State.RUNNING
        sandbox.log("running; " + ", ".join(f"{name} {us} us" for name, us in started.stages_us.items()))
        with step("create.journal", sandbox.id):
            self.journal.running(record_of(sandbox, self._boot))
            self.jobs.runs(sandbox)
            await self.journal.commit()
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
        sandbox.dying.set()
        if sandbox.pid > 0:  # whoever finds it half removed finishes the removal, and knows why
            with step("remove.journal", sandbox.id):
                self.journal.update(sandbox.id, Change(stop_reason=reason, detail=detail))
        task = asyncio.get_running_loop().create_task(self._remove(sandbox, reason, detail))
        self._removals.add(task)
        task.add_done_callback(self._removals.discard)

    async def _remove(self, sandbox: Sandbox, reason: Reason, detail: str) -> None:
        was_born = sandbox.pid > 0
        self._close_pidfd(sandbox)
        await sandbox.disconnect()
        usage = LauncherUsage()
        try:
            with step("remove.teardown", sandbox.id):
                usage = await self.backend.stop(sandbox.id, sandbox.environment if was_born else None)
        except LauncherFailed as failed:
            if was_born:
                detail = f"{detail}; removal: {failed}".lstrip("; ")
                _log.error("removal failed", sandbox=sandbox.id, error=str(failed))
        if reason is Reason.AGENT_LOST:
            reason, detail = _cause_of_death(sandbox, usage, detail)
        failed_to_start = reason is Reason.CREATE_FAILED
        self.failed_total += failed_to_start
        sandbox.state = State.FAILED if failed_to_start else State.STOPPED
        sandbox.reason, sandbox.detail = reason, detail
        sandbox.log(f"{sandbox.state.value}: {reason.value} {detail}".rstrip())
        try:
            with step("remove.ended", sandbox.id):
                self.journal.ended(sandbox.id, sandbox.state, reason, detail)
                self.jobs.leave(sandbox, usage)
                await self.journal.commit()
        except Fault as fault:  # it is gone all the same; the next start finds out
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
        for tell in self.when_ended:
            tell(sandbox)

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

    async def set_ttl(self, sandbox: Sandbox, change: Change) -> None:
        """New limits of idleness and age; in the journal when it returns."""
        if change.idle_limit is not UNSET:
            sandbox.idle_limit = change.idle_limit
        if change.total_limit is not UNSET:
            sandbox.total_limit = change.total_limit
        self.journal.update(sandbox.id, change)
        await self.journal.commit()

    async def set_args(self, sandbox: Sandbox, args: DSecContainerRunArgs) -> None:
        """What it was made from, as far as that can change later; in the journal when it returns."""
        sandbox.args = args
        self.journal.update(sandbox.id, Change(args=args))
        await self.journal.commit()

    async def set_hosts(self, sandbox: Sandbox, before: Before) -> None:
        """What its /etc/hosts is without us; in the journal when it returns."""
        sandbox.hosts = before
        self.journal.update(sandbox.id, Change(hosts=before))
        await self.journal.commit()

    def account_oom(self, sandbox: Sandbox, kills: int) -> None:
        """So many kills of the memory limit have been told to somebody: a later one is a new reason."""
        sandbox.oom_kills = kills
        self.journal.update(sandbox.id, Change(oom_kills=kills))

    async def recover(self) -> None:
        """After a restart: takes over what lives, ends by name what does not, finishes removals, sweeps the rest."""
        revival = Revival(self._store, self.epoch)
        for record in self.journal.records():
            if record.ended_at is None and (why := ended_with_the_node(record, self._boot)) is not None:
                self.journal.ended(record.id, State.STOPPED, *why)
                self.jobs.lost(record.job, why[0])
            if record.ended_at is not None:
                self._ended[record.id] = record
                continue
            holder = self.admission.restore(record.args.labels, record.job)
            sandbox = revival.sandbox(record, holder, self.backend.socket_path(record.id))
            assert sandbox.environment is not None
            self.backend.mounts.hold(sandbox.environment.layers)
            self._live[sandbox.id] = sandbox
            self.jobs.adopt(sandbox)
            if record.args.idempotency_key is not None:
                self._by_key[record.args.idempotency_key] = sandbox
        while len(self._ended) > KEEP_ENDED:
            self._ended.popitem(last=False)
        await self.restore_launcher()
        for sandbox in self.live():
            self._go_on(sandbox)
        await asyncio.gather(*(self._sleep_on(s) for s in self.live() if s.state is State.PAUSED))
        await self.journal.commit()

    async def _sleep_on(self, sandbox: Sandbox) -> None:
        """One that was paused is so, whatever the earlier edge still had to do for it."""
        try:
            await self.pauses.asleep(sandbox)
        except LauncherFailed as failed:
            _log.error("a paused sandbox could not be frozen again", sandbox=sandbox.id, error=str(failed))

    def _go_on(self, sandbox: Sandbox) -> None:
        """An adopted sandbox goes on from where the earlier edge left it."""
        record = self.journal.record(sandbox.id)
        if sandbox.pidfd >= 0:
            asyncio.get_running_loop().add_reader(sandbox.pidfd, self._died, sandbox)
        if record is not None and record.stop_reason is not None:
            sandbox.stop_reason = record.stop_reason
            self._schedule_removal(sandbox, record.stop_reason, record.detail)
        elif sandbox.pidfd < 0:
            self._schedule_removal(sandbox, Reason.AGENT_LOST, "PID 1 of the sandbox ended while the edge was away")

    async def restore_launcher(self) -> None:
        """A launcher has started: it learns what it has to keep, and removes what nobody has a record of.

        A creation that was with an earlier one is made again; one that still waits goes on with this one.
        """
        born = [
            Kept.of(sandbox.id, sandbox.args)
            for sandbox in self.live()
            if sandbox.pid > 0 and not sandbox.ended.is_set()
        ]
        removed = await self.backend.restore(born)
        if any(removed.values()):
            _log.warning("removed what nobody has a record of", **removed)


def _cause_of_death(sandbox: Sandbox, usage: LauncherUsage, detail: str) -> tuple[Reason, str]:
    """PID 1 ended by itself: the kernel's counters tell whether memory ran out."""
    kills = usage.oom_kills - sandbox.oom_kills
    if kills <= 0 and not usage.agent_oom:
        return Reason.AGENT_LOST, detail
    limit = sandbox.args.memory_limit_mb
    peak = f", peak {usage.memory_peak >> 20} MiB" if usage.memory_peak > 0 else ""
    if usage.agent_oom:
        return Reason.OOM, f"the node ran out of memory and ended the sandbox's PID 1 (limit {limit} MiB{peak})"
    return Reason.OOM, f"out of memory: limit {limit} MiB{peak}, {kills} killed in this sandbox, and its PID 1 ended"


def ended_record(record: Record) -> Fault:
    reason = record.reason.value if record.reason else record.state.value
    return Fault(
        ErrorKind.UNAVAILABLE,
        f"sandbox {record.id} is {record.state.value} ({reason})",
        hint="make a new sandbox; a result of this one must not be rewarded",
        reason=reason,
        sandbox_id=record.id,
    )
