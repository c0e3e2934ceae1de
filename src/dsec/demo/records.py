"""What a burst leaves behind: the JSON file, and the data of the table and the report."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from enum import Enum

import msgspec

from dsec.demo.scripts import EXPECTED, Script
from dsec.protocol.grading import Dropped, FailedTest


class Phase(str, Enum):
    """What a rollout is doing at a moment."""

    SETUP = "setup"  # a sandbox is being created, or a graded change put into it
    TOOLS = "tool calls"
    TESTS = "tests"


class Span(msgspec.Struct, frozen=True):
    """Seconds since the burst began."""

    phase: Phase
    start: float
    end: float


class Life(msgspec.Struct, frozen=True):
    """One sandbox from "created" to "gone", in seconds since the burst began. role: "agent" or "grader"."""

    sandbox: str
    role: str
    start: float
    end: float


class Step(msgspec.Struct, frozen=True):
    """One tool call as it was made: what, how it ended, how long the caller waited, the end of what it printed."""

    call: str
    exit_code: int
    ms: float
    output: str


class Rollout(msgspec.Struct, frozen=True, kw_only=True):
    """One rollout. Times in milliseconds as the caller saw them; exec_ms is all tool calls together.

    reward and naive_reward are None, and valid is False, when the infrastructure failed: such a sample is no zero. asked:
    commands that were asked for, numbered from 0; ran: the numbers that they left in the sandbox, one for each start.
    """

    task: str
    script: Script
    index: int
    reward: int | None
    naive_reward: int | None
    valid: bool
    reason: str
    as_expected: bool
    create_ms: float | None
    exec_ms: float | None
    naive_ms: float | None
    grade_create_ms: float | None
    grade_ms: float | None
    steps: tuple[Step, ...]
    failed: tuple[FailedTest, ...]
    dropped: tuple[Dropped, ...]
    graded_files: tuple[str, ...]
    output: str
    spans: tuple[Span, ...]
    sandboxes: tuple[Life, ...]
    asked: int = 0
    ran: tuple[int, ...] = ()


class Quantiles(msgspec.Struct, frozen=True):
    """Of a list of milliseconds; None when it is empty. Nearest rank."""

    count: int
    p50: float | None
    p99: float | None


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    tasks: int
    rollouts: int
    concurrency: int
    seed: int
    valid: int
    invalid: int
    unexpected: int
    wall_s: float
    peak_sandboxes: int
    sandboxes: int
    prepare_s: float
    create_ms: Quantiles
    exec_ms: Quantiles
    tool_call_ms: Quantiles
    grade_ms: Quantiles


class Kill(msgspec.Struct, frozen=True):
    """share: of all steps that were recorded then. back_s: seconds until the next one was there."""

    victim: str
    share: float
    back_s: float


class Chaos(msgspec.Struct, frozen=True, kw_only=True):
    """A burst whose trainer and edge were killed, beside an undisturbed one of the same seed.

    reruns: commands that started again in their sandbox, and commands that never did though they were asked for; lost: rollouts
    without a verdict that counts; different: rollouts whose rewards are others than undisturbed.
    """

    kills: tuple[Kill, ...]
    commands: int
    reruns: int
    lost: int
    different: tuple[str, ...]
    calm_wall_s: float
    wall_s: float

    @property
    def ok(self) -> bool:
        return not (self.reruns or self.lost or self.different)


class Burst(msgspec.Struct, frozen=True, kw_only=True):
    """The JSON file. expected: script -> [reward, naive reward]. ok: every sample valid and as its script must be."""

    ok: bool
    summary: Summary
    expected: dict[str, tuple[int, int]]
    rollouts: tuple[Rollout, ...]
    chaos: Chaos | None = None


def quantiles(values: Iterable[float | None]) -> Quantiles:
    ordered = sorted(value for value in values if value is not None)

    def rank(share: float) -> float | None:
        return round(ordered[max(0, math.ceil(share * len(ordered)) - 1)], 3) if ordered else None

    return Quantiles(len(ordered), rank(0.50), rank(0.99))


def peak(lives: Iterable[Life]) -> int:
    """The most sandboxes alive at one moment."""
    highest = now = 0
    for _, step in sorted(event for life in lives for event in ((life.start, 1), (life.end, -1))):
        now += step
        highest = max(highest, now)
    return highest


def summarise(
    rollouts: Sequence[Rollout],
    *,
    concurrency: int,
    seed: int,
    wall_s: float,
    prepare_s: float,
    chaos: Chaos | None = None,
) -> Burst:
    lives = [life for rollout in rollouts for life in rollout.sandboxes]
    invalid = sum(not rollout.valid for rollout in rollouts)
    unexpected = sum(rollout.valid and not rollout.as_expected for rollout in rollouts)
    summary = Summary(
        tasks=len({rollout.task for rollout in rollouts}),
        rollouts=len(rollouts),
        concurrency=concurrency,
        seed=seed,
        valid=len(rollouts) - invalid,
        invalid=invalid,
        unexpected=unexpected,
        wall_s=round(wall_s, 3),
        prepare_s=round(prepare_s, 3),
        peak_sandboxes=peak(lives),
        sandboxes=len(lives),
        create_ms=quantiles(rollout.create_ms for rollout in rollouts),
        exec_ms=quantiles(rollout.exec_ms for rollout in rollouts),
        tool_call_ms=quantiles(step.ms for rollout in rollouts for step in rollout.steps),
        grade_ms=quantiles(rollout.grade_ms for rollout in rollouts),
    )
    expected = {script.value: pair for script, pair in EXPECTED.items()}
    ok = not invalid and not unexpected and (chaos is None or chaos.ok)
    return Burst(ok=ok, chaos=chaos, summary=summary, expected=expected, rollouts=tuple(rollouts))
