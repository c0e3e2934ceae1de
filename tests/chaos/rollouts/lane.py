"""One platform on which rollouts are made while its processes, and the trainer, are killed."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import shutil
import signal
import tempfile
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Self

from dsec import DSecClient, DSecError, State
from dsec.cluster import embedded
from dsec.layers import LayerStore, build_directory

from ..operations import again
from ..orphans import orphans, traces_of
from ..trap import Trap
from ..victims import Victims, kill_one
from .judge import Seen, judge, look
from .plan import Blow, Cell
from .script import HIDDEN, TREE, Task
from .trainer import FAILED, Order, main, read_told

BASE = "debian@12"
DEADLINE_S = 150.0
_processes = multiprocessing.get_context("forkserver")
_processes.set_forkserver_preload(["tests.chaos.rollouts.trainer"])


class Trainer:
    """The process, started again as often as it is killed."""

    def __init__(self, order: Order) -> None:
        self._order = order
        self._process = self._start()

    def _start(self) -> multiprocessing.Process:
        process = _processes.Process(target=main, args=(self._order,))
        process.start()
        self._over = asyncio.ensure_future(_over(process))  # one who waits, however many ask
        return process  # type: ignore[return-value]

    def kill(self) -> bool:
        return self._process.pid is not None and not self._over.done() and kill_one(self._process.pid)

    async def ended(self) -> int:
        """Its exit code."""
        return await asyncio.shield(self._over)

    def start_again(self) -> None:
        self._process.close()
        self._process = self._start()

    async def close(self) -> None:
        if not self._over.done():
            self.kill()
        await self._over
        self._process.close()


async def _over(process: multiprocessing.Process) -> int:
    loop = asyncio.get_running_loop()
    over = loop.create_future()
    loop.add_reader(process.sentinel, over.set_result, None)
    try:
        await over
    finally:
        loop.remove_reader(process.sentinel)
    process.join()
    return process.exitcode or 0


class Results:
    """Of all lanes together."""

    def __init__(self) -> None:
        self.hits: Counter[Cell] = Counter()
        self.faults: Counter[str] = Counter()
        self.words: list[str] = []
        self.rollouts = 0

    def say(self, words: str) -> None:
        self.words.append(words)


class Lane:
    """`async with Lane(...)`: a platform of its own, gone at the end."""

    def __init__(self, number: int, results: Results) -> None:
        self._number = number
        self._results = results
        self._state = Path(tempfile.mkdtemp(prefix="dsec-chaos-", dir="/var/tmp"))
        self._made = 0

    async def __aenter__(self) -> Self:
        os.environ["DSEC_STEPS"] = str(self._state / "steps.sock")  # lanes begin one after the other
        self._trap = Trap(self._state / "steps.sock")
        store = own_store(self._state / "store")
        self._task = Task(
            base=BASE,
            environment=_published(store, self._state, "shop", "workspace", TREE),
            tests=_published(store, self._state, "shop-tests", "toolkit", HIDDEN),
        )
        self._endpoint = await asyncio.to_thread(embedded.up, self._state, port=0, store=store.root)
        self._key = Path(self._endpoint.key_file).read_text().strip()
        self._victims = Victims(self._state, Path(self._endpoint.run))
        self._client = DSecClient(self._endpoint.url, self._key)
        await self._client.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        with suppress(DSecError):
            for left in await orphans(self._client, Path(self._endpoint.run)):
                self._results.faults["orphans"] += 1
                self._results.say(f"lane {self._number}: left over: {left}")
        await self._client.__aexit__(None, None, None)
        await asyncio.to_thread(embedded.down, self._state)
        await self._trap.close()
        shutil.rmtree(self._state, ignore_errors=True)
        for left in traces_of(self._state):
            self._results.faults["orphans"] += 1
            self._results.say(f"lane {self._number}: left behind: {left}")

    async def undisturbed(self, seed: int) -> Seen:
        """A rollout of this seed that nobody is killed in."""
        name = f"plain-{seed}"
        async with asyncio.timeout(DEADLINE_S):
            seen = await self._through(self._order(name, seed), [], None)
        failed = seen.answers("failed")
        if failed or seen.info is None or sorted(seen.evidence) != seen.answers("tags")[0]:
            raise AssertionError(f"an undisturbed rollout of seed {seed}: {failed}, {seen.evidence}")
        return seen

    async def rollout(self, seed: int, blows: list[Blow], undisturbed: Seen) -> list[Cell]:
        """One with kills; the cells whose moment did not come."""
        self._results.rollouts += 1
        left = [blow.cell for blow in blows]
        order = self._order(f"r{self._number}-{self._made}", seed)
        try:
            async with asyncio.timeout(DEADLINE_S):
                seen = await self._through(order, blows, left)
            faults = judge(seen, undisturbed)
        except (TimeoutError, DSecError) as error:
            told = read_told(Path(order.told))
            last = told[-1].name if told else "nothing"
            faults = [("lost", f"{type(error).__name__}: {error}; the last that the trainer was told is {last}")]
        for kind, words in faults:
            self._results.faults[kind] += 1
            fell = ", ".join(str(blow.cell) for blow in blows if blow.cell not in left)
            self._results.say(f"{kind}: seed {seed}, rollout {order.name} ({fell}): {words}")
        return left

    def _order(self, name: str, seed: int) -> Order:
        self._made += 1
        told = str(self._state / f"told-{name}")
        return Order(self._endpoint.url, self._key, f"job-{name}", name, seed, self._task, told)

    async def _through(self, order: Order, blows: list[Blow], left: list[Cell] | None) -> Seen:
        """From the job's beginning to its end. What came to be is looked at before the job is stopped."""
        early = [blow for blow in blows if blow.cell.phase != "stop"]
        await self._under(order, early, left)
        seen = await again(lambda: look(self._client, order.job, order.name, read_told(Path(order.told))))
        await self._under(_ending(order), blows[len(early) :], left)
        await self._is_gone(seen)
        return seen

    async def _under(self, order: Order, blows: list[Blow], left: list[Cell] | None) -> None:
        """The trainer until it is through, under these blows."""
        trainer = Trainer(order)
        waiting = list(blows)
        armed: Blow | None = None
        try:
            while True:
                if armed is None and waiting:
                    armed = waiting.pop(0)
                    self._trap.arm(armed.cell.step, armed.cell.when, self._blow(armed.cell, trainer), skip=armed.skip)
                code = await self._struck_or_ended(trainer, armed is not None)
                if armed is not None and self._trap.struck.is_set():
                    if self._trap.killed and left is not None:
                        self._results.hits[armed.cell] += 1
                        left.remove(armed.cell)
                    armed = None
                if code is None:
                    continue
                if code != -signal.SIGKILL:
                    if code not in (0, FAILED):
                        raise AssertionError(f"the trainer of {order.name} ended with {code}")
                    return
                trainer.start_again()
        finally:
            self._trap.disarm()
            await trainer.close()

    def _blow(self, cell: Cell, trainer: Trainer) -> Callable[[str], bool]:
        if cell.victim == "trainer":
            return lambda _: trainer.kill()
        return lambda sandbox: self._victims.kill(cell.victim, sandbox)

    async def _struck_or_ended(self, trainer: Trainer, armed: bool) -> int | None:
        """The trainer's exit code; None when the blow fell first."""
        ended = asyncio.ensure_future(trainer.ended())
        struck = asyncio.ensure_future(self._trap.struck.wait()) if armed else None
        try:
            await asyncio.wait([task for task in (ended, struck) if task], return_when=asyncio.FIRST_COMPLETED)
            return ended.result() if ended.done() else None
        finally:
            for task in (ended, struck):
                if task is not None:
                    task.cancel()
            await asyncio.gather(*(task for task in (ended, struck) if task), return_exceptions=True)

    async def _is_gone(self, seen: Seen) -> None:
        if seen.info is not None and seen.info.sandbox:
            sandbox = seen.info.sandbox
            info = await again(lambda: _info(self._client, sandbox))
            if info is not State.STOPPED:
                self._results.faults["lost"] += 1
                self._results.say(f"lost: sandbox {sandbox} is {info.value} after its job was stopped")


def _ending(order: Order) -> Order:
    return Order(order.url, order.key, order.job, order.name, order.seed, order.task, order.told, stop=True)


async def _info(client: DSecClient, sandbox: str) -> State:
    return next(iter([info.state async for info in client.list() if info.id == sandbox]))


def own_store(root: Path) -> LayerStore:
    """The layers of this machine, and room for some that nobody else must see."""

    def link_or_copy(source: str, target: str) -> None:
        try:
            os.link(source, target)
        except OSError:
            shutil.copy2(source, target)

    shutil.copytree(LayerStore().root, root, copy_function=link_or_copy)
    return LayerStore(root)


def _published(store: LayerStore, folder: Path, name: str, kind: str, files: dict[str, str]) -> str:
    tree = folder / "tree" / name
    for path, text in files.items():
        where = tree / path
        where.parent.mkdir(parents=True, exist_ok=True)
        where.write_text(text)
    ref = build_directory(store, tree, name=name, version="1", kind=kind, prefix="/workspace", owner=(0, 0))  # type: ignore[arg-type]
    return f"{ref.name}@{ref.digest}"
