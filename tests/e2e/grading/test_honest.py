"""Honest code that does odd things is graded as honest code: nothing that a test suite may do is taken for an attack."""

from __future__ import annotations

from pathlib import Path

import pytest

import dsec
from dsec import GradeReason
from dsec.layers import LayerStore

from ..exploits.task import build_layers
from . import odd
from .conftest import BASE, changes, file, publish

RUNNER = dsec.PytestRunner(python="/opt/venv/bin/python", pythonpath=("src",), arguments=("-q",))


@pytest.fixture(scope="module")
def workspace(store: LayerStore, tmp_path_factory: pytest.TempPathFactory) -> str:
    return build_layers(store, tmp_path_factory.mktemp("layers"))[0]


@pytest.mark.parametrize("suite", odd.SUITES, ids=lambda suite: suite.name)
async def test_gets_its_reward(
    client: dsec.DSecClient, store: LayerStore, workspace: str, tmp_path: Path, suite: odd.Suite
) -> None:
    tests = publish(store, tmp_path, f"grading-shop-tests-{suite.name}", "toolkit", suite.tests)
    args = dsec.DSecContainerRunArgs(BASE, layers=(workspace,), memory_limit_mb=512)
    some = changes(file(suite.path, suite.source))
    verdict = await client.grade(
        args,
        some,
        tests=tests,
        expect=dsec.TestSet(suite.ids),
        runner=RUNNER,
        timeout=60,
        include=("src/**", "pkg/**"),
    )
    assert (verdict.reward, verdict.reason) == (1.0, GradeReason.PASSED), verdict
