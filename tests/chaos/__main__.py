"""`python -m tests.chaos --seed N --points N`: prints the coverage table and, as its last line, a JSON summary.

A point is a cell (process, operation, durable step, before or after it): while the edge stands there, the process is killed.
The cells are shuffled by the seed and taken in turn, so that they are drawn evenly. Everything must be as if nothing had
happened, but for sandboxes whose own aether was the victim: these end by name.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import re
import shutil
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import msgspec
from rich.console import Console
from rich.table import Table

from dsec import DSecClient, DSecContainerRunArgs, DSecError
from dsec.cluster import embedded
from dsec.layers import LayerStore, build_directory

from .operations import OPERATIONS, STEPS, Point, Verdict, again
from .orphans import orphans, traces_of
from .trap import Trap
from .victims import PROCESSES, Victims

BASE = "debian@12"
MUST_LIVE = "the sandbox ended although its aether was not the victim"


class Cell(NamedTuple):
    process: str
    operation: str
    step: str
    when: str


class Summary(msgspec.Struct):
    seed: int
    points: int = 0
    orphans: int = 0
    lost: int = 0
    doubled: int = 0
    wrong_codes: int = 0
    empty_cells: int = 0
    seconds: float = 0.0

    @property
    def good(self) -> bool:
        return not (self.orphans or self.lost or self.doubled or self.wrong_codes or self.empty_cells)


def _is_there(cell: Cell) -> bool:
    """A sandbox has an aether from the end of its launch to the end of its teardown; the others are always there."""
    unborn = ("create.mount before", "create.mount after", "create.launch before")
    gone = ("remove.teardown after", "remove.ended before", "remove.ended after")
    return cell.process != "aether" or f"{cell.step} {cell.when}" not in (*unborn, *gone)


CELLS = [
    cell
    for process in PROCESSES
    for operation, steps in STEPS.items()
    for step in steps
    for when in ("before", "after")
    if _is_there(cell := Cell(process, operation, step, when))
]


class Chaos:
    def __init__(
        self,
        client: DSecClient,
        endpoint: embedded.Endpoint,
        trap: Trap,
        store: LayerStore,
        seed: int,
        cells: list[Cell],
    ) -> None:
        self._client = client
        self._victims = Victims(Path(endpoint.state), Path(endpoint.run))
        self._state, self._run = Path(endpoint.state), Path(endpoint.run)
        self._trap = trap
        self._store = store
        self._cells = cells
        self._random = random.Random(seed)
        self.summary = Summary(seed)
        self.hits: Counter[Cell] = Counter()
        self.words: list[str] = []

    async def run(self, points: int) -> None:
        turn: list[Cell] = []
        for number in range(points):
            if not turn:
                turn = list(self._cells)
                self._random.shuffle(turn)
            cell = turn.pop()
            print(f"{number + 1:4}/{points} {' '.join(cell)}", file=sys.stderr, flush=True)
            await self._point(number, cell)

    async def _point(self, number: int, cell: Cell) -> None:
        """One kill. What the operation says of itself is judged, and who lives afterwards."""
        self.summary.points += 1
        args = DSecContainerRunArgs(
            container_image=BASE, layers=(self._fresh_layer(number),) if cell.operation == "create" else ()
        )
        sandbox = await again(lambda: self._client.run(DSecContainerRunArgs(container_image=BASE)))
        try:
            async with self._helper_at_work(cell):
                self._trap.arm(cell.step, cell.when, lambda at: self._blow(cell, at))
                try:
                    verdict = await OPERATIONS[cell.operation](Point(number, self._client, args, sandbox))
                except (DSecError, TimeoutError) as error:
                    verdict = Verdict(lost=f"{cell.operation}: {type(error).__name__}: {error}")
                self._trap.disarm()
        finally:
            with suppress(DSecError):
                await again(sandbox.stop)
        if cell.process == "supervisor":  # nobody but the next `dsec up` replaces it
            await asyncio.to_thread(embedded.up, self._state, port=0, store=self._store.root)
        self._book(number, cell, verdict)
        left = await orphans(self._client, self._run)
        if left:
            self.summary.orphans += len(left)
            self._say(number, cell, f"orphans: {', '.join(left)}")

    def _blow(self, cell: Cell, sandbox: str) -> bool:
        if cell.process == "helper" and (cell.step, cell.when) == ("create.mount", "before"):
            # the helper starts when the edge goes on
            threading.Thread(target=self._victims.kill_next, args=("helper", sandbox, 2.0)).start()
            return True
        return self._victims.kill(cell.process, sandbox)

    def _book(self, number: int, cell: Cell, verdict: Verdict) -> None:
        if self._trap.killed:
            self.hits[cell] += 1
        else:
            self._say(number, cell, "nobody was hit" if self._trap.hit else "the step was never taken")
        if verdict.died and cell.process != "aether":
            verdict = verdict._replace(lost=MUST_LIVE)
        for name, words in (("lost", verdict.lost), ("doubled", verdict.doubled), ("wrong_codes", verdict.wrong_code)):
            if words:
                setattr(self.summary, name, getattr(self.summary, name) + 1)
                self._say(number, cell, f"{name}: {words}")

    def _say(self, number: int, cell: Cell, words: str) -> None:
        self.words.append(f"point {number + 1} ({' '.join(cell)}): {words}")

    def _fresh_layer(self, number: int) -> str:
        """One that no edge has mounted yet, so that creation mounts it."""
        with tempfile.TemporaryDirectory() as directory:
            (Path(directory) / "number").write_text(f"{self.summary.seed}-{number}-{time.time_ns()}")
            return str(
                build_directory(self._store, Path(directory), name=f"chaos-{number}", version="1", kind="toolkit")
            )

    @asynccontextmanager
    async def _helper_at_work(self, cell: Cell) -> AsyncIterator[None]:
        """A helper that walks an upper and waits for its reader, so that there is one to kill."""
        if cell.process != "helper":
            yield
            return
        other = await again(lambda: self._client.run(DSecContainerRunArgs(container_image=BASE)))
        await again(lambda: other.run_shell("for i in 1 2 3 4 5 6 7 8 9 10 11 12; do truncate -s 20M /root/$i; done"))
        unread = asyncio.create_task(_changes_unread(self._client, other.id))
        try:
            await asyncio.to_thread(_until, lambda: bool(self._victims.pids("helper", "")))
            yield
        finally:
            unread.cancel()
            await again(other.stop)


async def _changes_unread(client: DSecClient, sandbox: str) -> None:
    """Asks for more than fits on the way, and reads none of it."""
    async with client._transport.stream(  # the public method reads what it asks for
        "POST", f"/v1/sandboxes/{sandbox}/changes", body=b'{"max_bytes": 250000000}', accept="application/x-ndjson"
    ):
        await asyncio.Event().wait()


def _own_store(root: Path) -> LayerStore:
    """The layers of this machine, and room for some that nobody else must see."""

    def link_or_copy(source: str, target: str) -> None:
        try:
            os.link(source, target)
        except OSError:
            shutil.copy2(source, target)

    shutil.copytree(LayerStore().root, root, copy_function=link_or_copy)
    return LayerStore(root)


def _until(happened: Callable[[], bool], patience_s: float = 10.0) -> None:
    deadline = time.monotonic() + patience_s
    while not happened():
        if time.monotonic() > deadline:
            raise TimeoutError("it did not happen")


def _table(hits: Counter[Cell], cells: Sequence[Cell]) -> Table:
    """Kills by process, and operation with step and side; blank where nothing was to be killed."""
    table = Table(title="kills that fell where they should")
    table.add_column("operation, step")
    for process in PROCESSES:
        table.add_column(process, justify="right")
    for operation, steps in STEPS.items():
        for step in steps:
            for when in ("before", "after"):
                row = [Cell(process, operation, step, when) for process in PROCESSES]
                counts = [(str(hits[cell]) if hits[cell] else "[red]0") if cell in cells else "" for cell in row]
                if any(counts):
                    table.add_row(f"{operation}: {when} {step}", *counts)
    return table


async def _main(arguments: argparse.Namespace) -> Summary:
    started = time.monotonic()
    cells = [cell for cell in CELLS if re.search(arguments.only, " ".join(cell))]
    points = arguments.points if arguments.points is not None else len(cells)
    state = Path(tempfile.mkdtemp(prefix="dsec-chaos-", dir="/var/tmp"))
    os.environ["DSEC_STEPS"] = str(state / "steps.sock")
    trap = Trap(state / "steps.sock")
    store = _own_store(state / "store")
    try:
        endpoint = await asyncio.to_thread(embedded.up, state, port=0, store=state / "store")
        async with DSecClient(endpoint.url, Path(endpoint.key_file).read_text().strip()) as client:
            chaos = Chaos(client, endpoint, trap, store, arguments.seed, cells)
            await chaos.run(points)
    finally:
        await asyncio.to_thread(embedded.down, state)
        await trap.close()
        shutil.rmtree(state, ignore_errors=True)
    left = traces_of(state)
    summary = chaos.summary
    summary.orphans += len(left)
    chaos.words += [f"left behind: {what}" for what in left]
    summary.empty_cells = sum(chaos.hits[cell] == 0 for cell in cells) if points >= len(cells) else 0
    summary.seconds = round(time.monotonic() - started, 1)
    console = Console(width=140)
    console.print(_table(chaos.hits, cells))
    for word in chaos.words:
        console.print(word, highlight=False, markup=False)
    return summary


def main() -> int:
    parser = argparse.ArgumentParser(prog="make chaos", description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--points", type=int, default=None, help="how many; each cell once when left out")
    parser.add_argument("--only", default="", help="regular expression over `process operation operation.step when`")
    summary = asyncio.run(_main(parser.parse_args()))
    print(msgspec.json.encode(summary).decode())
    return 0 if summary.good else 1


if __name__ == "__main__":
    sys.exit(main())
