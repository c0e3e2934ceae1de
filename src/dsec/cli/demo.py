"""`dsec demo`: a burst of real coding rollouts on real bug-fix tasks."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dsec.cli.failure import CliFailure, ExitCode, usage
from dsec.cli.output import note, print_table

if TYPE_CHECKING:
    from dsec import DSecClient
    from dsec.demo.records import Burst
    from dsec.demo.rollout import PreparedTask


def register(app: typer.Typer) -> None:
    app.command()(demo)


def demo(
    tasks: Annotated[int, typer.Option(metavar="N", help="How many tasks; the default ones come first.", min=1)] = 8,
    rollouts: Annotated[int, typer.Option(metavar="G", help="Rollouts of each task; scripts take turns.", min=1)] = 8,
    concurrency: Annotated[int, typer.Option(metavar="C", help="Rollouts at once.", min=1)] = 8,
    seed: Annotated[int, typer.Option(metavar="S", help="Order of the rollouts, first script, further tasks.")] = 0,
    task_ids: Annotated[
        str | None, typer.Option(metavar="ID,ID", help="These tasks instead of the first N.", show_default=False)
    ] = None,
    chaos: Annotated[
        bool, typer.Option("--chaos", help="Then again with trainer and edge killed, twice each; compare.")
    ] = False,
    json: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write every rollout there.", show_default=False)
    ] = None,
    report: Annotated[
        Path | None, typer.Option(metavar="FILE.html", help="Write an HTML report there.", show_default=False)
    ] = None,
) -> int:
    """Run recorded coding agents on real bug-fix tasks, and grade each in a fresh sandbox.

    Four scripts take turns on each task: fix applies the real fix, noop does nothing, break breaks a passing test, cheat makes
    the tests say yes. Uses the running platform, or one of its own that ends with it (with --chaos always). Exit code 1 when a
    sample is invalid or a script gets another reward than it must, and with --chaos when anything shows of the kills.

    \b
    dsec demo
    dsec demo --chaos
    dsec demo --tasks 1 --rollouts 4
    dsec demo --task-ids bleach-6.1.0,h11-0.15.0 --json out.json --report out.html
    """
    for path in (json, report):
        if path is not None and not path.absolute().parent.is_dir():
            raise usage(f"there is no directory for {path}", hint=f"mkdir -p {path.absolute().parent}")
    from dsec.demo.errors import DemoError
    from dsec.demo.prepare import prepared
    from dsec.demo.tasks import select
    from dsec.layers import LayerStore

    began = time.monotonic()
    try:
        chosen = select([name.strip() for name in (task_ids or "").split(",") if name.strip()], tasks, seed)
        with prepared(chosen, LayerStore(), note) as ready:
            prepare_s = time.monotonic() - began
            note(f"{len(ready)} tasks are ready after {prepare_s:.1f} s")
            run = _disturbed if chaos else _burst
            burst = asyncio.run(run(ready, rollouts, concurrency, seed, prepare_s))
    except DemoError as error:
        raise CliFailure(str(error), hint=error.hint) from error
    except asyncio.CancelledError:  # SIGTERM, after every sandbox was stopped
        raise CliFailure("terminated", code=ExitCode.TERMINATED) from None
    _write(burst, json, report)
    _print(burst)
    return 0 if burst.ok else int(ExitCode.FAILURE)


async def _burst(ready: list[PreparedTask], rollouts: int, concurrency: int, seed: int, prepare_s: float) -> Burst:
    from dsec.demo import show
    from dsec.demo.burst import job_of_a_burst, plan, run_burst
    from dsec.demo.records import summarise

    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)  # sandboxes are stopped on the way out
    async with _platform() as client, job_of_a_burst(client, seed) as job:
        planned = plan(ready, rollouts, seed)
        began = time.monotonic()
        with show.bar(len(planned)) as bar:
            done = await run_burst(
                client, job, planned, concurrency, on_start=lambda _: bar.started(), on_done=bar.done
            )
        wall_s = time.monotonic() - began
    return summarise(done, concurrency=concurrency, seed=seed, wall_s=wall_s, prepare_s=prepare_s)


async def _disturbed(ready: list[PreparedTask], rollouts: int, concurrency: int, seed: int, prepare_s: float) -> Burst:
    from dsec.demo import show
    from dsec.demo.chaos import Seen, private_platform, run_twice
    from dsec.demo.records import summarise

    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    note("a private platform, since its edge will be killed")
    async with private_platform() as (endpoint, client):
        with show.bar(len(ready) * rollouts) as bar:
            what = ""

            def news(text: str, now: Seen) -> None:
                nonlocal what
                if text:
                    what = text
                    note(text if not now.steps else f"{text} after {now.steps} steps")
                bar.at(what, now.finished, now.open)

            found = await run_twice(endpoint, client, ready, rollouts, concurrency, seed, news)
    chaos = found.chaos
    return summarise(
        found.rollouts, concurrency=concurrency, seed=seed, wall_s=chaos.wall_s, prepare_s=prepare_s, chaos=chaos
    )  # fmt: skip


def _platform() -> AbstractAsyncContextManager[DSecClient]:
    """The platform of this machine, or the one that DSEC_URL names, else a private one."""
    from dsec import DSecClient, embedded
    from dsec.cluster.embedded import status

    if os.environ.get("DSEC_URL") or status().running:
        return DSecClient()
    note("no platform is running: starting a private one")
    return embedded()


def _write(burst: Burst, json: Path | None, report: Path | None) -> None:
    from importlib.metadata import version

    import msgspec

    from dsec.demo.report import render

    if json is not None:
        json.write_bytes(msgspec.json.format(msgspec.json.encode(burst), indent=1) + b"\n")
        note(f"every rollout: {json}")
    if report is not None:
        report.write_text(render(burst, version("dsec")), encoding="utf-8")
        note(f"report: {report}")


def _print(burst: Burst) -> None:
    from dsec.demo.report import disturbances
    from dsec.demo.show import closing, table

    columns, rows = table(burst)
    print_table(columns, rows)
    for line in closing(burst):
        print(line)
    if burst.chaos is not None:
        for line in disturbances(burst.summary.rollouts, burst.chaos):
            print(line)
