"""The command line against a real platform: what a user types, what comes back, what is left."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import time
from pathlib import Path

import pytest

from dsec.cluster.embedded import Endpoint

from .command_line import CommandLine, command_line
from .conftest import BASE

pytestmark = pytest.mark.e2e


@pytest.fixture
def cli(platform: Endpoint) -> CommandLine:
    return command_line(platform)


def living(cli: CommandLine, label: str) -> list[str]:
    return [one["id"] for one in json.loads(cli("ps", "--json", "--label", label).out)]


def test_run_copies_output_stdin_and_exit_code(cli: CommandLine) -> None:
    ran = cli("run", BASE, "--", "sh", "-c", "cat; echo error >&2; exit 3", stdin=b"given\x00\xff\n")
    assert (ran.code, ran.out, ran.err) == (3, b"given\x00\xff\n", "error\n")


@pytest.mark.parametrize(
    ("argv", "code"),
    [(["no-such-program"], 127), (["/etc/passwd"], 126), (["sh", "-c", "kill -TERM $$"], 143), (["true"], 0)],
)
def test_exit_codes_are_exact(cli: CommandLine, argv: list[str], code: int) -> None:
    assert cli("run", BASE, "--", *argv).code == code


def test_run_with_everything(cli: CommandLine) -> None:
    options = ["--user", "nobody", "--workdir", "/usr", "--env", "WORD=one two", "--memory", "64"]
    ran = cli("run", BASE, *options, "--", "sh", "-c", "echo $WORD; id -u; pwd")
    assert (ran.code, ran.out.splitlines()) == (0, [b"one two", b"65534", b"/usr"])


def test_run_json(cli: CommandLine) -> None:
    ran = cli("run", BASE, "--json", "--timeout", "1", "--", "sh", "-c", "echo before; sleep 100")
    assert ran.code == 137
    assert (ran.json["stdout"], ran.json["timed_out"], ran.json["signal"]) == ("before\n", "deadline", "KILL")


def test_a_megabyte_each_way_is_exact(cli: CommandLine) -> None:
    data = os.urandom(1 << 20)
    assert cli("run", BASE, "--", "cat", stdin=data).out == data


def test_a_command_that_does_not_read_its_input_ends(cli: CommandLine) -> None:
    ran = cli("run", BASE, "--", "echo", "done", stdin=b"x" * (4 << 20))
    assert (ran.code, ran.out) == (0, b"done\n")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_leaves_no_sandbox(cli: CommandLine, number: signal.Signals) -> None:
    label = f"test=interrupted-{number}"
    process = cli.start("run", BASE, "--label", label, "--", "sh", "-c", "echo started; sleep 1000")
    assert process.stdout is not None
    assert select.select([process.stdout], [], [], 60)[0], "no output within a minute"
    assert process.stdout.read(8) == b"started\n"
    assert len(living(cli, label)) == 1
    process.send_signal(number)
    assert process.wait(timeout=60) == 128 + number
    assert process.stderr is not None and b"Traceback" not in process.stderr.read()
    assert living(cli, label) == []


def test_keep_exec_cp_logs_ps_stop(cli: CommandLine, tmp_path: Path) -> None:
    kept = cli("run", BASE, "--keep", "--label", "test=kept", "--", "true").err
    sandbox = kept.removeprefix("kept: ").strip()
    try:
        assert living(cli, "test=kept") == [sandbox]
        (tmp_path / "in").mkdir()
        (tmp_path / "in" / "a b").write_bytes(b"\x00\x01")
        assert cli("cp", str(tmp_path / "in"), f"{sandbox}:/root/").code == 0
        assert cli("exec", sandbox, "--", "cat", "/root/in/a b").out == b"\x00\x01"
        assert cli("cp", f"{sandbox}:/root/in", str(tmp_path / "out")).code == 0
        assert (tmp_path / "out" / "a b").read_bytes() == b"\x00\x01"
        ran = cli("cp", f"{sandbox}:/no/such", str(tmp_path / "x"))
        assert ran.code == 1 and ran.err.startswith("error: ")
        assert sandbox in cli("ps").out.decode()
        assert cli("logs", sandbox).out.strip()
    finally:
        assert cli("stop", sandbox).out == b"stopped 1\n"
    assert living(cli, "test=kept") == []
    ended = [one for one in json.loads(cli("ps", "--all", "--json").out) if one["id"] == sandbox]
    assert ended[0]["state"] == "stopped" and ended[0]["reason"] == "user"
    assert cli("stop", sandbox).code == 0  # once more is no error
    ran = cli("exec", sandbox, "--", "true")
    assert ran.code == 1 and ran.err.startswith("error: ")


def test_errors_are_lines_with_hints(cli: CommandLine) -> None:
    ran = cli("run", "debain@12", "--", "true")
    assert ran.code == 1 and ran.err.count("\n") == 2
    assert BASE in ran.err
    assert cli("run", BASE, "--user", "nobody-knows", "--", "true").code == 1
    assert cli("exec", "sb-local-000000000000", "--", "true").code == 1
    ran = cli("ps", DSEC_API_KEY="wrong")
    assert ran.code == 1 and "key" in ran.err


def test_status_shows_what_is_there(cli: CommandLine, platform: Endpoint) -> None:
    ran = cli("status", "--json")
    assert ran.code == 0 and ran.json["running"] is True
    endpoint = ran.json["endpoint"]
    assert isinstance(endpoint, dict) and endpoint["url"] == platform.url


def test_up_twice_use_and_down(tmp_path: Path) -> None:
    """A platform of its own through the commands, as after an installation; `down` with a sandbox alive."""
    cli = CommandLine(tmp_path / "state")
    assert cli("status").code == 69
    assert cli("run", BASE, "--", "true").code == 69
    up = cli("up", "--port", "0", "--max-sandboxes", "2", "--json")
    try:
        assert up.code == 0, up.err
        assert (tmp_path / "state" / "api.key").stat().st_mode & 0o777 == 0o600
        assert cli("up", "--port", "0", "--json").json == up.json
        assert cli("run", BASE, "--keep", "--", "true").code == 0
        assert cli("run", BASE, "--keep", "--", "true").code == 0
        full = cli("run", BASE, "--", "true")
        assert full.code == 1 and "2" in full.err
        assert cli("status").code == 0
    finally:
        assert cli("down").code == 0
    assert cli("status").code == 69
    assert cli("down").out == b"was not running\n"


def test_foreground_ends_with_ctrl_c(tmp_path: Path) -> None:
    cli = CommandLine(tmp_path / "state")
    process = cli.start("up", "--port", "0", "--foreground")
    try:
        assert process.stdout is not None
        assert select.select([process.stdout], [], [], 60)[0], "not ready within a minute"
        assert b"DSec answers at" in process.stdout.readline()
        assert cli("run", BASE, "--", "true").code == 0
    finally:
        process.send_signal(signal.SIGINT)
        code = process.wait(timeout=100)
    assert code == 130
    assert cli("status").code == 69


def test_two_streams_of_output_come_live(cli: CommandLine) -> None:
    """The first line is there while the command still runs."""
    process = cli.start("run", BASE, "--", "sh", "-c", "echo first; sleep 1000")
    try:
        assert process.stdout is not None
        assert select.select([process.stdout], [], [], 60)[0]
        assert process.stdout.read(6) == b"first\n"
        assert process.poll() is None
    finally:
        started = time.monotonic()
        process.send_signal(signal.SIGINT)
        try:
            process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            process.kill()
            raise AssertionError(f"still there {time.monotonic() - started:.0f} s after Ctrl-C") from None
