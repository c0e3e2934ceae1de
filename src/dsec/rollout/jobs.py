"""What a job is, apart from who keeps it: its record, its lease, its limits, its account (report, 6).

A job groups the sandboxes of one run. Its clients renew a lease; when the last of them is gone for longer than that, the job
is paused, and only times to live end what is in it. Nothing here reads a clock: `now` is given, in monotonic seconds.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable
from typing import Literal, NamedTuple

import msgspec

from dsec.protocol.errors import ErrorKind, Fault
from dsec.protocol.ids import home_of
from dsec.protocol.rollouts import JobInfo, JobLimits, JobState, JobUsage, JobWork
from dsec.protocol.specs import DSecContainerRunArgs, Reason

MIN_LEASE_S, MAX_LEASE_S = 0.2, 7 * 86_400.0
EMPTY_S = 86_400.0
"""A job that is paused and has had nothing in it for so long is over: its clients are gone, and so is all they had."""
KEEP_STOPPED_S = 86_400.0
"""How long a stopped job is remembered."""
INFRASTRUCTURE = frozenset((Reason.EDGE_RESTART, Reason.NODE_LOST, Reason.EVICTED))
"""Ends that nothing inside a sandbox can cause. The death of PID 1 is not among them: a program inside may have found a way."""
PausedBy = Literal["", "lease", "request"]
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@+-]{0,99}")
_MIB = 1024 * 1024


class Totals(msgspec.Struct, omit_defaults=True):
    """Of the sandboxes that have ended, and of all since the job began. cpu_s: of ended ones."""

    cpu_s: float = 0.0
    memory_mb_s: float = 0.0
    created: int = 0
    ended: int = 0
    invalid: int = 0


class JobRecord(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A job as the journal has it. lease in seconds; changed_at: Unix time of its last change of state, or its last end."""

    id: str
    name: str
    created_at: float
    lease: float
    state: JobState = JobState.RUNNING
    limits: JobLimits = JobLimits()
    labels: dict[str, str] = {}
    epoch: int = 0
    paused_by: PausedBy = ""
    under_way: JobWork = JobWork.NONE
    changed_at: float = 0.0
    totals: Totals = msgspec.field(default_factory=Totals)


class Sample(NamedTuple):
    """What a sandbox used at a time (monotonic seconds): CPU seconds so far, bytes in memory and in swap."""

    at: float
    cpu_s: float
    memory: int
    swap: int


class Share(NamedTuple):
    """What a sandbox takes of its job's limits. Cores in thousandths, so that sums stay exact; MiB; whose it is."""

    cores: int
    memory_mb: int
    holder: str

    @classmethod
    def of(cls, args: DSecContainerRunArgs) -> Share:
        labels = ((key, value) for key, value in sorted(args.labels.items()) if key != "job")
        holder = next((f"{key}={value}" for key, value in labels), "unlabelled")
        return cls(round(args.cpu_cores_limit * 1000), args.memory_limit_mb, holder)


class Job:
    """One job and what is in it now."""

    def __init__(self, record: JobRecord, now: float) -> None:
        """A restart of who keeps it is nobody's fault: the lease begins anew."""
        self.record = record
        self.deadline = now + record.lease
        self.samples: dict[str, Sample] = {}
        self._shares: dict[str, Share] = {}
        self._cores = 0
        self._memory_mb = 0
        self._holders: Counter[str] = Counter()

    @property
    def name(self) -> str:
        return self.record.name

    @property
    def held(self) -> int:
        """Sandboxes in it that live or are being made."""
        return len(self._shares)

    def __contains__(self, sandbox: str) -> bool:
        return sandbox in self._shares

    # -- lease --

    def open(self, lease: float, limits: JobLimits, labels: dict[str, str] | None, now: float) -> None:
        """By one more client. What it does not give stays as it was; of several leases the longest counts."""
        record = self.record
        alive = record.epoch > 0 and record.state is JobState.RUNNING and now < self.deadline
        record.lease = max(lease, record.lease) if alive else lease
        record.limits = _merged(record.limits, limits)
        if labels is not None:
            record.labels = labels
        record.epoch += 1
        self.sign_of_life(now, lease)

    def sign_of_life(self, now: float, lease: float | None = None) -> None:
        """Of a client: it is there for as long as its lease from now on, and so is the job."""
        self.deadline = max(self.deadline, now + (self.record.lease if lease is None else lease))

    def lapsed(self, now: float) -> bool:
        """Nobody has renewed it in time."""
        return self.record.state is JobState.RUNNING and now >= self.deadline

    # -- states --

    def run(self) -> bool:
        """It is needed again; whether that is a change."""
        record = self.record
        changed = record.state is JobState.PAUSED
        if changed:
            record.state, record.paused_by = JobState.RUNNING, ""
        return changed

    def pause(self, by: PausedBy) -> None:
        self.record.state, self.record.paused_by = JobState.PAUSED, by

    def refuse_unless_open(self) -> None:
        """Fault conflict for a job that is over."""
        if self.record.state in (JobState.STOPPING, JobState.STOPPED):
            raise Fault(
                ErrorKind.CONFLICT,
                f"job {self.name} is {self.record.state.value}",
                hint="when it is stopped, opening it again begins a new one of that name",
                retryable=self.record.state is JobState.STOPPING,
                job=self.name,
                state=self.record.state.value,
            )

    def over(self, wall: float) -> bool:
        """Paused, empty, and not touched for a long time."""
        record = self.record
        return record.state is JobState.PAUSED and not self._shares and wall - record.changed_at > EMPTY_S

    def forgettable(self, wall: float) -> bool:
        record = self.record
        return record.state is JobState.STOPPED and not self._shares and wall - record.changed_at > KEEP_STOPPED_S

    # -- limits --

    def refuse_beyond_limits(self, share: Share) -> None:
        """Fault capacity that names the limit and who holds it."""
        limits = self.record.limits
        asked = (
            ("max_sandboxes", limits.max_sandboxes, self.held, 1),
            ("cpu_cores", limits.cpu_cores, self._cores / 1000, share.cores / 1000),
            ("memory_mb", limits.memory_mb, self._memory_mb, share.memory_mb),
        )
        for name, limit, held, more in asked:
            if limit is not None and held + more > limit + 1e-9:
                holders = dict(self._holders.most_common(5))
                named = ", ".join(f"{who}: {count}" for who, count in holders.items()) or "nobody"
                raise Fault(
                    ErrorKind.CAPACITY,
                    f"job {self.name} has {held:g} of {name}={limit:g}, and {more:g} more were asked for (held by {named})",
                    hint="stop some, wait for them to end, or open the job with a higher limit",
                    retryable=True,
                    limit=f"job {self.name} {name}",
                    value=limit,
                    holders=holders,
                )

    def enter(self, sandbox: str, share: Share) -> None:
        """Takes what it needs, whatever the limits say now."""
        self._shares[sandbox] = share
        self._cores += share.cores
        self._memory_mb += share.memory_mb
        self._holders[share.holder] += 1

    # -- account --

    def runs(self, sandbox: str, now: float) -> None:
        """From now on it costs something."""
        self.samples[sandbox] = Sample(now, 0.0, 0, 0)

    def sampled(self, sandbox: str, sample: Sample) -> None:
        """The memory of the time since the last sample counts as this one has it."""
        if (before := self.samples.get(sandbox)) is None:
            return
        memory = max(0, sample.memory)
        self.record.totals.memory_mb_s += max(0.0, sample.at - before.at) * memory / _MIB
        self.samples[sandbox] = Sample(sample.at, max(sample.cpu_s, before.cpu_s), memory, max(0, sample.swap))

    def leave(self, sandbox: str, reason: Reason, last: Sample, wall: float) -> None:
        """It is gone; last: its last word, as far as there is one. One that never ran leaves no trace."""
        share = self._shares.pop(sandbox, None)
        if share is None:
            return
        self._cores -= share.cores
        self._memory_mb -= share.memory_mb
        self._holders[share.holder] -= 1
        if not self._holders[share.holder]:
            del self._holders[share.holder]
        self.record.changed_at = wall
        if sandbox in self.samples:
            before = self.samples[sandbox]
            self.sampled(sandbox, last._replace(memory=max(before.memory, last.memory)))
            self.ended(reason, self.samples.pop(sandbox).cpu_s)

    def ended(self, reason: Reason, cpu_s: float) -> None:
        """One that ran has ended."""
        totals = self.record.totals
        totals.cpu_s += cpu_s
        totals.ended += 1
        totals.invalid += reason in INFRASTRUCTURE

    def usage(self, states: Iterable[str], rollouts: int, steps: int) -> JobUsage:
        totals, samples = self.record.totals, self.samples.values()
        return JobUsage(
            sandboxes=dict(Counter(states)),
            memory_bytes=sum(sample.memory for sample in samples),
            swap_bytes=sum(sample.swap for sample in samples),
            cpu_s=totals.cpu_s + sum(sample.cpu_s for sample in samples),
            memory_mb_s=totals.memory_mb_s,
            created=totals.created,
            ended=totals.ended,
            invalid=totals.invalid,
            rollouts=rollouts,
            steps=steps,
        )

    def info(self, usage: JobUsage, now: float, wall: float) -> JobInfo:
        record = self.record
        return JobInfo(
            id=record.id,
            name=record.name,
            state=record.state,
            lease=record.lease,
            lease_until=wall + self.deadline - now,
            limits=record.limits,
            labels=record.labels,
            created_at=record.created_at,
            epoch=record.epoch,
            paused_by=record.paused_by,
            under_way=record.under_way,
            usage=usage,
        )


def check_name(name: str) -> None:
    """Fault invalid_request for what a path or a table could not carry."""
    if _NAME.fullmatch(name) is None or home_of(name) is not None:
        raise Fault(
            ErrorKind.INVALID,
            f"job name {name[:120]!r} is not 1 to 100 of letters, digits, '.', '_', '@', '+' and '-' (first a letter or digit),"
            " or looks like an id",
        )


def check_lease(lease: float) -> None:
    """Fault invalid_request for a lease that cannot be kept."""
    if not (math.isfinite(lease) and MIN_LEASE_S <= lease <= MAX_LEASE_S):
        raise Fault(
            ErrorKind.INVALID,
            f"lease={lease:g} is not between {MIN_LEASE_S:g} and {MAX_LEASE_S:g} seconds",
            hint="a client renews it three times as often; 60 is usual",
        )


def _merged(old: JobLimits, new: JobLimits) -> JobLimits:
    given = {name: getattr(new, name) for name in JobLimits.__struct_fields__ if getattr(new, name) is not None}
    return msgspec.structs.replace(old, **given)
