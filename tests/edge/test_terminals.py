"""The helper that mounts a sandbox's terminals: once, whatever it says, and never for longer than it may take."""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from dsec.backends.runtime import runtime_path
from dsec.edge import terminals
from dsec.edge.sandbox import Sandbox
from dsec.edge.terminals import Terminals
from dsec.protocol.errors import ErrorKind, Fault
from dsec.protocol.specs import DSecContainerRunArgs


@pytest.fixture
def sandbox() -> Iterator[Sandbox]:
    """As far as its process goes."""
    made = Sandbox("sb-a", DSecContainerRunArgs(), None, 1, "user")
    made.pidfd = os.pidfd_open(os.getpid())
    yield made
    os.close(made.pidfd)


def helper(place: Path, script: str) -> Path:
    """A program in the runtime's stead; it leaves a line in `calls` each time."""
    program = place / "runtime"
    program.write_text(f'#!/bin/sh\necho "$@" >> {place}/calls\n{script}\n')
    program.chmod(0o755)
    return program


def calls(place: Path) -> list[str]:
    return (place / "calls").read_text().splitlines()


async def test_it_is_asked_once(sandbox: Sandbox, tmp_path: Path) -> None:
    there = Terminals(helper(tmp_path, "exit 0"))
    await asyncio.gather(*(there.ready(sandbox) for _ in range(10)))
    assert [call.rsplit(" ", 1)[0] for call in calls(tmp_path)] == ["helper devpts --pidfd"]


async def test_a_failure_is_the_commands_and_the_next_tries_anew(sandbox: Sandbox, tmp_path: Path) -> None:
    there = Terminals(helper(tmp_path, "echo no room >&2; exit 1"))
    for count in (1, 2):
        with pytest.raises(Fault, match="no room") as caught:
            await there.ready(sandbox)
        assert (caught.value.body.kind, caught.value.body.retryable) == (ErrorKind.INTERNAL, True)
        assert len(calls(tmp_path)) == count
    sandbox.dying.set()
    with pytest.raises(Fault) as caught:
        await there.ready(sandbox)
    assert caught.value.body.kind is ErrorKind.UNAVAILABLE


async def test_one_that_hangs_is_ended(sandbox: Sandbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(terminals, "_PATIENCE_S", 1.0)
    there = Terminals(helper(tmp_path, f"echo $$ > {tmp_path}/pid; exec sleep 1000"))
    with pytest.raises(Fault, match="did not end"):
        await there.ready(sandbox)
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_the_real_one_refuses_what_is_no_sandbox() -> None:
    ended = subprocess.Popen(["true"])
    pidfd = os.pidfd_open(ended.pid)
    ended.wait()
    ours = os.pidfd_open(os.getpid())  # of the host's own namespaces
    for arguments in (["--pidfd", str(pidfd)], ["--pidfd", str(ours)], ["--pidfd", "0"], ["--pidfd", "x"], []):
        command = [runtime_path(), "helper", "devpts", *arguments]
        run = subprocess.run(command, pass_fds=(pidfd, ours), capture_output=True, check=False)
        assert run.returncode == 1 and run.stderr
    os.close(pidfd)
    os.close(ours)
