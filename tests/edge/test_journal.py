"""The journal reads back what it was told, whatever happens to its end."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsec.edge import journal as module
from dsec.edge.journal import Journal, Record
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
    journal.running(record("after"))
    await journal.commit()
    journal.close()
    again = Journal(tmp_path / "j")
    assert {r.id for r in again.records()} == {"first", "after"}
    again.close()
