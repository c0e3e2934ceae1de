"""Grades over HTTP: asked for, waited for, asked for again."""

from __future__ import annotations

import asyncio
import re

import msgspec
from starlette.responses import Response

from dsec.protocol.errors import ErrorKind, Fault
from dsec.protocol.grading import GradeReply, GradeSpec, Verdict, grade_params
from dsec.protocol.ids import new_request_id
from dsec.protocol.requests import canonical
from dsec.protocol.rollouts import StepRecord, StepRef

from .bodies import MAX_WAIT_S, GradeRequest
from .exchange import MAX_JSON, Exchange

MAX_BODY = 384 * MAX_JSON  # the changes that may be given, in base64
_GRADE_ID = re.compile(r"[A-Za-z0-9._:-]{1,64}")


async def grade(x: Exchange) -> Response:
    """Grades, or joins the grade of that id; `done` is null when it takes longer than `wait_s`."""
    asked = await x.json(GradeRequest, MAX_BODY)
    if not 0 <= asked.wait_s <= MAX_WAIT_S:
        raise Fault(ErrorKind.INVALID, f"wait_s={asked.wait_s} is not between 0 and {MAX_WAIT_S:g}")
    grade_id = asked.grade_id or new_request_id()
    if _GRADE_ID.fullmatch(grade_id) is None:
        raise Fault(ErrorKind.INVALID, "grade_id is not 1 to 64 letters, digits and ._:-")
    spec = asked.spec()
    await _check_scope(x, spec)
    if (step := x.step) is not None:
        return await _as_step(x, step, spec, asked.wait_s)
    return await _reply(x, x.platform.grades.begin(_own(x, grade_id), spec), asked.wait_s)


async def found(x: Exchange) -> Response:
    """The same for a grade that is under way, or was done lately."""
    wait_s = x.number("wait_s", 0, high=int(MAX_WAIT_S)) or 0
    return await _reply(x, x.platform.grades.find(_own(x, x.path_param("grade"))), wait_s)


def _own(x: Exchange, grade_id: str) -> str:
    """Ids of scoped keys are those of their job, so that none finds what it did not ask for."""
    return grade_id if x.scope is None else f"{x.scope.job}.{grade_id}"


async def _check_scope(x: Exchange, spec: GradeSpec) -> None:
    """Fault permission for a sandbox or an environment that the caller's key does not reach. The grading sandboxes are the
    platform's own: what a grade needs beyond that, it may."""
    if x.scope is None:
        return
    x.scope.require_layers(spec.args)
    if spec.source.sandbox:
        link = await x.services.fleet.route(spec.source.sandbox)
        asked: dict[str, object] = {"request_id": x.request_id, "sandbox": spec.source.sandbox}
        await link.call("sandbox.info", asked if x.step is None else {**asked, "step_of": x.step})


class _Step(msgspec.Struct, frozen=True):
    """record: a `StepRecord` in JSON."""

    record: bytes | None = None
    sandbox: str = ""


async def _as_step(x: Exchange, step: StepRef, spec: GradeSpec, wait_s: float) -> Response:
    """The verdict as the step of a rollout: recorded before anybody is told, and told from the record ever after. One that is
    not valid is none: the same step again grades anew."""
    link = await x.platform.fleet.home("rollout", step.rollout)
    ref: dict[str, object] = {"request_id": x.request_id, "step_of": step}
    request = canonical("grade", grade_params(spec))
    known = await link.call("rollout.intent", {**ref, "kind": "grade", "request": request}, _Step)
    if known.record is not None:
        return _recorded(x, known.record)
    if known.sandbox != spec.source.sandbox:
        raise Fault(
            ErrorKind.INVALID, f"rollout {step.rollout} has another sandbox", hint=f"grade that one: {known.sandbox}"
        )
    task = x.platform.grades.begin(f"{step.rollout}.{step.step}", spec)
    await asyncio.wait((task,), timeout=wait_s)
    if not task.done() or task.cancelled():
        return await _reply(x, task, 0)
    if isinstance(error := task.exception(), Fault):
        if error.body.kind not in (ErrorKind.INVALID, ErrorKind.NOT_FOUND):
            raise error
        told: dict[str, object] = {"error": error.body}
    elif error is None and task.result().valid:
        told = {"result": msgspec.json.encode(task.result())}
    else:
        return await _reply(x, task, 0)
    recorded = await link.call("rollout.outcome", {**ref, **told}, _Step)
    assert recorded.record is not None
    return _recorded(x, recorded.record)


def _recorded(x: Exchange, record: bytes) -> Response:
    known = msgspec.json.decode(record, type=StepRecord)
    if known.error is not None:
        raise Fault.from_body(known.error)
    verdict = msgspec.json.decode(known.result or b"null", type=Verdict)
    return x.reply(GradeReply(done=verdict), incarnation=x.asked_incarnation())


async def _reply(x: Exchange, task: asyncio.Task[Verdict], wait_s: float) -> Response:
    await asyncio.wait((task,), timeout=wait_s)
    if task.cancelled():
        raise Fault(ErrorKind.CONNECTION_LOST, "the apiserver is stopping", hint="ask again", retryable=True)
    return x.reply(GradeReply(done=task.result() if task.done() else None), incarnation=x.asked_incarnation())
