"""`python -m dsec.demo.trainer FOLDER`: the trainer as a process of its own, which may be killed and started again.

It keeps nothing between two lives but what it was told: it opens the same job and the same rollouts, is given what they have
recorded, and goes on. Where the platform is and the key to it are in DSEC_URL and DSEC_API_KEY.
"""

from __future__ import annotations

import asyncio
import pickle
import sys
from pathlib import Path

import msgspec

from dsec import DSecClient
from dsec.demo.burst import plan, run_burst
from dsec.demo.records import Rollout
from dsec.demo.rollout import PreparedTask

_TOLD, _DONE = "plan.pickle", "rollouts.json"


class Told(msgspec.Struct, frozen=True):
    """What a trainer is told. began: of the burst, on the monotonic clock, so that the times of all its lives fit together."""

    job: str
    tasks: list[PreparedTask]
    rollouts: int
    concurrency: int
    seed: int
    began: float


def tell(folder: Path, told: Told) -> None:
    """folder is for our eyes only: what is in it is run."""
    (folder / _TOLD).write_bytes(pickle.dumps(told))


def records(folder: Path) -> list[Rollout]:
    """What it left when it was done, in the order of the plan."""
    return msgspec.json.decode((folder / _DONE).read_bytes(), type=list[Rollout])


async def train(folder: Path) -> None:
    told: Told = pickle.loads((folder / _TOLD).read_bytes())
    planned = plan(told.tasks, told.rollouts, told.seed)
    async with DSecClient() as client, client.job(told.job) as job:
        done = await run_burst(client, job, planned, told.concurrency, began=told.began)
    part = folder / f"{_DONE}.part"
    part.write_bytes(msgspec.json.encode(done))
    part.replace(folder / _DONE)


if __name__ == "__main__":
    asyncio.run(train(Path(sys.argv[1])))
