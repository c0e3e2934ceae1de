"""The disturbed burst: when who is killed, and that what shows of it is counted."""

from __future__ import annotations

import msgspec
import pytest

from dsec import DSecContainerRunArgs, RolloutInfo, RolloutState
from dsec.demo.chaos import EDGE, TRAINER, _measured, moments, name_of
from dsec.demo.records import Chaos, Rollout
from dsec.demo.scripts import Script

from .test_report import rollout


def done(index: int, **other: object) -> Rollout:
    made = msgspec.structs.replace(rollout(Script.FIX, index, 1, 1), asked=3, ran=(0, 1, 2))
    return msgspec.structs.replace(made, **other)


def info(of: Rollout, **other: object) -> RolloutInfo:
    made = RolloutInfo(
        id="ro-local-000000000000", job="jb-local-000000000000", name=name_of(of), state=RolloutState.FINISHED, epoch=2,
        sandbox="", incarnation=1, layers=(), args=DSecContainerRunArgs(), steps=9, reward=1.0, valid=True,
    )  # fmt: skip
    return msgspec.structs.replace(made, **other)


CALM = [done(0), done(1)]


def measured(storm: list[Rollout], infos: list[RolloutInfo] | None = None) -> Chaos:
    return _measured(CALM, storm, infos if infos is not None else [info(one) for one in storm], (), 1.0, 2.0)


def test_nothing_shows() -> None:
    found = measured(CALM)
    assert found.ok and (found.commands, found.reruns, found.lost, found.different) == (6, 0, 0, ())


@pytest.mark.parametrize(
    ("storm", "reruns", "lost", "different"),
    [
        ([done(0, ran=(0, 1, 1, 2)), done(1)], 1, 0, 0),
        ([done(0, ran=(0, 0, 0, 1, 2)), done(1, ran=(0, 1, 2, 2))], 3, 0, 0),
        ([done(0, ran=(0, 2)), done(1)], 0, 1, 0),
        ([done(0, ran=()), done(1)], 0, 1, 0),
        ([done(0, reward=0), done(1)], 0, 0, 1),
        ([done(0, naive_reward=0), done(1)], 0, 0, 1),
        ([done(0)], 0, 1, 0),
    ],
)
def test_what_shows_is_counted(storm: list[Rollout], reruns: int, lost: int, different: int) -> None:
    found = measured(storm)
    assert (found.reruns, found.lost, len(found.different)) == (reruns, lost, different) and not found.ok


@pytest.mark.parametrize(
    "other", [{"state": RolloutState.LOST}, {"state": RolloutState.OPEN}, {"valid": False}, {"reward": None}], ids=str
)
def test_the_platforms_own_records_decide_what_is_lost(other: dict[str, object]) -> None:
    assert measured(CALM, [info(CALM[0]), info(CALM[1], **other)]).lost == 1
    assert measured(CALM, [info(CALM[0])]).lost == 1


def test_each_victim_is_killed_twice_spread_over_the_burst() -> None:
    for seed in range(20):
        plan = moments(seed)
        assert sorted(victim for _, victim in plan) == [EDGE, EDGE, TRAINER, TRAINER]
        shares = [share for share, _ in plan]
        assert shares == sorted(shares) and shares[0] > 0.05 and shares[-1] < 0.9
        assert plan == moments(seed)
    assert len({tuple(moments(seed)) for seed in range(20)}) == 20
