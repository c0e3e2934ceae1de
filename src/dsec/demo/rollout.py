"""One rollout: an agent's turns in a sandbox of its own, recorded, then a verdict of the platform.

It may be run again at any time, by another process too: it opens the rollout of the same name, is given what has been recorded,
and goes on from there. Nothing here keeps notes for that.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from dsec import (
    ChangeKind,
    ChangeSet,
    DSecClient,
    DSecContainerRunArgs,
    DSecError,
    ExecResult,
    FileError,
    Job,
    PytestRunner,
    TestSet,
    TooLarge,
    Verdict,
)
from dsec import Rollout as Recorded
from dsec.demo.naive import naive_reward
from dsec.demo.records import Life, Phase, Rollout, Span, Step
from dsec.demo.scripts import EXPECTED, MARKS, MARKS_OF_SHELLS, TOOL, Call, Recording, Script, Shell, Tool, Write
from dsec.demo.tasks import Task
from dsec.demo.trees import WORKSPACE
from dsec.demo.wheels import PREFIX

CREATE_TIMEOUT_S = 120.0
TESTS_TIMEOUT_S = 120.0
_CALL_TIMEOUT_S = 120.0
TTL_S = 900.0  # ends what a killed demo leaves on a platform that lives on
_TAIL = 1500
# Where changes are looked for: the workspace, and the places where something planted would take effect.
_INCLUDE = ("workspace/**", "opt/**", "usr/**", "etc/**", "root/**", "home/**")

Clock = Callable[[], float]


class PreparedTask(msgspec.Struct, frozen=True):
    """A task whose layers stand: references of its layers, recordings, and the hidden tests on the trusted side's disk."""

    task: Task
    base: str
    workspace: str
    harness: str
    tests: str
    recordings: dict[Script, Recording]
    hidden: Path


class _Run:
    """The mutable notes of one rollout, in seconds since the burst began."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.steps: list[Step] = []
        self.spans: list[Span] = []
        self.lives: list[Life] = []
        self.changes = ChangeSet(())
        self.asked = 0
        self.ran: tuple[int, ...] = ()
        self.naive: int | None = None
        self.ms: dict[str, float] = {}

    @contextmanager
    def span(self, phase: Phase, name: str) -> Iterator[None]:
        start = self.clock()
        try:
            yield
        finally:
            self.note(phase, name, start, self.clock())

    def note(self, phase: Phase, name: str, start: float, end: float) -> None:
        self.spans.append(Span(phase, start, end))
        self.ms[name] = self.ms.get(name, 0.0) + (end - start) * 1e3

    def mark(self) -> dict[str, str]:
        """Variables by which the next command leaves its number in the sandbox, once for each time that it starts."""
        self.asked += 1
        return {"DSEC_CALL": str(self.asked - 1)}


async def run_one(
    client: DSecClient, job: Job, prepared: PreparedTask, script: Script, index: int, clock: Clock = time.monotonic
) -> Rollout:
    """Run one rollout to its record. An infrastructure failure gives a record with valid=False; it never raises for one."""
    run = _Run(clock)
    task = prepared.task
    labels = {"demo": task.id, "script": script.value, "rollout": str(index)}
    args = _args(prepared, (prepared.workspace, prepared.harness), labels)
    asked, born = clock(), None
    try:
        async with job.rollout(f"{task.id}/{script.value}/{index}", args, timeout=CREATE_TIMEOUT_S) as rollout:
            born = clock()
            run.note(Phase.SETUP, "create", asked, born)
            await _agent(rollout, prepared, script, run)
            verdict = await _grade(client, rollout, prepared, run)
            await rollout.finish(reward=verdict.reward, valid=verdict.valid)
            run.lives.append(Life(rollout.sandbox_id, "agent", born, clock()))
    except (DSecError, TimeoutError) as error:
        return _record(task, script, index, run, None, f"{type(error).__name__}: {error}")
    return _record(task, script, index, run, verdict, verdict.detail or verdict.reason.value)


def _record(task: Task, script: Script, index: int, run: _Run, verdict: Verdict | None, reason: str) -> Rollout:
    valid = verdict is not None and verdict.valid
    reward = int(verdict.reward) if verdict is not None and verdict.reward is not None else None
    naive = run.naive if valid else None
    evidence = verdict.evidence if verdict is not None else None
    dropped = evidence.dropped if evidence is not None else ()
    return Rollout(
        task=task.id,
        script=script,
        index=index,
        reward=reward,
        naive_reward=naive,
        valid=valid,
        reason=reason,
        as_expected=(reward, naive) == EXPECTED[script],
        create_ms=run.ms.get("create"),
        exec_ms=sum(step.ms for step in run.steps) if run.steps else None,
        naive_ms=run.ms.get("naive"),
        grade_create_ms=run.ms.get("grade_create"),
        grade_ms=run.ms.get("grade"),
        steps=tuple(run.steps),
        failed=evidence.failed if evidence is not None else (),
        dropped=dropped,
        graded_files=_graded(run.changes, {drop.path for drop in dropped}) if evidence is not None else (),
        output=evidence.output if evidence is not None else "",
        spans=tuple(run.spans),
        sandboxes=tuple(run.lives),
        asked=run.asked,
        ran=run.ran,
    )


def _graded(changes: ChangeSet, dropped: set[str]) -> tuple[str, ...]:
    """Files below the workspace that are not among the dropped ones."""
    top = f"{WORKSPACE}/".encode().lstrip(b"/")
    files = [change.path for change in changes.changes if change.kind in (ChangeKind.WRITE, ChangeKind.DELETE)]
    inside = [os.fsdecode(path.removeprefix(top)) for path in files if path.startswith(top)]
    return tuple(path for path in inside if path not in dropped and not path.startswith(".git/"))


def _args(prepared: PreparedTask, layers: tuple[str, ...], labels: dict[str, str]) -> DSecContainerRunArgs:
    return DSecContainerRunArgs(
        prepared.base, layers=layers, memory_limit_mb=512, disk_limit_mb=512, pids_limit=128, ttl_total=TTL_S, labels=labels
    )  # fmt: skip


# the agent's sandbox --------------------------------------------------------------------------------------------------


async def _agent(rollout: Recorded, prepared: PreparedTask, script: Script, run: _Run) -> None:
    with run.span(Phase.TOOLS, "tools"):
        for turn in prepared.recordings[script].turns:
            for call in turn.calls:
                run.steps.append(await _step(rollout, call, run))
    with suppress(TooLarge):  # the agent's doing: of changes that nobody can carry none counts
        run.changes = await rollout.changes(include=_INCLUDE)
    with run.span(Phase.TESTS, "naive"):
        try:
            run.naive = await _naive(rollout, prepared, run)
        except FileError:  # an agent can fill its disk, or put a file where the tests belong
            run.naive = 0
    with suppress(FileError):
        run.ran = tuple(int(line) for line in (await rollout.files.read(MARKS)).split())


async def _step(rollout: Recorded, call: Call, run: _Run) -> Step:
    """Make one call. A refused file is a tool result, as it would be for a model; a lost sandbox is not, and raises."""
    start = run.clock()
    match call:
        case Shell(line):
            env = {**run.mark(), "BASH_ENV": MARKS_OF_SHELLS}
            result = await rollout.run_shell(line, cwd=WORKSPACE, env=env, timeout=_CALL_TIMEOUT_S)
            return _made(line, result, start, run.clock)
        case Tool(arguments, stdin):
            argv = (TOOL, *arguments)
            result = await rollout.exec(argv, cwd=WORKSPACE, env=run.mark(), stdin=stdin, timeout=_CALL_TIMEOUT_S)
            return _made(" ".join(("dsec-agent", *arguments)), result, start, run.clock)
        case Write(path, data):
            return await _write_step(rollout, path, data, run.clock)


def _made(what: str, result: ExecResult, start: float, clock: Clock) -> Step:
    """What was recorded took as long as it took then."""
    ms = result.duration_s * 1e3 if result.replayed else (clock() - start) * 1e3
    return Step(what, result.exit_code, ms, (result.stdout + result.stderr)[-_TAIL:].decode(errors="replace"))


async def _write_step(rollout: Recorded, path: str, data: bytes, clock: Clock) -> Step:
    start, exit_code, said = clock(), 0, f"{len(data)} bytes"
    try:
        await rollout.files.write(path, data)
    except FileError as refused:
        exit_code, said = 1, str(refused)
    return Step(f"write {path}", exit_code, (clock() - start) * 1e3, said)


async def _naive(rollout: Recorded, prepared: PreparedTask, run: _Run) -> int:
    """The reward of a grader that trusts: the hidden tests run where the agent has been, and their printed summary is believed.

    The hidden tests come here only now, when the agent's turns are over and its changes are collected.
    """
    task = prepared.task
    for path in task.test_paths:
        if await rollout.files.exists(f"{WORKSPACE}/{path}"):
            await rollout.files.remove(f"{WORKSPACE}/{path}", recursive=True)
        await rollout.files.upload(prepared.hidden / path, f"{WORKSPACE}/{path}")
    marked = ("bash", "-c", 'exec "$@"', "bash", *task.test_command)
    env = {**run.mark(), "BASH_ENV": MARKS_OF_SHELLS}
    result = await rollout.exec(marked, cwd=WORKSPACE, env=env, timeout=TESTS_TIMEOUT_S, merge_stderr=True)
    return naive_reward(task, result.stdout.decode(errors="replace"))


# the verdict ----------------------------------------------------------------------------------------------------------


async def _grade(client: DSecClient, rollout: Recorded, prepared: PreparedTask, run: _Run) -> Verdict:
    """By the platform: a fresh sandbox from pristine layers, the agent's source changes, the hidden tests; nothing else of it.

    The id makes it one grade, however often it is asked for.
    """
    task = prepared.task
    began = run.clock()
    verdict = await client.grade(
        _args(prepared, (prepared.workspace,), {"demo": task.id, "role": "grader"}),
        run.changes,
        tests=prepared.tests,
        expect=TestSet(task.fail_to_pass, task.pass_to_pass),
        runner=runner_of(task),
        include=tuple(glob for top in task.source_dirs for glob in (top, f"{top}/**")),
        workdir=WORKSPACE,
        timeout=TESTS_TIMEOUT_S,
        grade_id=f"demo.{rollout.id}",
    )
    _note_grading(run, verdict, began)
    return verdict


def runner_of(task: Task) -> PytestRunner:
    """The task's own test command, under the platform's supervisor."""
    command = list(task.test_command)
    options, paths = command[3 : -len(task.test_paths)], command[-len(task.test_paths) :]
    own = [option for option in options if option not in ("-q", "-rpfE", "--color=no", "-p", "no:cacheprovider")]
    return PytestRunner(
        paths=tuple(paths), python=f"{PREFIX}/bin/python", pythonpath=(task.pythonpath,), arguments=tuple(own)
    )


def _note_grading(run: _Run, verdict: Verdict, began: float) -> None:
    """When what was done, by the platform's own clock."""
    ended, times = run.clock(), verdict.evidence.times
    created = min(began + times.seal_s + times.create_s, ended)
    applied = min(created + times.apply_s, ended)
    run.note(Phase.SETUP, "grade_create", created - times.create_s, created)
    run.note(Phase.SETUP, "apply", created, applied)
    run.note(Phase.TESTS, "grade_tests", applied, min(applied + times.run_s, ended))
    run.ms["grade"] = (ended - began) * 1e3
    run.lives += [Life(sandbox, "grader", created, ended) for sandbox in verdict.evidence.graders[-1:]]


def reruns(rollout: Rollout) -> int:
    """How often a command of it started that had started before, by the marks that commands left in the sandbox."""
    return sum(count - 1 for count in Counter(rollout.ran).values())
