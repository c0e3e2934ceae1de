"""What a trusting grader believes."""

from __future__ import annotations

import pytest

from dsec.demo.naive import naive_reward

from .conftest import TASK

ADD, DOUBLE = "calc/tests/test_calc.py::test_add", "calc/tests/test_calc.py::test_double"
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
