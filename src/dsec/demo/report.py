"""The HTML report: one file, nothing to fetch, readable in light and dark."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import jinja2
import msgspec

from dsec.demo import charts
from dsec.demo.records import Burst, Chaos, Quantiles, Rollout, quantiles
from dsec.demo.scripts import Script

_MEANING = {
    Script.FIX: "applies the real fix",
    Script.NOOP: "changes nothing",
    Script.BREAK: "breaks a passing test",
    Script.CHEAT: "makes the tests say yes",
}


_LISTED = 12


class ScriptRow(msgspec.Struct, frozen=True):
    """Means over the valid rollouts of one script; None when there are none. fooled: naively 1, in truth 0."""

    name: str
    meaning: str
    count: int
    reward: float | None
    naive: float | None
    fooled: int


class TaskRow(msgspec.Struct, frozen=True):
    """A task's rollouts by script, in the order of `Script`, and its times."""

    name: str
    cells: tuple[tuple[Rollout, ...], ...]
    create: Quantiles
    exec: Quantiles
    grade: Quantiles


def render(burst: Burst, version: str) -> str:
    """The page as text."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
    )
    environment.filters |= {
        "ms": milliseconds,
        "seconds": lambda value: f"{value:.1f} s",
        "mean": lambda value: "–" if value is None else f"{value:.2f}".rstrip("0").rstrip("."),
        "mark": charts.mark_of,
        "anchor": lambda rollout: f"r-{rollout.task}-{rollout.index}",
        "reward": lambda rollout: str(rollout.reward) if rollout.valid else "invalid",
        "tail": lambda text: text[-4000:],
    }
    rollouts = sorted(burst.rollouts, key=lambda rollout: (rollout.task, rollout.index))
    return environment.get_template("report.html.j2").render(
        burst=burst,
        summary=burst.summary,
        scripts=script_rows(rollouts),
        tasks=task_rows(rollouts),
        invalid=[rollout for rollout in rollouts if not rollout.valid],
        zeros=[rollout for rollout in rollouts if rollout.valid and not rollout.reward],
        ones=[rollout for rollout in rollouts if rollout.valid and rollout.reward],
        sandboxes_chart=charts.sandboxes_chart(rollouts, burst.summary.wall_s),
        phases_chart=charts.phases_chart(rollouts, burst.summary.wall_s),
        lanes_chart=charts.lanes_chart(rollouts, burst.summary.wall_s),
        disturbances=disturbances(burst.summary.rollouts, burst.chaos) if burst.chaos else [],
        version=version,
    )


def script_rows(rollouts: Sequence[Rollout]) -> list[ScriptRow]:
    rows = []
    for script in Script:
        valid = [rollout for rollout in rollouts if rollout.script is script and rollout.valid]
        reward, naive = (_mean([getattr(r, field) for r in valid]) for field in ("reward", "naive_reward"))
        fooled = sum(rollout.reward == 0 and rollout.naive_reward == 1 for rollout in valid)
        rows.append(ScriptRow(script.value, _MEANING[script], len(valid), reward, naive, fooled))
    return rows


def task_rows(rollouts: Sequence[Rollout]) -> list[TaskRow]:
    rows = []
    for task in dict.fromkeys(rollout.task for rollout in rollouts):
        own = [rollout for rollout in rollouts if rollout.task == task]
        cells = tuple(tuple(rollout for rollout in own if rollout.script is script) for script in Script)
        create, calls, grade = (
            quantiles(getattr(r, field) for r in own) for field in ("create_ms", "exec_ms", "grade_ms")
        )
        rows.append(TaskRow(task, cells, create, calls, grade))
    return rows


def disturbances(rollouts: int, chaos: Chaos) -> list[str]:
    """What befell the burst, and last of all whether it shows."""
    lines = [
        f"{kill.victim} killed (SIGKILL) at {kill.share:.0%} of the steps; it went on after {kill.back_s:.1f} s"
        for kill in chaos.kills
    ]
    lines.append(
        f"{chaos.commands} commands, counted in their sandboxes; {chaos.wall_s:.1f} s, undisturbed {chaos.calm_wall_s:.1f} s"
    )
    lines += [f"DIFFERENT {name}" for name in chaos.different[:_LISTED]]
    rewards = f"{len(chaos.different)} rewards differ" if chaos.different else "rewards identical"
    return [*lines, f"{rollouts} rollouts, {chaos.reruns} re-run, {chaos.lost} lost, {rewards}"]


def milliseconds(value: float | None) -> str:
    """Short enough for a tile: 4.2 ms, 318 ms, 1.94 s."""
    if value is None:
        return "–"
    if value >= 1000:
        return f"{value / 1000:.2f} s"
    return f"{value:.0f} ms" if value >= 20 else f"{value:.1f} ms"


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
