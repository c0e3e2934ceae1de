"""A trainer that is killed (SIGKILL) twice in the middle of a rollout, is started again each time, and loses nothing.

sudo dsec up && sudo python examples/preempted.py
"""

import asyncio
import secrets
import signal
import subprocess
import sys

from dsec import DSecClient, DSecContainerRunArgs, Rollout

TURNS = 20
KILLED_AFTER = (6, 13)  # live turns
ARGS = DSecContainerRunArgs("debian@12", memory_limit_mb=256)


async def episode(rollout: Rollout) -> float:
    """What would be a loop around a model: each turn depends on what the sandbox said before."""
    said = "start"
    for turn in range(TURNS):
        await rollout.files.write("/root/note.txt", f"turn {turn}, after {said!r}\n")
        result = await rollout.run_shell("cat /root/note.txt >> /root/log; sleep 0.05; wc -l < /root/log", check=True)
        said = result.text.strip()
        print(f"turn {turn}: {'replayed' if result.replayed else 'live'}, {said} lines", flush=True)
    return 1.0 if said == str(TURNS) else 0.0


async def trainer(name: str) -> None:
    """Nothing in here knows of preemption: it is the same program each time."""
    async with DSecClient() as client, client.rollout(name, ARGS) as rollout:
        reward = await episode(rollout)
        info = await rollout.finish(reward=reward)
        print(f"finished with reward {info.reward:g} after {info.steps} steps", flush=True)
        print(f"this trainer replayed {rollout.replayed} of them", flush=True)


def run_until(name: str, kill_after: int | None) -> None:
    """A trainer in a process of its own, killed once it has made that turn live."""
    process = subprocess.Popen([sys.executable, __file__, name], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for line in process.stdout:
        print("   ", line, end="")
        if kill_after is not None and line.startswith(f"turn {kill_after}: live"):
            process.send_signal(signal.SIGKILL)
            break
    process.stdout.close()
    if process.wait() == -signal.SIGKILL:
        print(f"killed in turn {kill_after + 1 if kill_after is not None else '?'}")
    elif process.returncode:
        sys.exit(process.returncode)


def main() -> None:
    name = f"preempted/{secrets.token_hex(4)}"
    for kill_after in (*KILLED_AFTER, None):
        run_until(name, kill_after)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        asyncio.run(trainer(sys.argv[1]))
    else:
        main()
