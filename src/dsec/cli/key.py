"""`dsec key`: keys that are good for some rollouts of one job."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import typer

from dsec.cli import options
from dsec.cli.output import note, print_json

if TYPE_CHECKING:
    from dsec import DSecClient
    from dsec.protocol.scopes import ScopedKey

app = typer.Typer(help="Make keys for programs that may do less than you.", no_args_is_help=True, rich_markup_mode=None)


@app.callback()
def keys() -> None:
    """Make keys for programs that may do less than you."""


@app.command()
def create(
    job: Annotated[str, typer.Argument(metavar="JOB", help="The job that it is for.", show_default=False)],
    rollouts: Annotated[
        list[str] | None,
        typer.Option("--rollouts", metavar="GLOB", help="Names of its rollouts; repeatable. All without it."),
    ] = None,
    may: Annotated[
        list[str] | None, typer.Option("--may", metavar="RIGHT", help="use, create, grade; repeatable. use without it.")
    ] = None,
    allow: Annotated[
        list[str] | None, typer.Option("--allow", metavar="NAME", help="What its sandboxes may reach; repeatable.")
    ] = None,
    layers: Annotated[
        list[str] | None,
        typer.Option("--layers", metavar="GLOB", help="What new ones are made from; repeatable. Any without it."),
    ] = None,
    ttl: Annotated[float, typer.Option(metavar="SECONDS", help="How long it lasts.", min=0)] = 3600,
    note_: Annotated[str, typer.Option("--note", metavar="TEXT", help="What for; it is in the service's log.")] = "",
    json: options.Json = False,
) -> None:
    """Make a scoped key and print it: it is told once. It ends with its time or with its job.

    \b
    dsec key create grpo-17 --rollouts 'agent/*' --may use --may create --ttl 86400
    DSEC_API_KEY=$(dsec key create grpo-17 --rollouts task-3/7) python worker.py
    """
    from dsec.cli.connect import with_client

    async def work(client: DSecClient) -> ScopedKey:
        return await client.keys.create(
            job, rollouts=rollouts, may=may or ("use",), network=allow or (), layers=layers, ttl=ttl, note=note_
        )

    made = with_client(work)
    if json:
        print_json(made)
        return
    print(made.key)
    until = time.strftime("%Y-%m-%d %H:%M", time.localtime(made.expires_at))
    which = ", ".join(made.rollouts) if made.rollouts is not None else "all"
    note(
        f"{made.id}: rollouts {which} of job {made.job}, until {until}; may {', '.join(right.value for right in made.may)}"
    )
