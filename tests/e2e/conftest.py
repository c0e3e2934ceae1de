"""One private platform for all end-to-end tests, and the proof that it leaves nothing behind."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

import dsec
from dsec.cluster import embedded
from dsec.layers import LayerStore

from .leftovers import Traces, traces

BASE = "debian@12"


@pytest.fixture(scope="session", autouse=True)
def nothing_is_left() -> Iterator[None]:
    """After the whole run no process, mount, namespace, cgroup, loop device or directory of ours remains.

    It looks at the whole machine; DSEC_TEST_SHARED=1 says that other platforms come and go on it, and nothing can be told.
    """
    before = traces()
    yield
    if os.environ.get("DSEC_TEST_SHARED") == "1":
        return
    left = traces().minus(before)
    assert left == Traces(), f"left behind: {left}"


@pytest.fixture(scope="session")
def store() -> LayerStore:
    store = LayerStore()
    store.resolve(BASE)  # `make base` builds it
    return store


@pytest.fixture(scope="session")
def platform(store: LayerStore, nothing_is_left: None) -> Iterator[embedded.Endpoint]:
    with embedded.private() as endpoint:
        yield endpoint


@pytest.fixture(scope="session")
async def client(platform: embedded.Endpoint) -> AsyncIterator[dsec.DSecClient]:
    key = Path(platform.key_file).read_text().strip()
    async with dsec.DSecClient(platform.url, key) as client:
        yield client


@pytest.fixture
async def sandbox(client: dsec.DSecClient) -> AsyncIterator[dsec.Sandbox]:
    async with client.run_container(dsec.DSecContainerRunArgs(container_image=BASE)) as sandbox:
        yield sandbox
