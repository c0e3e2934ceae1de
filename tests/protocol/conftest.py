"""The link runs on asyncio's own loop in the SDK's process and on uvloop in ours: both are tested."""

from __future__ import annotations

import asyncio
import warnings

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    import uvloop

    POLICIES = {"asyncio": asyncio.DefaultEventLoopPolicy(), "uvloop": uvloop.EventLoopPolicy()}


@pytest.fixture(scope="session", params=list(POLICIES))
def event_loop_policy(request: pytest.FixtureRequest) -> asyncio.AbstractEventLoopPolicy:
    return POLICIES[request.param]
