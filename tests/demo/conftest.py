"""A small task of our own, so that unit tests need no download: its files, its layers, and a double to run them on."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from dsec.demo import prepare, trees, wheels
from dsec.demo.rollout import PreparedTask
from dsec.demo.scripts import record
from dsec.demo.tasks import Break, Sdist, Task
from dsec.layers.python import compile_tree

from .double import LocalClient, Tree

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


@pytest.fixture
def shm() -> Iterator[Path]:
    """On a filesystem of its own: an overlay does not take layers that lie inside its lowest one, the machine's root."""
    folder = Path("/dev/shm") / f"dsec-test-{os.getpid()}-{os.urandom(4).hex()}"
    folder.mkdir(mode=0o755)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def rehearsal(releases: tuple[Path, Path], shm: Path) -> tuple[LocalClient, PreparedTask]:
    """The small task prepared, and the double to roll it out on. Takes root and the Python of Debian 12."""
    if os.geteuid() != 0 or not Path("/usr/bin/python3.11").exists():
        pytest.skip("the double takes root and /usr/bin/python3.11")
    base, fixed = releases
    roots = {name: shm / name for name in ("workspace", "tests", "harness")}
    for root in roots.values():
        root.mkdir()
    trees.make_workspace(base, roots["workspace"])
    wheels.make_prefix(roots["workspace"], [])
    site = roots["workspace"] / wheels.PREFIX.lstrip("/") / wheels.SITE
    _lend_pytest(site)
    compile_tree(site, f"{wheels.PREFIX}/{wheels.SITE}")
    prepare._make_tests(TASK, fixed, roots["tests"])
    prepare._make_harness(roots["harness"])
    trees.make_hidden_tests(TASK, fixed, shm / "hidden")
    layers = {
        "workspace": Tree(roots["workspace"], prepare._workspace_config(TASK).env),
        "tests": Tree(roots["tests"], {}),
        "harness": Tree(roots["harness"], {}),
    }
    recordings = record(TASK, base, trees.real_fix(TASK, base, fixed), Break("calc/__init__.py", "double"))
    prepared = PreparedTask(TASK, "debian@12", "workspace", "harness", "tests", recordings, shm / "hidden")
    return LocalClient(layers, shm / "sandboxes"), prepared


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
