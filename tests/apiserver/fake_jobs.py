"""The jobs of the fake edge: the link's `job.*` over the service's own rules, with nothing paused or resumed in earnest."""

from __future__ import annotations

import time

import msgspec

from dsec.protocol.errors import ErrorKind, Fault
from dsec.protocol.ids import new_job_id
from dsec.protocol.link import Call, pack_record
from dsec.protocol.rollouts import JobInfo, JobLimits, JobState
from dsec.rollout.jobs import Job, JobRecord, Share


class Params(msgspec.Struct):
    """Of any of them."""

    name: str | None = None
    lease: float | None = None
    limits: JobLimits = JobLimits()
    labels: dict[str, str] | None = None
    id: str = ""


class FakeJobs:
    name: str

    def __init__(self) -> None:
        self.jobs: dict[str, Job] = {}

    def _of(self, call: Call) -> tuple[Params, Job]:
        params = call.params(Params)
        job = self.jobs.get(params.name or "")
        if job is None:
            raise Fault(ErrorKind.NOT_FOUND, f"no job {params.name}")
        return params, job

    def _entered(self, name: str, sandbox: str, share: Share) -> None:
        job = self.jobs[name]
        job.refuse_unless_open()
        job.refuse_beyond_limits(share)
        job.enter(sandbox, share)

    async def job_open(self, call: Call) -> object:
        params = call.params(Params)
        assert params.name is not None and params.lease is not None
        job = self.jobs.get(params.name)
        if job is None or job.record.state is JobState.STOPPED:
            record = JobRecord(id=new_job_id(self.name), name=params.name, created_at=time.time(), lease=params.lease)
            job = self.jobs[params.name] = Job(record, time.monotonic())
        job.open(params.lease, params.limits, params.labels, time.monotonic())
        job.run()
        return _info(job)

    async def job_renew(self, call: Call) -> object:
        params, job = self._of(call)
        job.refuse_unless_open()
        if params.id and params.id != job.record.id:
            raise Fault(ErrorKind.CONFLICT, "another one")
        job.sign_of_life(time.monotonic(), params.lease)
        return _info(job)

    async def job_list(self, call: Call) -> object:
        wanted = call.params(Params).name
        found = [job for name, job in self.jobs.items() if wanted in (None, name)]
        for job in found:
            await call.send(pack_record(_info(job)))
        return {"count": len(found)}

    async def job_info(self, call: Call) -> object:
        return _info(self._of(call)[1])

    async def job_usage(self, call: Call) -> object:
        return self._of(call)[1].usage([], 0, 0)

    async def job_pause(self, call: Call) -> object:
        _, job = self._of(call)
        job.refuse_unless_open()
        job.pause("request")
        return _info(job)

    async def job_resume(self, call: Call) -> object:
        _, job = self._of(call)
        job.refuse_unless_open()
        job.run()
        return _info(job)

    async def job_stop(self, call: Call) -> object:
        _, job = self._of(call)
        job.record.state = JobState.STOPPED
        return _info(job)


def _info(job: Job) -> JobInfo:
    return job.info(job.usage([], 0, 0), time.monotonic(), time.time())
