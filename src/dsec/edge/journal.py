"""What the edge must not forget: an append-only file of checked records, one write for each turn of the event loop.

    file   = magic, record*
    record: `protocol.checked`, of msgpack

A sandbox is recorded whole when it runs (`Record`), then by what changes (`Change`) and by its end; a job whole at each change
of it (`JobRecord`), and by its account (`Totals`). All changes of one turn leave in one write(2), which the death of this
process does not undo; a power cut may lose the last ones, and need not keep them: a reboot ends every sandbox anyway. Reading
stops at the first record that is cut off or does not match its checksum, and the file is cut there. When most of it is
superseded, it is written anew beside itself and renamed, so that its size stays bounded by what is alive and the last
`KEEP_ENDED` ends.

One process at a time has it: a lock beside it says so, and a second edge on the same directory is refused by name.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from dsec.protocol.checked import intact, pack
from dsec.protocol.errors import ErrorKind, Fault
from dsec.protocol.specs import DSecContainerRunArgs, Reason, State
from dsec.rollout.jobs import JobRecord, Totals

_MAGIC = b"DSECJRN\x01"
KEEP_ENDED = 10_000
COMPACT_FROM = 16 * 1024 * 1024


class Looks(msgspec.Struct, frozen=True, omit_defaults=True):
    """Permission bits and owner of a file or directory."""

    mode: int
    uid: int = 0
    gid: int = 0


class Before(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """/etc/hosts and /etc of a sandbox before the first line of ours. None: the sandbox had changed it already."""

    directory: Looks | None = None
    file: Looks | None = None
    size: int = -1
    digest: str = ""


class Change(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What became different in a sandbox that lives. A field that is not given stays."""

    state: State | msgspec.UnsetType = msgspec.UNSET
    stop_reason: Reason | msgspec.UnsetType = msgspec.UNSET
    """Its removal has begun, for this reason."""
    detail: str | msgspec.UnsetType = msgspec.UNSET
    idle_limit: float | msgspec.UnsetType | None = msgspec.UNSET
    total_limit: float | msgspec.UnsetType | None = msgspec.UNSET
    oom_kills: int | msgspec.UnsetType = msgspec.UNSET
    """Kills of the kernel that a command's result has accounted for."""
    args: DSecContainerRunArgs | msgspec.UnsetType = msgspec.UNSET
    hosts: Before | msgspec.UnsetType = msgspec.UNSET
    """A name for a service was written into its /etc/hosts, for the first time."""
    sealed: bool | msgspec.UnsetType = msgspec.UNSET
    """Nothing changes it any more."""


class Record(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One sandbox as the journal has it. born: the monotonic clock of the boot `boot`, seconds."""

    id: str
    state: State
    created_at: float
    incarnation: int
    args: DSecContainerRunArgs
    layers: tuple[str, ...]
    pid: int = 0
    start: int = 0
    boot: str = ""
    born: float = 0.0
    stop_reason: Reason | None = None
    idle_limit: float | None = None
    total_limit: float | None = None
    oom_kills: int = 0
    hosts: Before | None = None
    sealed: bool = False
    reason: Reason | None = None
    detail: str = ""
    ended_at: float | None = None
    job: str = ""


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


class _Changed(msgspec.Struct, omit_defaults=True):
    changed: str
    change: Change


class _Job(msgspec.Struct, omit_defaults=True):
    """A job, whole; None: forgotten."""

    job_of: str
    of_job: JobRecord | None = None


class _Spent(msgspec.Struct, omit_defaults=True):
    """The account of a job."""

    spent_by: str
    totals: Totals


class _Any(Record, kw_only=True, omit_defaults=True):
    """Any of them, for reading: which fields are there tells which one it is."""

    id: str = ""
    state: State = State.CREATING
    created_at: float = 0.0
    incarnation: int = 0
    args: DSecContainerRunArgs = DSecContainerRunArgs()
    layers: tuple[str, ...] = ()
    epoch: int = 0
    ended: str = ""
    changed: str = ""
    change: Change = Change()
    job_of: str = ""
    of_job: JobRecord | None = None
    spent_by: str = ""
    totals: Totals | None = None


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_Any).decode


class Journal:
    def __init__(self, path: Path) -> None:
        """Fault conflict when another process has it, or when the file is none of ours."""
        self._path = path
        self._live: dict[str, Record] = {}
        self._past: dict[str, Record] = {}
        self._jobs: dict[str, JobRecord] = {}
        self._epoch = 0
        self._behind = False
        self._compact_at = COMPACT_FROM
        self._pending: list[bytes] = []
        self._flush: asyncio.Future[None] | None = None
        self._lock = _locked(path)
        self._file = -1
        try:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            self._size = self._load()
        except BaseException:
            self._shut()
            raise

    # -- reading --

    def _load(self) -> int:
        """Replays the file, cuts what is broken at its end, and returns its size."""
        with open(self._file, "rb", closefd=False) as file:
            data = file.read()
        if _MAGIC.startswith(data):  # new, or its maker died over the first bytes
            os.pwrite(self._file, _MAGIC, 0)
            return len(_MAGIC)
        if not data.startswith(_MAGIC):
            raise Fault(
                ErrorKind.CONFLICT,
                f"{self._path} is not a journal that this version of DSec reads (it begins with {data[:8]!r})",
                hint="move it away to start afresh; the sandboxes it knows will be removed",
            )
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
                self._now_past(known)
        elif record.changed:
            if (known := self._live.get(record.changed)) is not None:
                _change(known, record.change)
        elif record.job_of:
            self._jobs.pop(record.job_of, None)
            if record.of_job is not None:
                self._jobs[record.job_of] = record.of_job
        elif record.spent_by and record.totals is not None:
            if (job := self._jobs.get(record.spent_by)) is not None:
                job.totals = record.totals
        elif record.id:
            kept = Record(**{name: getattr(record, name) for name in Record.__struct_fields__})
            if kept.ended_at is None:
                self._live[kept.id] = kept
            else:
                self._now_past(kept)

    def records(self) -> list[Record]:
        """Every sandbox known, those that never ended first."""
        return [*self._live.values(), *self._past.values()]

    def record(self, id: str) -> Record | None:
        """Of a sandbox that has not ended."""
        return self._live.get(id)

    def jobs(self) -> list[JobRecord]:
        """Every job that was not forgotten."""
        return list(self._jobs.values())

    # -- writing --

    def next_epoch(self) -> int:
        """Counts the starts of this edge; a higher epoch fences what a lower one left. On disk when it returns.

        Unless the disk is full: live sandboxes must find an edge all the same, and of two with one epoch the later one wins.
        """
        self._epoch += 1
        try:
            self._write_out(pack(_encode(_Epoch(self._epoch))))
        except OSError:
            self._behind = True
        return self._epoch

    def running(self, record: Record) -> None:
        """A sandbox that answers. One still being made needs no record: what is not here is removed at the next start."""
        self._live[record.id] = record
        self._add(_encode(record))

    def update(self, id: str, change: Change) -> None:
        """What became different in a sandbox that `running` has recorded; of others nothing is kept."""
        if (record := self._live.get(id)) is not None:
            _change(record, change)
            self._add(_encode(_Changed(id, change)))

    def job(self, record: JobRecord) -> None:
        """A job as it is now; it may go on changing, and is told of again."""
        self._jobs[record.id] = record
        self._add(_encode(_Job(record.id, record)))

    def spent(self, record: JobRecord) -> None:
        """The account of a job as it is now."""
        self._add(_encode(_Spent(record.id, record.totals)))

    def forget_job(self, id: str) -> None:
        if self._jobs.pop(id, None) is not None:
            self._add(_encode(_Job(id)))

    def ended(self, id: str, state: State, reason: Reason, detail: str = "") -> None:
        """The final word."""
        record = self._live.pop(id, None)
        if record is None:
            return  # it never ran
        record.state, record.reason, record.detail, record.ended_at = state, reason, detail, time.time()
        self._now_past(record)
        self._add(_encode(_Ended(id, state, reason, detail, record.ended_at)))

    async def commit(self) -> None:
        """Until what was recorded so far would survive the death of this process; Fault no_space when the disk is full."""
        if self._flush is None and self._behind:  # what could not be written then is tried again now
            self._write_soon()
        if self._flush is not None:
            await asyncio.shield(self._flush)

    def close(self) -> None:
        if self._pending:
            self._write()
        self._shut()

    def _shut(self) -> None:
        for fd in (self._file, self._lock):
            if fd >= 0:
                os.close(fd)
        self._file = self._lock = -1

    def _now_past(self, record: Record) -> None:
        """The oldest ends make room."""
        self._past[record.id] = record
        while len(self._past) > KEEP_ENDED:
            del self._past[next(iter(self._past))]

    def _add(self, payload: bytes) -> None:
        self._pending.append(pack(payload))
        if self._flush is None:
            self._write_soon()

    def _write_soon(self) -> None:
        loop = asyncio.get_running_loop()
        self._flush = loop.create_future()
        loop.call_soon(self._write)

    def _write(self) -> None:
        """A write that failed leaves the file behind what we know; the next one then writes all of it anew."""
        pending, self._pending = self._pending, []
        done, self._flush = self._flush, None
        try:
            if self._behind:
                self._compact(whatever_size=True)
            else:
                self._write_out(b"".join(pending))
            self._behind = False
            if self._size > self._compact_at:
                self._compact()
        except OSError as error:
            self._behind = True
            if done is not None:
                done.set_exception(Fault(ErrorKind.NO_SPACE, f"the journal {self._path} cannot be written: {error.strerror}",
                                         hint="make room on the disk of the state directory", retryable=True))  # fmt: skip
                done.exception()  # when nobody waits for it, the next commit tries again and tells
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

    def _compact(self, *, whatever_size: bool = False) -> None:
        """Only what counts, in a new file that takes the old one's name."""
        beside = self._path.with_suffix(".new")
        records = [_encode(_Epoch(self._epoch))] if self._epoch else []
        records += [_encode(_Job(job.id, job)) for job in self._jobs.values()]
        records += map(_encode, self.records())
        data = _MAGIC + b"".join(map(pack, records))
        self._compact_at = max(
            COMPACT_FROM, 2 * len(data)
        )  # so that looking at all of it is rare, however much is alive
        if len(data) > self._size // 2 and not whatever_size:
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


def _change(record: Record, change: Change) -> None:
    for name in Change.__struct_fields__:
        if (value := getattr(change, name)) is not msgspec.UNSET:
            setattr(record, name, value)


def _locked(path: Path) -> int:
    """A descriptor that holds the lock beside the journal; it goes with the process."""
    fd = os.open(path.with_name(path.name + ".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(fd)
        if error.errno != errno.EWOULDBLOCK:
            raise
        raise Fault(
            ErrorKind.CONFLICT,
            f"another edge runs on {path.parent}: it holds {path.name}",
            hint="end it with `dsec down`, or choose another state directory",
        ) from None
    return fd


def _intact(data: bytes, position: int) -> Iterator[tuple[_Any, int]]:
    """Records and where each ends, up to the first that is not whole."""
    for payload, end in intact(data, position):
        try:
            yield _decode(payload), end
        except msgspec.DecodeError:
            return
