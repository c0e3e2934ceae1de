"""`dsec exec -it` in a window of its own, into a real sandbox and back."""

from __future__ import annotations

import asyncio
import hashlib
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest

import dsec
from dsec.cluster import embedded
from tests.cli.outer import Outer, outer

from .command_line import command_line
from .test_crashes import ARGS, client_of, kill, pid_of, states  # noqa: F401 (a fixture)

DETACH = b"\x10\x11"


class Windows:
    def __init__(self, platform: embedded.Endpoint) -> None:
        self._cli = command_line(platform)

    def __call__(self, *arguments: str, cols: int = 100, rows: int = 30) -> AbstractAsyncContextManager[Outer]:
        environment = {**self._cli.environment, "TERM": "xterm"}
        return outer(self._cli.argv(*arguments), environment, cols=cols, rows=rows)

    def bash(self, sandbox: dsec.Sandbox) -> AbstractAsyncContextManager[Outer]:
        return self("exec", "-it", "-e", "PS1=ready> ", sandbox.id, "--", "bash", "--norc")


@pytest.fixture
def window(platform: embedded.Endpoint) -> Windows:
    return Windows(platform)


async def _prompt(window: Outer) -> None:
    await window.until(b"ready> ")
    await window.is_raw()


async def test_a_shell(window: Windows, sandbox: dsec.Sandbox) -> None:
    async with window.bash(sandbox) as shell:
        before = shell.modes()
        await _prompt(shell)
        shell.type(b"stty size; echo $TERM; tty; ps -o tpgid= $$ | grep -q [1-9] && echo job control\r")
        await shell.until(b"30 100\r\nxterm\r\n/dev/pts/0\r\n")
        shell.resize(132, 50)
        shell.type(b"until [ \"$(stty size)\" = '50 132' ]; do :; done; echo re''sized\r")
        await shell.until(b"resized\r\n")
        await _prompt(shell)
        shell.type(b"sleep 1000\r")
        await shell.until(b"sleep 1000\r\n")
        while not await _named(sandbox, "sleep"):
            await asyncio.sleep(0)
        shell.type(b"\x03")
        await shell.until(b"ready> ")
        shell.type(b"echo code=$?\r")
        await shell.until(b"code=130\r\n")
        await shell.until(b"ready> ")
        shell.type(b"sleep 1000\r")
        while not await _named(sandbox, "sleep"):
            await asyncio.sleep(0)
        shell.type(b"\x1a")  # Ctrl-Z
        await shell.until(b"Stopped")
        shell.type(b"kill %1; exit 42\r")
        shell.type(b"exit 42\r")
        assert await shell.code() == 42
        assert shell.modes() == before


async def _named(sandbox: dsec.Sandbox, name: str) -> list[str]:
    """Processes inside of that name."""
    found = await sandbox.run_shell("cat /proc/[0-9]*/comm 2>/dev/null")
    return [line for line in found.text.splitlines() if line == name]


async def test_single_keys(window: Windows, sandbox: dsec.Sandbox) -> None:
    program = (
        "import os, tty, signal\n"
        "signal.signal(signal.SIGWINCH, lambda *_: print('size', *os.get_terminal_size(), flush=True))\n"
        "tty.setraw(0); print('on', flush=True)\n"
        "while (key := os.read(0, 1)) != b'q': print(key, end=' ', flush=True)\n"
    )
    async with window("exec", "-it", sandbox.id, "--", "python3", "-c", program) as editor:
        await editor.until(b"on\n")
        await editor.is_raw()
        for key, shown in ((b"x", b"b'x' "), (b"\x03", rb"b'\x03' "), (b"\x1b", rb"b'\x1b' "), (b"\x04", rb"b'\x04' ")):
            editor.type(key)
            await editor.until(shown)
        editor.resize(77, 21)
        await editor.until(b"size 77 21")
        editor.type(b"abcq")
        await editor.until(b"b'a' b'b' b'c' ")
        assert await editor.code() == 0


async def test_much_output_is_exact(window: Windows, sandbox: dsec.Sandbox) -> None:
    program = "import sys, tty; tty.setraw(1); sys.stdout.buffer.write(bytes(range(256)) * 40960)"  # 10 MiB
    async with window("exec", "-it", sandbox.id, "--", "python3", "-c", program) as screen:
        assert await screen.code() == 0
        shown = await screen.rest()
    assert len(shown) == 10 << 20
    assert hashlib.sha256(shown).digest() == hashlib.sha256(bytes(range(256)) * 40960).digest()


async def test_what_is_pasted_arrives(window: Windows, sandbox: dsec.Sandbox) -> None:
    pasted = bytes(range(32, 127)) * 6000  # 570 kB
    program = (
        "import os, tty, hashlib\n"
        "tty.setraw(0); print('on', flush=True)\n"
        f"left, seen = {len(pasted)}, hashlib.sha256()\n"
        "while left: data = os.read(0, min(left, 65536)); left -= len(data); seen.update(data)\n"
        "print(seen.hexdigest(), flush=True)\n"
    )
    async with window("exec", "-it", sandbox.id, "--", "python3", "-c", program) as editor:
        await editor.until(b"on")
        await editor.is_raw()
        await editor.paste(pasted)
        await editor.until(hashlib.sha256(pasted).hexdigest().encode())
        assert await editor.code() == 0


async def test_detach_and_come_back(window: Windows, sandbox: dsec.Sandbox) -> None:
    async with window.bash(sandbox) as shell:
        before = shell.modes()
        await _prompt(shell)
        shell.type(b"cd /usr; kept=value\r")
        await _prompt(shell)
        shell.type(DETACH)
        await shell.until(b"dsec attach ")
        sandbox_id, exec_id = (await shell.until(b"\r\n")).decode().split()
        assert await shell.code() == 0 and shell.modes() == before
    assert sandbox_id == sandbox.id
    async with window("attach", sandbox_id, exec_id, cols=90, rows=20) as shell:
        before = shell.modes()
        await _prompt(shell)
        shell.type(b"echo $kept $PWD; stty size\r")
        await shell.until(b"value /usr\r\n20 90\r\n")
        shell.type(b"exit 3\r")
        assert await shell.code() == 3 and shell.modes() == before
    async with window("attach", sandbox_id, exec_id) as ended:
        assert await ended.code() == 3


async def test_the_end_of_the_sandbox_restores_the_terminal(window: Windows, sandbox: dsec.Sandbox) -> None:
    async with window.bash(sandbox) as shell:
        before = shell.modes()
        await _prompt(shell)
        await sandbox.stop()
        assert await shell.code() == 1
        await shell.until(b"error: ")
        assert shell.modes() == before


async def test_it_survives_the_platform(states: list[Path]) -> None:  # noqa: F811
    endpoint = embedded.up(states[0], port=0)
    async with client_of(endpoint) as client, client.run_container(ARGS) as sandbox:
        window = Windows(endpoint)
        async with window.bash(sandbox) as shell:
            await _prompt(shell)
            for victim in ("apiserver", "edge"):
                kill(pid_of(states[0], victim))
                shell.type(b"echo after $((1+1)) " + victim.encode() + b"\r")
                await shell.until(b"after 2 " + victim.encode() + b"\r\n")
            shell.type(b"stty size; exit 4\r")
            await shell.until(b"30 100\r\n")
            assert await shell.code() == 4
        async with window.bash(sandbox) as another:
            await _prompt(another)
            another.type(b"exit 5\r")
            assert await another.code() == 5


async def test_a_run_ends_with_its_sandbox(window: Windows, client: dsec.DSecClient) -> None:
    label = {"terminal": "run"}
    line = "read -p 'ready> ' -r code; exit $code"
    for answer, code in ((b"5\r", 5), (b"\x03", 130)):
        async with window("run", "-it", "-l", "terminal=run", "debian@12", "--", "bash", "-c", line) as asked:
            await _prompt(asked)
            asked.type(answer)
            assert await asked.code() == code
        assert [info.id async for info in client.list(labels=label, states=[dsec.State.RUNNING])] == []
    async with window("run", "-it", "-l", "terminal=run", "debian@12", "--", "bash", "-c", line) as asked:
        await _prompt(asked)
        asked.process.terminate()
        assert await asked.code() == 143
    assert [info.id async for info in client.list(labels=label, states=[dsec.State.RUNNING])] == []
