"""The demo's own claim on a real platform: four scripts, exactly the rewards they must get; and changes of every kind graded."""

from __future__ import annotations

import msgspec
import pytest

import dsec
from dsec.demo.burst import plan, run_burst
from dsec.demo.prepare import prepared
from dsec.demo.rollout import run_one
from dsec.demo.scripts import EXPECTED, Recording, Script, Shell, Turn
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


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("after", "reward"),
    [
        ("cp -a h11 /tmp/anew && rm -r h11 && mv /tmp/anew h11", 1),  # a folder made anew: opaque in the overlay
        ("rm -r h11/tests && ln -s /etc h11/tests", 1),  # the place of the tests is not the agent's
        ("rm h11/_events.py", 0),
        ("rm h11/_events.py && mkdir h11/_events.py && touch h11/_events.py/x", 0),
        ("rm -r h11 && echo 'import this' > h11", 0),
    ],
)
async def test_changes_of_every_kind_are_graded(
    client: dsec.DSecClient, store: LayerStore, after: str, reward: int
) -> None:
    with prepared(select(("h11-0.15.0",), 1, 0), store, print) as (task,):
        fix = task.recordings[Script.FIX]
        turns = (*fix.turns, Turn("One more thing.", (Shell(after),)))
        changed = msgspec.structs.replace(task, recordings={Script.FIX: Recording(Script.FIX, turns)})
        rollout = await run_one(client, changed, Script.FIX, 0)
    assert (rollout.valid, rollout.reward) == (True, reward), (rollout.reason, rollout.output, rollout.dropped)
