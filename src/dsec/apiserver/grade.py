"""Grades over HTTP: asked for, waited for, asked for again."""

from __future__ import annotations

import asyncio
import re

from starlette.responses import Response

from dsec.protocol.errors import ErrorKind, Fault
from dsec.protocol.grading import GradeReply, GradeSpec, Verdict
from dsec.protocol.ids import new_request_id

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
        await link.call("sandbox.info", {"request_id": x.request_id, "sandbox": spec.source.sandbox})


async def _reply(x: Exchange, task: asyncio.Task[Verdict], wait_s: float) -> Response:
    await asyncio.wait((task,), timeout=wait_s)
    if task.cancelled():
        raise Fault(ErrorKind.CONNECTION_LOST, "the apiserver is stopping", hint="ask again", retryable=True)
    return x.reply(GradeReply(done=task.result() if task.done() else None))
