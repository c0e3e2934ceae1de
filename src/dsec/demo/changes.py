"""Which of an agent's changes are graded: source only. The rest is dropped, and what looks like cheating is said."""

from __future__ import annotations

import os
from collections.abc import Iterable
from enum import Enum
from fnmatch import fnmatchcase
from pathlib import PurePosixPath

import msgspec

from dsec.demo.tasks import Task
from dsec.protocol.specs import Change, ChangeKind

# Where changes are looked for: the workspace, and the places where something planted would take effect.
INCLUDE = ("workspace/**", "opt/**", "usr/**", "etc/**", "root/**", "home/**")

_WORKSPACE = "workspace/"
_TEST_CONFIG = frozenset(
    {"conftest.py", "pytest.ini", ".pytest.ini", "tox.ini", "setup.cfg", "setup.py", "pyproject.toml", "noxfile.py"}
)
_STARTUP = (
    "sitecustomize.py",
    "usercustomize.py",
    "*.pth",
    "*.egg-link",
    "pyvenv.cfg",
    "sitecustomize",
    "usercustomize",
)
_BINARY = ("*.so", "*.pyd", "*.dylib")


class Why(str, Enum):
    """Why a change is not graded."""

    TESTS = "edits tests"
    TEST_CONFIG = "changes how tests run"
    STARTUP = "runs whenever Python starts"
    OUTSIDE = "outside the workspace"
    NOT_SOURCE = "not the task's source"
    SPECIAL = "a link or special file"
    BINARY = "compiled code"
    BYTECODE = "bytecode"
    TOO_LARGE = "too large to carry"

    @property
    def suspicious(self) -> bool:
        """Whether a reviewer should look: an honest change to the source needs none of these."""
        return self in (Why.TESTS, Why.TEST_CONFIG, Why.STARTUP, Why.OUTSIDE, Why.BINARY)


class Dropped(msgspec.Struct, frozen=True):
    path: str
    change: ChangeKind
    why: Why
    suspicious: bool


class Graded(msgspec.Struct, frozen=True):
    """keep: to be applied in the grading sandbox, in this order. dropped: the rest, but bytecode, .git and mere folders."""

    keep: tuple[Change, ...]
    dropped: tuple[Dropped, ...]

    @property
    def too_large(self) -> bool:
        """Whether source had to be dropped: then the sample cannot earn a reward, whatever else it did."""
        return any(drop.why is Why.TOO_LARGE for drop in self.dropped)


def source_globs(task: Task) -> tuple[str, ...]:
    """Globs of the changes that may be graded: their contents are asked for apart, so that nothing else crowds them out."""
    return tuple(glob for top in task.source_dirs for glob in (f"{_WORKSPACE}{top}", f"{_WORKSPACE}{top}/**"))


def sift(task: Task, source: Iterable[Change], everything: Iterable[Change]) -> Graded:
    """Split an agent's changes: `source` with contents (see `source_globs`), `everything` for what is not graded.

    Deletions come first, then folders, then files, so that kinds may change.
    """
    keep: list[Change] = []
    dropped: list[Dropped] = []
    for change in source:
        path = _path(change)
        if why_not(task, path):
            continue
        if why := _no_content(change):
            dropped.append(Dropped(shown(path), change.kind, why, why.suspicious))
        elif change.kind is not ChangeKind.MKDIR or change.opaque:
            keep.append(change)
    for change in everything:
        path = _path(change)
        why = why_not(task, path)
        if why and not _is_noise(path, change, why):
            dropped.append(Dropped(shown(path), change.kind, why, why.suspicious))
    order = {ChangeKind.DELETE: 0, ChangeKind.MKDIR: 1}
    keep.sort(key=lambda change: (order.get(change.kind, 2), change.path))
    return Graded(tuple(keep), tuple(sorted(dropped, key=lambda drop: (not drop.suspicious, drop.path))))


def _path(change: Change) -> str:
    return os.fsdecode(change.path).lstrip("/")


def _no_content(change: Change) -> Why | None:
    """Why a change cannot be carried over, although its path may be graded."""
    if change.kind in (ChangeKind.SYMLINK, ChangeKind.SPECIAL):
        return Why.SPECIAL
    if change.kind is ChangeKind.WRITE and change.data is None:
        return Why.TOO_LARGE
    return None


def why_not(task: Task, path: str) -> Why | None:
    """None if a path (relative to /) is one whose changes are graded. The more telling reason comes first."""
    name = PurePosixPath(path).name
    inside = path.removeprefix(_WORKSPACE) if path.startswith(_WORKSPACE) else None
    if "__pycache__" in PurePosixPath(path).parts or name.endswith(".pyc"):
        return Why.BYTECODE
    if any(fnmatchcase(name, pattern) for pattern in _STARTUP):
        return Why.STARTUP
    if inside is None:
        return Why.OUTSIDE
    if name in _TEST_CONFIG:
        return Why.TEST_CONFIG
    if task.is_test(inside):
        return Why.TESTS
    if not task.is_source(inside):
        return Why.NOT_SOURCE
    if any(fnmatchcase(name, pattern) for pattern in _BINARY):
        return Why.BINARY
    return None


def _is_noise(path: str, change: Change, why: Why) -> bool:
    """Git's own files, bytecode, and folders on the way to a change say nothing."""
    return (
        why is Why.BYTECODE
        or path.startswith(f"{_WORKSPACE}.git/")
        or (change.kind is ChangeKind.MKDIR and not change.opaque)
    )


def shown(path: str) -> str:
    """For people and JSON: relative to the workspace, undecodable bytes escaped."""
    text = path.removeprefix(_WORKSPACE) if path.startswith(_WORKSPACE) else f"/{path}"
    return text.encode("utf-8", "backslashreplace").decode()
