"""From outcomes to rewards."""

from __future__ import annotations

import msgspec
import pytest

from dsec.demo.verdict import FailedTest, List, Outcomes, judge, naive_reward

from .conftest import TASK

ADD, DOUBLE = TASK.fail_to_pass[0], TASK.pass_to_pass[0]
GOOD = Outcomes(
    outcomes={ADD: "passed", DOUBLE: "passed"},
    repeated=(),
    malformed=0,
    status=0,
    timed_out=False,
    seconds=0.1,
    output="",
)


def changed(**fields: object) -> Outcomes:
    return msgspec.structs.replace(GOOD, **fields)


def test_every_expected_test_passed_is_a_one_whatever_the_exit_status() -> None:
    assert judge(TASK, GOOD).reward == 1
    assert judge(TASK, changed(status=1)).reward == 1


@pytest.mark.parametrize("outcome", ["failed", "skipped", "xfail", "Passed", ""])
def test_anything_but_passed_is_a_zero(outcome: str) -> None:
    verdict = judge(TASK, changed(outcomes={ADD: outcome, DOUBLE: "passed"}))
    assert verdict.reward == 0
    assert verdict.failed == (FailedTest(ADD, List.FAIL_TO_PASS, outcome),)
    assert verdict.reason == "1 of 1 target tests fail"


def test_exit_status_zero_does_not_make_up_for_a_missing_test() -> None:
    verdict = judge(TASK, changed(outcomes={ADD: "passed"}))
    assert verdict.reward == 0
    assert verdict.failed == (FailedTest(DOUBLE, List.PASS_TO_PASS, "missing"),)
    assert verdict.reason == "1 of 1 passing tests broke"


@pytest.mark.parametrize(
    "strange", [{"repeated": (ADD,)}, {"malformed": 1}, {"outcomes": {**GOOD.outcomes, "made::up": "passed"}}]
)
def test_reports_that_an_honest_run_does_not_make_are_a_zero(strange: dict[str, object]) -> None:
    verdict = judge(TASK, changed(**strange))
    assert verdict.reward == 0
    assert "conflicting results" in verdict.reason


def test_a_deadline_and_a_kill_are_said() -> None:
    assert "deadline" in judge(TASK, changed(outcomes={}, timed_out=True)).reason
    assert "signal 9" in judge(TASK, changed(outcomes={}, status=-9)).reason
    assert judge(TASK, changed(outcomes={}, status=-9)).reward == 0


SUMMARY = "=== short test summary info ===\n"


@pytest.mark.parametrize(
    ("output", "reward"),
    [
        (SUMMARY + f"PASSED {ADD}\nPASSED {DOUBLE}\n", 1),
        (SUMMARY + f"PASSED {ADD}\n", 0),
        (SUMMARY + f"PASSED {ADD}\nPASSED {DOUBLE}\nERROR {DOUBLE} - boom\n", 0),
        (f"PASSED {ADD}\nPASSED {DOUBLE}\n" + SUMMARY, 0),
        ("", 0),
    ],
)
def test_the_naive_reward_reads_the_printed_summary(output: str, reward: int) -> None:
    assert naive_reward(TASK, output) == reward
