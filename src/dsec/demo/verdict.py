"""From reported test outcomes to a reward, by test ids: exit codes and printed text count for nothing."""

from __future__ import annotations

import re
from collections.abc import Collection
from enum import Enum

import msgspec

from dsec.demo.tasks import Task


class Outcomes(msgspec.Struct, frozen=True, kw_only=True):
    """What `grade` in the grading sandbox prints: outcome by test id, and how the run went."""

    outcomes: dict[str, str]
    repeated: tuple[str, ...]
    malformed: int
    status: int
    timed_out: bool
    seconds: float
    output: str


class List(str, Enum):
    """Which list of the task a test is in."""

    FAIL_TO_PASS = "fail_to_pass"
    PASS_TO_PASS = "pass_to_pass"


class FailedTest(msgspec.Struct, frozen=True):
    """outcome is pytest's word, or "missing" when the test reported nothing."""

    id: str
    list: List
    outcome: str


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """reward is None when the sample is invalid: the infrastructure failed, and nothing is known about the agent's work."""

    reward: int | None
    reason: str
    valid: bool = True
    failed: tuple[FailedTest, ...] = ()
    output: str = ""
    seconds: float = 0.0


def judge(task: Task, run: Outcomes) -> Verdict:
    """1 if every expected test is reported exactly once, as passed, and nothing else is reported; else 0, with the tests."""
    failed = tuple(
        FailedTest(name, kind, run.outcomes.get(name, "missing"))
        for kind, names in ((List.FAIL_TO_PASS, task.fail_to_pass), (List.PASS_TO_PASS, task.pass_to_pass))
        for name in names
        if run.outcomes.get(name) != "passed"
    )
    unexpected = run.outcomes.keys() - set(task.expected)
    reason = _reason(task, run, failed, unexpected)
    return Verdict(reward=int(reason == "passed"), reason=reason, failed=failed, output=run.output, seconds=run.seconds)


def _reason(task: Task, run: Outcomes, failed: Collection[FailedTest], unexpected: Collection[str]) -> str:
    """One line for a table."""
    if run.repeated or run.malformed or unexpected:
        strange = len(run.repeated) + run.malformed + len(unexpected)
        return f"conflicting results: {strange} reports that an honest run does not make"
    if run.timed_out:
        return f"tests ran into their deadline, {len(failed)} of {len(task.expected)} had not passed"
    if run.status < 0 and failed:
        return f"the test run was killed by signal {-run.status}, {len(failed)} of {len(task.expected)} had not passed"
    if not failed:
        return "passed"
    wanted = sum(test.list is List.FAIL_TO_PASS for test in failed)
    broke = len(failed) - wanted
    parts = [f"{wanted} of {len(task.fail_to_pass)} target tests fail"] if wanted else []
    parts += [f"{broke} of {len(task.pass_to_pass)} passing tests broke"] if broke else []
    return ", ".join(parts)


_PASSED = re.compile(r"^PASSED (.*)$", re.MULTILINE)
_NOT_PASSED = re.compile(r"^(?:FAILED|ERROR) (.*?)(?: - .*)?$", re.MULTILINE)


def naive_reward(task: Task, output: str) -> int:
    """What a grader believes that reads the summary printed in the agent's own sandbox: the thing not to do."""
    _, _, summary = output.rpartition("short test summary info")
    passed = set(_PASSED.findall(summary)) - set(_NOT_PASSED.findall(summary))
    return int(passed.issuperset(task.expected))
