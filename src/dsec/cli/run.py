"""`dsec run` and `dsec exec`: one command, its output live, its exit code ours."""

from __future__ import annotations

import asyncio
import base64
import os
from typing import TYPE_CHECKING, Annotated

import typer

from dsec.cli import options
from dsec.cli.failure import usage
from dsec.cli.output import note, print_json

if TYPE_CHECKING:
    from dsec import DSecClient, DSecContainerRunArgs, ExecResult, Sandbox


def register(app: typer.Typer) -> None:
    app.command()(run)
    app.command("exec")(exec_)


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
    timeout: options.Timeout = None,
    max_output: options.MaxOutput = 256,
    keep: Annotated[bool, typer.Option("--keep", help="Leave the sandbox running; its id goes to stderr.")] = False,
    json: options.Json = False,
) -> int:
    """Run one command in a fresh sandbox and remove the sandbox.

    Output is copied as it comes, stdin is forwarded when it is a pipe or a file, Ctrl-C kills the command and stops the
    sandbox. The exit code is the command's: 127 not found, 126 not executable, 128+n killed by signal n.

    \b
    dsec run debian@12 -- python3 -c 'print(6 * 7)'
    dsec run debian@12 --memory 256 --timeout 10 -- bash -c 'echo $HOME; id'
    dsec run debian@12 --layer black@24.2.0 --keep --label team=search -- pytest -q
    dsec run debian@12 --allow pypi -- pip download six
    tar c src | dsec run debian@12 -- tar t
    """
    argv = _argv(command, f"dsec run {image} -- python3 -V")
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
    return with_client(
        lambda client: _run(client, args, argv, timeout=timeout, max_output=max_output, keep=keep, json=json)
    )


async def _run(
    client: DSecClient,
    args: DSecContainerRunArgs,
    argv: list[bytes],
    *,
    timeout: float | None,
    max_output: int,
    keep: bool,
    json: bool,
) -> int:
    sandbox = await client.run_container(args)
    try:
        code = await _execute(sandbox, argv, timeout=timeout, max_output=max_output, json=json)
    except BaseException:
        await asyncio.shield(sandbox.stop())
        raise
    if keep:
        note(f"kept: {sandbox.id}")
    else:
        await sandbox.stop()
    return code


def exec_(
    sandbox: Annotated[str, typer.Argument(metavar="SANDBOX", help="Id of a running sandbox.", show_default=False)],
    command: options.Command = None,
    env: options.Env = None,
    user: options.User = None,
    workdir: options.Workdir = None,
    timeout: options.Timeout = None,
    max_output: options.MaxOutput = 256,
    json: options.Json = False,
) -> int:
    """Run one more command in a running sandbox.

    Its exit code is ours.

    \b
    dsec exec sb-e1-7k3m9p2q4r5s -- ls -l /workspace
    dsec exec sb-e1-7k3m9p2q4r5s --user nobody -- id < /dev/null
    """
    argv = _argv(command, f"dsec exec {sandbox} -- ls /")
    variables = options.pairs(env, "--env")
    from dsec.cli.connect import with_client

    async def work(client: DSecClient) -> int:
        attached = await client.attach(sandbox)
        return await _execute(
            attached, argv, env=variables, user=user, cwd=workdir, timeout=timeout, max_output=max_output, json=json
        )

    return with_client(work)


async def _execute(
    sandbox: Sandbox,
    argv: list[bytes],
    *,
    env: dict[str, str] | None = None,
    user: str | None = None,
    cwd: str | None = None,
    timeout: float | None,
    max_output: int,
    json: bool,
) -> int:
    from dsec.cli import streams

    piped = streams.stdin_is_piped()
    process = await sandbox.start(
        argv, env=env, user=user, cwd=cwd, timeout=timeout, stdin=piped, max_output_bytes=max_output << 20
    )
    if json:
        result = await streams.collect(process, forward_stdin=piped)
        print_json({"sandbox": sandbox.id, **_document(result)})
    else:
        result = await streams.follow(process, forward_stdin=piped)
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
