"""Filter, sample, least loaded, overlay: over several edges that exist only as numbers."""

from __future__ import annotations

import random
from collections import Counter

import msgspec
import pytest

from dsec.placement.choice import Placement
from dsec.protocol.errors import ErrorKind, Fault
from dsec.protocol.specs import EdgeStatus


class Edge(msgspec.Struct):
    status: EdgeStatus
    connected: bool = True
    suspect: bool = False
    asked_at: float = 0.0

    @property
    def name(self) -> str:
        return self.status.edge


def edge(name: str, running: int = 0, limit: int = 100, **more: bool | float) -> Edge:
    status = EdgeStatus(
        edge=name, epoch=1, version="0", started_at=0, sandboxes={"running": running, "stopped": 10_000},
        max_sandboxes=limit, creating=0, queued=0, memory_available=1, memory_total=1, disk_free=1,
    )  # fmt: skip
    return Edge(status, **more)  # type: ignore[arg-type]


class Clock:
    now = 1.0

    def __call__(self) -> float:
        return self.now


def placement(sample: int = 3) -> tuple[Placement, Clock]:
    clock = Clock()
    return Placement(sample=sample, rng=random.Random(7), clock=clock), clock


def test_least_loaded_of_the_sample() -> None:
    chooser, _ = placement()
    assert chooser.choose([edge("a", 50), edge("b", 10), edge("c", 90)]) == "b"
    assert chooser.choose([edge("small", 10, limit=20), edge("big", 40, limit=1000)]) == "big", "a share, not a count"


def test_unhealthy_ones_only_when_nothing_else_is_there() -> None:
    chooser, _ = placement()
    assert chooser.choose([edge("gone", connected=False), edge("quiet", suspect=True), edge("busy", 99)]) == "busy"
    assert chooser.choose([edge("gone", connected=False), edge("quiet", suspect=True)]) == "quiet"
    with pytest.raises(Fault) as caught:
        chooser.choose([edge("gone", connected=False)])
    assert caught.value.body.kind is ErrorKind.CONNECTION_LOST and caught.value.body.retryable


def test_full_ones_are_asked_last_and_refusals_are_named() -> None:
    chooser, _ = placement()
    full, free = edge("full", 100), edge("free", 99)
    assert chooser.choose([full, free]) == "free"
    assert chooser.choose([full]) == "full", "the edge has the last word"
    with pytest.raises(Fault, match="refused by free, full") as caught:
        chooser.choose([full, free], exclude={"free", "full"})
    assert caught.value.body.kind is ErrorKind.CAPACITY


def test_own_placements_count_until_a_later_snapshot_has_them() -> None:
    chooser, clock = placement()
    a, b = edge("a", 0), edge("b", 5)
    assert [chooser.choose([a, b]) for _ in range(6)].count("a") == 6
    assert chooser.load(a) > 0 and chooser.load(a) == pytest.approx(chooser.load(b), abs=0.011)
    clock.now = 2.0
    a.asked_at = b.asked_at = 1.5
    a.status = edge("a", 6).status
    assert chooser.load(a) == 0.06 and chooser.load(b) == 0.05, "the snapshot speaks for itself again"


def test_one_replica_spreads_a_burst() -> None:
    chooser, _ = placement()
    edges = [edge(name, running) for name, running in (("a", 0), ("b", 0), ("c", 60))]
    placed = chooser.spread(edges, 100)
    assert sum(placed.values()) == 100 and placed["a"] == pytest.approx(placed["b"], abs=8)
    assert placed.get("c", 0) < 25
    assert placement()[0].spread([edge("only")], 500) == {"only": 500}


def test_replicas_do_not_herd() -> None:
    """Each replica sees the same snapshot; sampling keeps them from all taking the same edge."""
    edges = [edge(f"e{i}", i) for i in range(20)]
    chosen = Counter(Placement(rng=random.Random(seed)).choose(edges) for seed in range(200))
    assert len(chosen) > 5 and max(chosen.values()) < 60


def test_an_only_edge_leaves_no_trace_of_what_it_has_seen() -> None:
    chooser, clock = placement()
    only = edge("only")
    for clock.now in range(1, 500):
        only.asked_at = clock.now - 1.5
        chooser.choose([only])
    assert len(chooser._recent["only"]) <= 3
