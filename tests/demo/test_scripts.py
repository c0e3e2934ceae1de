"""The recordings: edits that really turn one text into the other, and scripts that take turns."""

from __future__ import annotations

import json
import subprocess
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsec.demo.scripts import Script, Tool, Write, edits, functions, order, raise_in, record, unified
from dsec.demo.tasks import load, load_breaks
from dsec.demo.trees import FileFix, real_fix

from .conftest import CALC_NEW, CALC_OLD, TASK

lines = st.lists(st.sampled_from(["a\n", "b\n", "    return\n", "\n", "x = 1\n"]), max_size=30)


@given(lines, lines)
def test_edits_applied_one_by_one_give_the_new_text(old: list[str], new: list[str]) -> None:
    text = "".join(old)
    for before, after in edits(old, new):
        assert not text or text.count(before) == 1
        text = text.replace(before, after, 1)
    assert text == "".join(new)


@pytest.mark.parametrize(("old", "new"), [(CALC_OLD, CALC_NEW), (None, CALC_NEW), (CALC_OLD, None)])
def test_git_takes_the_diff(tmp_path: Path, old: str | None, new: str | None) -> None:
    target = tmp_path / "calc.py"
    if old is not None:
        target.write_text(old)
    change = FileFix("calc.py", old.encode() if old else None, new.encode() if new else None)
    subprocess.run(["git", "apply", "-"], input=unified(change).encode(), cwd=tmp_path, check=True)
    assert (target.read_text() if target.exists() else None) == new


@pytest.mark.parametrize("indent", ["    ", "\t"])
def test_a_broken_function_raises_and_nothing_else_does(indent: str) -> None:
    text = raise_in(CALC_OLD.replace("    ", indent), "double")
    names: dict[str, object] = {}
    exec(text, names)
    add, double = names["add"], names["double"]
    assert callable(add) and callable(double)
    assert add(3, 1) == 2
    with pytest.raises(RuntimeError):
        double(1)


def test_methods_are_found_by_dotted_name() -> None:
    text = "class A:\n    def b(self):\n        return 1\n    def short(self): return 2\n"
    assert [name for name, _ in functions(text)] == ["A.b"]


def test_scripts_take_turns_from_the_seed() -> None:
    assert order(4, 0, 0) == list(Script)
    assert Counter(order(8, 3, 1)) == dict.fromkeys(Script, 2)
    assert order(1, 0, 1) != order(1, 0, 0)


def test_recordings_hold_what_their_names_say(releases: tuple[Path, Path]) -> None:
    base, fixed = releases
    made = record(TASK, base, real_fix(TASK, base, fixed), None)
    assert set(made) == set(Script)
    calls = {script: [call for turn in made[script].turns for call in turn.calls] for script in Script}
    edit = next(call for call in calls[Script.FIX] if isinstance(call, Tool) and call.arguments[0] == "edit")
    assert edit.arguments[1] == "calc/__init__.py"
    assert "a + b" in json.loads(edit.stdin or b"")["new"]
    planted = {Path(call.path).name for call in calls[Script.CHEAT] if isinstance(call, Write)}
    assert planted == {"conftest.py", "sitecustomize.py"}
    assert not any(isinstance(call, Write) for call in calls[Script.NOOP])


def test_every_task_has_a_recorded_break() -> None:
    assert {task.id for task in load()} == set(load_breaks())
