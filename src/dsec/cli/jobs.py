"""`dsec job`: the jobs of this platform, each the sandboxes of one run."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Annotated

import typer

from dsec.cli import options
from dsec.cli.failure import CliFailure
from dsec.cli.output import age, megabytes, print_facts, print_json, print_table

if TYPE_CHECKING:
    from dsec import DSecClient, Job, JobInfo

app = typer.Typer(help="List, pause, resume and stop jobs.", no_args_is_help=True, rich_markup_mode=None)

Names = Annotated[list[str], typer.Argument(metavar="JOB...", show_default=False)]
_LIVE = ("running", "paused", "stopping")


@app.command("ls")
def list_(
    all_: Annotated[bool, typer.Option("--all", "-a", help="Those that were stopped lately, too.")] = False,
    json: options.Json = False,
) -> None:
    """List jobs.

    \b
    dsec job ls
    dsec job ls --all --json | jq -r '.[].name'
    """
    from dsec.cli.connect import with_client

    async def work(client: DSecClient) -> list[JobInfo]:
        return await client.jobs(states=None if all_ else _LIVE)

    found = with_client(work)
    if json:
        print_json(found)
        return
    columns = ("job", "state", "sandboxes", "memory", "swap", "cpu", "rollouts", "lease", "age", "labels")
    now = time.time()
    print_table(columns, [_row(info, now) for info in found], empty="no jobs" + ("" if all_ else " that live"))


def _row(info: JobInfo, now: float) -> tuple[str, ...]:
    usage = info.usage
    return (
        info.name,
        state_of(info.state.value, info.paused_by, info.under_way.value),
        inside(usage.sandboxes),
        megabytes(usage.memory_bytes),
        megabytes(usage.swap_bytes),
        f"{usage.cpu_s:.1f}s",
        str(usage.rollouts),
        lease_of(info.state.value, info.lease_until, now),
        age(info.created_at, now),
        " ".join(f"{name}={value}" for name, value in sorted(info.labels.items())),
    )


def state_of(state: str, paused_by: str, under_way: str) -> str:
    """A job's state, and what made it so or is being done."""
    why = f"{under_way} under way" if under_way else f"by {paused_by}" if paused_by else ""
    return f"{state} ({why})" if why else state


def inside(states: dict[str, int]) -> str:
    """How many in which state, the most usual alone without its name."""
    if not states:
        return "0"
    if set(states) == {"running"}:
        return str(states["running"])
    return ", ".join(f"{count} {state}" for state, count in sorted(states.items()))


def lease_of(state: str, until: float, now: float) -> str:
    """Seconds that are left of it; "-" when it does not matter."""
    return f"{max(0.0, until - now):.0f}s" if state == "running" else "-"


@app.command()
def show(
    job: Annotated[str, typer.Argument(metavar="JOB", show_default=False)],
    json: options.Json = False,
) -> None:
    """Show one job: its lease, its limits, and what its sandboxes use and have used.

    \b
    dsec job show grpo-17
    """
    from dsec.cli.connect import with_client

    async def work(client: DSecClient) -> JobInfo:
        import msgspec

        handle = client.job(job)
        usage = await handle.usage()
        return msgspec.structs.replace(await handle.info(), usage=usage)

    info = with_client(work)
    if json:
        print_json(info)
    else:
        print_facts(_facts(info, time.time()))


def _facts(info: JobInfo, now: float) -> list[tuple[str, str]]:
    usage, limits = info.usage, info.limits
    most = (("sandboxes", limits.max_sandboxes), ("cores", limits.cpu_cores), ("MB", limits.memory_mb))
    limited = ", ".join(f"{value:g} {name}" for name, value in most if value is not None)
    return [
        ("job", f"{info.name} ({info.id})"),
        ("state", state_of(info.state.value, info.paused_by, info.under_way.value)),
        ("age", age(info.created_at, now)),
        (
            "lease",
            f"{info.lease:g} s, {lease_of(info.state.value, info.lease_until, now)} left; opened {info.epoch} times",
        ),
        ("limits", limited or "none of its own"),
        ("labels", " ".join(f"{name}={value}" for name, value in sorted(info.labels.items())) or "-"),
        (
            "sandboxes",
            f"{inside(usage.sandboxes)}; {usage.created} created, {usage.ended} ended, {usage.invalid} invalid",
        ),
        ("memory", f"{megabytes(usage.memory_bytes)}, {megabytes(usage.swap_bytes)} in swap"),
        ("used", f"{usage.cpu_s:.1f} s of CPU time, {usage.memory_mb_s / 1024 / 3600:.3f} GB hours of memory"),
        ("rollouts", f"{usage.rollouts}, {usage.steps} steps"),
    ]


@app.command()
def pause(job: Names, json: options.Json = False) -> None:
    """Freeze all sandboxes of jobs and give their memory back.

    A command or file resumes its own sandbox; a new sandbox, or a program that opens the job, sets the job running.

    \b
    dsec job pause grpo-17
    """
    _each(job, "paused", lambda one: one.pause(), json)


@app.command()
def resume(job: Names, json: options.Json = False) -> None:
    """Let all sandboxes of jobs run on.

    \b
    dsec job resume grpo-17
    """
    _each(job, "resumed", lambda one: one.resume(), json)


@app.command()
def stop(job: Names, json: options.Json = False) -> None:
    """End jobs and all their sandboxes, and wait until they are gone.

    \b
    dsec job stop grpo-17
    """
    _each(job, "stopped", lambda one: one.stop(), json)


def _each(names: list[str], done: str, do: Callable[[Job], Awaitable[None]], json: bool) -> None:
    """One that fails does not keep the others from it."""
    from dsec import DSecError
    from dsec.cli.connect import with_client

    async def work(client: DSecClient) -> list[str]:
        failed = []
        for name in names:
            try:
                await do(client.job(name))
            except DSecError as error:
                failed.append(f"{name}: {error.message}")
        return failed

    failed = with_client(work)
    if json:
        print_json({done: len(names) - len(failed), "failed": failed})
    elif not failed:
        print(f"{done} {len(names)}")
    if failed:
        raise CliFailure("; ".join(failed), hint="dsec job ls --all lists what there is")
