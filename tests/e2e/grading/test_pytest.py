"""By pytest under the supervisor: the expected tests decide, and nothing else."""

from __future__ import annotations

import pytest

import dsec
from dsec import GradeReason
from dsec.layers import LayerStore

from ..exploits.task import FAIL_TO_PASS, PASS_TO_PASS, RIGHT, SOURCE, build_layers
from .conftest import BASE, changes, file

RUNNER = dsec.PytestRunner(python="/opt/venv/bin/python", pythonpath=("src",), arguments=("-q",))
EXPECT = dsec.TestSet(FAIL_TO_PASS, PASS_TO_PASS)


@pytest.fixture(scope="module")
def layers(store: LayerStore, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    return build_layers(store, tmp_path_factory.mktemp("layers"))


async def grade(
    client: dsec.DSecClient,
    layers: tuple[str, str],
    *some: dsec.Change,
    expect: dsec.TestSet = EXPECT,
    **options: object,
) -> dsec.Verdict:
    args = dsec.DSecContainerRunArgs(BASE, layers=(layers[0],), memory_limit_mb=512)
    asked = {"runner": RUNNER, "timeout": 60, "include": ("src/**",), **options}
    return await client.grade(args, changes(*some), tests=layers[1], expect=expect, **asked)  # type: ignore[arg-type]


async def test_the_right_fix_passes(client: dsec.DSecClient, layers: tuple[str, str]) -> None:
    verdict = await grade(client, layers, file(SOURCE, RIGHT))
    assert (verdict.reward, verdict.reason) == (1.0, GradeReason.PASSED), verdict
    assert (verdict.evidence.passed, verdict.evidence.expected) == (len(EXPECT.ids), len(EXPECT.ids))


async def test_nothing_fails_where_the_bug_is(client: dsec.DSecClient, layers: tuple[str, str]) -> None:
    verdict = await grade(client, layers)
    assert (verdict.reward, verdict.valid, verdict.reason) == (0.0, True, GradeReason.TESTS_FAILED), verdict
    assert {test.id for test in verdict.evidence.failed} == set(FAIL_TO_PASS)
    partial = await grade(client, layers, expect=dsec.TestSet(FAIL_TO_PASS, PASS_TO_PASS, partial=True))
    assert partial.reward == pytest.approx(len(PASS_TO_PASS) / len(EXPECT.ids))


async def test_tests_that_are_not_there_are_missing(client: dsec.DSecClient, layers: tuple[str, str]) -> None:
    expect = dsec.TestSet((f"{FAIL_TO_PASS[0]}x",))
    verdict = await grade(client, layers, file(SOURCE, RIGHT), expect=expect)
    assert (verdict.reward, verdict.reason) == (0.0, GradeReason.TESTS_MISSING), verdict


async def test_a_hanging_import_is_a_zero_in_time(client: dsec.DSecClient, layers: tuple[str, str]) -> None:
    verdict = await grade(client, layers, file(SOURCE, "while True: pass\n"), timeout=3)
    assert (verdict.reward, verdict.valid, verdict.reason) == (0.0, True, GradeReason.TIMED_OUT), verdict


async def test_a_harness_that_never_works_is_no_zero(client: dsec.DSecClient, layers: tuple[str, str]) -> None:
    """Without pytest nothing can be said of the code; that is whoever asked's to mend."""
    runner = dsec.PytestRunner(python="/usr/bin/python3", pythonpath=("src",))
    verdict = await grade(client, layers, file(SOURCE, RIGHT), runner=runner)
    assert (verdict.reward, verdict.valid, verdict.reason) == (None, False, GradeReason.HARNESS_BROKEN), verdict
