"""Stores and trees of the layer tests. They lie on a disk, because EROFS cannot be mounted from tmpfs or overlayfs."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from dsec.layers import LayerStore, build_directory
from dsec.layers.place import filesystem_of
from dsec.protocol.specs import LayerRef
from tests.layers.look import Answer, Task

Look = Callable[..., Answer]
Tiny = Callable[..., LayerRef]


@pytest.fixture(scope="session")
def disk() -> Iterator[Path]:
    """A scratch directory on a filesystem that a store can lie on."""
    for candidate in (tempfile.gettempdir(), "/var/tmp", "/var/cache"):
        if filesystem_of(Path(candidate)) not in ("tmpfs", "ramfs", "overlay"):
            with tempfile.TemporaryDirectory(prefix="dsec-layers-", dir=candidate) as directory:
                yield Path(directory)
            return
    pytest.skip("no directory on a disk here")


@pytest.fixture
def scratch(disk: Path) -> Iterator[Path]:
    directory = Path(tempfile.mkdtemp(dir=disk))
    yield directory
    shutil.rmtree(directory)


@pytest.fixture
def store(scratch: Path) -> LayerStore:
    return LayerStore(scratch / "store")


@pytest.fixture
def tiny(store: LayerStore, scratch: Path) -> Tiny:
    """`tiny("name@1", kind="base", files={"a/b": "text"})` publishes a small layer."""

    def build(ref: str, *, kind: str = "base", files: dict[str, str] | None = None, **options: object) -> LayerRef:
        name, _, version = ref.partition("@")
        tree = Path(tempfile.mkdtemp(dir=scratch))
        for path, text in (files or {"file": ref}).items():
            (tree / path).parent.mkdir(parents=True, exist_ok=True)
            (tree / path).write_text(text)
            os.utime(tree / path, (1_700_000_000, 1_700_000_000))
        for directory, _, _ in os.walk(tree):
            os.utime(directory, (1_700_000_000, 1_700_000_000))
        return build_directory(store, tree, name=name, version=version, kind=kind, **options)  # type: ignore[arg-type]

    return build


@pytest.fixture
def look(store: LayerStore, scratch: Path) -> Look:
    """`look("a@1", "b@2", script="...")`: what a sandbox of these layers would see, base first."""
    if os.geteuid() != 0:
        pytest.skip("mounting needs root")

    def see(*refs: str, script: str = "") -> Answer:
        layers = []
        for ref in refs:
            meta, data = store.paths(store.resolve(ref))
            layers.append([str(meta), *map(str, data)])
        task = msgspec.json.encode(Task(tempfile.mkdtemp(dir=scratch), layers, script))
        run = subprocess.run([sys.executable, "-m", "tests.layers.look"], input=task, capture_output=True, check=False)
        assert run.returncode == 0, run.stderr.decode()
        return msgspec.msgpack.decode(run.stdout, type=Answer)

    return see
