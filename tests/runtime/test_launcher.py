"""The launcher's verbs: what they answer, and what is there (and gone) afterwards."""

from __future__ import annotations

import errno
import os
import select
import signal
import socket
import time
from pathlib import Path

import pytest

from dsec.backends.runtime import runtime_path
from dsec.protocol.errors import ErrorKind, Fault
from dsec.protocol.link import Data, LinkClient
from tests.chaos.victims import slot_of
from tests.runtime.conftest import NAME, Start, alive, leftovers
from tests.runtime.driver import DEADLINE, MIB, Launcher, Refused, attack, run


async def test_a_command_runs_in_a_created_sandbox(launcher: Launcher) -> None:
    reply = launcher.create("sb-a", ("base", "top"))
    assert reply["pid"] > 1 and reply["start"] > 0 and reply["create_us"]["total"] > 0
    assert (await attack(launcher, "sb-a", "cat", "/on-top")) == "of the top"
    assert (await attack(launcher, "sb-a", "cat", "/hidden")) == "errno 2", "the whiteout hides the base's file"
    usage = launcher.call("stop", sandbox="sb-a")["usage"]
    assert usage["memory_peak"] > 0 and usage["cpu_ns"] > 0
    assert not Path(f"/proc/{reply['pid']}").exists()
    assert not launcher.socket_path("sb-a").exists()


async def test_layers_have_their_owners(launcher: Launcher) -> None:
    launcher.create("sb-a")
    assert (await attack(launcher, "sb-a", "cat", "/secret")) == "of root"
    assert (await attack(launcher, "sb-a", "cat", "/secret", user="user")) == "errno 13"
    written = await attack(launcher, "sb-a", "put", "/home/user/file", 1, user="user")
    assert written == "1 0"


@pytest.mark.parametrize(
    ("user", "found"), [("user", "home"), ("root", "root"), ("lost", "root"), ("out", "root"), ("4242", "root")]
)
async def test_without_a_directory_commands_and_files_start_at_home(launcher: Launcher, user: str, found: str) -> None:
    """At "/" when there is no home, or the user may not enter it."""
    launcher.create("sb-a")
    assert (await attack(launcher, "sb-a", "cat", "mark", user=user)) == found
    below = "errno 2" if found == "home" else "below"
    assert (await attack(launcher, "sb-a", "cat", "mark", user=user, cwd=b"sub")) == below
    client = await LinkClient.connect_unix(launcher.socket_path("sb-a"))
    try:
        stream = await client.open("fs.read", {"path": b"mark", "offset": 0, "length": None, "user": user})
        assert [item.data async for item in stream if isinstance(item, Data)] == [found.encode()]
    finally:
        await client.close()


async def test_writes_of_one_sandbox_are_not_anothers(launcher: Launcher) -> None:
    launcher.create("sb-a")
    launcher.create("sb-b")
    for path in ("/tmp/file", "/dev/shm/file", "/file"):
        assert (await attack(launcher, "sb-a", "put", path, 1)) == "1 0"
        assert (await attack(launcher, "sb-b", "cat", path)) == "errno 2"


def test_a_burst_is_answered_whole_with_a_small_pool(launcher: Launcher) -> None:
    asked = [launcher.ask_create(f"sb-{n}") for n in range(40)]
    pids = {launcher.reply(number)["pid"] for number in asked}
    assert len(pids) == 40
    users = {os.stat(f"/proc/{pid}/ns").st_uid for pid in pids}
    assert users == {0}, "not dumpable: its files belong to the host's root"
    mapped = {Path(f"/proc/{pid}/uid_map").read_text() for pid in pids}
    assert len(mapped) == 40, "every sandbox has ids of its own"
    for number in [launcher.send("stop", sandbox=f"sb-{n}") for n in range(40)]:
        launcher.reply(number)
    assert launcher.call("status")["live"] == 0


def test_slots_are_used_again(launcher: Launcher) -> None:
    seen = set()
    for n in range(20):
        pid = launcher.create(f"sb-{n}")["pid"]
        seen.add(Path(f"/proc/{pid}/uid_map").read_text())
        launcher.call("stop", sandbox=f"sb-{n}")
    assert len(seen) < 20


@pytest.mark.parametrize(
    ("fields", "stage", "number"),
    [
        ({"layers": ["base", "nowhere"]}, "layers", errno.ENOENT),
        ({"layers": []}, "request", errno.EINVAL),
        ({"sandbox": "../up"}, "request", errno.EINVAL),
        ({"socket": "/etc/sock"}, "request", errno.EINVAL),
        ({"hostname": "no/host"}, "request", errno.EINVAL),
    ],
)
def test_bad_requests_are_refused(launcher: Launcher, fields: dict[str, object], stage: str, number: int) -> None:
    wanted = {"sandbox": "sb-a", "layers": ["base"], "socket": str(launcher.socket_path("sb-a"))} | fields
    with pytest.raises(Refused) as refused:
        launcher.call("create", **wanted)
    assert (refused.value.stage, refused.value.errno) == (stage, number)
    launcher.create("sb-a")


def test_a_name_is_used_once(launcher: Launcher) -> None:
    launcher.create("sb-a")
    with pytest.raises(Refused) as refused:
        launcher.create("sb-a")
    assert refused.value.errno == errno.EEXIST


def test_malformed_messages_are_answered(launcher: Launcher) -> None:
    launcher.socket.send(b"\xc1 nonsense")
    with pytest.raises(Refused) as refused:
        launcher.reply(-1)
    assert refused.value.errno == errno.EPROTO
    launcher.call("status")


def test_unknown_sandboxes_are_named(launcher: Launcher) -> None:
    for verb in ("stop", "usage", "upper", "freeze", "reclaim", "prefetch", "kill"):
        with pytest.raises(Refused) as refused:
            launcher.call(verb, sandbox="sb-none")
        assert (refused.value.stage, refused.value.errno) == ("unknown", errno.ENOENT)


def test_a_stop_during_creation_undoes_it(launcher: Launcher) -> None:
    created = launcher.ask_create("sb-a")
    stopped = launcher.send("stop", sandbox="sb-a")
    launcher.reply(stopped)
    try:
        launcher.reply(created)
    except Refused as refused:
        assert refused.stage == "stopped"
    assert launcher.call("status")["live"] == 0
    assert not launcher.socket_path("sb-a").exists()


async def test_limits_hold(launcher: Launcher) -> None:
    launcher.create("sb-a", memory=64 * MIB, pids=20)
    forks = int(await attack(launcher, "sb-a", "forks"))
    assert forks < 20
    eaten = await run(launcher, "sb-a", "/attacker", "eat", "256")
    assert eaten.done.signal == "KILL"
    usage = launcher.call("usage", sandbox="sb-a")["usage"]
    assert usage["oom_kills"] >= 1 and usage["pids_hits"] >= 1 and usage["memory_peak"] <= 64 * MIB
    assert (await attack(launcher, "sb-a", "cat", "/hidden")) == "of the base", "it answers after both"


async def test_the_disk_limit_is_hard(launcher: Launcher, uppers: str) -> None:
    if uppers.startswith("dir:"):
        pytest.skip("plain directories are only watched")
    launcher.create("sb-a", disk=32 * MIB)
    taken, last = (await attack(launcher, "sb-a", "put", "/file", 100)).split()
    assert int(taken) <= 32 and int(last) == errno.EDQUOT
    taken, last = (await attack(launcher, "sb-a", "put", "/dev/shm/file", 100)).split()
    assert int(taken) <= 32 and int(last) == errno.EDQUOT, "shared memory counts against the same limit"
    assert 24 * MIB < launcher.call("usage", sandbox="sb-a")["usage"]["disk"] <= 32 * MIB


async def test_limits_are_those_of_this_creation(launcher: Launcher) -> None:
    for n, pids in enumerate((10, 30, 10)):
        launcher.create(f"sb-{n}", pids=pids)
        assert pids - 5 < int(await attack(launcher, f"sb-{n}", "forks")) < pids


def test_the_death_of_pid_1_is_told(launcher: Launcher) -> None:
    reply, fds = launcher.reply_with_fds(launcher.ask_create("sb-a"))
    [pidfd] = fds
    signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    event = launcher.event()
    assert (event["event"], event["sandbox"], event["status"]) == ("died", "sb-a", signal.SIGKILL)
    assert select.select([pidfd], [], [], DEADLINE)[0], "the pidfd in the reply is of PID 1"
    os.close(pidfd)
    assert launcher.call("stop", sandbox="sb-a")["usage"]["pids"] == 0
    assert not Path(f"/proc/{reply['pid']}").exists()


async def test_freeze_stops_and_thaw_continues(launcher: Launcher) -> None:
    pid = launcher.create("sb-a")["pid"]
    launcher.call("freeze", sandbox="sb-a")
    group = next(line.split("::")[1] for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines() if "::" in line)
    root = next(path for path in ("/sys/fs/cgroup/unified", "/sys/fs/cgroup") if Path(path + group).is_dir())
    assert "frozen 1" in Path(f"{root}{group}/cgroup.events").read_text()
    launcher.call("thaw", sandbox="sb-a")
    assert (await attack(launcher, "sb-a", "cat", "/hidden")) == "of the base"
    launcher.call("freeze", sandbox="sb-a")
    launcher.call("stop", sandbox="sb-a")


async def test_memory_of_a_frozen_sandbox_is_let_go(launcher: Launcher) -> None:
    launcher.create("sb-a")
    assert launcher.call("reclaim", sandbox="sb-a")["reclaimed"]["before"] == 0, "nothing before the first command"
    assert (await attack(launcher, "sb-a", "put", "/file", 16)) == "16 0"
    assert launcher.call("usage", sandbox="sb-a")["usage"]["memory"] > 16 * MIB, "pages of the file"
    launcher.call("freeze", sandbox="sb-a")
    reclaimed = launcher.call("reclaim", sandbox="sb-a")["reclaimed"]
    assert reclaimed["before"] > 16 * MIB > 4 * reclaimed["after"] >= 0
    launcher.call("thaw", sandbox="sb-a")
    launcher.call("prefetch", sandbox="sb-a")
    assert await attack(launcher, "sb-a", "cat", "/file") == "Z" * MIB  # as much as is kept of it


async def test_memory_on_the_move_holds_neither_thaw_nor_stop_up(launcher: Launcher) -> None:
    names = [f"sb-{n}" for n in range(8)]
    for name in names:
        launcher.create(name)
        await attack(launcher, name, "put", "/file", 8)
        launcher.call("freeze", sandbox=name)
    moving = [launcher.send("reclaim", sandbox=name) for name in names]  # more than there are threads
    ended = [launcher.send("thaw" if n % 2 else "stop", sandbox=name) for n, name in enumerate(names)]
    for number in (*moving, *ended):
        assert launcher.reply(number)["ok"]
    for name in names[1::2]:
        assert (await attack(launcher, name, "cat", "/hidden")) == "of the base"
    assert launcher.call("status")["live"] == 4


async def test_a_frozen_sandbox_that_is_stopped_answers_its_freeze(launcher: Launcher) -> None:
    launcher.create("sb-a")
    numbers = [launcher.send(verb, sandbox="sb-a") for verb in ("freeze", "stop")]
    started = time.monotonic()
    outcomes = []
    for number in numbers:
        try:
            outcomes.append(launcher.reply(number)["ok"])
        except Refused as refused:
            outcomes.append(refused.errno == errno.ESRCH)
    assert outcomes == [True, True] and time.monotonic() - started < 5


def test_the_upper_is_handed_out(launcher: Launcher) -> None:
    launcher.create("sb-a")
    _, fds = launcher.reply_with_fds(launcher.send("upper", sandbox="sb-a"))
    [upper] = fds
    try:
        assert os.listdir(upper) == []
    finally:
        os.close(upper)


def test_sandboxes_outlive_the_launcher_and_are_adopted(start: Start) -> None:
    first = start()
    kept, lost = first.create("sb-kept")["pid"], first.create("sb-lost")["pid"]
    first.process.kill()
    first.process.wait()
    first.socket_path("sb-nobodys").touch()
    second = start()
    removed = second.call("sweep", keep=["sb-kept"])["removed"]
    assert removed["sandboxes"] == 1
    assert alive(kept) and not alive(lost)
    names = {path.name for path in first.socket_path("sb-kept").parent.iterdir()}
    assert {name for name in names if not name.startswith(".")} == {"sb-kept.sock"}
    assert second.call("usage", sandbox="sb-kept")["usage"]["pids"] == 0
    fresh = second.create("sb-new")["pid"]
    assert Path(f"/proc/{fresh}/uid_map").read_text() != Path(f"/proc/{kept}/uid_map").read_text()
    second.call("stop", sandbox="sb-kept")
    assert not alive(kept)


async def test_groups_are_made_for_the_first_command(launcher: Launcher) -> None:
    launcher.create("sb-a")
    if launcher.call("status")["cgroup"] == "v2":
        pytest.skip("cgroup v2 has one group for all")
    assert launcher.call("usage", sandbox="sb-a")["usage"]["memory"] == 0
    before = set(Path(f"/sys/fs/cgroup/memory/dsec-{NAME}").glob("s*"))
    assert (await attack(launcher, "sb-a", "cat", "/hidden")) == "of the base"
    [made] = set(Path(f"/sys/fs/cgroup/memory/dsec-{NAME}").glob("s*")) - before
    assert (made / "memory.limit_in_bytes").read_text().strip() == str(256 * MIB)
    assert (await attack(launcher, "sb-a", "cat", "/hidden")) == "of the base"


KEPT = ("sb-idle", 64 * MIB, 1.0, 20, 64 * MIB)


@pytest.mark.parametrize("killed", [True, False], ids=["killed", "left"])
async def test_the_next_launcher_limits_what_had_no_command_yet(start: Start, killed: bool) -> None:
    first = start()
    first.create("sb-used")
    first.create("sb-idle", memory=64 * MIB, pids=20)
    assert (await attack(first, "sb-used", "cat", "/hidden")) == "of the base"
    if killed:
        first.process.kill()
    first.close()
    assert (await attack(first, "sb-used", "cat", "/hidden")) == "of the base", "it needs no launcher any more"
    second = start()
    assert second.call("keep", keep_with=[KEPT, ("sb-unknown", 1, 1.0, 1, 1)])["kept"] == ["sb-idle"]
    assert second.call("sweep")["removed"]["sandboxes"] == 1, "nobody has asked to keep the other"
    assert int(await attack(second, "sb-idle", "forks")) < 20
    assert (await run(second, "sb-idle", "/attacker", "eat", "256")).done.signal == "KILL"
    assert second.call("stop", sandbox="sb-idle")["usage"]["oom_kills"] >= 1


async def test_groups_that_a_launcher_made_and_could_not_hand_over_are_taken(start: Start) -> None:
    first = start()
    if first.call("status")["cgroup"] == "v2":
        pytest.skip("cgroup v2 has one group for all")
    first.create("sb-idle", memory=64 * MIB, pids=20)
    served = slot_of(first.socket_path("sb-idle"))
    assert served is not None
    first.process.kill()
    first.close()
    for hierarchy in ("memory", "cpu", "pids"):
        Path(f"/sys/fs/cgroup/{hierarchy}/dsec-{NAME}/s{served[0]}").mkdir()
    second = start()
    second.call("keep", keep_with=[KEPT])
    assert int(await attack(second, "sb-idle", "forks")) < 20
    second.call("stop", sandbox="sb-idle")


async def test_without_a_launcher_a_first_command_can_be_repeated(start: Start) -> None:
    first = start()
    if first.call("status")["cgroup"] == "v2":
        pytest.skip("cgroup v2 needs no answer of the launcher")
    first.create("sb-a")
    first.process.kill()
    first.process.wait()
    with pytest.raises(Fault, match="the launcher is gone") as caught:
        await attack(first, "sb-a", "cat", "/hidden")
    assert caught.value.body.kind is ErrorKind.CONNECTION_LOST and caught.value.body.retryable


def test_one_that_died_while_there_was_no_launcher_is_still_accounted_for(start: Start) -> None:
    first = start()
    _, [pidfd] = first.reply_with_fds(first.ask_create("sb-a"))
    first.process.kill()
    first.close()
    signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    assert select.select([pidfd], [], [], DEADLINE)[0]
    os.close(pidfd)
    second = start()
    second.call("keep", keep_with=[("sb-a", 64 * MIB, 1.0, 20, 64 * MIB)])
    second.call("sweep")
    assert second.call("stop", sandbox="sb-a")["usage"]["oom_kills"] == 0
    assert not second.socket_path("sb-a").exists()


def test_a_second_launcher_waits_for_the_first_to_leave(start: Start) -> None:
    first = start()
    first.create("sb-a")
    second = Launcher(first.runtime, first.run, first.uppers, first.name)
    try:
        asked = second.send("status")
        with pytest.raises(TimeoutError):
            second.receive(time.monotonic() + 0.3)
        first.close()
        assert second.reply(asked)["live"] == 1
        second.call("sweep", keep=[])
    finally:
        second.close()


async def test_who_asks_a_launcher_that_waits_for_the_next_is_not_kept_waiting(start: Start) -> None:
    """PID 1 asks for its groups at its first command; the next launcher comes, and gives them."""
    first = start()
    waiting = Launcher(first.runtime, first.run, first.uppers, first.name, ephemeral=True)
    first.create("sb-a")
    first.close()
    try:
        limits = ["sb-a", 256 * MIB, 1.0, 100, 64 * MIB]
        assert waiting.call("keep", keep_with=[limits])["kept"] == ["sb-a"]
        waiting.socket.shutdown(socket.SHUT_RDWR)
        assert waiting.socket.recv(1) == b"", "it has let go of the edge"
        with pytest.raises(Fault) as refused:
            await attack(waiting, "sb-a", "cat", "/hidden")
        assert refused.value.body.kind is ErrorKind.CONNECTION_LOST
        second = start()
        assert waiting.process.wait(DEADLINE) == 0
        assert second.call("keep", keep_with=[limits])["kept"] == ["sb-a"]
        assert (await attack(second, "sb-a", "cat", "/hidden")) == "of the base"
        second.call("stop", sandbox="sb-a")
    finally:
        waiting.close()


def test_a_damaged_image_is_made_anew(start: Start, uppers: str) -> None:
    if uppers.startswith("dir:"):
        pytest.skip("there is no image")
    first = start()
    first.create("sb-a")
    first.call("stop", sandbox="sb-a")
    first.close()
    image = uppers.split(":")[1]
    with open(image, "r+b") as file:
        file.seek(65536 + 0x100)
        file.write(os.urandom(2048))
    start().create("sb-a")


def test_a_file_that_is_no_image_is_left_alone(place: Path, images: dict[str, Path]) -> None:
    other = place / "precious"
    other.write_bytes(b"mine" * 300_000)
    launcher = Launcher(runtime_path(), place / "run", f"btrfs:{other}:{64 * MIB}", NAME)
    assert launcher.process.wait(DEADLINE) == 1
    launcher.socket.close()
    assert other.read_bytes() == b"mine" * 300_000
    assert leftovers(place) == []


def test_a_killed_launcher_leaves_only_sandboxes(start: Start, place: Path) -> None:
    """Its pool ends with it: PID 1s that wait to be born find their sockets closed."""
    first = start()
    pid = first.create("sb-a")["pid"]
    first.process.kill()
    first.process.wait()
    second = start()
    assert second.call("sweep", keep=[])["removed"]["sandboxes"] == 1
    assert not alive(pid)
    names = {name.split(".")[1] for name in os.listdir(place / "run/sb") if name.startswith(".s")}
    groups = {path.name for path in Path("/sys/fs/cgroup").glob(f"*/dsec-{NAME}/s*")}
    second.call("status")
    assert names <= groups, "every socket left is of a slot of the new launcher's pool"
