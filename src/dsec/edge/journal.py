"""What the edge must not forget: an append-only file of checked records, one write for each turn of the event loop.

    file   = magic, record*
    record = u32 length of payload, u32 crc32 of payload, payload        (little endian; payload: msgpack of `Record`)

The last record of a sandbox counts. All changes of one turn leave in one write(2), which the death of this process does not
undo; a power cut may lose the last ones, and need not keep them: a reboot ends every sandbox anyway. Reading stops at the
first record that is cut off or does not match its checksum, and the file is cut there. When most of it is superseded, it is
written anew beside itself and renamed, so that its size stays bounded by what is alive and the last `KEEP_ENDED` ends.
"""

from __future__ import annotations

import asyncio
import os
import struct
import time
import zlib
from collections.abc import Iterator
from pathlib import Path

import msgspec

from dsec.protocol.errors import ErrorKind, Fault
from dsec.protocol.specs import DSecContainerRunArgs, Reason, State

_MAGIC = b"DSECJRN\x01"
_HEAD = struct.Struct("<II")
KEEP_ENDED = 10_000
COMPACT_FROM = 16 * 1024 * 1024
_MAX_PAYLOAD = 16 * 1024 * 1024


class Record(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One sandbox as the journal has it."""

    id: str
    state: State
    created_at: float
    incarnation: int
    args: DSecContainerRunArgs
    layers: tuple[str, ...]
    pid: int = 0
    start: int = 0
    reason: Reason | None = None
    detail: str = ""
    ended_at: float | None = None


class _Epoch(msgspec.Struct, omit_defaults=True):
    """A start of this edge; told apart from a sandbox by its field."""

    epoch: int


class _Ended(msgspec.Struct, omit_defaults=True):
    """The end of a sandbox that is in the journal already: what changes, and nothing twice."""

    ended: str
    state: State
    reason: Reason
    detail: str
    ended_at: float


class _Any(Record, kw_only=True, omit_defaults=True):
    """Any of the three, for reading: which fields are there tells which one it is."""

    id: str = ""
    state: State = State.CREATING
    created_at: float = 0.0
    incarnation: int = 0
    args: DSecContainerRunArgs = DSecContainerRunArgs()
    layers: tuple[str, ...] = ()
    epoch: int = 0
    ended: str = ""


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_Any).decode


class Journal:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._live: dict[str, Record] = {}
        self._past: dict[str, Record] = {}
        self._epoch = 0
        self._pending: list[bytes] = []
        self._flush: asyncio.Future[None] | None = None
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._size = self._load()

    # -- reading --

    def _load(self) -> int:
        """Replays the file, cuts what is broken at its end, and returns its size."""
        with open(self._file, "rb", closefd=False) as file:
            data = file.read()
        if not data.startswith(_MAGIC):
            os.ftruncate(self._file, 0)
            os.pwrite(self._file, _MAGIC, 0)
            return len(_MAGIC)
        position = len(_MAGIC)
        for record, end in _intact(data, position):
            self._apply(record)
            position = end
        os.ftruncate(self._file, position)
        return position

    def _apply(self, record: _Any) -> None:
        if record.epoch:
            self._epoch = record.epoch
        elif record.ended:
            if (known := self._live.pop(record.ended, None)) is not None:
                known.state, known.reason, known.detail = record.state, record.reason, record.detail
                known.ended_at = record.ended_at
                self._past[known.id] = known
        else:
            kept = Record(**{name: getattr(record, name) for name in Record.__struct_fields__})
            (self._live if kept.ended_at is None else self._past)[kept.id] = kept
        self._bound()

    def records(self) -> list[Record]:
        """Every sandbox known, those that never ended first."""
        return [*self._live.values(), *self._past.values()]

    # -- writing --

    def next_epoch(self) -> int:
        """Counts the starts of this edge; a higher epoch fences what a lower one left. On disk when it returns."""
        self._epoch += 1
        self._write_out(_pack(_encode(_Epoch(self._epoch))))
        return self._epoch

    def running(self, record: Record) -> None:
        """A sandbox that answers. One still being made needs no record: what is not here is removed at the next start."""
        self._live[record.id] = record
        self._add(_encode(record))

    def ended(self, id: str, state: State, reason: Reason, detail: str = "") -> None:
        """The final word."""
        record = self._live.pop(id, None)
        if record is None:
            return  # it never ran
        record.state, record.reason, record.detail, record.ended_at = state, reason, detail, time.time()
        self._past[id] = record
        self._bound()
        self._add(_encode(_Ended(id, state, reason, detail, record.ended_at)))

    async def commit(self) -> None:
        """Until what was recorded so far would survive the death of this process; Fault no_space when the disk is full."""
        if self._flush is not None:
            await asyncio.shield(self._flush)

    def close(self) -> None:
        if self._pending:
            self._write()
        os.close(self._file)

    def _bound(self) -> None:
        while len(self._past) > KEEP_ENDED:
            del self._past[next(iter(self._past))]

    def _add(self, payload: bytes) -> None:
        self._pending.append(_pack(payload))
        if self._flush is None:
            loop = asyncio.get_running_loop()
            self._flush = loop.create_future()
            loop.call_soon(self._write)

    def _write(self) -> None:
        pending, self._pending = self._pending, []
        done, self._flush = self._flush, None
        try:
            self._write_out(b"".join(pending))
            if self._size > COMPACT_FROM:
                self._compact()
        except OSError as error:
            if done is not None:
                done.set_exception(Fault(ErrorKind.NO_SPACE, f"the journal {self._path} cannot be written: {error.strerror}",
                                         hint="make room on the disk of the state directory", retryable=True))  # fmt: skip
                done.exception()  # one that nobody waits for is told by the next commit
            return
        if done is not None:
            done.set_result(None)

    def _write_out(self, data: bytes) -> None:
        """All or nothing: a record that the full disk cut in half is cut away, so that what follows it can be read."""
        written = 0
        try:
            while written < len(data):
                written += os.pwrite(self._file, data[written:], self._size + written)
        except OSError:
            os.ftruncate(self._file, self._size)
            raise
        self._size += len(data)

    def _compact(self) -> None:
        """Only what counts, in a new file that takes the old one's name."""
        beside = self._path.with_suffix(".new")
        records = [_encode(_Epoch(self._epoch)), *(_encode(record) for record in self.records())]
        data = _MAGIC + b"".join(map(_pack, records))
        if len(data) > self._size // 2:
            return  # mostly alive: later
        file = os.open(beside, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            with open(file, "wb", closefd=False) as out:
                out.write(data)
            os.rename(beside, self._path)
        except OSError:
            os.close(file)
            beside.unlink(missing_ok=True)
            raise
        os.close(self._file)
        self._file, self._size = file, len(data)


def _pack(payload: bytes) -> bytes:
    return _HEAD.pack(len(payload), zlib.crc32(payload)) + payload


def _intact(data: bytes, position: int) -> Iterator[tuple[_Any, int]]:
    """Records and where each ends, up to the first that is not whole."""
    while position + _HEAD.size <= len(data):
        length, crc = _HEAD.unpack_from(data, position)
        start = position + _HEAD.size
        end = start + length
        if length > _MAX_PAYLOAD or end > len(data) or zlib.crc32(data[start:end]) != crc:
            return
        try:
            yield _decode(data[start:end]), end
        except msgspec.DecodeError:
            return
        position = end
