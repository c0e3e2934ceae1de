# ruff: noqa: ANN401 - what JSON gives is anything
"""The edge is killed before or after each durable point of a step: nothing is done twice, nothing is lost, nobody need ask."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from dsec.cluster import embedded
from tests.chaos.trap import Trap

from .raw import Opened, Raw, Refused
from .test_crashes import kill, pid_of, states  # noqa: F401 (a fixture)

pytestmark = pytest.mark.e2e
POINTS = [(name, when) for name in ("step.intent", "step.run", "step.outcome") for when in ("before", "after")]
DEADLINE_S = 40.0
Ask = Callable[[Opened, int], Awaitable[Any]]


async def command(rollout: Opened, step: int) -> Any:
    reply = await rollout.shell(step, f"echo x >> /n{step}; sleep 0.05; wc -l < /n{step}; exit 3")
    assert (reply["stdout"], reply["done"]["exit_code"]) == (b"1\n", 3)


async def detached(rollout: Opened, step: int) -> Any:
    started = await rollout.json(step, "POST", "/processes", json={"command": f"echo x >> /n{step}"})
    assert started["exec_id"] == f"step:{step}" and started["pid"] > 1


async def move(rollout: Opened, step: int) -> Any:
    """Twice, it would find nothing to move. The file is there since the rollout began."""
    await rollout.json(step, "POST", "/files/move", json={"source": _path(f"/m{step}"), "target": _path("/moved")})


async def mkdir(rollout: Opened, step: int) -> Any:
    await rollout.json(step, "POST", "/files/mkdir", json={"path": _path(f"/d{step}"), "parents": False})


async def remove(rollout: Opened, step: int) -> Any:
    await rollout.json(step, "DELETE", "/files", params={"path": f"/r{step}"})


async def write(rollout: Opened, step: int) -> Any:
    told = await rollout.json(step, "PUT", "/files", params={"path": f"/w{step}"}, content=b"w" * 100_000)
    assert told == {"size": 100_000}


async def close(rollout: Opened, step: int) -> Any:
    """Twice, it would find no session."""
    await rollout.json(step, "DELETE", f"/sessions/s{step}")


async def signal(rollout: Opened, step: int) -> Any:
    await rollout.json(step, "POST", "/processes/counter/signal", json={"signal": "USR1"})


def _path(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


KINDS: dict[str, Ask] = {
    "exec": command, "detached": detached, "move": move, "mkdir": mkdir, "remove": remove, "write": write, "close": close,
    "signal": signal,
}  # fmt: skip


class Stage:
    def __init__(self, state: Path, trap: Trap, raw: Raw) -> None:
        self.state, self.trap, self.raw = state, trap, raw

    def arm(self, name: str, when: str) -> None:
        self.trap.arm(name, when, lambda _: (kill(pid_of(self.state, "edge")), True)[1])


@pytest.fixture
async def stage(states: list[Path], monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Stage]:  # noqa: F811
    monkeypatch.setenv("DSEC_STEPS", str(states[0] / "steps.sock"))
    trap = Trap(states[0] / "steps.sock")
    endpoint = await asyncio.to_thread(embedded.up, states[0], port=0)
    async with Raw(endpoint) as raw:
        yield Stage(states[0], trap, raw)
    await trap.close()


async def again(asking: Callable[[], Awaitable[Any]]) -> Any:
    """As a client does it: what may be repeated is."""
    async with asyncio.timeout(DEADLINE_S):
        while True:
            try:
                return await asking()
            except Refused as refused:
                if not refused.retryable:
                    raise
            await asyncio.sleep(0.05)


async def opened(stage: Stage, name: str) -> Opened:
    """With what the steps need, put there beside the rollout."""
    rollout: Opened = await again(lambda: stage.raw.open(name))
    sandbox = f"/v1/sandboxes/{rollout.info['sandbox']}"
    numbers = range(len(POINTS))
    line = ";".join(f"touch /m{n} /r{n}" for n in numbers)
    await stage.raw.json("POST", f"{sandbox}/exec", json={"command": line})
    for number in numbers:
        await stage.raw.json("POST", f"{sandbox}/sessions", json={"name": f"s{number}"})
    counting = "trap 'echo usr1 >> /counted' USR1; touch /ready; while :; do sleep 0.01; done"
    await stage.raw.json("POST", f"{sandbox}/processes", json={"command": counting, "exec_id": "counter"})
    await stage.raw.json("POST", f"{sandbox}/exec", json={"command": "until [ -e /ready ]; do sleep 0.01; done"})
    return rollout


@pytest.mark.parametrize("kind", KINDS)
async def test_a_step_is_done_once(stage: Stage, kind: str) -> None:
    rollout = await opened(stage, kind)
    for number, (name, when) in enumerate(POINTS):
        stage.arm(name, when)
        await again(lambda number=number: KINDS[kind](rollout, number))
        stage.trap.disarm()
        assert stage.trap.killed, (name, when)
    later = await again(lambda: stage.raw.open(kind))
    for number in range(len(POINTS)):
        await KINDS[kind](later, number)
    info = await later.now()
    assert (info["steps"], info["unknown"]) == (len(POINTS), [])
    sandbox = f"/v1/sandboxes/{rollout.info['sandbox']}"
    want = len(POINTS) if kind in ("exec", "detached", "signal") else 0
    line = f"for i in $(seq 100); do [ $(cat /n* /counted 2>/dev/null | wc -l) -ge {want} ] && break; sleep 0.1; done"
    counted = await stage.raw.json(
        "POST", f"{sandbox}/exec", json={"command": f"{line}; cat /n* /counted 2>/dev/null | wc -l"}
    )
    assert int(base64.b64decode(counted["stdout"])) == want
    await later.finish()


@pytest.mark.parametrize("kind", ["exec", "detached", "move", "close", "signal"])
async def test_an_outcome_that_nobody_asks_for_is_learned(stage: Stage, kind: str) -> None:
    rollout = await opened(stage, kind)
    stage.arm("step.outcome", "before")
    with pytest.raises(Refused) as refused:
        await KINDS[kind](rollout, 0)
    assert refused.value.retryable
    async with asyncio.timeout(DEADLINE_S):
        while not stage.trap.killed or (await again(rollout.now))["unknown"]:
            await asyncio.sleep(0.02)
    [record] = await rollout.steps()
    assert record["done_at"] is not None and "error" not in record
    await KINDS[kind](rollout, 0)
    await rollout.finish()
