"""From a change to a verdict, by exit code."""

from __future__ import annotations

import dsec
from dsec import GradeReason

from .conftest import BUGGY, FIXED, Shop, changes, file


async def test_a_fix_is_rewarded(shop: Shop, agent: dsec.Sandbox) -> None:
    await agent.files.write("/workspace/src/shop/__init__.py", FIXED)
    verdict = await shop.grade(agent, include=("src/**",))
    assert (verdict.reward, verdict.valid, verdict.reason) == (1.0, True, GradeReason.PASSED), verdict
    assert verdict.evidence.kept and verdict.evidence.sandbox == agent.id and len(verdict.evidence.graders) == 1
    assert verdict.evidence.tests_digest == shop.tests.partition("@")[2]


async def test_none_is_not(shop: Shop, agent: dsec.Sandbox) -> None:
    verdict = await shop.grade(agent)
    assert (verdict.reward, verdict.valid, verdict.reason) == (0.0, True, GradeReason.EXIT_CODE), verdict
    assert verdict.evidence.status == 3


async def test_given_changes_are_graded_as_those_of_a_sandbox(shop: Shop) -> None:
    verdict = await shop.grade(changes(file("src/shop/__init__.py", FIXED)), include=("src/**",))
    assert verdict.reward == 1.0, verdict
    verdict = await shop.grade(changes(file("src/shop/__init__.py", BUGGY)), include=("src/**",))
    assert verdict.reward == 0.0, verdict
