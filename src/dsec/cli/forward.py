"""`dsec forward`: a port of a sandbox as a port of this machine, until it is interrupted."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Annotated

import typer

from dsec.cli import options
from dsec.cli.failure import usage
from dsec.cli.output import note, print_json_line

if TYPE_CHECKING:
    from dsec import DSecClient


def register(app: typer.Typer) -> None:
    app.command()(forward)


def forward(
    sandbox: Annotated[str, typer.Argument(metavar="SANDBOX", show_default=False)],
    ports: Annotated[str, typer.Argument(metavar="PORT[:LOCAL]", show_default=False)],
    json: options.Json = False,
) -> None:
    """Reach a port inside a sandbox from this machine, until Ctrl-C.

    LOCAL is the port here, a free one unless given; only this machine can connect to it. The address goes to stdout.

    \b
    dsec forward sb-e1-7k3m9p2q4r5s 8000
    dsec forward sb-e1-7k3m9p2q4r5s 5432:15432
    """
    inside, _, local = ports.partition(":")
    port, local_port = _port(inside, ports), _port(local, ports) if local else 0
    from dsec.cli.connect import with_client

    with_client(lambda client: _forward(client, sandbox, port, local_port, json))


def _port(text: str, given: str) -> int:
    if text.isascii() and text.isdigit() and len(text) <= 5 and 1 <= int(text) <= 65535:
        return int(text)
    raise usage(f"{given!r} is not PORT or PORT:LOCAL", hint="for example 8000, or 8000:18000")


async def _forward(client: DSecClient, sandbox: str, port: int, local_port: int, json: bool) -> None:
    async with client.attach(sandbox) as attached, attached.forward(port, local_port=local_port) as url:
        if json:
            print_json_line({"url": str(url), "host": url.host, "port": url.port})
        else:
            print(url, flush=True)
            note(f"forwards to port {port} of {attached.id}; Ctrl-C ends it")
        await asyncio.Event().wait()
