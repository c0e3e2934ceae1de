"""Many sandboxes by one request; each is put to work as soon as it is ready and stopped when its work is done.

sudo dsec up && sudo python examples/burst.py 64
"""

import asyncio
import sys
import time

from dsec import DSecClient, DSecContainerRunArgs, Sandbox


async def work(index: int, sandbox: Sandbox) -> str:
    async with sandbox:
        return (await sandbox.run_shell(f"echo rollout {index} on $(hostname)", check=True)).text.strip()


async def main(count: int) -> None:
    args = DSecContainerRunArgs(container_image="debian@12", memory_limit_mb=256, labels={"example": "burst"})
    started = time.perf_counter()
    async with DSecClient() as client:
        tasks: list[asyncio.Task[str]] = []
        async with client.run_many(args, count=count) as burst:
            async for outcome in burst:
                if outcome.error is not None:
                    print(f"{outcome.index}: {outcome.error}", file=sys.stderr)
                    continue
                tasks.append(asyncio.create_task(work(outcome.index, outcome.sandbox)))
        results = await asyncio.gather(*tasks)
    print(results[0])
    print(f"{len(results)} of {count} sandboxes created, used and removed in {time.perf_counter() - started:.2f} s")


asyncio.run(main(int(sys.argv[1]) if len(sys.argv) > 1 else 64))
