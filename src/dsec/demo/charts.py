"""The report's plots as inline SVG. Colours are CSS classes of the page, so that light and dark both read well."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

import msgspec

from dsec.demo.records import Life, Phase, Rollout, Span

WIDTH, LEFT, RIGHT, TOP, BOTTOM = 1080, 44, 12, 10, 26

Steps = list[tuple[float, int]]  # (second, value from then on)


class Band(msgspec.Struct, frozen=True):
    """One layer of a stacked plot."""

    name: str
    css: str
    steps: Steps


class Lane(msgspec.Struct, frozen=True):
    """One row of the timeline: where it starts, what fills it, where it leads."""

    rollout: Rollout
    start: float
    end: float


def counts(intervals: Iterable[tuple[float, float]]) -> Steps:
    """How many intervals hold each moment, as a step function that begins and ends at 0."""
    changes: dict[float, int] = {}
    for start, end in intervals:
        changes[start] = changes.get(start, 0) + 1
        changes[end] = changes.get(end, 0) - 1
    steps: Steps = [(0.0, 0)]
    for moment in sorted(changes):
        steps.append((moment, steps[-1][1] + changes[moment]))
    return steps


def sandboxes_chart(rollouts: Sequence[Rollout], wall_s: float) -> str:
    """Running sandboxes over time, those of agents under those of graders."""
    lives = [life for rollout in rollouts for life in rollout.sandboxes]
    bands = [
        Band("agents", "agent", counts(_spans_of(lives, "agent"))),
        Band("graders", "grader", counts(_spans_of(lives, "grader"))),
    ]
    return _stacked(bands, wall_s, "running sandboxes")


def phases_chart(rollouts: Sequence[Rollout], wall_s: float) -> str:
    """What the rollouts are doing at each moment: setup, tool calls, tests."""
    spans = [span for rollout in rollouts for span in rollout.spans]
    bands = [
        Band(phase.value, _css(phase), counts(_of(spans, phase))) for phase in (Phase.TESTS, Phase.TOOLS, Phase.SETUP)
    ]
    return _stacked(bands, wall_s, "rollouts by phase")


def lanes_chart(rollouts: Sequence[Rollout], wall_s: float) -> str:
    """One row per rollout, in order of start: its phases as bars, a mark at its end for the reward."""
    lanes = sorted((_lane(rollout) for rollout in rollouts if rollout.spans), key=lambda lane: lane.start)
    height_of = 12 if len(lanes) <= 48 else 9 if len(lanes) <= 96 else 6
    height = TOP + height_of * len(lanes) + BOTTOM
    x = _Scale(wall_s)
    parts = [_grid(wall_s, height)]
    for row, lane in enumerate(lanes):
        y = TOP + row * height_of
        rollout = lane.rollout
        title = f"{rollout.task} #{rollout.index} {rollout.script.value}: {_reward(rollout)}, {rollout.reason}"
        bars = "".join(
            f'<rect class="{_css(span.phase)}" x="{x(span.start):.1f}" y="{y}" '
            f'width="{max(0.6, x(span.end) - x(span.start)):.1f}" height="{height_of - 2}"/>'
            for span in rollout.spans
        )
        centre, radius = y + height_of / 2 - 1, min(3.2, height_of / 3)
        mark = f'<circle class="mark {mark_of(rollout)}" cx="{x(lane.end) + 5:.1f}" cy="{centre}" r="{radius:.1f}"/>'
        link = f"#r-{rollout.task}-{rollout.index}"
        parts.append(f'<a href="{escape(link)}"><g><title>{escape(title)}</title>{bars}{mark}</g></a>')
    return _svg(height, "".join(parts), "rollouts over time, one row each")


def mark_of(rollout: Rollout) -> str:
    """The CSS class of a rollout's outcome."""
    if not rollout.valid:
        return "invalid"
    return "one" if rollout.reward else "zero"


def escape(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").replace('"', "&quot;")


def _reward(rollout: Rollout) -> str:
    return "invalid" if not rollout.valid else f"reward {rollout.reward}"


def _lane(rollout: Rollout) -> Lane:
    return Lane(rollout, min(span.start for span in rollout.spans), max(span.end for span in rollout.spans))


def _spans_of(lives: Iterable[Life], role: str) -> list[tuple[float, float]]:
    return [(life.start, life.end) for life in lives if life.role == role]


def _of(spans: Iterable[Span], phase: Phase) -> list[tuple[float, float]]:
    return [(span.start, span.end) for span in spans if span.phase is phase]


def _css(phase: Phase) -> str:
    return {Phase.SETUP: "setup", Phase.TOOLS: "tools", Phase.TESTS: "tests"}[phase]


# drawing --------------------------------------------------------------------------------------------------------------


class _Scale:
    """Seconds to pixels."""

    def __init__(self, wall_s: float) -> None:
        self.per_second = (WIDTH - LEFT - RIGHT) / max(wall_s, 1e-6)

    def __call__(self, second: float) -> float:
        return LEFT + second * self.per_second


def _stacked(bands: Sequence[Band], wall_s: float, label: str, height: int = 220) -> str:
    total = _sum([band.steps for band in bands])
    top = max(1, max((value for _, value in total), default=1))
    unit = (height - TOP - BOTTOM) / top
    x = _Scale(wall_s)
    ticks = "".join(_level(value, height - BOTTOM - value * unit) for value in _round_ticks(top))
    areas: list[str] = []
    below: Steps = [(0.0, 0)]
    for band in bands:
        above = _sum([below, band.steps])
        outline = [*_corners(above, wall_s), *reversed(_corners(below, wall_s))]
        points = " ".join(f"{x(second):.1f},{height - BOTTOM - value * unit:.1f}" for second, value in outline)
        areas.append(f'<polygon class="{band.css}" points="{points}"><title>{escape(band.name)}</title></polygon>')
        below = above
    return _svg(height, _grid(wall_s, height) + ticks + "".join(areas), label)


def _sum(functions: Sequence[Steps]) -> Steps:
    """The sum of step functions."""
    changes: dict[float, int] = {}
    for steps in functions:
        for (_, before), (moment, after) in pairwise([(0.0, 0), *steps]):
            changes[moment] = changes.get(moment, 0) + after - before
    total, now = [], 0
    for moment in sorted(changes):
        now += changes[moment]
        total.append((moment, now))
    return total


def _corners(steps: Steps, wall_s: float) -> Steps:
    """A step function as the corners of its outline."""
    corners: Steps = []
    value = 0
    for moment, after in steps:
        corners += [(moment, value), (moment, after)]
        value = after
    return [*corners, (max(wall_s, corners[-1][0] if corners else 0.0), value)]


def _grid(wall_s: float, height: int) -> str:
    x = _Scale(wall_s)
    lines = []
    for tick in _time_ticks(wall_s):
        lines.append(f'<line class="grid" x1="{x(tick):.1f}" x2="{x(tick):.1f}" y1="{TOP}" y2="{height - BOTTOM}"/>')
        lines.append(f'<text class="tick" x="{x(tick):.1f}" y="{height - 8}" text-anchor="middle">{tick:g} s</text>')
    return "".join(lines)


def _time_ticks(wall_s: float) -> list[float]:
    step = next((s for s in (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600) if wall_s / s <= 12), 1800)
    return [round(i * step, 3) for i in range(int(wall_s / step) + 1)]


def _round_ticks(top: int) -> list[int]:
    step = next((s for s in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000) if top / s <= 6), 2000)
    return list(range(0, top + 1, step))


def _level(value: int, y: float) -> str:
    """A horizontal grid line with its number."""
    line = f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
    return f'{line}<text class="tick" x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{value}</text>'


def _svg(height: int, body: str, label: str) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(label)}">{body}</svg>'
