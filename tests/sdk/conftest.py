from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from dsec import DSecClient, DSecContainerRunArgs, Sandbox
from tests.apiserver.fake_edge import FakeEdge
from tests.apiserver.serving import KEY, apiserver


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
