"""Which kills there are, and how they are dealt to rollouts: several to each, in the order in which they can fall."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import NamedTuple

VICTIMS = ("trainer", "apiserver", "edge", "launcher")
PHASES: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("join", ("job.open",)),
    ("open", ("rollout.create", "rollout.open", "rollout.made")),
    ("steps", ("step.intent", "step.run", "step.outcome")),
    ("rest", ("job.pause", "job.resume")),
    ("grade", ("grade.seal", "seal.journal", "seal.kill", "grade.apply", "grade.run")),
    ("finish", ("rollout.finish",)),
    ("stop", ("job.stop",)),
)
EACH = {"steps": 3, "grade": 2}
"""Kills of one rollout in a phase; one where nothing else is said."""
MOST_STEPS = 9
"""So many steps may pass before a kill among them falls; the first half of a rollout has more."""
TRIES = 8
"""A cell whose moment did not come is dealt again so often."""


class Cell(NamedTuple):
    victim: str
    phase: str
    step: str
    when: str

    def __str__(self) -> str:
        return f"{self.victim} {self.when} {self.step}"


CELLS = [
    Cell(victim, phase, step, when)
    for victim in VICTIMS
    for phase, steps in PHASES
    for step in steps
    for when in ("before", "after")
]


class Blow(NamedTuple):
    """skip: so often the cell's moment comes and passes first."""

    cell: Cell
    skip: int


class Plan:
    """Deals the cells, shuffled by the seed, again and again; what could not fall comes back."""

    def __init__(self, seed: int, cells: Iterable[Cell]) -> None:
        self._random = random.Random(seed)
        self._cells = list(cells)
        self._left: list[Cell] = []
        self._tries: dict[Cell, int] = {}

    def only(self, cells: Iterable[Cell]) -> None:
        """From now on only these, as long as they have not been tried too often."""
        self._left = [cell for cell in cells if self._tries.get(cell, 0) < TRIES]
        self._cells = list(self._left)

    def deal(self, most: int) -> list[Blow]:
        """The blows of the next rollout, at most so many, in their order."""
        if not self._left:
            self._left = self._random.sample(self._cells, len(self._cells))
        room = {phase: EACH.get(phase, 1) for phase, _ in PHASES}
        dealt: list[Cell] = []
        for cell in list(self._left):
            if len(dealt) < most and room[cell.phase]:
                room[cell.phase] -= 1
                self._left.remove(cell)
                dealt.append(cell)
        order = [phase for phase, _ in PHASES]
        dealt.sort(key=lambda cell: order.index(cell.phase))  # within a phase as they were drawn
        return [Blow(cell, self._skip(cell)) for cell in dealt]

    def _skip(self, cell: Cell) -> int:
        return self._random.randrange(MOST_STEPS) // (1 + self._tries.get(cell, 0)) if cell.phase == "steps" else 0

    def give_back(self, cell: Cell) -> None:
        tries = self._tries[cell] = self._tries.get(cell, 0) + 1
        if tries < TRIES:
            self._left.append(cell)
