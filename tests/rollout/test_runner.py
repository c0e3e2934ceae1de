"""The pieces of the pytest runner: what is written into tests, and that the guard looks nothing up that could be changed."""

from __future__ import annotations

import ast
import dis
import random
import subprocess
import sys
import types
from pathlib import Path

import pytest

from dsec.rollout.grading.runner import guard, main, marks, scales, source

SOURCE = b"""
import pytest


def test_plain():
    assert 1 + 1 == 2


def test_returns(value):
    if value:
        return value
    with pytest.raises(ValueError):
        int("x")


async def test_async():
    return


def test_yields():
    yield 1


def helper():
    def test_inner():
        return 1
    return test_inner


class TestClass:
    def test_method(self):
        def inner():
            return 3
        assert inner() == 3 and "a" in "abc"
"""


def _marked(canaries: int = 0) -> marks.Marked:
    return marks.mark(SOURCE, "tests/test_x.py", 0, random.Random(1), canaries)


def _ends(node: ast.AST) -> int:
    found = [one for one in ast.walk(node) if isinstance(one, ast.Constant) and str(one.value).startswith(marks.END)]
    return len(found)


def test_each_way_out_of_a_test_is_marked() -> None:
    marked = _marked()
    assert set(marked.paths.values()) == {
        f"tests/test_x.py::{name}" for name in ("test_plain", "test_returns", "test_async", "TestClass::test_method")
    }
    functions = {node.name: node for node in ast.walk(marked.tree) if isinstance(node, ast.FunctionDef)}
    assert {name: _ends(node) for name, node in functions.items()} == {
        "test_plain": 1,
        "test_returns": 2,
        "test_yields": 0,
        "helper": 0,
        "test_inner": 0,
        "test_method": 1,
        "inner": 0,
    }


def test_marked_tests_do_what_they_did() -> None:
    """With the marks doing nothing, values and order of evaluation are as before."""
    tree = marks.mark(
        b"def test_it(log):\n"
        b"    def note(x):\n        log.append(x)\n        return x\n"
        b"    assert note(1) == note(1)\n"
        b"    assert note(2) != note(3) and note(4) == note(4)\n"
        b"    return [note(5)]\n",
        "t.py", 0, random.Random(1), 0,
    ).tree  # fmt: skip
    found: dict[str, object] = {}
    nothing = {
        marks.EQUAL: lambda left, right: left == right,
        **{
            name: (lambda *_: None)
            for name in (marks.CHECK, marks.ENTER, marks.WEIGH, marks.SEAL, f"{marks.END}0", "\0dsec:globals")
        },
    }

    def embed(code: types.CodeType) -> types.CodeType:
        return code.replace(
            co_consts=tuple(
                embed(const)
                if isinstance(const, types.CodeType)
                else nothing.get(const, const)
                if isinstance(const, str)
                else const
                for const in code.co_consts
            )
        )

    with pytest.warns(SyntaxWarning):
        code = compile(tree, "t.py", "exec")
    exec(embed(code), found)
    log: list[int] = []
    assert found["test_it"](log) == [5]  # type: ignore[operator]
    assert log == [1, 1, 2, 3, 4, 4, 5]


def test_canaries_are_named_like_their_neighbours_and_cannot_pass() -> None:
    marked = _marked(canaries=3)
    assert len(marked.canaries) == len({canary.name for canary in marked.canaries}) == 3
    for canary in marked.canaries:
        (node,) = [one for one in marked.tree.body if isinstance(one, ast.FunctionDef) and one.name == canary.name]
        text = ast.unparse(ast.fix_missing_locations(node)).split("assert ")[1].split("\n")[0]
        assert canary.path in marked.paths.values()
        assert "value" in text or "@left" in text


@pytest.mark.parametrize(("piece", "name"), [(guard, "make_guard"), (scales, "make_weigh")])
def test_the_guard_looks_nothing_up(piece: types.ModuleType, name: str) -> None:
    """Names of modules and builtins can be rebound by the code under test; what a closure holds cannot."""
    (factory,) = [
        const for const in compile(Path(str(piece.__file__)).read_text(), "guard", "exec").co_consts
        if isinstance(const, types.CodeType) and const.co_name == name
    ]  # fmt: skip
    todo = [const for const in factory.co_consts if isinstance(const, types.CodeType)]
    seen = 0
    while todo:
        code = todo.pop()
        seen += 1
        todo += [const for const in code.co_consts if isinstance(const, types.CodeType)]
        looked_up = {one.argval for one in dis.get_instructions(code) if one.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
        if code.co_name != "<lambda>":  # installs the hook, before anything of the agent's is there
            assert looked_up == set(), (code.co_name, looked_up)
    assert seen > 10


def test_output_is_shown_without_canaries() -> None:
    text = (
        "F.F                     [100%]\n=== FAILURES ===\n____ test_canary ____\nthis must fail\n____ test_real ____\n"
        "assert 1 == 2\n=== short test summary info ===\nFAILED t.py::test_canary - x\nFAILED t.py::test_real - assert 1 == 2\n"
        "2 failed, 1 passed in 0.02s\n"
    )
    shown = main.without(text, ["test_canary"])
    assert "canary" not in shown and "must fail" not in shown and "2 failed" not in shown
    assert "assert 1 == 2" in shown and "FAILED t.py::test_real" in shown


def test_the_program_is_one_file(tmp_path: Path) -> None:
    """It starts with nothing but itself, and says at once what it lacks."""
    path = tmp_path / "runner.py"
    path.write_bytes(source())
    script = f"exec 3>{tmp_path}/verdict; exec {sys.executable} -I -S {path}"
    done = subprocess.run(["/bin/sh", "-c", script], input=b"no job", capture_output=True)
    assert done.returncode == 1
    assert b"JSONDecodeError" in done.stderr
    assert (tmp_path / "verdict").read_bytes() == b""
