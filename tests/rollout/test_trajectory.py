"""A trajectory store gives back what it was told, after any end of its process."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from dsec.protocol.errors import ErrorBody, ErrorKind, Fault
from dsec.protocol.rollouts import NOTHING, RolloutState, StepRecord
from dsec.protocol.specs import DSecContainerRunArgs, Reason
from dsec.rollout import steplog
from dsec.rollout.trajectory import TrajectoryStore

from .logs import ARGS, ID, asked, do, filled, opened, told, until, with_disk


def other(number: int) -> str:
    return f"ro-e1-{number:012d}"


@pytest.mark.parametrize("clean", [True, False])
async def test_what_was_recorded_is_read_back(tmp_path: Path, clean: bool) -> None:
    store = opened(tmp_path)
    trajectory = store.create(ID, job="j", name="r", args=ARGS)
    assert await trajectory.opened() == 1
    await trajectory.made("sb-e1-1", 1, ("x@sha256:1",))
    records = [await do(trajectory, number, b"x" * (number * 5000)) for number in range(10)]
    trajectory.intent(asked(10))
    before = trajectory.info()
    store.close()
    if not clean:
        (tmp_path / ID / "summary").unlink(missing_ok=True)
    again = opened(tmp_path)
    found = again.find("j", "r")
    assert found is not None and found.id == ID and found.args == ARGS and found.layers == ("x@sha256:1",)
    assert again.list("j") == [before] and again.list("another") == []
    assert found.read(0, 100, 1 << 30) == [*records, asked(10)]
    assert found.read(3, 2, 1 << 30) == records[3:5] and found.read(11, 5, 1) == []
    assert found.read(0, 100, 1) == records[:1], "one step comes whatever its size"
    long = records[9].outputs["stdout"]
    assert long.data is None and found.blob(long.digest) == b"x" * 45000
    assert found.blob(records[1].outputs["stdout"].digest) == b"x" * 5000, "short ones, too"
    assert (before.steps, before.unknown, before.state, before.epoch) == (11, (10,), RolloutState.OPEN, 1)
    assert await found.opened("again") == 2
    assert found.info() != before
    again.close()


async def test_an_end_is_kept_and_refuses_more(tmp_path: Path) -> None:
    await filled(tmp_path, 3)
    store = opened(tmp_path)
    trajectory = store.get(ID)
    trajectory.intent(asked(3))
    await trajectory.lost(Reason.OOM)
    await trajectory.lost(Reason.USER)
    with pytest.raises(Fault, match="is lost, and has no step 4") as refused:
        trajectory.intent(asked(4))
    assert refused.value.body.kind is ErrorKind.CONFLICT
    assert (await told(trajectory, 3)).done_at == 3.5, "what was under way may still come to its outcome"
    store.close()
    again = opened(tmp_path)
    info = again.list()[0]
    assert (info.state, info.reason, info.steps, info.unknown) == (RolloutState.LOST, Reason.OOM, 4, ())
    await again.get(ID).finished(Reason.USER, 0.5, True)
    again.close()
    third = opened(tmp_path)
    info = third.list()[0]
    assert (info.state, info.reward, info.valid) == (RolloutState.FINISHED, 0.5, True)
    assert [record.step for record in third.get(ID).read(0, 10, 1 << 20)] == [0, 1, 2, 3]
    third.close()


async def test_intents_are_in_order_and_a_name_is_there_once(tmp_path: Path) -> None:
    store = opened(tmp_path)
    trajectory = store.create(ID, job="j", name="r", args=ARGS)
    for wrong in (-1, 1, 7):
        with pytest.raises(Fault, match="goes on with step 0"):
            trajectory.intent(asked(wrong))
        with pytest.raises(Fault, match="never began"):
            await told(trajectory, wrong)
    with pytest.raises(Fault, match="already") as taken:
        store.create(other(1), job="j", name="r", args=ARGS)
    assert taken.value.body.details["rollout"] == ID
    with pytest.raises(Fault, match="already"):
        store.create(ID, job="j", name="another", args=ARGS)
    for bad in ("../x", "ro-e1-0123456789ab/..", "sb-e1-0123456789ab", "", "ro-e1-0123456789ab\n"):
        with pytest.raises(Fault) as refused:
            store.create(bad, job="j", name="x", args=ARGS)
        assert refused.value.body.kind is ErrorKind.INVALID
        with pytest.raises(Fault) as missing:
            store.get(bad)
        assert missing.value.body.kind is ErrorKind.NOT_FOUND
    store.close()


async def test_an_error_is_an_outcome_and_the_first_outcome_counts(tmp_path: Path) -> None:
    store = opened(tmp_path)
    trajectory = store.create(ID, job="j", name="r", args=ARGS)
    trajectory.intent(asked(0))
    body = ErrorBody(kind=ErrorKind.FILE_NOT_FOUND, message="no file", details={"path": "/x"})
    first = await trajectory.outcome(0, result=None, error=body, outputs={}, inputs={}, done_at=1.0)
    assert first.error == body and first.result == NOTHING
    assert await told(trajectory, 0) == first
    trajectory.intent(asked(1))
    both = await asyncio.gather(told(trajectory, 1, b"one"), told(trajectory, 1, b"two"))
    assert both[0] == both[1] == trajectory.step(1)
    store.close()


async def test_nobody_is_told_before_it_is_durable(tmp_path: Path) -> None:
    store = opened(tmp_path)
    trajectory = store.create(ID, job="j", name="r", args=ARGS)
    await trajectory.opened()
    disk = with_disk(store)
    trajectory.intent(asked(0))
    telling = asyncio.ensure_future(told(trajectory, 0))
    await until(lambda: disk.waiting)
    step = trajectory.step(0)
    assert step is not None and step.done_at is None and trajectory.info().unknown == (0,) and not telling.done()
    telling.cancel()  # who asked goes away; the outcome stays
    await asyncio.wait([telling])
    disk.settle()
    await asyncio.sleep(0)
    step = trajectory.step(0)
    assert step is not None and step.done_at == 0.5
    store.close()


async def test_a_disk_that_fails_to_sync_leaves_the_outcome_unknown_until_it_is_tried_again(tmp_path: Path) -> None:
    store = opened(tmp_path)
    trajectory = store.create(ID, job="j", name="r", args=ARGS)
    await trajectory.opened()
    await do(trajectory, 0)
    disk = with_disk(store)
    trajectory.intent(asked(1))
    telling = asyncio.ensure_future(told(trajectory, 1))
    await until(lambda: disk.waiting)
    old = (tmp_path / ID / "log").stat().st_ino
    disk.settle(OSError(5, "Input/output error"))
    with pytest.raises(Fault, match="cannot be written: Input/output error"):
        await telling
    assert trajectory.info().unknown == (1,)
    again = asyncio.ensure_future(told(trajectory, 1, b"second"))
    await until(lambda: disk.waiting)
    assert (tmp_path / ID / "log").stat().st_ino != old, "a file whose sync failed once is not trusted"
    disk.settle()
    record = await again
    assert record.outputs["stdout"].data == b"second"
    store.close()
    (tmp_path / ID / "summary").unlink(missing_ok=True)
    reopened = opened(tmp_path)
    assert reopened.get(ID).step(1) == record
    assert not (await reopened.verify(ID)).problems
    reopened.close()


HOSTILE = ["../../etc", "a/b\n\x00c", "ü" * 10_000, "", ".", "ro-e1-0123456789ab", "\U0001f600" * 3, "x" * 100_000]


async def test_names_are_never_paths(tmp_path: Path) -> None:
    store = opened(tmp_path / "store")
    for number, name in enumerate(HOSTILE):
        trajectory = store.create(other(number), job=name, name=name, args=ARGS)
        await trajectory.opened()
    with pytest.raises(Fault) as refused:
        store.create(other(99), job="j", name="\udc80", args=ARGS)
    assert refused.value.body.kind is ErrorKind.INVALID
    store.close()
    again = opened(tmp_path / "store")
    for number, name in enumerate(HOSTILE):
        found = again.find(name, name)
        assert found is not None and found.id == other(number) and found.name == name
    assert {path.name for path in (tmp_path / "store").iterdir()} == {"lock", *(other(n) for n in range(len(HOSTILE)))}
    assert [path.name for path in tmp_path.iterdir()] == ["store"]
    assert (tmp_path / "store").stat().st_mode & 0o777 == 0o700
    again.close()


async def test_removal_takes_all_and_retention_takes_the_oldest_that_ended(tmp_path: Path) -> None:
    now = [1000.0]
    store = TrajectoryStore(tmp_path, clock=lambda: now[0])
    for number in range(6):
        now[0] += 10
        trajectory = store.create(other(number), job="j", name=str(number), args=ARGS)
        await trajectory.opened()
        await do(trajectory, 0, b"z" * 50_000)
        if number != 0:
            await trajectory.finished()
    one = store.list()[0].bytes
    assert await store.retain(max_age_s=25, max_bytes=1 << 40) == 2, "1 and 2 ended more than 25 s ago"
    assert [info.name for info in store.list()] == ["0", "3", "4", "5"], "an open one stays"
    assert await store.retain(max_age_s=1e9, max_bytes=2 * one + 1000) == 2
    assert [info.name for info in store.list()] == ["0", "5"]
    held = store.get(other(0))
    await store.remove(other(0))
    for gone in (lambda: held.intent(asked(1)), lambda: store.get(other(0)), lambda: held.step(0)):
        with pytest.raises(Fault) as refused:
            gone()
        assert refused.value.body.kind is ErrorKind.NOT_FOUND
    assert store.find("j", "0") is None
    assert sorted(path.name for path in tmp_path.iterdir()) == ["lock", other(5)]
    store.create(other(7), job="j", name="0", args=ARGS)
    store.close()


async def test_what_a_removal_or_a_creation_left_is_swept(tmp_path: Path) -> None:
    await filled(tmp_path, 1)
    (tmp_path / f".removed-{other(3)}" / "blobs").mkdir(parents=True)
    (tmp_path / other(1)).mkdir()
    (tmp_path / other(2)).mkdir()
    (tmp_path / other(2) / "log").write_bytes((tmp_path / ID / "log").read_bytes()[:30])
    store = opened(tmp_path)
    assert [info.id for info in store.list()] == [ID]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["lock", ID]
    store.close()


async def test_many_openings_do_not_make_a_log_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steplog, "_COMPACT_FROM", 2000)
    records = await filled(tmp_path, 5)
    store = opened(tmp_path)
    trajectory = store.get(ID)
    trajectory.intent(asked(5))
    for number in range(300):
        assert await trajectory.opened("note") == number + 2
    assert trajectory.info().bytes < 12_000
    assert trajectory.read(0, 10, 1 << 20) == [*records, asked(5)]
    assert not (await store.verify(ID)).problems
    await told(trajectory, 5)
    store.close()
    (tmp_path / ID / "summary").unlink(missing_ok=True)
    again = opened(tmp_path)
    found = again.get(ID)
    assert (found.epoch, found.sandbox, found.steps, found.info().unknown) == (301, "sb-e1-1", 6, ())
    assert found.read(0, 5, 1 << 20) == records
    again.close()


def test_a_store_has_one_process(tmp_path: Path) -> None:
    store = opened(tmp_path)
    program = (
        "import sys\nfrom pathlib import Path\nfrom dsec.protocol.errors import Fault\n"
        "from dsec.rollout.trajectory import TrajectoryStore\n"
        "try:\n TrajectoryStore(Path(sys.argv[1]))\nexcept Fault as fault:\n print(fault.body.kind.value, fault)\n"
    )
    said = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, check=True)
    assert said.stdout.startswith("conflict another process has the trajectory logs in")
    with pytest.raises(Fault):
        TrajectoryStore(tmp_path)
    store.close()
    said = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, check=True)
    assert said.stdout == ""


async def test_thousands_of_rollouts_need_few_descriptors_and_little_memory(tmp_path: Path) -> None:
    import os
    import tracemalloc

    store = opened(tmp_path)
    for number in range(1500):
        trajectory = store.create(other(number), job="j", name=str(number), args=DSecContainerRunArgs("debian@12"))
        trajectory.intent(asked(0))
        if number % 3:
            await trajectory.finished()
        del trajectory
    assert len(os.listdir("/proc/self/fd")) < 400
    assert len(store._open) == 500
    store.close()
    tracemalloc.start()
    again = opened(tmp_path)
    assert len(again.list()) == 1500
    before = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert before < 1500 * 3000, f"{before / 1500} bytes a rollout"
    assert not again._open, "nobody asked for one yet"
    again.close()


@pytest.mark.parametrize("result", [msgspec.Raw(b'{"pid":5}'), NOTHING])
def test_a_record_comes_back_from_json_as_it_went(result: msgspec.Raw) -> None:
    record = msgspec.structs.replace(asked(1), result=result)
    line = msgspec.json.encode(record)
    back = msgspec.json.decode(line, type=StepRecord)
    assert bytes(back.result) == bytes(result) and msgspec.json.encode(back) == line
