"""Root inside against everything outside: the escape battery attempt by attempt, and two sandboxes against each other."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

import dsec
from dsec.cli.attack import battery
from dsec.cli.attack.inside import agent, core, devices, identity, kernel, mounts, network, proc, spaces, storage
from dsec.cli.attack.outside import OUTSIDE
from dsec.cluster.embedded import Endpoint

from .command_line import command_line
from .conftest import BASE

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

MODULES = (agent, devices, identity, kernel, mounts, network, proc, spaces, storage)
ATTEMPTS = [one.name for one in core.ALL] + [name for name, _, _ in OUTSIDE]


@pytest.fixture(scope="module")
def report(platform: Endpoint) -> dict[str, tuple[str, str]]:
    """`dsec doctor --attack --json` once; (verdict, detail) by name."""
    ran = command_line(platform)("doctor", "--attack", "--json", timeout=280)
    attempts = ran.json["attempts"]
    assert isinstance(attempts, list)
    found = {one["name"]: (one["verdict"], one["detail"]) for one in attempts}
    assert (ran.code == 0) == all(verdict == "blocked" for verdict, _ in found.values())
    return found


@pytest.mark.parametrize("name", ATTEMPTS)
def test_attempt_is_blocked(report: dict[str, tuple[str, str]], name: str) -> None:
    assert name in report, "the attempt was not made"
    verdict, detail = report[name]
    assert verdict == "blocked", detail


def test_the_whole_battery_ran(report: dict[str, tuple[str, str]]) -> None:
    assert len(report) == len(ATTEMPTS) >= 200


@pytest.fixture
async def pair(client: dsec.DSecClient) -> AsyncIterator[tuple[dsec.Sandbox, dsec.Sandbox]]:
    args = dsec.DSecContainerRunArgs(BASE, memory_limit_mb=256, labels={"test": "pair"})
    async with client.run_container(args) as one, client.run_container(args) as two:
        yield one, two


Pair = tuple[dsec.Sandbox, dsec.Sandbox]


@pytest.mark.parametrize("directory", ["/", "/tmp", "/var/tmp", "/dev/shm", "/root", "/run"])
async def test_files_of_one_are_not_the_others(pair: Pair, directory: str) -> None:
    one, two = pair
    await one.run_shell(f"echo secret > {directory}/left-here", check=True)
    seen = await two.run_shell(f"cat {directory}/left-here")
    assert seen.exit_code == 1 and seen.stdout == b""
    assert not await two.files.exists(f"{directory}/left-here")


async def test_a_changed_layer_file_changes_for_one_only(pair: Pair) -> None:
    one, two = pair
    before = (await two.run_shell("sha256sum /bin/ls /etc/passwd", check=True)).stdout
    await one.run_shell("echo pwned > /bin/ls; echo root2::0:0::/:/bin/sh >> /etc/passwd; rm -r /usr/share", check=True)
    assert (await two.run_shell("sha256sum /bin/ls /etc/passwd; test -d /usr/share", check=True)).stdout == before


async def test_processes_of_one_are_not_the_others(pair: Pair) -> None:
    one, two = pair
    process = await one.start(["sleep", "43210"])
    look = "cat /proc/[0-9]*/cmdline 2>/dev/null | tr '\\0' ' '"
    assert b"sleep 43210" in (await one.run_shell(look)).stdout
    assert b"sleep 43210" not in (await two.run_shell(look)).stdout
    await two.run_shell("kill -9 -1")
    assert (await one.exec(["true"])).ok
    infos = {info.exec_id: info.running for info in await one.processes()}
    assert infos[process.exec_id], "a kill in one sandbox reached a process of another"


async def test_networks_are_apart(pair: Pair) -> None:
    one, two = pair
    listen = (
        "import socket, time; s = socket.create_server(('0.0.0.0', 8080)); a = socket.socket(socket.AF_UNIX);"
        "a.bind('\\0abstract-name'); a.listen(); print('up', flush=True); time.sleep(600)"
    )
    process = await one.start(["python3", "-c", listen])
    async for event in process.events():
        assert isinstance(event, dsec.Stdout) and event.data == b"up\n"
        break
    connect = (
        "import socket\n"
        "for family, address in ((socket.AF_INET, ('127.0.0.1', 8080)), (socket.AF_UNIX, '\\0abstract-name')):\n"
        "    print(socket.socket(family).connect_ex(address))"
    )
    assert (await one.exec(["python3", "-c", connect])).stdout == b"0\n0\n"
    assert b"0" not in (await two.exec(["python3", "-c", connect])).stdout.split()


async def test_shared_memory_and_queues_are_apart(pair: Pair) -> None:
    one, two = pair
    make = "import ctypes; print(ctypes.CDLL(None).shmget(4711, 4096, 0o1666))"
    find = "import ctypes; print(ctypes.CDLL(None).shmget(4711, 4096, 0))"
    assert int((await one.exec(["python3", "-c", make], check=True)).stdout) >= 0
    assert int((await two.exec(["python3", "-c", find], check=True)).stdout) == -1


async def test_nothing_of_the_host_is_inside(pair: Pair, platform: Endpoint, tmp_path: Path) -> None:
    one, _ = pair
    names = "; ".join(
        f"ls -d {path}" for path in (platform.state, platform.run, tmp_path, Path(__file__), "/var/cache/dsec")
    )
    seen = await one.run_shell(names)
    assert seen.stdout == b""
    environment = (await one.run_shell("env", check=True)).stdout
    assert not {name for name in os.environ if name.startswith("DSEC_") and name.encode() in environment}
    mounts = (await one.run_shell("cat /proc/self/mountinfo", check=True)).stdout.decode()
    assert platform.state not in mounts and "/var/cache" not in mounts


async def test_id_ranges_are_apart(pair: Pair) -> None:
    """The same root inside is another user outside, for each sandbox, so that a shared file would still be foreign."""
    bases = set()
    for sandbox in pair:
        inside, outside, count = (await sandbox.run_shell("cat /proc/self/uid_map", check=True)).stdout.split()
        assert inside == b"0" and int(outside) >= 100_000 and int(count) >= 65_535
        bases.add(int(outside))
    assert len(bases) == 2


async def test_the_agent_is_not_slowed_by_what_commands_do_to_it(client: dsec.DSecClient) -> None:
    """After every signal, limit and priority trick, commands, files and output still work in the same sandbox."""
    async with client.run_container(battery.arguments(BASE)) as sandbox:
        await sandbox.run_shell("for n in $(seq 1 64); do kill -$n 1; done; renice -n 19 -p 1; ulimit -n 16; true")
        assert (await sandbox.run_shell("echo alive", check=True)).stdout == b"alive\n"
        await sandbox.files.write("/tmp/x", b"y" * 100_000)
        assert len(await sandbox.files.read("/tmp/x")) == 100_000
        await sandbox.run_shell("kill -STOP -1", timeout=5)
        assert (await sandbox.run_shell("echo still", check=True)).stdout == b"still\n"
