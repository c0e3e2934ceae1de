"""`dsec run`, `dsec exec` and `dsec attach`: one command, its output live, its exit code ours."""

from __future__ import annotations

import asyncio
import base64
import os
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from dsec.cli import options
from dsec.cli.failure import usage
from dsec.cli.output import note, print_json

if TYPE_CHECKING:
    from dsec import DSecClient, DSecContainerRunArgs, ExecResult, Process, PtySize, Sandbox

_SHOWN_AGAIN = 16 * 1024  # bytes of output, of a command that is come back to


def register(app: typer.Typer) -> None:
    app.command()(run)
    app.command("exec")(exec_)
    app.command()(attach)


def run(
    image: Annotated[
        str, typer.Argument(metavar="IMAGE", help="Base layer, for example debian@12.", show_default=False)
    ],
    command: options.Command = None,
    layer: Annotated[
        list[str] | None, typer.Option(help="A workspace or toolkit on top; repeatable, in order.")
    ] = None,
    cpu: Annotated[float, typer.Option(metavar="CORES", help="CPU limit.")] = 1,
    memory: Annotated[int, typer.Option(metavar="MB", help="Memory limit.")] = 1024,
    disk: Annotated[int, typer.Option(metavar="MB", help="Limit of what the sandbox may write.")] = 4096,
    pids: Annotated[int, typer.Option(help="Limit of processes and threads.")] = 512,
    env: options.Env = None,
    user: options.User = None,
    workdir: options.Workdir = None,
    label: options.Labels = None,
    allow: options.Allow = None,
    deny: options.Deny = None,
    interactive: options.Interactive = False,
    tty: options.Tty = False,
    timeout: options.Timeout = None,
    max_output: options.MaxOutput = 256,
    keep: Annotated[bool, typer.Option("--keep", help="Leave the sandbox running; its id goes to stderr.")] = False,
    json: options.Json = False,
) -> int:
    """Run one command in a fresh sandbox and remove the sandbox.

    Output is copied as it comes, stdin is forwarded when it is a pipe or a file, Ctrl-C kills the command and stops the
    sandbox. The exit code is the command's: 127 not found, 126 not executable, 128+n killed by signal n. With -it our terminal
    is the command's; Ctrl-P Ctrl-Q leaves it, and the sandbox, running.

    \b
    dsec run debian@12 -- python3 -c 'print(6 * 7)'
    dsec run debian@12 --memory 256 --timeout 10 -- bash -c 'echo $HOME; id'
    dsec run debian@12 --layer black@24.2.0 --keep --label team=search -- pytest -q
    dsec run debian@12 --allow pypi -- pip download six
    dsec run -it debian@12 -- bash
    tar c src | dsec run debian@12 -- tar t
    """
    argv = _argv(command, f"dsec run {image} -- python3 -V")
    how = _How(timeout, max_output, json, *_checked(interactive, tty, json))
    from dsec import DSecContainerRunArgs
    from dsec.cli.connect import with_client

    args = DSecContainerRunArgs(
        image,
        layers=tuple(layer or ()),
        cpu_cores_limit=cpu,
        memory_limit_mb=memory,
        disk_limit_mb=disk,
        pids_limit=pids,
        env=options.pairs(env, "--env"),
        init_user=user or "root",
        workdir=workdir,
        labels=options.pairs(label, "--label"),
        network_rules=options.rules(allow, deny),
    )
    return with_client(lambda client: _run(client, args, argv, how, keep=keep))


async def _run(client: DSecClient, args: DSecContainerRunArgs, argv: list[bytes], how: _How, *, keep: bool) -> int:
    sandbox = await client.run_container(args)
    try:
        code = await _execute(sandbox, argv, how)
    except BaseException:
        await asyncio.shield(sandbox.stop())
        raise
    if keep or code is None:
        note(f"kept: {sandbox.id}")
    else:
        await sandbox.stop()
    return code or 0


def exec_(
    sandbox: Annotated[str, typer.Argument(metavar="SANDBOX", help="Id of a running sandbox.", show_default=False)],
    command: options.Command = None,
    env: options.Env = None,
    user: options.User = None,
    workdir: options.Workdir = None,
    interactive: options.Interactive = False,
    tty: options.Tty = False,
    timeout: options.Timeout = None,
    max_output: options.MaxOutput = 256,
    json: options.Json = False,
) -> int:
    """Run one more command in a running sandbox.

    Its exit code is ours. With -it our terminal is the command's; Ctrl-P Ctrl-Q leaves it running.

    \b
    dsec exec -it sb-e1-7k3m9p2q4r5s -- bash
    dsec exec sb-e1-7k3m9p2q4r5s -- ls -l /workspace
    dsec exec sb-e1-7k3m9p2q4r5s --user nobody -- id < /dev/null
    """
    argv = _argv(command, f"dsec exec {sandbox} -- ls /")
    how = _How(timeout, max_output, json, *_checked(interactive, tty, json))
    variables = options.pairs(env, "--env")
    from dsec.cli.connect import with_client

    async def work(client: DSecClient) -> int:
        attached = await client.attach(sandbox)
        return await _execute(attached, argv, how, env=variables, user=user, cwd=workdir) or 0

    return with_client(work)


def attach(
    sandbox: Annotated[str, typer.Argument(metavar="SANDBOX", help="Id of a running sandbox.", show_default=False)],
    exec_id: Annotated[str, typer.Argument(metavar="EXEC_ID", help="Id of a command in it.", show_default=False)],
) -> int:
    """Come back to a command that was started with -it, at the end of what it has shown.

    Its exit code is ours; Ctrl-P Ctrl-Q leaves it running again. Of a command without a terminal all output is copied.

    \b
    dsec attach sb-e1-7k3m9p2q4r5s ex-9c41d2
    """
    from dsec.cli.connect import with_client

    return with_client(lambda client: _attach(client, sandbox, exec_id))


async def _attach(client: DSecClient, sandbox: str, exec_id: str) -> int:
    from dsec.cli import streams, terminal

    found = await client.attach(sandbox)
    process = await found.process(exec_id)
    shown = next((info.stdout_bytes for info in await found.processes() if info.exec_id == exec_id), 0)
    if terminal.both() and await terminal.resized(process):
        conversation = terminal.converse(process, cursor=max(0, shown - _SHOWN_AGAIN), redraw=True)
        return _left(await conversation, found, process) or 0
    result = await streams.follow(process, forward_stdin=False)
    streams.remark(result)
    return result.exit_code


class _How(NamedTuple):
    """How a command is run and shown. size: that of its terminal, when it has one."""

    timeout: float | None
    max_output: int
    json: bool
    interactive: bool
    size: PtySize | None


def _checked(interactive: bool, tty: bool, json: bool) -> tuple[bool, PtySize | None]:
    if not tty:
        return interactive, None
    from dsec.cli import terminal

    if json:
        raise usage("-t and --json exclude each other", hint="a terminal's output is for a person")
    terminal.check(typing=interactive)
    return interactive, terminal.size()


async def _execute(
    sandbox: Sandbox,
    argv: list[bytes],
    how: _How,
    *,
    env: dict[str, str] | None = None,
    user: str | None = None,
    cwd: str | None = None,
) -> int | None:
    """Its exit code; None when the user detached from it."""
    from dsec.cli import streams, terminal

    piped = how.size is None and (how.interactive or streams.stdin_is_piped())
    if how.size is not None:
        env = {"TERM": os.environ.get("TERM") or "xterm", **(env or {})}
    process = await sandbox.start(
        argv, env=env, user=user, cwd=cwd, timeout=how.timeout, stdin=piped, pty=how.size,
        max_output_bytes=how.max_output << 20,
    )  # fmt: skip
    if how.json:
        result = await streams.collect(process, forward_stdin=piped)
        print_json({"sandbox": sandbox.id, **_document(result)})
    elif how.size is not None and how.interactive:
        return _left(await terminal.converse(process), sandbox, process)
    else:
        result = await streams.follow(process, forward_stdin=piped)
        streams.remark(result)
    return result.exit_code


def _left(result: ExecResult | None, sandbox: Sandbox, process: Process) -> int | None:
    """The end of a conversation in a terminal."""
    from dsec.cli import streams

    if result is None:
        note(f"\ndetached; to come back: dsec attach {sandbox.id} {process.exec_id}")
        return None
    streams.remark(result)
    return result.exit_code


def _argv(command: list[str] | None, example: str) -> list[bytes]:
    if not command:
        raise usage("no command given", hint=f"it comes after `--`: {example}")
    return [os.fsencode(part) for part in command]


def _document(result: ExecResult) -> dict[str, object]:
    """A result as JSON: output as text where it is UTF-8, else as base64 under another name."""
    document: dict[str, object] = {
        "exec_id": result.exec_id,
        "exit_code": result.exit_code,
        "signal": result.signal,
        "timed_out": result.timed_out,
        "reason": result.reason,
        "detail": result.detail,
        "duration_s": round(result.duration_s, 6),
        "stdout_bytes": result.stdout_bytes,
        "stderr_bytes": result.stderr_bytes,
        "stdout_truncated": result.stdout_truncated,
        "stderr_truncated": result.stderr_truncated,
    }
    for name, data in (("stdout", result.stdout), ("stderr", result.stderr)):
        try:
            document[name] = data.decode()
        except UnicodeDecodeError:
            document[f"{name}_base64"] = base64.b64encode(data).decode()
    return document
