"""Rollouts that ended are removed by the edge; open ones never are."""

from __future__ import annotations

import asyncio
from pathlib import Path

from dsec.edge.retention import Retention
from dsec.protocol.specs import DSecContainerRunArgs
from dsec.rollout.trajectory import TrajectoryStore

DAY = 86_400.0


async def test_what_ended_long_ago_goes_and_what_is_open_stays(tmp_path: Path) -> None:
    now = 0.0
    store = TrajectoryStore(tmp_path / "rollouts", clock=lambda: now)
    made = {}
    for number, name in enumerate(("ended", "open", "fresh")):
        made[name] = store.create(f"ro-e1-{number:012}", job="", name=name, args=DSecContainerRunArgs())
        await made[name].opened()
    await made["ended"].finished()
    now = 3 * DAY
    await made["fresh"].finished()
    removed = asyncio.Event()
    remove = store.remove

    async def seen(id: str) -> None:
        await remove(id)
        removed.set()

    store.remove = seen  # type: ignore[method-assign]
    running = asyncio.create_task(Retention(store, keep_days=2, keep_gb=1).run())
    async with asyncio.timeout(10):
        await removed.wait()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert [info.name for info in store.list()] == ["open", "fresh"]
    store.close()
