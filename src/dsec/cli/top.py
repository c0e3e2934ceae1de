"""`dsec top`: who uses the node now, by job and by sandbox."""

from __future__ import annotations

import asyncio
import sys
import time
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from dsec.cli import options
from dsec.cli.jobs import inside, lease_of, state_of
from dsec.cli.output import age, megabytes, print_json, print_json_line, print_table, printable

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table

    from dsec import DSecClient, JobInfo, SandboxInfo

_LIVE = ("creating", "running", "paused", "stopping")
_JOB_COLUMNS = ("job", "state", "sandboxes", "cpu %", "memory", "swap", "lease", "age")
_COLUMNS = ("sandbox", "job", "state", "cpu %", "memory", "swap", "pids", "age")
_NUMBERS = frozenset(("cpu %", "memory", "swap", "pids", "age", "lease"))
_AROUND = 8  # lines of the screen that are no rows


class Row(msgspec.Struct, frozen=True):
    """A sandbox. cpu_percent: of one core, since the look before; bytes; created_at in Unix seconds."""

    id: str
    job: str
    state: str
    cpu_percent: float
    memory_bytes: int
    swap_bytes: int
    pids: int
    created_at: float


class JobRow(msgspec.Struct, frozen=True):
    """A job, and the sum of its sandboxes."""

    name: str
    state: str
    paused_by: str
    under_way: str
    sandboxes: dict[str, int]
    cpu_percent: float
    memory_bytes: int
    swap_bytes: int
    lease_until: float
    created_at: float


class Frame(msgspec.Struct, frozen=True):
    """One look at the node."""

    at: float
    jobs: tuple[JobRow, ...]
    sandboxes: tuple[Row, ...]


def register(app: typer.Typer) -> None:
    app.command()(top)


def top(
    once: Annotated[bool, typer.Option("--once", help="One look, and no more.")] = False,
    interval: Annotated[float, typer.Option("--interval", metavar="SECONDS", help="Between two looks.", min=0.2)] = 2.0,
    json: options.Json = False,
) -> None:
    """Watch who uses the node: CPU, memory and swap by job and by sandbox.

    The busiest come first; Ctrl-C ends it. In a pipe it looks once. With --json, one document a line and look.

    \b
    dsec top
    dsec top --once
    dsec top --once --json | jq '.jobs[] | {name, memory_bytes}'
    """
    from dsec.cli.connect import with_client

    if once or not (json or sys.stdout.isatty()):
        frame = with_client(lambda client: _once(client, min(interval, 1.0)))
        print_json(frame) if json else _print(frame)
        return
    try:
        with_client(lambda client: _watch(client, interval, json))
    except KeyboardInterrupt:
        return


async def _once(client: DSecClient, pause: float) -> Frame:
    """A share of the processor is that of a time, so it takes two looks."""
    _, before = await _look(client)
    await asyncio.sleep(pause)
    jobs, after = await _look(client)
    return frame_of(jobs, after, before, time.time())


async def _watch(client: DSecClient, interval: float, json: bool) -> None:
    frame = await _once(client, min(interval, 1.0))
    if json:
        while True:
            print_json_line(frame)
            frame = await _once(client, interval)
    from rich.console import Console
    from rich.live import Live

    console = Console()
    _, before = await _look(client)
    with Live(_drawn(frame, console.size.height), console=console, screen=True, auto_refresh=False) as live:
        while True:
            await asyncio.sleep(interval)
            jobs, after = await _look(client)
            frame, before = frame_of(jobs, after, before, time.time()), after
            live.update(_drawn(frame, console.size.height), refresh=True)


async def _look(client: DSecClient) -> tuple[list[JobInfo], dict[str, SandboxInfo]]:
    jobs = await client.jobs(states=("running", "paused", "stopping"))
    return jobs, {info.id: info async for info in client.list(states=_LIVE, usage=True)}


def frame_of(
    jobs: Sequence[JobInfo], after: dict[str, SandboxInfo], before: dict[str, SandboxInfo], now: float
) -> Frame:
    """What the difference of two looks says; the busiest first."""
    rows = [
        Row(
            info.id, info.job, info.state.value, _percent(info, before.get(info.id)), max(0, info.usage.memory_bytes),
            max(0, info.usage.swap_bytes), info.usage.pids, info.created_at,
        )
        for info in after.values()
    ]  # fmt: skip
    rows.sort(key=lambda row: (-row.cpu_percent, -row.memory_bytes, row.id))
    by_job: dict[str, list[Row]] = {}
    for row in rows:
        by_job.setdefault(row.job, []).append(row)
    summed = [_summed(job, by_job.get(job.name, [])) for job in jobs]
    summed.sort(key=lambda job: (-job.cpu_percent, -job.memory_bytes, job.name))
    return Frame(now, tuple(summed), tuple(rows))


def _percent(info: SandboxInfo, before: SandboxInfo | None) -> float:
    """Of one core, over the time between the samples; 0 for one that was not there before."""
    if before is None or (passed := info.usage.sampled_at - before.usage.sampled_at) <= 0:
        return 0.0
    return round(max(0.0, 100 * (info.usage.cpu_s - before.usage.cpu_s) / passed), 1)


def _summed(job: JobInfo, rows: Sequence[Row]) -> JobRow:
    return JobRow(
        name=job.name,
        state=job.state.value,
        paused_by=job.paused_by,
        under_way=job.under_way.value,
        sandboxes=dict(Counter(row.state for row in rows)),
        cpu_percent=round(sum(row.cpu_percent for row in rows), 1),
        memory_bytes=sum(row.memory_bytes for row in rows),
        swap_bytes=sum(row.swap_bytes for row in rows),
        lease_until=job.lease_until,
        created_at=job.created_at,
    )


def _summary(frame: Frame) -> str:
    states = Counter(row.state for row in frame.sandboxes)
    told = ", ".join(f"{count} {state}" for state, count in sorted(states.items())) or "none"
    cpu = sum(row.cpu_percent for row in frame.sandboxes)
    memory, swap = (sum(getattr(row, name) for row in frame.sandboxes) for name in ("memory_bytes", "swap_bytes"))
    return f"{len(frame.jobs)} jobs; sandboxes: {told}; CPU {cpu:.1f} %, memory {megabytes(memory)}, swap {megabytes(swap)}"


def _job_cells(job: JobRow, now: float) -> tuple[str, ...]:
    return (
        job.name, state_of(job.state, job.paused_by, job.under_way), inside(job.sandboxes), f"{job.cpu_percent:.1f}",
        megabytes(job.memory_bytes), megabytes(job.swap_bytes), lease_of(job.state, job.lease_until, now),
        age(job.created_at, now),
    )  # fmt: skip


def _cells(row: Row, now: float) -> tuple[str, ...]:
    return (
        row.id, row.job or "-", row.state, f"{row.cpu_percent:.1f}", megabytes(row.memory_bytes), megabytes(row.swap_bytes),
        str(row.pids), age(row.created_at, now),
    )  # fmt: skip


def _print(frame: Frame) -> None:
    print(_summary(frame))
    if frame.jobs:
        print_table(_JOB_COLUMNS, [_job_cells(job, frame.at) for job in frame.jobs])
    print_table(_COLUMNS, [_cells(row, frame.at) for row in frame.sandboxes], empty="no sandboxes")


def _drawn(frame: Frame, height: int) -> Group:
    """As much of it as the screen has room for: half of it for jobs at most."""
    from rich.console import Group
    from rich.text import Text

    room = max(2, height - _AROUND)
    jobs = frame.jobs[: max(1, room // 2)]
    rows = frame.sandboxes[: max(1, room - len(jobs))]
    hidden = len(frame.jobs) - len(jobs), len(frame.sandboxes) - len(rows)
    more = f"{hidden[0]} more jobs, {hidden[1]} more sandboxes" if any(hidden) else ""
    stamp = time.strftime("%H:%M:%S", time.localtime(frame.at))
    return Group(
        Text(f"{stamp}  {_summary(frame)}", no_wrap=True, overflow="ellipsis", style="bold"),
        _table(_JOB_COLUMNS, [_job_cells(job, frame.at) for job in jobs]),
        _table(_COLUMNS, [_cells(row, frame.at) for row in rows]),
        Text(more, style="dim"),
    )


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=0, header_style="bold", show_edge=False)
    for column in columns:
        table.add_column(column, justify="right" if column in _NUMBERS else "left", no_wrap=True, overflow="ellipsis")
    for row in rows:
        table.add_row(*(Text(printable(cell)) for cell in row))
    return table
