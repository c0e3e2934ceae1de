"""From tasks to layers: a workspace and a hidden-tests layer per task, one toolkit with the agent's tools, the base."""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import MAGIC_NUMBER
from pathlib import Path

import msgspec

from dsec.demo import trees, wheels
from dsec.demo.errors import DemoError
from dsec.demo.fetch import cache_dir, fetch, wheel_path
from dsec.demo.rollout import PreparedTask
from dsec.demo.scripts import record
from dsec.demo.tasks import Task, load_breaks
from dsec.layers import DEFAULT_BASE, Config, Kind, LayerStore, build_directory
from dsec.protocol.errors import ErrorKind, Fault

HARNESS = "agent-harness@2"
_RECIPE = "1"  # grows when the way trees are made changes what is in them
_HERE = Path(__file__).parent
_HARNESS_CONFIG = Config(env={"PATH": "/opt/dsec-agent/bin:${PATH}"})

Progress = Callable[[str], None]


@contextmanager
def prepared(tasks: Sequence[Task], store: LayerStore, progress: Progress) -> Iterator[list[PreparedTask]]:
    """Download, build what the store lacks, and yield the tasks ready to roll out. Trees on this side go at the end."""
    _ensure_base(store, progress)
    fetch(tasks, cache_dir(), lambda what: progress(f"downloaded {what}"))
    with tempfile.TemporaryDirectory(prefix="dsec-demo-") as folder:
        build_harness(store)
        yield [_prepare(task, store, Path(folder) / task.id, progress) for task in tasks]


def build_harness(store: LayerStore) -> None:
    """The toolkit with the tools that an agent calls."""
    _build(store, HARNESS, "toolkit", _digest(_HERE / "harness"), _make_harness, _HARNESS_CONFIG)


def _ensure_base(store: LayerStore, progress: Progress) -> None:
    """The base layer, built when it is not there: a few minutes, once."""
    try:
        store.resolve(DEFAULT_BASE)
    except Fault as fault:
        if fault.body.kind is not ErrorKind.NOT_FOUND:
            raise
        from dsec.layers import build_debian

        progress(f"building {DEFAULT_BASE}: a few minutes, once on this machine")
        build_debian(store, progress=lambda stage, done: progress(f"{DEFAULT_BASE}: {stage}, {done:.0%}"))


def _prepare(task: Task, store: LayerStore, folder: Path, progress: Progress) -> PreparedTask:
    cache = cache_dir()
    base = trees.unpack(cache, task.sdist_base, folder / "base")
    fixed = trees.unpack(cache, task.sdist_fixed, folder / "fixed")
    recipe = hashlib.sha256(msgspec.json.encode(task) + MAGIC_NUMBER + _RECIPE.encode()).hexdigest()
    workspace, tests = f"task-{task.id}@{task.base_version}", f"hidden-{task.id}@{task.fixed_version}"

    def make_workspace(root: Path) -> None:
        trees.make_workspace(base, root)
        wheels.make_prefix(root, [_wheel(cache, requirement) for requirement in task.requirements])

    if _build(store, workspace, "workspace", recipe, make_workspace, _workspace_config(task)):
        progress(f"built {workspace}")
    hidden = folder / "hidden"
    trees.make_hidden_tests(task, fixed, hidden)
    if _build(store, tests, "toolkit", recipe, lambda root: _make_tests(task, hidden, root), Config()):
        progress(f"built {tests}")
    recordings = record(task, base, trees.real_fix(task, base, fixed), load_breaks().get(task.id))
    return PreparedTask(task, DEFAULT_BASE, workspace, HARNESS, tests, recordings, hidden)


def _wheel(cache: Path, requirement: str) -> Path:
    path = wheel_path(cache, requirement)
    if path is None:
        raise DemoError(
            f"no wheel of {requirement} in {cache}", hint="run the demo again: it downloads what is missing"
        )
    return path


def _build(store: LayerStore, ref: str, kind: Kind, recipe: str, make: Callable[[Path], None], config: Config) -> bool:
    """Publish a layer unless the store has one made by the same recipe, whole. Returns whether it was built."""
    name, version = ref.split("@")
    try:
        present = store.resolve(ref)
        store.paths(present)
        if present.labels.get("recipe") == recipe:
            return False
    except Fault as fault:
        if fault.body.kind not in (ErrorKind.NOT_FOUND, ErrorKind.CREATE_FAILED):
            raise
    with tempfile.TemporaryDirectory(prefix="dsec-demo-layer-") as folder:
        root = Path(folder, "root")
        root.mkdir(mode=0o755)
        make(root)
        labels = {"recipe": recipe}
        build_directory(
            store, root, name=name, version=version, kind=kind, config=config, labels=labels, owner=(0, 0), force=True
        )
    return True


def _workspace_config(task: Task) -> Config:
    path = f"{wheels.PREFIX}/bin:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"
    search = trees.WORKSPACE if task.pythonpath == "." else f"{trees.WORKSPACE}/{task.pythonpath}"
    python = {"PYTHONPATH": search, "PYTHONHASHSEED": "0", "PYTHONDONTWRITEBYTECODE": "1"}
    return Config(env={"PATH": path, **python, "LANG": "C.UTF-8", "TZ": "UTC"}, workdir=trees.WORKSPACE)


def _make_harness(root: Path) -> None:
    _install(_HERE / "harness" / "dsec_agent.py", root / "opt/dsec-agent/bin/dsec-agent", 0o755)
    _install(_HERE / "harness" / "mark.sh", root / "opt/dsec-agent/lib/mark.sh", 0o644)


def _make_tests(task: Task, hidden: Path, root: Path) -> None:
    """What only a grading sandbox mounts: the hidden tests in their places. Old ones stay beside them; no list names those."""
    for top in task.test_paths:
        source, target = hidden / top, root / trees.WORKSPACE.lstrip("/") / top
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target, symlinks=True)
        elif source.exists():
            shutil.copy2(source, target)
    for path in root.rglob("*"):
        if not path.is_symlink():
            path.chmod(0o755 if path.is_dir() else 0o644)


def _install(source: Path, target: Path, mode: int) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(source.read_bytes())
    target.chmod(mode)


def _digest(folder: Path) -> str:
    """Of the programs that go into a layer."""
    files = sorted(path for path in folder.iterdir() if path.is_file())
    return hashlib.sha256(b"\0".join(path.read_bytes() for path in files)).hexdigest()
