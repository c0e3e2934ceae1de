"""`dsec network`: what a running sandbox may reach."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from dsec.cli import options
from dsec.cli.failure import usage
from dsec.cli.output import print_json, print_table

if TYPE_CHECKING:
    from dsec import DSecClient, Network


def register(app: typer.Typer) -> None:
    app.command()(network)


def network(
    sandbox: Annotated[str, typer.Argument(metavar="SANDBOX", help="Id of a sandbox.", show_default=False)],
    allow: options.Allow = None,
    deny: options.Deny = None,
    none: Annotated[bool, typer.Option("--none", help="No rules at all: nothing to ask.")] = False,
    json: options.Json = False,
) -> None:
    """Show what a sandbox may reach, or change it while it runs.

    The options replace all of its rules. Names are mirrors of this node (`dsec status`) or domains.

    \b
    dsec network sb-e1-7k3m9p2q4r5s
    dsec network sb-e1-7k3m9p2q4r5s --allow pypi --allow '*.example.com' --deny secret.example.com
    dsec network sb-e1-7k3m9p2q4r5s --none
    """
    rules = options.rules(allow, deny)
    if none and rules:
        raise usage("--none beside --allow or --deny", hint="either no rules, or these")
    from dsec.cli.connect import with_client

    async def work(client: DSecClient) -> Network:
        attached = await client.attach(sandbox)
        if none or rules:
            return await attached.set_network(rules)
        return (await attached.info()).network

    found = with_client(work)
    if json:
        print_json(found)
    else:
        print_table(("name", "enforced"), sorted(found.enforced.items()), empty="no rules: nothing is reachable")
