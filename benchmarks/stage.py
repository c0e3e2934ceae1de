"""Where a bench plays: a private platform on a private store, a client, and environments nobody has asked for before."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import shutil
import tempfile
from collections.abc import AsyncIterator, Coroutine, Iterator
from pathlib import Path
from typing import TypeVar

import msgspec
import uvloop

from dsec import DSecClient, DSecContainerRunArgs
from dsec.cluster import embedded
from dsec.layers import LayerStore, build_directory
from dsec.protocol.ids import edge_of

BASE = "debian@12"
POOL = 16  # slots that the launcher keeps ready; a measured window must make ten times as many sandboxes at least
TOOLKITS = 72  # ordered pairs of these: 5,112 environments, each used once

T = TypeVar("T")


def run(work: Coroutine[object, object, T]) -> T:
    """On uvloop, as a user with many sandboxes would."""
    return uvloop.run(work)


class Environment(msgspec.Struct, frozen=True):
    """A combination of layers, the command that proves it, and what that must print."""

    layers: tuple[str, ...]
    proof: tuple[str, ...]
    expected: bytes

    def args(self) -> DSecContainerRunArgs:
        return DSecContainerRunArgs(BASE, layers=self.layers, labels={"dsec": "bench"})


class Environments:
    """Each call gives a combination that was not given before."""

    def __init__(self, names: list[str], seed: int = 7) -> None:
        pairs = list(itertools.permutations(names, 2))
        random.Random(seed).shuffle(pairs)
        self._left = iter(pairs)
        self.names = len(names)

    def next(self) -> Environment:
        pair = next(self._left)
        proof = ("cat", *(f"/opt/bench/{name}" for name in pair))
        return Environment(tuple(f"{name}@1" for name in pair), proof, "".join(f"{name}\n" for name in pair).encode())


class Stage(msgspec.Struct, frozen=True):
    client: DSecClient
    endpoint: embedded.Endpoint
    environments: Environments
    edge: str
    meta: Path
    data: list[Path]
    store: LayerStore


@contextlib.asynccontextmanager
async def stage(*, max_sandboxes: int) -> AsyncIterator[Stage]:
    """Everything of it is gone at the end."""
    with _store() as (store, names):
        meta, data = base_blobs()
        with embedded.private(max_sandboxes=max_sandboxes, store=store.root) as endpoint:
            key = Path(endpoint.key_file).read_text(encoding="ascii").strip()
            async with DSecClient(endpoint.url, key) as client:
                environments = Environments(names)
                async with client.run_container(environments.next().args()) as first:
                    edge = edge_of(first.id) or ""
                yield Stage(client, endpoint, environments, edge, meta, data, store)


def base_blobs() -> tuple[Path, list[Path]]:
    """The base layer's metadata and data files in the machine's store."""
    store = LayerStore()
    return store.paths(store.resolve(BASE))


@contextlib.contextmanager
def _store() -> Iterator[tuple[LayerStore, list[str]]]:
    """A copy of the machine's store (hard links) with tiny toolkits of our own in it."""
    shared = LayerStore()
    shared.resolve(BASE)
    with tempfile.TemporaryDirectory(prefix="dsec-bench-", dir="/var/tmp") as directory:
        store = LayerStore(Path(directory) / "store")
        for part in ("blobs", "manifests", "tags"):
            shutil.copytree(shared.root / part, store.root / part, copy_function=_link)
        names = [f"bench-{number:02d}" for number in range(TOOLKITS)]
        for name in names:
            _build_toolkit(store, Path(directory) / "tree", name)
        yield store, names


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # another filesystem
        shutil.copyfile(source, target)


def _build_toolkit(store: LayerStore, tree: Path, name: str) -> None:
    (tree / "opt" / "bench").mkdir(parents=True)
    (tree / "opt" / "bench" / name).write_text(f"{name}\n", encoding="ascii")
    build_directory(store, tree, name=name, version="1", kind="toolkit")
    shutil.rmtree(tree)
