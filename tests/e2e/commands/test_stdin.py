"""Stdin: every byte once and in order, whatever connections and processes of the platform die in the middle."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import select
import shutil
import signal
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from dsec import Conflict, DSecClient, DSecContainerRunArgs, Sandbox
from dsec.cluster import embedded
from dsec.protocol.frames import pack_preamble

from ..conftest import BASE

pytestmark = pytest.mark.e2e
MIB = 1 << 20


def kill(pid: int) -> None:
    pidfd = os.pidfd_open(pid)
    try:
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        assert select.select([pidfd], [], [], 30)[0]
    finally:
        os.close(pidfd)


@pytest.fixture
def state() -> Iterator[Path]:
    made = Path(tempfile.mkdtemp(prefix="dsec-", dir="/var/tmp"))
    yield made
    embedded.down(made)
    shutil.rmtree(made)


async def fed(sandbox: Sandbox, exec_id: str, size: int) -> None:
    """Until the command's stdin has taken so many bytes."""
    async with asyncio.timeout(60):
        while not any(info.stdin_bytes >= size for info in await sandbox.processes() if info.exec_id == exec_id):
            await asyncio.sleep(0.01)


async def test_killed_apiservers_lose_no_byte(state: Path) -> None:
    """A slow reader, so that both deaths come in the middle. The platform starts the apiserver again by itself or by `up`."""
    data = os.urandom(50 * MIB)
    endpoint = embedded.up(state, port=0)
    port = int(endpoint.url.rsplit(":", 1)[1])
    key = Path(endpoint.key_file).read_text().strip()
    async with DSecClient(endpoint.url, key) as client, client.run(DSecContainerRunArgs(BASE)) as sandbox:
        slow = "import sys, time, hashlib\nh = hashlib.sha256()\nwhile b := sys.stdin.buffer.read(1 << 20):\n"
        slow += "  h.update(b); time.sleep(0.02)\nprint(h.hexdigest())"
        running = asyncio.create_task(sandbox.exec(["python3", "-c", slow], stdin=data, exec_id="fed", timeout=90))
        for size in (10 * MIB, 25 * MIB):
            await fed(sandbox, "fed", size)
            [pid] = [process.pid for process in embedded.status(state).processes if process.role == "apiserver"]
            assert pid is not None
            kill(pid)
            await asyncio.to_thread(embedded.up, state, port=port)
        assert (await running).text.strip() == hashlib.sha256(data).hexdigest()


async def usurp(path: Path) -> None:
    """Takes aether's connection away from the edge, by the rule that the highest epoch has it."""
    epoch, held = 0, 1
    while held > epoch:  # told which one is held; the same again takes the place of the connection that is there
        epoch = held
        reader, writer = await asyncio.open_unix_connection(path)
        writer.write(pack_preamble(os.urandom(16), epoch))
        answer = await reader.readexactly(32)
        held = int.from_bytes(answer[24:], "little")
        writer.close()


async def test_broken_links_lose_no_byte(sandbox: Sandbox, platform: embedded.Endpoint) -> None:
    data, path = os.urandom(50 * MIB), Path(platform.run) / "sb" / f"{sandbox.id}.sock"
    running = asyncio.create_task(
        sandbox.exec(["cat"], stdin=data, exec_id="cut", timeout=90, max_output_bytes=64 * MIB)
    )
    for part in range(1, 10):
        await fed(sandbox, "cut", part * 5 * MIB)
        await usurp(path)
    result = await running
    assert hashlib.sha256(result.stdout).digest() == hashlib.sha256(data).digest()


async def test_a_reader_that_leaves_early(sandbox: Sandbox) -> None:
    data = os.urandom(20 * MIB)
    result = await sandbox.exec(["head", "-c", "3"], stdin=data, timeout=60)
    assert result.ok and result.stdout == data[:3]
    result = await sandbox.run_shell("exec 0<&-; echo on; exit 4", stdin=data, timeout=60)
    assert (result.exit_code, result.text) == (4, "on\n")
    process = await sandbox.start("head -c 1 > /dev/null; exec sleep 60 < /dev/null", stdin=True)
    with pytest.raises(Conflict, match="nobody reads"):
        while True:
            await process.write(data)
    await process.kill()


async def test_stdin_piece_by_piece(sandbox: Sandbox) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        for number in range(300):
            yield b"%d\n" % number

    result = await sandbox.exec(["tail", "-n", "1"], stdin=pieces())
    assert result.text == "299\n"
    assert (await sandbox.exec(["wc", "-c"], stdin=bytearray(2 * MIB), timeout=30)).text == f"{2 * MIB}\n"


async def test_two_writers_and_a_new_handle(sandbox: Sandbox) -> None:
    process = await sandbox.start(["cat"], stdin=True)
    other = await sandbox.process(process.exec_id)
    for number in range(20):
        await (other if number % 2 else process).write(f"{number} ")
    await other.close_stdin()
    with pytest.raises(Conflict):
        await process.write("late")
    result = await process.wait()
    assert result.text == " ".join(map(str, range(20))) + " "
    [info] = [info for info in await sandbox.processes() if info.exec_id == process.exec_id]
    assert info.stdin_bytes == len(result.text)


async def test_offsets_over_http(sandbox: Sandbox) -> None:
    process = await sandbox.start(["cat"], stdin=True)
    path = f"/v1/sandboxes/{sandbox.id}/processes/{process.exec_id}/stdin"

    async def post(body: bytes, **query: str) -> bytes:
        return (await sandbox._transport.request("POST", path, query=query, body=body)).body

    assert await post(b"abc", offset="0") == b'{"accepted":3,"open":true}'
    assert await post(b"abcde", offset="0") == b'{"accepted":5,"open":true}', "the same again, and more"
    assert await post(b"", wait_s="1") == b'{"accepted":5,"open":true}', "how far it got"
    with pytest.raises(Conflict, match="missing"):
        await post(b"x", offset="6")
    with pytest.raises(Conflict, match="missing"):
        await post(b"", offset="6", close="1")
    await post(b"fg", offset="5", close="1")
    assert (await process.wait()).text == "abcdefg"


async def test_a_command_that_does_not_read_slows_its_writer(sandbox: Sandbox) -> None:
    await sandbox.run_shell("mkfifo /tmp/go")
    process = await sandbox.start("read -r < /tmp/go; sha256sum", stdin=True)
    data = os.urandom(4 * MIB)
    path = f"/v1/sandboxes/{sandbox.id}/processes/{process.exec_id}/stdin"

    async def post(wait_s: str) -> int:
        query = {"offset": "0", "wait_s": wait_s}
        reply = await sandbox._transport.request("POST", path, query=query, body=data, wait=30)
        return int(json.loads(reply.body)["accepted"])

    assert 0 < await post("1") < 3 * MIB, "after its patience the answer tells how far it got"
    go = asyncio.create_task(sandbox.run_shell("echo > /tmp/go"))
    assert await post("25") == len(data)
    await process.close_stdin()
    assert (await process.wait()).text.split()[0] == hashlib.sha256(data).hexdigest()
    await go
