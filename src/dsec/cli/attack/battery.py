"""Run the battery in one live sandbox: copy the attempts in, read their verdicts, then try what needs a second command."""

from __future__ import annotations

from collections.abc import AsyncIterator
from enum import Enum
from importlib import resources
from urllib.parse import urlsplit

import msgspec

from dsec import DSecClient, DSecContainerRunArgs, Exit, Sandbox, Stderr, Stdout
from dsec.cli.attack.outside import OUTSIDE, Outcome

_PACKAGE = "dsec_attack"
_DIRECTORY = "/var/tmp"
MEMORY_MB = 256
DISK_MB = 64
PIDS = 128


class Verdict(str, Enum):
    """unclear: refused with an error that no rule gives, so the attempt proves nothing; counts as a failure."""

    BLOCKED = "blocked"
    ESCAPED = "ESCAPED"
    UNCLEAR = "unclear"


class Result(msgspec.Struct, frozen=True):
    name: str
    what: str
    verdict: Verdict
    detail: str


def arguments(image: str) -> DSecContainerRunArgs:
    """Small limits, so that running into them is quick."""
    return DSecContainerRunArgs(
        image,
        memory_limit_mb=MEMORY_MB,
        disk_limit_mb=DISK_MB,
        pids_limit=PIDS,
        labels={"dsec": "attack"},
    )


async def run(client: DSecClient, image: str, url: str) -> AsyncIterator[Result]:
    """Every attempt, as its verdict comes. `url` is where the platform answers: its port must be out of reach inside."""
    async with client.run_container(arguments(image)) as sandbox:
        await _copy_in(sandbox)
        async for result in _inside(sandbox, urlsplit(url).port or 80):
            yield result
        for name, what, function in OUTSIDE:
            yield _judged(name, what, await function(sandbox))


def _judged(name: str, what: str, outcome: Outcome) -> Result:
    return Result(name, what, Verdict.ESCAPED if outcome.escaped else Verdict.BLOCKED, outcome.detail)


async def _copy_in(sandbox: Sandbox) -> None:
    for module in resources.files("dsec.cli.attack.inside").iterdir():
        if module.name.endswith(".py"):
            await sandbox.files.write(f"{_DIRECTORY}/{_PACKAGE}/{module.name}", module.read_bytes())


async def _inside(sandbox: Sandbox, port: int) -> AsyncIterator[Result]:
    environment = {"ATTACK_PORT": str(port), "ATTACK_DISK_BYTES": str(DISK_MB << 20)}
    argv = ["python3", "-m", _PACKAGE]
    process = await sandbox.start(argv, cwd=_DIRECTORY, env=environment, user="root", timeout=600)
    pending, complaints = b"", b""
    async for event in process.events():
        match event:
            case Stdout():
                *lines, pending = (pending + event.data).split(b"\n")
                for line in lines:
                    yield msgspec.json.decode(line, type=Result)
            case Stderr():
                complaints += event.data
            case Exit():
                if event.result.exit_code != 0:
                    last = complaints.decode(errors="replace").strip().rpartition("\n")[2]
                    yield Result("battery", "run every attempt", Verdict.UNCLEAR,
                                 f"the battery ended with {event.result.exit_code}: {last}")  # fmt: skip
