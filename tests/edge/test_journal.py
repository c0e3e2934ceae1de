"""The journal reads back what it was told, whatever happens to its end."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsec.edge import journal as module
from dsec.edge.journal import Change, Journal, Record
from dsec.protocol.errors import ErrorKind, Fault
from dsec.protocol.specs import DSecContainerRunArgs, Reason, State


def record(id: str) -> Record:
    args = DSecContainerRunArgs("debian@12", labels={"job": "j"}, env={"A": "ä"})
    return Record(
        id=id, state=State.RUNNING, created_at=1.5, incarnation=1, args=args, layers=("x@sha256:1",), pid=7, start=9
    )


async def fill(journal: Journal, count: int) -> None:
    for number in range(count):
        journal.running(record(f"sb-{number}"))
        if number % 2:
            journal.ended(f"sb-{number}", State.STOPPED, Reason.USER, "why")
    await journal.commit()


async def test_what_was_written_is_read_back(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j")
    assert journal.next_epoch() == 1
    await fill(journal, 10)
    journal.close()
    again = Journal(tmp_path / "j")
    found = {r.id: r for r in again.records()}
    assert len(found) == 10
    assert found["sb-2"] == record("sb-2")
    assert (
        found["sb-3"].state is State.STOPPED and found["sb-3"].reason is Reason.USER and found["sb-3"].detail == "why"
    )
    assert again.next_epoch() == 2
    again.close()


@settings(max_examples=60, deadline=None)
@given(cut=st.integers(0, 2000), flip=st.integers(0, 2000))
def test_a_torn_or_flipped_end_loses_only_what_comes_after(
    tmp_path_factory: pytest.TempPathFactory, cut: int, flip: int
) -> None:
    path = tmp_path_factory.mktemp("journal") / "j"
    journal = Journal(path)
    asyncio.run(fill(journal, 6))
    journal.close()
    data = bytearray(path.read_bytes())
    position = 8 + flip % (len(data) - 8)
    data[position] ^= 0x40
    path.write_bytes(bytes(data[: max(8, len(data) - cut % len(data))]))
    again = Journal(path)
    kept = [r.id for r in again.records()]
    assert set(kept) <= {f"sb-{n}" for n in range(6)}
    asyncio.run(fill(again, 2))
    again.close()
    third = Journal(path)
    assert {r.id for r in third.records()} == {*kept, "sb-0", "sb-1"}, "what is written after the repair is read"
    third.close()


async def test_the_file_stays_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "COMPACT_FROM", 20_000)
    monkeypatch.setattr(module, "KEEP_ENDED", 5)
    journal = Journal(tmp_path / "j")
    journal.next_epoch()
    for number in range(2000):
        journal.running(record(f"sb-{number}"))
        journal.ended(f"sb-{number}", State.STOPPED, Reason.TTL_IDLE)
        await journal.commit()
    journal.running(record("alive"))
    await journal.commit()
    assert (tmp_path / "j").stat().st_size < 25_000
    journal.close()
    again = Journal(tmp_path / "j")
    assert {r.id for r in again.records() if r.ended_at is None} == {"alive"} and again.next_epoch() == 2
    again.close()


async def test_much_that_lives_is_not_looked_at_with_every_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "COMPACT_FROM", 20_000)
    looked, encode = 0, module._encode

    def counted(record: object) -> bytes:
        nonlocal looked
        looked += 1
        return encode(record)

    monkeypatch.setattr(module, "_encode", counted)
    journal = Journal(tmp_path / "j")
    for number in range(2000):
        journal.running(record(f"sb-{number}"))
        await journal.commit()
    journal.close()
    assert 2000 < looked < 6 * 2000, "each doubling of what lives costs one look, not each write"


async def test_a_full_disk_is_a_named_failure_and_later_records_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = Journal(tmp_path / "j")
    journal.running(record("first"))
    await journal.commit()
    real = os.pwrite

    def full(fd: int, data: bytes, offset: int) -> int:
        if len(data) > 10:
            return real(fd, data[:10], offset)  # ten bytes were left
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(
        os, "pwrite", lambda fd, data, offset: full(fd, data, offset) if len(data) > 50 else full(fd, b"", 0)
    )
    journal.running(record("lost"))
    with pytest.raises(Fault) as caught:
        await journal.commit()
    assert caught.value.body.kind is ErrorKind.NO_SPACE
    monkeypatch.setattr(os, "pwrite", real)
    assert b"lost" not in (tmp_path / "j").read_bytes()
    await journal.commit()
    assert b"lost" in (tmp_path / "j").read_bytes(), "who commits is not told that all is well while it is not"
    journal.running(record("after"))
    await journal.commit()
    journal.close()
    again = Journal(tmp_path / "j")
    assert {r.id for r in again.records()} == {"first", "lost", "after"}, (
        "what did not fit is written once there is room"
    )
    again.close()


async def test_an_edge_starts_on_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = Journal(tmp_path / "j")
    assert journal.next_epoch() == 1
    journal.running(record("alive"))
    await journal.commit()
    journal.close()

    def full(fd: int, data: bytes, offset: int) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        again = Journal(tmp_path / "j")
        assert again.next_epoch() == 2 and [r.id for r in again.records()] == ["alive"]
    await again.commit()
    again.close()
    third = Journal(tmp_path / "j")
    assert third.next_epoch() == 3, "the second start was written down as soon as there was room"
    third.close()


async def test_changes_survive_a_new_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "COMPACT_FROM", 20_000)
    journal = Journal(tmp_path / "j")
    for id in ("live", *(f"sb-{n}" for n in range(100))):
        journal.running(record(id))
        journal.update(id, Change(oom_kills=5, total_limit=9.0))
        if id != "live":
            journal.ended(id, State.STOPPED, Reason.USER, "why")
        await journal.commit()
    size = (tmp_path / "j").stat().st_size
    journal.close()
    again = Journal(tmp_path / "j")
    found = {r.id: r for r in again.records()}
    assert size < 70_000 and len(found) == 101
    assert (found["live"].oom_kills, found["live"].total_limit) == (5, 9.0)
    assert found["sb-99"].detail == "why"
    again.close()


async def test_a_second_edge_is_refused(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j")
    with pytest.raises(Fault) as caught:
        Journal(tmp_path / "j")
    assert caught.value.body.kind is ErrorKind.CONFLICT and "another edge" in caught.value.body.message
    journal.close()
    Journal(tmp_path / "j").close()


def test_a_file_that_is_no_journal_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "j"
    path.write_bytes(b"DSECJRN\x02 of a later version")
    for _ in range(2):  # the lock is given back too
        with pytest.raises(Fault) as caught:
            Journal(path)
        assert caught.value.body.kind is ErrorKind.CONFLICT and "not a journal" in caught.value.body.message
    assert path.read_bytes() == b"DSECJRN\x02 of a later version"
    path.write_bytes(b"DSEC")  # cut off when it was made
    Journal(path).close()
    assert path.read_bytes() == b"DSECJRN\x01"
