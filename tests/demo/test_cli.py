"""`dsec demo`: what it refuses, and how it ends."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

from dsec.cli import demo as command
from dsec.cli.main import invoke
from dsec.demo import prepare
from dsec.demo.records import Burst, Rollout, summarise
from dsec.demo.rollout import PreparedTask
from dsec.demo.scripts import Script

from .test_report import rollout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--task-ids", "nothing-1"], "no task nothing-1"),
        (["--tasks", "29"], "29 tasks asked"),
        (["--tasks", "0"], "--tasks"),
        (["--json", "/nowhere/out.json"], "no directory for /nowhere/out.json"),
    ],
)
def test_bad_input_is_two_lines(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DSEC_DEBUG", raising=False)
    assert invoke(["demo", *arguments]) != 0
    shown = capsys.readouterr().err.splitlines()
    assert len(shown) == 2
    assert shown[0].startswith("error: ") and message in shown[0]
    assert shown[1].startswith(("hint: ", "see: "))


@pytest.fixture
def burst(monkeypatch: pytest.MonkeyPatch) -> list[Rollout]:
    """The command without tasks and platform; what its burst gives is what is put in here."""
    given: list[Rollout] = []

    @contextmanager
    def prepared(*_: object) -> Iterator[list[PreparedTask]]:
        yield []

    async def ran(*_: object) -> Burst:
        return summarise(given, concurrency=2, seed=0, wall_s=1.0, prepare_s=0.1)

    monkeypatch.setattr(prepare, "prepared", prepared)
    monkeypatch.setattr(command, "_burst", ran)
    return given


def test_a_good_burst_writes_its_files_and_exits_with_0(
    burst: list[Rollout], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    burst += [rollout(Script.FIX, 0, 1, 1), rollout(Script.CHEAT, 1, 0, 1)]
    files = ["--json", str(tmp_path / "out.json"), "--report", str(tmp_path / "out.html")]
    assert invoke(["demo", "--tasks", "1", "--rollouts", "2", *files]) == 0
    written = msgspec.json.decode((tmp_path / "out.json").read_bytes(), type=Burst)
    assert written.ok and len(written.rollouts) == 2
    assert (tmp_path / "out.html").read_text().startswith("<!doctype html>")
    printed = capsys.readouterr().out
    assert "calc-2" in printed and "2 valid, 0 invalid" in printed


def test_an_invalid_sample_gives_exit_code_1_and_is_named(
    burst: list[Rollout], capsys: pytest.CaptureFixture[str]
) -> None:
    burst += [rollout(Script.FIX, 0, None, None)]
    assert invoke(["demo", "--tasks", "1", "--rollouts", "1"]) == 1
    assert "INVALID calc-2 fix #0: CapacityError: full" in capsys.readouterr().out
