"""Which limit of the sandbox a failed command met: named with limit and use, never by guess."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

import dsec
from dsec import DSecClient, DSecContainerRunArgs, Sandbox
from dsec.cluster import embedded

from ..conftest import BASE

pytestmark = pytest.mark.e2e
HOG = ["python3", "-c", "bytearray(400 << 20)"]


def small(**limits: int) -> DSecContainerRunArgs:
    return DSecContainerRunArgs(BASE, **limits)  # type: ignore[arg-type]


async def test_out_of_memory(client: DSecClient) -> None:
    async with client.run(small(memory_limit_mb=64)) as sandbox:
        hog = await sandbox.exec(HOG)
        assert (hog.exit_code, hog.signal, hog.reason) == (137, "KILL", "oom")
        assert "limit 64 MiB" in hog.detail and "peak" in hog.detail and "1 killed" in hog.detail
        child = await sandbox.run_shell("python3 -c 'bytearray(400 << 20)'; exit 3")
        assert (child.exit_code, child.reason) == (3, "oom"), "a child was killed and the command failed"
        survived = await sandbox.run_shell("python3 -c 'bytearray(400 << 20)'; true")
        assert survived.ok and survived.reason is None
        for line in ("kill -9 $$", "exit 137", "exit 1", "false"):
            assert (await sandbox.run_shell(line)).reason is None, f"{line}: kills of before are not its own"


async def test_a_users_own_kill_beside_a_hog_is_not_out_of_memory(client: DSecClient) -> None:
    async with client.run(small(memory_limit_mb=64)) as sandbox:
        for _ in range(5):
            hog = asyncio.create_task(sandbox.exec(HOG))
            own = [asyncio.create_task(sandbox.run_shell("sleep 0.0$((RANDOM % 9)); kill -9 $$")) for _ in range(4)]
            failed = asyncio.create_task(sandbox.run_shell("sleep 0.05; exit 1"))
            results = [await task for task in (*own, failed)]
            assert [r.reason for r in results] == [None] * 5
            assert (await hog).reason == "oom"


async def test_killed_by_the_caller(client: DSecClient) -> None:
    async with client.run(small(memory_limit_mb=64)) as sandbox:
        process = await sandbox.start("python3 -c 'bytearray(400 << 20)'; echo on; sleep 60")
        async for event in process.events():
            if isinstance(event, dsec.Stdout):
                await process.kill()
        result = await process.wait()
        assert (result.signal, result.reason, result.timed_out) == ("KILL", None, None)
        again = await sandbox.process(process.exec_id)
        assert (await again.wait()).reason is None, "asked again, told the same"


async def test_the_disk_limit(client: DSecClient) -> None:
    async with client.run(small(disk_limit_mb=40)) as sandbox:
        full = await sandbox.run_shell("head -c 100M /dev/zero > /var/big")
        assert full.exit_code == 1 and full.reason == "disk_full"
        assert "limit 40 MiB" in full.detail and "40." in full.detail
        assert (await sandbox.metrics()).disk_bytes > 39 << 20, "what waits to be written counts"
        meanwhile = await sandbox.run_shell("echo more > /var/more")
        assert meanwhile.reason == "disk_full"
        assert (await sandbox.run_shell("true")).reason is None
        after = await sandbox.run_shell("rm /var/big; false")
        assert after.exit_code == 1 and after.reason is None, "it was full, and is not any more"


async def test_small_files_fill_the_disk_too(client: DSecClient) -> None:
    async with client.run(small(disk_limit_mb=8)) as sandbox:
        code = "for i in range(100000): open(f'/var/{i}', 'w').write('x' * 1000)"
        files = await sandbox.exec(["python3", "-c", code], timeout=60)
        assert files.exit_code == 1 and "Disk quota exceeded" in files.stderr_text
        assert files.reason == "disk_full" and "limit 8 MiB" in files.detail


async def test_the_limit_of_processes(client: DSecClient) -> None:
    async with client.run(small(pids_limit=30)) as sandbox:
        code = "import os, time\nfor _ in range(60):\n  if not os.fork(): time.sleep(60)"
        result = await sandbox.exec(["python3", "-c", code], exec_id="storm")
        assert result.exit_code == 1 and "Resource temporarily unavailable" in result.stderr_text
        assert result.reason == "pids" and "limit 30" in result.detail and "1 refused" in result.detail
        await (await sandbox.process("storm")).kill()
        assert (await sandbox.run_shell("exit 3")).reason is None


async def test_watched_uppers_end_a_writer_by_name(client: DSecClient) -> None:
    with embedded.private(uppers="dir") as endpoint:
        async with DSecClient(endpoint.url, Path(endpoint.key_file).read_text().strip()) as other:
            sandbox = await other.run(small(disk_limit_mb=50))
            with pytest.raises(dsec.SandboxUnavailable) as caught:
                await sandbox.run_shell("head -c 400M /dev/zero > /var/big; sleep 30")
            assert caught.value.reason == "disk_full" and not caught.value.reward_valid
            assert "limit 50 MiB" in str(caught.value)


async def test_check_says_the_reason(sandbox: Sandbox, client: DSecClient) -> None:
    async with client.run(small(memory_limit_mb=64)) as tight:
        with pytest.raises(dsec.CommandFailed, match=r"oom.*limit 64 MiB"):
            await tight.exec(HOG, check=True)
