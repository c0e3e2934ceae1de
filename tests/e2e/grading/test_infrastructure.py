"""The platform fails in the middle of a grade: the verdict is the right one all the same, or says that there is none."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

import dsec
from dsec import GradeReason, State
from dsec.cluster import embedded
from dsec.layers import LayerStore
from tests.chaos.victims import Victims

from .conftest import FIXED, Shop

SLOW = dsec.CommandRunner(argv=("sh", "-c", "sleep 3; exec python3 -B check.py"))
DEADLINE_S = 90.0


class Place:
    """A platform whose processes may be killed."""

    def __init__(self, shop: Shop, victims: Victims) -> None:
        self.shop = shop
        self.client = shop.client
        self.victims = victims

    async def graded(self, agent: dsec.Sandbox, disturb: Callable[[str], object], times: int = 1) -> dsec.Verdict:
        """A slow grade that is disturbed once its tests run, so many times. disturb gets the grading sandbox's id."""
        grade_id = f"disturbed-{agent.id}"
        async with asyncio.timeout(DEADLINE_S):
            grading = asyncio.create_task(self.shop.grade(agent, runner=SLOW, grade_id=grade_id))
            seen: set[str] = set()
            for _ in range(times):
                sandbox = await self._running(grade_id, seen)
                seen.add(sandbox)
                await asyncio.to_thread(disturb, sandbox)
            return await grading

    async def _running(self, grade_id: str, seen: set[str]) -> str:
        """Of this grade, one that was not there before and runs its tests."""
        while True:
            async for info in self.client.list(labels={"dsec.grade": grade_id}, states=(State.RUNNING,)):
                if info.id in seen:
                    continue
                try:
                    if await (await self.client.attach(info.id)).processes():
                        return info.id
                except dsec.DSecError:
                    continue
            await asyncio.sleep(0.02)

    async def left(self, agent: dsec.Sandbox) -> list[str]:
        """Grading sandboxes that still live, once those that are on their way out are gone."""
        labels = {"dsec.grade": f"disturbed-{agent.id}"}
        async with asyncio.timeout(DEADLINE_S):
            while True:
                found = [
                    info.id
                    async for info in self.client.list(labels=labels)
                    if info.state not in (State.STOPPED, State.FAILED)
                ]
                if not found:
                    return []
                await asyncio.sleep(0.05)


@pytest.fixture(scope="module")
async def place(store: LayerStore, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Place]:
    state = Path(tempfile.mkdtemp(prefix="dsec-", dir="/var/tmp"))
    try:
        endpoint = embedded.up(state, port=0)
        async with dsec.DSecClient(endpoint.url, Path(endpoint.key_file).read_text().strip()) as client:
            shop = Shop(client, store, tmp_path_factory.mktemp("layers"))
            yield Place(shop, Victims(state, embedded.run_dir(state)))
    finally:
        embedded.down(state)
        shutil.rmtree(state)


@pytest.fixture
async def agent(place: Place) -> AsyncIterator[dsec.Sandbox]:
    sandbox = await place.shop.agent()
    await sandbox.files.write("/workspace/src/shop/__init__.py", FIXED)
    yield sandbox
    await sandbox.stop()


async def test_a_lost_grading_sandbox_is_replaced(place: Place, agent: dsec.Sandbox) -> None:
    verdict = await place.graded(agent, lambda sandbox: place.victims.kill("aether", sandbox))
    assert (verdict.reward, verdict.valid) == (1.0, True), verdict
    assert len(verdict.evidence.graders) == 2 and "agent_lost" in verdict.evidence.lost[0]
    assert await place.left(agent) == []


async def test_when_every_one_is_lost_there_is_no_reward(place: Place, agent: dsec.Sandbox) -> None:
    verdict = await place.graded(agent, lambda sandbox: place.victims.kill("aether", sandbox), times=4)
    assert (verdict.reward, verdict.valid, verdict.reason) == (None, False, GradeReason.GRADING_LOST), verdict
    assert len(verdict.evidence.lost) == 4
    assert await place.left(agent) == []


@pytest.mark.parametrize("process", ["edge", "launcher", "apiserver"])
async def test_a_killed_process_changes_no_verdict(place: Place, agent: dsec.Sandbox, process: str) -> None:
    verdict = await place.graded(agent, lambda sandbox: place.victims.kill(process, ""))
    assert (verdict.reward, verdict.valid, verdict.reason) == (1.0, True, GradeReason.PASSED), verdict
    assert await place.left(agent) == []
    again = await place.shop.grade(agent)
    assert (again.reward, again.evidence.changes_digest) == (1.0, verdict.evidence.changes_digest)


async def test_a_seal_outlives_the_edge(place: Place, agent: dsec.Sandbox) -> None:
    await agent.seal()
    assert await asyncio.to_thread(place.victims.kill, "edge", "")
    async with asyncio.timeout(DEADLINE_S):
        while True:
            with pytest.raises(dsec.DSecError) as caught:
                await agent.run_shell("true")
            if isinstance(caught.value, dsec.Conflict):
                break
    assert "sealed for grading" in str(caught.value)
    await agent.seal()
    assert (await place.shop.grade(agent)).reward == 1.0


async def test_the_same_grade_is_joined_and_another_refused(place: Place, agent: dsec.Sandbox) -> None:
    shop = place.shop
    one, other = await asyncio.gather(*(shop.grade(agent, runner=SLOW, grade_id="joined") for _ in range(2)))
    assert one == other and one.reward == 1.0
    with pytest.raises(dsec.Conflict, match="something else"):
        await shop.grade(agent, grade_id="joined")
