"""Tasks: pairs of consecutive releases of a pure-Python package, with the tests that tell them apart."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache
from pathlib import Path, PurePosixPath

import msgspec

from dsec.demo.errors import DemoError

TASKS_FILE = Path(__file__).with_name("tasks.json")
BREAKS_FILE = Path(__file__).with_name("breaks.json")

# Small gold patches whose tests run in about a second: the burst then shows the platform, not pytest.
DEFAULT_TASKS = (
    "xmltodict-0.13.0",
    "jsonpatch-1.33",
    "pathspec-0.11.2",
    "email-validator-2.1.1",
    "bleach-6.1.0",
    "h11-0.15.0",
    "voluptuous-0.15.1",
    "simpleeval-1.0.0",
)


class Sdist(msgspec.Struct, frozen=True):
    """A source distribution as the package index has it."""

    filename: str
    sha256: str
    bytes: int


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """One bug-fix task.

    base is the buggy release, fixed the next one. The fixed release's `source_dirs` over the base are the real fix, its
    `test_paths` the hidden tests. `fail_to_pass` pass only with the fix; `pass_to_pass` pass both ways.
    All paths are relative to the root of the tree. `pythonpath` is the folder, in the tree, that tests import from.
    """

    id: str
    package: str
    base_version: str
    fixed_version: str
    sdist_base: Sdist
    sdist_fixed: Sdist
    source_dirs: tuple[str, ...]
    test_paths: tuple[str, ...]
    requirements: tuple[str, ...]
    pythonpath: str
    test_command: tuple[str, ...]
    fail_to_pass: tuple[str, ...]
    pass_to_pass: tuple[str, ...]
    seconds: float
    gold_diff_lines: int

    @property
    def expected(self) -> tuple[str, ...]:
        """Every test that must pass for a reward of 1."""
        return self.fail_to_pass + self.pass_to_pass

    def is_test(self, path: str) -> bool:
        """Whether a path of the tree belongs to the tests, which may lie inside a source folder."""
        return any(_under(path, top) for top in self.test_paths)

    def is_source(self, path: str) -> bool:
        """Whether a path of the tree is source that an agent is asked to work on."""
        return any(_under(path, top) for top in self.source_dirs) and not self.is_test(path)


class Break(msgspec.Struct, frozen=True):
    """A function whose body, made to raise, breaks at least one pass-to-pass test and leaves others passing."""

    path: str
    function: str


def _under(path: str, top: str) -> bool:
    return PurePosixPath(path).is_relative_to(top)


@cache
def load(path: Path = TASKS_FILE) -> tuple[Task, ...]:
    """All tasks of a file, in its order."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=tuple[Task, ...])
    except (OSError, msgspec.DecodeError) as error:
        raise DemoError(f"cannot read the tasks in {path}: {error}", hint="restore examples/demo/tasks.json") from error


@cache
def load_breaks(path: Path = BREAKS_FILE) -> dict[str, Break]:
    """Recorded breaking edits by task id."""
    return msgspec.json.decode(path.read_bytes(), type=dict[str, Break])


def select(ids: Sequence[str], count: int, seed: int) -> tuple[Task, ...]:
    """The named tasks, or `count` of them: the default eight first, then the others in an order that the seed gives."""
    by_id = {task.id: task for task in load()}
    unknown = [name for name in ids if name not in by_id]
    if unknown:
        raise DemoError(f"no task {', '.join(unknown)}", hint=f"tasks: {', '.join(sorted(by_id))}")
    if ids:
        return tuple(by_id[name] for name in dict.fromkeys(ids))
    if not 1 <= count <= len(by_id):
        raise DemoError(f"{count} tasks asked", hint=f"there are {len(by_id)}: pass --tasks 1 to {len(by_id)}")
    rest = [name for name in by_id if name not in DEFAULT_TASKS]
    random.Random(seed).shuffle(rest)
    return tuple(by_id[name] for name in [*DEFAULT_TASKS, *rest][:count])
