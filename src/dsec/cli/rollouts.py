"""`dsec rollout`: what is recorded of rollouts: looking, comparing, taking away, removing."""

from __future__ import annotations

import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dsec.cli import options
from dsec.cli.failure import CliFailure, usage
from dsec.cli.output import age, note, print_json, print_json_line, print_table, printable

if TYPE_CHECKING:
    from dsec import Comparison, DSecClient, RolloutInfo, StepRecord
    from dsec.cli.trajectory import Line

app = typer.Typer(
    help="List, show, compare, export and remove recorded rollouts.", no_args_is_help=True, rich_markup_mode=None
)

Name = Annotated[str, typer.Argument(metavar="ROLLOUT", help="Its id, or its name.", show_default=False)]
_STATES = ("open", "finished", "lost")


@app.command("ls")
def list_(
    job: Annotated[
        str | None, typer.Option("--job", metavar="JOB", help='Only of this job ("" for those of none).')
    ] = None,
    state: Annotated[list[str] | None, typer.Option(help=f"One of {', '.join(_STATES)}; repeatable.")] = None,
    json: options.Json = False,
) -> None:
    """List rollouts, oldest first.

    \b
    dsec rollout ls
    dsec rollout ls --state lost --json | jq -r '.[].name'
    """
    from dsec.cli.connect import with_client

    async def work(client: DSecClient) -> list[RolloutInfo]:
        return [info async for info in client.rollouts.list(job=job, states=state)]

    found = with_client(work)
    if json:
        print_json(found)
        return
    columns = ("rollout", "name", "job", "state", "steps", "reward", "size", "age", "sandbox")
    now = time.time()
    print_table(columns, [_row(info, now) for info in found], empty="no rollouts")


def _row(info: RolloutInfo, now: float) -> tuple[str, ...]:
    from dsec.cli.trajectory import size

    steps = str(info.steps) + (f" ({len(info.unknown)} open)" if info.unknown else "")
    return (
        info.id, info.name, info.job, state_of(info), steps, reward_of(info), size(info.bytes),
        age(info.created_at, now), info.sandbox,
    )  # fmt: skip


def state_of(info: RolloutInfo) -> str:
    """Its state, and what is wrong with it."""
    state = info.state.value + (f" ({info.reason.value})" if info.reason and info.state.value == "lost" else "")
    return state if info.damaged is None else f"{state}, damaged from step {info.damaged}"


def reward_of(info: RolloutInfo) -> str:
    """What it was finished with; "invalid" where nothing may be learned from it."""
    if info.valid is False:
        return "invalid"
    return "" if info.reward is None else f"{info.reward:g}"


@app.command()
def show(
    rollout: Name,
    start: Annotated[int, typer.Option("--from", metavar="N", help="First step.", min=0)] = 0,
    limit: Annotated[int | None, typer.Option("--limit", "-n", metavar="N", help="At most so many.", min=1)] = None,
    json: options.Json = False,
) -> None:
    """Show the steps of a rollout: when each was made, what it asked for and what came of it.

    With --json a line for each step, as the interface has it.

    \b
    dsec rollout show ro-e1-7k3m9p2q4r5s
    dsec rollout show task-3/7 --from 100 -n 20
    """
    from dsec.cli.connect import with_client

    async def work(client: DSecClient) -> None:
        info = await _find(client, rollout)
        stop = None if limit is None else start + limit
        steps = client.rollouts.steps(info.id, start=start, stop=stop)
        if json:
            async for record in steps:
                print_json_line(record)
        else:
            await _print(info, steps)

    with_client(work)


async def _print(info: RolloutInfo, steps: AsyncIterator[StepRecord]) -> None:
    from dsec.cli.trajectory import line_of

    print(_headline(info))
    lines: list[Line | str] = []
    epoch = 0
    async for record in steps:
        if epoch and record.epoch != epoch:
            lines.append(f"opened again (epoch {record.epoch})")
        epoch = record.epoch
        lines.append(line_of(record, info.created_at))
    (_draw if sys.stdout.isatty() else _plain)(lines)


def _headline(info: RolloutInfo) -> str:
    facts = [
        info.id,
        f"job {info.job}" if info.job else "",
        state_of(info),
        f"reward {reward_of(info)}" if reward_of(info) else "",
        f"{info.steps} steps",
        f"{len(info.unknown)} without an outcome" if info.unknown else "",
        f"opened {info.epoch} times" if info.epoch > 1 else "",
        info.sandbox,
    ]
    return printable(f"{info.name}: " + ", ".join(fact for fact in facts if fact))


_STYLES = {"good": "green", "bad": "red", "open": "yellow", "plain": ""}


def _draw(lines: list[Line | str]) -> None:
    """For a terminal: a line each, cut at its width; colours say how it went."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2, 0, 0))
    for justify in ("right", "right", "right", "left"):
        table.add_column(justify=justify, no_wrap=True)
    table.add_column(ratio=3, no_wrap=True, overflow="ellipsis")
    table.add_column(ratio=2, no_wrap=True, overflow="ellipsis")
    table.expand = True
    for line in lines:
        if isinstance(line, str):
            table.add_row("", "", "", "", Text(f"-- {line}", style="magenta"), "")
            continue
        style = _STYLES[line.mood]
        table.add_row(
            Text(line.number, style="bold"),
            Text(line.at, style="dim"),
            Text(line.took, style="dim"),
            Text(line.kind, style="cyan"),
            Text(one_line(line.what)),
            Text(one_line(line.came), style=style),
        )
    Console().print(table)


def _plain(lines: list[Line | str]) -> None:
    """For a pipe: the same in columns, nothing cut."""
    rows = [
        ("", "", "", "", f"-- {line}", "") if isinstance(line, str)
        else (line.number, line.at, line.took, line.kind, one_line(line.what), one_line(line.came))
        for line in lines
    ]  # fmt: skip
    print_table(("step", "at", "took", "kind", "asked", "came"), rows, empty="no steps")


def one_line(text: str) -> str:
    """Names and lines from sandboxes as they may be printed; a line break is shown as one."""
    return "".join(
        character if character.isprintable() else "\N{SYMBOL FOR NEWLINE}" if character == "\n" else "\N{REPLACEMENT CHARACTER}"
        for character in text
    )  # fmt: skip


@app.command()
def export(
    rollout: Name,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", metavar="FILE", help="Write there (default: ROLLOUT.jsonl).")
    ] = None,
    json: options.Json = False,
) -> None:
    """Write all of a rollout as JSON lines, contents included.

    The file appears when it is whole, and shows by itself whether it was changed since.

    \b
    dsec rollout export task-3/7 -o task-3-7.jsonl
    """
    from dsec.cli.connect import with_client

    async def work(client: DSecClient) -> tuple[Path, int, int]:
        info = await _find(client, rollout)
        target = out or Path(f"{info.id}.jsonl")
        done = await client.rollouts.export(info.id, target)
        return target, done.steps, done.bytes

    target, steps, written = with_client(work)
    if json:
        print_json({"file": str(target), "steps": steps, "bytes": written})
    else:
        print(target)
        note(f"{steps} steps, {written:,} bytes")


@app.command()
def diff(
    first: Annotated[str, typer.Argument(metavar="FIRST", help="Id or name.", show_default=False)],
    second: Annotated[str, typer.Argument(metavar="SECOND", help="Id or name.", show_default=False)],
    all_: Annotated[bool, typer.Option("--all", "-a", help="Every step that differs, not only the first one.")] = False,
    json: options.Json = False,
) -> int:
    """Compare two rollouts step by step: where they part first, and how many steps differ.

    Times, ids and process numbers do not count. Exit code 1 when something differs.

    \b
    dsec rollout diff task-3/7 task-3/8
    """
    from dsec.cli.connect import with_client

    async def work(client: DSecClient) -> Comparison:
        one, other = await _find(client, first), await _find(client, second)
        return await client.rollouts.diff(one.id, other.id)

    found = with_client(work)
    if json:
        print_json(found)
    else:
        _print_diff(found, first, second, all_)
    return 0 if found.same else 1


def _print_diff(found: Comparison, first: str, second: str, all_: bool) -> None:
    import msgspec
    from rich.console import Console
    from rich.text import Text

    from dsec.protocol.compare import told

    shown = found.differences if all_ else [one for one in found.differences if one.step == found.differences[0].step]
    console = Console(soft_wrap=True, highlight=False)
    for line in told(msgspec.structs.replace(found, differences=tuple(shown)), first, second).splitlines()[:-1]:
        style = {"- ": "red", "+ ": "green"}.get(line.strip()[:2], "bold" if not line.startswith(" ") else "")
        console.print(Text(one_line(line), style=style))
    console.print(told(found, first, second).splitlines()[-1], markup=False)


@app.command("rm")
def remove(
    rollout: Annotated[list[str], typer.Argument(metavar="ROLLOUT...", help="Ids or names.", show_default=False)],
    json: options.Json = False,
) -> None:
    """Remove what is recorded of rollouts, for good. One that is open, and whose sandbox lives, is refused.

    \b
    dsec rollout rm ro-e1-7k3m9p2q4r5s
    """
    from dsec import DSecError
    from dsec.cli.connect import with_client

    async def work(client: DSecClient) -> list[str]:
        failed = []
        for name in rollout:
            try:
                await client.rollouts.remove((await _find(client, name)).id)
            except DSecError as error:
                failed.append(f"{name}: {error.message}")
        return failed

    failed = with_client(work)
    if json:
        print_json({"removed": len(rollout) - len(failed), "failed": failed})
    elif not failed:
        print(f"removed {len(rollout)}")
    if failed:
        raise CliFailure("; ".join(failed), hint="dsec rollout ls lists what there is")


async def _find(client: DSecClient, name: str) -> RolloutInfo:
    """By its id or its name."""
    from dsec.protocol.ids import home_of

    if home_of(name) is not None:
        return await client.rollouts.get(name)
    found = [info async for info in client.rollouts.list() if info.name == name]
    if not found:
        raise CliFailure(f"there is no rollout {name!r}", hint="dsec rollout ls lists what there is")
    if len(found) > 1:
        raise usage(f"there are {len(found)} rollouts {name!r}, of several jobs", hint="give its id")
    return found[0]
