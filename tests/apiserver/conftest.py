from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.apiserver.fake_edge import FakeEdge
from tests.apiserver.serving import apiserver


@pytest.fixture(scope="session")
async def edge(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[FakeEdge]:
    async with FakeEdge(tmp_path_factory.mktemp("edge")) as edge:
        yield edge


@pytest.fixture(scope="session")
async def url(edge: FakeEdge) -> AsyncIterator[str]:
    async with apiserver(edge.directory, edge) as url:
        yield url
