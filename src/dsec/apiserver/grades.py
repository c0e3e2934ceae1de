"""The grades that this process does: under way and lately done, in memory only.

A grade that is forgotten (the process was started again) is done anew when it is asked for again, and comes to the same: the
changes are sealed, the layers do not change. Its grading sandboxes are found by their label and removed.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict

import msgspec
import structlog
from blake3 import blake3

from dsec.placement.choice import Placement
from dsec.protocol.errors import ErrorKind, Fault
from dsec.protocol.grading import GradeSpec, Verdict
from dsec.rollout.grading.service import Grader

from .fleet import EdgeLink, Fleet

AT_ONCE = 64
KEEP_DONE = 1_024
log = structlog.get_logger("dsec.apiserver.grades")


class Edges:
    """The fleet as the grader needs it."""

    def __init__(self, fleet: Fleet, placement: Placement) -> None:
        self._fleet = fleet
        self._placement = placement

    async def of(self, sandbox: str) -> EdgeLink:
        return await self._fleet.route(sandbox)

    async def place(self) -> EdgeLink:
        return self._fleet.link(self._placement.choose(await self._fleet.views()))


class _Grade:
    def __init__(self, digest: bytes, task: asyncio.Task[Verdict]) -> None:
        self.digest = digest
        self.task = task


class Grades:
    """Under way and lately done, by their ids."""

    def __init__(self, fleet: Fleet, placement: Placement) -> None:
        self._grader = Grader(Edges(fleet, placement))
        self._places = asyncio.Semaphore(AT_ONCE)
        self._grades: OrderedDict[str, _Grade] = OrderedDict()

    def begin(self, grade_id: str, spec: GradeSpec) -> asyncio.Task[Verdict]:
        """Starts a grade, or joins the one of that id; Fault conflict when that is of something else. One that came to no
        valid verdict is begun anew."""
        digest = blake3(msgspec.json.encode(spec)).digest()
        if (known := self._grades.get(grade_id)) is not None and not _failed(known.task):
            if known.digest != digest:
                raise Fault(
                    ErrorKind.CONFLICT, f"grade {grade_id} is one of something else", hint="use another grade_id"
                )
            return known.task
        task = asyncio.create_task(self._run(grade_id, spec))
        self._grades[grade_id] = _Grade(digest, task)
        self._grades.move_to_end(grade_id)
        self._forget_some()
        return task

    def find(self, grade_id: str) -> asyncio.Task[Verdict]:
        known = self._grades.get(grade_id)
        if known is None:
            raise Fault(
                ErrorKind.NOT_FOUND,
                f"no grade {grade_id[:64]} is known here",
                hint="ask for it again as at first (POST): it is done anew, and comes to the same",
            )
        return known.task

    async def _run(self, grade_id: str, spec: GradeSpec) -> Verdict:
        async with self._places:
            verdict = await self._grader.grade(grade_id, spec)
        log.info(
            "graded", grade=grade_id, reward=verdict.reward, reason=verdict.reason.value, lost=verdict.evidence.lost
        )
        return verdict

    def _forget_some(self) -> None:
        """The oldest of those that are done."""
        for grade_id in [id for id, grade in self._grades.items() if grade.task.done()]:
            if len(self._grades) <= KEEP_DONE:
                return
            del self._grades[grade_id]

    async def close(self) -> None:
        for grade in self._grades.values():
            grade.task.cancel()
        await asyncio.gather(*(grade.task for grade in self._grades.values()), return_exceptions=True)
        await self._grader.close()


def _failed(task: asyncio.Task[Verdict]) -> bool:
    return task.done() and (task.cancelled() or task.exception() is not None or not task.result().valid)
