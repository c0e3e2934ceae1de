"""What the edge must not forget: one SQLite file in WAL mode, written in groups.

All changes of one turn of the event loop leave in one transaction; a caller that needs its change to survive a kill awaits
`commit()`. synchronous=NORMAL does not survive a power cut, and need not: a reboot ends every sandbox anyway.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

import apsw
import msgspec

from dsec.protocol.errors import ErrorKind, Fault
from dsec.protocol.specs import DSecContainerRunArgs, Reason, State

_SCHEMA = """
create table if not exists meta (key text primary key, value integer not null) without rowid;
create table if not exists sandbox (
    id text primary key, state text not null, reason text, detail text not null default '', created_at real not null,
    ended_at real, incarnation integer not null, args blob not null, layers blob not null,
    pid integer not null, start integer not null
);
create index if not exists sandbox_ended on sandbox (ended_at) where ended_at is not null;
"""
_PRAGMAS = ("pragma journal_mode=wal", "pragma synchronous=normal", "pragma wal_autocheckpoint=4000")
KEEP_ENDED = 20_000
_COMPACT_EVERY = 1_000


class Record(msgspec.Struct, kw_only=True):
    """One sandbox as the journal has it."""

    id: str
    state: State
    created_at: float
    incarnation: int
    args: DSecContainerRunArgs
    layers: tuple[str, ...]
    pid: int
    start: int
    reason: Reason | None = None
    detail: str = ""
    ended_at: float | None = None


class Journal:
    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._db = apsw.Connection(str(path))
            for statement in (*_PRAGMAS, _SCHEMA):
                self._db.execute(
                    statement
                ).fetchall()  # a statement behind one that returns rows would wait for their reader
        except apsw.Error as error:
            raise _unusable(path, error) from error
        self._pending: list[tuple[str, tuple[object, ...]]] = []
        self._flush: asyncio.Future[None] | None = None
        self._ended = 0

    def next_epoch(self) -> int:
        """Counts the starts of this edge; a higher epoch fences what a lower one left."""
        rows = self._db.execute(
            "insert into meta values ('epoch', 1) on conflict (key) do update set value = value + 1 returning value"
        ).fetchall()
        return int(str(rows[0][0]))

    def records(self) -> Iterator[Record]:
        query = (
            "select id, state, reason, detail, created_at, ended_at, incarnation, args, layers, pid, start from sandbox"
        )
        for row in self._db.execute(query):
            yield Record(
                id=row[0],
                state=State(row[1]),
                created_at=row[4],
                incarnation=row[6],
                args=msgspec.msgpack.decode(row[7], type=DSecContainerRunArgs),
                layers=msgspec.msgpack.decode(row[8], type=tuple[str, ...]),
                pid=row[9],
                start=row[10],
                reason=Reason(row[2]) if row[2] else None,
                detail=row[3],
                ended_at=row[5],
            )

    def running(self, record: Record) -> None:
        """A sandbox that answers. One still being made needs no record: what is not here is removed at the next start."""
        self._add(
            "insert into sandbox (id, state, created_at, incarnation, args, layers, pid, start) values (?,?,?,?,?,?,?,?)",
            (
                record.id,
                record.state.value,
                record.created_at,
                record.incarnation,
                msgspec.msgpack.encode(record.args),
                msgspec.msgpack.encode(record.layers),
                record.pid,
                record.start,
            ),
        )

    def ended(self, id: str, state: State, reason: Reason, detail: str = "") -> None:
        """The final word."""
        self._add(
            "update sandbox set state=?, reason=?, detail=?, ended_at=? where id=?",
            (state.value, reason.value, detail, time.time(), id),
        )
        self._ended += 1
        if self._ended % _COMPACT_EVERY == 0:
            self._add(
                "delete from sandbox where ended_at is not null and ended_at < "
                "(select ended_at from sandbox where ended_at is not null order by ended_at desc limit 1 offset ?)",
                (KEEP_ENDED,),
            )

    async def commit(self) -> None:
        """Until what was recorded so far would survive the death of this process."""
        if self._flush is not None:
            try:
                await asyncio.shield(self._flush)
            except apsw.Error as error:
                raise _unusable(self._path, error) from error

    def _add(self, sql: str, values: tuple[object, ...]) -> None:
        self._pending.append((sql, values))
        if self._flush is None:
            loop = asyncio.get_running_loop()
            self._flush = loop.create_future()
            loop.call_soon(self._write)

    def _write(self) -> None:
        pending, self._pending = self._pending, []
        done, self._flush = self._flush, None
        try:
            self._db.execute("begin")
            for sql, values in pending:
                self._db.execute(sql, values)
            self._db.execute("commit")
        except apsw.Error as error:
            if self._db.in_transaction:
                self._db.execute("rollback")
            if done is not None:
                done.set_exception(error)
                done.exception()  # a change nobody waits for is still reported by the next commit
            return
        if done is not None:
            done.set_result(None)

    def close(self) -> None:
        if self._pending:
            self._write()
        self._db.close()


def _unusable(path: Path, error: apsw.Error) -> Fault:
    if isinstance(error, apsw.FullError):
        return Fault(
            ErrorKind.NO_SPACE,
            f"the disk that holds the journal {path} is full",
            hint="free space there",
            retryable=True,
        )
    hint = (
        "look at the disk; a damaged journal may be moved away while nothing runs: it only names ended sandboxes then"
    )
    return Fault(ErrorKind.INTERNAL, f"the journal {path} cannot be used: {error}", hint=hint)
