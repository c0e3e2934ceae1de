"""How long a grade waits for an edge that is away."""

from __future__ import annotations

import pytest

from dsec.protocol.errors import ErrorKind, Fault
from dsec.protocol.grading import CommandRunner, GradeReason, GradeSource, GradeSpec
from dsec.protocol.specs import DSecContainerRunArgs
from dsec.rollout.grading.ground import Link
from dsec.rollout.grading.service import ATTEMPTS, AWAY_S, Grader

SPEC = GradeSpec(
    args=DSecContainerRunArgs(), source=GradeSource(sandbox="sb-e-000000000000"), tests="tests@1",
    runner=CommandRunner(argv=("true",)),
)  # fmt: skip


class Away:
    """No edge answers the first `times`; then the request is refused."""

    def __init__(self, times: int) -> None:
        self.left = times
        self.asked = 0
        self.now = 1.0

    async def place(self) -> Link:
        self.asked += 1
        self.left -= 1
        if self.left >= 0:
            raise Fault(ErrorKind.CONNECTION_LOST, "no edge answers", retryable=True)
        raise Fault(ErrorKind.PERMISSION, "not for you")

    async def of(self, sandbox: str) -> Link:
        raise AssertionError("no grade comes so far here")

    async def sleep(self, seconds: float) -> None:
        self.now += seconds

    def clock(self) -> float:
        return self.now


async def test_an_edge_that_is_away_for_long_is_waited_for() -> None:
    fleet = Away(3 * ATTEMPTS)
    with pytest.raises(Fault, match="not for you"):
        await Grader(fleet, fleet.clock, fleet.sleep).grade("gr-1", SPEC)
    assert fleet.asked == 3 * ATTEMPTS + 1 and fleet.now < AWAY_S


async def test_an_edge_that_does_not_come_back_makes_no_reward() -> None:
    fleet = Away(1_000_000)
    verdict = await Grader(fleet, fleet.clock, fleet.sleep).grade("gr-1", SPEC)
    assert (verdict.reward, verdict.valid, verdict.reason) == (None, False, GradeReason.EDGE_LOST)
    assert AWAY_S < fleet.now < AWAY_S + 10
