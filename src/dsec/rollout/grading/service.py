"""One grade from end to end: seal, collect, sift, a fresh sandbox, apply, run, judge.

Nothing is kept between grades but facts of layers: a grade that was cut off is done anew and comes to the same. What fails on
our side is tried again in another fresh sandbox, a bounded number of times, and ends in a verdict without a reward.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from typing import Protocol

import msgspec

from dsec.protocol.errors import ErrorKind, Fault
from dsec.protocol.grading import Evidence, GradeReason, GradeSpec, GradeTimes, PytestRunner, Verdict
from dsec.protocol.link import Data, LinkStream, RecordReader
from dsec.protocol.specs import Change, Created, DSecContainerRunArgs
from dsec.protocol.steps import step

from . import runner, runners
from .ground import Ground, Link, Surveyor
from .names import BARE
from .patch import END, PatchWriter
from .runners import Bench, Ran
from .sift import MAX_BYTES, Sift, Sifted
from .verdict import Judged

ATTEMPTS = 4
AWAY_S = 60.0
"""From the first time that an edge was away, so long: it is being started again, which takes longer the busier the node is."""
WORKDIR = "/workspace"
LABEL = "dsec.grade"
"""Grading sandboxes carry it with the grade's id."""
_CREATE_S = 60.0
_MARGIN_S = 180.0
_PAUSES_S = (0.2, 1.0, 3.0)
_PIECE = 128 * 1024
_MAX_RECORD = MAX_BYTES + 64 * 1024
_ASKED = frozenset(
    (
        ErrorKind.INVALID, ErrorKind.NOT_FOUND, ErrorKind.AUTHENTICATION, ErrorKind.PERMISSION, ErrorKind.QUOTA,
        ErrorKind.UNSUPPORTED,
    )
)  # fmt: skip
"""The request's own faults: raised to whoever asked."""
_COLLECTED = (0, 1, 5)
"""Exit codes of pytest when nothing was wrong with loading the tests."""
_ITS_OWN_DOING = frozenset(("oom", "pids", "disk_full"))


class Fleet(Protocol):
    """The edges. Both raise Fault connection_lost while none answers."""

    async def of(self, sandbox: str) -> Link: ...
    async def place(self) -> Link: ...


class _Lost(Exception):
    """This attempt says nothing of the agent's work. final: nor will another one."""

    def __init__(self, reason: GradeReason, detail: str, *, final: bool = False, ended_by: str = "") -> None:
        super().__init__(detail)
        self.reason = reason
        self.final = final
        self.ended_by = ended_by


class _Progress:
    """What is known so far, for the evidence."""

    def __init__(self) -> None:
        self.sifted = Sifted()
        self.ran: Ran | None = None
        self.tests_digest = ""
        self.graders: list[str] = []
        self.lost: list[_Lost] = []
        self.times = GradeTimes()

    def spent(self, **times: float) -> None:
        self.times = msgspec.structs.replace(self.times, **times)


class Grader:
    def __init__(
        self,
        fleet: Fleet,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._fleet = fleet
        self._clock = clock
        self._sleep = sleep
        self._surveyor = Surveyor()
        self._removals: set[asyncio.Task[None]] = set()

    async def grade(self, grade_id: str, spec: GradeSpec) -> Verdict:
        """The verdict. Fault only for what is wrong with the request: an unknown layer, arguments that no sandbox takes."""
        check(spec)
        began = self._clock()
        progress = _Progress()
        judged = await self._judged(grade_id, spec, progress)
        progress.spent(total_s=self._clock() - began)
        if judged is None:
            last = progress.lost[-1]
            return Verdict(
                reward=None, valid=False, reason=last.reason, detail=str(last), evidence=_evidence(spec, progress, None)
            )
        return Verdict(
            reward=judged.reward,
            valid=True,
            reason=judged.reason,
            detail=judged.detail,
            evidence=_evidence(spec, progress, judged),
        )

    async def close(self) -> None:
        """Until the last grading sandboxes are being removed."""
        if self._removals:
            await asyncio.wait(list(self._removals))

    # -- attempts --

    async def _judged(self, grade_id: str, spec: GradeSpec, progress: _Progress) -> Judged | None:
        """None: nothing can be told. An edge that is away is waited for; that is no attempt."""
        tried: list[_Lost] = []
        away_since = 0.0
        while len(tried) < ATTEMPTS:
            if progress.lost:
                await self._sleep(_PAUSES_S[min(len(progress.lost), len(_PAUSES_S)) - 1])
            try:
                return await self._attempt(grade_id, spec, progress)
            except _Lost as lost:
                progress.lost.append(lost)
                if lost.final:
                    return None
                if lost.reason is not GradeReason.EDGE_LOST:
                    tried.append(lost)
                    continue
                away_since = away_since or self._clock()
                if self._clock() - away_since > AWAY_S:
                    return None
        ends = {lost.ended_by for lost in tried}
        if ends <= _ITS_OWN_DOING:  # every time, so it is no accident of the node's
            detail = f"each of {ATTEMPTS} grading sandboxes ended over its limits ({', '.join(sorted(ends))})"
            reasons = {"oom": GradeReason.OUT_OF_MEMORY, "pids": GradeReason.TOO_MANY_PROCESSES}
            reason = reasons.get(tried[-1].ended_by, GradeReason.DISK_FULL)
            return Judged(reward=0.0, reason=reason, detail=detail)
        return None

    async def _attempt(self, grade_id: str, spec: GradeSpec, progress: _Progress) -> Judged:
        with_changes = await self._once(grade_id, spec, progress, with_changes=True)
        if isinstance(with_changes, Judged):
            return with_changes
        progress.ran = with_changes
        if with_changes.judged is not None:
            if _missing(with_changes) and isinstance(spec.runner, PytestRunner):
                await self._check_names(grade_id, spec, progress, _missing(with_changes))
            return with_changes.judged
        # It did not even start. Without the changes it does, or the fault is ours.
        control = await self._once(grade_id, spec, progress, with_changes=False)
        if isinstance(control, Ran) and control.judged is None:
            raise _Lost(
                GradeReason.HARNESS_BROKEN, f"the run fails without any change, too: {control.broken}", final=True
            )
        reason = GradeReason.RUNNER_SILENCED
        return Judged(
            reward=0.0, reason=reason, detail=f"the run comes about only without the changes: {with_changes.broken}"
        )

    async def _check_names(self, grade_id: str, spec: GradeSpec, progress: _Progress, missing: frozenset[str]) -> None:
        """Raise _Lost for tests that a run without any change does not know either, although it could collect everything: then
        whoever named them is wrong, and not the code."""
        control = await self._once(grade_id, spec, progress, with_changes=False)
        if not isinstance(control, Ran) or control.status not in _COLLECTED or control.uncollected:
            return
        if unknown := sorted(missing & _missing(control)):
            raise _Lost(
                GradeReason.HARNESS_BROKEN,
                f"{len(unknown)} expected tests do not exist, with or without the changes, {unknown[0]} first: ids are as pytest "
                "prints them from the workdir, and the tests layer must hold their files",
                final=True,
            )

    async def _once(self, grade_id: str, spec: GradeSpec, progress: _Progress, *, with_changes: bool) -> Ran | Judged:
        """One fresh sandbox, from its creation to its removal. Judged: what the changes alone say."""
        began = self._clock()
        grader = await self._placed(grade_id)
        creating = asyncio.ensure_future(self._create(grader, grade_id, spec))
        surveying = asyncio.ensure_future(self._survey(grader, spec))
        stream: LinkStream | None = None
        try:
            if with_changes and spec.source.sandbox:
                with step("grade.seal", spec.source.sandbox):
                    stream = await self._collect(spec, grade_id)
                progress.spent(seal_s=self._clock() - began)
            ground, progress.tests_digest = await surveying
            created = await creating
            progress.graders.append(created.id)
            ready = self._clock()
            changes = _given(spec, stream) if with_changes else _nothing()
            sift = Sift(ground, spec.include, spec.exclude)
            with step("grade.apply", created.id):
                unfit = await self._apply(grader, created.id, spec, ground, sift, changes)
            if with_changes:
                progress.sifted = sift.result()
            applied = self._clock()
            progress.spent(create_s=ready - began, apply_s=applied - ready)
            if unfit is not None:
                return unfit
            written = sift.result().written
            bench = Bench(grader, created.id, workdir_of(spec), grade_id, written)
            with step("grade.run", created.id):
                ran = await self._run(bench, spec)
            progress.spent(run_s=self._clock() - applied)
            return ran
        finally:
            if stream is not None:
                stream.cancel()
            surveying.cancel()
            await asyncio.gather(surveying, return_exceptions=True)
            self._remove(grader, creating)

    # -- steps --

    async def _placed(self, grade_id: str) -> Link:
        """An edge, and nothing on it that an earlier try of this grade has left."""
        try:
            link = await self._fleet.place()
            await link.call("sandbox.stop_many", {"labels": {LABEL: grade_id}, "request_id": grade_id}, dict)
            return link
        except Fault as fault:
            raise _lost(fault, created=False) from fault

    async def _create(self, link: Link, grade_id: str, spec: GradeSpec) -> Created:
        params = {"args": args_of(spec, grade_id), "timeout": _CREATE_S, "request_id": grade_id}
        try:
            async with asyncio.timeout(_CREATE_S + 10):
                return await link.call("sandbox.create", params, Created)
        except TimeoutError:
            raise _Lost(GradeReason.GRADING_LOST, f"no grading sandbox within {_CREATE_S:g} s") from None
        except Fault as fault:
            raise _lost(fault, created=False) from fault

    async def _survey(self, link: Link, spec: GradeSpec) -> tuple[Ground, str]:
        args, runner = spec.args, spec.runner
        layers = [ref for ref in (args.container_image, *args.layers) if ref is not None]
        pythonpath = runner.pythonpath if isinstance(runner, PytestRunner) else ()
        try:
            return await self._surveyor.survey(link, layers, spec.tests, workdir_of(spec), pythonpath, args.env)
        except Fault as fault:
            raise _lost(fault, created=False) from fault

    async def _collect(self, spec: GradeSpec, grade_id: str) -> LinkStream:
        """The agent's sandbox is sealed; its changes begin to come. Contents of those only that may count."""
        target = {"sandbox": spec.source.sandbox, "request_id": grade_id}
        if spec.source.incarnation is not None:
            target["incarnation"] = spec.source.incarnation  # type: ignore[assignment]
        contents = [f"{workdir_of(spec)}/{glob.lstrip('/')}" for glob in spec.include]
        bare = [*BARE, *(f"{workdir_of(spec)}/{glob.lstrip('/')}" for glob in spec.exclude)]
        try:
            link = await self._fleet.of(spec.source.sandbox)
            await link.call("sandbox.seal", target, dict)
            return await link.open(
                "sandbox.changes", {**target, "contents": contents, "bare": bare, "max_bytes": MAX_BYTES}
            )
        except Fault as fault:
            raise _agent_lost(fault) from fault

    async def _apply(
        self, link: Link, sandbox: str, spec: GradeSpec, ground: Ground, sift: Sift, changes: AsyncIterator[Change]
    ) -> Judged | None:
        """Everything that counts, in one stream. Judged: why it cannot be graded."""
        writer = PatchWriter(ground.owned, int(time.time()))
        params = {"sandbox": sandbox, "path": b"/", "user": "0:0", "whiteouts": True}
        try:
            stream = await link.open("fs.untar", params)
        except Fault as fault:
            raise _lost(fault, created=True) from fault
        try:
            with suppress(Fault):  # of the receiver: its result says what it is
                await self._send(stream, sift, writer, changes, isinstance(spec.runner, PytestRunner))
            if sift.result().too_large:
                return Judged(reward=0.0, reason=GradeReason.CHANGES_TOO_LARGE, detail=sift.result().too_large)
            await stream.result()
        except Fault as fault:
            return _unfit(fault, spec, sift)
        finally:
            stream.cancel()
        return None

    async def _send(
        self, stream: LinkStream, sift: Sift, writer: PatchWriter, changes: AsyncIterator[Change], supervised: bool
    ) -> None:
        held = bytearray()
        async for change in changes:
            kept = sift.take(change)
            if kept is None:
                continue
            for piece in writer.entry(kept):
                held += piece
                if len(held) >= _PIECE:
                    await stream.send(bytes(held))
                    held.clear()
        if supervised:
            for piece in writer.file(runners.RUNNER.encode(), runner.source(), 0o700):
                held += piece
        await stream.send(bytes(held + END))
        await stream.end()

    async def _run(self, bench: Bench, spec: GradeSpec) -> Ran:
        try:
            async with asyncio.timeout(spec.timeout + _MARGIN_S / 2):
                return await runners.run_tests(bench, spec)
        except TimeoutError:
            raise _Lost(
                GradeReason.GRADING_LOST, "the grading sandbox gave no answer long after its deadline"
            ) from None
        except Fault as fault:
            raise _lost(fault, created=True) from fault

    def _remove(self, link: Link, creating: asyncio.Future[Created]) -> None:
        """In the background: a verdict need not wait for a tidy-up, and a lifetime ends what this misses."""
        task = asyncio.ensure_future(_removed(link, creating))
        self._removals.add(task)
        task.add_done_callback(self._removals.discard)


async def _removed(link: Link, creating: asyncio.Future[Created]) -> None:
    with suppress(Fault, _Lost, asyncio.CancelledError):
        created = await creating
        await link.call("sandbox.stop", {"sandbox": created.id, "wait": False}, dict)


# -- the request -------------------------------------------------------------------------------------------------------


def check(spec: GradeSpec) -> None:
    """Fault invalid_request for a grade that could say nothing."""
    wrong = ""
    source, ids = spec.source, spec.expect.ids
    knows_tests = isinstance(spec.runner, PytestRunner) or spec.runner.verdict.__class__.__name__ == "JUnit"
    if bool(source.sandbox) == (source.changes is not None):
        wrong = "source needs either sandbox or changes"
    elif not spec.include:
        wrong = "include is empty: no change would count"
    elif knows_tests and not ids:
        wrong = "expect names no test: this runner's verdict is by tests"
    elif not knows_tests and ids:
        wrong = "expect names tests, but the runner's verdict knows none: use one by tests (pytest, JUnit)"
    elif len(set(ids)) != len(ids):
        wrong = "expect names a test twice"
    elif not 0 < spec.timeout <= 86_400:
        wrong = f"timeout={spec.timeout} is not between 0 and 86400 seconds"
    elif not workdir_of(spec).startswith("/") or ".." in workdir_of(spec).split("/"):
        wrong = f"workdir={workdir_of(spec)!r} is not an absolute path"
    elif not isinstance(spec.runner, PytestRunner) and not spec.runner.argv:
        wrong = "argv is empty"
    if wrong:
        raise Fault(ErrorKind.INVALID, wrong, hint="see docs/guide/grading.md")


def workdir_of(spec: GradeSpec) -> str:
    given = spec.workdir or spec.args.workdir or WORKDIR
    return "/" + given.strip("/") if given.startswith("/") else given


def args_of(spec: GradeSpec, grade_id: str) -> DSecContainerRunArgs:
    """The environment as asked, the tests on top, no way out, no longer than needed."""
    return msgspec.structs.replace(
        spec.args,
        layers=(*spec.args.layers, spec.tests),
        network_rules={},
        labels={LABEL: grade_id},
        ttl_running_stop=None,
        ttl_total=spec.timeout + _MARGIN_S,
        idempotency_key=None,
    )


# -- faults ------------------------------------------------------------------------------------------------------------


def _lost(fault: Fault, *, created: bool) -> Exception:
    """Of the grading sandbox's side."""
    kind, told = fault.body.kind, str(fault)
    if kind in _ASKED and not created:
        return fault
    if kind is ErrorKind.CONNECTION_LOST:
        return _Lost(GradeReason.EDGE_LOST, f"the edge went away: {told}")
    ended_by = str(fault.body.details.get("reason", "")) if kind is ErrorKind.UNAVAILABLE else ""
    return _Lost(GradeReason.GRADING_LOST, f"the grading sandbox was lost: {told}", ended_by=ended_by)


def _agent_lost(fault: Fault) -> Exception:
    """Of the agent's sandbox: what has ended has no changes any more."""
    if fault.body.kind in _ASKED:
        return fault
    if fault.body.kind is ErrorKind.CONNECTION_LOST:
        return _Lost(GradeReason.EDGE_LOST, f"the edge of the agent's sandbox went away: {fault}")
    is_gone = fault.body.kind is ErrorKind.UNAVAILABLE
    return _Lost(GradeReason.SANDBOX_LOST, f"the agent's sandbox cannot be read: {fault}", final=is_gone)


def _unfit(fault: Fault, spec: GradeSpec, sift: Sift) -> Judged:
    """Why the changes could not be applied: in a pristine tree only the changes themselves can do that."""
    kind = fault.body.kind
    if kind in runners.FILE_KINDS:
        detail = f"the changes do not fit together: {fault}"
        return Judged(reward=0.0, reason=GradeReason.CHANGES_UNFIT, detail=detail)
    if kind is ErrorKind.NO_SPACE and sift.result().kept_bytes * 4 > spec.args.disk_limit_mb << 20:
        return Judged(reward=0.0, reason=GradeReason.DISK_FULL, detail=f"the changes alone fill the disk: {fault}")
    raise _lost(fault, created=True) from fault


# -- changes -----------------------------------------------------------------------------------------------------------


def _missing(ran: Ran) -> frozenset[str]:
    """Expected tests that a run which was not cut off never reported."""
    judged = ran.judged
    if judged is None or judged.reason not in (GradeReason.TESTS_MISSING, GradeReason.TESTS_FAILED):
        return frozenset()
    return frozenset(test.id for test in judged.failed if test.outcome == "missing")


async def _given(spec: GradeSpec, stream: LinkStream | None) -> AsyncIterator[Change]:
    if stream is None:
        for change in spec.source.changes.changes if spec.source.changes else ():
            yield change
        return
    reader = RecordReader(Change, _MAX_RECORD)
    try:
        async for item in stream:
            if isinstance(item, Data):
                for change in reader.feed(item.data):
                    yield change
        await stream.result()
    except Fault as fault:
        raise _agent_lost(fault) from fault


async def _nothing() -> AsyncIterator[Change]:
    return
    yield


def _evidence(spec: GradeSpec, progress: _Progress, judged: Judged | None) -> Evidence:
    sifted, ran = progress.sifted, progress.ran or Ran(judged=None)
    return Evidence(
        expected=len(spec.expect.ids),
        passed=judged.passed if judged else 0,
        failed=judged.failed if judged else (),
        failed_total=judged.failed_total if judged else 0,
        dropped=sifted.dropped,
        dropped_total=sifted.dropped_total,
        signals=(*sifted.signals, *ran.signals),
        status=ran.status,
        output=ran.output,
        output_bytes=ran.output_bytes,
        kept=sifted.kept,
        kept_bytes=sifted.kept_bytes,
        changes_digest=sifted.digest,
        tests_digest=progress.tests_digest,
        sandbox=spec.source.sandbox,
        graders=tuple(progress.graders),
        lost=tuple(str(lost) for lost in progress.lost),
        times=progress.times,
    )
