"""Jobs as a program has them: opened, kept, let go, and what is made in them."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator

import pytest

import dsec
from dsec import CapacityError, Conflict, DSecClient, DSecContainerRunArgs, InvalidRequest, JobState, NotFound
from tests.apiserver.fake_edge import FakeEdge
from tests.apiserver.serving import KEY, apiserver

ARGS = DSecContainerRunArgs("debian@12")
DEADLINE = 10.0
_numbers = itertools.count()


@pytest.fixture
def name() -> str:
    return f"job-{next(_numbers)}"


async def until(edge: FakeEdge, method: str, more: int) -> None:
    wanted = edge.calls.count(method) + more
    async with asyncio.timeout(DEADLINE):
        while edge.calls.count(method) < wanted:
            await asyncio.sleep(0.01)


async def test_it_is_opened_renewed_and_let_go(client: DSecClient, edge: FakeEdge, name: str) -> None:
    async with client.job(name, lease=0.3, max_sandboxes=4, labels={"team": "x"}) as job:
        info = await job.info()
        assert (info.name, info.id, info.state, info.lease) == (name, job.id, JobState.RUNNING, 0.3)
        assert info.limits.max_sandboxes == 4 and info.labels == {"team": "x"}
        await until(edge, "job.renew", 3)
    count = edge.calls.count("job.renew")
    await asyncio.sleep(0)
    assert edge.calls.count("job.renew") == count and not job._renewing
    assert (await job.info()).state is JobState.RUNNING, "leaving ends nothing"
    async with client.job(name) as again:
        assert again.id == job.id
        assert (await again.info()).limits.max_sandboxes == 4, "what is not given stays"


async def test_what_is_made_in_it_belongs_to_it(client: DSecClient, name: str) -> None:
    async with client.job(name, max_sandboxes=5) as job:
        async with job.run(ARGS) as one, job.run_container(ARGS) as two:
            async with job.run_many(ARGS, count=2) as burst:
                made = [outcome.sandbox async for outcome in burst]
            async with job.run_many([ARGS, ARGS]) as burst:
                both = [outcome async for outcome in burst]
            assert sorted(outcome.ok for outcome in both) == [False, True]
            [refused] = [outcome.error for outcome in both if not outcome.ok]
            assert isinstance(refused, CapacityError) and f"job {name} max_sandboxes" in str(refused)
            inside = {info.id async for info in job.sandboxes(states=["running"])}
            assert {one.id, two.id, *(sandbox.id for sandbox in made)} <= inside
            assert (await one.info()).job == name
        assert [info async for info in client.list(job="another")] == []


async def test_a_renewal_survives_what_dies_in_between(edge: FakeEdge, name: str) -> None:
    async with apiserver(edge.directory, edge) as url, DSecClient(url, KEY, request_timeout=0.5) as client:
        async with client.job(name, lease=0.3) as job:
            await until(edge, "job.renew", 1)
            await edge.silence()
            await asyncio.sleep(0)
            await edge.listen()
            await until(edge, "job.renew", 2)
            assert job._renewing is not None and not job._renewing.done()


async def test_it_ends_for_all_who_hold_it(client: DSecClient, name: str) -> None:
    async with client.job(name, lease=0.3) as job, client.job(name, lease=0.3) as other:
        await job.stop()
        assert other._renewing is not None
        async with asyncio.timeout(DEADLINE):
            await other._renewing
        with pytest.raises(Conflict):
            await other.run(ARGS)
    assert name in {info.name for info in await client.jobs(states=["stopped"])}
    assert name not in {info.name for info in await client.jobs(states=[JobState.RUNNING])}


async def test_a_handle_alone_opens_nothing(client: DSecClient, name: str) -> None:
    handle = client.job(name)
    with pytest.raises(NotFound):
        await handle.info()
    async with client.job(name):
        await handle.pause()
        assert (await handle.info()).paused_by == "request"
        await handle.resume()
        assert (await handle.usage()).created == 0
        await handle.stop()


@pytest.mark.parametrize("wrong", ["", "a/b", "..", "a b"])
async def test_names_that_are_none(client: DSecClient, wrong: str) -> None:
    with pytest.raises(InvalidRequest):
        async with client.job(wrong):
            pass


async def test_limits_and_leases_that_are_none(client: DSecClient, name: str) -> None:
    with pytest.raises(InvalidRequest):
        client.job(name, max_sandboxes=-1)
    with pytest.raises(InvalidRequest):
        async with client.job(name, lease=0):
            pass
    with pytest.raises(InvalidRequest):
        await client.jobs(states=["asleep"])


async def test_without_await(url: str, name: str) -> None:
    def session() -> list[str]:
        with dsec.sync.DSecClient(url, KEY) as client, client.job(name, max_sandboxes=3) as job:
            with job.run(ARGS) as sandbox:
                assert sandbox.info().job == name
                found = [info.id for info in job.sandboxes()]
            job.pause()
            job.resume()
            job.stop()
            assert job.usage().created == 0 and name in {info.name for info in client.jobs()}
            return found

    assert len(await asyncio.to_thread(session)) == 1


@pytest.fixture
async def two(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[tuple[FakeEdge, FakeEdge, DSecClient]]:
    directory = tmp_path_factory.mktemp("two")
    async with FakeEdge(directory, "one") as one, FakeEdge(directory, "two") as two:
        async with apiserver(directory, one, two) as url, DSecClient(url, KEY) as client:
            yield one, two, client


async def test_a_job_lives_on_one_edge(two: tuple[FakeEdge, FakeEdge, DSecClient]) -> None:
    one, other, client = two
    for number in range(12):
        async with client.job(f"j-{number}") as job, client.job(f"j-{number}") as again:
            assert job.id == again.id
            async with job.run_many(ARGS, count=6) as burst:
                edges = {outcome.sandbox.id.split("-")[1] async for outcome in burst}
            edges.add((await job.run(ARGS)).id.split("-")[1])
            assert edges == {job.id.split("-")[1]}
    assert one.jobs and other.jobs and not one.jobs.keys() & other.jobs.keys()
    assert [info.name for info in await client.jobs()] == [f"j-{number}" for number in range(12)]
    with pytest.raises(NotFound):
        await client.job("nope").info()
