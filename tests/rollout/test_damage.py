"""Every byte of a log may be missing, wrong or unwritable: what was told stays told, or it is said that it cannot be."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from dsec.protocol.checked import HEAD
from dsec.protocol.errors import ErrorKind, Fault
from dsec.protocol.rollouts import StepRecord
from dsec.rollout.records import MAGIC
from dsec.rollout.trajectory import TrajectoryStore

from .logs import ARGS, ID, REAL, FullDisk, asked, do, filled, opened, told


def copied(root: Path, to: Path, data: bytes) -> Path:
    """A store like that one, whose log has these bytes."""
    shutil.rmtree(to, ignore_errors=True)
    (to / ID).mkdir(parents=True)
    (to / ID / "log").write_bytes(data)
    return to


def ends(data: bytes | bytearray) -> list[int]:
    """Where each record of a whole log ends."""
    position, found = len(MAGIC), []
    while position < len(data):
        position += HEAD.size + HEAD.unpack_from(data, position)[0]
        found.append(position)
    assert position == len(data)
    return found


async def test_a_log_cut_anywhere_goes_on_from_its_last_whole_record(tmp_path: Path) -> None:
    records = await filled(tmp_path / "a", 2)
    data = (tmp_path / "a" / ID / "log").read_bytes()
    whole = ends(data)
    for cut in range(whole[3], len(data)):
        store = opened(copied(tmp_path / "a", tmp_path / "b", data[:cut]))
        found = store.get(ID)
        kept = sum(end <= cut for end in whole)
        began, told_of = (
            max(0, (kept - 3) // 2),
            max(0, (kept - 4) // 2),
        )  # 2 heads, epoch, made, then two for each step
        assert (found.steps, found.damaged) == (began, None), cut
        assert found.read(0, 9, 1 << 20)[:told_of] == records[:told_of]
        assert found.info().bytes == whole[kept - 1] == (tmp_path / "b" / ID / "log").stat().st_size
        if cut % 17 == 0:
            await found.opened()
            if found.info().unknown:
                await told(found, found.steps - 1)
            await do(found, found.steps)
            assert not (await store.verify(ID)).problems
        store.close()


async def test_a_log_that_ends_in_zeros_was_being_written(tmp_path: Path) -> None:
    records = await filled(tmp_path, 2)
    log = tmp_path / ID / "log"
    log.write_bytes(log.read_bytes() + bytes(5000))
    store = opened(tmp_path)
    assert store.get(ID).read(0, 9, 1 << 20) == records and store.get(ID).damaged is None
    store.close()


@pytest.mark.parametrize("summarized", [False, True])
async def test_a_flipped_byte_anywhere_is_found_and_said(tmp_path: Path, summarized: bool) -> None:
    records = await filled(tmp_path / "a", 2)
    log = tmp_path / "a" / ID / "log"
    if summarized:
        opened(tmp_path / "a").close()
        assert (tmp_path / "a" / ID / "summary").exists()
    data = log.read_bytes()
    whole = ends(data)
    heads = range(0, whole[1], 13)
    for position in (*heads, *range(whole[1], len(data), 7 if summarized else 1)):
        wrong = bytearray(data)
        wrong[position] ^= 1 << position % 8
        copied(tmp_path / "a", tmp_path / "b", bytes(wrong))
        if summarized:
            shutil.copy(tmp_path / "a" / ID / "summary", tmp_path / "b" / ID / "summary")
        store = opened(tmp_path / "b")
        assert (await store.verify(ID)).problems, position
        found = store.get(ID)
        before = sum(end <= position for end in whole)  # whole records in front of it
        first = max(0, (before - 4) // 2)
        expect_damage(found.read, records, first)
        assert found.info().damaged == first, position
        assert store.find("j", "r") is found, position
        with pytest.raises(Fault) as refused:
            found.intent(asked(found.steps))
        assert refused.value.body.kind is ErrorKind.OUTCOME_UNKNOWN
        with pytest.raises(Fault):
            await told(found, first)
        await found.opened()
        store.close()
        assert log_is(tmp_path / "b", bytes(wrong)), "nothing is written any more, and nothing cut"


def log_is(root: Path, data: bytes) -> bool:
    return (root / ID / "log").read_bytes() == data


def expect_damage(read: Callable[[int, int, int], list[StepRecord]], records: list[StepRecord], first: int) -> None:
    """Steps before it can be had, and then it is said which one cannot."""
    if first:
        assert read(0, 99, 1 << 20) == records[:first]
    with pytest.raises(Fault, match=f"is damaged from step {first} on") as damaged:
        read(first, 99, 1 << 20)
    assert damaged.value.body.kind is ErrorKind.OUTCOME_UNKNOWN and damaged.value.body.details["step"] == first


async def test_damage_that_comes_while_a_log_is_open_is_found_at_the_step(tmp_path: Path) -> None:
    store = opened(tmp_path)
    trajectory = store.create(ID, job="j", name="r", args=ARGS)
    records = [await do(trajectory, number) for number in range(4)]
    log = tmp_path / ID / "log"
    data = bytearray(log.read_bytes())
    data[ends(data)[2 + 2 * 2] + 100] ^= 1  # in the outcome of step 2: two heads, then two records a step
    log.write_bytes(data)
    expect_damage(trajectory.read, records, 2)
    with pytest.raises(Fault):
        trajectory.intent(asked(4))
    with pytest.raises(Fault, match="damaged from step 2"):
        list(store.export(ID))
    store.close()


async def test_a_log_that_is_gone_is_not_forgotten(tmp_path: Path) -> None:
    records = await filled(tmp_path, 2)
    store = opened(tmp_path)
    await do(store.get(ID), 2)
    store.close()
    assert records and (tmp_path / ID / "summary").exists()
    for ruin in (
        lambda path: path.unlink(),
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(bytes(99)),
    ):
        ruin(tmp_path / ID / "log")
        again = opened(tmp_path)
        found = again.find("j", "r")
        assert found is not None and found.damaged == 0
        with pytest.raises(Fault, match="damaged from step 0"):
            found.read(0, 1, 1)
        again.close()


async def test_records_from_elsewhere_break_the_chain(tmp_path: Path) -> None:
    await filled(tmp_path / "a", 3)
    log = tmp_path / "a" / ID / "log"
    data = log.read_bytes()
    whole = ends(data)
    without = data[: whole[4]] + data[whole[5] :]  # the outcome of step 0 is taken out, with nothing flipped
    store = opened(copied(tmp_path / "a", tmp_path / "b", without))
    assert any("does not follow" in problem for problem in (await store.verify(ID)).problems)
    store.close()
    store = opened(tmp_path / "a")
    assert (await store.verify(ID)).problems == ()
    store.close()


async def test_a_full_disk_at_every_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever fits, what was told is there and nothing else is, and all goes on when there is room again."""
    await filled(tmp_path / "a", 1)
    data = (tmp_path / "a" / ID / "log").read_bytes()
    for room in range(0, 3000, 29):
        store = opened(copied(tmp_path / "a", tmp_path / "b", data))
        trajectory = store.get(ID)
        trajectory.step(0)
        monkeypatch.setattr(os, "pwrite", FullDisk(room))
        expected, full = 1, 0
        for out in (b"x", b"y" * 20_000, b"z"):
            try:
                trajectory.intent(asked(expected))
                expected += 1
                await told(trajectory, expected - 1, out)
            except Fault as fault:
                assert fault.body.kind is ErrorKind.NO_SPACE and fault.body.retryable
                full += 1
        monkeypatch.setattr(os, "pwrite", REAL)
        assert full and trajectory.steps == expected
        for number in trajectory.info().unknown:
            await told(trajectory, number)
        await do(trajectory, expected)
        assert not (await store.verify(ID)).problems
        records = trajectory.read(0, 9, 1 << 20)
        assert all(record.done_at is not None for record in records)
        store.close()
        (tmp_path / "b" / ID / "summary").unlink(missing_ok=True)
        again = opened(tmp_path / "b")
        assert again.get(ID).read(0, 9, 1 << 20) == records
        again.close()


async def test_a_full_disk_refuses_a_new_rollout_and_leaves_nothing_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = opened(tmp_path)
    for room in range(0, 2000, 31):
        monkeypatch.setattr(os, "pwrite", FullDisk(room))
        try:
            store.create(ID, job="j", name="r", args=ARGS)
            break
        except Fault as fault:
            assert fault.body.kind is ErrorKind.NO_SPACE
        assert [path.name for path in tmp_path.iterdir()] == ["lock"] and store.find("j", "r") is None
    monkeypatch.setattr(os, "pwrite", REAL)
    assert (await do(store.get(ID), 0)).done_at is not None
    store.close()


ON_A_SMALL_DISK = """
import asyncio, os, shutil, sys
from pathlib import Path
from dsec.protocol.errors import ErrorKind, Fault
from tests.rollout.logs import ARGS, ID, asked, do, opened, told

async def main(root):
    store = opened(root)
    trajectory = store.create(ID, job="j", name="r", args=ARGS)
    await trajectory.opened()
    done, full = [], 0
    while full < 20:
        try:
            trajectory.intent(asked(trajectory.steps))
            done.append(await told(trajectory, trajectory.steps - 1, os.urandom(9000 if full % 2 else 40000)))
        except Fault as fault:
            assert fault.body.kind is ErrorKind.NO_SPACE, fault
            full += 1
    assert len(done) > 20, len(done)
    (root / "ballast").unlink()
    for number in trajectory.info().unknown:
        await told(trajectory, number)
    await do(trajectory, trajectory.steps)
    store.close()
    (root / ID / "summary").unlink(missing_ok=True)
    again = opened(root)
    found = again.get(ID)
    steps = {record.step: record for record in found.read(0, 10**6, 1 << 30)}
    assert all(steps[record.step] == record for record in done) and not found.info().unknown
    assert not (await again.verify(ID)).problems
    for record in done:
        found.blob(record.outputs["stdout"].digest)
    again.close()
    print(len(done), "steps kept")

root = Path(sys.argv[1])
(root / "ballast").write_bytes(bytes(500_000))
asyncio.run(main(root))
"""


def test_a_real_disk_that_is_full(tmp_path: Path) -> None:
    """A tmpfs of 2 MiB in a mount namespace of its own, which goes with the process."""
    if os.geteuid() != 0:
        pytest.skip("a mount needs root")
    program = f'mount -t tmpfs -o size=2m,mode=700 none {tmp_path} && exec "$0" -c "$1" {tmp_path}'
    root = Path(__file__).parents[2]
    said = subprocess.run(
        ["unshare", "--mount", "--propagation", "private", "sh", "-c", program, sys.executable, ON_A_SMALL_DISK],
        capture_output=True,
        text=True,
        cwd=root,
        timeout=60,
    )
    assert said.returncode == 0 and "steps kept" in said.stdout, said.stderr


def test_the_store_of_a_future_version_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / ID).mkdir()
    (tmp_path / ID / "log").write_bytes(b"DSECROL\x02" + os.urandom(500))
    store = TrajectoryStore(tmp_path)
    store.load()
    assert store.get(ID).damaged == 0 and (tmp_path / ID / "log").stat().st_size == 508
    store.close()
