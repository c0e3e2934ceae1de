"""Rollouts through SDK, HTTP and apiserver, over an edge that records for real and runs commands of this machine."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest

import dsec
from dsec import (
    CommandFailed,
    Conflict,
    DSecClient,
    DSecContainerRunArgs,
    ExecResult,
    Exit,
    InvalidRequest,
    ReplayDivergence,
    Rollout,
    RolloutFenced,
    SandboxUnavailable,
    Stderr,
    Stdout,
)
from dsec.protocol.export import check_export
from dsec.protocol.rollouts import RolloutState
from dsec.rollout.trajectory import TrajectoryStore
from dsec.sdk import commands, replay
from tests.apiserver.serving import KEY, apiserver

from .recording_edge import RecordingEdge

ARGS = DSecContainerRunArgs("debian@12")


class Platform(NamedTuple):
    edge: RecordingEdge
    client: DSecClient

    def box(self, rollout: Rollout) -> Path:
        return self.edge.boxes[rollout.sandbox_id].root


@pytest.fixture(scope="module")
async def platform(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Platform]:
    directory = tmp_path_factory.mktemp("edge")
    async with RecordingEdge(directory) as edge, apiserver(directory, edge) as url:
        async with DSecClient(url, KEY, request_timeout=10) as client:
            yield Platform(edge, client)


class Left(Exception):
    """How a trainer that is preempted leaves a block."""


async def play(client: DSecClient, name: str, work: Callable[[Rollout], Awaitable[object]], *, leave: bool) -> object:
    """Runs `work` in a rollout; with `leave` the rollout stays open."""
    found: object = None
    try:
        async with client.rollout(name, ARGS) as rollout:
            found = await work(rollout)
            if leave:
                raise Left
    except Left:
        pass
    return found


async def twice(platform: Platform, name: str, work: Callable[[Rollout], Awaitable[object]]) -> tuple[object, object]:
    """What it gives live, and replayed; the second time the edge is asked for no step."""
    first = await play(platform.client, name, work, leave=True)
    before = platform.edge.asked.total()
    second = await play(platform.client, name, work, leave=False)
    assert platform.edge.asked.total() == before, "a replayed step asks for nothing"
    return first, second


# -- what is replayed --


async def test_commands_replay_equal_in_every_field(platform: Platform) -> None:
    async def work(rollout: Rollout) -> list[ExecResult]:
        return [
            await rollout.run_shell("echo x >> n; cat n; echo err >&2; exit 3"),
            await rollout.exec(["printf", b"\\377\\0"], env={"A": "b"}),
            await rollout.run_shell("kill -TERM $$"),
            await rollout.run_shell("echo before; exec sleep 60", timeout=0.2),
            await rollout.exec(["cat"], stdin="héllo"),
            await rollout.exec(["cat"], stdin=pieces(b"one ", b"two")),
            await rollout.run_shell("head -c 300000 /dev/zero; head -c 100000 /dev/zero >&2"),
            await rollout.run_shell("wc -c", stdin=os.urandom(0) + b"a" * 700_000),
        ]

    live, replayed = await twice(platform, "commands", work)
    assert isinstance(live, list) and isinstance(replayed, list)
    assert [result.step for result in live] == list(range(8)) and not any(result.replayed for result in live)
    assert all(result.replayed for result in replayed)
    assert [msgspec.structs.replace(result, replayed=False) for result in replayed] == live
    assert live[0].text == "x\n" and live[1].stdout == b"\xff\0" and live[3].timed_out == "deadline"
    assert (live[4].text, live[5].text, live[7].text) == ("héllo", "one two", "700000\n")
    assert len(replayed[6].stdout) == 300_000 and len(replayed[6].stderr) == 100_000


async def pieces(*data: bytes) -> AsyncIterator[bytes]:
    for piece in data:
        yield piece


async def test_a_checked_command_fails_again(platform: Platform) -> None:
    async def work(rollout: Rollout) -> str:
        with pytest.raises(CommandFailed, match="exited with 4: no") as caught:
            await rollout.run_shell("echo no >&2; exit 4", check=True)
        return str(caught.value)

    live, replayed = await twice(platform, "checked", work)
    assert live == replayed


async def test_files_replay(platform: Platform, tmp_path: Path) -> None:
    (tmp_path / "tree" / "sub").mkdir(parents=True)
    (tmp_path / "tree" / "sub" / "f").write_text("in a tree")

    async def work(rollout: Rollout) -> list[object]:
        files, down = rollout.files, tmp_path / f"down{rollout.replaying}"
        down.mkdir()
        return [
            await files.write("/d/one", "text", mode=0o600),
            await files.write("/d/two", pieces(b"a" * 10, b"b")),
            await files.read("/d/one"),
            await files.read("/d/one", offset=1, length=2),
            await files.read_text("/d/two"),
            b"".join([piece async for piece in files.stream("/d/two")]),
            [info.path for info in await files.list("/d")],
            (await files.stat("/d/one")).mode,
            await files.exists("/d/none"),
            await files.mkdir("/d/made"),
            await files.move("/d/one", "/d/moved"),
            await files.remove("/d/made", recursive=True),
            await files.upload(tmp_path / "tree", "/tree"),
            await files.upload(tmp_path / "tree" / "sub" / "f", "/single"),
            (await files.download("/tree", down / "tree")).files,
            (await files.download("/single", down / "f")).bytes,
            (down / "tree" / "sub" / "f").read_text() + (down / "f").read_text(),
            len((await rollout.changes(include=["d/**"])).changes),
            (await rollout.set_network({"example.org": True})).enforced,
        ]

    live, replayed = await twice(platform, "files", work)
    assert live == replayed
    assert isinstance(live, list) and live[2:6] == [b"text", b"ex", "a" * 10 + "b", b"a" * 10 + b"b"]


async def test_errors_replay_as_what_they_were(platform: Platform) -> None:
    async def work(rollout: Rollout) -> list[tuple[type, str]]:
        found: list[tuple[type, str]] = []
        for wrong in (
            lambda: rollout.files.read("/none"),
            lambda: rollout.files.write("/full", b"x" * 10),
            lambda: rollout.run_shell("true", cwd="/nowhere"),
            lambda: rollout.files.download("/none", "/nowhere/at/all"),
        ):
            with pytest.raises(dsec.DSecError) as caught:
                await wrong()
            found.append((type(caught.value), caught.value.message))
        return found

    live, replayed = await twice(platform, "errors", work)
    assert live == replayed and isinstance(live, list) and issubclass(live[0][0], FileNotFoundError)


# -- divergence --


async def recorded(platform: Platform, name: str, *lines: str) -> None:
    async def work(rollout: Rollout) -> None:
        for line in lines:
            await rollout.run_shell(line)

    await play(platform.client, name, work, leave=True)


async def test_another_step_is_a_divergence_that_shows_both(platform: Platform) -> None:
    await recorded(platform, "other", "echo a", "echo b")
    with pytest.raises(ReplayDivergence) as caught:
        async with platform.client.rollout("other", ARGS) as rollout:
            before = platform.edge.runs
            await rollout.run_shell("echo a")
            await rollout.run_shell("echo B", timeout=5)
    assert 'line: recorded "echo b", asked "echo B"' in caught.value.message
    assert "timeout: recorded nothing, asked 5" in caught.value.message
    assert caught.value.step == 1 and '"echo b"' in caught.value.recorded and '"echo B"' in caught.value.asked
    assert platform.edge.runs == before
    with pytest.raises(ReplayDivergence):
        async with platform.client.rollout("other", ARGS) as rollout:
            await rollout.files.read("/echo a")


async def test_no_step_follows_a_divergence(platform: Platform) -> None:
    await recorded(platform, "after", "echo a", "echo b")
    async with platform.client.rollout("after", ARGS) as rollout:
        before = platform.edge.asked.total()
        with pytest.raises(ReplayDivergence):
            await rollout.run_shell("echo other")
        for _ in range(3):
            with pytest.raises(ReplayDivergence, match="step 0"):
                await rollout.run_shell("echo b")
        with pytest.raises(ReplayDivergence):
            await rollout.finish(reward=1.0)
        assert platform.edge.asked.total() == before
        rollout._finished = True  # leave without a word


async def test_steps_in_another_order_are_named(platform: Platform) -> None:
    await recorded(platform, "order", "echo a", "echo b", "echo c")
    with pytest.raises(ReplayDivergence, match="this is step 1 of the log"):
        async with platform.client.rollout("order", ARGS) as rollout:
            await rollout.files.exists("/") if False else await asyncio.sleep(0)
            await asyncio.gather(rollout.run_shell("echo b"), rollout.run_shell("echo a"))


async def test_nothing_is_run_while_a_recorded_step_is_yet_to_be_compared(platform: Platform) -> None:
    await recorded(platform, "live", "echo a")
    async with platform.client.rollout("live", ARGS) as rollout:
        before = platform.edge.asked.total()
        found = await asyncio.gather(
            rollout.run_shell("echo other"), rollout.run_shell("echo next"), return_exceptions=True
        )
        assert [type(error) for error in found] == [ReplayDivergence, ReplayDivergence]
        assert platform.edge.asked.total() == before
        rollout._finished = True


async def test_too_few_steps_do_not_finish_it(platform: Platform) -> None:
    await recorded(platform, "few", "echo a", "echo b")
    with pytest.raises(ReplayDivergence, match="2 recorded steps, of which only 1"):
        async with platform.client.rollout("few", ARGS) as rollout:
            await rollout.run_shell("echo a")
    assert (await rollout.info()).state is RolloutState.OPEN


async def test_more_steps_go_on_live(platform: Platform) -> None:
    await recorded(platform, "more", "echo a >> n")
    async with platform.client.rollout("more", ARGS) as rollout:
        assert rollout.replaying and (await rollout.run_shell("echo a >> n")).replayed
        assert not rollout.replaying and rollout.steps == 1 == rollout.replayed
        result = await rollout.run_shell("cat n")
        assert (result.step, result.replayed, result.text) == (1, False, "a\n")
        info = await rollout.finish(reward=0.5, valid=True)
        assert (info.state, info.reward, info.valid, info.steps) == (RolloutState.FINISHED, 0.5, True, 2)
        with pytest.raises(Conflict, match="finished"):
            await rollout.run_shell("echo more")
    with pytest.raises(Conflict, match="is finished and has 2 steps"):
        async with platform.client.rollout("more", ARGS) as rollout:
            await rollout.run_shell("echo a >> n")
            await rollout.run_shell("cat n")
            await rollout.run_shell("one more")


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (lambda r: r.exec(["a", "b"]), lambda r: r.exec(["a", "c"])),
        (lambda r: r.run_shell("cat", stdin=b"a"), lambda r: r.run_shell("cat", stdin=b"b")),
        (lambda r: r.run_shell("cat", stdin=b""), lambda r: r.run_shell("cat")),
        (lambda r: r.run_shell("cat", stdin=b"ab"), lambda r: r.run_shell("cat", stdin=pieces(b"a", b"c"))),
        (lambda r: r.run_shell("true", env={"A": "1"}), lambda r: r.run_shell("true", env={"A": "2"})),
        (lambda r: r.files.write("/f", b"a" * 99_999), lambda r: r.files.write("/f", b"a" * 99_998 + b"b")),
        (lambda r: r.files.write("/f", b"a"), lambda r: r.files.write("/f", pieces(b"b"))),
        (lambda r: r.files.write("/f", b"a"), lambda r: r.files.write("/f", b"a", mode=0o600)),
        (lambda r: r.files.read("/"), lambda r: r.files.read("/", offset=1)),
        (lambda r: r.files.list("/"), lambda r: r.files.list("/", depth=2)),
        (lambda r: r.start("true"), lambda r: r.start("true", stdin=True)),
        (lambda r: r.start("true"), lambda r: r.run_shell("true", timeout=None)),
        (lambda r: r.set_network({}), lambda r: r.set_network({"a.org": True})),
    ],
)
async def test_whatever_was_asked_counts(
    platform: Platform, request: pytest.FixtureRequest, first: Step, second: Step
) -> None:
    async def work(rollout: Rollout) -> None:
        with contextlib.suppress(dsec.FileError):
            await first(rollout)

    name = request.node.name
    await play(platform.client, name, work, leave=True)
    with pytest.raises(ReplayDivergence, match="step 0"):
        async with platform.client.rollout(name, ARGS) as rollout:
            await second(rollout)


Step = Callable[[Rollout], Awaitable[object]]


async def test_the_same_content_in_another_form_is_the_same(platform: Platform) -> None:
    async with platform.client.rollout("forms", ARGS) as rollout:
        await rollout.files.write("/f", "ab")
        await rollout.run_shell("cat", stdin="ab")
        rollout._finished = True
    async with platform.client.rollout("forms", ARGS) as rollout:
        await rollout.files.write(b"/f", pieces(b"a", b"b"))
        assert (await rollout.run_shell("cat", stdin=pieces(b"a", b"b"))).replayed


async def test_what_cannot_be_asked_for_is_no_step(platform: Platform) -> None:
    async with platform.client.rollout("wrong", ARGS) as rollout:
        for wrong in (
            lambda: rollout.run_shell("true", timeout=-1),
            lambda: rollout.exec([]),
            lambda: rollout.run_shell("true", max_output_bytes=17 << 20),
            lambda: rollout.files.read("a\0b"),
            lambda: rollout.run_shell("\ud800"),
            lambda: rollout.run_shell("x" * (4 << 20)),
            lambda: rollout.exec(["true"], env={f"V{number}": "x" * 1000 for number in range(5000)}),
            lambda: rollout.files.list("/", depth=0),
            lambda: rollout.files.mkdir("/a", mode=-1),
        ):
            with pytest.raises((InvalidRequest, dsec.FileError, UnicodeEncodeError)):
                await wrong()
        with pytest.raises(ZeroDivisionError):
            await rollout.files.write("/f", broken())
        assert rollout.steps == 0
        assert (await rollout.run_shell("echo a")).step == 0


async def broken() -> AsyncIterator[bytes]:
    yield b"a"
    raise ZeroDivisionError


async def test_other_arguments_are_a_divergence(platform: Platform) -> None:
    await recorded(platform, "args", "true")
    with pytest.raises(ReplayDivergence, match="memory_limit_mb"):
        await platform.client.rollout("args", DSecContainerRunArgs("debian@12", memory_limit_mb=77))


# -- going live --


async def test_a_step_under_way_is_waited_for(platform: Platform, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands, "WAIT_S", 0)
    line = "echo x >> n; until test -e go; do sleep 0.02; done; cat n"
    rollout = await platform.client.rollout("under way", ARGS)
    asking = asyncio.ensure_future(rollout.run_shell(line))
    while not platform.edge.running:
        await asyncio.sleep(0.01)
    await rollout.close()
    with pytest.raises(Conflict, match="closed"):
        await asking
    async with platform.client.rollout("under way", ARGS) as again:
        waiting = asyncio.ensure_future(again.run_shell(line))
        while platform.edge.asked["exec"] < 3:
            await asyncio.sleep(0.01)
        (platform.box(again) / "go").touch()
        assert (await waiting).text == "x\n"


async def test_a_cancelled_caller_leaves_its_step(platform: Platform) -> None:
    async with platform.client.rollout("cancelled", ARGS) as rollout:
        asking = asyncio.create_task(rollout.run_shell("until test -e go; do sleep 0.02; done; echo done"))
        while rollout.steps == 0:
            await asyncio.sleep(0)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        assert (await rollout.run_shell("touch go")).step == 1
        async with asyncio.timeout(10):
            while (await rollout.info()).unknown:
                await asyncio.sleep(0.02)
        rollout._finished = True
    async with platform.client.rollout("cancelled", ARGS) as rollout:
        results = await asyncio.gather(
            rollout.run_shell("until test -e go; do sleep 0.02; done; echo done"), rollout.run_shell("touch go")
        )
        assert [result.text for result in results] == ["done\n", ""] and all(result.replayed for result in results)


async def test_numbers_are_given_when_methods_are_called(platform: Platform) -> None:
    async def work(rollout: Rollout) -> list[str]:
        later = [rollout.run_shell(f"echo {number}") for number in range(20)]
        reading = rollout.files.write("/f", pieces(b"x"))
        last = rollout.run_shell("echo last")
        assert rollout.steps == 22
        texts = [(await last).text] + [(await one).text for one in reversed(later)]
        return [*texts, str(await reading)]

    live, replayed = await twice(platform, "numbers", work)
    assert live == replayed
    steps = [record async for record in platform.client.rollouts.steps((await find(platform, "numbers")).id)]
    lines = [msgspec.json.decode(record.request).get("line") for record in steps]
    assert lines == [*(f"echo {number}" for number in range(20)), None, "echo last"]


async def find(platform: Platform, name: str) -> dsec.RolloutInfo:
    return await anext(platform.client.rollouts.list(job="", name=name))


async def test_who_opened_it_last_has_it(platform: Platform) -> None:
    older = await platform.client.rollout("fenced", ARGS)
    await older.run_shell("echo a")
    async with platform.client.rollout("fenced", ARGS) as newer:
        assert newer.epoch == older.epoch + 1
        with pytest.raises(RolloutFenced):
            await older.run_shell("echo b")
        with pytest.raises(RolloutFenced):
            await older.run_shell("echo c")
        assert (await newer.run_shell("echo a")).replayed
        assert not (await newer.run_shell("echo b")).replayed
    await older.close()


async def test_a_lost_sandbox_replays_and_then_says_so(platform: Platform) -> None:
    await recorded(platform, "lost", "echo a", "echo b")
    rollout = await find(platform, "lost")
    await platform.edge.lose(rollout.id)
    with pytest.raises(SandboxUnavailable) as caught:
        async with platform.client.rollout("lost", ARGS) as again:
            assert [(await again.run_shell(line)).text for line in ("echo a", "echo b")] == ["a\n", "b\n"]
            await again.run_shell("echo c")
    error = caught.value
    assert "2 steps of rollout 'lost' were replayed, step 2 needs a live one" in error.message
    assert error.reason == "node_lost" and error.details["replayed"] == 2 and error.details["step"] == 2


async def test_a_sandbox_that_dies_meanwhile(platform: Platform) -> None:
    with pytest.raises(SandboxUnavailable, match="0 steps of rollout 'dies' were replayed, step 1 needed it"):
        async with platform.client.rollout("dies", ARGS) as rollout:
            await rollout.run_shell("true")
            await platform.edge.lose(rollout.id)
            await rollout.run_shell("true")


async def test_a_new_beginning(platform: Platform) -> None:
    await recorded(platform, "restart", "echo a >> n")
    before = await find(platform, "restart")
    async with platform.client.rollout("restart", ARGS, restart=True) as rollout:
        assert rollout.id != before.id and not rollout.replaying
        assert (await rollout.run_shell("cat n")).exit_code != 0
    assert platform.edge.boxes[before.sandbox].state == "stopped"


# -- what is fetched --


async def test_pages_are_fetched_ahead_and_bounded(platform: Platform, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "PAGE", 10)
    monkeypatch.setattr(replay, "MOST", 20_000)
    monkeypatch.setattr(replay, "LESS", 10_000)
    most = 0

    async def work(rollout: Rollout) -> list[str]:
        nonlocal most
        found = []
        for number in range(60):
            found.append((await rollout.run_shell(f"head -c 1000 /dev/zero; echo {number}")).text[-4:])
            most = max(most, rollout._steps.replay._size)
        return found

    live, replayed = await twice(platform, "pages", work)
    assert live == replayed and 0 < most < 25_000


async def test_a_page_is_fetched_again_when_the_connection_is_lost(tmp_path: Path) -> None:
    async with RecordingEdge(tmp_path) as edge, apiserver(tmp_path, edge) as url:
        async with DSecClient(url, KEY, request_timeout=20) as client:
            await recorded(Platform(edge, client), "cut", *(f"echo {number}" for number in range(30)))
            rollout = await client.rollout("cut", ARGS)
            await edge.silence()
            first = asyncio.ensure_future(rollout.run_shell("echo 0"))
            await asyncio.sleep(0.3)
            await edge.listen()
            assert (await first).text == "0\n"
            await rollout.close()


async def test_contents_that_are_not_kept_are_read_again(tmp_path: Path) -> None:
    async with RecordingEdge(tmp_path, keep=100_000) as edge, apiserver(tmp_path, edge) as url:
        async with DSecClient(url, KEY, request_timeout=20) as client:
            data = os.urandom(500_000)

            async def work(rollout: Rollout) -> bytes:
                await rollout.files.write("/big", data)
                found = await rollout.files.read("/big")
                return found + b"".join([piece async for piece in rollout.files.stream("/big", offset=10)])

            assert await play(client, "big", work, leave=True) == data + data[10:]
            asked = edge.asked.total()
            assert await play(client, "big", work, leave=True) == data + data[10:]
            assert edge.asked.total() == asked, "reading again is no step"
            box = edge.boxes[edge.store.find("", "big").sandbox].root  # type: ignore[union-attr]
            (box / "big").write_bytes(b"x" + data[1:])
            with pytest.raises(ReplayDivergence, match="too many to be kept, and read again they are not the same"):
                await play(client, "big", work, leave=True)
            (box / "big").write_bytes(data[:-1])
            with pytest.raises(ReplayDivergence, match="499999 bytes"):
                await play(client, "big", work, leave=True)


async def test_a_missing_content_is_an_error_of_its_step_only(platform: Platform) -> None:
    lines = ("echo a", "head -c 100000 /dev/zero", "echo b")
    await recorded(platform, "blob", *lines)
    trajectory = platform.edge.store.find("", "blob")
    assert trajectory is not None
    record = trajectory.step(1)
    assert record is not None
    trajectory.blob_path(record.outputs["stdout"].digest).unlink()
    async with platform.client.rollout("blob", ARGS) as rollout:
        assert (await rollout.run_shell(lines[0])).text == "a\n"
        with pytest.raises(dsec.NotFound, match=record.outputs["stdout"].digest):
            await rollout.run_shell(lines[1])
        assert (await rollout.run_shell(lines[2])).text == "b\n"


async def test_commands_survive_the_apiserver_and_the_edge(tmp_path: Path) -> None:
    from tests.apiserver.serving import free_port

    port = free_port()
    async with RecordingEdge(tmp_path) as edge:
        async with apiserver(tmp_path, edge, port=port) as url:
            client = DSecClient(url, KEY, request_timeout=20)
            rollout = await client.rollout("survives", ARGS)
            running = asyncio.ensure_future(
                rollout.run_shell("echo x >> n; until test -e go; do sleep 0.05; done; cat n")
            )
            while not edge.running:
                await asyncio.sleep(0.01)
        async with apiserver(tmp_path, edge, port=port):
            await edge.silence()
            (edge.boxes[rollout.sandbox_id].root / "go").touch()
            await edge.listen()
            assert (await running).text == "x\n"
            await rollout.finish()
            await client.close()


# -- client.rollouts --


async def test_looking_at_what_is_recorded(platform: Platform, tmp_path: Path) -> None:
    await recorded(platform, "look a", "echo a", "head -c 50000 /dev/zero", "echo c")
    await recorded(platform, "look b", "echo a", "head -c 50000 /dev/zero", "echo d")
    a, b = await find(platform, "look a"), await find(platform, "look b")
    rollouts = platform.client.rollouts
    assert (await rollouts.get(a.id)).steps == 3
    steps = [record async for record in rollouts.steps(a.id, start=1, stop=2)]
    assert [record.step for record in steps] == [1]
    assert await rollouts.content(a.id, steps[0].outputs["stdout"]) == bytes(50_000)
    exported = await rollouts.export(a.id, tmp_path / "a.jsonl")
    assert exported.steps == 3 and (tmp_path / "a.jsonl").stat().st_size == exported.bytes
    with (tmp_path / "a.jsonl").open("rb") as lines:
        assert len(check_export(lines)) == 64
    found = await rollouts.diff(a.id, b.id)
    told = [(one.step, one.field, one.first, one.second) for one in found.differences]
    assert told[0] == (2, "request.line", '"echo c"', '"echo d"') and {step for step, *_ in told} == {2}
    assert (await rollouts.diff(a.id, a.id)).same
    with pytest.raises(Conflict):
        await rollouts.remove(a.id)
    await platform.edge.lose(a.id)
    await rollouts.remove(a.id)
    with pytest.raises(dsec.NotFound):
        await rollouts.get(a.id)
    with pytest.raises(InvalidRequest):
        await rollouts.get("../x")


async def test_started_commands_and_sessions_replay(platform: Platform) -> None:
    async def work(rollout: Rollout) -> list[object]:
        process = await rollout.start("cat; echo end >&2", stdin=True)
        await process.write("one")
        await process.write(b"t" * 600_000)
        await process.close_stdin()
        sleeper = await rollout.start(["sleep", "60"])
        await sleeper.signal("TERM")
        async with await rollout.open_session() as session:
            name = session.name
            assert await session.interrupt()
        return [process.exec_id, process.pid, sleeper.exec_id, name, rollout.steps]

    live, replayed = await twice(platform, "processes", work)
    assert live == replayed and isinstance(live, list) and live[2:] == ["step:6", "s-step-8", 11]


async def test_events_of_a_started_command(platform: Platform) -> None:
    async def work(rollout: Rollout) -> list[object]:
        process = await rollout.start("echo out; sleep 0.05; echo err >&2; exit 3")
        events = [event async for event in process.events()]
        early = process.events()
        found = await anext(early)
        result = await process.wait()
        assert events[:2] == [Stdout(b"out\n", 0), Stderr(b"err\n", 4)] and isinstance(events[2], Exit)
        assert (events[2].result.exit_code, events[2].result.stdout) == (3, b"")
        return [found, msgspec.structs.replace(result, replayed=False), rollout.steps]

    live, replayed = await twice(platform, "events", work)
    assert live == replayed


async def test_a_damaged_log_replays_up_to_the_damage(tmp_path: Path) -> None:
    async with RecordingEdge(tmp_path) as edge, apiserver(tmp_path, edge) as url:
        async with DSecClient(url, KEY, request_timeout=20) as client:
            await recorded(Platform(edge, client), "damaged", *(f"echo {number}" for number in range(8)))
            id = (await find(Platform(edge, client), "damaged")).id
            edge.store.close()
            log = tmp_path / "rollouts" / id / "log"
            data = bytearray(log.read_bytes())
            at = data.index(b"echo 5")
            data[at] ^= 1
            log.write_bytes(data)
            edge.store = TrajectoryStore(tmp_path / "rollouts")
            edge.store.load()
            async with client.rollout("damaged", ARGS) as rollout:
                for number in range(5):
                    assert (await rollout.run_shell(f"echo {number}")).replayed
                before = edge.runs
                with pytest.raises(dsec.OutcomeUnknown, match="damaged from step 5"):
                    await rollout.run_shell("echo 5")
                with pytest.raises(Conflict, match=r"step 5 of rollout 'damaged' was refused .* damaged from step 5"):
                    await rollout.run_shell("echo 6")
                assert edge.runs == before
                rollout._finished = True
            found = [record.step async for record in client.rollouts.steps(id, stop=5)]
            assert found == list(range(5))


LEFT_OUT = {
    "stop": "finish says that it is over, and stops it",
    "info": "of the rollout; the sandbox's is sandbox.info()",
    "seal": "grading does it",
}


@pytest.mark.parametrize(
    ("of", "plain"),
    [
        (Rollout, dsec.Sandbox), (dsec.RolloutFiles, dsec.Files), (dsec.RolloutProcess, dsec.Process),
        (dsec.RolloutSession, dsec.Session),
    ],
)  # fmt: skip
def test_every_method_of_a_sandbox_is_there_with_its_arguments(of: type, plain: type) -> None:
    for name, method in inspect.getmembers(plain, inspect.isfunction):
        if name.startswith("_") or (of is Rollout and name in LEFT_OUT):
            continue
        wanted = [(p.name, p.kind, p.default) for p in inspect.signature(method).parameters.values()]
        found = [(p.name, p.kind, p.default) for p in inspect.signature(getattr(of, name)).parameters.values()]
        assert found == [one for one in wanted if of is not Rollout or name == "process" or one[0] != "exec_id"], name


async def test_a_name_alone_finds_the_rollouts_of_all_jobs(platform: Platform) -> None:
    async with platform.client.job("found-by-name") as job:
        for opening in (job.rollout("found by name", ARGS), platform.client.rollout("found by name", ARGS)):
            async with opening:
                pass
    jobs = [info.job async for info in platform.client.rollouts.list(name="found by name")]
    assert len(jobs) == 2 and "" in jobs
    assert [info async for info in platform.client.rollouts.list(name="of nobody")] == []
