"""From what was seen to a reward: every cause has its name, and only a clean run of exactly the expected tests is a 1."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsec.protocol.grading import ExitCode, GradeReason, Score, TestSet
from dsec.protocol.specs import ExecDone, Usage
from dsec.rollout.grading.observed import Observation, Outcome, Report
from dsec.rollout.grading.verdict import MAX_SCORE_LINE, Run, of_exit_code, of_observation, of_reports, of_score, run_of

EXPECT = TestSet(("a", "b"), ("c",))
PARTIAL = TestSet(("a", "b"), ("c",), partial=True)
CLEAN = Run(status=0, timed_out=False, timeout=60)
P, F, S = Outcome.PASSED, Outcome.FAILED, Outcome.SKIPPED


def reports(**outcomes: Outcome) -> tuple[Report, ...]:
    return tuple(Report(name, outcome) for name, outcome in outcomes.items())


def run(**more: object) -> Run:
    fields: dict[str, object] = {"status": 1, "timed_out": False, "timeout": 60.0, **more}
    return Run(**fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("seen", "of", "reward", "reason", "detail"),
    [
        (reports(a=P, b=P, c=P), CLEAN, 1, GradeReason.PASSED, "all 3"),
        (reports(c=P, b=P, a=P), run(), 1, GradeReason.PASSED, "all 3"),  # others, which nobody expects, failed
        (reports(a=P, b=P), CLEAN, 0, GradeReason.TESTS_MISSING, "1 of 3"),
        ((), CLEAN, 0, GradeReason.TESTS_MISSING, "3 of 3"),
        (reports(a=F, b=P, c=P), run(), 0, GradeReason.TESTS_FAILED, "1 of 2 target tests fail"),
        (reports(a=P, b=P, c=S), CLEAN, 0, GradeReason.TESTS_FAILED, "1 of 1 passing tests broke"),
        (reports(a=P, b=F), run(), 0, GradeReason.TESTS_FAILED, "1 of them were never reported"),
        ((*reports(a=P, b=P, c=P), Report("a", P)), CLEAN, 0, GradeReason.RESULTS_CONFLICT, "more than once"),
        ((*reports(a=F, b=P, c=P), Report("a", P)), CLEAN, 0, GradeReason.RESULTS_CONFLICT, "more than once"),
        (reports(a=P, b=P, c=P, d=P), CLEAN, 0, GradeReason.RESULTS_CONFLICT, "nobody expects"),
        (reports(a=P, b=P, c=P), run(status=137), 0, GradeReason.RUN_CRASHED, "signal 9"),
        (reports(a=P, b=P, c=P), run(status=None), 0, GradeReason.RUN_CRASHED, "never started"),
        (reports(a=P, b=P, c=P), run(status=2), 0, GradeReason.RUN_CRASHED, "exit code 2"),
        (reports(a=P, b=P, c=P), run(status=0, timed_out=True), 0, GradeReason.TIMED_OUT, "60 s"),
        (reports(a=P), run(usage=Usage(oom_kills=2)), 0, GradeReason.OUT_OF_MEMORY, "2 processes were killed"),
        (reports(a=P), run(usage=Usage(pids_hits=9)), 0, GradeReason.TOO_MANY_PROCESSES, "9 were refused"),
        (reports(a=P), run(met="disk_full", usage=Usage(disk_bytes=5 << 20)), 0, GradeReason.DISK_FULL, "5 MiB"),
        (reports(a=P, b=P, c=P), run(status=0, usage=Usage(oom_kills=1)), 1, GradeReason.PASSED, "all 3"),  # it recovered
    ],
)  # fmt: skip
def test_of_observations(seen: tuple[Report, ...], of: Run, reward: float, reason: GradeReason, detail: str) -> None:
    observation = Observation(nonce="n", reports=seen, status=of.status, timed_out=of.timed_out)
    judged = of_observation(EXPECT, observation, of)
    assert (judged.reward, judged.reason) == (reward, reason) and detail in judged.detail, judged


def test_what_is_void_is_void() -> None:
    seen = Observation(nonce="n", reports=reports(a=P, b=P, c=P), status=0, void="a report was forged")
    judged = of_observation(PARTIAL, seen, CLEAN)
    assert (judged.reward, judged.reason) == (0, GradeReason.RESULTS_CONFLICT) and "forged" in judged.detail


def test_a_share_where_that_was_chosen() -> None:
    assert of_reports(PARTIAL, reports(a=P, b=F, c=P), run(), regular=True).reward == pytest.approx(2 / 3)
    assert of_reports(PARTIAL, reports(a=P), run(timed_out=True), regular=False).reward == pytest.approx(1 / 3)
    conflict = of_reports(PARTIAL, (*reports(a=P), Report("a", P)), CLEAN, regular=True)
    assert conflict.reward == 0


@given(
    st.lists(st.tuples(st.sampled_from("abcx"), st.sampled_from(Outcome)), max_size=6),
    st.booleans(),
    st.sampled_from((0, 1, 2, 137, None)),
)
def test_a_one_needs_everything(seen: list[tuple[str, Outcome]], timed_out: bool, status: int | None) -> None:
    """Whatever is reported: 1 exactly when each expected test came once, passed, nothing else came, and the run ended well."""
    told = tuple(Report(*one) for one in seen)
    of = run(status=status, timed_out=timed_out)
    judged = of_observation(EXPECT, Observation(nonce="n", reports=told, status=status, timed_out=timed_out), of)
    clean = sorted(seen) == [("a", P), ("b", P), ("c", P)] and not timed_out and status in (0, 1)
    assert judged.reward == (1 if clean else 0) and (judged.reason is GradeReason.PASSED) == clean


def done(**more: object) -> ExecDone:
    return ExecDone(exec_id="e", **{"exit_code": 0, **more})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("of", "reward", "reason"),
    [
        (done(), 1, GradeReason.PASSED),
        (done(exit_code=7), 1, GradeReason.PASSED),
        (done(exit_code=1), 0, GradeReason.EXIT_CODE),
        (done(exit_code=137, signal="KILL", timed_out="deadline"), 0, GradeReason.TIMED_OUT),
        (done(exit_code=0, timed_out="idle"), 0, GradeReason.TIMED_OUT),
        (done(exit_code=137, signal="KILL", reason="oom"), 0, GradeReason.OUT_OF_MEMORY),
        (done(exit_code=1, reason="pids"), 0, GradeReason.TOO_MANY_PROCESSES),
        (done(exit_code=1, reason="disk_full"), 0, GradeReason.DISK_FULL),
    ],
)
def test_of_exit_codes(of: ExecDone, reward: float, reason: GradeReason) -> None:
    judged = of_exit_code(ExitCode((0, 7)), run_of(of, 60, Usage()))
    assert (judged.reward, judged.reason) == (reward, reason)


@pytest.mark.parametrize(
    ("told", "reward", "reason"),
    [
        (b'{"nonce":"n","score":0.25}\n', 0.25, GradeReason.SCORE),
        (b'{"nonce":"n","score":2}', 2, GradeReason.SCORE),
        (b'{"nonce":"n","score":0}', 0, GradeReason.SCORE),
        (b'{"nonce":"n","score":2.01}', 0, GradeReason.SCORE_INVALID),
        (b'{"nonce":"n","score":-0.01}', 0, GradeReason.SCORE_INVALID),
        (b'{"nonce":"n","score":NaN}', 0, GradeReason.SCORE_INVALID),
        (b'{"nonce":"n","score":Infinity}', 0, GradeReason.SCORE_INVALID),
        (b'{"nonce":"n","score":1e999}', 0, GradeReason.SCORE_INVALID),
        (b'{"nonce":"n","score":"1"}', 0, GradeReason.SCORE_INVALID),
        (b'{"nonce":"n","score":true}', 0, GradeReason.SCORE_INVALID),
        (b'{"nonce":"n","score":1,"reward":1}', 0, GradeReason.SCORE_INVALID),
        (b"1.0", 0, GradeReason.SCORE_INVALID),
        (b"\xff\xfe", 0, GradeReason.SCORE_INVALID),
        (b'{"nonce":"m","score":1}', 0, GradeReason.RESULTS_CONFLICT),
        (b'{"nonce":"n","score":0}\n{"nonce":"n","score":1}\n', 0, GradeReason.RESULTS_CONFLICT),
        (b" " * (MAX_SCORE_LINE + 1) + b'{"nonce":"n","score":1}', 0, GradeReason.RESULTS_CONFLICT),
        (b"", 0, GradeReason.SCORE_MISSING),
        (b"\n\n", 0, GradeReason.SCORE_MISSING),
    ],
)  # fmt: skip
def test_of_scores(told: bytes, reward: float, reason: GradeReason) -> None:
    judged = of_score(Score(0, 2), told, "n", CLEAN)
    assert (judged.reward, judged.reason) == (reward, reason), judged


def test_a_score_of_a_run_that_failed_is_none() -> None:
    told = b'{"nonce":"n","score":1}'
    assert of_score(Score(), told, "n", run(status=1)).reason is GradeReason.RUN_CRASHED
    assert of_score(Score(), told, "n", run(timed_out=True)).reason is GradeReason.TIMED_OUT
    assert of_score(Score(), b"", "n", run(met="oom")).reason is GradeReason.OUT_OF_MEMORY


@given(st.binary(max_size=200), st.text(max_size=5))
def test_no_bytes_are_a_score_out_of_range(told: bytes, nonce: str) -> None:
    judged = of_score(Score(0, 1), told, nonce, CLEAN)
    assert 0 <= judged.reward <= 1
