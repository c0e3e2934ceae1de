"""`python -m tests.chaos.rollouts --seed N --points N`: prints the coverage table and, as its last line, a JSON summary.

A point is one kill -9 of a victim while a rollout stands before or after a durable step. A rollout takes several, is carried
on by the same trainer started again, and is then compared with an undisturbed one of the same seed: what the trainer was told
each time, what is in the log, what its commands left in the sandbox, and the reward. lost: a recorded step that is gone, or a
rollout that could not go on; doubled: something ran twice; diverged: something else was told than before; wrong_rewards.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import sys
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack

import msgspec
from rich.console import Console
from rich.table import Table

from .judge import FAULTS, Seen
from .lane import Lane, Results
from .plan import CELLS, PHASES, VICTIMS, Cell, Plan

LANES = 2
SCRIPTS = 4
AT_ONCE = 8
"""Kills of one rollout."""


class Summary(msgspec.Struct):
    seed: int
    points: int
    rollouts: int
    lost: int
    doubled: int
    diverged: int
    wrong_rewards: int
    orphans: int
    empty_cells: int
    seconds: float

    @property
    def good(self) -> bool:
        return not (any(getattr(self, name) for name in FAULTS) or self.orphans or self.empty_cells)


class Campaign:
    def __init__(self, seed: int, points: int, cells: Sequence[Cell], results: Results) -> None:
        self._seed = seed
        self._points = points
        self._cells = cells
        self._plan = Plan(seed, cells)
        self._results = results
        self._number = 0
        self._undisturbed: dict[int, asyncio.Future[Seen]] = {}

    async def run(self, lane: Lane) -> None:
        """Rollouts on one lane, as long as there are points to be had, or cells without one that could have one."""
        while True:
            most = self._points - self._results.hits.total()
            if most <= 0:
                most = AT_ONCE
                self._plan.only(() if self._points < len(self._cells) else self._empty())
            blows = self._plan.deal(min(AT_ONCE, most))
            if not blows:
                return
            seed = self._seed * 1000 + self._number % SCRIPTS
            self._number += 1
            undisturbed = await self._reference(lane, seed)
            for cell in await lane.rollout(seed, blows, undisturbed):
                self._plan.give_back(cell)
            print(f"{self._results.hits.total():4}/{self._points}", file=sys.stderr, flush=True)

    def _empty(self) -> list[Cell]:
        return [cell for cell in self._cells if not self._results.hits[cell]]

    async def _reference(self, lane: Lane, seed: int) -> Seen:
        if (known := self._undisturbed.get(seed)) is None:
            known = self._undisturbed[seed] = asyncio.ensure_future(lane.undisturbed(seed))
        return await asyncio.shield(known)


async def _main(arguments: argparse.Namespace) -> Summary:
    started = time.monotonic()
    cells = [cell for cell in CELLS if re.search(arguments.only, str(cell))]
    points = arguments.points if arguments.points is not None else len(cells)
    results = Results()
    campaign = Campaign(arguments.seed, points, cells, results)
    async with AsyncExitStack() as stack:
        lanes = [await stack.enter_async_context(Lane(number, results)) for number in range(arguments.lanes)]
        await asyncio.gather(*(campaign.run(lane) for lane in lanes))
    console = Console(width=120)
    console.print(_table(results, cells))
    for word in results.words:
        console.print(word, highlight=False, markup=False)
    return Summary(
        seed=arguments.seed,
        points=results.hits.total(),
        rollouts=results.rollouts,
        **{name: results.faults[name] for name in FAULTS},
        orphans=results.faults["orphans"],
        empty_cells=sum(results.hits[cell] == 0 for cell in cells) if points >= len(cells) else 0,
        seconds=round(time.monotonic() - started, 1),
    )


def _table(results: Results, cells: Sequence[Cell]) -> Table:
    table = Table(title="kills that fell where they should")
    table.add_column("durable step")
    for victim in VICTIMS:
        table.add_column(victim, justify="right")
    for phase, steps in PHASES:
        for step in steps:
            for when in ("before", "after"):
                row = [Cell(victim, phase, step, when) for victim in VICTIMS]
                counts = [
                    (str(results.hits[cell]) if results.hits[cell] else "[red]0") if cell in cells else ""
                    for cell in row
                ]
                if any(counts):
                    table.add_row(f"{when} {step}", *counts)
    return table


def main() -> int:
    parser = argparse.ArgumentParser(prog="make chaos-rollouts", description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--points", type=int, default=None, help="how many; each cell once when left out")
    parser.add_argument("--lanes", type=int, default=LANES, help="platforms at once")
    parser.add_argument("--only", default="", help="regular expression over `victim when step`")
    summary = asyncio.run(_main(parser.parse_args()))
    print(msgspec.json.encode(summary).decode())
    return 0 if summary.good else 1


if __name__ == "__main__":
    sys.exit(main())
