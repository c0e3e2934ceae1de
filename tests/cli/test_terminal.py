"""`dsec exec -it` in a real terminal of its own, with a real apiserver and a real terminal at the other end."""

from __future__ import annotations

import asyncio
import hashlib
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

import dsec as sdk
from dsec import DSecClient, DSecContainerRunArgs, PtySize, Sandbox, Stdout
from dsec.cli import connect
from tests.apiserver.fake_edge import FakeEdge
from tests.apiserver.serving import KEY, apiserver

from .conftest import Invoke
from .fake import FakeClient
from .outer import Outer, outer

SHELL = ("bash", "--norc", "-i")


class Platform:
    def __init__(self, edge: FakeEdge, url: str, client: DSecClient, sandbox: Sandbox) -> None:
        self.edge, self.client, self.sandbox = edge, client, sandbox
        kept = {name: value for name, value in os.environ.items() if not name.startswith("DSEC_")}
        self.environment = {**kept, "DSEC_URL": url, "DSEC_API_KEY": KEY, "TERM": "xterm-256color", "PS1": "ready> "}

    def window(self, *arguments: str, **options: int):  # type: ignore[no-untyped-def]
        return outer((sys.executable, "-m", "dsec.cli.main", *arguments), self.environment, **options)


@pytest.fixture
async def platform(tmp_path: Path) -> AsyncIterator[Platform]:
    async with (
        FakeEdge(tmp_path) as edge,
        apiserver(edge.directory, edge) as url,
        DSecClient(url, KEY, request_timeout=20) as client,
        client.run_container(DSecContainerRunArgs("debian@12")) as sandbox,
    ):
        yield Platform(edge, url, client, sandbox)


async def _shell(window: Outer) -> None:
    await window.until(b"ready> ")
    await window.is_raw()


async def test_a_shell_is_usable_and_its_exit_code_is_ours(platform: Platform) -> None:
    async with platform.window("exec", "-it", platform.sandbox.id, "-e", "PS1=ready> ", "--", *SHELL) as window:
        before = window.modes()
        await _shell(window)
        assert window.modes() != before
        window.type(b"stty size; echo $TERM\r")
        await window.until(b"30 100\r\nxterm-256color\r\n")
        window.resize(132, 50)
        window.type(b"until [ \"$(stty size)\" = '50 132' ]; do :; done; echo re''sized\r")
        await window.until(b"resized\r\n")
        window.type(b"cat\r")
        await window.until(b"cat\r\n")
        window.type(b"\x03")
        await window.until(b"ready> ")
        window.type(b"echo code=$?\r")
        await window.until(b"code=130\r\n")
        window.type(b"exit 7\r")
        assert await window.code() == 7
        assert window.modes() == before


async def test_single_keys_and_type_ahead_keep_their_order(platform: Platform) -> None:
    program = (
        "import sys, tty, os\n"
        "tty.setraw(0); print('on', flush=True)\n"
        "got = b''\n"
        "while not got.endswith(b'q'): got += os.read(0, 1)\n"
        "print(len(got), got[:-1] == bytes(range(32, 113)) * 40, flush=True)\n"
    )
    async with platform.window("exec", "-it", platform.sandbox.id, "--", sys.executable, "-c", program) as window:
        await window.until(b"on")
        await window.is_raw()
        for _ in range(40):
            window.type(bytes(range(32, 113)))
            await asyncio.sleep(0)
        window.type(b"q")
        await window.until(b"3241 True")
        assert await window.code() == 0


async def test_what_is_typed_early_and_what_is_pasted_arrives(platform: Platform) -> None:
    pasted = bytes(range(32, 127)) * 6000  # 570 kB
    program = (
        "import os, sys, tty, hashlib\n"
        "line = input(); tty.setraw(0); print(line.upper(), flush=True)\n"
        f"left, seen = {len(pasted)}, hashlib.sha256()\n"
        "while left: data = os.read(0, min(left, 65536)); left -= len(data); seen.update(data)\n"
        "print(seen.hexdigest(), flush=True)\n"
    )
    async with platform.window("exec", "-it", platform.sandbox.id, "--", sys.executable, "-c", program) as window:
        window.type(b"early\r")
        await window.until(b"EARLY")
        await window.is_raw()
        await window.paste(pasted)
        await window.until(hashlib.sha256(pasted).hexdigest().encode())
        assert await window.code() == 0


async def test_it_takes_the_terminal_again_after_a_stop(platform: Platform) -> None:
    async with platform.window("exec", "-it", platform.sandbox.id, "-e", "PS1=ready> ", "--", *SHELL) as window:
        before = window.modes()
        await _shell(window)
        window.process.send_signal(signal.SIGSTOP)
        await asyncio.to_thread(os.waitid, os.P_PID, window.process.pid, os.WSTOPPED | os.WNOWAIT)
        window.cook(before)
        window.process.send_signal(signal.SIGCONT)
        await window.is_raw()
        window.type(b"exit 6\r")
        assert await window.code() == 6 and window.modes() == before


async def test_detach_and_come_back(platform: Platform) -> None:
    start = ("exec", "-it", platform.sandbox.id, "-e", "PS1=ready> ", "--", *SHELL)
    async with platform.window(*start) as window:
        before = window.modes()
        await _shell(window)
        window.type(b"kept=value\r")
        await window.until(b"ready> ")
        window.type(b"\x10")  # alone it is the shell's: the line before
        await window.until(b"kept=value")
        window.type(b"\x15\x10")
        window.type(b"\x11")
        await window.until(b"dsec attach ")
        shown = await window.until(b"\r\n")
        assert await window.code() == 0 and window.modes() == before
    sandbox, exec_id = shown.decode().split()
    assert sandbox == platform.sandbox.id
    async with platform.window("attach", sandbox, exec_id, cols=90, rows=20) as window:
        before = window.modes()
        await _shell(window)
        window.type(b"echo $kept; stty size\r")
        await window.until(b"value\r\n20 90\r\n")
        window.type(b"exit 3\r")
        assert await window.code() == 3 and window.modes() == before


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGINT, 130)])
async def test_a_signal_ends_the_command_and_restores_the_terminal(platform: Platform, number: int, code: int) -> None:
    async with platform.window("exec", "-it", platform.sandbox.id, "-e", "PS1=ready> ", "--", *SHELL) as window:
        before = window.modes()
        await _shell(window)
        window.process.send_signal(number)
        assert await window.code() == code
        assert window.modes() == before
    assert not [info for info in await platform.sandbox.processes() if info.running]


async def test_a_closed_window_ends_the_command(platform: Platform) -> None:
    async with platform.window("exec", "-it", platform.sandbox.id, "-e", "PS1=ready> ", "--", *SHELL) as window:
        await _shell(window)
        window.hang_up()
        assert await window.code() != 0
    assert not [info for info in await platform.sandbox.processes() if info.running]


async def test_the_end_of_the_sandbox_restores_the_terminal(platform: Platform) -> None:
    async with platform.window("exec", "-it", platform.sandbox.id, "-e", "PS1=ready> ", "--", *SHELL) as window:
        before = window.modes()
        await _shell(window)
        await platform.edge.silence()
        await platform.edge.listen()  # a lost connection is made anew
        window.type(b"echo still\r")
        await window.until(b"still\r\n")
        await platform.sandbox.stop()
        assert await window.code() != 0
        assert window.modes() == before


async def test_much_output_is_exact(platform: Platform) -> None:
    program = "import os, sys, tty\ntty.setraw(1)\nsys.stdout.buffer.write(bytes(range(256)) * 16384)"  # 4 MiB
    async with platform.window("exec", "-it", platform.sandbox.id, "--", sys.executable, "-c", program) as window:
        assert await window.code() == 0
        shown = await window.until(bytes(range(256)) * 16384)
    assert shown == b"" and window.screen == b""


async def test_a_run_in_a_terminal_leaves_no_sandbox(platform: Platform) -> None:
    line = "read -p 'ready> ' -r code; exit $code"
    async with platform.window("run", "-it", "debian@12", "--", "bash", "-c", line) as window:
        await _shell(window)
        window.type(b"5\r")
        assert await window.code() == 5
    assert [box.id for box in platform.edge.boxes.values() if box.state is sdk.State.RUNNING] == [platform.sandbox.id]


async def test_a_run_that_is_left_keeps_its_sandbox(platform: Platform) -> None:
    async with platform.window("run", "-it", "debian@12", "--", "bash", "-c", "read -p 'ready> '") as window:
        await _shell(window)
        window.type(b"\x10\x11")
        await window.until(b"dsec attach ")
        sandbox, exec_id = (await window.until(b"\r\n")).decode().split()
        await window.until(f"kept: {sandbox}\r\n".encode())
        assert await window.code() == 0
    assert platform.edge.boxes[sandbox].state is sdk.State.RUNNING
    async with platform.window("attach", sandbox, exec_id) as window:
        await _shell(window)
        window.type(b"\r")
        assert await window.code() == 0
    async with platform.window("attach", sandbox, exec_id) as window:  # over: all of it, and its code
        await window.until(b"ready> ")
        assert await window.code() == 0


async def test_a_terminal_to_look_at(platform: Platform) -> None:
    async with platform.window("exec", "-t", platform.sandbox.id, "--", "sh", "-c", "tty; stty size; exit 3") as window:
        before = window.modes()
        await window.until(b"/dev/pts/")
        await window.until(b"30 100")
        assert await window.code() == 3 and window.modes() == before


async def test_sdk_terminal(platform: Platform) -> None:
    process = await platform.sandbox.start("stty size; read -r line; stty size; tty", pty=PtySize(90, 33))
    events = process.events()
    assert await anext(events) == Stdout(b"33 90\r\n", 0)
    await process.resize(40, 12)
    await process.write("x\n")
    shown = b"".join([event.data async for event in events if isinstance(event, Stdout)])
    assert shown.startswith(b"x\r\n12 40\r\n/dev/pts/")
    with pytest.raises(sdk.Conflict):
        await process.resize(40, 12)
    for cols, rows in ((0, 1), (1, 4097), (-1, 5), (True, 5), (2.5, 5)):
        with pytest.raises(sdk.InvalidRequest, match="between 1 and 4096"):
            await process.resize(cols, rows)  # type: ignore[arg-type]
        with pytest.raises(sdk.InvalidRequest, match="between 1 and 4096"):
            await platform.sandbox.start("true", pty=PtySize(cols, rows))  # type: ignore[arg-type]


def test_without_a_terminal_it_is_a_usage_error(client: FakeClient, dsec: Invoke) -> None:
    assert connect.make_client() is client
    for arguments in (("exec", "-it", "sb-1"), ("exec", "-t", "sb-1"), ("run", "-it", "debian@12")):
        ran = dsec(*arguments, "--", "bash")
        assert ran.code == 2 and "-t needs a terminal" in ran.err, ran.err
    assert client.started == [] and client.asked == []
    ran = dsec("exec", "-t", "--json", "sb-1", "--", "bash")
    assert ran.code == 2 and "--json" in ran.err


def test_interactive_alone_feeds_stdin(client: FakeClient, dsec: Invoke) -> None:
    assert dsec("exec", "-i", "sb-1", "--", "cat").code == 0
    assert client.started[0][1]["stdin"] is True and client.started[0][1]["pty"] is None
