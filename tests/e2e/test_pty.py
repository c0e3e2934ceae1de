"""Terminals: what a command that has one sees, what reaches it, and what becomes of it."""

from __future__ import annotations

import asyncio
import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import dsec
from dsec import PtySize
from dsec.cluster import embedded

from .conftest import BASE
from .test_crashes import client_of, kill, pid_of

pytestmark = pytest.mark.e2e
PATIENCE_S = 30.0


async def said(sandbox: dsec.Sandbox, line: str, *, size: PtySize = PtySize(), user: str | None = None) -> str:
    """What a line prints on a terminal."""
    result = await (await sandbox.start(line, pty=size, user=user, timeout=PATIENCE_S)).wait(check=True)
    assert result.stderr == b""
    return result.text


class Screen:
    """Follows a terminal's output and waits for words in it."""

    def __init__(self, process: dsec.Process) -> None:
        self._process = process
        self._events = process.events()
        self.shown = b""
        self.exit: dsec.ExecResult | None = None

    async def until(self, word: bytes) -> None:
        """Forgets what came up to and with the word."""
        async with asyncio.timeout(PATIENCE_S):
            while word not in self.shown:
                await self._next()
        self.shown = self.shown.partition(word)[2]

    async def end(self) -> dsec.ExecResult:
        async with asyncio.timeout(PATIENCE_S):
            while self.exit is None:
                await self._next()
        return self.exit

    async def _next(self) -> None:
        event = await anext(self._events, None)
        assert event is not None, self.shown
        if isinstance(event, dsec.Exit):
            self.exit = event.result
        else:
            assert isinstance(event, dsec.Stdout)
            self.shown += event.data


async def test_what_a_command_sees(sandbox: dsec.Sandbox) -> None:
    assert "devpts" not in (await sandbox.run_shell("cat /proc/mounts")).text  # each would cost a filesystem
    assert await said(sandbox, "tty; stty size; echo $TERM; ls -l /proc/$$/fd | grep -c pts/0; echo err >&2",
                      size=PtySize(cols=132, rows=43)) == "/dev/pts/0\r\n43 132\r\nxterm-256color\r\n3\r\nerr\r\n"  # fmt: skip
    mounted = [line for line in (await sandbox.run_shell("cat /proc/mounts")).text.splitlines() if "devpts" in line]
    assert len(mounted) == 1
    assert {"nosuid", "noexec", "mode=620", "ptmxmode=666", "max=64"} <= set(mounted[0].split()[3].split(","))
    process = await sandbox.start("echo $TERM", pty=PtySize(), env={"TERM": "dumb"})
    assert (await process.wait()).text == "dumb\r\n"
    assert (await (await sandbox.start(["nothing-there"], pty=PtySize())).wait()).exit_code == 127


async def test_sizes(sandbox: dsec.Sandbox) -> None:
    process = await sandbox.start(
        "trap 'stty size' WINCH; echo ready; while :; do sleep 0.02; done", pty=PtySize(100, 30)
    )
    screen = Screen(process)
    await screen.until(b"ready")
    await process.resize(211, 53)
    await screen.until(b"53 211\r\n")
    await process.kill()
    await screen.end()
    with pytest.raises(dsec.Conflict, match="terminal"):
        await process.resize(80, 24)
    piped = await sandbox.start(["sleep", "100"])
    with pytest.raises(dsec.Conflict, match="terminal"):
        await piped.resize(80, 24)
    await piped.kill()


async def test_control_c_and_the_end_of_input(sandbox: dsec.Sandbox) -> None:
    process = await sandbox.start("echo ready; sleep 100", pty=PtySize())
    screen = Screen(process)
    await screen.until(b"ready")
    await process.write(b"\x03")
    ended = await screen.end()
    assert (ended.exit_code, ended.signal) == (130, "INT")

    for typed in (b"one\n", b"one\ntwo"):
        process = await sandbox.start("cat; echo end", pty=PtySize())
        await process.write(typed)
        await process.close_stdin()
        await process.close_stdin()
        with pytest.raises(dsec.Conflict):
            await process.write(b"more")
        text = (await process.wait(check=True)).text
        assert text.endswith("end\r\n") and text.count("one") == 2, text


async def test_an_interactive_shell(sandbox: dsec.Sandbox) -> None:
    process = await sandbox.start(["bash", "--norc", "-i"], pty=PtySize(), env={"PS1": "> "})
    screen = Screen(process)
    await process.write("sleep 100\n")
    while "sleep 100" not in (await sandbox.run_shell("cat /proc/[0-9]*/cmdline | tr '\\0' ' '")).text:
        await asyncio.sleep(0)
    await process.write(b"\x1a")
    await screen.until(b"Stopped")
    await process.write("kill %1; wait\n")
    await process.write("echo $((6 * 7))\n")
    await screen.until(b"42\r\n")
    await process.write("exit 3\n")
    assert (await screen.end()).exit_code == 3


async def test_two_at_once_and_another_user(sandbox: dsec.Sandbox) -> None:
    line = "tty; ls -ln $(tty) | cut -d' ' -f1,3,4; echo hello > $(tty); cat"
    processes = await asyncio.gather(*(sandbox.start(line, pty=PtySize(), user=user) for user in ("root", "nobody")))
    await asyncio.gather(*(process.close_stdin() for process in processes))
    texts = [(await process.wait(check=True)).text.splitlines() for process in processes]
    assert {text[0] for text in texts} == {"/dev/pts/0", "/dev/pts/1"}
    assert [text[1] for text in texts] == ["crw--w---- 0 5", "crw--w---- 65534 5"]
    assert [text[2] for text in texts] == ["hello", "hello"]


async def test_programs_make_terminals_of_their_own(sandbox: dsec.Sandbox) -> None:
    assert "/dev/pts/1" in await said(sandbox, "script -qec tty /dev/null < /dev/null")
    line = "SHELL=/bin/sh script -qec tty /dev/null < /dev/null"
    made = await sandbox.run_shell(line, user="nobody")  # they are there for all from now on
    assert made.text.strip() == "/dev/pts/0"


async def test_output_is_kept_as_of_any_command(sandbox: dsec.Sandbox) -> None:
    process = await sandbox.start("seq 100000; echo done; exec sleep 100", pty=PtySize())
    screen = Screen(process)
    await screen.until(b"done")
    expected = "".join(f"{number}\r\n" for number in range(1, 100001)) + "done\r\n"
    seen = b""
    async for event in process.events(cursor=100_000):
        assert isinstance(event, dsec.Stdout) and event.offset == 100_000 + len(seen)
        seen += event.data
        if seen.endswith(b"done\r\n"):
            break
    assert seen.decode() == expected[100_000:]
    await process.kill()
    ended = await process.wait()
    assert (ended.exit_code, ended.text) == (137, expected)

    short = await (await sandbox.start("seq 100000", pty=PtySize(), max_output_bytes=1000)).wait(check=True)
    assert short.stdout_truncated and len(short.stdout) == 1000
    late = await (await sandbox.start("echo begun; sleep 100", pty=PtySize(), timeout=0.5)).wait()
    assert late.timed_out == "deadline" and late.text == "begun\r\n"


async def test_nothing_typed_is_lost(sandbox: dsec.Sandbox) -> None:
    """A full terminal holds its writer up, as a full pipe does."""
    line = "stty raw -echo; echo ready; head -c 3000000 | sha256sum"
    process = await sandbox.start(line, pty=PtySize())
    screen = Screen(process)
    await screen.until(b"ready")
    data = os.urandom(3_000_000)
    await process.write(data)
    await screen.until(hashlib.sha256(data).hexdigest().encode())
    assert (await screen.end()).exit_code == 0


async def test_the_end_hangs_up(sandbox: dsec.Sandbox) -> None:
    """What is in front gets SIGHUP; what ignores it goes on without a terminal."""
    line = "(trap 'echo hup > /tmp/hup; exit' HUP; echo > /tmp/set; while :; do sleep 0.02; done) 2> /dev/null & "
    line += "until [ -e /tmp/set ]; do sleep 0.02; done; echo last"
    process = await sandbox.start(line, pty=PtySize())
    assert (await process.wait(check=True)).text == "last\r\n"
    await sandbox.run_shell("until [ -s /tmp/hup ]; do sleep 0.02; done", timeout=PATIENCE_S, check=True)

    line = "trap '' HUP; (until ! echo x; do sleep 0.02; done; echo gone > /tmp/gone) 2> /dev/null & exit 0"
    await (await sandbox.start(line, pty=PtySize())).wait(check=True)
    await sandbox.run_shell("until [ -s /tmp/gone ]; do sleep 0.02; done", timeout=PATIENCE_S, check=True)


async def test_nothing_inside_stands_in_for_it(sandbox: dsec.Sandbox) -> None:
    """Root cannot put anything where the terminals come from, neither before they are there nor after."""
    attempts = (
        "rmdir /dev/pts", "mv /dev/pts /dev/x", "ln -sfn /tmp /dev/pts", "touch /dev/pts/x", "rm /dev/ptmx", "mv /dev /x",
        "mount -t tmpfs tmpfs /dev/pts", "mknod /dev/pts/ptmx c 5 2", "rm -f /dev/pts/ptmx && [ ! -e /dev/pts/ptmx ]",
    )  # fmt: skip
    for _ in range(2):
        for attempt in attempts:
            ended = await sandbox.run_shell(f"{attempt} 2> /dev/null")
            assert ended.exit_code != 0 or attempt.startswith("rm -f"), attempt
        assert await said(sandbox, "tty") == "/dev/pts/0\r\n"


async def test_what_a_terminal_may_not_be_asked(sandbox: dsec.Sandbox) -> None:
    for request in (0x5412, 0x5423, 0x541C):  # TIOCSTI, TIOCSETD to the discipline it has, TIOCLINUX
        line = f"perl -e '$a = pack(q(i), 0); ioctl(STDIN, {request}, $a); print $!'"
        assert await said(sandbox, line) == "Operation not permitted"


async def test_many_sandboxes_at_once(client: dsec.DSecClient) -> None:
    async def one() -> None:
        async with client.run_container(dsec.DSecContainerRunArgs(container_image=BASE)) as sandbox:
            ways = await asyncio.gather(*(said(sandbox, "tty; cat /proc/mounts | grep -c devpts") for _ in range(3)))
            assert {way.split()[1] for way in ways} == {"1"}

    await asyncio.gather(*(one() for _ in range(20)))


async def test_there_are_not_too_many(sandbox: dsec.Sandbox) -> None:
    many = [await sandbox.start(["sleep", "100"], pty=PtySize()) for _ in range(64)]
    with pytest.raises(dsec.CapacityError, match="terminals"):
        await sandbox.start(["true"], pty=PtySize())
    await many.pop().kill()
    async with asyncio.timeout(PATIENCE_S):
        while True:
            try:
                await (await sandbox.start(["true"], pty=PtySize())).wait(check=True)
                break
            except dsec.CapacityError:
                await asyncio.sleep(0.01)


@pytest.fixture
def state() -> Iterator[Path]:
    made = Path(tempfile.mkdtemp(prefix="dsec-", dir="/var/tmp"))
    yield made
    embedded.down(made)
    shutil.rmtree(made)


async def test_it_survives_the_edge(state: Path) -> None:
    endpoint = embedded.up(state, port=0)
    async with client_of(endpoint) as client:
        sandbox = await client.run(dsec.DSecContainerRunArgs(container_image=BASE))
        process = await sandbox.start("while read line; do echo got $line; done", pty=PtySize())
        screen = Screen(process)
        await process.write("one\n")
        await screen.until(b"got one")
        kill(pid_of(state, "edge"))
        await process.write("two\n")
        await screen.until(b"got two")
        await process.resize(90, 20)
        assert await said(sandbox, "tty") == "/dev/pts/1\r\n"
        await process.close_stdin()
        assert (await screen.end()).exit_code in (0, 1)
        await sandbox.stop()
