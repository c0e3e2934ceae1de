"""`dsec cp`: files and directories in and out of a sandbox."""

from __future__ import annotations

import os
import posixpath
from typing import TYPE_CHECKING, Annotated

import typer

from dsec.cli.failure import usage

if TYPE_CHECKING:
    from dsec import DSecClient


def register(app: typer.Typer) -> None:
    app.command("cp")(copy)


def copy(
    source: Annotated[str, typer.Argument(metavar="SOURCE", show_default=False)],
    target: Annotated[str, typer.Argument(metavar="TARGET", show_default=False)],
) -> None:
    """Copy files into or out of a sandbox.

    The side inside is written SANDBOX:PATH; directories are copied whole.

    A TARGET that is a directory, or ends in a slash, receives the source under its own name, as with cp.

    \b
    dsec cp patch.diff sb-e1-7k3m9p2q4r5s:/workspace/
    dsec cp sb-e1-7k3m9p2q4r5s:/workspace/report.json .
    """
    inside_source, inside_target = _inside(source), _inside(target)
    if (inside_source is None) == (inside_target is None):
        raise usage(
            "exactly one of SOURCE and TARGET must be SANDBOX:PATH",
            hint="for example: dsec cp notes.txt sb-e1-...:/root/",
        )
    from dsec.cli.connect import with_client

    if inside_target is not None:
        name, remote = inside_target
        if not os.path.lexists(source):
            raise usage(f"{source!r} does not exist")
        own_name = os.path.basename(os.path.abspath(source))
        with_client(lambda client: _upload(client, name, source, remote, own_name))
    elif inside_source is not None:
        name, remote = inside_source
        if target.endswith("/") or os.path.isdir(target):
            target = os.path.join(target, posixpath.basename(posixpath.normpath(remote)))
        with_client(lambda client: _download(client, name, remote, target))


def _inside(text: str) -> tuple[str, str] | None:
    """`sb-...:path` as (sandbox, path); None for a path of this machine."""
    name, colon, path = text.partition(":")
    if not colon or not name.startswith("sb-") or "/" in name:
        return None
    if not path:
        raise usage(f"{text!r} names no path", hint=f"for example: {name}:/workspace/")
    return name, path


async def _upload(client: DSecClient, name: str, local: str, remote: str, own_name: str) -> None:
    from dsec import FileKind

    sandbox = await client.attach(name)
    into = remote.endswith("/")
    if not into and await sandbox.files.exists(remote):
        into = (await sandbox.files.stat(remote)).kind is FileKind.DIRECTORY
    await sandbox.files.upload(local, posixpath.join(remote, own_name) if into else remote)


async def _download(client: DSecClient, name: str, remote: str, local: str) -> None:
    sandbox = await client.attach(name)
    await sandbox.files.download(remote, local)
