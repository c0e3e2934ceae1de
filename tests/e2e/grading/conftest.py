"""A small repository with a bug, the hidden tests of its fix, and an agent that changes it."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

import dsec
from dsec.layers import LayerStore, build_directory
from dsec.protocol.errors import Fault

from ..conftest import BASE

WORKSPACE, TESTS = "grading-shop", "grading-shop-tests"
BUGGY = "def total(prices):\n    return sum(prices[1:])\n"
FIXED = "def total(prices):\n    return sum(prices)\n"
TREE = {
    "src/shop/__init__.py": BUGGY,
    "src/shop/old.py": "gone = False\n",
    "src/shop/legacy/conftest.py": "# of the repository's own\n",
    "src/shop/legacy/a.py": "a = 1\n",
    "tests/test_visible.py": "def test_nothing(): pass\n",
    "docs/readme.txt": "a shop\n",
    "conftest.py": "",
    "pytest.ini": "[pytest]\n",
}
HIDDEN = {
    "tests/test_hidden.py": "def test_total():\n    assert True\n",
    "check.py": (
        "import sys\n"
        "sys.path.insert(0, '/workspace/src')\n"
        "import shop\n"
        "sys.exit(0 if shop.total([1, 2, 3]) == 6 else 3)\n"
    ),
}


def publish(store: LayerStore, folder: Path, name: str, kind: str, files: dict[str, str]) -> str:
    for path, text in files.items():
        where = folder / name / path
        where.parent.mkdir(parents=True, exist_ok=True)
        where.write_text(text)
    ref = build_directory(
        store,
        folder / name,
        name=name,
        version="1",
        kind=kind,
        prefix="/workspace",
        owner=(0, 0),
        force=True,  # type: ignore[arg-type]
    )
    return f"{ref.name}@{ref.digest}"


class Shop:
    """The layers, and what everybody grades them with."""

    def __init__(self, client: dsec.DSecClient, store: LayerStore, folder: Path) -> None:
        self.client = client
        self._store = store
        self._folder = folder
        self.workspace = publish(store, folder, WORKSPACE, "workspace", TREE)
        self.tests = publish(store, folder, TESTS, "toolkit", HIDDEN)
        self.args = dsec.DSecContainerRunArgs(BASE, layers=(self.workspace,), memory_limit_mb=256, workdir="/workspace")

    def hidden(self, name: str, files: dict[str, str]) -> str:
        """Another layer of tests."""
        return publish(self._store, self._folder, f"{TESTS}-{name}", "toolkit", files)

    async def agent(self) -> dsec.Sandbox:
        return await self.client.run_container(self.args)

    async def grade(self, changes: dsec.Sandbox | dsec.ChangeSet, **options: object) -> dsec.Verdict:
        asked: dict[str, object] = {
            "tests": self.tests,
            "runner": dsec.CommandRunner(argv=("python3", "-B", "check.py")),
            "timeout": 60,
            **options,
        }
        return await self.client.grade(self.args, changes, **asked)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
async def shop(
    client: dsec.DSecClient, store: LayerStore, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Shop]:
    folder = tmp_path_factory.mktemp("layers")
    yield Shop(client, store, folder)
    for name in {tag.name for tag in store.list()}:
        if name.startswith((WORKSPACE, TESTS)):
            try:
                store.remove(f"{name}@1")
            except Fault:
                continue


@pytest.fixture
async def agent(shop: Shop) -> AsyncIterator[dsec.Sandbox]:
    sandbox = await shop.agent()
    yield sandbox
    await sandbox.stop()


def file(path: str, text: str | bytes, mode: int = 0o644) -> dsec.Change:
    """A change of a file below /workspace."""
    data = text.encode() if isinstance(text, str) else text
    return dsec.Change(
        path=os.fsencode(f"workspace/{path}"), kind=dsec.ChangeKind.WRITE, mode=mode, size=len(data), data=data
    )


def changes(*some: dsec.Change) -> dsec.ChangeSet:
    return dsec.ChangeSet(some)
