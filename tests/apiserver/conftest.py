from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from fake_edge import FakeEdge
from serving import apiserver


@pytest.fixture(scope="session")
async def edge(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[FakeEdge]:
    async with FakeEdge(tmp_path_factory.mktemp("edge")) as edge:
        yield edge


@pytest.fixture(scope="session")
async def url(edge: FakeEdge) -> AsyncIterator[str]:
    async with apiserver(edge.directory, edge) as url:
        yield url
