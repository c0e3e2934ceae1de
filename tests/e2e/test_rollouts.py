"""Opening rollouts by name, over and over, and what becomes of them when their sandbox or their edge ends."""

from __future__ import annotations

import asyncio
import stat
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from dsec.cluster import embedded
from tests.chaos.trap import Trap

from .raw import Opened, Raw, Refused
from .test_crashes import kill, pid_of, states  # noqa: F401 (a fixture)

pytestmark = pytest.mark.e2e


@pytest.fixture
async def raw(platform: embedded.Endpoint) -> AsyncIterator[Raw]:
    async with Raw(platform) as raw:
        yield raw


async def test_opening_makes_a_sandbox_and_opening_again_takes_it_over(raw: Raw) -> None:
    first = await raw.open("task-3/7", job="open", labels={"a": "b"})
    assert (first.info["epoch"], first.info["state"], first.info["steps"]) == (1, "open", 0)
    again = await raw.open("task-3/7", job="open", labels={"a": "b"})
    assert (again.id, again.info["sandbox"], again.info["epoch"]) == (first.id, first.info["sandbox"], 2)
    other = await raw.open("task-3/7", job="another")
    assert other.id != first.id and other.info["sandbox"] != first.info["sandbox"]
    for rollout in (again, other):
        await rollout.finish()


async def test_openings_at_once_make_one_sandbox(raw: Raw) -> None:
    opened = await asyncio.gather(*(raw.open("crowd", job="once") for _ in range(8)))
    assert len({one.info["sandbox"] for one in opened}) == 1
    assert sorted(one.info["epoch"] for one in opened) == list(range(1, 9))
    await max(opened, key=lambda one: one.info["epoch"]).finish()


async def test_other_arguments_diverge_and_say_where(raw: Raw) -> None:
    rollout = await raw.open("other-args", memory_limit_mb=512)
    with pytest.raises(Refused, match=r"memory_limit_mb: recorded 512, asked 513") as refused:
        await raw.open("other-args", memory_limit_mb=513)
    assert refused.value.kind == "replay_divergence"
    assert (await rollout.now())["epoch"] == 1, "a refused opening fences nobody"
    await rollout.finish()


@pytest.mark.parametrize("body", [{"name": ""}, {"name": "a\nb"}, {"name": "x" * 257}, {"name": "n", "job": "\0"}])
async def test_names_are_checked(raw: Raw, body: dict[str, str]) -> None:
    with pytest.raises(Refused) as refused:
        await raw.json("POST", "/v1/rollouts", json=body)
    assert refused.value.kind == "invalid_request"


async def test_a_creation_that_fails_leaves_no_rollout(raw: Raw) -> None:
    with pytest.raises(Refused):
        await raw.open("no-such-layer", container_image="none@1")
    assert (await raw.json("GET", "/v1/rollouts", params={"name": "no-such-layer"}))["rollouts"] == []


async def test_finishing_is_told_once_and_stops_the_sandbox(raw: Raw) -> None:
    rollout = await raw.open("finish", job="ends")
    told = await rollout.finish(reward=0.5, valid=True)
    assert (told["state"], told["reward"], told["valid"]) == ("finished", 0.5, True)
    assert (await rollout.finish(reward=0.5, valid=True))["finished_at"] == told["finished_at"]
    with pytest.raises(Refused, match=r"reward 0\.5") as refused:
        await rollout.finish(reward=1.0, valid=True)
    assert refused.value.kind == "conflict"
    sandbox = await raw.json("GET", f"/v1/sandboxes/{told['sandbox']}")
    assert (sandbox["state"], sandbox["reason"]) == ("stopped", "user")
    assert (await rollout.now())["state"] == "finished", "the end of its sandbox afterwards loses nothing"
    listed = await raw.json("GET", "/v1/rollouts", params={"job": "ends", "state": "finished"})
    assert [one["id"] for one in listed["rollouts"]] == [rollout.id]
    await raw.json("DELETE", f"/v1/rollouts/{rollout.id}")
    with pytest.raises(Refused) as refused:
        await rollout.now()
    assert refused.value.kind == "not_found"


async def test_an_earlier_client_cannot_finish(raw: Raw) -> None:
    first = await raw.open("fenced-finish")
    second = await raw.open("fenced-finish")
    with pytest.raises(Refused) as refused:
        await first.finish()
    assert refused.value.kind == "rollout_fenced"
    with pytest.raises(Refused, match="Number out of range"):
        await raw.json("POST", f"/v1/rollouts/{first.id}/finish", content=b'{"epoch": 2, "reward": 1e999}')
    await second.finish(stop=False)
    assert (await raw.json("GET", f"/v1/sandboxes/{second.info['sandbox']}"))["state"] == "running"
    await raw.json("DELETE", f"/v1/sandboxes/{second.info['sandbox']}")


async def test_a_rollout_whose_sandbox_ends_is_lost(raw: Raw) -> None:
    rollout = await raw.open("lost")
    with pytest.raises(Refused) as refused:
        await raw.json("DELETE", f"/v1/rollouts/{rollout.id}")
    assert refused.value.kind == "conflict", "it may still go on"
    await raw.json("DELETE", f"/v1/sandboxes/{rollout.info['sandbox']}")
    async with asyncio.timeout(10):
        while (told := await rollout.now())["state"] == "open":
            await asyncio.sleep(0.01)
    assert (told["state"], told["reason"]) == ("lost", "user")
    again = await raw.open("lost")
    assert (again.info["state"], again.info["sandbox"]) == ("lost", rollout.info["sandbox"])


async def test_nothing_of_a_log_is_for_others(platform: embedded.Endpoint, raw: Raw) -> None:
    rollout = await raw.open("private")
    root = Path(platform.state) / "rollouts"
    modes = {path: stat.S_IMODE(path.stat().st_mode) for path in (root, root / rollout.id, root / rollout.id / "log")}
    assert all(mode & 0o077 == 0 for mode in modes.values()), modes
    await rollout.finish()


STEPS = [(name, when) for name in ("rollout.create", "rollout.open", "rollout.made") for when in ("before", "after")]


async def test_an_opening_whose_edge_dies_anywhere_makes_one_sandbox(
    states: list[Path],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("DSEC_STEPS", str(states[0] / "steps.sock"))
    trap = Trap(states[0] / "steps.sock")
    try:
        endpoint = await asyncio.to_thread(embedded.up, states[0], port=0)
        async with Raw(endpoint) as raw:
            for name, when in STEPS:
                trap.arm(name, when, lambda _: (kill(pid_of(states[0], "edge")), True)[1])
                opened = await _until_open(raw, f"{name} {when}")
                trap.disarm()
                assert trap.killed, (name, when)
                listed = await raw.json("GET", "/v1/sandboxes", params={"state": "running"})
                assert [one["id"] for one in listed["sandboxes"]] == [opened.info["sandbox"]], (name, when)
                await opened.finish()
    finally:
        await trap.close()


async def _until_open(raw: Raw, name: str) -> Opened:
    async with asyncio.timeout(30):
        while True:
            try:
                return await raw.open(name)
            except Refused as refused:
                if not refused.retryable:
                    raise
            await asyncio.sleep(0.05)
