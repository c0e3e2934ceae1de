"""Jobs of real sandboxes: they pause, resume and end together, and no process of the platform is needed for that to hold."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

import dsec
from dsec import CapacityError, DSecClient, DSecContainerRunArgs, JobState, Reason, Sandbox, State
from dsec.cluster import embedded

from .conftest import BASE
from .raw import Json, Raw, Refused
from .test_crashes import client_of, kill, pid_of, states  # noqa: F401 (a fixture)

pytestmark = pytest.mark.e2e
ARGS = DSecContainerRunArgs(container_image=BASE)
DEADLINE = 30.0


async def until(holds: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(DEADLINE):
        while not await holds():
            await asyncio.sleep(0.02)


async def states_of(job: dsec.Job) -> dict[str, int]:
    return (await job.usage()).sandboxes


async def made(job: dsec.Job, count: int) -> list[Sandbox]:
    async with job.run_many(ARGS, count=count) as burst:
        return [outcome.sandbox async for outcome in burst]


async def test_all_of_a_job_pauses_resumes_and_ends(client: DSecClient) -> None:
    async with client.job("e2e-all") as job:
        sandboxes = await made(job, 12)
        other = await client.run(ARGS)
        await asyncio.gather(*(sandbox.run_shell("echo $RANDOM > /kept; cp /kept /copy") for sandbox in sandboxes))
        ticking = await sandboxes[0].start("while :; do date +%N > /tick; done")
        await job.pause()
        assert await states_of(job) == {"paused": 12} and (await other.info()).state is State.RUNNING
        before = await job.usage()
        assert (await sandboxes[3].run_shell("cmp /kept /copy")).ok, "one is used, and runs"
        assert await states_of(job) == {"paused": 11, "running": 1}
        await job.resume()
        assert await states_of(job) == {"running": 12}
        assert all(result.ok for result in await asyncio.gather(*(s.run_shell("cmp /kept /copy") for s in sandboxes)))
        assert ticking.exec_id in [process.exec_id for process in await sandboxes[0].processes() if process.running]
        assert before.cpu_s > 0

        async def used_more() -> bool:
            return (await job.usage()).cpu_s > before.cpu_s + 0.05

        await until(used_more)
        await job.stop()
        assert {(await sandbox.info()).reason for sandbox in sandboxes} == {Reason.JOB_END}
        usage = await job.usage()
        assert (usage.created, usage.ended, usage.invalid, usage.sandboxes) == (12, 12, 0, {})
        assert usage.cpu_s > before.cpu_s and usage.memory_mb_s > 0
        await other.stop()


async def test_a_burst_stays_within_the_jobs_limits(client: DSecClient) -> None:
    async with client.job("e2e-limits", max_sandboxes=7) as job:
        outcomes = []
        async with job.run_many(ARGS, count=25) as burst:
            async for outcome in burst:
                outcomes.append(outcome)
                outcome.claimed = True
        refused = [outcome.error for outcome in outcomes if not outcome.ok]
        assert len(refused) == 18 and all(isinstance(error, CapacityError) for error in refused)
        assert (await job.usage()).created == 7
        async with client.job("e2e-limits", max_sandboxes=8) as same, same.run(ARGS):
            pass
        await job.stop()


async def test_a_client_that_is_killed_pauses_its_job_and_another_goes_on(
    client: DSecClient, platform: embedded.Endpoint
) -> None:
    program = (
        "import asyncio, dsec, sys\n"
        "async def main():\n"
        "    async with dsec.DSecClient() as client, client.job('e2e-killed', lease=1) as job:\n"
        f"        sandbox = await job.run(dsec.DSecContainerRunArgs('{BASE}'))\n"
        "        await sandbox.files.write('/work', 'half done')\n"
        "        await sandbox.start('sleep 600')\n"
        "        print(sandbox.id, flush=True)\n"
        "        await asyncio.sleep(600)\n"
        "asyncio.run(main())\n"
    )
    key = Path(platform.key_file).read_text().strip()
    env = {**os.environ, "DSEC_URL": platform.url, "DSEC_API_KEY": key}
    trainer = subprocess.Popen([sys.executable, "-c", program], env=env, stdout=subprocess.PIPE, text=True)  # noqa: ASYNC220
    assert trainer.stdout is not None
    id = (await asyncio.to_thread(trainer.stdout.readline)).strip()
    handle = client.job("e2e-killed")
    assert (await handle.info()).state is JobState.RUNNING
    trainer.send_signal(signal.SIGKILL)
    trainer.wait()

    async def paused() -> bool:
        return await states_of(handle) == {"paused": 1}

    await until(paused)
    assert (await handle.info()).paused_by == "lease"
    async with client.job("e2e-killed", lease=30) as job, client.attach(id) as sandbox:
        assert (await job.info()).state is JobState.RUNNING
        assert await sandbox.files.read_text("/work") == "half done"
        assert [process.running for process in await sandbox.processes()] == [True]
        await job.stop()


async def test_only_times_to_live_end_a_paused_job(client: DSecClient) -> None:
    async with client.job("e2e-ttl", lease=0.5) as job:
        sandbox = await job.run(DSecContainerRunArgs(BASE, ttl_running_stop=1.5))

    async def ended() -> bool:
        return (await sandbox.info()).state is State.STOPPED

    await until(ended)
    assert (await sandbox.info()).reason is Reason.TTL_IDLE
    info = await job.info()
    assert (info.state, info.paused_by, info.usage.sandboxes) == (JobState.PAUSED, "lease", {})
    await job.stop()


async def test_jobs_outlive_edge_and_apiserver(states: list[Path]) -> None:  # noqa: F811
    async with client_of(embedded.up(states[0], port=0)) as client:
        async with client.job("lasting", lease=3, max_sandboxes=5, labels={"a": "b"}) as job:
            sandboxes = await made(job, 3)
            for role in ("edge", "apiserver", "edge"):
                kill(pid_of(states[0], role))
                assert all(r.ok for r in await asyncio.gather(*(s.run_shell("true") for s in sandboxes)))
            info = await job.info()
            assert (info.id, info.state, info.epoch) == (job.id, JobState.RUNNING, 1)
            assert info.limits.max_sandboxes == 5 and info.labels == {"a": "b"} and info.usage.created == 3
            async with job.run_many(ARGS, count=4) as burst:
                outcomes = [outcome async for outcome in burst]
            assert sum(outcome.ok for outcome in outcomes) == 2, "the limit counts what was there before"
            pausing = asyncio.create_task(job.pause())
            kill(pid_of(states[0], "edge"))
            await pausing
            assert await states_of(job) == {"paused": 3}
            kill(pid_of(states[0], "edge"))
            assert (await job.info()).state is JobState.PAUSED and await states_of(job) == {"paused": 3}
            stopping = asyncio.create_task(job.stop())
            kill(pid_of(states[0], "edge"))
            await stopping
            assert (await job.info()).state is JobState.STOPPED
            assert {(await sandbox.info()).reason for sandbox in sandboxes} == {Reason.JOB_END}


async def test_rollouts_of_a_job_are_its_own(client: DSecClient, platform: embedded.Endpoint) -> None:
    async with Raw(platform) as raw, client.job("e2e-rollouts", max_sandboxes=1) as job:
        with pytest.raises(Refused) as refused:
            await raw.json(
                "POST", "/v1/rollouts", json={"name": "r", "job": "e2e-none", "args": {"container_image": BASE}}
            )
        assert refused.value.kind == "not_found"
        first = await raw.open("r", job=job.name)
        assert first.info["job"] == job.id
        again = await raw.open("r", job=job.name)
        assert again.id == first.id
        [inside] = [info async for info in job.sandboxes()]
        assert (inside.id, inside.job) == (first.info["sandbox"], job.name)
        with pytest.raises(Refused, match="max_sandboxes"):
            await raw.open("another", job=job.name)
        await again.shell(0, "true")
        usage = await job.usage()
        assert (usage.rollouts, usage.steps) == (1, 1)
        await job.stop()
        assert (await first.now())["reason"] == "job_end"
    async with client.job("e2e-rollouts") as later:
        afresh = await raw_open(platform, later.name)
        assert afresh["steps"] == 0 and afresh["job"] == later.id != job.id
        await later.stop()


async def raw_open(platform: embedded.Endpoint, job: str) -> Json:
    async with Raw(platform) as raw:
        return (await raw.open("r", job=job)).info
