"""What a rollout does: a seeded order of commands, files, sessions, processes and network changes, a grade, and its end.

Whatever is done leaves a trace of its own inside the sandbox: each command appends its name to one file, so that two runs are
two lines. Nothing that is told depends on time, so every run of a seed is told the same.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import TypeVar

import msgspec

import dsec
from dsec import DSecContainerRunArgs, Job, Rollout

T = TypeVar("T")
EVIDENCE = "/var/evidence"
TREE = {"src/shop.py": "def total(prices):\n    return sum(prices[1:])\n"}
FIX = "def total(prices):\n    return sum(prices)\n"
HIDDEN = {
    "check.py": (
        "import sys\nsys.path.insert(0, '/workspace/src')\n"
        "import shop\nsys.exit(0 if shop.total([1, 2, 3]) == 6 else 3)\n"
    )
}


class Task(msgspec.Struct, frozen=True):
    """environment and tests: references of layers."""

    environment: str
    tests: str
    base: str

    def args(self) -> DSecContainerRunArgs:
        return DSecContainerRunArgs(self.base, layers=(self.environment,), memory_limit_mb=256, workdir="/workspace")


Tell = Callable[[str, object], None]
"""Takes the name of something that was asked, and what the trainer was told."""


class Script:
    def __init__(self, client: dsec.DSecClient, job: Job, rollout: Rollout, task: Task, seed: int, tell: Tell) -> None:
        self._client = client
        self._job = job
        self._rollout = rollout
        self._task = task
        self._seed = seed
        self._tell = tell
        self.tags: list[str] = []
        """Names that must be in the evidence, each once."""

    async def play(self) -> None:
        acts = [self._shell, self._files, self._session, self._process, self._signal, self._together, self._network]
        acts += [self._shell, self._failure]
        random.Random(self._seed).shuffle(acts)
        for number, act in enumerate(acts):
            await act(f"{act.__name__[1:]}{number}")
            if number == len(acts) // 2:
                await self._rest()
        await self._told("changes", self._changes())
        await self._end()

    async def _told(self, name: str, asked: Awaitable[T], seen: Callable[[T], object] = lambda told: told) -> T:
        answer = await asked
        self._tell(name, seen(answer))
        return answer

    def _line(self, tag: str, rest: str = "") -> str:
        """A line of shell that leaves its mark."""
        self.tags.append(tag)
        return f"echo {tag} >> {EVIDENCE}; {rest}"

    # -- acts: each with a name of its own --

    async def _shell(self, tag: str) -> None:
        code = self._seed % 7
        await self._told(
            tag, self._rollout.run_shell(self._line(tag, f"seq 1 9000; echo said >&2; exit {code}")), ended
        )

    async def _files(self, tag: str) -> None:
        files, place = self._rollout.files, f"/var/{tag}"
        await self._told(f"{tag}.mkdir", files.mkdir(place, parents=False))
        await self._told(f"{tag}.write", files.write(f"{place}/new", tag.encode() * 20_000))
        await self._told(f"{tag}.move", files.move(f"{place}/new", f"{place}/moved"))
        await self._told(f"{tag}.read", files.read(f"{place}/moved"), len)
        await self._told(f"{tag}.write2", files.write(f"{place}/gone", b"x"))
        await self._told(f"{tag}.remove", files.remove(f"{place}/gone"))
        await self._told(f"{tag}.stat", files.stat(f"{place}/moved"), lambda info: info.size)

    async def _session(self, tag: str) -> None:
        async with await self._rollout.open_session() as session:
            for turn in range(3):
                line = self._line(f"{tag}.{turn}", "count=$((count + 1)); cd /var; echo $count $PWD")
                await self._told(f"{tag}.{turn}", session.run_shell(line), ended)

    async def _process(self, tag: str) -> None:
        process = await self._rollout.start(self._line(tag, "read word; echo got $word; exit 9"), stdin=True)
        self._tell(f"{tag}.start", process.exec_id)
        await self._told(f"{tag}.write", process.write(b"word\n"))
        await self._told(f"{tag}.wait", process.wait(), ended)

    async def _signal(self, tag: str) -> None:
        process = await self._rollout.start(self._line(tag, "exec sleep 1000"))
        mark = f"until grep -q {tag} {EVIDENCE}; do sleep 0.01; done"  # or it could be ended before it leaves it
        await self._told(f"{tag}.mark", self._rollout.run_shell(mark), ended)
        await self._told(f"{tag}.signal", process.signal("TERM"))
        await self._told(f"{tag}.wait", process.wait(), lambda result: result.exit_code)

    async def _together(self, tag: str) -> None:
        """Steps at once: their numbers follow the order of the calls, their ends do not."""
        pauses = (0.06, 0.0, 0.03)
        commands = [
            self._rollout.run_shell(self._line(f"{tag}.{n}", f"sleep {pause}; echo {n}"))
            for n, pause in enumerate(pauses)
        ]
        written = self._rollout.files.write(f"/var/{tag}", b"together")
        results = await asyncio.gather(*commands, written)
        self._tell(tag, [*(ended(result) for result in results[:-1]), results[-1]])

    async def _network(self, tag: str) -> None:
        for rules in ({"example.org": False}, {}):
            network = await self._rollout.set_network(rules)
            self._tell(f"{tag}.{len(rules)}", dict(network.rules))

    async def _failure(self, tag: str) -> None:
        """An error of the sandbox's own is an outcome, and is told again as the same error."""
        try:
            await self._rollout.files.read(f"/var/missing-{tag}")
        except FileNotFoundError as error:
            self._tell(tag, str(error))

    async def _changes(self) -> list[tuple[str, str, int]]:
        found = await self._rollout.changes(include=["var/**"])
        return [(change.path.decode(), change.kind.value, change.size) for change in found.changes]

    # -- around them --

    async def _rest(self) -> None:
        """An idle job gives its memory back; it is no step."""
        await self._job.pause()
        await self._job.resume()

    async def _end(self) -> None:
        fixed = self._seed % 2 == 0
        await self._told(
            "fix", self._rollout.files.write("/workspace/src/shop.py", FIX if fixed else "import nothing\n")
        )
        verdict = await self._client.grade(
            self._task.args(), self._rollout.sandbox, tests=self._task.tests, grade_id=f"gr-{self._rollout.id}",
            runner=dsec.CommandRunner(argv=("python3", "-B", "check.py")), timeout=60,
        )  # fmt: skip
        self._tell("verdict", [verdict.reward, verdict.valid, verdict.reason.value])
        await self._rollout.finish(reward=verdict.reward, valid=verdict.valid, stop=False)
        self._tell("finished", verdict.reward)


def ended(result: dsec.ExecResult) -> list[object]:
    return [result.exit_code, result.stdout, result.stderr, result.signal]
