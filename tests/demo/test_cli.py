"""`dsec demo`: what it refuses, and how it ends."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import msgspec
import pytest

from dsec.cli import demo as command
from dsec.cli.main import invoke
from dsec.demo import prepare
from dsec.demo.records import Burst
from dsec.demo.rollout import PreparedTask

from .double import LocalClient

Rehearsal = tuple[LocalClient, PreparedTask]


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
def on_the_double(rehearsal: Rehearsal, monkeypatch: pytest.MonkeyPatch) -> LocalClient:
    """The command with the small task for its tasks and the double for its platform."""
    client, ready = rehearsal

    @contextmanager
    def prepared(tasks: Sequence[object], *_: object) -> Iterator[list[PreparedTask]]:
        yield [ready]

    @asynccontextmanager
    async def platform() -> AsyncIterator[LocalClient]:
        yield client

    monkeypatch.setattr(prepare, "prepared", prepared)
    monkeypatch.setattr(command, "_platform", platform)
    return client


def test_a_good_burst_writes_its_files_and_exits_with_0(
    on_the_double: LocalClient, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = ["--json", str(tmp_path / "out.json"), "--report", str(tmp_path / "out.html")]
    assert invoke(["demo", "--tasks", "1", "--rollouts", "4", "--concurrency", "2", *files]) == 0
    burst = msgspec.json.decode((tmp_path / "out.json").read_bytes(), type=Burst)
    assert burst.ok and len(burst.rollouts) == 4
    assert (tmp_path / "out.html").read_text().startswith("<!doctype html>")
    printed = capsys.readouterr().out
    assert "calc-2" in printed and "4 valid, 0 invalid" in printed


def test_an_invalid_sample_gives_exit_code_1_and_is_named(
    on_the_double: LocalClient, capsys: pytest.CaptureFixture[str]
) -> None:
    on_the_double.fail = {0: TimeoutError("no answer")}
    assert invoke(["demo", "--tasks", "1", "--rollouts", "1"]) == 1
    assert "INVALID calc-2 fix #0: TimeoutError: no answer" in capsys.readouterr().out
