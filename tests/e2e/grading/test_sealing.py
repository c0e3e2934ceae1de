"""A sealed sandbox is what it is: nothing of it runs, nothing changes it, and it can be read."""

from __future__ import annotations

import asyncio

import pytest

import dsec
from dsec import SandboxUnavailable

from .conftest import FIXED, Shop

DAEMON = """
import os
if os.fork() == 0:
    os.setsid()
    while True:
        open("/workspace/mark", "a").write("x")
"""


async def test_nothing_runs_and_nothing_changes_any_more(agent: dsec.Sandbox) -> None:
    """Daemons and orphans too; each way to change something is refused by name."""
    await agent.exec(("python3", "-c", DAEMON))
    process = await agent.start("trap '' TERM INT; while :; do echo x >> /workspace/other; done", stdin=True)
    session = await agent.open_session("s")
    await session.run_shell("(while :; do echo y >> /workspace/third; done) &")
    await agent.run_shell("until [ -s mark -a -s other -a -s third ]; do sleep .01; done", timeout=30, check=True)
    await agent.seal()
    sizes = [(await agent.files.stat(f"/workspace/{name}")).size for name in ("mark", "other", "third")]
    assert all(sizes)
    refused = (
        agent.run_shell("true"),
        agent.exec(("true",)),
        agent.start("true"),
        agent.files.write("/workspace/x", b"x"),
        agent.files.mkdir("/workspace/d"),
        agent.files.move("/workspace/mark", "/workspace/m"),
        agent.files.remove("/workspace/mark"),
        agent.open_session("t"),
        agent.set_network({}),
        process.write(b"x"),
        process.signal("CONT"),
    )
    for attempt in refused:
        with pytest.raises(dsec.Conflict, match="sealed for grading"):
            await attempt
    assert (await process.wait()).signal == "KILL"
    await agent.seal()  # again
    assert sizes == [(await agent.files.stat(f"/workspace/{name}")).size for name in ("mark", "other", "third")]
    assert await agent.files.read("/workspace/src/shop/old.py") == b"gone = False\n"
    assert {change.path for change in (await agent.changes(include=("workspace/*",))).changes} >= {b"workspace/mark"}


async def test_a_paused_one_is_sealed_asleep(shop: Shop, agent: dsec.Sandbox) -> None:
    await agent.files.write("/workspace/src/shop/__init__.py", FIXED)
    await agent.start("while :; do echo x >> /workspace/mark; done")
    await agent.run_shell("until [ -s mark ]; do sleep .01; done", timeout=30, check=True)
    await agent.pause()
    await agent.seal()
    assert (await agent.info()).state is dsec.State.PAUSED
    assert (await shop.grade(agent)).reward == 1.0
    size = (await agent.files.stat("/workspace/mark")).size  # wakes it: nothing is there to go on
    assert (await agent.files.stat("/workspace/mark")).size == size


async def test_what_is_on_its_way_is_cut(agent: dsec.Sandbox) -> None:
    """An upload that is under way lands before the seal or never; a command's caller learns of its end."""
    reached = asyncio.Event()

    async def endless():  # type: ignore[no-untyped-def]
        while True:
            yield b"x" * 65536
            reached.set()

    upload = asyncio.create_task(agent.files.write("/workspace/big", endless()))
    command = asyncio.create_task(agent.run_shell("sleep 1000"))
    await reached.wait()
    await agent.seal()
    with pytest.raises(dsec.DSecError):
        await upload
    results = await asyncio.gather(command, return_exceptions=True)
    assert isinstance(results[0], dsec.Conflict) or results[0].signal == "KILL", results  # type: ignore[union-attr]
    assert not await agent.files.exists("/workspace/big")


async def test_an_ended_one_has_no_changes(shop: Shop) -> None:
    """Nobody knows what its agent did: no reward, and never a zero."""
    sandbox = await shop.agent()
    await sandbox.stop()
    with pytest.raises(SandboxUnavailable):
        await sandbox.seal()
    verdict = await shop.grade(sandbox)
    assert (verdict.reward, verdict.valid, verdict.reason) == (None, False, dsec.GradeReason.SANDBOX_LOST), verdict


async def test_one_that_never_was_is_a_wrong_request(shop: Shop) -> None:
    sandbox = await shop.agent()
    await sandbox.stop()
    sandbox.id = sandbox.id[:-1] + ("0" if sandbox.id[-1] != "0" else "1")
    with pytest.raises(dsec.NotFound):
        await shop.grade(sandbox)
