"""Pause and resume of real sandboxes: nothing is lost, whatever was under way, and nothing is kept awake or held up."""

from __future__ import annotations

import asyncio
import hashlib
import re
import time
from collections.abc import AsyncIterator, Callable, Iterator

import pytest
from benchmarks.swap import NoSwap, swap_file

import dsec
from dsec import State
from dsec.sdk import commands

from .conftest import BASE

DEADLINE = 30.0
MEGABYTES = 60
# Holds random memory; a line on stdin is answered, "sum" by a checksum of all of it.
HOLDER = (
    "$| = 1; open F, '/dev/urandom'; read F, $b, %d << 20; print 'up ', unpack('%%32C*', $b), \"\\n\";"
    "while (<STDIN>) { print /sum/ ? 'sum ' . unpack('%%32C*', $b) . \"\\n\" : \"got $_\" }"
)


@pytest.fixture(scope="module")
def swap() -> Iterator[None]:
    try:
        with swap_file(1024):
            yield
    except NoSwap as why:
        pytest.skip(str(why))


async def until(holds: Callable[[], object]) -> None:
    async with asyncio.timeout(DEADLINE):
        while not holds():
            await asyncio.sleep(0.005)


async def state(sandbox: dsec.Sandbox) -> State:
    return (await sandbox.info()).state


class Talker:
    """A process that is talked to line by line."""

    def __init__(self, process: dsec.Process) -> None:
        self.process = process
        self._lines = self._read()

    async def _read(self) -> AsyncIterator[str]:
        buffer = b""
        async for event in self.process.events():
            if isinstance(event, dsec.Stdout):
                *lines, buffer = (buffer + event.data).split(b"\n")
                for line in lines:
                    yield line.decode()

    async def line(self) -> str:
        return await asyncio.wait_for(anext(self._lines), DEADLINE)

    async def ask(self, text: str) -> str:
        await self.process.write(text.encode() + b"\n")
        return await self.line()


async def test_memory_is_given_back_and_comes_again(swap: None, client: dsec.DSecClient) -> None:
    async with client.run_container(dsec.DSecContainerRunArgs(BASE)) as sandbox:
        holder = Talker(await sandbox.start(["perl", "-e", HOLDER % MEGABYTES], stdin=True))
        checksum = (await holder.line()).removeprefix("up ")
        for _ in range(3):
            before = (await sandbox.metrics()).memory_bytes
            assert before > MEGABYTES << 20
            await sandbox.pause()
            info = await sandbox.info()
            assert info.state is State.PAUSED
            assert info.usage.memory_bytes < before / 4, "three quarters of it are gone at least"
            assert info.usage.swap_bytes > (MEGABYTES << 20) * 3 / 4, "they are where they can come back from"
            assert await holder.ask("sum") == f"sum {checksum}", "the request resumed it, and every byte is there"
            assert await state(sandbox) is State.RUNNING


async def test_files_and_processes_survive_many_pauses(sandbox: dsec.Sandbox) -> None:
    server = "use IO::Socket; $s = IO::Socket::INET->new(LocalPort => 7000, Listen => 5); $| = 1; print qq(up\\n);" \
             "while ($c = $s->accept) { print $c qq(still here\\n); close $c }"  # fmt: skip
    serving = await sandbox.start(["perl", "-e", server])
    assert await Talker(serving).line() == "up"
    ask = "exec 3<>/dev/tcp/127.0.0.1/7000; cat <&3"
    for number in range(4):
        await sandbox.files.write(f"/data/{number}", b"x" * 10_000 + b"%d" % number)
        await sandbox.run_shell(f"echo kept {number} >> /data/log; touch /dev/shm/{number}")
        await sandbox.pause()
        assert await state(sandbox) is State.PAUSED
        await sandbox.resume()
        assert [info.exec_id for info in await sandbox.processes() if info.running] == [serving.exec_id]
        assert (await sandbox.run_shell(ask)).text == "still here\n"
        for earlier in range(number + 1):
            assert await sandbox.files.read(f"/data/{earlier}") == b"x" * 10_000 + b"%d" % earlier
        expected = "".join(f"kept {n}\n" for n in range(number + 1))
        assert (await sandbox.files.read_text("/data/log")) == expected
        assert len(await sandbox.files.list("/dev/shm")) == number + 1


async def test_output_goes_on_where_it_stood(sandbox: dsec.Sandbox) -> None:
    lines = 60_000
    process = await sandbox.start(f"i=0; while [ $i -lt {lines} ]; do echo line $i; i=$((i+1)); done")
    got, result = bytearray(), None

    async def read() -> None:
        nonlocal result
        async for event in process.events():
            if isinstance(event, dsec.Stdout):
                got.extend(event.data)
            elif isinstance(event, dsec.Exit):
                result = event.result

    reading = asyncio.create_task(read())
    seen = 0
    for _ in range(3):
        await until(lambda mark=seen: len(got) > mark)  # type: ignore[misc]
        await sandbox.pause()
        assert await state(sandbox) is State.PAUSED
        await sandbox.resume()
        seen = len(got)
    await asyncio.wait_for(reading, DEADLINE)
    assert bytes(got) == b"".join(b"line %d\n" % n for n in range(lines))
    assert result is not None and result.exit_code == 0 and result.stdout_bytes == len(got)


async def test_who_waits_for_a_command_waits_on_and_wakes_nobody(
    sandbox: dsec.Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commands, "WAIT_S", 1)  # so that the client asks again and again meanwhile
    running = asyncio.create_task(sandbox.run_shell("touch /begun; until [ -e /go ]; do sleep 0.02; done; echo end"))
    async with asyncio.timeout(DEADLINE):
        while not await sandbox.files.exists("/begun"):
            await asyncio.sleep(0.01)
    await sandbox.pause()
    await asyncio.sleep(2.5)  # more than two of the client's questions
    assert await state(sandbox) is State.PAUSED and not running.done()
    await sandbox.files.write("/go", b"")
    result = await asyncio.wait_for(running, DEADLINE)
    assert (result.exit_code, result.text) == (0, "end\n")


@pytest.mark.parametrize("limit", ["timeout", "idle_timeout"])
async def test_time_in_a_pause_counts_for_no_command(sandbox: dsec.Sandbox, limit: str) -> None:
    line = "touch /begun; until [ -e /go ]; do sleep 0.02; done; echo end"
    running = asyncio.create_task(sandbox.run_shell(line, **{limit: 1.5}))  # type: ignore[arg-type]
    async with asyncio.timeout(DEADLINE):
        while not await sandbox.files.exists("/begun"):
            await asyncio.sleep(0.01)
    await sandbox.pause()
    await asyncio.sleep(2.5)
    await sandbox.files.write("/go", b"")
    result = await asyncio.wait_for(running, DEADLINE)
    assert (result.exit_code, result.timed_out, result.text) == (0, None, "end\n")
    assert result.duration_s < 2.0
    late = await sandbox.run_shell("sleep 60", **{limit: 0.3})  # type: ignore[arg-type]
    assert late.timed_out is not None, "the clock goes again"


async def test_an_upload_is_whole_after_a_pause(sandbox: dsec.Sandbox) -> None:
    digest, halfway, go = hashlib.sha256(), asyncio.Event(), asyncio.Event()

    async def chunks() -> AsyncIterator[bytes]:
        for number in range(64):
            if number == 32:
                halfway.set()
                await go.wait()
            chunk = hashlib.sha256(b"%d" % number).digest() * 8192
            digest.update(chunk)
            yield chunk

    writing = asyncio.create_task(sandbox.files.write("/up", chunks()))
    await asyncio.wait_for(halfway.wait(), DEADLINE)
    await asyncio.wait_for(sandbox.pause(), DEADLINE)
    assert await state(sandbox) is State.PAUSED
    go.set()
    await sandbox.resume()
    await asyncio.wait_for(writing, DEADLINE)
    result = await sandbox.run_shell("sha256sum < /up")
    assert result.text.split()[0] == digest.hexdigest()


async def test_it_ends_from_its_pause(client: dsec.DSecClient) -> None:
    args = dsec.DSecContainerRunArgs(BASE)
    stopped = await client.run_container(args)
    waiting = asyncio.create_task(stopped.run_shell("sleep 600"))
    await stopped.pause()
    await asyncio.wait_for(stopped.stop(), DEADLINE)
    assert await state(stopped) is State.STOPPED
    with pytest.raises(dsec.SandboxUnavailable):
        await asyncio.wait_for(waiting, DEADLINE)
    with pytest.raises(dsec.SandboxUnavailable):
        await stopped.resume()
    async with client.run_container(args) as killed:
        process = await killed.start("sleep 600")
        await killed.pause()
        await process.signal("KILL")
        assert (await asyncio.wait_for(process.wait(), DEADLINE)).exit_code == 137
    async with client.run_container(dsec.DSecContainerRunArgs(BASE, ttl_running_stop=0.5)) as idle:
        await idle.pause()
        async with asyncio.timeout(DEADLINE):
            while (info := await idle.info()).state is not State.STOPPED:
                await asyncio.sleep(0.02)
        assert info.reason is not None and info.reason.value == "ttl_idle"


async def test_everything_at_once(client: dsec.DSecClient) -> None:
    """Pause, resume, commands, files and stops of one sandbox in any order: each is answered, and rightly."""
    async with client.run_container(dsec.DSecContainerRunArgs(BASE)) as sandbox:

        async def work(number: int) -> None:
            match number % 4:
                case 0:
                    await sandbox.pause()
                case 1:
                    await sandbox.resume()
                case 2:
                    assert (await sandbox.run_shell(f"echo {number}")).text == f"{number}\n"
                case 3:
                    await sandbox.files.write(f"/f{number}", b"%d" % number)
                    assert await sandbox.files.read(f"/f{number}") == b"%d" % number

        # a command that was frozen goes on when somebody resumes: somebody does
        async def rouse() -> None:
            while True:
                await asyncio.sleep(0.1)
                await sandbox.resume()

        rousing = asyncio.create_task(rouse())
        await asyncio.wait_for(asyncio.gather(*(work(number) for number in range(80))), 2 * DEADLINE)
        rousing.cancel()
        await sandbox.pause()
        assert (await sandbox.run_shell("ls / | grep -c '^f[0-9]'")).text == "20\n"


async def test_a_hundred_at_once_hold_no_creation_up(client: dsec.DSecClient) -> None:
    args = dsec.DSecContainerRunArgs(BASE, labels={"test": "hundred"})
    sandboxes = await asyncio.gather(*(client.run_container(args) for _ in range(100)))
    try:
        await asyncio.gather(*(sandbox.run_shell("echo $$ > /pid") for sandbox in sandboxes))
        pausing = asyncio.gather(*(sandbox.pause() for sandbox in sandboxes))
        async with client.run_container(dsec.DSecContainerRunArgs(BASE)) as other:
            started = time.monotonic()
            await other.run_shell("true")
            assert time.monotonic() - started < 5
        await asyncio.wait_for(pausing, DEADLINE)
        states = [info.state async for info in client.list(labels={"test": "hundred"})]
        assert states == [State.PAUSED] * 100
        results = await asyncio.wait_for(
            asyncio.gather(*(sandbox.run_shell("cat /pid") for sandbox in sandboxes)), DEADLINE
        )
        assert all(re.fullmatch(r"\d+\n", result.text) for result in results)
    finally:
        await client.stop_many(labels={"test": "hundred"})
