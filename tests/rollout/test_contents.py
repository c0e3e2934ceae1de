"""Contents of steps: whatever their size, in bounded memory, found by digest or missed by name."""

from __future__ import annotations

import asyncio
import os
import tracemalloc
from pathlib import Path

import pytest
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st

from dsec.protocol.errors import ErrorKind, Fault
from dsec.rollout.contents import Output

from .logs import ARGS, ID, REAL, FullDisk, asked, do, filled, opened, until, with_disk


@settings(max_examples=100, deadline=None)
@given(pieces=st.lists(st.binary(max_size=40), max_size=12), inline=st.integers(0, 60), keep=st.integers(0, 120))
def test_an_output_is_what_was_written_up_to_its_bound(
    tmp_path_factory: pytest.TempPathFactory, pieces: list[bytes], inline: int, keep: int
) -> None:
    output = Output(tmp_path_factory.mktemp("o") / "blobs", inline, keep)
    for piece in pieces:
        output.write(piece)
    whole = b"".join(pieces)
    blob = output.blob()
    kept = min(len(whole), keep)
    assert blob.total == len(whole) and blob.size == kept
    assert blob.digest == blake3(whole[:kept] if keep else whole).hexdigest()
    assert blob.whole == (blake3(whole).hexdigest() if 0 < keep < len(whole) else "")
    if keep and kept <= inline:
        assert blob.data == whole[:kept] and output.path is None
    elif keep:
        assert blob.data is None and output.path is not None and output.path.read_bytes() == whole[:kept]
    output.discard()
    assert output.path is None


@pytest.mark.parametrize("room", [0, 1, 150, 299])
def test_what_the_disk_refuses_is_not_in_an_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: int) -> None:
    for size in (50, 150):  # the first long piece is refused, or a later one
        output = Output(tmp_path / str(size), 100, 10_000)
        output.write(b"a" * size)
        monkeypatch.setattr(os, "pwrite", FullDisk(room))
        with pytest.raises(Fault) as full:
            output.write(b"b" * 400)
        monkeypatch.setattr(os, "pwrite", REAL)
        assert full.value.body.kind is ErrorKind.NO_SPACE
        blob = output.blob()
        assert (blob.size, blob.total) == (size, size)
        held = output.path.read_bytes() if output.path else blob.data
        assert held == b"a" * size and blob.digest == blake3(held).hexdigest()
        output.write(b"c" * 400)
        assert output.path is not None and output.path.read_bytes() == b"a" * size + b"c" * 400


async def test_a_gigabyte_is_counted_and_a_part_of_it_kept(tmp_path: Path) -> None:
    store = opened(tmp_path)
    trajectory = store.create(ID, job="j", name="r", args=ARGS)
    trajectory.intent(asked(0))
    piece = os.urandom(1 << 20)
    tracemalloc.start()
    output = trajectory.output()
    for _ in range(1024):
        output.write(piece)
    record = await trajectory.outcome(0, result=b"{}", error=None, outputs={"stdout": output}, inputs={}, done_at=1.0)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    blob = record.outputs["stdout"]
    assert (blob.total, blob.size, blob.data) == (1 << 30, 16 << 20, None)
    assert peak < 4 << 20
    assert trajectory.blob(blob.digest) == piece * 16
    assert 16 << 20 < trajectory.info().bytes < 17 << 20
    store.close()


async def test_the_same_content_is_there_once(tmp_path: Path) -> None:
    await filled(tmp_path, 5, b"same" * 10_000)
    assert len(list((tmp_path / ID / "blobs").iterdir())) == 1
    store = opened(tmp_path)
    assert store.get(ID).info().bytes < 50_000
    store.close()


async def test_a_missing_and_an_altered_content_concern_their_step_alone(tmp_path: Path) -> None:
    store = opened(tmp_path)
    trajectory = store.create(ID, job="j", name="r", args=ARGS)
    records = [await do(trajectory, number, bytes([number]) * 50_000) for number in range(3)]
    digests = [record.outputs["stdout"].digest for record in records]
    trajectory.blob_path(digests[0]).unlink()
    path = trajectory.blob_path(digests[1])
    path.write_bytes(b"\x02" + path.read_bytes()[1:])
    with pytest.raises(Fault, match=r"stdout of step 0 of rollout .* is missing") as missing:
        trajectory.blob(digests[0])
    assert missing.value.body.kind is ErrorKind.NOT_FOUND and missing.value.body.details["step"] == 0
    with pytest.raises(Fault, match=r"stdout of step 1 of rollout .* was altered") as altered:
        trajectory.blob(digests[1])
    assert altered.value.body.kind is ErrorKind.INTERNAL
    assert trajectory.blob(digests[2]) == b"\x02" * 50_000
    assert trajectory.read(0, 3, 1 << 20) == records, "what the steps gave is known all the same"
    with pytest.raises(Fault, match="no step of rollout"):
        trajectory.blob("0" * 64)
    for bad in ("../log", "x" * 64, ""):
        with pytest.raises(Fault) as refused:
            trajectory.blob(bad)
        assert refused.value.body.kind is ErrorKind.INVALID
    problems = (await store.verify(ID)).problems
    assert len(problems) == 2 and "step 0" in problems[0] and "step 1" in problems[1]
    store.close()


async def test_what_was_not_kept_says_so(tmp_path: Path) -> None:
    store = opened(tmp_path)
    trajectory = store.create(ID, job="j", name="r", args=ARGS)
    trajectory.intent(asked(0))
    given = trajectory.output(keep=0)
    given.write(b"secret")
    record = await trajectory.outcome(0, result=b"{}", error=None, outputs={}, inputs={"data": given}, done_at=1.0)
    blob = record.inputs["data"]
    assert (blob.size, blob.total, blob.digest) == (0, 6, blake3(b"secret").hexdigest())
    with pytest.raises(Fault, match=r"data of step 0 .* was not kept"):
        trajectory.blob(blob.digest)
    assert not (await store.verify(ID)).problems
    store.close()


async def test_a_death_between_content_and_record_leaves_nothing(tmp_path: Path) -> None:
    store = opened(tmp_path)
    trajectory = store.create(ID, job="j", name="r", args=ARGS)
    await trajectory.opened()
    await do(trajectory, 0, b"a" * 50_000)
    trajectory.intent(asked(1))
    half = trajectory.output()
    half.write(b"b" * 50_000)
    blobs = tmp_path / ID / "blobs"
    full = trajectory.output()
    full.write(b"c" * 50_000)
    disk = with_disk(store)
    telling = asyncio.ensure_future(
        trajectory.outcome(1, result=b"{}", error=None, outputs={"stdout": full}, inputs={}, done_at=1.0)
    )
    await until(lambda: disk.waiting)
    full.named(blobs / full.blob().digest)  # the content has its name, the record is not written
    assert len(list(blobs.iterdir())) == 3
    telling.cancel()
    await asyncio.wait([telling])
    store.close()
    (tmp_path / ID / "summary").unlink(missing_ok=True)
    again = opened(tmp_path)
    assert len(list(blobs.iterdir())) == 1
    assert again.get(ID).info().unknown == (1,)
    again.close()
