"""Sessions through the SDK: what they keep, what they survive, what they say when they end."""

from __future__ import annotations

import asyncio
import contextlib
import os
from pathlib import Path

import pytest

import dsec
from dsec import sync
from dsec.cluster import embedded

from .test_crashes import ARGS, DEADLINE, client_of, kill, pid_of, states  # noqa: F401 (a fixture)


async def _wait_for(session: dsec.Session | dsec.Sandbox, line: str) -> None:
    await session.run_shell(f"until {line}; do sleep 0.02; done", timeout=20, check=True)


async def test_state_stays_between_commands(sandbox: dsec.Sandbox) -> None:
    async with await sandbox.open_session(cwd="/usr", env={"GREETING": "hello"}) as session:
        assert (await session.run_shell('pwd; echo "$GREETING"; id -un', check=True)).text == "/usr\nhello\nroot\n"
        await session.run_shell("cd /tmp; n=1; export GREETING=bye; f() { echo f$n; }; alias g='echo G'", check=True)
        await session.run_shell("shopt -s expand_aliases; sleep 100 & job=$!", check=True)
        assert (await session.run_shell("exit 3")).exit_code == 3
        kept = await session.run_shell('pwd; f; g; echo "$GREETING $?"; kill -0 $job && echo alive')
        assert kept.text == "/tmp\nf1\nG\nbye 0\nalive\n"
        failed = await session.run_shell("set -euo pipefail\nfalse | true\necho not reached")
        assert (failed.exit_code, failed.stdout) == (1, b"")
        assert (await session.run_shell("echo $-; set +euo pipefail")).text.startswith("e")
        assert (await session.run_shell("f")).text == "f1\n"
    with pytest.raises(dsec.NotFound):
        await session.run_shell("true")
    assert await sandbox.sessions() == []


async def test_several_sessions_and_joining(sandbox: dsec.Sandbox) -> None:
    one, two = await asyncio.gather(sandbox.open_session("one"), sandbox.open_session("two"))
    await asyncio.gather(one.run_shell("v=1; cd /tmp"), two.run_shell("v=2"))
    again = await sandbox.open_session("one", cwd="/usr")
    assert (await again.run_shell("echo $v; pwd")).text == "1\n/tmp\n"
    assert (await two.run_shell("echo $v")).text == "2\n"
    running = asyncio.create_task(two.run_shell("sleep 100"))
    while not any(info.exec_id for info in await sandbox.sessions()):
        await asyncio.sleep(0)
    with pytest.raises(dsec.Conflict, match="two"):
        await two.run_shell("true")
    assert await two.interrupt()
    assert (await running).exit_code == 130
    assert {info.name: info.ended for info in await sandbox.sessions()} == {"one": None, "two": None}
    await two.close()
    await two.close()


async def test_another_user(sandbox: dsec.Sandbox) -> None:
    async with await sandbox.open_session(user="nobody", cwd="/tmp") as session:
        assert (await session.run_shell("id -un; cat", stdin="given")).text == "nobody\ngiven"
        await session.run_shell("x=5; exit 2")
        assert (await session.run_shell("echo $x; id -un")).text == "5\nnobody\n"


async def test_deadline_and_output_limits(sandbox: dsec.Sandbox) -> None:
    async with await sandbox.open_session() as session:
        await session.run_shell("x=5; sleep 100 & job=$!")
        late = await session.run_shell("echo part; setsid sleep 77 & sleep 77; echo no", timeout=0.5)
        assert (late.exit_code, late.signal, late.timed_out, late.stdout) == (137, "KILL", "deadline", b"part\n")
        silent = await session.run_shell("echo part; sleep 77", idle_timeout=0.5)
        assert (silent.timed_out, silent.stdout) == ("idle", b"part\n")
        assert (await session.run_shell("echo $x; kill -0 $job && echo alive")).text == "5\nalive\n"
        assert (await sandbox.run_shell("pgrep -f 'sleep 77'")).exit_code == 1
        much = await session.run_shell("head -c 3000000 /dev/zero", max_output_bytes=1000)
        assert (len(much.stdout), much.stdout_bytes, much.stdout_truncated) == (1000, 3_000_000, True)
        with pytest.raises(dsec.CommandFailed):
            await session.run_shell("exit 4", check=True)


async def test_once_by_id_and_attached_again(sandbox: dsec.Sandbox) -> None:
    async with await sandbox.open_session() as session:
        first = await session.run_shell("n=$((n+1)); echo $n", exec_id="once")
        again = await session.run_shell("n=$((n+1)); echo $n", exec_id="once")
        assert (first.stdout, again.stdout) == (b"1\n", b"1\n")
        running = asyncio.create_task(
            session.run_shell("echo one; until [ -e /go ]; do sleep 0.01; done; echo two", exec_id="slow")
        )
        await _wait_for(sandbox, "pgrep -f sleep")
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running
        process = await sandbox.process("slow")
        await sandbox.files.write("/go", b"")
        events = [event async for event in process.events(cursor=2)]
        assert b"".join(event.data for event in events if isinstance(event, dsec.Stdout)) == b"e\ntwo\n"
        assert isinstance(events[-1], dsec.Exit) and events[-1].result.exit_code == 0


async def test_large_lines_input_and_binary_output(sandbox: dsec.Sandbox) -> None:
    async with await sandbox.open_session() as session:
        given = os.urandom(1_500_000)
        assert (await session.run_shell("cat", stdin=given)).stdout == given
        assert (await session.run_shell("cat")).stdout == b""
        text = "x" * 1_000_000
        assert (await session.run_shell(f"echo {text} | wc -c")).text == "1000001\n"
        assert (await session.run_shell(f"v={text}; echo ${{#v}}")).text == "1000000\n"
        odd = "printf '\\0\\377'; cat <<'A'\n$x `y` 'z' \\\nA\ncat <<B\n$(cat <<C\ninner\nC\n)\nB"
        assert (await session.run_shell(odd)).stdout == b"\0\xff$x `y` 'z' \\\ninner\n"


async def test_hostile_lines(sandbox: dsec.Sandbox) -> None:
    """Whatever a line does, the next one works, or is told that the session has ended."""
    async with await sandbox.open_session() as session:
        await session.run_shell("mkdir /tmp/gone; cd /tmp/gone; rmdir /tmp/gone")
        assert (await session.run_shell("echo here; cd /tmp")).text == "here\n"
        assert (await session.run_shell("trap '' INT TERM; sleep 77", timeout=0.5)).timed_out == "deadline"
    for line, code, how in (
        ("kill -9 $$", 137, "signal KILL"),
        ("exec sh -c 'exit 9'", 9, "exit code 9"),
        ("trap '' INT; while :; do :; done", 137, "did not come back"),
    ):
        async with await sandbox.open_session("doomed") as session:
            assert (await session.run_shell(line, timeout=0.5 if "while" in line else 20)).exit_code == code
            with pytest.raises(dsec.SessionEnded, match=how):
                await session.run_shell("true")
            with pytest.raises(dsec.SessionEnded, match=how):
                await sandbox.open_session("doomed")
            assert [info.ended is not None for info in await sandbox.sessions()] == [True]


async def test_bounded_and_gone_with_the_sandbox(client: dsec.DSecClient, sandbox: dsec.Sandbox) -> None:
    for _ in range(32):
        await sandbox.open_session()
    with pytest.raises(dsec.CapacityError, match="32"):
        await sandbox.open_session()
    session = await sandbox.open_session((await sandbox.sessions())[0].name)
    await sandbox.stop()
    with pytest.raises(dsec.SandboxUnavailable):
        await session.run_shell("true")


async def test_a_signal_to_the_shell_itself_ends_the_command(sandbox: dsec.Sandbox) -> None:
    async with await sandbox.open_session(cwd="/usr") as session:
        await session.run_shell("n=1; f() { echo f$n; }", check=True)
        for signal, code in (("TERM", 143), ("HUP", 129), ("USR1", 138), ("15", 143), ("ALRM", 142)):
            result = await session.run_shell(f"echo a; false; kill -{signal} $$; echo b")
            assert (result.exit_code, result.text, result.stderr) == (code, "a\n", b"")
            assert (await session.run_shell("f; pwd; trap; trap -p")).text == "f1\n/usr\n"
        for line in ("(kill $BASHPID)", "bash -c 'kill $$'", "sleep 1000 & kill $!; wait $!"):
            assert (await session.run_shell(line)).exit_code == 143
        await session.run_shell("trap 'echo caught' TERM USR2; trap '' sighup")
        shown = await session.run_shell("kill $$; kill -USR2 $$; kill -1 $$; exit 3")
        assert (shown.exit_code, shown.text) == (3, "caught\ncaught\n")
        kept = (await session.run_shell("trap")).text.splitlines()
        assert sorted(kept) == ["trap -- '' SIGHUP", "trap -- 'echo caught' SIGTERM", "trap -- 'echo caught' SIGUSR2"]
        assert (await session.run_shell("kill $$")).text == "caught\n"
        await session.run_shell("trap - SIGTERM 1; trap USR2")
        assert (await session.run_shell("trap")).text == ""
        assert (await session.run_shell("set -u; IFS=ER; trap : QUIT; kill $$")).exit_code == 143
        assert (await session.run_shell("kill -HUP $$")).exit_code == 129
        assert (await session.run_shell("trap; trap nonsense NONSENSE")).exit_code == 1


@pytest.mark.parametrize("victims", [("edge",), ("apiserver",), ("apiserver", "edge")])
async def test_it_survives_the_platform_in_the_middle_of_a_command(
    states: list[Path],  # noqa: F811
    victims: tuple[str, ...],
) -> None:
    async with client_of(embedded.up(states[0], port=0)) as client, client.run_container(ARGS) as sandbox:
        session = await sandbox.open_session("kept")
        await session.run_shell("cd /usr; n=1; f() { echo f$n; }; sleep 1000 & job=$!", check=True)
        line = "echo before; until [ -e /tmp/go ]; do sleep 0.02; done; n=2; echo after; (exit 7)"
        running = asyncio.create_task(session.run_shell(line))
        async with asyncio.timeout(DEADLINE):
            while not [info for info in await sandbox.sessions() if info.exec_id]:
                await asyncio.sleep(0)
        for victim in victims:
            kill(pid_of(states[0], victim))
        await sandbox.files.write("/tmp/go", b"")
        result = await running
        assert (result.exit_code, result.text) == (7, "before\nafter\n")
        assert (await session.run_shell("pwd; f; kill -0 $job && echo alive")).text == "/usr\nf2\nalive\n"
        again = await sandbox.open_session("kept")
        assert (await again.run_shell("exit 3")).exit_code == 3
        assert (await again.run_shell("f; pwd")).text == "f2\n/usr\n"
        await again.close()


def test_without_await(platform: embedded.Endpoint) -> None:
    with open(platform.key_file) as file, sync.DSecClient(platform.url, file.read().strip()) as client:
        with client.run_container(dsec.DSecContainerRunArgs("debian@12")) as sandbox, sandbox.open_session() as session:
            session.run_shell("x=7")
            assert session.run_shell("echo $x").text == "7\n"
            assert session.interrupt()
