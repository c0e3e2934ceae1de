"""The report of `dsec doctor --attack`: one line an attempt, as it happens."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Iterator

import msgspec

from dsec.cli.attack import battery
from dsec.cli.attack.battery import Result, Verdict
from dsec.cli.connect import make_client
from dsec.cli.failure import ExitCode
from dsec.cli.output import note, print_json, printable
from dsec.cluster import embedded

_COLOURS = {Verdict.BLOCKED: "32", Verdict.ESCAPED: "1;37;41", Verdict.UNCLEAR: "33"}


class Report(msgspec.Struct, frozen=True):
    ok: bool
    blocked: int
    escaped: int
    unclear: int
    attempts: tuple[Result, ...]


def attack_command(image: str, *, json: bool) -> int:
    """Against the running platform, else against a private one that ends with us. Exit code 1 unless all were blocked."""
    with _platform() as endpoint:
        results = tuple(asyncio.run(_attack(endpoint, image, quiet=json)))
    counts = {verdict: sum(result.verdict is verdict for result in results) for verdict in Verdict}
    failed = len(results) - counts[Verdict.BLOCKED]
    if json:
        print_json(
            Report(not failed, counts[Verdict.BLOCKED], counts[Verdict.ESCAPED], counts[Verdict.UNCLEAR], results)
        )
        return ExitCode.FAILURE if failed else 0
    print(f"\n{len(results)} attempts: {counts[Verdict.BLOCKED]} blocked, {counts[Verdict.ESCAPED]} ESCAPED, "
          f"{counts[Verdict.UNCLEAR]} unclear")  # fmt: skip
    for result in results:
        if result.verdict is not Verdict.BLOCKED:
            print(f"  {result.verdict.value}: {result.name} ({result.what}): {printable(result.detail)}")
    return ExitCode.FAILURE if failed else 0


@contextlib.contextmanager
def _platform() -> Iterator[embedded.Endpoint]:
    local = embedded.status()
    if local.running and local.endpoint is not None:
        yield local.endpoint
        return
    note("no platform runs here; starting a private one")
    with embedded.private() as endpoint:
        yield endpoint


async def _attack(endpoint: embedded.Endpoint, image: str, *, quiet: bool) -> list[Result]:
    results: list[Result] = []
    async with make_client(endpoint) as client:
        async for result in battery.run(client, image, endpoint.url):
            results.append(result)
            if not quiet:
                _print(result)
    return results


def _print(result: Result) -> None:
    word = result.verdict.value
    if sys.stdout.isatty():
        word = f"\033[{_COLOURS[result.verdict]}m{word}\033[0m"
    print(f"{word}  {result.name:<28} {result.what}: {printable(result.detail)}", flush=True)
