"""A small task of our own, so that unit tests need no download: its files, its layers, and a double to run them on."""

from __future__ import annotations

import shutil
from importlib.metadata import distribution
from importlib.util import find_spec
from pathlib import Path

import pytest

from dsec.demo import prepare, trees, wheels
from dsec.demo.rollout import PreparedTask
from dsec.demo.scripts import record
from dsec.demo.tasks import Break, Sdist, Task
from dsec.layers import DEFAULT_BASE, Config, LayerStore
from dsec.layers.python import compile_tree

CALC_OLD = '''\
"""Arithmetic."""


def add(a, b):
    """The sum."""
    return a - b


def double(a):
    return 2 * a
'''
CALC_NEW = CALC_OLD.replace("a - b", "a + b")
OLD_TESTS = "from calc import double\n\n\ndef test_double():\n    assert double(2) == 4\n"
NEW_TESTS = OLD_TESTS + "\n\ndef test_add():\n    from calc import add\n\n    assert add(2, 3) == 5\n"

TASK = Task(
    id="calc-2",
    package="calc",
    base_version="1",
    fixed_version="2",
    sdist_base=Sdist("calc-1.tar.gz", "0" * 64, 0),
    sdist_fixed=Sdist("calc-2.tar.gz", "0" * 64, 0),
    source_dirs=("calc",),
    test_paths=("calc/tests",),
    requirements=(),
    pythonpath=".",
    test_command=("python", "-m", "pytest", "-q", "-rpfE", "--color=no", "-p", "no:cacheprovider", "calc/tests"),
    fail_to_pass=("calc/tests/test_calc.py::test_add",),
    pass_to_pass=("calc/tests/test_calc.py::test_double",),
    seconds=0.1,
    gold_diff_lines=2,
)


def write_release(root: Path, source: str, tests: str) -> Path:
    files = {
        "calc/__init__.py": source,
        "calc/util.py": "def unused():\n    return 1\n",
        "calc/tests/__init__.py": "",
        "calc/tests/test_calc.py": tests,
        "setup.cfg": "[tool:pytest]\ntestpaths = calc/tests\n",
    }
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.fixture
def releases(tmp_path: Path) -> tuple[Path, Path]:
    """The trees of both releases: base and fixed."""
    return write_release(tmp_path / "base", CALC_OLD, OLD_TESTS), write_release(tmp_path / "fixed", CALC_NEW, NEW_TESTS)


def small_task(store: LayerStore, folder: Path) -> PreparedTask:
    """The small task with its layers in a store, ready to be rolled out on a real platform."""
    base = write_release(folder / "base", CALC_OLD, OLD_TESTS)
    fixed = write_release(folder / "fixed", CALC_NEW, NEW_TESTS)
    hidden = folder / "hidden"
    trees.make_hidden_tests(TASK, fixed, hidden)

    def make_workspace(root: Path) -> None:
        trees.make_workspace(base, root)
        wheels.make_prefix(root, [])
        site = root / wheels.PREFIX.lstrip("/") / wheels.SITE
        _lend_pytest(site)
        compile_tree(site, f"{wheels.PREFIX}/{wheels.SITE}")

    prepare._build(store, "task-calc@1", "workspace", "2", make_workspace, prepare._workspace_config(TASK))
    prepare._build(
        store, "hidden-calc@2", "toolkit", "1", lambda root: prepare._make_tests(TASK, hidden, root), Config()
    )
    prepare.build_harness(store)
    recordings = record(TASK, base, trees.real_fix(TASK, base, fixed), Break("calc/__init__.py", "double"))
    return PreparedTask(TASK, DEFAULT_BASE, "task-calc@1", prepare.HARNESS, "hidden-calc@2", recordings, hidden)


def _lend_pytest(site: Path) -> None:
    """The pytest that runs here, copied: the sandbox's Python has the same minor version or can read the sources."""
    for name in ("pytest", "_pytest", "py", "pluggy", "iniconfig", "packaging", "pygments"):
        spec = find_spec(name)
        if spec is None or spec.origin is None:
            continue
        source = Path(spec.origin)
        if source.name == "__init__.py":
            shutil.copytree(source.parent, site / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy2(source, site / source.name)
    for name in ("pytest", "pluggy"):  # they look for their own versions
        found = next(path for path in distribution(name).files or () if path.name == "METADATA")
        (site / found.parent.name).mkdir()
        shutil.copy(str(distribution(name).locate_file(found)), site / found.parent.name)
