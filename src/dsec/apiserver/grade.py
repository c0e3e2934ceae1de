"""Grades over HTTP: asked for, waited for, asked for again."""

from __future__ import annotations

import asyncio
import re

from starlette.responses import Response

from dsec.protocol.errors import ErrorKind, Fault
from dsec.protocol.grading import GradeReply, Verdict
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
    return await _reply(x, x.platform.grades.begin(grade_id, asked.spec()), asked.wait_s)


async def found(x: Exchange) -> Response:
    """The same for a grade that is under way, or was done lately."""
    wait_s = x.number("wait_s", 0, high=int(MAX_WAIT_S)) or 0
    return await _reply(x, x.platform.grades.find(x.path_param("grade")), wait_s)


async def _reply(x: Exchange, task: asyncio.Task[Verdict], wait_s: float) -> Response:
    await asyncio.wait((task,), timeout=wait_s)
    if task.cancelled():
        raise Fault(ErrorKind.CONNECTION_LOST, "the apiserver is stopping", hint="ask again", retryable=True)
    return x.reply(GradeReply(done=task.result() if task.done() else None))
