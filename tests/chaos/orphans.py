"""What lives although no record has it, and what a whole platform leaves behind."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

from dsec import DSecClient, State
from dsec.cluster import embedded

from ..e2e.leftovers import traces
from .operations import again
from .victims import is_alive

PATIENCE_S = 10.0
POOL = 16
_LIVE = (State.CREATING, State.RUNNING, State.PAUSED, State.STOPPING)


async def orphans(client: DSecClient, run: Path) -> list[str]:
    """Sandboxes with a socket and no record, and PID 1s that are neither a sandbox's nor in the pool, after some patience."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        found = await again(lambda: _look(client, run))
        if not found or time.monotonic() > deadline:
            return found
        await asyncio.sleep(0.05)


async def _look(client: DSecClient, run: Path) -> list[str]:
    live = {info.id async for info in client.list(states=_LIVE)}
    names = os.listdir(run / "sb")
    named = {name.removesuffix(".sock") for name in names if name.endswith(".sock")}
    left = [f"socket of {name}" for name in sorted(named - live)]
    slots = [name for name in names if name.startswith(".s") and is_alive(*map(int, name.split(".")[2:]))]
    spare = len(slots) - len(named)
    if spare > POOL:
        left.append(f"{spare} PID 1s in a pool of {POOL}")
    return left


def traces_of(state: Path) -> list[str]:
    """Processes, groups, loop devices of a platform that is no more."""
    name, found = embedded._edge_name(state), traces()
    groups = [group for group in found.cgroups if group.endswith(f"dsec-{name}")]
    return groups + [line for line in (*found.loops, *found.processes, *found.mounts) if str(state) in line]
