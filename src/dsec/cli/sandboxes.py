"""`dsec ps`, `dsec logs`, `dsec pause`, `dsec resume`, `dsec stop`: what is there, what happened to it, its sleep and end."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Annotated

import typer

from dsec.cli import options
from dsec.cli.failure import CliFailure, usage
from dsec.cli.output import age, megabytes, print_json, print_json_line, print_table, printable

if TYPE_CHECKING:
    from dsec import DSecClient, SandboxInfo

_LIVE = ("creating", "running", "paused", "stopping")
_ENDED = ("stopped", "failed")
_AT_ONCE = 32
_MEASURED_MOST = 100


def register(app: typer.Typer) -> None:
    app.command()(ps)
    app.command()(logs)
    app.command()(pause)
    app.command()(resume)
    app.command()(stop)


def ps(
    label: options.Labels = None,
    job: Annotated[str | None, typer.Option("--job", metavar="JOB", help="Those of a job.")] = None,
    state: Annotated[list[str] | None, typer.Option(help=f"One of {', '.join(_LIVE + _ENDED)}; repeatable.")] = None,
    all_: Annotated[bool, typer.Option("--all", "-a", help="Those that have ended, too.")] = False,
    json: options.Json = False,
) -> None:
    """List sandboxes.

    \b
    dsec ps
    dsec ps --all --label team=search
    dsec ps --json | jq -r '.[].id'
    """
    wanted = tuple(state or (_LIVE + _ENDED if all_ else _LIVE))
    for name in wanted:
        if name not in _LIVE + _ENDED:
            raise usage(f"--state {name!r} is no state", hint=f"states: {', '.join(_LIVE + _ENDED)}")
    labels = options.pairs(label, "--label")
    from dsec.cli.connect import with_client

    async def work(client: DSecClient) -> list[SandboxInfo]:
        listed = [info async for info in client.list(labels=labels or None, states=wanted, job=job)]
        return await _measured(client, listed)

    found = sorted(with_client(work), key=lambda info: info.created_at)
    if json:
        print_json(found)
        return
    columns = ("id", "state", "image", "age", "memory", "cpu", "pids", "labels")
    now = time.time()
    print_table(columns, [_row(info, now) for info in found], empty="no sandboxes" + ("" if all_ else " running"))


async def _measured(client: DSecClient, listed: list[SandboxInfo]) -> list[SandboxInfo]:
    """A list carries no usage; so few that a person reads them are asked one by one."""
    if len(listed) > _MEASURED_MOST:
        return listed
    at_once = asyncio.Semaphore(_AT_ONCE)

    async def ask(info: SandboxInfo) -> SandboxInfo:
        from dsec import DSecError

        if info.state.value not in _LIVE:
            return info
        try:
            async with at_once:
                return await (await client.attach(info.id)).info()
        except DSecError:
            return info  # it has just ended

    return list(await asyncio.gather(*(ask(info) for info in listed)))


def _row(info: SandboxInfo, now: float) -> tuple[str, ...]:
    state = info.state.value + (f" ({info.reason.value})" if info.reason else "")
    image = " + ".join(layer.partition("@sha256:")[0] for layer in info.layers)
    labels = " ".join(f"{name}={value}" for name, value in sorted(info.labels.items()))
    usage_ = info.usage
    known = usage_.pids > 0 or usage_.memory_bytes > 0
    return (
        info.id,
        state,
        image,
        age(info.created_at, now),
        megabytes(usage_.memory_bytes if known else -1),
        f"{usage_.cpu_s:.1f}s" if known else "-",
        str(usage_.pids) if known else "-",
        labels,
    )


def logs(
    sandbox: Annotated[str, typer.Argument(metavar="SANDBOX", show_default=False)],
    json: options.Json = False,
) -> None:
    """Show what happened to a sandbox.

    Its creation, its stages, its end and the reason. With --json, one document a line.

    \b
    dsec logs sb-e1-7k3m9p2q4r5s
    """
    from dsec.cli.connect import with_client

    async def work(client: DSecClient) -> None:
        attached = await client.attach(sandbox)
        async for line in attached.logs():
            if json:
                print_json_line({"t": line.t, "line": str(line)})
            else:
                stamp = time.strftime("%H:%M:%S", time.localtime(line.t))
                print(f"{stamp}.{int(line.t % 1 * 1000):03d}  {printable(line)}")

    with_client(work)


def pause(
    sandbox: Annotated[list[str], typer.Argument(metavar="SANDBOX...", show_default=False)],
    json: options.Json = False,
) -> None:
    """Freeze sandboxes and give their memory back.

    The next command or file resumes a paused one by itself; its times to live go on.

    \b
    dsec pause sb-e1-7k3m9p2q4r5s
    """
    _each(sandbox, "paused", json)


def resume(
    sandbox: Annotated[list[str], typer.Argument(metavar="SANDBOX...", show_default=False)],
    json: options.Json = False,
) -> None:
    """Let paused sandboxes run on.

    \b
    dsec resume sb-e1-7k3m9p2q4r5s
    """
    _each(sandbox, "resumed", json)


def _each(names: list[str], done: str, json: bool) -> None:
    """Pauses or resumes them all; one that fails does not keep the others from it."""
    from dsec import DSecError
    from dsec.cli.connect import with_client

    at_once = asyncio.Semaphore(_AT_ONCE)

    async def one(client: DSecClient, name: str) -> str:
        try:
            async with at_once:
                sandbox = await client.attach(name)
                await (sandbox.pause() if done == "paused" else sandbox.resume())
        except DSecError as error:
            return f"{name}: {error.message}"
        return ""

    async def work(client: DSecClient) -> list[str]:
        return [answer for answer in await asyncio.gather(*(one(client, name) for name in names)) if answer]

    failed = with_client(work)
    if json:
        print_json({done: len(names) - len(failed), "failed": failed})
    elif not failed:
        print(f"{done} {len(names)}")
    if failed:
        raise CliFailure("; ".join(failed), hint="dsec ps lists what there is")


def stop(
    sandbox: Annotated[list[str] | None, typer.Argument(metavar="SANDBOX...", show_default=False)] = None,
    all_: Annotated[bool, typer.Option("--all", help="Every sandbox of this platform.")] = False,
    label: options.Labels = None,
    json: options.Json = False,
) -> None:
    """Stop sandboxes and wait until they are gone.

    Stopping one that has ended already is no error.

    \b
    dsec stop sb-e1-7k3m9p2q4r5s
    dsec stop --label team=search
    dsec stop --all
    """
    chosen = [bool(sandbox), all_, bool(label)]
    if sum(chosen) != 1:
        raise usage("name sandboxes, or give --all, or give --label", hint="dsec ps lists what there is")
    labels = options.pairs(label, "--label")
    from dsec.cli.connect import with_client

    async def work(client: DSecClient) -> tuple[int, list[str]]:
        if labels:
            return await client.stop_many(labels=labels), []
        names = sandbox or [info.id async for info in client.list(states=_LIVE)]
        at_once = asyncio.Semaphore(_AT_ONCE)
        answers = await asyncio.gather(*(_stop_one(client, name, at_once) for name in names))
        failed = [answer for answer in answers if answer]
        return len(names) - len(failed), failed

    count, failed = with_client(work)
    if json:
        print_json({"stopped": count, "failed": failed})
    elif not failed:
        print(f"stopped {count}")
    if failed:
        raise CliFailure("; ".join(failed), hint="dsec ps lists what there is")


async def _stop_one(client: DSecClient, name: str, at_once: asyncio.Semaphore) -> str:
    """Empty when stopped, else what went wrong."""
    from dsec import DSecError, SandboxUnavailable

    try:
        async with at_once:
            sandbox = await client.attach(name)
            await sandbox.stop()
    except SandboxUnavailable:
        return ""  # it had ended already
    except DSecError as error:
        return f"{name}: {error.message}"
    return ""
