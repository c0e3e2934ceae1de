"""Which jobs this edge has and which sandbox is in which: what creations and ends tell them, kept in the journal.

What a job is stands in `dsec.rollout.jobs`; what its clients ask of it, and time, are `edge/jobs.py`. The account of a job is
written in the same breath as the creation or end that changes it, so that none is counted twice or not at all.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from dsec.backends.launcher import LauncherUsage
from dsec.protocol.errors import ErrorKind, Fault
from dsec.protocol.ids import new_job_id
from dsec.protocol.rollouts import JobLimits, JobState
from dsec.protocol.specs import DSecContainerRunArgs, Reason
from dsec.rollout.jobs import Job, JobRecord, Sample, Share

from .journal import Journal
from .sandbox import Sandbox


class Jobs:
    """The jobs of an edge by name, stopped ones too until they are forgotten. Times are injected for tests."""

    def __init__(
        self,
        edge: str,
        journal: Journal,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._edge = edge
        self._journal = journal
        self.clock = clock
        self.wall = wall
        self._by_name = {record.name: Job(record, clock()) for record in journal.jobs()}

    def all(self) -> list[Job]:
        return list(self._by_name.values())

    def known(self, name: str) -> Job | None:
        return self._by_name.get(name)

    def get(self, name: str) -> Job:
        """By its name or its id; Fault not_found."""
        job = self._by_name.get(name) or next((job for job in self._by_name.values() if job.record.id == name), None)
        if job is None:
            raise Fault(
                ErrorKind.NOT_FOUND,
                f"there is no job {name[:120]!r}",
                hint="`dsec job ls` lists them; client.job(name) as a context manager opens one",
                job=name[:120],
            )
        return job

    def id_of(self, name: str) -> str:
        """Of a job by its name. What is none is taken for an id: logs outlive the jobs that they belong to."""
        job = self._by_name.get(name)
        return name if job is None else job.record.id

    def open(self, name: str, lease: float, limits: JobLimits, labels: dict[str, str] | None) -> Job:
        """The job of that name, or a new one where there is none or it is stopped; not yet in the journal."""
        job = self._by_name.get(name)
        if job is not None and job.record.state is JobState.STOPPED:
            self.forget(job)
            job = None
        if job is None:
            record = JobRecord(id=new_job_id(self._edge), name=name, created_at=self.wall(), lease=lease)
            job = self._by_name[name] = Job(record, self.clock())
        job.refuse_unless_open()
        job.open(lease, limits, labels, self.clock())
        job.run()
        self.changed(job)
        return job

    def changed(self, job: Job) -> None:
        """To the journal; `Journal.commit` waits until it is there."""
        job.record.changed_at = self.wall()
        self._journal.job(job.record)

    def spent(self, job: Job) -> None:
        self._journal.spent(job.record)

    def forget(self, job: Job) -> None:
        del self._by_name[job.name]
        self._journal.forget_job(job.record.id)

    # -- what creations and ends tell --

    def admit(self, name: str, args: DSecContainerRunArgs) -> str:
        """Fault not_found, conflict or capacity unless the job (by name or id) takes one more such sandbox now. Its name."""
        if not name:
            return ""
        job = self.get(name)
        job.refuse_unless_open()
        job.refuse_beyond_limits(Share.of(args))
        return job.name

    def enter(self, sandbox: Sandbox) -> None:
        """Directly after `admit`, so that no other one comes in between. Who creates in a job needs it."""
        if sandbox.job:
            job = self._by_name[sandbox.job]
            job.enter(sandbox.id, Share.of(sandbox.args))
            job.sign_of_life(self.clock())
            if job.run():
                self.changed(job)

    def runs(self, sandbox: Sandbox) -> None:
        """It was just made."""
        if sandbox.job:
            job = self._by_name[sandbox.job]
            job.runs(sandbox.id, self.clock())
            job.record.totals.created += 1
            self.spent(job)

    def leave(self, sandbox: Sandbox, usage: LauncherUsage) -> None:
        """It is gone, for the reason that it has."""
        if sandbox.job and (job := self._by_name.get(sandbox.job)) is not None:
            last = Sample(self.clock(), max(0, usage.cpu_ns) / 1e9, usage.memory, 0)
            job.leave(sandbox.id, sandbox.reason or Reason.USER, last, self.wall())
            self.spent(job)

    def adopt(self, sandbox: Sandbox) -> None:
        """One of before a restart of the edge."""
        if sandbox.job and (job := self._by_name.get(sandbox.job)) is not None:
            job.enter(sandbox.id, Share.of(sandbox.args))
            job.runs(sandbox.id, self.clock())

    def lost(self, name: str, reason: Reason) -> None:
        """One of before a restart that is not there any more."""
        if name and (job := self._by_name.get(name)) is not None:
            job.ended(reason, 0.0)
            self.spent(job)
