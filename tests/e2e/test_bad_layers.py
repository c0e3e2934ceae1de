"""Damaged and unknown layers are typed errors at the SDK and the command line, and hurt nobody else."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

import dsec
from dsec.cluster import embedded
from dsec.layers import LayerStore, build_directory

from .conftest import BASE


@pytest.fixture(scope="module")
async def place(store: LayerStore) -> AsyncIterator[tuple[dsec.DSecClient, LayerStore, embedded.Endpoint]]:
    """A platform over a store of its own: the base layer by hard links, and layers to be damaged."""
    root = Path("/var/tmp") / f"dsec-bad-layers-{os.getpid()}"
    own = LayerStore(root)
    try:
        for part in ("blobs", "manifests", "tags"):
            shutil.copytree(store.root / part, root / part, copy_function=os.link)
        for name in ("truncated", "garbage", "missing"):
            tree = root / "tree"
            (tree / "opt").mkdir(parents=True)
            (tree / "opt" / name).write_bytes(os.urandom(20_000))
            build_directory(own, tree, name=name, version="1", kind="toolkit")
            shutil.rmtree(tree)
        with embedded.private(store=root) as endpoint:
            key = Path(endpoint.key_file).read_text().strip()
            async with dsec.DSecClient(endpoint.url, key) as client:
                yield client, own, endpoint
    finally:
        shutil.rmtree(root, ignore_errors=True)


def damage(store: LayerStore, name: str) -> None:
    meta, data = store.paths(store.resolve(f"{name}@1"))
    if name == "truncated":
        os.truncate(data[0], 4096)
    elif name == "garbage":
        meta.chmod(0o600)
        meta.write_bytes(b"\xff" * meta.stat().st_size)
    else:
        data[0].unlink()


@pytest.mark.parametrize("name", ["truncated", "garbage", "missing"])
async def test_a_damaged_layer_is_named(
    place: tuple[dsec.DSecClient, LayerStore, embedded.Endpoint], name: str
) -> None:
    client, own, endpoint = place
    damage(own, name)
    with pytest.raises(dsec.CreateFailed) as caught:
        await client.run_container(dsec.DSecContainerRunArgs(BASE, layers=(f"{name}@1",)))
    assert caught.value.stage.startswith("layer") and name in str(caught.value)
    environment = {"DSEC_URL": endpoint.url, "DSEC_API_KEY": Path(endpoint.key_file).read_text().strip()}
    said = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-m", "dsec.cli.main", "run", BASE, "--layer", f"{name}@1", "--", "true"],
        env=os.environ | environment,
        capture_output=True,
        text=True,
    )
    assert said.returncode == 1 and said.stderr.startswith("error: ") and "Traceback" not in said.stderr
    async with client.run_container(dsec.DSecContainerRunArgs(BASE)) as sandbox:
        assert (await sandbox.run_shell("echo fine")).text == "fine\n"
    assert [info async for info in client.list(states=["running", "creating", "stopping"])] == []


async def test_unknown_layers_and_wrong_orders_are_named(
    place: tuple[dsec.DSecClient, LayerStore, embedded.Endpoint],
) -> None:
    client, _, _ = place
    for args, error, word in (
        (dsec.DSecContainerRunArgs("debain@12"), dsec.NotFound, "debian@12"),
        (dsec.DSecContainerRunArgs(BASE, layers=("nothing@1",)), dsec.NotFound, "nothing@1"),
        (dsec.DSecContainerRunArgs(BASE, layers=(BASE,)), dsec.InvalidRequest, "base"),
        (dsec.DSecContainerRunArgs("../../etc@1"), dsec.InvalidRequest, "../../etc"),
    ):
        with pytest.raises(error, match=word.replace(".", r"\.")):
            await client.run_container(args)
