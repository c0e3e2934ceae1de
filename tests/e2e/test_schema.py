"""The document against a real platform: whatever is asked of a live sandbox, no defect shows and no shape differs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import schemathesis
from hypothesis import HealthCheck, settings

from dsec import DSecContainerRunArgs
from dsec.apiserver.openapi import document
from dsec.cluster.embedded import Endpoint, private
from dsec.layers import LayerStore
from dsec.sync import DSecClient, Sandbox
from tests.apiserver.schema_checks import CHECKS, aimed

pytestmark = pytest.mark.e2e
SCHEMA = schemathesis.openapi.from_dict(json.loads(document("0")))
ARGS = DSecContainerRunArgs("debian@12", memory_limit_mb=64, disk_limit_mb=64, pids_limit=32)


@pytest.fixture(scope="module")
def platform(store: LayerStore) -> Iterator[Endpoint]:
    """One of its own: what is asked may end every sandbox there is, or leave many."""
    with private(max_sandboxes=64) as endpoint:
        yield endpoint


@pytest.fixture(scope="module")
def sync_client(platform: Endpoint) -> Iterator[DSecClient]:
    with DSecClient(platform.url, Path(platform.key_file).read_text().strip()) as client:
        yield client


@pytest.fixture(scope="module")
def live(sync_client: DSecClient) -> Iterator[list[Sandbox]]:
    """A sandbox that is there however often a request ended it."""
    found: list[Sandbox] = []
    yield found
    for sandbox in found:
        sandbox.stop()


def _alive(client: DSecClient, live: list[Sandbox]) -> Sandbox:
    if not live or live[-1].info().state.value != "running":
        live.append(client.run_container(ARGS).__enter__())
        live[-1].run_shell("echo x > /tmp/x; mkdir /tmp/d", exec_id="command")
    return live[-1]


@SCHEMA.parametrize()
@settings(max_examples=4, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
def test_a_real_platform_answers_as_documented(
    case: schemathesis.Case, platform: Endpoint, sync_client: DSecClient, live: list[Sandbox]
) -> None:
    key = Path(platform.key_file).read_text().strip()
    sandbox = _alive(sync_client, live)
    for one in aimed(case, sandbox.id, "command"):
        response = one.call(base_url=platform.url, headers={"Authorization": f"Bearer {key}"}, timeout=30)
        one.validate_response(response, checks=CHECKS)
