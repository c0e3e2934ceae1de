"""`job.*` for the apiserver, and what time does to jobs (report, 6).

A pause, resume or end of a job is first in the journal, as `under_way`, then done to every sandbox of it, then no longer under
way; an edge that dies in between goes on with it. How many sandboxes are frozen, thawed or emptied at once is bounded where
that is done (`edge/pause.py`, the launcher), for all jobs together.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress

import msgspec
import structlog

from dsec.protocol.errors import ErrorKind, Fault
from dsec.protocol.link import Call, Handler, pack_record
from dsec.protocol.rollouts import JobInfo, JobLimits, JobState, JobUsage, JobWork
from dsec.protocol.specs import Reason
from dsec.protocol.steps import step
from dsec.rollout.jobs import Job, PausedBy, check_lease, check_name

from .accounting import Accounts
from .lifecycle import Lifecycle
from .sandbox import Sandbox

TICK_S = 0.1
AT_ONCE = 16
"""Sandboxes of a job that are being frozen or thawed at once."""
GIVEN_BACK_S = 4.0
"""How long the pause of a job waits for memory once all of it stands still; the rest follows as fast as the disk takes it."""
FRESH_S = 1.0
"""How old the samples may be that `job.usage` answers with."""
MAX_WAIT_S = 300.0
Counts = Callable[[str], tuple[int, int]]
"""Rollouts and recorded steps of a job, by its id."""
TIDY_S = 60.0
_log = structlog.get_logger("edge")


class _Named(msgspec.Struct, frozen=True):
    name: str
    request_id: str = ""


class _Open(msgspec.Struct, frozen=True):
    name: str
    lease: float = 60
    limits: JobLimits = JobLimits()
    labels: dict[str, str] | None = None
    request_id: str = ""


class _Renew(msgspec.Struct, frozen=True):
    name: str
    lease: float | None = None
    id: str = ""
    request_id: str = ""


class _Wait(_Named, frozen=True):
    """wait_s: the answer comes then, even when it is still under way."""

    wait_s: float = 30


class _List(msgspec.Struct, frozen=True):
    name: str | None = None
    request_id: str = ""


class JobService:
    def __init__(self, lifecycle: Lifecycle, accounts: Accounts, counts: Counts) -> None:
        self._lifecycle = lifecycle
        self._jobs = lifecycle.jobs
        self._accounts = accounts
        self.counts = counts
        self._at_work: dict[str, _Work] = {}

    def handlers(self) -> dict[str, Handler]:
        return {
            "job.open": self.open,
            "job.renew": self.renew,
            "job.list": self.list,
            "job.info": self.info,
            "job.usage": self.usage,
            "job.pause": self.pause,
            "job.resume": self.resume,
            "job.stop": self.stop,
        }

    # -- what clients ask --

    async def open(self, call: Call) -> object:
        """`job.open`: `JobInfo`. Of a name that is there: one more client of it."""
        params = call.params(_Open)
        check_name(params.name)
        check_lease(params.lease)
        _check_labels(params.labels)
        with step("job.open", params.name):
            job = self._jobs.open(params.name, params.lease, params.limits, params.labels)
            await self._lifecycle.journal.commit()
        return self._info(job)

    async def renew(self, call: Call) -> object:
        """`job.renew`: one that its lease's end has paused runs again; one that was paused by request stays so."""
        params = call.params(_Renew)
        job = self._jobs.get(params.name)
        if params.lease is not None:
            check_lease(params.lease)
        if params.id and params.id != job.record.id:
            raise Fault(
                ErrorKind.CONFLICT,
                f"job {params.name} is another one now ({job.record.id}, not {params.id})",
                hint="yours was stopped, and somebody began a new one of that name",
                job=params.name,
            )
        job.refuse_unless_open()
        job.sign_of_life(self._jobs.clock(), params.lease)
        if job.record.paused_by == "lease" and job.run():
            self._jobs.changed(job)
            await self._lifecycle.journal.commit()
        return self._info(job)

    async def list(self, call: Call) -> object:
        """`job.list`: DATA ch 0: `JobInfo` records, oldest first; REPLY `{count}`."""
        name = call.params(_List).name
        found = sorted(self._jobs.all(), key=lambda job: job.record.created_at)
        chosen = [job for job in found if name is None or job.name == name]
        for job in chosen:
            await call.send(pack_record(self._info(job)))
        return {"count": len(chosen)}

    async def info(self, call: Call) -> object:
        return self._info(self._jobs.get(call.params(_Named).name))

    async def usage(self, call: Call) -> object:
        """`job.usage`: `JobUsage`, from samples of this second."""
        job = self._jobs.get(call.params(_Named).name)
        await self._accounts.measure(self._members(job), FRESH_S)
        return self._usage(job)

    async def pause(self, call: Call) -> object:
        """`job.pause`: `JobInfo` when all of it is paused, or after `wait_s`. Idempotent: what runs again is paused again."""
        params = call.params(_Wait)
        job = self._jobs.get(params.name)
        job.refuse_unless_open()
        await self.pause_job(job, "request")
        return await self._worked(job, params.wait_s)

    async def pause_job(self, job: Job, by: PausedBy) -> None:
        """Its sandboxes are being paused when this returns, and another edge would go on with that."""
        with step("job.pause", job.name):
            job.pause(by)
            await self._begin(job, JobWork.PAUSE)

    async def resume(self, call: Call) -> object:
        """`job.resume`: `JobInfo` when all of it runs, or after `wait_s`. Idempotent."""
        params = call.params(_Wait)
        job = self._jobs.get(params.name)
        job.refuse_unless_open()
        with step("job.resume", job.name):
            job.run()
            job.sign_of_life(self._jobs.clock())
            await self._begin(job, JobWork.RESUME)
        return await self._worked(job, params.wait_s)

    async def stop(self, call: Call) -> object:
        """`job.stop`: `JobInfo` when all of it is gone, or after `wait_s`. Idempotent."""
        params = call.params(_Wait)
        job = self._jobs.get(params.name)
        await self.stop_job(job)
        return await self._worked(job, params.wait_s)

    async def stop_job(self, job: Job) -> None:
        if job.record.state in (JobState.STOPPING, JobState.STOPPED):
            return
        with step("job.stop", job.name):
            job.record.state, job.record.paused_by = JobState.STOPPING, ""
            await self._begin(job, JobWork.STOP)

    # -- what is done to all sandboxes of a job --

    async def _begin(self, job: Job, work: JobWork) -> None:
        """It is in the journal and being done when this returns. What was done before ends early, and comes first."""
        record = job.record
        record.under_way = work
        self._jobs.changed(job)
        previous = self._at_work.get(record.id)
        if previous is None or previous.kind is not work:
            self._at_work[record.id] = _Work(job, work, self._lifecycle, self._members(job), previous, self._done)
        await self._lifecycle.journal.commit()

    def _done(self, work: _Work) -> None:
        record = work.job.record
        if self._at_work.get(record.id) is work:
            del self._at_work[record.id]
            record.under_way = JobWork.NONE
            if work.kind is JobWork.STOP:
                record.state = JobState.STOPPED
            self._jobs.changed(work.job)

    async def _worked(self, job: Job, wait_s: float) -> JobInfo:
        """When nothing is under way, or after a while; it goes on, whoever waits."""
        if (work := self._at_work.get(job.record.id)) is not None:
            await asyncio.wait((work.task,), timeout=min(max(wait_s, 0.0), MAX_WAIT_S))
        return self._info(job)

    # -- time --

    async def run(self) -> None:
        """Pauses jobs whose clients are gone and forgets those that are over; runs as long as the edge."""
        tidied = self._jobs.wall()
        while True:
            await asyncio.sleep(TICK_S)
            now, wall = self._jobs.clock(), self._jobs.wall()
            for job in self._jobs.all():
                if job.lapsed(now):
                    _log.info("nobody renews a job's lease any more", job=job.name, lease_s=job.record.lease)
                    await self._kept(job, self.pause_job(job, "lease"))
            if wall - tidied >= TIDY_S:
                tidied = wall
                await self._tidy(wall)

    async def _tidy(self, wall: float) -> None:
        """A job with rollouts is not over: whoever opens it again gets what is recorded of them."""
        for job in self._jobs.all():
            if job.over(wall) and not self.counts(job.record.id)[0]:
                await self._kept(job, self.stop_job(job))
            elif job.forgettable(wall):
                self._jobs.forget(job)

    async def _kept(self, job: Job, work: Coroutine[None, None, None]) -> None:
        try:
            await work
        except Fault as fault:  # a full disk: it is done all the same
            _log.error("what time does to a job is not in the journal", job=job.name, error=fault.body.message)

    async def go_on(self) -> None:
        """After a restart: what an earlier edge had under way."""
        for job in self._jobs.all():
            if job.record.under_way is not JobWork.NONE:
                await self._kept(job, self._begin(job, job.record.under_way))

    # -- answers --

    def _members(self, job: Job) -> Sequence[Sandbox]:
        return [sandbox for sandbox in self._lifecycle.live() if sandbox.job == job.name]

    def _usage(self, job: Job) -> JobUsage:
        rollouts, steps = self.counts(job.record.id)
        return job.usage((sandbox.state.value for sandbox in self._members(job)), rollouts, steps)

    def _info(self, job: Job) -> JobInfo:
        return job.info(self._usage(job), self._jobs.clock(), self._jobs.wall())


class _Work:
    """A pause, a resume or the end of the sandboxes that a job had when it was asked for."""

    def __init__(
        self,
        job: Job,
        kind: JobWork,
        lifecycle: Lifecycle,
        members: Sequence[Sandbox],
        previous: _Work | None,
        done: Callable[[_Work], None],
    ) -> None:
        self.job = job
        self.kind = kind
        self._lifecycle = lifecycle
        self._superseded = asyncio.Event()
        self._lanes = asyncio.Semaphore(AT_ONCE)
        if previous is not None:
            previous._superseded.set()
        self.task = asyncio.get_running_loop().create_task(self._run(members, previous, done))

    async def _run(self, members: Sequence[Sandbox], previous: _Work | None, done: Callable[[_Work], None]) -> None:
        if self.kind is JobWork.STOP:
            await asyncio.gather(
                *(self._lifecycle.stop(sandbox.id, Reason.JOB_END) for sandbox in members), return_exceptions=True
            )
        else:
            if previous is not None:
                await asyncio.wait((previous.task,))
            await asyncio.gather(*(self._one(sandbox) for sandbox in members))
            if self.kind is JobWork.PAUSE:  # all stand still before anybody waits for memory
                given_back = (self._lifecycle.pauses.given_back(sandbox) for sandbox in members)
                await self._unless_superseded(*given_back, most_s=GIVEN_BACK_S)
        done(self)

    async def _one(self, sandbox: Sandbox) -> None:
        """One that is still being made follows as soon as it is there."""
        if not sandbox.settled.is_set():
            await self._unless_superseded(sandbox.settled.wait())
        async with self._lanes:
            if self._superseded.is_set() or not sandbox.lives:
                return
            pauses = self._lifecycle.pauses
            try:
                await (pauses.freeze(sandbox) if self.kind is JobWork.PAUSE else pauses.resume(sandbox))
            except Fault as fault:
                if fault.body.kind is not ErrorKind.UNAVAILABLE:  # else it ended by itself
                    _log.error("a sandbox does not follow its job", job=self.job.name, work=self.kind.value,
                               sandbox=sandbox.id, error=fault.body.message)  # fmt: skip

    async def _unless_superseded(self, *waits: Coroutine[None, None, object], most_s: float | None = None) -> None:
        """Until all of them are through, or something else is asked of the job, or for `most_s`."""
        waiting = asyncio.gather(*waits)
        superseded = asyncio.ensure_future(self._superseded.wait())
        await asyncio.wait((waiting, superseded), timeout=most_s, return_when=asyncio.FIRST_COMPLETED)
        superseded.cancel()
        waiting.cancel()
        with suppress(asyncio.CancelledError):
            await waiting


def _check_labels(labels: dict[str, str] | None) -> None:
    if labels is not None and (
        len(labels) > 64 or any(len(k) + len(v) > 1024 or "\0" in k + v for k, v in labels.items())
    ):
        raise Fault(ErrorKind.INVALID, "labels: at most 64, each of at most 1024 characters and without NUL",
                    hint="what is long belongs into a file of yours", field="labels")  # fmt: skip
