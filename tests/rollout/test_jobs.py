"""What a job is: its lease, its limits and its account, at times that the test gives."""

from __future__ import annotations

import math

import pytest

from dsec.protocol.errors import ErrorKind, Fault
from dsec.protocol.rollouts import JobLimits, JobState
from dsec.protocol.specs import DSecContainerRunArgs, Reason
from dsec.rollout.jobs import (
    EMPTY_S,
    KEEP_STOPPED_S,
    Job,
    JobRecord,
    Sample,
    Share,
    check_lease,
    check_name,
)


def job(now: float = 0.0, lease: float = 60.0, **limits: float) -> Job:
    made = Job(JobRecord(id="jb-t-000000000000", name="j", created_at=0.0, lease=lease), now)
    made.open(lease, JobLimits(**limits), None, now)  # type: ignore[arg-type]
    return made


def share(cores: float = 1, memory_mb: int = 100, **labels: str) -> Share:
    return Share.of(DSecContainerRunArgs("x", cpu_cores_limit=cores, memory_limit_mb=memory_mb, labels=labels))


def test_it_lapses_when_nobody_renews_it() -> None:
    one = job(lease=60)
    assert not one.lapsed(59.9)
    one.sign_of_life(50)
    assert not one.lapsed(109.9) and one.lapsed(110)


def test_of_several_clients_the_last_one_counts() -> None:
    one = job(lease=60)
    one.open(5, JobLimits(), None, 10.0)  # another client, of less patience
    one.sign_of_life(20, 5)
    assert not one.lapsed(59.9), "the first one has until then"
    assert one.lapsed(60) and one.record.epoch == 2 and one.record.lease == 60


def test_a_lapsed_one_takes_the_lease_of_who_opens_it_again() -> None:
    one = job(lease=60)
    one.pause("lease")
    one.open(5, JobLimits(), None, 100.0)
    assert one.run() and one.record.lease == 5 and one.record.paused_by == ""
    assert one.lapsed(105) and not one.lapsed(104.9)


def test_only_a_running_one_lapses() -> None:
    one = job(lease=60)
    one.pause("request")
    assert not one.lapsed(1000)
    assert one.run() and not one.run()
    assert one.lapsed(1000)


def test_opening_again_changes_only_what_is_given() -> None:
    one = job(max_sandboxes=3, memory_mb=500)
    one.record.labels = {"team": "a"}
    one.open(60, JobLimits(max_sandboxes=7), None, 0.0)
    assert one.record.limits == JobLimits(max_sandboxes=7, memory_mb=500) and one.record.labels == {"team": "a"}
    one.open(60, JobLimits(), {"team": "b"}, 0.0)
    assert one.record.labels == {"team": "b"}


@pytest.mark.parametrize(
    "limits, named",
    [({"max_sandboxes": 10}, "max_sandboxes"), ({"cpu_cores": 1}, "cpu_cores"), ({"memory_mb": 1000}, "memory_mb")],
)
def test_each_limit_is_reached_exactly_and_named(limits: dict[str, float], named: str) -> None:
    one = job(**limits)
    for number in range(10):
        one.refuse_beyond_limits(share(0.1))
        one.enter(str(number), share(0.1, team="a" if number else "b"))
    with pytest.raises(Fault) as caught:
        one.refuse_beyond_limits(share(0.1))
    body = caught.value.body
    assert body.kind is ErrorKind.CAPACITY and body.retryable
    assert body.details["limit"] == f"job j {named}" and body.details["value"] == limits[named]
    assert body.details["holders"] == {"team=a": 9, "team=b": 1}
    one.leave("3", Reason.USER, Sample(0, 0, 0, 0), 0.0)
    one.refuse_beyond_limits(share(0.1))


def test_many_small_cores_come_and_go_without_a_rest() -> None:
    one = job(cpu_cores=0.3)
    for number in range(1000):
        one.refuse_beyond_limits(share(0.1))
        one.enter(str(number), share(0.1))
        if number >= 2:
            one.leave(str(number - 2), Reason.USER, Sample(0, 0, 0, 0), 0.0)
    assert one.held == 2


def test_the_account_adds_up() -> None:
    one, mib = job(), 1 << 20
    for name in ("a", "b"):
        one.enter(name, share())
        one.runs(name, 100.0)
    one.sampled("a", Sample(105.0, 1.0, 10 * mib, 0))
    one.sampled("a", Sample(110.0, 2.0, 20 * mib, 5 * mib))
    assert one.record.totals.memory_mb_s == 5 * 10 + 5 * 20
    usage = one.usage(["running", "paused"], 3, 40)
    assert (usage.cpu_s, usage.memory_bytes, usage.swap_bytes) == (2.0, 20 * mib, 5 * mib)
    assert usage.sandboxes == {"running": 1, "paused": 1} and (usage.rollouts, usage.steps) == (3, 40)
    one.leave("a", Reason.JOB_END, Sample(111.0, 2.5, 0, 0), 0.0)
    one.leave("b", Reason.NODE_LOST, Sample(111.0, 0.0, 0, 0), 0.0)
    totals = one.record.totals
    assert (totals.cpu_s, totals.ended, totals.invalid) == (2.5, 2, 1)
    assert totals.memory_mb_s == 150 + 20, "until its end it had what it had last"
    assert one.usage([], 0, 0).cpu_s == 2.5


def test_the_counter_of_one_that_is_gone_never_goes_back() -> None:
    one = job()
    one.enter("a", share())
    one.runs("a", 0.0)
    one.sampled("a", Sample(1.0, 7.0, 0, 0))
    one.leave("a", Reason.OOM, Sample(2.0, 0.0, -1, -1), 0.0)  # nothing was left to ask
    assert one.record.totals.cpu_s == 7.0 and one.record.totals.invalid == 0


def test_what_never_ran_leaves_no_trace_in_the_account() -> None:
    one = job()
    one.enter("a", share())
    one.leave("a", Reason.CREATE_FAILED, Sample(1.0, 1.0, 1, 1), 0.0)
    assert one.record.totals.ended == 0 and one.held == 0
    one.leave("a", Reason.CREATE_FAILED, Sample(1.0, 1.0, 1, 1), 0.0)


def test_what_is_over_is_forgotten_in_its_time() -> None:
    one = job()
    one.pause("lease")
    one.enter("a", share())
    assert not one.over(EMPTY_S + 1), "something is in it"
    one.leave("a", Reason.TTL_IDLE, Sample(0, 0, 0, 0), 0.0)
    assert one.over(EMPTY_S + 1) and not one.over(EMPTY_S - 1)
    one.record.state = JobState.STOPPED
    assert one.forgettable(KEEP_STOPPED_S + 1) and not one.forgettable(KEEP_STOPPED_S - 1)


@pytest.mark.parametrize("name", ["", "a b", "a/b", "-a", ".a", "a" * 101, "ä", "a\n", "a\0", "jb-e1-0123456789ab"])
def test_names_that_are_none(name: str) -> None:
    with pytest.raises(Fault, match="job name"):
        check_name(name)


@pytest.mark.parametrize("lease", [0, -1, math.nan, math.inf, 1e9])
def test_leases_that_are_none(lease: float) -> None:
    with pytest.raises(Fault, match="lease="):
        check_lease(lease)
