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

from dsec.protocol.specs import DSecContainerRunArgs, Reason, State

_SCHEMA = """
create table if not exists meta (key text primary key, value integer not null) without rowid;
create table if not exists sandbox (
    id text primary key, state text not null, reason text, detail text not null default '', created_at real not null,
    ended_at real, incarnation integer not null, args blob not null, layers blob not null,
    pid integer not null default 0, start integer not null default 0, idempotency_key text unique
) without rowid;
create index if not exists sandbox_ended on sandbox (ended_at) where ended_at is not null;
"""
KEEP_ENDED = 20_000
_COMPACT_EVERY = 1_000


class Record(msgspec.Struct, kw_only=True):
    """One sandbox as the journal has it."""

    id: str
    state: State
    reason: Reason | None
    detail: str
    created_at: float
    ended_at: float | None
    incarnation: int
    args: DSecContainerRunArgs
    layers: tuple[str, ...]
    pid: int
    start: int


class Journal:
    def __init__(self, path: Path) -> None:
        self._db = apsw.Connection(str(path))
        self._db.execute("pragma journal_mode=wal; pragma synchronous=normal; pragma wal_autocheckpoint=2000")
        self._db.execute(_SCHEMA)
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
                reason=Reason(row[2]) if row[2] else None,
                detail=row[3],
                created_at=row[4],
                ended_at=row[5],
                incarnation=row[6],
                args=msgspec.msgpack.decode(row[7], type=DSecContainerRunArgs),
                layers=msgspec.msgpack.decode(row[8], type=tuple[str, ...]),
                pid=row[9],
                start=row[10],
            )

    def creating(self, id: str, args: DSecContainerRunArgs, layers: tuple[str, ...], incarnation: int) -> None:
        self._add(
            "insert into sandbox (id, state, created_at, incarnation, args, layers, idempotency_key) values (?,?,?,?,?,?,?)",
            (id, State.CREATING.value, time.time(), incarnation, msgspec.msgpack.encode(args),
             msgspec.msgpack.encode(layers), args.idempotency_key),
        )  # fmt: skip

    def running(self, id: str, pid: int, start: int) -> None:
        self._add("update sandbox set state=?, pid=?, start=? where id=?", (State.RUNNING.value, pid, start, id))

    def state(self, id: str, state: State) -> None:
        self._add("update sandbox set state=? where id=?", (state.value, id))

    def ended(self, id: str, state: State, reason: Reason, detail: str = "") -> None:
        """The final word; the idempotency key is free again."""
        self._add(
            "update sandbox set state=?, reason=?, detail=?, ended_at=?, idempotency_key=null where id=?",
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
            await asyncio.shield(self._flush)

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
