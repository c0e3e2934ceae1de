"""The demo's own claim on a real platform: four scripts, one task, exactly the rewards they must get."""

from __future__ import annotations

import pytest

import dsec
from dsec.demo.burst import plan, run_burst
from dsec.demo.prepare import prepared
from dsec.demo.scripts import EXPECTED, Script
from dsec.demo.tasks import select
from dsec.layers import LayerStore


@pytest.mark.timeout(300)
async def test_rewards_are_what_each_script_must_get(client: dsec.DSecClient, store: LayerStore) -> None:
    with prepared(select(("xmltodict-0.13.0",), 1, 0), store, print) as ready:
        rollouts = await run_burst(client, plan(ready, 4, 0), 2)
    assert {rollout.script: (rollout.reward, rollout.naive_reward) for rollout in rollouts} == EXPECTED
    assert all(rollout.valid for rollout in rollouts)
    cheat = next(rollout for rollout in rollouts if rollout.script is Script.CHEAT)
    assert {"conftest.py", "sitecustomize.py"} <= {drop.path for drop in cheat.dropped if drop.suspicious}
    assert [info.id async for info in client.list(labels={"demo": "xmltodict-0.13.0"}, states=["running"])] == []
