"""The Inspect AI provider on a real platform: Inspect's own conformance checks, all of them, and ours beyond them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest
from inspect_ai.util import SandboxEnvironment
from inspect_ai.util._sandbox.self_check import *  # noqa: F403

from dsec.cluster.embedded import Endpoint
from dsec.integrations.inspect import DSecSandboxConfig, DSecSandboxEnvironment

pytestmark = pytest.mark.e2e

USERS = ("root", "1000:1000")


@pytest.fixture(scope="module")
def discovered(platform: Endpoint) -> Iterator[None]:
    """The provider finds the service as every client does."""
    patch = pytest.MonkeyPatch()
    patch.setenv("DSEC_STATE", platform.state)
    yield
    patch.undo()


@pytest.fixture(scope="module", params=USERS)
async def environment(request: pytest.FixtureRequest, discovered: None) -> AsyncIterator[DSecSandboxEnvironment]:
    config = DSecSandboxConfig(init_user=request.param)
    environments = await DSecSandboxEnvironment.sample_init("self_check", config, {})
    yield environments["default"].as_type(DSecSandboxEnvironment)
    await DSecSandboxEnvironment.sample_cleanup("self_check", config, environments, False)


@pytest.fixture
def sandbox_env(environment: DSecSandboxEnvironment) -> SandboxEnvironment:
    return environment
