"""A part of `make chaos-rollouts`: rollouts go on through the death of trainer, apiserver, edge and launcher."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.e2e
POINTS = 24


@pytest.mark.timeout(400)
async def test_nothing_is_lost_doubled_or_told_otherwise() -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.chaos.rollouts", "--seed", "7", "--points", str(POINTS),
        cwd=Path(__file__).parents[2], stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    out, err = await process.communicate()
    lines = out.decode().splitlines()
    assert lines, err.decode()[-4000:]
    told = json.loads(lines[-1])
    faults = {name: told[name] for name in ("lost", "doubled", "diverged", "wrong_rewards", "orphans")}
    assert not any(faults.values()), out.decode()
    assert told["points"] >= POINTS and process.returncode == 0, out.decode()
