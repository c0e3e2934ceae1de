"""A grade as the last step of a rollout: recorded, replayed, and never done twice."""

from __future__ import annotations

import contextlib

import pytest

import dsec
from dsec import GradeReason

from .conftest import FIXED, Shop


class Preempted(Exception):
    """What leaves a rollout open."""


async def graded(shop: Shop, name: str, fix: str = FIXED, *, leave: bool = False, **options: object) -> dsec.Verdict:
    """One rollout from its first step to its grade."""
    asked = {"tests": shop.tests, "runner": dsec.CommandRunner(argv=("python3", "-B", "check.py")), **options}
    async with shop.client.rollout(name, shop.args) as rollout:
        await rollout.files.write("/workspace/src/shop/__init__.py", fix)
        verdict = await rollout.grade(**asked)  # type: ignore[arg-type]
        if leave:
            raise Preempted(verdict)
        await rollout.finish(reward=verdict.reward, valid=verdict.valid)
    return verdict


async def test_a_verdict_is_recorded_and_replayed(shop: Shop) -> None:
    with pytest.raises(Preempted) as left:
        await graded(shop, "graded", leave=True)
    first = left.value.args[0]
    assert (first.reward, first.reason) == (1.0, GradeReason.PASSED)
    assert await graded(shop, "graded") == first  # not another one: same sandboxes, same times
    assert await graded(shop, "graded") == first  # finished, and its sandbox gone
    info = await anext(shop.client.rollouts.list(job="", name="graded"))
    assert (info.reward, info.valid, info.steps, info.unknown) == (1.0, True, 2, ())


async def test_another_grade_is_another_step(shop: Shop) -> None:
    with contextlib.suppress(Preempted):
        await graded(shop, "diverges", leave=True)
    with pytest.raises(dsec.ReplayDivergence, match="include"):
        await graded(shop, "diverges", include=("src/**",))


async def test_the_sandbox_is_sealed_by_it(shop: Shop) -> None:
    async with shop.client.rollout("sealed", shop.args) as rollout:
        verdict = await rollout.grade(tests=shop.tests, runner=dsec.CommandRunner(argv=("python3", "-B", "check.py")))
        assert (verdict.reward, verdict.reason) == (0.0, GradeReason.EXIT_CODE)
        with pytest.raises(dsec.Conflict, match="sealed for grading"):
            await rollout.run_shell("true")


async def test_a_wrong_request_is_recorded_as_one(shop: Shop) -> None:
    for _ in range(2):
        with pytest.raises(dsec.NotFound, match="no-such-layer"):
            await graded(shop, "wrong", tests="no-such-layer@1")


async def test_a_verdict_that_is_none_is_not_recorded(shop: Shop) -> None:
    """The next opening grades anew."""
    broken = dsec.PytestRunner(python="/no/such/python")
    options: dict[str, object] = {"runner": broken, "expect": dsec.TestSet(("tests/test_hidden.py::test_total",))}
    verdicts = []
    for _ in range(2):
        with pytest.raises(Preempted) as left:
            await graded(shop, "broken", leave=True, **options)
        verdicts.append(left.value.args[0])
    assert [verdict.reason for verdict in verdicts] == [GradeReason.HARNESS_BROKEN] * 2
    assert verdicts[0].evidence.graders != verdicts[1].evidence.graders
