"""Options that several commands share, and the parsing of their values."""

from __future__ import annotations

from typing import Annotated

import typer

from dsec.cli.failure import usage

Json = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else on stdout.")]
Env = Annotated[list[str] | None, typer.Option("--env", "-e", metavar="NAME=VALUE", help="Set a variable; repeatable.")]
Labels = Annotated[list[str] | None, typer.Option("--label", "-l", metavar="NAME=VALUE", help="Repeatable.")]
User = Annotated[str | None, typer.Option("--user", "-u", help="Name or numeric id inside the sandbox.")]
Workdir = Annotated[str | None, typer.Option("--workdir", "-w", metavar="PATH", help="Where the command starts.")]
Timeout = Annotated[
    float | None,
    typer.Option(
        "--timeout", metavar="SECONDS", help="Kill the command's whole tree after that (exit code 137).", min=0
    ),
]
MaxOutput = Annotated[
    int, typer.Option("--max-output", metavar="MB", help="Of each stream; the rest is cut and said so.", min=0)
]
Interactive = Annotated[bool, typer.Option("--interactive", "-i", help="Keep stdin open, whatever ours is.")]
Tty = Annotated[
    bool, typer.Option("--tty", "-t", help="Run it in a terminal of the size of ours; with -i, ours is its own.")
]
Command = Annotated[
    list[str] | None,
    typer.Argument(metavar="-- COMMAND", help="The command and its arguments, after `--`.", show_default=False),
]


Allow = Annotated[
    list[str] | None, typer.Option("--allow", metavar="NAME", help="Let it reach a mirror or domain; repeatable.")
]
Deny = Annotated[list[str] | None, typer.Option("--deny", metavar="NAME", help="The opposite; repeatable.")]


def rules(allow: list[str] | None, deny: list[str] | None) -> dict[str, bool]:
    """Network rules of both lists; a name in both is denied."""
    return dict.fromkeys(allow or (), True) | dict.fromkeys(deny or (), False)


def pairs(values: list[str] | None, option: str) -> dict[str, str]:
    """`NAME=VALUE` strings as a dictionary."""
    parsed: dict[str, str] = {}
    for value in values or []:
        name, equals, rest = value.partition("=")
        if not name or not equals:
            raise usage(f"{option} {value!r} is not NAME=VALUE", hint=f"for example: {option} team=search")
        parsed[name] = rest
    return parsed
