"""What each command asks of the SDK, and what it prints."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dsec import Exit, State, Stderr, Stdout
from dsec.protocol.specs import Reason

from .conftest import Invoke
from .fake import FakeClient, info, result


def test_run_passes_everything_and_copies_output_and_exit_code(dsec: Invoke, client: FakeClient) -> None:
    client.events = [Stdout(b"out\n", 0), Stderr(b"err\n", 4), Exit(result(3))]
    line = "run debian@12 --layer a@1 --layer b@2 --cpu 0.5 --memory 64 --disk 100 --pids 20 --env A=1=2 --user nobody"
    ran = dsec(*line.split(), "--workdir", "/tmp", "--label", "team=x", "--timeout", "9", "--", "sh", "-c", "exit 3")
    assert (ran.code, ran.out, ran.err) == (3, "out\n", "err\n")
    args = client.asked[0]
    assert (args.container_image, args.layers, args.cpu_cores_limit, args.memory_limit_mb) == (
        "debian@12",
        ("a@1", "b@2"),
        0.5,
        64,
    )
    assert (args.disk_limit_mb, args.pids_limit, args.env, args.init_user) == (100, 20, {"A": "1=2"}, "nobody")
    assert (args.workdir, args.labels) == ("/tmp", {"team": "x"})
    argv, options = client.started[0]
    assert argv == [b"sh", b"-c", b"exit 3"] and options["timeout"] == 9
    assert client.did == ["stop sb-e1-new", "close"]


def test_options_after_the_separator_belong_to_the_command(dsec: Invoke, client: FakeClient) -> None:
    dsec("run", "debian@12", "--", "ls", "--help", "-la", "--", "x")
    assert client.started[0][0] == [b"ls", b"--help", b"-la", b"--", b"x"]


def test_a_name_that_is_not_utf8_reaches_the_command(dsec: Invoke, client: FakeClient) -> None:
    dsec("run", "debian@12", "--", "cat", os.fsdecode(b"\xff\xfe"))
    assert client.started[0][0] == [b"cat", b"\xff\xfe"]


def test_run_json_is_one_document(dsec: Invoke, client: FakeClient) -> None:
    client.result = result(137, b"caf\xc3\xa9", b"\xff\x00", signal="KILL", timed_out="deadline", stdout_truncated=True)
    ran = dsec("run", "debian@12", "--json", "--", "true")
    document = ran.json
    assert isinstance(document, dict)
    assert ran.code == 137
    assert document["sandbox"] == "sb-e1-new" and document["exit_code"] == 137 and document["timed_out"] == "deadline"
    assert document["stdout"] == "caf\u00e9" and document["stderr_base64"] == "/wA=" and "stderr" not in document


def test_keep_leaves_the_sandbox_and_says_its_id(dsec: Invoke, client: FakeClient) -> None:
    ran = dsec("run", "debian@12", "--keep", "--", "true")
    assert client.did == ["close"]
    assert ran.err == "kept: sb-e1-new\n"


def test_ctrl_c_kills_the_command_and_stops_the_sandbox(dsec: Invoke, client: FakeClient) -> None:
    import asyncio

    client.events = [Stdout(b"part", 0), asyncio.CancelledError()]
    with pytest.raises(asyncio.CancelledError):
        dsec("run", "debian@12", "--keep", "--", "sleep", "60")
    assert client.did == ["signal KILL", "stop sb-e1-new", "close"]


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"timed_out": "deadline", "signal": "KILL"}, "deadline"),
        ({"reason": "oom", "detail": "limit 64 MB"}, "oom (limit 64 MB)"),
        ({"stdout_truncated": True, "stdout_bytes": 20_000_000}, "20,000,000 bytes"),
    ],
)
def test_what_the_exit_code_does_not_say_goes_to_stderr(
    dsec: Invoke, client: FakeClient, other: dict[str, object], words: str
) -> None:
    client.events = [Exit(result(137, **other))]
    assert words in dsec("run", "debian@12", "--", "true").err


def test_exec_attaches_and_leaves_the_sandbox(dsec: Invoke, client: FakeClient) -> None:
    client.events = [Exit(result(127))]
    ran = dsec("exec", "sb-e1-a", "--user", "nobody", "--env", "K=V", "--workdir", "/x", "--", "nonesuch")
    assert ran.code == 127
    options = client.started[0][1]
    assert (options["user"], options["env"], options["cwd"]) == ("nobody", {"K": "V"}, "/x")
    assert client.did == ["close"]


def test_stdin_is_forwarded_when_it_is_a_file(
    dsec: Invoke, client: FakeClient, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The fake's events end at once, so the pump is awaited by its last word."""
    import threading

    (tmp_path / "in").write_bytes(b"given\n")
    closed = threading.Event()

    async def hold(self: object, *, cursor: int = 0) -> object:
        import asyncio

        await asyncio.to_thread(closed.wait, 20)
        yield Exit(result())

    async def close(self: object) -> None:
        closed.set()

    monkeypatch.setattr("tests.cli.fake.FakeProcess.events", hold)
    monkeypatch.setattr("tests.cli.fake.FakeProcess.close_stdin", close)
    saved = os.dup(0)
    source = os.open(tmp_path / "in", os.O_RDONLY)
    os.dup2(source, 0)
    try:
        dsec("run", "debian@12", "--", "cat")
    finally:
        os.dup2(saved, 0)
        os.close(saved)
        os.close(source)
    assert client.started[0][1]["stdin"] is True
    assert client.stdin == b"given\n" and closed.is_set()


def test_ps_lists_the_living_by_default(dsec: Invoke, client: FakeClient) -> None:
    client.sandboxes = [info("sb-e1-a", team="x"), info("sb-e1-b", State.STOPPED, Reason.OOM)]
    ran = dsec("ps", "--label", "team=x")
    assert client.listed == [({"team": "x"}, ["creating", "running", "paused", "stopping"])]
    heading, first, second = ran.out.splitlines()
    assert heading.split() == ["ID", "STATE", "IMAGE", "AGE", "MEMORY", "CPU", "PIDS", "LABELS"]
    assert first.split()[:3] == ["sb-e1-a", "running", "debian"] and "team=x" in first
    assert "stopped (oom)" in second
    assert first.split()[4:8] == ["3.0", "MB", "1.5s", "4"]
    assert second.split()[5:8] == ["-", "-", "-"]


def test_ps_json_is_a_list_of_infos(dsec: Invoke, client: FakeClient) -> None:
    client.sandboxes = [info("sb-e1-a")]
    ran = dsec("ps", "--all", "--json")
    assert isinstance(ran.json, list)
    assert ran.json[0]["id"] == "sb-e1-a" and ran.json[0]["state"] == "running"
    assert client.listed[0][1][-2:] == ["stopped", "failed"]


def test_nothing_to_list_prints_nothing_on_stdout(dsec: Invoke, client: FakeClient) -> None:
    ran = dsec("ps")
    assert (ran.code, ran.out, ran.err) == (0, "", "no sandboxes running\n")
    assert dsec("ps", "--json").json == []


def test_labels_cannot_draw_on_the_terminal(dsec: Invoke, client: FakeClient) -> None:
    client.sandboxes = [info("sb-e1-a", team="\x1b[2Jgone\nnew line")]
    ran = dsec("ps")
    assert "\x1b" not in ran.out and len(ran.out.splitlines()) == 2


def test_logs(dsec: Invoke, client: FakeClient) -> None:
    lines = dsec("logs", "sb-e1-a").out.splitlines()
    assert len(lines) == 2 and lines[0].endswith("  created") and ".500  ended: user" in lines[1]
    assert dsec("logs", "sb-e1-a", "--json").out.splitlines()[0] == '{"t":1700000000.0,"line":"created"}'


def test_stop_by_name_by_label_and_all(dsec: Invoke, client: FakeClient) -> None:
    assert dsec("stop", "sb-e1-a", "sb-e1-b").out == "stopped 2\n"
    assert sorted(client.did[:2]) == ["stop sb-e1-a", "stop sb-e1-b"]
    assert dsec("stop", "--label", "team=x", "--json").json == {"stopped": 3, "failed": []}
    client.sandboxes = [info("sb-e1-c")]
    assert dsec("stop", "--all").out == "stopped 1\n"
    assert "stop sb-e1-c" in client.did


def test_stop_of_an_unknown_one_fails_by_name(dsec: Invoke, client: FakeClient) -> None:
    import dsec as library

    client.refusal = library.NotFound("no sandbox sb-e1-zzz")
    ran = dsec("stop", "sb-e1-zzz", "--json")
    assert ran.code == 1 and ran.json == {"stopped": 0, "failed": ["sb-e1-zzz: no sandbox sb-e1-zzz"]}


@pytest.mark.parametrize(
    ("source", "target", "done"),
    [
        ("notes", "sb-e1-a:/root/x", "upload {}/notes /root/x"),
        ("notes", "sb-e1-a:/root/", "upload {}/notes /root/notes"),
        ("notes", "sb-e1-a:/there", "upload {}/notes /there/notes"),
    ],
)
def test_copy_in(dsec: Invoke, client: FakeClient, tmp_path: Path, source: str, target: str, done: str) -> None:
    (tmp_path / source).write_text("x")
    client.directories = {"/there"}
    assert dsec("cp", str(tmp_path / source), target).code == 0
    assert client.did[0] == done.format(tmp_path)


def test_copy_out_into_a_directory_keeps_the_name(dsec: Invoke, client: FakeClient, tmp_path: Path) -> None:
    dsec("cp", "sb-e1-a:/workspace/dir/", str(tmp_path))
    dsec("cp", "sb-e1-a:/workspace/f", str(tmp_path / "other"))
    assert client.did[0] == f"download /workspace/dir/ {tmp_path}/dir"
    assert client.did[2] == f"download /workspace/f {tmp_path}/other"


def test_status_of_nothing_is_69_and_json_says_so(dsec: Invoke, client: FakeClient, tmp_path: Path) -> None:
    assert dsec("status", "--state", str(tmp_path)).code == 69
    ran = dsec("status", "--state", str(tmp_path), "--json")
    assert ran.code == 69 and isinstance(ran.json, dict) and ran.json["running"] is False


def test_down_of_nothing_is_no_error(dsec: Invoke, tmp_path: Path) -> None:
    assert dsec("down", "--state", str(tmp_path / "none"), "--json").json == {"was_running": False}


def test_version(dsec: Invoke) -> None:
    document = dsec("version", "--json").json
    assert isinstance(document, dict) and set(document) >= {"dsec", "python", "kernel"}
