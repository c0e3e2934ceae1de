"""Every method of the SDK on real sandboxes."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

import dsec
import dsec.sync
from dsec import (
    CapacityError,
    ChangeKind,
    CommandFailed,
    ConnectionLost,
    DSecClient,
    DSecContainerRunArgs,
    Exit,
    FileKind,
    InvalidRequest,
    NotFound,
    Reason,
    Sandbox,
    SandboxUnavailable,
    State,
    Stderr,
    Stdout,
)
from dsec.cluster import embedded

from .conftest import BASE

pytestmark = pytest.mark.e2e
ARGS = DSecContainerRunArgs(container_image=BASE)
ODD = b"a b\n\xff\xc3"


async def no_sandbox_left(client: DSecClient, labels: dict[str, str]) -> bool:
    return [info async for info in client.list(labels=labels, states=["creating", "running", "stopping"])] == []


# -- creation ----------------------------------------------------------------------------------------------------------


async def test_the_minimal_session(platform: embedded.Endpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the report has it, with the key found and not asked for."""
    monkeypatch.setenv("DSEC_STATE", platform.state)
    client = DSecClient()
    await client.open()
    args = DSecContainerRunArgs(
        container_image=BASE,
        memory_limit_mb=2048,
        cpu_cores_limit=2,
        ttl_running_stop=600,
        network_rules={"pypi": True, "npm": False},
        init_user="root",
    )
    sandbox = await client.run_container(args, timeout=120)
    result = await sandbox.run_shell("echo hello; id -un")
    assert result.text == "hello\nroot\n" and result.ok
    info = await sandbox.info()
    assert info.limits.memory_mb == 2048 and info.limits.cpu_cores == 2
    assert info.network.rules == {"pypi": True, "npm": False}
    assert "refused" in info.network.enforced["pypi"], "without a mirror access is refused, and info says why"
    refused = await sandbox.run_shell("exec 3<>/dev/tcp/1.1.1.1/443", timeout=20)
    assert not refused.ok and refused.timed_out is None, "refused at once, not after a time-out"
    await sandbox.stop()
    assert (await sandbox.info()).reason is Reason.USER
    await client.close()


async def test_run_attach_and_their_blocks(client: DSecClient) -> None:
    async with client.run(ARGS) as sandbox:
        async with client.attach(sandbox.id) as same:
            assert same.id == sandbox.id and same.incarnation == sandbox.incarnation
        assert (await sandbox.info()).state is State.RUNNING
    ended = await sandbox.info()
    assert (ended.state, ended.reason) == (State.STOPPED, Reason.USER)
    with pytest.raises(SandboxUnavailable) as caught:
        await sandbox.run_shell("true")
    assert caught.value.reason == "user" and caught.value.reward_valid is False
    await sandbox.stop()
    with pytest.raises(NotFound):
        await client.attach("sb-nowhere-000000000000")


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"container_image": "no-such-image@1"}, "no-such-image"),
        ({"layers": ("no-such-layer@1",)}, "no-such-layer"),
        ({"container_image": "../../etc/passwd"}, "etc/passwd"),
        ({"memory_limit_mb": 1}, "memory_limit_mb"),
        ({"memory_limit_mb": 10**9}, "memory_limit_mb"),
        ({"cpu_cores_limit": -1}, "cpu_cores_limit"),
        ({"pids_limit": 0}, "pids_limit"),
        ({"disk_limit_mb": 0}, "disk_limit_mb"),
        ({"ttl_running_stop": 0}, "ttl_running_stop"),
        ({"workdir": "relative"}, "workdir"),
        ({"init_user": "nobody-of-this-name"}, "nobody-of-this-name"),
        ({"env": {"A=B": "c"}}, "env"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_bad_arguments_are_named(client: DSecClient, change: dict[str, object], named: str) -> None:
    labels = {"bad": named}
    fields = {"container_image": BASE, "labels": labels, **change}
    with pytest.raises(dsec.DSecError, match=named) as caught:
        async with client.run(DSecContainerRunArgs(**fields)) as sandbox:  # type: ignore[arg-type]
            await sandbox.run_shell("true")  # whether a user exists is known inside only
    assert not isinstance(caught.value, dsec.InternalError)
    assert await no_sandbox_left(client, labels)


async def test_one_key_is_one_sandbox(client: DSecClient) -> None:
    args = DSecContainerRunArgs(container_image=BASE, idempotency_key="e2e-key")
    first, second = await asyncio.gather(client.run(args), client.run(args))  # type: ignore[call-overload]
    assert first.id == second.id
    await first.stop()


async def test_two_hundred_at_once(client: DSecClient) -> None:
    labels = {"burst": "200"}
    async with client.run_many(DSecContainerRunArgs(container_image=BASE, labels=labels), count=200) as burst:
        outcomes = [outcome async for outcome in burst]
        assert [outcome.error for outcome in outcomes if outcome.error] == []
        assert (
            len({outcome.index for outcome in outcomes}) == len({o._sandbox.id for o in outcomes if o._sandbox}) == 200
        )
        kept = outcomes[0].sandbox
        assert (await kept.run_shell("echo ok")).text == "ok\n"
    assert [info.id async for info in client.list(labels=labels, states=["running"])] == [kept.id]
    assert await client.stop_many(labels=labels) == 1
    assert await no_sandbox_left(client, labels)


async def test_leaving_a_burst_early(client: DSecClient) -> None:
    labels = {"burst": "early"}
    async with client.run_many(DSecContainerRunArgs(container_image=BASE, labels=labels), count=60) as burst:
        first = (await anext(burst)).sandbox
    assert [info.id async for info in client.list(labels=labels, states=["running", "creating"])] == [first.id]
    await first.stop()


async def test_a_limit_names_itself_and_its_holders(tmp_path: Path) -> None:
    with embedded.private(max_sandboxes=100) as endpoint:
        async with DSecClient(endpoint.url, Path(endpoint.key_file).read_text().strip()) as client:
            args = DSecContainerRunArgs(container_image=BASE, labels={"team": "red"})
            async with client.run_many(args, count=200) as burst:
                outcomes = [outcome async for outcome in burst]
            errors = [outcome.error for outcome in outcomes if outcome.error is not None]
            assert len(outcomes) == 200 and len(errors) == 100
            for error in errors:
                assert isinstance(error, CapacityError)
                assert (
                    error.limit == "max_sandboxes" and error.holders == {"team=red": 100} and "team=red" in str(error)
                )


async def test_embedded_ends_with_its_block() -> None:
    async with dsec.embedded() as client:
        sandbox = await client.run(ARGS)
        assert (await sandbox.run_shell("echo in")).text == "in\n"
    with pytest.raises(ConnectionLost):
        async with DSecClient(client._transport._endpoint.url, "k" * 20, request_timeout=2):  # type: ignore[union-attr]
            pass


# -- commands ----------------------------------------------------------------------------------------------------------


async def test_exec_and_run_shell(sandbox: Sandbox) -> None:
    result = await sandbox.exec(["sh", "-c", 'printf "%s" "$1"; echo err >&2; exit 7', "sh", b"\xff x"])
    assert (result.exit_code, result.stdout, result.stderr, result.ok) == (7, b"\xff x", b"err\n", False)
    with pytest.raises(CommandFailed, match="exited with 7"):
        result.check()
    assert (await sandbox.exec(["no-such-program"])).exit_code == 127
    assert (await sandbox.exec(["/etc/passwd"])).exit_code == 126
    killed = await sandbox.run_shell("kill -9 $$")
    assert (killed.exit_code, killed.signal) == (137, "KILL")
    assert (await sandbox.run_shell("pwd; echo $X; id -un", cwd="/tmp", env={"X": "y z"}, user="nobody")).text == (
        "/tmp\ny z\nnobody\n"
    )
    with pytest.raises(FileNotFoundError, match="missing"):
        await sandbox.run_shell("true", cwd="/missing")
    with pytest.raises(dsec.DSecError, match="no-such-user"):
        await sandbox.run_shell("true", user="no-such-user")
    with pytest.raises(InvalidRequest):
        await sandbox.exec([])
    with pytest.raises(InvalidRequest, match="NUL"):
        await sandbox.exec(["echo", "a\0b"])


async def test_stdin_of_every_size(sandbox: Sandbox) -> None:
    assert (await sandbox.exec(["cat"])).stdout == b""
    assert (await sandbox.exec(["cat"], stdin="text")).text == "text"
    data = os.urandom(5_000_000)
    result = await sandbox.exec(["cat"], stdin=data, timeout=60)
    assert result.stdout == data
    assert (await sandbox.exec(["head", "-c", "3"], stdin=data, timeout=60)).stdout == data[:3], (
        "a reader that leaves early"
    )


async def test_deadlines(sandbox: Sandbox) -> None:
    started = time.monotonic()
    result = await sandbox.run_shell("echo before; sleep 60 & exec sleep 61", timeout=0.5)
    assert (result.timed_out, result.exit_code, result.signal, result.text) == ("deadline", 137, "KILL", "before\n")
    idle = await sandbox.run_shell("echo x; sleep 60", idle_timeout=0.5)
    assert idle.timed_out == "idle"
    assert time.monotonic() - started < 20
    assert (await sandbox.run_shell("pgrep -x sleep")).text == "", "the whole tree is gone"
    with pytest.raises(TimeoutError):
        await sandbox.run_shell("sleep 60", timeout=0.2, check=True)


async def test_output_limits_and_merging(sandbox: Sandbox) -> None:
    result = await sandbox.run_shell("head -c 3000000 /dev/zero; echo end >&2", max_output_bytes=1_000_000)
    assert len(result.stdout) == 1_000_000 and result.stdout_truncated and result.stdout_bytes == 3_000_000
    assert (result.stderr, result.stderr_truncated) == (b"end\n", False)
    whole = await sandbox.run_shell("head -c 12000000 /dev/zero")
    assert len(whole.stdout) == 12_000_000 and not whole.stdout_truncated
    assert (await sandbox.run_shell("echo a; echo b >&2", merge_stderr=True)).stdout == b"a\nb\n"


async def test_a_background_child_holds_nothing(sandbox: Sandbox) -> None:
    started = time.monotonic()
    assert (await sandbox.run_shell("sleep 30 & echo done")).text == "done\n"
    assert time.monotonic() - started < 10


async def test_the_same_exec_id_runs_once(sandbox: Sandbox) -> None:
    line = "echo x >> /tmp/once; wc -l < /tmp/once"
    first, second = await asyncio.gather(*(sandbox.run_shell(line, exec_id="once") for _ in range(2)))
    third = await sandbox.run_shell(line, exec_id="once")
    assert first.text.strip() == second.text.strip() == third.text.strip() == "1"


async def test_start_events_write_signal_wait(sandbox: Sandbox) -> None:
    process = await sandbox.start("cat; echo end >&2", stdin=True)
    events = process.events()
    await process.write("one")
    assert await anext(events) == Stdout(b"one", 0)
    await process.write(b"two")
    await process.close_stdin()
    rest = [event async for event in events]
    assert b"".join(e.data for e in rest if isinstance(e, Stdout)) == b"two"
    assert Stderr(b"end\n", 6) in rest
    assert isinstance(rest[-1], Exit) and rest[-1].result.exit_code == 0
    again = [event async for event in process.events(cursor=4)]
    assert b"".join(e.data for e in again if isinstance(e, Stdout)) == b"wo"
    assert (await process.wait()).stdout == b"onetwo"

    sleeper = await sandbox.start(["sleep", "60"])
    listed = {info.exec_id: info for info in await sandbox.processes()}
    assert listed[sleeper.exec_id].running and listed[sleeper.exec_id].detached
    assert listed[sleeper.exec_id].argv == (b"sleep", b"60")
    found = await sandbox.process(sleeper.exec_id)
    await found.signal("TERM")
    assert (await sleeper.wait()).signal == "TERM"
    with pytest.raises(NotFound):
        await sandbox.process("nobody")


async def test_out_of_memory_is_typed_and_survived(client: DSecClient) -> None:
    args = DSecContainerRunArgs(container_image=BASE, memory_limit_mb=64)
    async with client.run(args) as sandbox:
        result = await sandbox.exec(["python3", "-c", "x = bytearray(400 << 20)"])
        assert (result.signal, result.reason) == ("KILL", "oom") and "64" in result.detail
        result = await sandbox.run_shell("python3 -c 'x = bytearray(400 << 20)'; exit $?")
        assert (result.exit_code, result.reason) == (137, "oom"), "a shell tells of its child's end"
        assert (await sandbox.run_shell("exit 137")).reason is None
        killed = await sandbox.start(["python3", "-c", "x = bytearray(400 << 20)"])
        assert [(await killed.wait()).reason for _ in range(2)] == ["oom"] * 2, "asked again, told the same"
        await sandbox.run_shell("python3 -c 'x = bytearray(400 << 20)'; true")
        sleeper = await sandbox.start("sleep 60")
        await sleeper.signal("KILL")
        assert (await sleeper.wait()).reason is None, "the caller killed it, not the limit that hit another before"
        assert (await sandbox.run_shell("echo alive")).text == "alive\n"


# -- files -------------------------------------------------------------------------------------------------------------


async def test_files(sandbox: Sandbox) -> None:
    files, data = sandbox.files, os.urandom(2_000_000)
    assert await files.write(b"/w/" + ODD, data, mode=0o600, owner="nobody") == len(data)
    assert await files.read(b"/w/" + ODD) == data
    assert await files.read(b"/w/" + ODD, offset=5, length=7) == data[5:12]
    info = await files.stat(b"/w/" + ODD)
    assert (info.kind, info.size, info.mode, info.uid) == (FileKind.FILE, len(data), 0o600, 65534)
    assert [entry.path for entry in await files.list("/w")] == [b"/w/" + ODD]
    assert (await sandbox.run_shell("sha256sum < \"$(printf '/w/a b\\n\\xff\\xc3')\"")).ok
    await files.write("/w/t", "héllo")
    assert await files.read_text("/w/t") == "héllo"
    await files.mkdir("/w/deep/er")
    assert len(await files.list("/w", depth=2)) == 4
    await files.move("/w/t", "/w/deep/t")
    assert await files.exists("/w/deep/t") and not await files.exists("/w/t")
    await files.remove("/w/deep", recursive=True)
    assert not await files.exists("/w/deep")

    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(64):
            yield bytes(1 << 20)

    assert await files.write("/w/big", pieces()) == 64 << 20
    size = 0
    async for chunk in files.stream("/w/big"):
        size += len(chunk)
    assert size == 64 << 20


async def test_file_errors_are_typed(sandbox: Sandbox) -> None:
    files = sandbox.files
    with pytest.raises(FileNotFoundError):
        await files.read("/missing")
    with pytest.raises(IsADirectoryError):
        await files.read("/etc")
    with pytest.raises(IsADirectoryError):
        await files.write("/etc", b"")
    with pytest.raises(NotADirectoryError):
        await files.list("/etc/passwd")
    with pytest.raises(FileExistsError):
        await files.mkdir("/etc", parents=False)
    with pytest.raises(OSError):
        await files.remove("/etc")
    await sandbox.run_shell("mkfifo /tmp/fifo; ln -s /etc/shadow /tmp/link")
    with pytest.raises(dsec.FileError):
        await files.read("/tmp/fifo")
    assert (await files.stat("/tmp/link", follow=False)).target == b"/etc/shadow"
    assert (await files.read("/tmp/link")) == (await files.read("/etc/shadow")), "links lead to the sandbox's own files"


async def test_a_full_disk_is_typed(client: DSecClient) -> None:
    async with client.run(DSecContainerRunArgs(container_image=BASE, disk_limit_mb=20)) as sandbox:
        with pytest.raises(dsec.NoSpace):
            await sandbox.files.write("/big", bytes(64 << 20))
        assert (await sandbox.run_shell("echo alive")).ok


async def test_upload_and_download(sandbox: Sandbox, tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "sub").mkdir(parents=True)
    (source / "sub" / "run.sh").write_text("#!/bin/sh\necho ran\n")
    (source / "sub" / "run.sh").chmod(0o755)
    Path(os.fsdecode(os.fsencode(source) + b"/" + ODD)).write_bytes(b"odd")
    (source / "link").symlink_to("sub/run.sh")
    await sandbox.files.upload(source, "/up/here")
    assert (await sandbox.run_shell("/up/here/link")).text == "ran\n"
    assert (await sandbox.files.stat("/up/here/sub/run.sh")).uid == 0
    await sandbox.run_shell("ln -s /etc/passwd /up/here/out; mkfifo /up/here/fifo")
    result = await sandbox.files.download("/up/here", tmp_path / "back")
    assert result.files == 2 and {"out"} <= set(result.skipped) <= {"out", "fifo"}
    assert sorted(os.listdir(os.fsencode(tmp_path / "back"))) == sorted(os.listdir(os.fsencode(source)))
    assert os.access(tmp_path / "back" / "sub" / "run.sh", os.X_OK)
    await sandbox.files.upload(source / "sub" / "run.sh", "/one/file")
    assert (await sandbox.files.stat("/one/file")).mode == 0o755
    await sandbox.files.download("/one/file", tmp_path / "file")
    assert (tmp_path / "file").read_text() == "#!/bin/sh\necho ran\n"


async def test_changes(sandbox: Sandbox) -> None:
    await sandbox.files.write("/src/new.py", "new")
    await sandbox.files.write("/other", "x")
    await sandbox.run_shell("rm /etc/issue; ln -s new.py /src/link; mkdir /src/empty")
    found = await sandbox.changes(include=("src/**",))
    by_path = {change.path: change for change in found.changes}
    assert by_path[b"src/new.py"].kind is ChangeKind.WRITE and by_path[b"src/new.py"].data == b"new"
    assert by_path[b"src/link"].target == b"new.py" and b"other" not in by_path
    everything = {change.path: change.kind for change in (await sandbox.changes()).changes}
    assert everything[b"etc/issue"] is ChangeKind.DELETE and everything[b"other"] is ChangeKind.WRITE
    with pytest.raises(InvalidRequest, match="max_bytes"):
        await sandbox.changes(max_bytes=1 << 40)


# -- life --------------------------------------------------------------------------------------------------------------


async def test_list_labels_and_stop_many(client: DSecClient) -> None:
    boxes = [
        await client.run(DSecContainerRunArgs(container_image=BASE, labels={"set": "e2e", "n": str(n)}))
        for n in range(3)
    ]
    assert [info.id async for info in client.list(labels={"set": "e2e"}, states=["running"])] == [b.id for b in boxes]
    assert [info.id async for info in client.list(labels={"set": "e2e", "n": "1"})] == [boxes[1].id]
    assert await client.stop_many(labels={"set": "e2e"}) == 3
    assert await no_sandbox_left(client, {"set": "e2e"})


async def test_ttls(client: DSecClient) -> None:
    idle = await client.run(DSecContainerRunArgs(container_image=BASE, ttl_running_stop=1))
    total = await client.run(DSecContainerRunArgs(container_image=BASE, ttl_total=2))
    held = await client.run(DSecContainerRunArgs(container_image=BASE, ttl_running_stop=1))
    assert (await held.run_shell("sleep 3; echo kept")).text == "kept\n", "a foreground command is activity"
    async with asyncio.timeout(20):
        while (await idle.info()).state is not State.STOPPED or (await total.info()).state is not State.STOPPED:
            await asyncio.sleep(0.1)
    assert (await idle.info()).reason is Reason.TTL_IDLE and (await total.info()).reason is Reason.TTL_TOTAL
    with pytest.raises(SandboxUnavailable) as caught:
        await idle.run_shell("true")
    assert caught.value.reason == "ttl_idle"
    await held.set_ttl(running_stop=600, total=None)
    assert (await held.run_shell("true")).ok
    await held.stop()


async def test_metrics_logs_capabilities_layers(client: DSecClient, sandbox: Sandbox) -> None:
    assert (await sandbox.run_shell("true")).ok
    assert (await sandbox.metrics()).memory_bytes > 0
    lines = [line async for line in sandbox.logs()]
    assert any("running" in line for line in lines) and all(abs(line.t - time.time()) < 600 for line in lines)
    found = await client.capabilities()
    assert found.backends["container"] and found.limits["max_sandboxes"] > 0
    refs = await client.layers.list()
    assert BASE in map(str, refs)
    assert (await client.layers.inspect(BASE))["name"] == "debian"
    with pytest.raises(NotFound):
        await client.layers.inspect("no-such-layer@1")


async def test_wrong_key(platform: embedded.Endpoint) -> None:
    with pytest.raises(dsec.AuthenticationError, match="DSEC_API_KEY"):
        await DSecClient(platform.url, "wrong-key-of-some-length").open()


async def test_the_sync_side(platform: embedded.Endpoint) -> None:
    key = Path(platform.key_file).read_text().strip()

    def session() -> str:
        with dsec.sync.DSecClient(platform.url, key) as client, client.run_container(ARGS) as sandbox:
            assert sandbox.files.write("/f", iter([b"a", b"b"])) == 2
            assert [type(event) for event in sandbox.start("echo x").events()][-1] is Exit
            return sandbox.run_shell("cat /f", check=True).text

    assert await asyncio.to_thread(session) == "ab"
