"""Processes of the platform die, or stand in each other's way: what becomes of sandboxes, and that nothing stays behind."""

from __future__ import annotations

import asyncio
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from dsec import DSecClient, DSecContainerRunArgs, Exit, Process, Sandbox, SandboxUnavailable, State
from dsec.cluster import embedded
from dsec.protocol.errors import ErrorKind, Fault
from tests.chaos.victims import slot_of

from .conftest import BASE
from .leftovers import traces

pytestmark = pytest.mark.e2e
ARGS = DSecContainerRunArgs(container_image=BASE)
DEADLINE = 30.0


@pytest.fixture
def states() -> Iterator[list[Path]]:
    """Two state directories, whose platforms are ended and leave nothing."""
    made = [Path(tempfile.mkdtemp(prefix="dsec-", dir="/var/tmp")) for _ in range(2)]
    yield made
    for state in made:
        embedded.down(state)
        shutil.rmtree(state)
        assert_nothing_is_left(state)


def assert_nothing_is_left(state: Path) -> None:
    """Of the platform of this state directory; others may live beside it."""
    name, found = embedded._edge_name(state), traces()
    assert not state.exists()
    assert not [group for group in found.cgroups if group.endswith(f"dsec-{name}")]
    assert not [line for line in (*found.loops, *found.processes) if str(state) in line]


def client_of(endpoint: embedded.Endpoint) -> DSecClient:
    return DSecClient(endpoint.url, Path(endpoint.key_file).read_text().strip())


def pid_of(state: Path, role: str) -> int:
    [pid] = [process.pid for process in embedded.status(state).processes if process.role == role]
    assert pid is not None
    return pid


def kill(pid: int) -> None:
    """SIGKILL, and wait until it is gone."""
    pidfd = os.pidfd_open(pid)
    try:
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        assert select.select([pidfd], [], [], DEADLINE)[0]
    finally:
        os.close(pidfd)


def launcher_of(edge: int) -> int:
    children = Path(f"/proc/{edge}/task/{edge}/children").read_text().split()
    [launcher] = [int(pid) for pid in children if b"launcher" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    return launcher


def zygote_of(edge: int) -> int:
    launcher = launcher_of(edge)
    children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
    [zygote] = [int(pid) for pid in children if len(nspid(pid)) == 1]
    return zygote


def nspid(pid: str) -> list[str]:
    """Its numbers in every pid namespace that it is in: a PID 1 has two."""
    return Path(f"/proc/{pid}/status").read_text().partition("NSpid:")[2].partition("\n")[0].split()


def aether_of(state: Path, sandbox: Sandbox) -> int:
    served = slot_of(embedded.run_dir(state) / "sb" / f"{sandbox.id}.sock")
    assert served is not None
    return served[1]


async def until_started(sandbox: Sandbox) -> None:
    async with asyncio.timeout(DEADLINE):
        while not [one for one in await sandbox.processes() if one.running and b"sleep" in b" ".join(one.argv)]:
            await asyncio.sleep(0.02)


async def test_platforms_of_two_state_directories_leave_each_other_alone(states: list[Path]) -> None:
    async with client_of(embedded.up(states[0], port=0)) as one:
        sandbox = await one.run(ARGS)
        async with client_of(embedded.up(states[1], port=0)) as two, two.run(ARGS) as other:
            assert (await other.run_shell("echo two")).text == "two\n"
            assert (await sandbox.run_shell("echo one")).text == "one\n"
        embedded.down(states[1])
        assert (await sandbox.run_shell("echo one")).text == "one\n"
        assert (await (await one.run(ARGS)).run_shell("echo new")).text == "new\n"


async def test_down_removes_what_a_crashed_edge_left(states: list[Path]) -> None:
    async with client_of(embedded.up(states[0], port=0)) as client:
        await client.run(ARGS)
    kill(pid_of(states[0], "edge"))
    embedded.down(states[0])
    assert not embedded.status(states[0]).running
    assert not [group for group in traces().cgroups if group.endswith(embedded._edge_name(states[0]))]


async def test_a_private_platform_whose_edge_crashed_leaves_nothing() -> None:
    with embedded.private() as endpoint:
        async with client_of(endpoint) as client:
            await client.run(ARGS)
        kill(pid_of(Path(endpoint.state), "edge"))
    assert_nothing_is_left(Path(endpoint.state))


async def test_sandboxes_outlive_the_launcher_and_the_zygote(states: list[Path]) -> None:
    async with client_of(embedded.up(states[0], port=0)) as client:
        sandbox, idle = await client.run(ARGS), await client.run(ARGS)
        running = asyncio.create_task(sandbox.run_shell("echo begun; sleep 1; echo on; exit 3"))
        await until_started(sandbox)
        for victim in (launcher_of, zygote_of):
            kill(victim(pid_of(states[0], "edge")))
            async with client.run(ARGS) as next_one:
                assert (await next_one.run_shell("echo new")).text == "new\n"
        ended = await running
        assert (ended.exit_code, ended.text) == (3, "begun\non\n")
        assert (await idle.run_shell("echo first")).text == "first\n", "its limits come from the launcher of now"
        assert (await idle.info()).usage.memory_peak_bytes > 0


async def test_sandboxes_and_commands_outlive_the_edge(states: list[Path]) -> None:
    args = DSecContainerRunArgs(container_image=BASE, labels={"job": "j"}, idempotency_key="key")
    async with client_of(embedded.up(states[0], port=0)) as client:
        sandbox = await client.run(args)
        process = await sandbox.start("for i in 1 2 3 4 5 6; do echo $i; sleep 0.2; done; exit 7")
        running = asyncio.create_task(sandbox.run_shell("echo begun; sleep 1; echo on; exit 3"))
        await until_started(sandbox)
        before = await sandbox.info()
        kill(pid_of(states[0], "edge"))
        after = await sandbox.info()
        assert msgspec.structs.replace(after, usage=before.usage) == before
        ended = await running
        assert (ended.exit_code, ended.text) == (3, "begun\non\n")
        assert ((await process.wait()).exit_code, (await process.wait()).text) == (7, "1\n2\n3\n4\n5\n6\n")
        assert (await client.run(args)).id == sandbox.id, "the same key is the same sandbox"
        await sandbox.stop()


async def test_names_of_services_go_with_the_edge_that_gave_them(states: list[Path]) -> None:
    endpoint = embedded.up(states[0], port=0)
    async with client_of(endpoint) as client:
        running, paused = await client.run(ARGS), await client.run(ARGS)
        before = await running.files.read("/etc/hosts")
        caller = await asyncio.create_subprocess_exec(
            sys.executable, "-c", EXPOSE, endpoint.url, endpoint.key_file, running.id, paused.id, stdout=subprocess.PIPE
        )
        assert caller.stdout is not None and await caller.stdout.readline() == b"exposed\n"
        assert b"gone" in await running.files.read("/etc/hosts")
        await paused.pause()
        caller.send_signal(signal.SIGSTOP)  # so that nobody takes the names back, or gives them anew
        kill(pid_of(states[0], "edge"))
        caller.kill()
        await caller.wait()
        async with asyncio.timeout(DEADLINE):
            while await running.files.read("/etc/hosts") != before:
                await asyncio.sleep(0.02)
            assert (await paused.info()).state is State.PAUSED
            await paused.resume()
            while await paused.files.read("/etc/hosts") != before:
                await asyncio.sleep(0.02)
        assert (await running.changes()).changes == () == (await paused.changes()).changes


EXPOSE = """
import asyncio, sys, dsec
async def main(url, key, *ids):
    async with dsec.DSecClient(url, open(key).read().strip()) as client:
        one, two = [await client.attach(id) for id in ids]
        async with one.expose("http://127.0.0.1:9", name="gone"), two.expose("http://127.0.0.1:9", name="gone"):
            print("exposed", flush=True)
            await asyncio.Event().wait()
asyncio.run(main(*sys.argv[1:]))
"""


async def test_a_paused_sandbox_stays_so_whoever_dies(states: list[Path]) -> None:
    endpoint = embedded.up(states[0], port=0)
    async with client_of(endpoint) as client:
        sandbox = await client.run(ARGS)
        process = await sandbox.start("until [ -e /go ]; do sleep 0.02; done; echo on; exit 7", timeout=60)
        await sandbox.pause()
        kill(launcher_of(pid_of(states[0], "edge")))
        async with client.run(ARGS):
            pass  # there is a launcher again
        assert (await sandbox.info()).state is State.PAUSED
        kill(pid_of(states[0], "edge"))
        assert (await sandbox.info()).state is State.PAUSED
        await sandbox.files.write("/go", b"")
        assert (await sandbox.info()).state is State.RUNNING
        ended = await process.wait()
        assert (ended.exit_code, ended.text) == (7, "on\n")
        await sandbox.pause()
        kill(pid_of(states[0], "edge"))
        await sandbox.stop()
        assert (await sandbox.info()).state is State.STOPPED


async def test_a_death_is_told_by_its_name(states: list[Path]) -> None:
    async with client_of(embedded.up(states[0], port=0)) as client:
        one, other = await client.run(ARGS), await client.run(ARGS)
        running = asyncio.create_task(one.run_shell("sleep 60"))
        await until_started(one)
        kill(aether_of(states[0], one))
        with pytest.raises(SandboxUnavailable) as caught:
            await running
        assert caught.value.reason == "agent_lost" and not caught.value.reward_valid
        aether = aether_of(states[0], other)
        kill(pid_of(states[0], "edge"))
        kill(aether)
        with pytest.raises(SandboxUnavailable) as caught:
            await other.run_shell("true")
        assert caught.value.reason == "agent_lost"
        assert (await other.info()).state is State.STOPPED


async def test_clients_ride_through_the_restart_of_apiserver_and_edge(states: list[Path]) -> None:
    async with client_of(embedded.up(states[0], port=0)) as client:
        sandbox = await client.run(ARGS)
        for victim in ("apiserver", "edge"):
            streaming = asyncio.create_task(all_of(await sandbox.start("seq 1 20000; sleep 1; seq 1 20000; exit 9")))
            running = asyncio.create_task(sandbox.run_shell("echo x >> /once; sleep 1; wc -l < /once; exit 4"))
            await until_started(sandbox)
            kill(pid_of(states[0], victim))
            making = asyncio.ensure_future(client.run(ARGS))
            await sandbox.files.write("/file", victim)
            assert await sandbox.files.read_text("/file") == victim
            ended = await running
            assert (ended.exit_code, ended.text) == (4, "1\n"), "it ran once"
            assert await streaming == (9, 2 * b"".join(b"%d\n" % n for n in range(1, 20_001)))
            await (await making).stop()
            await sandbox.files.remove("/once")


async def all_of(process: Process) -> tuple[int, bytes]:
    """Exit code and standard output, as they stream."""
    seen = b""
    async for event in process.events():
        if isinstance(event, Exit):
            return event.result.exit_code, seen
        seen += event.data
    raise AssertionError("no end")


def edge_option(state: Path, option: str) -> str:
    words = Path(f"/proc/{pid_of(state, 'edge')}/cmdline").read_bytes().decode().split("\0")
    return words[words.index(option) + 1]


def test_another_supervisor_starts_an_edge_with_the_options_of_before(
    states: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DSEC_STORE", raising=False)
    store = states[0] / "layers"
    embedded.up(states[0], port=0, max_sandboxes=7, store=store, uppers="dir")

    def after_a_crash(**given: int) -> tuple[str, str, str]:
        supervisor = embedded.status(states[0]).supervisor
        assert supervisor is not None
        kill(supervisor)
        kill(pid_of(states[0], "edge"))
        embedded.up(states[0], port=0, **given)  # type: ignore[arg-type]
        embedded.up(states[0])  # when it returns, all that was being started again is there
        return tuple(edge_option(states[0], one) for one in ("--max-sandboxes", "--store", "--uppers"))  # type: ignore[return-value]

    assert after_a_crash() == ("7", str(store), "dir")
    assert after_a_crash(max_sandboxes=9) == ("9", str(store), "dir"), "what is given, and only that, is another"
    assert after_a_crash() == ("9", str(store), "dir")
    embedded.down(states[0])
    embedded.up(states[0], port=0, uppers="dir")
    assert edge_option(states[0], "--store") == str(embedded.DEFAULT_STORE), "`down` forgets them"


async def test_the_death_of_the_supervisor_ends_nothing_and_the_next_up_takes_over(states: list[Path]) -> None:
    endpoint = embedded.up(states[0], port=0)
    async with client_of(endpoint) as client:
        sandbox = await client.run(ARGS)
        supervisor = embedded.status(states[0]).supervisor
        assert supervisor is not None
        kill(supervisor)
        assert embedded.status(states[0]).running and embedded.status(states[0]).supervisor is None
        assert (await sandbox.run_shell("echo on")).text == "on\n"
        edge = pid_of(states[0], "edge")
        assert embedded.up(states[0], port=0) == endpoint, "clients know where it answers"
        assert pid_of(states[0], "edge") == edge
        kill(edge)
        assert (await sandbox.run_shell("echo on")).text == "on\n"
        assert pid_of(states[0], "edge") != edge


def test_nothing_leaks_when_all_die_at_once(states: list[Path]) -> None:
    async def begin() -> None:
        async with client_of(embedded.up(states[0], port=0)) as client:
            await client.run(ARGS)

    asyncio.run(begin())
    supervisor = embedded.status(states[0]).supervisor
    assert supervisor is not None
    edge = pid_of(states[0], "edge")
    for pid in (supervisor, launcher_of(edge), edge, pid_of(states[0], "apiserver")):
        kill(pid)
    embedded.down(states[0])
    assert not [group for group in traces().cgroups if group.endswith(embedded._edge_name(states[0]))]


def test_a_private_platform_ends_with_its_owner_also_when_its_edge_is_dead() -> None:
    """The owner, the edge and the supervisor die together: nobody is left but the launcher."""
    script = """
import asyncio, os, sys, dsec
from dsec.cluster import embedded
from tests.e2e.test_crashes import ARGS, client_of, kill, pid_of
from pathlib import Path

async def begin(endpoint):
    async with client_of(endpoint) as client:
        await client.run(ARGS)

with embedded.private() as endpoint:
    asyncio.run(begin(endpoint))
    state = Path(endpoint.state)
    print(state, flush=True)
    if sys.argv[1] == "all":
        kill(embedded.status(state).supervisor)
    kill(pid_of(state, "edge"))
    os.kill(os.getpid(), 9)
"""
    for who in ("edge", "all"):
        said = subprocess.run([sys.executable, "-c", script, who], stdout=subprocess.PIPE, text=True, check=False)
        state = Path(said.stdout.strip())
        deadline = time.monotonic() + DEADLINE
        while has_traces(state) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not has_traces(state)
        shutil.rmtree(state, ignore_errors=True)  # of "all": nobody is left who would


def has_traces(state: Path) -> list[str]:
    name, found = embedded._edge_name(state), traces()
    groups = [group for group in found.cgroups if group.endswith(f"dsec-{name}")]
    return groups + [line for line in (*found.loops, *found.processes) if str(state) in line]


def test_a_port_that_is_taken_leaves_nothing_running(states: list[Path]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        with pytest.raises(Fault) as caught:
            embedded.up(states[0], port=taken.getsockname()[1])
    assert caught.value.body.kind is ErrorKind.CONFLICT and "--port" in caught.value.body.hint
    assert [process.pid for process in embedded.status(states[0]).processes] == [None, None]


def test_a_private_platform_is_never_somebody_elses(states: list[Path]) -> None:
    embedded.up(states[0], port=0)
    with pytest.raises(Fault) as caught, embedded.private(states[0]):
        pass
    assert caught.value.body.kind is ErrorKind.CONFLICT
    assert embedded.status(states[0]).running


async def test_a_state_directory_with_a_long_name(states: list[Path]) -> None:
    deep = states[0] / ("d" * 100)
    async with client_of(embedded.up(deep, port=0)) as client, client.run(ARGS) as sandbox:
        assert (await sandbox.run_shell("echo deep")).text == "deep\n"
        assert embedded.run_dir(deep).parent == Path("/run")
    embedded.down(deep)
    assert not embedded.run_dir(deep).exists()
