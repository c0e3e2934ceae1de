"""By pytest under the supervisor: the expected tests decide, and nothing else."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

import dsec
from dsec import GradeReason
from dsec.layers import LayerStore

from ..exploits.task import FAIL_TO_PASS, PASS_TO_PASS, RIGHT, SOURCE, build_layers
from .conftest import BASE, changes, file, publish

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
    hidden: str = "",
    **options: object,
) -> dsec.Verdict:
    args = dsec.DSecContainerRunArgs(BASE, layers=(layers[0],), memory_limit_mb=512)
    asked = {"runner": RUNNER, "timeout": 60, "include": ("src/**",), **options}
    return await client.grade(args, changes(*some), tests=hidden or layers[1], expect=expect, **asked)  # type: ignore[arg-type]


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


@pytest.mark.parametrize("wrong", [f"{FAIL_TO_PASS[0]}x", "tests/test_none.py::test_a"])
async def test_a_mistyped_test_is_whoever_asked_to_mend(
    client: dsec.DSecClient, layers: tuple[str, str], wrong: str
) -> None:
    """No code passes a test that does not exist: that is no zero of the agent's, and the verdict names it."""
    verdict = await grade(client, layers, file(SOURCE, RIGHT), expect=dsec.TestSet((wrong, *PASS_TO_PASS)))
    assert (verdict.reward, verdict.valid, verdict.reason) == (None, False, GradeReason.HARNESS_BROKEN), verdict
    assert wrong.partition("::")[0] in verdict.detail


async def test_tests_that_only_load_with_the_fix(
    client: dsec.DSecClient, layers: tuple[str, str], store: LayerStore, tmp_path: Path
) -> None:
    """Without it they are missing, in a run without changes too; that is a zero nevertheless."""
    hidden = {"tests/conftest.py": "from shop import new\n", "tests/test_new.py": "def test_new():\n    pass\n"}
    tests = publish(store, tmp_path, "grading-shop-tests-new", "toolkit", hidden)
    asked = {"expect": dsec.TestSet(("tests/test_new.py::test_new",)), "hidden": tests}
    verdict = await grade(client, layers, **asked)  # type: ignore[arg-type]
    assert (verdict.reward, verdict.reason) == (0.0, GradeReason.RUN_CRASHED), verdict
    verdict = await grade(client, layers, file("src/shop/new.py", "\n"), **asked)  # type: ignore[arg-type]
    assert (verdict.reward, verdict.reason) == (1.0, GradeReason.PASSED), verdict


async def test_a_file_that_only_loads_with_the_fix(
    client: dsec.DSecClient, layers: tuple[str, str], store: LayerStore, tmp_path: Path
) -> None:
    """The same of a test file, where pytest is told to go on without it."""
    hidden = {"tests/test_new.py": "from shop import new\n\n\ndef test_new():\n    pass\n"}
    tests = publish(store, tmp_path, "grading-shop-tests-file", "toolkit", hidden)
    asked = {
        "expect": dsec.TestSet(("tests/test_new.py::test_new",), ("tests/test_prices.py::test_parse_whole",)),
        "hidden": tests,
        "runner": msgspec.structs.replace(RUNNER, arguments=("-q", "--continue-on-collection-errors")),
    }
    verdict = await grade(client, layers, **asked)  # type: ignore[arg-type]
    assert (verdict.reward, verdict.valid) == (0.0, True), verdict
    assert "missing" in {test.outcome for test in verdict.evidence.failed}


async def test_a_hanging_import_is_a_zero_in_time(client: dsec.DSecClient, layers: tuple[str, str]) -> None:
    verdict = await grade(client, layers, file(SOURCE, "while True: pass\n"), timeout=3)
    assert (verdict.reward, verdict.valid, verdict.reason) == (0.0, True, GradeReason.TIMED_OUT), verdict


async def test_a_harness_that_never_works_is_no_zero(client: dsec.DSecClient, layers: tuple[str, str]) -> None:
    """Without pytest nothing can be said of the code; that is whoever asked's to mend."""
    runner = dsec.PytestRunner(python="/usr/bin/python3", pythonpath=("src",))
    verdict = await grade(client, layers, file(SOURCE, RIGHT), runner=runner)
    assert (verdict.reward, verdict.valid, verdict.reason) == (None, False, GradeReason.HARNESS_BROKEN), verdict
