"""Limits hold, and what they end has a name."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

import dsec
from dsec.cluster import embedded
from dsec.layers import LayerStore

from .conftest import BASE

MIB = 1024 * 1024


async def test_the_disk_limit_is_hard(client: dsec.DSecClient) -> None:
    args = dsec.DSecContainerRunArgs(BASE, disk_limit_mb=40)
    async with client.run_container(args) as sandbox:
        result = await sandbox.run_shell("head -c 100M /dev/zero > /var/big; echo $?; stat -c %s /var/big")
        code, size = result.text.split()
        assert code != "0" and int(size) <= 41 * MIB
        assert "quota" in result.stderr_text.lower() or "space" in result.stderr_text.lower()
        with pytest.raises(OSError):
            await sandbox.files.write("/var/more", b"x" * 8 * MIB)
        await sandbox.files.remove("/var/big")
        assert (await sandbox.run_shell("echo answers")).text == "answers\n"


async def test_a_subvolume_does_not_escape_the_disk_limit(client: dsec.DSecClient) -> None:
    args = dsec.DSecContainerRunArgs(BASE, disk_limit_mb=40)
    async with client.run_container(args) as sandbox:
        result = await sandbox.run_shell("head -c 100M /dev/zero > /dev/shm/big; stat -c %s /dev/shm/big")
        assert int(result.text) <= 41 * MIB


async def test_a_memory_hog_is_named_and_the_sandbox_answers(client: dsec.DSecClient) -> None:
    args = dsec.DSecContainerRunArgs(BASE, memory_limit_mb=64)
    async with client.run_container(args) as sandbox:
        hog = await sandbox.exec(["python3", "-c", "b = bytearray(300 * 2**20)"])
        assert (hog.exit_code, hog.signal, hog.reason) == (137, "KILL", "oom") and "64 MiB" in hog.detail
        assert (await sandbox.run_shell("echo answers")).text == "answers\n"
        assert (await sandbox.info()).usage.oom_kills >= 1


async def test_a_fork_storm_is_held_and_the_sandbox_answers(client: dsec.DSecClient) -> None:
    args = dsec.DSecContainerRunArgs(BASE, pids_limit=50)
    async with client.run_container(args) as sandbox:
        storm = await sandbox.start("f() { f | f & }; f", timeout=20)
        for _ in range(5):
            result = await sandbox.exec(["/bin/echo", "answers"], timeout=20)
            assert result.text == "answers\n"
        usage = await sandbox.metrics()
        assert usage.pids <= 51
        await storm.signal("KILL")


async def test_the_cpu_limit_holds(client: dsec.DSecClient) -> None:
    args = dsec.DSecContainerRunArgs(BASE, cpu_cores_limit=0.2)
    async with client.run_container(args) as sandbox:
        await sandbox.exec(["timeout", "2", "sh", "-c", "while :; do :; done"])
        assert (await sandbox.metrics()).cpu_s < 1.0


async def test_watched_uppers_end_a_writer_by_name(store: LayerStore) -> None:
    """Where the kernel offers no quota: at 500 MB/s at most 128 MB past the limit, and the end is `disk_full`."""
    with embedded.private(uppers="dir") as endpoint:
        key = Path(endpoint.key_file).read_text().strip()
        async with dsec.DSecClient(endpoint.url, key) as client:
            neighbour = await client.run_container(dsec.DSecContainerRunArgs(BASE))
            sandbox = await client.run_container(dsec.DSecContainerRunArgs(BASE, disk_limit_mb=100))
            with pytest.raises(dsec.SandboxUnavailable) as caught:
                await sandbox.run_shell("head -c 2G /dev/zero > /var/big; sleep 30")
            assert caught.value.reason == "disk_full" and not caught.value.reward_valid
            info = await sandbox.info()
            assert info.state.value == "stopped" and info.reason is not None and info.reason.value == "disk_full"
            reached = int(info.detail.split(" MiB")[0])
            assert 100 < reached <= 228, info.detail
            assert (await neighbour.run_shell("echo answers")).text == "answers\n"
            await asyncio.gather(neighbour.stop())


async def test_watching_too_much_keeps_no_command_from_starting(client: dsec.DSecClient) -> None:
    """The kernel counts what a user watches through epoll, and aether has the same user as root inside."""
    watches = int(Path("/proc/sys/fs/epoll/max_user_watches").read_text())
    hog = """
import os, resource, select
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
reader, writer = os.pipe()
copies = [os.dup(reader) for _ in range(hard * 9 // 10)]
sets = []
try:
    while True:
        sets.append(select.epoll())
        for copy in copies:
            sets[-1].register(copy, select.EPOLLIN)
except OSError as error:
    print(error.strerror, flush=True)
os.read(reader, 1)
"""
    args = dsec.DSecContainerRunArgs(BASE, memory_limit_mb=256 + watches * 320 // MIB)
    async with client.run_container(args) as sandbox:
        process = await sandbox.start(["python3", "-c", hog])
        event = await anext(process.events())
        assert isinstance(event, dsec.Stdout) and b"No space left" in event.data
        assert (await sandbox.run_shell("echo answers", timeout=30)).text == "answers\n"


async def test_what_waits_in_sockets_counts(client: dsec.DSecClient) -> None:
    hoard = """
import resource, socket
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
sender, held = socket.socket(socket.AF_INET, socket.SOCK_DGRAM), []
sender.setblocking(False)
for _ in range(1500):
    held.append(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
    held[-1].bind(("127.0.0.1", 0))
    held[-1].setblocking(False)
    try:
        for _ in range(6):
            sender.sendto(bytes(32000), held[-1].getsockname())
    except OSError:
        break
total = 0
for one in held:
    try:
        while True:
            total += len(one.recv(65536))
    except OSError:
        pass
print(total)
"""
    args = dsec.DSecContainerRunArgs(BASE, memory_limit_mb=128)
    async with client.run_container(args) as sandbox:
        hoarded = await sandbox.exec(["python3", "-c", hoard], timeout=60)
        assert hoarded.reason == "oom" or int(hoarded.text) < 128 * MIB
        assert (await sandbox.run_shell("echo answers")).text == "answers\n"


async def test_a_sparse_file_of_any_size_does_not_fill_the_callers_memory(
    client: dsec.DSecClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dsec.sdk.files.MAX_READ", 8 * MIB)
    async with client.run_container(dsec.DSecContainerRunArgs(BASE)) as sandbox:
        await sandbox.run_shell("truncate -s 1T /var/sparse; echo end > /var/small")
        with pytest.raises(dsec.TooLarge):
            await sandbox.files.read("/var/sparse")
        assert len(await sandbox.files.read("/var/sparse", length=MIB)) == MIB
        assert await sandbox.files.read_text("/var/small") == "end\n"
