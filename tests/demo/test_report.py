"""The JSON file, the table and the HTML report of a burst."""

from __future__ import annotations

import json
import re

import msgspec
import pytest

from dsec.demo import charts
from dsec.demo.records import Burst, Chaos, Kill, Life, Phase, Rollout, Span, Step, peak, quantiles, summarise
from dsec.demo.report import disturbances, milliseconds, render
from dsec.demo.scripts import Script
from dsec.demo.show import closing, table
from dsec.protocol.grading import Dropped, DropReason, FailedTest
from dsec.protocol.specs import ChangeKind


def rollout(script: Script, index: int, reward: int | None, naive: int | None, *, expected: bool = True) -> Rollout:
    start = float(index)
    return Rollout(
        task="calc-2",
        script=script,
        index=index,
        reward=reward,
        naive_reward=naive,
        valid=reward is not None,
        reason="passed" if reward else "1 of 1 target tests fail" if reward == 0 else "CapacityError: full",
        as_expected=expected and reward is not None,
        create_ms=3.0 + index,
        exec_ms=200.0,
        naive_ms=300.0,
        grade_create_ms=4.0,
        grade_ms=500.0,
        steps=(Step("pwd <here>", 0, 2.5, "/workspace"),),
        failed=() if reward else (FailedTest("tests/t.py::test[<b>]", "fail_to_pass", "failed"),),
        dropped=(Dropped("conftest.py", ChangeKind.WRITE, DropReason.TEST_CONFIG, True),)
        if script is Script.CHEAT
        else (),
        graded_files=("calc/__init__.py",),
        output="assert <1>",
        spans=(Span(Phase.SETUP, start, start + 0.1), Span(Phase.TOOLS, start + 0.1, start + 0.5)),
        sandboxes=(Life(f"sb-{index}", "agent", start, start + 1.5),),
    )


@pytest.fixture
def burst() -> Burst:
    rollouts = [
        rollout(Script.FIX, 0, 1, 1),
        rollout(Script.NOOP, 1, 0, 0),
        rollout(Script.CHEAT, 2, 0, 1),
        rollout(Script.BREAK, 3, None, None),
    ]
    return summarise(rollouts, concurrency=2, seed=0, wall_s=5.0, prepare_s=1.0)


def test_the_file_has_the_fields_that_were_promised(burst: Burst) -> None:
    document = json.loads(msgspec.json.encode(burst))
    for entry in document["rollouts"]:
        assert {
            "task",
            "script",
            "reward",
            "naive_reward",
            "valid",
            "reason",
            "create_ms",
            "exec_ms",
            "grade_ms",
        } <= set(entry)
    assert document["summary"]["invalid"] == 1 and document["summary"]["valid"] == 3
    assert document["expected"] == {"fix": [1, 1], "noop": [0, 0], "break": [0, 0], "cheat": [0, 1]}
    assert msgspec.json.decode(msgspec.json.encode(burst), type=Burst) == burst


def test_an_invalid_or_unexpected_sample_is_not_ok(burst: Burst) -> None:
    assert not burst.ok
    good = [rollout(Script.FIX, 0, 1, 1)]
    assert summarise(good, concurrency=1, seed=0, wall_s=1, prepare_s=0).ok
    bad = [rollout(Script.FIX, 0, 0, 1, expected=False)]
    assert not summarise(bad, concurrency=1, seed=0, wall_s=1, prepare_s=0).ok


def test_every_zero_and_every_invalid_sample_leads_to_evidence(burst: Burst) -> None:
    page = render(burst, "1.0")
    anchors = set(re.findall(r'<details id="([^"]+)"', page))
    links = set(re.findall(r'href="#([^"]+)"', page))
    assert links == anchors == {f"r-calc-2-{index}" for index in range(4)}
    invalid = page[page.index("<h2>Invalid samples") : page.index("<h2>Evidence")]
    assert "CapacityError: full" in invalid and 'id="r-calc-2-3"' in invalid
    assert "fooled 1 of 1 times" in page


def test_the_page_is_one_file_and_escapes_what_it_shows(burst: Burst) -> None:
    page = render(burst, "1.0")
    assert not re.search(r'(?:src|href)="(?!#)', page) and "@import" not in page and "url(" not in page
    assert "test[&lt;b&gt;]" in page and "<b>]" not in page
    assert "pwd &lt;here&gt;" in page and "assert &lt;1&gt;" in page


def test_the_table_shows_ours_beside_naive(burst: Burst) -> None:
    columns, rows = table(burst)
    assert columns[:5] == ("task", "fix", "noop", "break", "cheat")
    assert rows[0][:5] == ("calc-2", "1 / 1", "0 / 0", "invalid", "0 / 1")
    assert rows[-1][0] == "all"
    assert any(line.startswith("INVALID calc-2 break #3: CapacityError") for line in closing(burst))


STORM = Chaos(
    kills=(Kill("edge", 0.31, 0.8), Kill("trainer", 0.5, 1.2)), commands=40, reruns=0, lost=0, different=(), calm_wall_s=4.0,
    wall_s=9.0,
)  # fmt: skip


def test_a_disturbed_burst_says_what_befell_it(burst: Burst) -> None:
    assert disturbances(4, STORM)[-1] == "4 rollouts, 0 re-run, 0 lost, rewards identical"
    assert disturbances(4, STORM)[0] == "edge killed (SIGKILL) at 31% of the steps; it went on after 0.8 s"
    page = render(msgspec.structs.replace(burst, chaos=STORM), "1.0")
    assert "edge killed (SIGKILL) at 31%" in page and "4 rollouts, 0 re-run, 0 lost, rewards identical" in page
    assert "killed" not in render(burst, "1.0")


@pytest.mark.parametrize("trace", [{"reruns": 1}, {"lost": 1}, {"different": ("calc-2/fix/0",)}], ids=str)
def test_whatever_shows_of_the_kills_is_not_ok(trace: dict[str, object]) -> None:
    good = [rollout(Script.FIX, 0, 1, 1)]
    shown = msgspec.structs.replace(STORM, **trace)
    assert summarise(good, concurrency=1, seed=0, wall_s=1, prepare_s=0, chaos=STORM).ok
    assert not summarise(good, concurrency=1, seed=0, wall_s=1, prepare_s=0, chaos=shown).ok
    assert disturbances(1, shown)[-1] != "1 rollouts, 0 re-run, 0 lost, rewards identical"


def test_quantiles_are_nearest_ranks_and_skip_what_is_missing() -> None:
    found = quantiles([None, 3.0, 1.0, 2.0, 100.0])
    assert (found.count, found.p50, found.p99) == (4, 2.0, 100.0)
    assert quantiles([]).p50 is None


def test_a_sandbox_that_ends_when_another_begins_is_not_counted_with_it() -> None:
    assert peak([Life("a", "agent", 0, 1), Life("b", "agent", 1, 2), Life("c", "agent", 1.5, 3)]) == 2


def test_steps_count_what_runs() -> None:
    assert charts.counts([(0, 2), (1, 3)]) == [(0.0, 0), (0, 1), (1, 2), (2, 1), (3, 0)]


@pytest.mark.parametrize(("value", "text"), [(None, "–"), (3.14, "3.1 ms"), (250.4, "250 ms"), (1234.0, "1.23 s")])
def test_times_are_short(value: float | None, text: str) -> None:
    assert milliseconds(value) == text
