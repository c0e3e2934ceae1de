"""How sandboxes come to be, are found, and end."""

from __future__ import annotations

import asyncio
import time

import pytest

import dsec
from dsec import (
    CapacityError,
    CreateFailed,
    CreateTimeout,
    DSecClient,
    DSecContainerRunArgs,
    InvalidRequest,
    NotFound,
    SandboxUnavailable,
    State,
)
from tests.apiserver.fake_edge import FakeEdge

BASE = DSecContainerRunArgs("debian@12")


async def until(condition: object, timeout: float = 10) -> None:
    """Polls something that this process cannot wait for, with a deadline."""
    async with asyncio.timeout(timeout):
        while not condition():  # type: ignore[operator]
            await asyncio.sleep(0.01)


async def test_await_or_async_with(client: DSecClient) -> None:
    sandbox = await client.run(BASE, timeout=20)
    assert sandbox.id.startswith("sb-fake-") and sandbox.incarnation == 1
    assert (await sandbox.info()).state is State.RUNNING
    async with sandbox:
        assert (await sandbox.metrics()).memory_bytes == 4096
    assert (await sandbox.info()).state is State.STOPPED
    await sandbox.stop()
    async with client.run_container(BASE) as other:
        assert other.id != sandbox.id
    ended = await other.info()
    assert (ended.state, ended.reason) == (State.STOPPED, dsec.Reason.USER)
    with pytest.raises(SandboxUnavailable) as caught:
        await other.run_shell("true")
    assert caught.value.reason == "user"


async def test_attach_detaches(client: DSecClient, sandbox: dsec.Sandbox) -> None:
    async with client.attach(sandbox.id) as same:
        assert (await same.run_shell("echo hi")).text == "hi\n"
    again = await client.attach(sandbox.id)
    async with again:
        pass
    assert (await sandbox.info()).state is State.RUNNING
    with pytest.raises(NotFound):
        await client.attach("sb-fake-000000000000")
    with pytest.raises(NotFound, match="not a sandbox id"):
        await client.attach("nonsense")
    for odd in ("../capabilities", "", "sb-fake-000000000000/exec", "sb-fake-0?x#y"):
        with pytest.raises(NotFound, match="not a sandbox id"):
            await client.attach(odd)
    with pytest.raises(NotFound, match="edge 'other'"):
        await client.attach("sb-other-000000000000")


async def test_info_says_everything(client: DSecClient) -> None:
    args = DSecContainerRunArgs(
        "debian@12", labels={"team": "a b=c"}, network_rules={"pypi": True, "npm": False}, memory_limit_mb=2048
    )
    async with client.run_container(args) as sandbox:
        info = await sandbox.info()
    assert info.labels == {"team": "a b=c"} and info.limits.memory_mb == 2048 and info.edge == "fake"
    assert "refused" in info.network.enforced["pypi"] and "npm" not in info.network.enforced


async def test_errors_of_creation(client: DSecClient) -> None:
    with pytest.raises(NotFound, match="nope"):
        await client.run_container(DSecContainerRunArgs("nope"))
    with pytest.raises(CreateFailed) as failed:
        await client.run_container(DSecContainerRunArgs("broken"))
    assert failed.value.stage == "overlay" and not isinstance(failed.value, TimeoutError)
    with pytest.raises(TimeoutError) as late:
        await client.run_container(DSecContainerRunArgs("slow"))
    assert isinstance(late.value, CreateTimeout) and late.value.stage == "timeout.launch" and late.value.retryable
    with pytest.raises(InvalidRequest, match="timeout"):
        await client.run_container(BASE, timeout=-1)
    with pytest.raises(InvalidRequest, match="surrogate"):
        await client.run_container(DSecContainerRunArgs("debian@12", env={"A": "x\udcff"}))
    with pytest.raises(InvalidRequest, match="memory_limit_mb"):
        await client.run_container(DSecContainerRunArgs("debian@12", memory_limit_mb=10**30))
    with pytest.raises(InvalidRequest, match="str"):
        client.run("debian@12")  # type: ignore[arg-type]


async def test_one_key_is_one_sandbox(client: DSecClient) -> None:
    args = DSecContainerRunArgs("debian@12", idempotency_key="mine")
    first, second = await client.run_container(args), await client.run_container(args)
    assert first.id == second.id
    await first.stop()


async def test_list_and_stop_many(client: DSecClient) -> None:
    boxes = [await client.run(DSecContainerRunArgs("d", labels={"set": "l", "n": str(n)})) for n in range(3)]
    assert [info.id async for info in client.list(labels={"set": "l"})] == [box.id for box in boxes]
    assert [info.id async for info in client.list(labels={"set": "l", "n": "1"})] == [boxes[1].id]
    assert await client.stop_many(labels={"set": "l"}) == 3
    assert [i.id async for i in client.list(labels={"set": "l"}, states=["running", State.PAUSED])] == []
    assert len([i async for i in client.list(labels={"set": "l"}, states=[State.STOPPED])]) == 3
    with pytest.raises(InvalidRequest, match="labels"):
        await client.stop_many(labels={})
    with pytest.raises(InvalidRequest, match=r"asleep.*running"):
        _ = [info async for info in client.list(states=["asleep"])]


async def test_burst_in_order_of_completion(client: DSecClient, edge: FakeEdge) -> None:
    args = [DSecContainerRunArgs("d", labels={"n": str(n)}) for n in range(3)]
    async with client.run_many([args[0], DSecContainerRunArgs("nope"), *args[1:]], count=2) as burst:
        outcomes = {outcome.index: outcome async for outcome in burst}
        assert burst.total == 8 and sorted(outcomes) == list(range(8))
        assert outcomes[4].args is args[1]
        assert all(isinstance(outcomes[i].error, NotFound) for i in (2, 3))
        with pytest.raises(NotFound):
            _ = outcomes[2].sandbox
        kept = outcomes[5].sandbox
        assert edge.boxes[kept.id].args.labels == {"n": "1"}
        others = [outcomes[i]._sandbox.id for i in (0, 1, 4, 6, 7)]  # type: ignore[union-attr]
    assert (await kept.info()).state is State.RUNNING
    assert all(edge.boxes[id].state is State.STOPPED for id in others)
    await kept.stop()


async def test_leaving_a_burst_early_leaves_nothing(client: DSecClient, edge: FakeEdge) -> None:
    before = set(edge.boxes)
    edge.hold_creation, cancelled = asyncio.Event(), edge.cancelled
    try:
        async with client.run_many(BASE, count=5) as burst:
            waiting = asyncio.ensure_future(anext(burst))
            await until(lambda: len(edge.boxes) == len(before) + 5)
            waiting.cancel()
        await until(lambda: edge.cancelled == cancelled + 5)
    finally:
        edge.hold_creation = None
    assert all(edge.boxes[id].state is State.STOPPED for id in set(edge.boxes) - before)
    async with client.run_many(BASE, count=20) as burst:
        first = (await anext(burst)).sandbox
    live = [id for id in set(edge.boxes) - before if edge.boxes[id].state is State.RUNNING]
    assert live == [first.id], "one claimed, whatever else came is gone"
    await first.stop()


async def test_a_cancelled_creation_ends_in_removal(url: str, edge: FakeEdge) -> None:
    from tests.apiserver.serving import KEY

    before = set(edge.boxes)
    async with DSecClient(url, KEY) as client:
        edge.hold_creation = asyncio.Event()
        creating = asyncio.ensure_future(client._create(BASE, 60))
        await until(lambda: set(edge.boxes) - before)
        creating.cancel()
        with pytest.raises(asyncio.CancelledError):
            await creating
        edge.hold_creation.set()
        edge.hold_creation = None
    (id,) = set(edge.boxes) - before
    assert edge.boxes[id].state is State.STOPPED


async def test_a_full_edge_names_the_limit_and_who_holds_it(client: DSecClient, edge: FakeEdge) -> None:
    live = sum(box.state is State.RUNNING for box in edge.boxes.values())
    edge.max_sandboxes = live + 4
    try:
        async with client.run_many(BASE, count=10) as burst:
            outcomes = [outcome async for outcome in burst]
        assert sum(outcome.ok for outcome in outcomes) == 4
        with pytest.raises(CapacityError, match=r"limit max_sandboxes=.*team=a") as caught:
            raise next(outcome.error for outcome in outcomes if outcome.error)
        assert caught.value.limit == "max_sandboxes" and caught.value.holders["team=a"] >= 4 and caught.value.retryable
        edge.max_sandboxes = 0
        with pytest.raises(CapacityError):
            await client.run_container(BASE)
    finally:
        edge.max_sandboxes = 1000


async def test_pause_and_resume(sandbox: dsec.Sandbox, edge: FakeEdge) -> None:
    await sandbox.pause()
    assert edge.boxes[sandbox.id].paused
    await sandbox.resume()
    assert not edge.boxes[sandbox.id].paused


async def test_ttl_logs_changes_capabilities_layers(client: DSecClient, sandbox: dsec.Sandbox, edge: FakeEdge) -> None:
    await sandbox.set_ttl(running_stop=5)
    assert edge.boxes[sandbox.id].ttl == {"running_stop": 5}
    await sandbox.set_ttl(total=None)
    assert edge.boxes[sandbox.id].ttl == {"total": None}
    with pytest.raises(InvalidRequest, match="running_stop"):
        await sandbox.set_ttl(running_stop=-1)
    lines = [line async for line in sandbox.logs()]
    assert lines == ["created"] and abs(lines[0].t - time.time()) < 60
    await sandbox.files.write("/src/a", b"\xff")
    changes = await sandbox.changes(include=("src/**",))
    assert [(c.path, c.data) for c in changes.changes] == [(b"src/a", b"\xff")] and not changes.truncated
    found = await client.capabilities()
    assert found.backends == {"container": True} and found.features[1].remedy == "get one"
    assert [str(ref) for ref in await client.layers.list()] == ["debian@12"]
    assert (await client.layers.inspect("debian@12"))["kind"] == "base"
    with pytest.raises(NotFound):
        await client.layers.inspect("other/../@1")
