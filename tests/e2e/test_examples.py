"""Every example runs as its first lines say."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dsec.cluster.embedded import Endpoint

pytestmark = pytest.mark.e2e
EXAMPLES = Path(__file__).parent.parent.parent / "examples"
SAID = {
    "quickstart.py": ["hello from sb-", "pypi: refused"],
    "burst.py": ["64 of 64 sandboxes created, used and removed"],
    "grading.py": [
        "fixes the bug: reward 1 (passed: ",
        "edits the tests: reward 0 (exit_code: ",
        "  tests/check.py does not count: belongs to the tests",
        "rewrites what runs them: reward 0 (exit_code: ",
        "  src/sitecustomize.py does not count: runs whenever Python starts",
        "  /usr/bin/python3.11 does not count: a program that others may call",
    ],
    "inspect_eval.py": ["3: It has 3 lines.", "accuracy 1 over 8 samples"],
    "preempted.py": [
        "turn 6: live, 7 lines",
        "killed in turn 7",
        "turn 6: replayed, 7 lines",
        "killed in turn 14",
        "turn 13: replayed, 14 lines",
        "turn 19: live, 20 lines",
        "finished with reward 1 after 40 steps",
    ],
    "services.py": ["the model is http://model", "the agent answers: desserts, says the model", "the name is gone"],
    "sync_client.py": ["1\n2\n3\nexit code 0\n", "the command exited with 2", "write project/count.sh", "files=1"],
    "worker_loop.py": [
        "loop in the worker: the trainer was killed at turn",
        "loop in the worker: 12 turns; 12 commands ran",
        "loop in the trainer: 12 turns; 12 commands ran",
        "the same trajectories",
    ],
}


def test_all_are_named_here() -> None:
    assert {path.name for path in EXAMPLES.glob("*.py")} == SAID.keys()


@pytest.mark.parametrize("name", SAID)
def test_example(platform: Endpoint, name: str) -> None:
    environment = {**os.environ, "DSEC_STATE": platform.state}
    ran = subprocess.run(
        [sys.executable, EXAMPLES / name], env=environment, timeout=100, check=True, capture_output=True, text=True
    )
    for text in SAID[name]:
        assert text in ran.stdout
    assert ran.stderr == ""
