"""One rollout: an agent's turns in a sandbox of its own, then a verdict from a fresh one."""

from __future__ import annotations

import os
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import msgspec

from dsec import DSecContainerRunArgs, DSecError, FileError, TooLarge
from dsec.demo.changes import INCLUDE, Graded, shown, sift, source_globs, why_not
from dsec.demo.errors import DemoError
from dsec.demo.platform import Client, Result, Sandbox
from dsec.demo.records import Life, Phase, Rollout, Span, Step
from dsec.demo.scripts import EXPECTED, TOOL, Call, Recording, Script, Shell, Tool, Write
from dsec.demo.tasks import Task
from dsec.demo.trees import WORKSPACE
from dsec.demo.verdict import Outcomes, Verdict, judge, naive_reward
from dsec.protocol.specs import ChangeKind, FileKind

CREATE_TIMEOUT_S = 120.0
TESTS_TIMEOUT_S = 120.0
_CALL_TIMEOUT_S = 120.0
TTL_S = 900.0  # ends what a killed demo leaves on a platform that lives on
_TAIL = 1500
_DEPTH = 64

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


class GraderFailed(DemoError):
    """The grading program itself failed: nothing is known about the agent's work."""


class _Run:
    """The mutable notes of one rollout, in seconds since the burst began."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.steps: list[Step] = []
        self.spans: list[Span] = []
        self.lives: list[Life] = []
        self.graded = Graded((), ())
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

    @asynccontextmanager
    async def sandbox(self, client: Client, args: DSecContainerRunArgs, role: str, name: str) -> AsyncIterator[Sandbox]:
        """A sandbox whose creation and life are noted."""
        asked = self.clock()
        born: float | None = None
        try:
            async with client.run_container(args, timeout=CREATE_TIMEOUT_S) as sandbox:
                born = self.clock()
                self.note(Phase.SETUP, name, asked, born)
                yield sandbox
        finally:
            if born is not None:
                self.lives.append(Life(sandbox.id, role, born, self.clock()))


class _Unfit(Exception):
    """What the agent left cannot be graded, by its own doing: a zero, not an invalid sample."""


async def run_one(
    client: Client, prepared: PreparedTask, script: Script, index: int, clock: Clock = time.monotonic
) -> Rollout:
    """Run one rollout to its record. An infrastructure failure gives a record with valid=False; it never raises for one."""
    run = _Run(clock)
    try:
        await _agent(client, prepared, script, run, index)
        verdict = await _grade(client, prepared, run, index)
    except _Unfit as unfit:
        run.naive = run.naive or 0
        verdict = Verdict(reward=0, reason=str(unfit))
    except (DSecError, TimeoutError, GraderFailed) as error:
        verdict = Verdict(reward=None, valid=False, reason=f"{type(error).__name__}: {error}")
    return _record(prepared.task, script, index, run, verdict)


def _record(task: Task, script: Script, index: int, run: _Run, verdict: Verdict) -> Rollout:
    naive = run.naive if verdict.valid else None
    return Rollout(
        task=task.id,
        script=script,
        index=index,
        reward=verdict.reward,
        naive_reward=naive,
        valid=verdict.valid,
        reason=verdict.reason,
        as_expected=(verdict.reward, naive) == EXPECTED[script],
        create_ms=run.ms.get("create"),
        exec_ms=sum(step.ms for step in run.steps) if run.steps else None,
        naive_ms=run.ms.get("naive"),
        grade_create_ms=run.ms.get("grade_create"),
        grade_ms=run.ms.get("grade"),
        steps=tuple(run.steps),
        failed=verdict.failed,
        dropped=run.graded.dropped,
        graded_files=tuple(shown(os.fsdecode(change.path)) for change in run.graded.keep),
        output=verdict.output,
        spans=tuple(run.spans),
        sandboxes=tuple(run.lives),
    )


def _args(base: str, layers: tuple[str, ...], labels: dict[str, str]) -> DSecContainerRunArgs:
    return DSecContainerRunArgs(
        base, layers=layers, memory_limit_mb=512, disk_limit_mb=512, pids_limit=128, ttl_total=TTL_S, labels=labels
    )


# the agent's sandbox --------------------------------------------------------------------------------------------------


async def _agent(client: Client, prepared: PreparedTask, script: Script, run: _Run, index: int) -> None:
    labels = {"demo": prepared.task.id, "script": script.value, "rollout": str(index)}
    args = _args(prepared.base, (prepared.workspace, prepared.harness), labels)
    async with run.sandbox(client, args, "agent", "create") as sandbox:
        with run.span(Phase.TOOLS, "tools"):
            for turn in prepared.recordings[script].turns:
                for call in turn.calls:
                    run.steps.append(await _step(sandbox, call, run.clock))
        try:
            source = await sandbox.changes(include=source_globs(prepared.task))
            everything = await sandbox.changes(include=INCLUDE, max_bytes=0)
        except TooLarge as error:  # the agent's doing: a list of changes that nobody can carry earns nothing
            raise _Unfit(f"the changes are too many to collect: {error}") from error
        run.graded = sift(prepared.task, source.changes, everything.changes)
        with run.span(Phase.TESTS, "naive"):
            try:
                run.naive = await _naive(sandbox, prepared)
            except FileError:  # an agent can fill its disk, or put a file where the tests belong
                run.naive = 0


async def _step(sandbox: Sandbox, call: Call, clock: Clock) -> Step:
    """Make one call. A refused file is a tool result, as it would be for a model; a lost sandbox is not, and raises."""
    start = clock()
    match call:
        case Shell(line):
            what, result = line, await sandbox.run_shell(line, cwd=WORKSPACE, timeout=_CALL_TIMEOUT_S)
        case Tool(arguments, stdin):
            what = " ".join(("dsec-agent", *arguments))
            result = await sandbox.exec((TOOL, *arguments), cwd=WORKSPACE, stdin=stdin, timeout=_CALL_TIMEOUT_S)
        case Write(path, data):
            return await _write_step(sandbox, path, data, clock)
    return Step(what, result.exit_code, (clock() - start) * 1e3, _tail(result))


async def _write_step(sandbox: Sandbox, path: str, data: bytes, clock: Clock) -> Step:
    start, exit_code, said = clock(), 0, f"{len(data)} bytes"
    try:
        await sandbox.files.write(path, data)
    except FileError as refused:
        exit_code, said = 1, str(refused)
    return Step(f"write {path}", exit_code, (clock() - start) * 1e3, said)


def _tail(result: Result) -> str:
    return (result.stdout + result.stderr)[-_TAIL:].decode(errors="replace")


async def _naive(sandbox: Sandbox, prepared: PreparedTask) -> int:
    """The reward of a grader that trusts: the hidden tests run where the agent has been, and their printed summary is believed.

    The hidden tests come here only now, when the agent's turns are over and its changes are collected.
    """
    task = prepared.task
    for path in task.test_paths:
        if await sandbox.files.exists(f"{WORKSPACE}/{path}"):
            await sandbox.files.remove(f"{WORKSPACE}/{path}", recursive=True)
        await sandbox.files.upload(prepared.hidden / path, f"{WORKSPACE}/{path}")
    result = await sandbox.exec(task.test_command, cwd=WORKSPACE, timeout=TESTS_TIMEOUT_S, merge_stderr=True)
    return naive_reward(task, result.stdout.decode(errors="replace"))


# the grading sandbox --------------------------------------------------------------------------------------------------


async def _grade(client: Client, prepared: PreparedTask, run: _Run, index: int) -> Verdict:
    """A fresh sandbox from pristine layers, the agent's source changes, the hidden tests; nothing else of the agent."""
    if run.graded.too_large:
        return Verdict(reward=0, reason="changes to the source are too large to grade")
    labels = {"demo": prepared.task.id, "role": "grader", "rollout": str(index)}
    args = _args(prepared.base, (prepared.workspace, prepared.tests), labels)
    began = run.clock()
    async with run.sandbox(client, args, "grader", "grade_create") as sandbox:
        try:
            with run.span(Phase.SETUP, "apply"):
                await _apply(sandbox, prepared.task, run.graded)
        except FileError as clash:  # in a pristine tree only what the agent left can do that
            return Verdict(reward=0, reason=f"the changes to the source do not fit together: {clash}")
        with run.span(Phase.TESTS, "grade_tests"):
            result = await sandbox.exec(("/grading/bin/grade",), cwd="/", timeout=TESTS_TIMEOUT_S + 30)
    run.ms["grade"] = (run.clock() - began) * 1e3
    return _verdict(prepared.task, result)


async def _apply(sandbox: Sandbox, task: Task, graded: Graded) -> None:
    """Put the kept changes in place. The tree is pristine and holds no link of the agent's, so every path means itself."""
    for change in graded.keep:
        path = os.fsdecode(change.path).lstrip("/")
        if change.kind is ChangeKind.DELETE or change.opaque:
            await _clear(sandbox, task, path)
        if change.data is not None:
            await sandbox.files.write(f"/{path}", change.data, mode=0o755 if change.mode & 0o111 else 0o644)


async def _clear(sandbox: Sandbox, task: Task, path: str) -> None:
    """Remove a file, or what is below a folder and may be graded: a deletion must not take test configuration with it."""
    if not await sandbox.files.exists(f"/{path}"):
        return
    if (await sandbox.files.stat(f"/{path}")).kind is not FileKind.DIRECTORY:
        await sandbox.files.remove(f"/{path}")
        return
    for entry in await sandbox.files.list(f"/{path}", depth=_DEPTH):
        inside = os.fsdecode(entry.path).lstrip("/")
        if entry.kind is not FileKind.DIRECTORY and why_not(task, inside) is None:
            await sandbox.files.remove(f"/{inside}")


def _verdict(task: Task, result: Result) -> Verdict:
    """What the grading program printed, judged. Being killed is within the reach of the code under test, so it is a zero."""
    try:
        return judge(task, msgspec.json.decode(result.stdout, type=Outcomes))
    except msgspec.DecodeError as error:
        tail = _tail(result)
        if result.timed_out or result.signal == "KILL":
            return Verdict(reward=0, reason="grading was killed: the tests ran out of memory or time", output=tail)
        raise GraderFailed(
            f"grading ended with exit code {result.exit_code} and no results ({error}): {tail[-400:]}"
        ) from error
