"""From what was seen to a reward: pure, and the only place where a reward is made.

Everything that code under test can cause is a valid zero with its reason. What only the infrastructure can cause is no reward at
all, and is not decided here but where it is met (`service.py`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable

import msgspec

from dsec.protocol.grading import ExitCode, FailedTest, GradeReason, Score, Signal, TestSet
from dsec.protocol.specs import ExecDone, Usage

from .observed import Observation, Outcome, Report

MAX_LISTED = 1_000
MAX_SCORE_LINE = 4096
_MIB = 1024 * 1024


class Judged(msgspec.Struct, frozen=True, kw_only=True):
    """A reward with its reason; passed and failed count expected tests."""

    reward: float
    reason: GradeReason
    detail: str
    passed: int = 0
    failed: tuple[FailedTest, ...] = ()
    failed_total: int = 0


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of the run beside its results. status: exit code, 128 + n for signal n, None: never started.

    usage: of the whole grading sandbox, after it. timeout: seconds that were allowed.
    """

    status: int | None
    timed_out: bool
    timeout: float
    usage: Usage = Usage()
    met: str = ""
    """A limit that the command itself met: "oom", "pids", "disk_full"."""


def run_of(done: ExecDone, timeout: float, usage: Usage) -> Run:
    """Of a command that ran by itself."""
    timed_out = done.timed_out is not None
    return Run(status=done.exit_code, timed_out=timed_out, timeout=timeout, usage=usage, met=done.reason or "")


# -- tests -------------------------------------------------------------------------------------------------------------


def of_observation(expect: TestSet, seen: Observation, run: Run) -> Judged:
    """Of what the supervisor of pytest tells."""
    unexpected = sum(report.id not in expect.ids for report in seen.reports) if not seen.void else 0
    if seen.void:
        return _zero(expect, (), GradeReason.RESULTS_CONFLICT, f"the results cannot be believed: {seen.void}")
    if unexpected:
        detail = f"{unexpected} tests were reported that nobody expects"
        return _zero(expect, (), GradeReason.RESULTS_CONFLICT, detail)
    # 0: all passed; 1: some failed, which need not be expected ones. Everything else is no regular end.
    return of_reports(expect, seen.reports, run, regular=seen.status in (0, 1))


def of_reports(expect: TestSet, reports: Iterable[Report], run: Run, *, regular: bool) -> Judged:
    """1 when exactly the expected tests are reported, once each, as passed, by a run that ended regularly."""
    ids = frozenset(expect.ids)
    counted = [report for report in reports if report.id in ids]
    twice = [name for name, times in Counter(report.id for report in counted).items() if times > 1]
    if twice:
        detail = f"{len(twice)} tests were reported more than once, {twice[0]} first"
        return _zero(expect, (), GradeReason.RESULTS_CONFLICT, detail)
    outcomes = {report.id: report.outcome for report in counted}
    failed = tuple(
        FailedTest(name, of, outcomes[name].value if name in outcomes else "missing")
        for of, names in (("fail_to_pass", expect.fail_to_pass), ("pass_to_pass", expect.pass_to_pass))
        for name in names
        if outcomes.get(name) is not Outcome.PASSED
    )
    reason, detail = _reason(expect, failed, run, regular)
    passed = len(expect.ids) - len(failed)
    reward = 1.0 if reason is GradeReason.PASSED else passed / len(expect.ids) if expect.partial and expect.ids else 0.0
    return Judged(
        reward=reward, reason=reason, detail=detail, passed=passed, failed=failed[:MAX_LISTED], failed_total=len(failed)
    )


def _reason(expect: TestSet, failed: tuple[FailedTest, ...], run: Run, regular: bool) -> tuple[GradeReason, str]:
    left = f"{len(failed)} of {len(expect.ids)} expected tests had not passed"
    if run.timed_out:
        return GradeReason.TIMED_OUT, f"the tests ran into their deadline of {run.timeout:g} s; {left}"
    if regular and not failed:
        return GradeReason.PASSED, f"all {len(expect.ids)} expected tests passed"
    if (limit := _limit(run)) is not None:
        return limit[0], f"{limit[1]}; {left}"
    if not regular:
        return GradeReason.RUN_CRASHED, f"the test run {_ended(run.status)}; {left}"
    missing = sum(test.outcome == "missing" for test in failed)
    if missing == len(failed):
        return GradeReason.TESTS_MISSING, f"{missing} of {len(expect.ids)} expected tests were never reported"
    parts = []
    for of, names, text in (
        ("fail_to_pass", expect.fail_to_pass, "{} of {} target tests fail"),
        ("pass_to_pass", expect.pass_to_pass, "{} of {} passing tests broke"),
    ):
        if count := sum(test.list == of for test in failed):
            parts.append(text.format(count, len(names)))
    if missing:
        parts.append(f"{missing} of them were never reported")
    return GradeReason.TESTS_FAILED, ", ".join(parts)


def _zero(expect: TestSet, failed: tuple[FailedTest, ...], reason: GradeReason, detail: str) -> Judged:
    return Judged(reward=0.0, reason=reason, detail=detail, failed=failed, failed_total=len(failed))


def _limit(run: Run) -> tuple[GradeReason, str] | None:
    """Which limit of the grading sandbox was met, by the kernel's counters of it."""
    if run.met == "oom" or run.usage.oom_kills > 0:
        return GradeReason.OUT_OF_MEMORY, f"out of memory, {max(run.usage.oom_kills, 1)} processes were killed"
    if run.met == "pids" or run.usage.pids_hits > 0:
        return GradeReason.TOO_MANY_PROCESSES, f"too many processes, {max(run.usage.pids_hits, 1)} were refused"
    if run.met == "disk_full":
        return GradeReason.DISK_FULL, f"the disk is full, {run.usage.disk_bytes / _MIB:.0f} MiB used"
    return None


def _ended(status: int | None) -> str:
    if status is None:
        return "was never started"
    return f"was killed by signal {status - 128}" if status > 128 else f"ended with exit code {status}"


# -- exit code and score -----------------------------------------------------------------------------------------------


def of_exit_code(wanted: ExitCode, run: Run) -> Judged:
    none = TestSet()
    if run.timed_out:
        return _zero(none, (), GradeReason.TIMED_OUT, f"the command ran into its deadline of {run.timeout:g} s")
    if run.status in wanted.passed:
        return Judged(reward=1.0, reason=GradeReason.PASSED, detail=f"the command ended with exit code {run.status}")
    if (limit := _limit(run)) is not None:
        return _zero(none, (), *limit)
    return _zero(none, (), GradeReason.EXIT_CODE, f"the command {_ended(run.status)}")


class _ScoreLine(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    nonce: str
    score: float


def of_score(wanted: Score, output: bytes, nonce: str, run: Run) -> Judged:
    """output: what came on the descriptor. Exactly one line, with the nonce, and a number in the range."""
    none = TestSet()
    if run.timed_out:
        return _zero(none, (), GradeReason.TIMED_OUT, f"the command ran into its deadline of {run.timeout:g} s")
    lines = [line for line in output[: 2 * MAX_SCORE_LINE].splitlines() if line.strip()]
    if not lines:
        if (limit := _limit(run)) is not None:
            return _zero(none, (), *limit)
        return _zero(none, (), GradeReason.SCORE_MISSING, f"no score was told; the command {_ended(run.status)}")
    if len(lines) > 1 or len(output) > MAX_SCORE_LINE:
        return _zero(none, (), GradeReason.RESULTS_CONFLICT, "more was told than one score")
    try:
        told = msgspec.json.decode(lines[0], type=_ScoreLine)
    except msgspec.DecodeError as error:
        return _zero(none, (), GradeReason.SCORE_INVALID, f"the score cannot be read: {error}")
    if told.nonce != nonce:
        return _zero(none, (), GradeReason.RESULTS_CONFLICT, "a score was told without the nonce")
    if not math.isfinite(told.score) or not wanted.low <= told.score <= wanted.high:
        detail = f"the score {told.score:g} is not between {wanted.low:g} and {wanted.high:g}"
        return _zero(none, (), GradeReason.SCORE_INVALID, detail)
    if run.status != 0:
        return _zero(none, (), GradeReason.RUN_CRASHED, f"a score was told, but the command {_ended(run.status)}")
    return Judged(reward=told.score, reason=GradeReason.SCORE, detail=f"the score is {told.score:g}")


def signals_of(seen: Observation) -> tuple[Signal, ...]:
    """What the supervisor noticed, and processes that outlived the tests."""
    left = (Signal("processes_left", f"{seen.left} outlived the tests"),) if seen.left else ()
    return (*seen.signals, *left)
