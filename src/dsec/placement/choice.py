"""Filter -> sample k -> least loaded, with this replica's own recent placements laid over the last snapshot.

Many replicas place at once without talking to each other. Taking the least loaded of a few random edges keeps them from
all choosing the same one; the overlay keeps one replica from doing so between two beats (report, 3).
"""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable
from typing import Protocol

from dsec.protocol.errors import ErrorKind, Fault
from dsec.protocol.specs import EdgeStatus

SAMPLE = 3
_COUNTED = ("creating", "running", "paused", "stopping")


class Candidate(Protocol):
    """One edge as the watcher last saw it."""

    @property
    def name(self) -> str: ...
    @property
    def status(self) -> EdgeStatus: ...
    @property
    def connected(self) -> bool: ...
    @property
    def suspect(self) -> bool: ...
    @property
    def asked_at(self) -> float:
        """Monotonic time at which the status was asked for: what was placed later is not in it."""
        ...


class Placement:
    """Chooses edges for one replica. Not thread-safe; all calls come from one loop."""

    def __init__(
        self, *, sample: int = SAMPLE, rng: random.Random | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._sample = sample
        self._rng = rng or random.Random()
        self._clock = clock
        self._recent: dict[str, deque[tuple[float, int]]] = {}

    def choose(self, candidates: Iterable[Candidate], count: int = 1, exclude: Collection[str] = ()) -> str:
        """The edge for `count` sandboxes, counted as placed there from now on. Fault when there is none."""
        eligible = self._filter([c for c in candidates if c.name not in exclude])
        if not eligible:
            raise _nowhere(exclude)
        if len(eligible) == 1:
            chosen = eligible[0]
        else:
            sampled = self._rng.sample(eligible, min(self._sample, len(eligible)))
            chosen = min(sampled, key=self.load)
        recent = self._recent.setdefault(chosen.name, deque())
        _forget(recent, chosen.asked_at)
        recent.append((self._clock(), count))
        return chosen.name

    def spread(self, candidates: Iterable[Candidate], count: int) -> dict[str, int]:
        """How many of a burst go to which edge; one choice per share, so that no edge gets more than its turn."""
        pool = list(candidates)
        share = max(1, count // (8 * max(1, len(pool)))) if len(pool) > 1 else count
        placed: dict[str, int] = {}
        while count > 0:
            step = min(share, count)
            edge = self.choose(pool, step)
            placed[edge] = placed.get(edge, 0) + step
            count -= step
        return placed

    def load(self, candidate: Candidate) -> float:
        """Share of the edge's sandboxes in use, own placements that the snapshot lacks included."""
        status = candidate.status
        used = sum(status.sandboxes.get(state, 0) for state in _COUNTED) + status.queued
        return (used + self._unseen(candidate)) / max(1, status.max_sandboxes)

    def _filter(self, candidates: list[Candidate]) -> list[Candidate]:
        """Healthy before suspect, with room before full: an edge has the last word, so a full one may still be asked."""
        connected = [c for c in candidates if c.connected]
        healthy = [c for c in connected if not c.suspect] or connected
        if len(healthy) == 1:
            return healthy
        return [c for c in healthy if self.load(c) < 1] or healthy

    def _unseen(self, candidate: Candidate) -> int:
        recent = self._recent.get(candidate.name)
        if not recent:
            return 0
        _forget(recent, candidate.asked_at)
        return sum(count for _, count in recent)


def _forget(recent: deque[tuple[float, int]], asked_at: float) -> None:
    """Placements that the snapshot has seen."""
    while recent and recent[0][0] < asked_at:
        recent.popleft()


def _nowhere(refused: Collection[str]) -> Fault:
    hint = "`dsec status` shows the edges; `dsec up` starts one"
    if not refused:
        return Fault(ErrorKind.CONNECTION_LOST, "no edge answers", hint=hint, retryable=True)
    names = ", ".join(sorted(refused))
    return Fault(ErrorKind.CAPACITY, f"no edge can take a sandbox now (refused by {names})", hint=hint, retryable=True)
