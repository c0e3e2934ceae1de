"""The demo's own claims on a real platform: the rewards that each script must get, and nothing of them changed by kills."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

import dsec
from dsec.cluster import embedded
from dsec.demo.burst import job_of_a_burst, plan, run_burst
from dsec.demo.chaos import EDGE, TRAINER, Seen, private_platform, run_twice
from dsec.demo.prepare import prepared
from dsec.demo.records import Burst
from dsec.demo.rollout import PreparedTask, run_one
from dsec.demo.scripts import EXPECTED, Recording, Script, Shell, Turn
from dsec.demo.tasks import select
from dsec.layers import LayerStore
from tests.demo.conftest import small_task


@pytest.fixture(scope="module")
def small(store: LayerStore, tmp_path_factory: pytest.TempPathFactory) -> PreparedTask:
    return small_task(store, tmp_path_factory.mktemp("calc"))


@pytest.mark.timeout(300)
async def test_rewards_are_what_each_script_must_get(client: dsec.DSecClient, store: LayerStore) -> None:
    with prepared(select(("xmltodict-0.13.0",), 1, 0), store, print) as ready:
        async with job_of_a_burst(client, 0) as job:
            rollouts = await run_burst(client, job, plan(ready, 4, 0), 2)
            infos = [info async for info in client.rollouts.list(job=job.name)]
    assert {rollout.script: (rollout.reward, rollout.naive_reward) for rollout in rollouts} == EXPECTED
    assert all(rollout.valid for rollout in rollouts)
    assert all(rollout.asked > 3 and rollout.ran == tuple(range(rollout.asked)) for rollout in rollouts), "marks"
    cheat = next(rollout for rollout in rollouts if rollout.script is Script.CHEAT)
    assert {"conftest.py", "sitecustomize.py"} <= {drop.path for drop in cheat.dropped if drop.suspicious}
    fix = next(rollout for rollout in rollouts if rollout.script is Script.FIX)
    assert "xmltodict.py" in fix.graded_files and not fix.failed
    assert {(info.reward, info.valid, info.state.value) for info in infos} == {
        (1.0, True, "finished"),
        (0.0, True, "finished"),
    }
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
        async with job_of_a_burst(client, 0) as job:
            rollout = await run_one(client, job, changed, Script.FIX, 0)
    assert (rollout.valid, rollout.reward) == (True, reward), (rollout.reason, rollout.output, rollout.dropped)


async def test_a_failure_of_the_infrastructure_is_no_zero(client: dsec.DSecClient, small: PreparedTask) -> None:
    async with client.job("demo-full", max_sandboxes=0) as job:
        rollout = await run_one(client, job, small, Script.NOOP, 0)
        await job.stop()
    assert (rollout.reward, rollout.naive_reward, rollout.valid, rollout.as_expected) == (None, None, False, False)
    assert "CapacityError" in rollout.reason


@pytest.mark.timeout(300)
async def test_nothing_shows_of_kills(small: PreparedTask) -> None:
    heard: list[str] = []

    def news(text: str, _: Seen) -> None:
        heard.append(text)

    async with private_platform() as (endpoint, client):
        found = await run_twice(endpoint, client, [small], 8, 4, 1, news)
    assert found.chaos.ok, found.chaos
    assert sorted(kill.victim for kill in found.chaos.kills) == [EDGE, EDGE, TRAINER, TRAINER]
    assert heard.count("edge killed") == heard.count("trainer killed") == 2
    assert found.chaos.commands == sum(len(one.ran) for one in found.rollouts) > 40
    assert {one.script: (one.reward, one.naive_reward) for one in found.rollouts} == EXPECTED


@pytest.mark.timeout(300)
def test_the_command(platform: embedded.Endpoint, tmp_path: Path) -> None:
    """On the platform that is there; what it made is gone when it was told to end in the middle."""
    environment = {**os.environ, "DSEC_STATE": platform.state}
    command = [sys.executable, "-m", "dsec.cli.main", "demo", "--task-ids", "xmltodict-0.13.0", "--rollouts", "2"]
    done = subprocess.run(
        [*command, "--json", str(tmp_path / "out.json")], env=environment, capture_output=True, text=True, timeout=250
    )
    assert done.returncode == 0, done.stderr
    assert "2 valid, 0 invalid" in done.stdout
    assert msgspec.json.decode((tmp_path / "out.json").read_bytes(), type=Burst).ok
    with subprocess.Popen([*command, "--rollouts", "8"], env=environment, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert any("tasks are ready" in line for line in process.stderr)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) in (143, -signal.SIGTERM)
