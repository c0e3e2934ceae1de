"""`dsec version`."""

from __future__ import annotations

import platform

import typer

from dsec.cli import options
from dsec.cli.output import print_facts, print_json


def register(app: typer.Typer) -> None:
    app.command()(version)


def version(json: options.Json = False) -> None:
    """Show the versions of DSec, Python and the kernel."""
    from importlib.metadata import version as installed

    facts = {"dsec": installed("dsec"), "python": platform.python_version(), "kernel": platform.release()}
    if json:
        print_json(facts)
    else:
        print_facts(facts.items())
