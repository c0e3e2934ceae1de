"""What is graded how, and what came of it, as it crosses a process boundary (report, 6).

A grade is a pure function of the agent's changes, the environment's layers, the tests and the expectation. Its verdict is
valid (a reward that means what it says) or not (the infrastructure failed, and nothing is known): no fault of ours is a zero.
"""

from __future__ import annotations

from enum import Enum
from typing import ClassVar

import msgspec

from .specs import ChangeKind, ChangeSet, DSecContainerRunArgs, ExecLimits


class TestSet(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The ids of the tests that must pass, each reported exactly once. The two lists differ in evidence only.

    partial: the reward is the share of them that passed, instead of 1 for all and 0 for less. Empty with a runner that knows no
    tests (an exit code, a score).
    """

    __test__: ClassVar[bool] = False  # pytest: no class of tests

    fail_to_pass: tuple[str, ...] = ()
    pass_to_pass: tuple[str, ...] = ()
    partial: bool = False

    @property
    def ids(self) -> tuple[str, ...]:
        return self.fail_to_pass + self.pass_to_pass


# -- runners -----------------------------------------------------------------------------------------------------------


class PytestRunner(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="pytest", forbid_unknown_fields=True
):
    """pytest under a supervisor of the platform, which the tests cannot reach; they run as a user without privilege.

    paths: what pytest collects, relative to the workdir; left out, the files that the expected ids name. python: the interpreter
    that has pytest, by name or path. pythonpath: directories for sys.path, relative to the workdir. arguments: more for pytest.
    limits: of each process of the tests. allow: names of things that the task's own source must do although they look like an
    attack on the tests (docs/security.md).
    """

    paths: tuple[str, ...] = ()
    python: str = "python3"
    pythonpath: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()
    env: dict[str, str] = {}
    limits: ExecLimits | None = None
    allow: tuple[str, ...] = ()


class ExitCode(msgspec.Struct, frozen=True, tag_field="by", tag="exit_code", forbid_unknown_fields=True):
    """The command has passed when its exit code is one of these. What ends early with one of them has passed, too."""

    passed: tuple[int, ...] = (0,)


class JUnit(msgspec.Struct, frozen=True, tag_field="by", tag="junit", forbid_unknown_fields=True):
    """The command writes a JUnit XML report; a test's id is `classname::name`, or its name where it has no classname.

    path: of the report, relative to the workdir or absolute; what lies there before the command starts is removed. Whoever
    can write the file can say anything: run the tests so that the code under test cannot.
    """

    path: str


class Score(msgspec.Struct, frozen=True, tag_field="by", tag="score", forbid_unknown_fields=True):
    """The command says a number, which is the reward: one line `{"nonce": ..., "score": ...}` on descriptor 3.

    The nonce is on its stdin, as JSON: read it before anything of the code under test runs, and give neither it nor the
    descriptor away. What is not finite or not in [low, high] is 0 with a reason.
    """

    low: float = 0.0
    high: float = 1.0


class CommandRunner(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="command", forbid_unknown_fields=True
):
    """Any command, and by what it is judged. user: as whom it runs; cwd: relative to the workdir or absolute."""

    argv: tuple[str, ...]
    verdict: ExitCode | JUnit | Score = ExitCode()
    cwd: str = ""
    env: dict[str, str] = {}
    user: str = "65534:65534"
    limits: ExecLimits | None = None


Runner = PytestRunner | CommandRunner


# -- the request -------------------------------------------------------------------------------------------------------


class GradeSource(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Whose changes: of a sandbox, which is sealed first, or those given. Exactly one of both."""

    sandbox: str = ""
    incarnation: int | None = None
    changes: ChangeSet | None = None


class GradeSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A grade. args: the environment, as the agent had it but for what only the agent needed; its network rules do not count.

    tests: a layer that only the grading sandbox mounts, on top of the others. include: globs below workdir of the changes that
    count; exclude: of those that do not, whatever include says. workdir: absolute, as the kernel has it (no link on the way);
    None: that of args, or /workspace. timeout: seconds for the tests.
    """

    args: DSecContainerRunArgs
    source: GradeSource
    tests: str
    expect: TestSet = TestSet()
    runner: PytestRunner | CommandRunner = PytestRunner()
    include: tuple[str, ...] = ("**",)
    exclude: tuple[str, ...] = ()
    workdir: str | None = None
    timeout: float = 600.0


def grade_params(spec: GradeSpec) -> dict[str, object]:
    """What a grade asks as a step of a rollout: all but whose changes, which are the rollout's."""
    asked = msgspec.to_builtins(spec)
    return {name: value for name, value in asked.items() if name != "source"}


# -- the verdict -------------------------------------------------------------------------------------------------------


class GradeReason(str, Enum):
    """Why a verdict is what it is: a closed set. The last four are those of invalid verdicts."""

    PASSED = "passed"
    TESTS_FAILED = "tests_failed"
    TESTS_MISSING = "tests_missing"
    RESULTS_CONFLICT = "results_conflict"
    RUN_CRASHED = "run_crashed"
    RUNNER_SILENCED = "runner_silenced"
    TIMED_OUT = "timed_out"
    OUT_OF_MEMORY = "out_of_memory"
    TOO_MANY_PROCESSES = "too_many_processes"
    DISK_FULL = "disk_full"
    EXIT_CODE = "exit_code"
    REPORT_MISSING = "report_missing"
    REPORT_UNREADABLE = "report_unreadable"
    SCORE = "score"
    SCORE_MISSING = "score_missing"
    SCORE_INVALID = "score_invalid"
    CHANGES_TOO_LARGE = "changes_too_large"
    CHANGES_UNFIT = "changes_unfit"
    SANDBOX_LOST = "sandbox_lost"
    GRADING_LOST = "grading_lost"
    EDGE_LOST = "edge_lost"
    HARNESS_BROKEN = "harness_broken"

    @property
    def is_invalid(self) -> bool:
        """Whether a verdict for this reason says nothing about the agent's work."""
        return self in _INVALID


_INVALID = frozenset(
    (GradeReason.SANDBOX_LOST, GradeReason.GRADING_LOST, GradeReason.EDGE_LOST, GradeReason.HARNESS_BROKEN)
)


class DropReason(str, Enum):
    """Why a change does not count."""

    NOT_INCLUDED = "not in the allow-list"
    OUTSIDE = "outside the workdir"
    TESTS = "belongs to the tests"
    TEST_CONFIG = "changes how tests run"
    STARTUP = "runs whenever Python starts"
    SHADOWS = "shadows a module that others import"
    INSTALLED = "among installed packages"
    ON_PATH = "a program that others may call"
    SHELL = "runs whenever a shell starts"
    LOADER = "changes what programs load"
    GIT = "inside of git"
    BYTECODE = "bytecode or a cache"
    COMPILED = "compiled code"
    LINK = "a symbolic link"
    SPECIAL = "no regular file"
    RESERVED = "a name that means something else in a difference"
    TOO_LARGE = "too large to carry"
    TOO_DEEP = "deeper than programs can name"

    @property
    def suspicious(self) -> bool:
        """Whether a reviewer should look: an honest change of the source needs none of these."""
        return self not in _HARMLESS


_HARMLESS = frozenset(
    (
        DropReason.NOT_INCLUDED,
        DropReason.OUTSIDE,
        DropReason.GIT,
        DropReason.BYTECODE,
        DropReason.LINK,
        DropReason.TOO_LARGE,
    )
)


class Dropped(msgspec.Struct, frozen=True):
    """A change that does not count. path: below the workdir, or absolute; what is no UTF-8 or no printable text is escaped."""

    path: str
    change: ChangeKind
    why: DropReason
    suspicious: bool


class Signal(msgspec.Struct, frozen=True):
    """Something that an honest run does not do, or that a reviewer should see. name: lower case with underscores."""

    name: str
    detail: str = ""


class FailedTest(msgspec.Struct, frozen=True):
    """An expected test that did not pass. outcome: the runner's word, "missing" when it was not reported."""

    id: str
    list: str
    outcome: str


class GradeTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds by the clock of the service: of the last attempt sealing, creating, applying, running; and of all."""

    seal_s: float = 0.0
    create_s: float = 0.0
    apply_s: float = 0.0
    run_s: float = 0.0
    total_s: float = 0.0


class Evidence(msgspec.Struct, frozen=True, kw_only=True):
    """What a verdict rests on. Long lists are cut to their first 1,000 (suspicious ones first); *_total have their true lengths.

    expected, passed: numbers of tests. status: exit code of the run, 128 + n for signal n. output: the end of what it printed,
    output_bytes all of it. kept, kept_bytes: changes that counted, and their contents. changes_digest: blake3 of them;
    tests_digest: of the tests layer. sandbox: the agent's, "" for given changes; graders: the grading sandboxes, the last one
    gave the verdict; lost: why earlier ones did not.
    """

    expected: int = 0
    passed: int = 0
    failed: tuple[FailedTest, ...] = ()
    failed_total: int = 0
    dropped: tuple[Dropped, ...] = ()
    dropped_total: int = 0
    signals: tuple[Signal, ...] = ()
    status: int | None = None
    output: str = ""
    output_bytes: int = 0
    kept: int = 0
    kept_bytes: int = 0
    changes_digest: str = ""
    tests_digest: str = ""
    sandbox: str = ""
    graders: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()
    times: GradeTimes = GradeTimes()


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """A reward that means what it says, or none. valid False: the infrastructure failed; reward is None then, never 0.

    detail: `reason` in words, with its numbers.
    """

    reward: float | None
    valid: bool
    reason: GradeReason
    detail: str = ""
    evidence: Evidence = Evidence()


class GradeReply(msgspec.Struct, frozen=True, kw_only=True):
    """HTTP answer: done is None when `wait_s` ran out first (ask again with the same grade_id)."""

    done: Verdict | None
