"""Which of an agent's changes reach the grading sandbox."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsec.demo.changes import Graded, Why, sift, source_globs
from dsec.protocol.specs import Change, ChangeKind

from .conftest import TASK


def wrote(path: str, data: bytes | None = b"x") -> Change:
    return Change(path=path.encode(), kind=ChangeKind.WRITE, mode=0o644, size=1, data=data)


def split(changes: list[Change]) -> Graded:
    return sift(TASK, changes, changes)


@pytest.mark.parametrize("path", ["calc/__init__.py", "calc/new.py", "calc/data/table.txt"])
def test_source_is_graded(path: str) -> None:
    graded = split([wrote(f"workspace/{path}")])
    assert [change.path for change in graded.keep] == [f"workspace/{path}".encode()]
    assert graded.dropped == ()


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("workspace/calc/tests/test_calc.py", Why.TESTS),
        ("workspace/calc/tests/new/test_more.py", Why.TESTS),
        ("workspace/conftest.py", Why.TEST_CONFIG),
        ("workspace/calc/conftest.py", Why.TEST_CONFIG),
        ("workspace/pytest.ini", Why.TEST_CONFIG),
        ("workspace/setup.cfg", Why.TEST_CONFIG),
        ("workspace/pyproject.toml", Why.TEST_CONFIG),
        ("workspace/sitecustomize.py", Why.STARTUP),
        ("workspace/calc/usercustomize.py", Why.STARTUP),
        ("opt/venv/lib/python3.11/site-packages/evil.pth", Why.STARTUP),
        ("opt/venv/lib/python3.11/site-packages/_pytest/runner.py", Why.OUTSIDE),
        ("usr/bin/python3", Why.OUTSIDE),
        ("root/.bashrc", Why.OUTSIDE),
        ("workspace2/calc/__init__.py", Why.OUTSIDE),
        ("workspace/calc/fast.so", Why.BINARY),
    ],
)
def test_what_could_forge_a_result_is_dropped_and_said(path: str, why: Why) -> None:
    graded = split([wrote(path)])
    assert graded.keep == ()
    assert [(drop.why, drop.suspicious) for drop in graded.dropped] == [(why, True)]


@pytest.mark.parametrize("path", ["workspace/README.md", "workspace/calcs/__init__.py", "workspace/calc2.py"])
def test_other_files_are_dropped_without_suspicion(path: str) -> None:
    graded = split([wrote(path)])
    assert graded.keep == ()
    assert [(drop.why, drop.suspicious) for drop in graded.dropped] == [(Why.NOT_SOURCE, False)]


@pytest.mark.parametrize(
    "path", ["workspace/calc/__pycache__/__init__.cpython-311.pyc", "workspace/calc/old.pyc", "workspace/.git/index"]
)
def test_bytecode_and_git_files_go_without_a_word(path: str) -> None:
    graded = split([wrote(path)])
    assert (graded.keep, graded.dropped) == ((), ())


@pytest.mark.parametrize("kind", [ChangeKind.SYMLINK, ChangeKind.SPECIAL])
def test_links_and_devices_in_the_source_are_dropped(kind: ChangeKind) -> None:
    graded = split([Change(path=b"workspace/calc/link.py", kind=kind, target=b"/etc/passwd")])
    assert graded.keep == ()
    assert graded.dropped[0].why is Why.SPECIAL


def test_deletion_of_source_is_graded_and_of_tests_is_not() -> None:
    gone = [
        Change(path=b"workspace/calc/util.py", kind=ChangeKind.DELETE),
        Change(path=b"workspace/calc/tests", kind=ChangeKind.DELETE),
    ]
    graded = split(gone)
    assert [change.path for change in graded.keep] == [b"workspace/calc/util.py"]
    assert graded.dropped[0].why is Why.TESTS


def test_source_too_large_to_carry_cannot_be_graded() -> None:
    assert split([wrote("workspace/calc/big.py", None)]).too_large
    assert not split([wrote("workspace/notes/big.bin", None)]).too_large


def test_deletions_and_replaced_folders_come_before_files() -> None:
    changes = [
        wrote("workspace/calc/a.py"),
        Change(path=b"workspace/calc/sub", kind=ChangeKind.MKDIR, opaque=True),
        Change(path=b"workspace/calc/plain", kind=ChangeKind.MKDIR),
        Change(path=b"workspace/calc/z.py", kind=ChangeKind.DELETE),
    ]
    kept = [change.path for change in split(changes).keep]
    assert kept == [b"workspace/calc/z.py", b"workspace/calc/sub", b"workspace/calc/a.py"]


@given(st.binary(min_size=1, max_size=60).filter(lambda data: b"\0" not in data))
def test_any_name_is_either_graded_or_shown_as_text(name: bytes) -> None:
    graded = split([Change(path=b"workspace/" + name, kind=ChangeKind.WRITE, data=b"")])
    for drop in graded.dropped:
        drop.path.encode("utf-8")
    assert all(change.path.startswith(b"workspace/calc") for change in graded.keep)


def test_contents_are_asked_for_source_only() -> None:
    assert source_globs(TASK) == ("workspace/calc", "workspace/calc/**")
    bare = wrote("workspace/calc/a.py", None)
    assert sift(TASK, [wrote("workspace/calc/a.py")], [bare]) == sift(TASK, [wrote("workspace/calc/a.py")], [])
