"""Commands through SDK, HTTP, apiserver and link."""

from __future__ import annotations

import asyncio
import os

import pytest

import dsec
from dsec import (
    CommandFailed,
    CommandTimedOut,
    DSecClient,
    Exit,
    InvalidRequest,
    NotFound,
    Sandbox,
    SandboxUnavailable,
    Stderr,
    Stdout,
)
from dsec.sdk import commands
from tests.apiserver.fake_edge import FakeEdge


async def test_results_are_exact(sandbox: Sandbox) -> None:
    result = await sandbox.run_shell("echo out; echo err >&2; exit 3")
    assert (result.exit_code, result.text, result.stderr_text, result.ok) == (3, "out\n", "err\n", False)
    assert (result.stdout_bytes, result.stderr_bytes, result.incarnation) == (4, 4, 1)
    assert result.step is None and not result.replayed and result.reason is None and result.timed_out is None
    with pytest.raises(CommandFailed, match="exited with 3: err") as caught:
        result.check()
    assert caught.value.result is result
    assert (await sandbox.exec(["printf", b"\\377"])).text == "\ufffd"
    assert (await sandbox.exec(["/no/such/program"])).exit_code == 127
    killed = await sandbox.run_shell("kill -TERM $$")
    assert (killed.exit_code, killed.signal) == (143, "TERM")


async def test_env_stdin_cwd_and_merging(sandbox: Sandbox) -> None:
    assert (await sandbox.run_shell("echo $A", env={"A": "b c"})).text == "b c\n"
    assert (await sandbox.exec(["cat"], stdin="héllo")).text == "héllo"
    assert (await sandbox.exec(["cat"])).stdout == b"", "stdin is /dev/null when none is given"
    assert (await sandbox.exec(["pwd"], cwd="/")).text == "/\n"
    merged = await sandbox.run_shell("echo a; echo b >&2", merge_stderr=True)
    assert (merged.stdout, merged.stderr) == (b"a\nb\n", b"")
    large = os.urandom(3_000_000)
    result = await sandbox.exec(["cat"], stdin=large, timeout=20)
    assert len(result.stdout) == len(large) and hash(result.stdout) == hash(large), "more than a link message takes"


async def test_a_deadline_is_a_result_unless_checked(sandbox: Sandbox) -> None:
    result = await sandbox.run_shell("echo before; exec sleep 60", timeout=0.3)
    assert (result.timed_out, result.exit_code, result.signal, result.text) == ("deadline", 137, "KILL", "before\n")
    with pytest.raises(TimeoutError) as caught:
        await sandbox.run_shell("exec sleep 60", timeout=0.1, check=True)
    assert isinstance(caught.value, CommandTimedOut) and caught.value.result.timed_out == "deadline"


async def test_the_same_exec_id_runs_once(sandbox: Sandbox, edge: FakeEdge) -> None:
    before = edge.runs
    first = await sandbox.run_shell("echo $$", exec_id="once:1")
    assert await sandbox.run_shell("echo $$", exec_id="once:1") == first
    assert edge.runs == before + 1
    with pytest.raises(InvalidRequest, match="exec_id"):
        await sandbox.run_shell("true", exec_id="no spaces")


async def test_long_commands_are_asked_for_again(
    sandbox: Sandbox, edge: FakeEdge, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commands, "WAIT_S", 0)
    before = edge.calls.count("exec.attach")
    result = await sandbox.run_shell("echo a; sleep 0.5; echo b")
    assert result.text == "a\nb\n" and edge.calls.count("exec.attach") > before


async def test_output_beyond_one_answer(sandbox: Sandbox) -> None:
    result = await sandbox.run_shell("head -c 9000000 /dev/zero; head -c 1000000 /dev/zero >&2")
    assert (len(result.stdout), len(result.stderr)) == (9_000_000, 1_000_000)


async def test_bad_commands(sandbox: Sandbox) -> None:
    with pytest.raises(InvalidRequest, match="argv"):
        await sandbox.exec([])
    with pytest.raises(InvalidRequest, match="argv"):
        await sandbox.exec("true")
    with pytest.raises(FileNotFoundError, match="nowhere"):
        await sandbox.run_shell("true", cwd="/nowhere")
    with pytest.raises(InvalidRequest, match="bytes"):
        await sandbox.run_shell("true", env={"A": "x" * 5_000_000})


async def test_what_is_too_much_for_a_message_is_sent_ahead(sandbox: Sandbox) -> None:
    line = f"x='{'y' * 100_000}'; " * 20 + "echo ${#x} $V9999"
    variables = {f"V{number}": "z" * 50 for number in range(10_000)}
    with pytest.raises(dsec.TooLarge, match="longer than the kernel takes"):
        await sandbox.run_shell(line, env=variables)  # the fake has no descriptor for it: all the way there is enough
    many = await sandbox.exec(["sh", "-c", "echo $#", "sh", *["x"] * 70_000])
    assert many.text == "70000\n"


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -1.0])
async def test_no_span_of_time_is_taken_for_never(sandbox: Sandbox, edge: FakeEdge, wrong: float) -> None:
    before = edge.runs
    with pytest.raises(InvalidRequest, match="timeout="):
        await sandbox.run_shell("true", timeout=wrong)
    with pytest.raises(InvalidRequest, match="idle_timeout="):
        await sandbox.start("true", idle_timeout=wrong)
    with pytest.raises(InvalidRequest, match="total="):
        await sandbox.set_ttl(total=wrong)
    with pytest.raises(InvalidRequest, match="max_output_bytes"):
        await sandbox.run_shell("true", max_output_bytes=-1)
    assert edge.runs == before


async def test_start_events_write_signal_wait(sandbox: Sandbox) -> None:
    process = await sandbox.start("cat; echo end >&2", stdin=True)
    assert process.pid > 0
    events = process.events()
    await process.write("one")
    first = await anext(events)
    assert first == Stdout(b"one", 0)
    await process.write(b"two")
    assert await anext(events) == Stdout(b"two", 3)
    await process.close_stdin()
    rest = [event async for event in events]
    assert rest[0] == Stderr(b"end\n", 6)
    assert isinstance(rest[-1], Exit) and rest[-1].result.exit_code == 0
    again = [event async for event in process.events(cursor=4)]
    assert [event.data for event in again if isinstance(event, Stdout)] == [b"wo"]
    waited = await process.wait(check=True)
    assert (waited.stdout, waited.stderr) == (b"onetwo", b"end\n")


async def test_leaving_the_events_just_before_the_end_is_no_failure_of_the_server(sandbox: Sandbox) -> None:
    async def look(delay: str) -> None:
        process = await sandbox.start(f"echo a; sleep {delay}")
        async for event in process.events():
            assert event == Stdout(b"a\n", 0)
            break
        assert (await process.wait()).ok

    await asyncio.gather(
        *(look(f"0.0{number}") for number in range(10) for _ in range(3))
    )  # its log is read at the end


async def test_processes_and_signals(sandbox: Sandbox) -> None:
    process = await sandbox.start(["sleep", "60"], exec_id="sleeper")
    listed = {info.exec_id: info for info in await sandbox.processes()}
    assert listed["sleeper"].running and listed["sleeper"].detached and listed["sleeper"].argv == (b"sleep", b"60")
    found = await sandbox.process("sleeper")
    await found.signal("TERM")
    assert (await process.wait()).signal == "TERM"
    with pytest.raises(NotFound, match="nobody"):
        await sandbox.process("nobody")
    with pytest.raises(InvalidRequest, match="NONSENSE"):
        await process.signal("NONSENSE")


async def test_following_something_unknown_is_typed(client: DSecClient, sandbox: Sandbox) -> None:
    process = await sandbox.start("true")
    process._path = process._path.replace(process.exec_id, "unknown")
    with pytest.raises(NotFound):
        _ = [event async for event in process.events()]


async def test_a_replaced_sandbox_is_never_a_result(client: DSecClient, edge: FakeEdge) -> None:
    from dsec import DSecContainerRunArgs

    async with client.run_container(DSecContainerRunArgs("debian@12")) as sandbox:
        edge.boxes[sandbox.id].incarnation = 2
        for attempt in (sandbox.run_shell("true"), sandbox.info(), sandbox.files.stat("/"), sandbox.processes()):
            with pytest.raises(SandboxUnavailable) as caught:
                await attempt
            assert caught.value.reward_valid is False and caught.value.reason == "replaced"
            assert caught.value.sandbox_id == sandbox.id and caught.value.request_id != ""
        edge.boxes[sandbox.id].incarnation = 1


async def test_many_at_once(sandbox: Sandbox) -> None:
    results = await asyncio.gather(*(sandbox.exec(["echo", str(i)]) for i in range(100)))
    assert [result.text for result in results] == [f"{i}\n" for i in range(100)]
