"""The demo on a terminal: a progress line while layers are made, a bar while rollouts run, the table at the end."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from dsec.demo.records import Burst, Quantiles, Rollout, quantiles
from dsec.demo.report import milliseconds, task_rows
from dsec.demo.scripts import EXPECTED, Script

_LONGEST = 12  # complaints that are printed; the files have all


class Bar:
    """Counts of a running burst on stderr. On a pipe it prints nothing until the end."""

    def __init__(self, progress: Progress, total: int) -> None:
        self._progress = progress
        self._task = progress.add_task("", total=total, news="")
        self._running = self._ones = self._zeros = self._invalid = 0

    def started(self) -> None:
        self._running += 1
        self._update(0)

    def done(self, rollout: Rollout) -> None:
        self._running -= 1
        self._invalid += not rollout.valid
        self._ones += rollout.reward == 1
        self._zeros += rollout.reward == 0
        self._update(1)

    def at(self, what: str, done: int, running: int) -> None:
        """A burst that others run: what is the matter with it, how many rollouts are done and under way."""
        self._progress.update(self._task, completed=done, news=f"{running} running  {what}")

    def _update(self, advance: int) -> None:
        news = f"{self._running} running  [green]{self._ones} ones[/]  [yellow]{self._zeros} zeros[/]"
        if self._invalid:
            news += f"  [red]{self._invalid} invalid[/]"
        self._progress.update(self._task, advance=advance, news=news)


@contextmanager
def bar(total: int) -> Iterator[Bar]:
    columns = (
        TextColumn("rollouts"),
        BarColumn(bar_width=32),
        MofNCompleteColumn(),
        TextColumn("{task.fields[news]}"),
        TimeElapsedColumn(),
    )
    console = Console(stderr=True)
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        yield Bar(progress, total)


def table(burst: Burst) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Headings and rows: a row per task, one for all. Rewards as "ours / naive"; times as "p50 / p99"."""
    columns = ("task", *(script.value for script in Script), "create", "tool calls", "grade")
    ordered = sorted(burst.rollouts, key=lambda rollout: (rollout.task, rollout.index))
    rows = [
        (row.name, *(_rewards(cell) for cell in row.cells), *map(_times, (row.create, row.exec, row.grade)))
        for row in task_rows(ordered)
    ]
    cells = [_rewards([r for r in ordered if r.script is script]) for script in Script]
    every = [quantiles(getattr(r, field) for r in ordered) for field in ("create_ms", "exec_ms", "grade_ms")]
    rows.append(("all", *cells, *map(_times, every)))
    return columns, rows


def closing(burst: Burst) -> list[str]:
    """Lines under the table: what was run, and everything that is not as it must be."""
    s = burst.summary
    lines = [
        "rewards are ours / naive, means over valid samples; times are p50 / p99",
        f"{s.rollouts} rollouts of {s.tasks} tasks, {s.concurrency} at a time, in {s.wall_s:.1f} s:"
        f" {s.valid} valid, {s.invalid} invalid;"
        f" {s.sandboxes} sandboxes, {s.peak_sandboxes} at the peak; a tool call takes {_times(s.tool_call_ms)}",
    ]
    wrong = [line for rollout in burst.rollouts if (line := _complaint(rollout))]
    more = [f"and {len(wrong) - _LONGEST} more such samples"] if len(wrong) > _LONGEST else []
    return lines + wrong[:_LONGEST] + more


def _complaint(rollout: Rollout) -> str:
    """What is wrong with a sample; empty when it is as it must be."""
    where = f"{rollout.task} {rollout.script.value} #{rollout.index}"
    if not rollout.valid:
        return f"INVALID {where}: {rollout.reason}"
    if rollout.as_expected:
        return ""
    got, must = (rollout.reward, rollout.naive_reward), EXPECTED[rollout.script]
    return f"UNEXPECTED {where}: reward and naive reward are {got} and must be {must}: {rollout.reason}"


def _rewards(rollouts: Sequence[Rollout]) -> str:
    valid = [rollout for rollout in rollouts if rollout.valid]
    if not valid:
        return "invalid" if rollouts else ""
    ours, naive = (_mean([getattr(r, field) for r in valid]) for field in ("reward", "naive_reward"))
    return f"{ours} / {naive}"


def _mean(values: Sequence[int]) -> str:
    return f"{sum(values) / len(values):.2f}".rstrip("0").rstrip(".")


def _times(found: Quantiles) -> str:
    return f"{milliseconds(found.p50)} / {milliseconds(found.p99)}"
