"""Rollouts of the SDK on a real platform: what is recorded is replayed equal, and nothing runs twice, whoever dies."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import msgspec
import pytest

import dsec
import dsec.sync
from dsec import (
    DSecClient,
    DSecContainerRunArgs,
    ExecResult,
    Exit,
    PtySize,
    ReplayDivergence,
    Rollout,
    RolloutFenced,
    RolloutState,
    SandboxUnavailable,
    SessionEnded,
    Stderr,
    Stdout,
)
from dsec.cluster import embedded

from .conftest import BASE
from .test_crashes import client_of, kill, pid_of, states  # noqa: F401 (a fixture)

pytestmark = pytest.mark.e2e
ARGS = DSecContainerRunArgs(container_image=BASE)
Work = Callable[[Rollout], Awaitable[list[object]]]


class Preempted(Exception):
    """What leaves a rollout open."""


async def play(client: DSecClient, name: str, work: Work, *, leave: bool = False) -> list[object]:
    found: list[object] = []
    try:
        async with client.rollout(name, ARGS) as rollout:
            found = await work(rollout)
            if leave:
                raise Preempted
    except Preempted:
        pass
    return found


async def twice(client: DSecClient, name: str, work: Work) -> tuple[list[object], list[object]]:
    return await play(client, name, work, leave=True), await play(client, name, work)


def bare(result: ExecResult) -> ExecResult:
    return msgspec.structs.replace(result, replayed=False)


async def pieces(*data: bytes) -> AsyncIterator[bytes]:
    for piece in data:
        yield piece


async def find(client: DSecClient, name: str) -> dsec.RolloutInfo:
    return await anext(client.rollouts.list(job="", name=name))


async def test_commands(client: DSecClient) -> None:
    marks: list[bool] = []

    async def work(rollout: Rollout) -> list[object]:
        results = [
            await rollout.run_shell("echo x >> /n; cat /n; echo err >&2; exit 3", env={"A": "ü"}, cwd="/"),
            await rollout.exec(["printf", b"\\377\\0"]),
            await rollout.run_shell("kill -TERM $$"),
            await rollout.run_shell("echo before; exec sleep 60", timeout=0.3),
            await rollout.run_shell("cat", stdin=pieces(b"one ", b"two")),
            await rollout.run_shell("wc -c", stdin=b"a" * 3_000_000),
            await rollout.run_shell("head -c 6000000 /dev/zero; head -c 2000000 /dev/zero >&2"),
            await rollout.run_shell("head -c 5000 /dev/zero", max_output_bytes=100),
            await rollout.exec(["sh", "-c", "echo $#", "sh", *["x" * 100] * 9000]),
            await rollout.exec(["/no/such/program"]),
        ]
        marks.append(any(result.replayed for result in results))
        marks.append(all(result.replayed for result in results))
        return [bare(result) for result in results]

    live, replayed = await twice(client, "commands", work)
    assert live == replayed and marks == [False, False, True, True]
    texts = [result.text for result in live if isinstance(result, ExecResult)]
    assert texts[0] == "x\n" and texts[4:6] == ["one two", "3000000\n"] and texts[8] == "9000\n"


async def test_files(client: DSecClient, tmp_path: Path) -> None:
    (tmp_path / "tree" / "sub").mkdir(parents=True)
    (tmp_path / "tree" / "sub" / "f").write_text("in a tree")
    (tmp_path / "tree" / "link").symlink_to("sub/f")

    async def work(rollout: Rollout) -> list[object]:
        files, down = rollout.files, tmp_path / f"down{rollout.replaying}"
        down.mkdir()
        return [
            await files.write("/d/one", "text", mode=0o600, owner="games"),
            await files.write(b"/d/\xff", pieces(b"a" * 10, b"b")),
            await files.write("/d/long", os.urandom(1) * 0 + b"l" * 200_000),
            await files.read("/d/one"),
            await files.read("/d/one", offset=1, length=2),
            await files.read_text(b"/d/\xff"),
            await files.read("/d/long"),
            b"".join([piece async for piece in files.stream("/d/long", offset=7)]),
            await files.list("/d"),
            await files.stat("/d/one"),
            await files.exists("/d/none"),
            await files.mkdir("/d/made"),
            await files.move("/d/one", "/d/moved"),
            await files.remove("/d/made"),
            await files.upload(tmp_path / "tree", "/tree"),
            await files.upload(tmp_path / "tree" / "sub" / "f", "/single"),
            await files.upload(tmp_path / "tree" / "link", "/tree/other"),
            await files.download("/tree", down / "tree"),
            await files.download("/single", down / "f"),
            (down / "tree" / "sub" / "f").read_text() + (down / "f").read_text(),
            await rollout.changes(include=["d/**", "tree/**"]),
            await rollout.set_network({}),
        ]

    live, replayed = await twice(client, "files", work)
    assert live == replayed


async def test_errors(client: DSecClient) -> None:
    async def work(rollout: Rollout) -> list[object]:
        found: list[object] = []
        for wrong in (
            lambda: rollout.files.read("/none"),
            lambda: rollout.files.read("/etc"),
            lambda: rollout.files.write("/etc", b"x"),
            lambda: rollout.files.remove("/etc"),
            lambda: rollout.files.list("/none"),
            lambda: rollout.files.download("/none", "/nowhere/at/all"),
            lambda: rollout.run_shell("true", cwd="/nowhere"),
            lambda: rollout.run_shell("true", user="nobody-of-that-name"),
            lambda: rollout.run_shell("exit 4", check=True),
        ):
            with pytest.raises(dsec.DSecError) as caught:
                await wrong()
            found += [type(caught.value), caught.value.message]
        return found

    live, replayed = await twice(client, "errors", work)
    assert live == replayed and live[0] is not dsec.DSecError


async def test_started_commands(client: DSecClient) -> None:
    async def work(rollout: Rollout) -> list[object]:
        process = await rollout.start("echo x >> /n; cat; echo end >&2; exit 5", stdin=True)
        await process.write("one ")
        await process.write(b"t" * 600_000)
        await process.close_stdin()
        events = [event async for event in process.events()]
        assert isinstance(events[-1], Exit) and events[-1].result.exit_code == 5
        out = b"".join(event.data for event in events if isinstance(event, Stdout))
        err = b"".join(event.data for event in events if isinstance(event, Stderr))
        sleeper = await rollout.start(["sleep", "60"])
        await sleeper.signal("TERM")
        terminal = await rollout.start("stty size; read line; stty size", pty=PtySize(60, 20))
        await terminal.resize(90, 30)
        await terminal.write("go\n")
        ends = [await one.wait() for one in (process, sleeper, terminal)]
        return [
            process.pid,
            out,
            err,
            events[-1].result.step,
            *map(bare, ends),
            (await rollout.run_shell("cat /n")).text,
        ]

    live, replayed = await twice(client, "started", work)
    assert live[1:3] == [b"one " + b"t" * 600_000, b"end\n"] and live[-1] == "x\n"
    assert live[:3] == replayed[:3] and live[4:] == replayed[4:]
    assert isinstance(live[5], ExecResult) and live[5].signal == "TERM"


async def test_sessions(client: DSecClient) -> None:
    async def work(rollout: Rollout) -> list[object]:
        async with await rollout.open_session(env={"B": "c"}) as session:
            first = await session.run_shell("cd /etc; A=b")
            second = await session.run_shell("echo $A $B $PWD", stdin=b"")
            running = session.run_shell("until false; do sleep 0.05; done")
            waited = await rollout.run_shell("sleep 0.3")
            assert await session.interrupt()
            interrupted = await running
            name = session.name
        with pytest.raises((SessionEnded, dsec.NotFound)) as caught:
            await session.run_shell("true")
        return [name, *map(bare, (first, second, waited, interrupted)), type(caught.value)]

    live, replayed = await twice(client, "sessions", work)
    assert live == replayed
    assert isinstance(live[2], ExecResult) and live[2].text == "b c /etc\n"


async def test_gathered_steps_keep_the_order_in_which_they_were_made(client: DSecClient) -> None:
    async def work(rollout: Rollout) -> list[object]:
        commands = [rollout.run_shell(f"echo {number} >> /order; echo {number}") for number in range(40)]
        files = [rollout.files.write(f"/f{number}", b"x" * number) for number in range(40)]
        return [result.text for result in await asyncio.gather(*commands)] + list(await asyncio.gather(*files))

    live, replayed = await twice(client, "gathered", work)
    assert live == replayed == [f"{number}\n" for number in range(40)] + list(range(40))
    info = await find(client, "gathered")
    kinds = [record.kind async for record in client.rollouts.steps(info.id)]
    assert kinds == ["exec"] * 40 + ["fs.write"] * 40


async def test_divergence(client: DSecClient) -> None:
    async def work(rollout: Rollout) -> list[object]:
        await rollout.run_shell("echo x >> /n", env={"A": "1"})
        await rollout.files.write("/f", b"one")
        return [(await rollout.run_shell("cat /n")).text]

    async def another(rollout: Rollout) -> list[object]:
        await rollout.run_shell("echo x >> /n", env={"A": "1"})
        await rollout.files.write("/f", b"two")
        return []

    assert await play(client, "divergence", work, leave=True) == ["x\n"]
    with pytest.raises(ReplayDivergence) as caught:
        await play(client, "divergence", another)
    assert caught.value.step == 1 and "data: recorded" in caught.value.message
    assert await play(client, "divergence", work) == ["x\n"]


async def test_a_content_that_is_not_kept(client: DSecClient) -> None:
    async def work(rollout: Rollout) -> list[object]:
        await rollout.run_shell("head -c 40000000 /dev/urandom > /big")
        return [await rollout.files.read("/big")]

    async def spoilt(rollout: Rollout) -> list[object]:
        await rollout.sandbox.run_shell("printf x | dd of=/big conv=notrunc bs=1 seek=39999999")
        return await work(rollout)

    live, replayed = await play(client, "big", work, leave=True), await play(client, "big", work, leave=True)
    assert len(live[0]) == 40_000_000 and live == replayed  # type: ignore[arg-type]
    with pytest.raises(ReplayDivergence, match="too many to be kept"):
        await play(client, "big", spoilt, leave=True)
    await client.rollout("big", ARGS, restart=True)


async def test_a_sandbox_that_is_gone(client: DSecClient) -> None:
    async def work(rollout: Rollout) -> list[object]:
        return [(await rollout.run_shell(f"echo {number}")).text for number in range(3)]

    async def more(rollout: Rollout) -> list[object]:
        return [*await work(rollout), await rollout.run_shell("echo more")]

    live = await play(client, "gone", work, leave=True)
    info = await find(client, "gone")
    await (await client.attach(info.sandbox)).stop()
    with pytest.raises(SandboxUnavailable, match="3 steps of rollout 'gone' were replayed, step 3 needs") as caught:
        await play(client, "gone", more)
    assert caught.value.reason == "user"
    assert await play(client, "gone", work) == live, "all that is recorded can be had, and it can be finished"
    assert (await find(client, "gone")).state is RolloutState.FINISHED


async def test_two_trainers(client: DSecClient) -> None:
    older = await client.rollout("two", ARGS)
    line = "echo x >> /n; until [ -e /go ]; do sleep 0.02; done; cat /n"
    under_way = asyncio.create_task(older.run_shell(line))
    async with asyncio.timeout(20):
        while not (await older.info()).steps:
            await asyncio.sleep(0.02)
    async with client.rollout("two", ARGS) as newer:
        with pytest.raises(RolloutFenced):
            await older.run_shell("echo b")
        again = newer.run_shell(line)
        await newer.sandbox.files.write("/go", b"")
        assert (await again).text == "x\n"
    assert (await under_way).text == "x\n", "what the older one had under way went on"
    await older.close()


async def test_whoever_dies(states: list[Path]) -> None:  # noqa: F811
    """Every line runs once, and what the program sees is what it would have seen."""
    killed: list[str] = []

    async def work(rollout: Rollout) -> list[object]:
        found: list[object] = []
        for number in range(12):
            found.append((await rollout.run_shell(f"sleep 0.1; echo {number} >> /n; wc -l < /n")).text)
            found.append(await rollout.files.write(f"/f{number}", b"x" * number))
            if number in (3, 6, 9) and not rollout.replaying and str(number) not in killed:
                killed.append(str(number))
                running = rollout.run_shell("echo begun >> /n; sleep 0.5; wc -l < /n")
                await asyncio.sleep(0.2)  # somewhere in the middle of it, wherever that is
                kill(pid_of(states[0], "apiserver" if number == 6 else "edge"))
                found.append((await running).text)
            elif number in (3, 6, 9):
                found.append((await rollout.run_shell("echo begun >> /n; sleep 0.5; wc -l < /n")).text)
            else:
                await rollout.files.move(f"/f{number}", f"/g{number}")
        return found

    async with client_of(embedded.up(states[0], port=0)) as client:
        live = await play(client, "dies", work, leave=True)
        assert killed == ["3", "6", "9"]
        assert await play(client, "dies", work) == live
        info = await find(client, "dies")
        assert info.epoch == 2 and info.unknown == ()
    assert [text for text in live if isinstance(text, str)][-1] == "15\n"


def test_without_await(platform: embedded.Endpoint) -> None:
    key = Path(platform.key_file).read_text().strip()
    found = []
    with dsec.sync.DSecClient(platform.url, key) as client:
        for _ in range(2):
            with pytest.raises(Preempted):
                with client.rollout("sync", ARGS) as rollout:
                    process = rollout.start("cat", stdin=True)
                    process.write("hi")
                    process.close_stdin()
                    with rollout.open_session() as session:
                        said = session.run_shell("echo $((1 + 1))").text
                    rollout.files.write("/f", iter([b"a", b"b"]))
                    pieces = list(rollout.files.stream("/f"))
                    result = rollout.run_shell("echo x >> /n; cat /n")
                    found.append((process.wait().text, said, b"".join(pieces), result.text, rollout.steps))
                    replayed = result.replayed
                    raise Preempted
        client.rollout("sync", ARGS, restart=True).finish(reward=1)
    assert found[0] == found[1] == ("hi", "2\n", b"ab", "x\n", 10) and replayed
