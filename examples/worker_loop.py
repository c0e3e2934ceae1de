"""A rollout's loop in a worker sandbox, which drives an agent sandbox by a scoped key: the trainer is killed, nothing is lost.

sudo dsec up && sudo python examples/worker_loop.py

The same loop also runs in the trainer, where it goes on by replay after a kill. Both give the same trajectory.
"""

import asyncio
import secrets
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
from aiohttp import web

from dsec import DSecClient, DSecContainerRunArgs

AGENT = DSecContainerRunArgs("debian@12")
TURNS = 12
Ask = Callable[[list[str]], Awaitable[str | None]]

# -- the loop: one program, wherever it runs ---------------------------------------------------------------------------


async def loop(client: DSecClient, job: str, name: str, ask: Ask) -> None:
    """A rollout from its first turn to its last. Run again, it goes on where it was: what has run is replayed."""
    transcript = ["count the turns"]
    async with client.job(job).rollout(name, AGENT) as rollout:
        while (line := await ask(transcript)) is not None:
            result = await rollout.run_shell(line)
            transcript += [line, result.text]


def policy(transcript: list[str]) -> str | None:
    """Stands for a model. Each command leaves a mark, so one that ran twice would show."""
    turn = len(transcript) // 2
    return f"echo turn {turn} >> /root/ran; wc -l < /root/ran" if turn < TURNS else None


# -- in a worker sandbox -----------------------------------------------------------------------------------------------


async def worker(job: str, name: str) -> None:
    """What runs in the worker: the API is http://dsec (DSEC_URL says so), the model http://model."""
    key = Path("/root/key").read_text()
    async with DSecClient(api_key=key) as client, aiohttp.ClientSession() as session:

        async def ask(transcript: list[str]) -> str | None:
            """As long as it takes: without a trainer there is no model, and there will be another trainer."""
            while True:
                try:
                    async with session.post("http://model", json=transcript, raise_for_status=True) as answer:
                        return await answer.json()
                except aiohttp.ClientError:
                    await asyncio.sleep(0.1)

        await loop(client, job, name, ask)


async def drive_by_worker(client: DSecClient, job: str, name: str, model: str) -> None:
    """Finds the worker by its name, or makes it, and waits for it. A trainer that comes back does the same and attaches."""
    from dsec.layers import LayerStore, build_sdk

    sdk = build_sdk(LayerStore())  # `import dsec` inside; built once
    args = DSecContainerRunArgs(
        "debian@12", layers=(f"{sdk.name}@{sdk.digest}",), network_rules={"dsec": True}, ttl_running_stop=None, ttl_total=3600
    )  # fmt: skip
    async with client.job(job).rollout(f"worker-of/{name}", args) as sandbox:
        key = await client.keys.create(job, rollouts=name, may=("use", "create"), layers=AGENT.container_image)
        await sandbox.sandbox.files.write("/root/key", key.key, mode=0o600)  # no step: a log is no place for keys
        await sandbox.files.write("/root/loop.py", Path(__file__).read_bytes())
        process = await sandbox.start(["python3", "/root/loop.py", "worker", job, name])
        async with sandbox.expose(model, name="model"):
            await process.wait(check=True)


# -- the trainer -------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def served() -> AsyncIterator[str]:
    """The model as an endpoint of this process."""

    async def answer(request: web.Request) -> web.Response:
        await asyncio.sleep(0.05)
        return web.json_response(policy(await request.json()))

    app = web.Application()
    app.router.add_post("/", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def trainer(place: str, job: str, name: str) -> None:
    """It remembers nothing: started again, it opens the same job and the same rollout."""

    async def ask(transcript: list[str]) -> str | None:
        await asyncio.sleep(0.05)
        return policy(transcript)

    async with DSecClient() as client, client.job(job):
        if place == "worker":
            async with served() as model:
                await drive_by_worker(client, job, name, model)
        else:
            await loop(client, job, name, ask)


# -- and what befalls it -----------------------------------------------------------------------------------------------


async def disturbed(client: DSecClient, place: str, job: str, name: str) -> None:
    """A trainer that is killed at its third turn and at its eighth, and started again."""
    for kill_at in (3, 8, None):
        process = await asyncio.create_subprocess_exec(sys.executable, __file__, "trainer", place, job, name)
        if kill_at is None:
            if await process.wait():
                raise SystemExit(f"the trainer with its loop in the {place} ended with {process.returncode}")
            return
        while await turns(client, job, name) < kill_at:
            if process.returncode is not None:
                raise SystemExit("the trainer ended too early")
            await asyncio.sleep(0.02)
        process.kill()
        await process.wait()
        print(f"loop in the {place}: the trainer was killed at turn {await turns(client, job, name)}", flush=True)


async def turns(client: DSecClient, job: str, name: str) -> int:
    return sum([info.steps async for info in client.rollouts.list(job=job, name=name)])


async def main() -> None:
    job = f"worker-loop-{secrets.token_hex(3)}"
    async with DSecClient() as client, client.job(job) as opened:
        found = []
        for place in ("worker", "trainer"):
            await disturbed(client, place, job, f"in-{place}/1")
            found += [info async for info in client.rollouts.list(job=job, name=f"in-{place}/1")]
            last = [record async for record in client.rollouts.steps(found[-1].id)][-1]
            print(
                f"loop in the {place}: {found[-1].steps} turns; {last.outputs['stdout'].data.decode().strip()} commands ran"
            )
        compared = await client.rollouts.diff(found[0].id, found[1].id)
        print("the same trajectories" if compared.same else compared)
        await opened.stop()


if __name__ == "__main__":
    asyncio.run({"worker": worker, "trainer": trainer}[sys.argv[1]](*sys.argv[2:]) if sys.argv[1:] else main())
