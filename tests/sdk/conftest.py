from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "apiserver"))

from fake_edge import FakeEdge
from serving import KEY, apiserver

from dsec import DSecClient, DSecContainerRunArgs, Sandbox


@pytest.fixture(scope="session")
async def edge(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[FakeEdge]:
    async with FakeEdge(tmp_path_factory.mktemp("edge")) as edge:
        yield edge


@pytest.fixture(scope="session")
async def url(edge: FakeEdge) -> AsyncIterator[str]:
    async with apiserver(edge.directory, edge) as url:
        yield url


@pytest.fixture(scope="session")
async def client(url: str) -> AsyncIterator[DSecClient]:
    async with DSecClient(url, KEY, request_timeout=10) as client:
        yield client


@pytest.fixture
async def sandbox(client: DSecClient) -> AsyncIterator[Sandbox]:
    async with client.run_container(DSecContainerRunArgs("debian@12")) as sandbox:
        yield sandbox
