"""The judge sees what it is there for, and every kill is dealt."""

from __future__ import annotations

from collections import Counter

import msgspec
import pytest

from dsec import DSecContainerRunArgs, RolloutInfo, RolloutState, StepRecord
from dsec.protocol.rollouts import Blob

from .judge import Seen, judge
from .plan import CELLS, PHASES, TRIES, Plan
from .trainer import Told

INFO = RolloutInfo(
    id="ro-e-0", job="", name="n", state=RolloutState.FINISHED, epoch=1, sandbox="sb-e-0", incarnation=1, layers=(),
    args=DSecContainerRunArgs(), steps=2, reward=1.0, valid=True,
)  # fmt: skip


def step(number: int, stdout: bytes = b"out") -> StepRecord:
    blob = Blob(digest=stdout.hex(), size=len(stdout), total=len(stdout), data=stdout)
    return StepRecord(
        step=number, kind="exec", digest="", request=msgspec.Raw(b"{}"), sandbox="", incarnation=1, asked_at=0.0, done_at=1.0,
        result=msgspec.Raw(b'{"exit_code": 0}'), outputs={"stdout": blob},
    )  # fmt: skip


TOLD = (Told(1, "a", [0]), Told(1, "b", [1]), Told(1, "verdict", [1.0, True]), Told(1, "tags", ["a", "b"]))
PLAIN = Seen(TOLD, INFO, (step(0), step(1)), {"var/f": ("write", b"x")}, ("a", "b"))


def changed(**fields: object) -> Seen:
    return msgspec.structs.replace(PLAIN, **fields)


def test_the_same_is_no_fault() -> None:
    twice = (Told(2, "a", [0]), *TOLD)
    assert judge(changed(told=twice, evidence=("b", "a")), PLAIN) == []


@pytest.mark.parametrize(
    ("seen", "kinds"),
    [
        (changed(told=(*TOLD, Told(2, "a", [7]))), {"diverged"}),
        (changed(told=(*TOLD, Told(2, "failed", "ReplayDivergence: x"))), {"diverged"}),
        (changed(told=(*TOLD, Told(2, "failed", "SandboxUnavailable: x"))), {"lost"}),
        (changed(told=TOLD[1:]), {"lost"}),
        (changed(told=(*TOLD, Told(2, "verdict", [0.0, True]))), {"wrong_rewards"}),
        (changed(evidence=("a", "b", "a")), {"doubled"}),
        (changed(evidence=("a",)), {"lost"}),
        (changed(evidence=("a", "b", "c")), {"doubled"}),
        (changed(files={"var/f": ("write", b"y")}), {"lost"}),
        (changed(files={}), {"lost"}),
        (changed(steps=(step(0), step(1, b"other"))), {"diverged"}),
        (changed(steps=(step(0),)), {"lost", "diverged"}),
        (changed(info=msgspec.structs.replace(INFO, reward=0.0)), {"wrong_rewards"}),
        (changed(info=msgspec.structs.replace(INFO, state=RolloutState.OPEN)), {"wrong_rewards"}),
        (changed(info=None), {"wrong_rewards"}),
    ],
)
def test_each_fault_is_seen(seen: Seen, kinds: set[str]) -> None:
    assert {kind for kind, _ in judge(seen, PLAIN)} == kinds


def test_every_cell_is_dealt_in_the_order_in_which_it_can_fall() -> None:
    plan, dealt = Plan(3, CELLS), Counter[object]()
    order = [phase for phase, _ in PHASES]
    while sum(dealt.values()) < 2 * len(CELLS):
        blows = plan.deal(8)
        phases = [order.index(blow.cell.phase) for blow in blows]
        assert blows and phases == sorted(phases)
        dealt.update(blow.cell for blow in blows)
    assert set(dealt) == set(CELLS) and max(dealt.values()) <= 3


def test_what_could_not_fall_comes_back_a_few_times() -> None:
    plan = Plan(1, CELLS[:1])
    for _ in range(TRIES):
        [blow] = plan.deal(8)
        plan.give_back(blow.cell)
    assert [blow.cell for blow in plan.deal(8)] == CELLS[:1], "all are dealt anew"
