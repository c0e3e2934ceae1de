"""Whatever goes wrong: an error line, perhaps a hint line, and an exit code that says which kind it was."""

from __future__ import annotations

import subprocess
import sys

import pytest

import dsec as library
from dsec.protocol.errors import ErrorKind, Fault

from .conftest import Invoke
from .fake import FakeClient


@pytest.mark.parametrize(
    "line",
    [
        ["bogus"],
        ["run"],
        ["run", "debian@12"],
        ["run", "debian@12", "--cpu", "many", "--", "true"],
        ["run", "debian@12", "--env", "NOVALUE", "--", "true"],
        ["run", "debian@12", "--label", "=x", "--", "true"],
        ["exec", "sb-e1-x"],
        ["ps", "--state", "asleep"],
        ["stop"],
        ["stop", "--all", "sb-e1-x"],
        ["cp", "a", "b"],
        ["cp", "sb-e1-x:/a", "sb-e1-y:/b"],
        ["cp", "sb-e1-x:", "here"],
        ["cp", "/no/such/file", "sb-e1-x:/b"],
        ["layer", "build", "tools@1"],
        ["layer", "build", "tools", "--from-dir", "/"],
        ["layer", "build", "tools@1", "--from-dir", "/a", "--from-tar", "/b"],
        ["layer", "build", "tools@1", "--from-dir", "/", "--kind", "engine"],
        ["bench", "nothing"],
        ["up", "--port", "70000"],
    ],
)
def test_usage_errors_exit_with_2_and_say_what_to_do(dsec: Invoke, client: FakeClient, line: list[str]) -> None:
    ran = dsec(*line)
    assert (ran.code, ran.out) == (2, "")
    lines = ran.err.splitlines()
    assert lines[0].startswith("error: ") and len(lines) <= 2
    assert all(extra.startswith("hint: ") for extra in lines[1:])
    assert not client.asked and not client.did


def test_no_platform_exits_with_69(dsec: Invoke, client: FakeClient) -> None:
    client.refusal = library.ConnectionLost("nothing answers at http://127.0.0.1:7707")
    ran = dsec("ps")
    assert ran.code == 69
    assert ran.err.splitlines()[0].startswith("error: the platform is not running")
    assert "dsec up" in ran.err


def test_a_typed_error_shows_message_and_hint(dsec: Invoke, client: FakeClient) -> None:
    client.refusal = library.NotFound("no layer debain@12", hint="did you mean debian@12?")
    ran = dsec("run", "debain@12", "--", "true")
    assert ran.code == 1
    assert ran.err == "error: no layer debain@12\nhint: did you mean debian@12?\n"


def test_a_full_platform_names_the_holders(dsec: Invoke, client: FakeClient) -> None:
    details: dict[str, str | int | float | dict[str, int]] = {
        "limit": "max_sandboxes",
        "value": 2,
        "holders": {"job-7": 2},
    }
    client.refusal = library.CapacityError("limit max_sandboxes=2 is reached", details=details)
    ran = dsec("run", "debian@12", "--", "true")
    assert ran.code == 1
    assert "max_sandboxes=2" in ran.err and "job-7 2" in ran.err


def test_a_fault_of_the_layer_store_is_shown_the_same_way(
    dsec: Invoke, monkeypatch: pytest.MonkeyPatch, tmp_path: object
) -> None:
    from dsec.cli import layer

    def full() -> None:
        raise Fault(ErrorKind.NO_SPACE, "the disk is full", hint="free some")

    monkeypatch.setattr(layer, "_store", full)
    ran = dsec("layer", "ls")
    assert (ran.code, ran.err) == (1, "error: the disk is full\nhint: free some\n")


def test_a_defect_of_ours_is_one_line_too(dsec: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    from dsec.cli import layer

    def broken() -> None:
        raise KeyError("oops")

    monkeypatch.setattr(layer, "_store", broken)
    ran = dsec("layer", "ls")
    assert ran.code == 1
    assert ran.err.startswith("error: KeyError: 'oops'\nhint: ")


def test_ctrl_c_exits_with_130(dsec: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    from dsec.cli import layer

    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(layer, "_store", interrupted)
    assert dsec("layer", "ls").code == 130


def test_a_reader_that_leaves_is_no_traceback() -> None:
    """`dsec ... | head -0`: the pipe is closed before anything is written."""
    script = "import sys; from dsec.cli.main import invoke; sys.exit(int(invoke(['version', '--json'])))"
    writer = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert writer.stdout is not None and writer.stderr is not None
    writer.stdout.close()
    said = writer.stderr.read()
    assert writer.wait(timeout=60) == 141
    assert said == b""


def test_help_loads_nothing_heavy() -> None:
    """Help and completion must not wait for an HTTP client, a renderer or the layer store."""
    script = (
        "import sys; from dsec.cli.main import invoke; invoke(['--help']); invoke(['run', '--help'])\n"
        "print(sorted({'aiohttp', 'rich.console', 'starlette', 'uvloop', 'dsec.sdk.client', 'dsec.layers.store'}"
        " & set(sys.modules)), file=sys.stderr)"
    )
    answer = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert answer.stderr.strip() == "[]"
    assert "dsec run debian@12" in answer.stdout
