"""The trajectory logs of a node: what each step of each rollout asked for, and what came of it, durably and in order (report, 6).

    <root>/lock
    <root>/<rollout id>/log                 records.py, logfile.py
    <root>/<rollout id>/blobs/<blake3>      contents that are too long for a record
    <root>/<rollout id>/summary             what the log comes to, so that a start need not read it

An intent is in the file before its step runs (the death of this process does not undo it), an outcome is on the disk before
anybody is told. Nothing that a caller names becomes part of a path. Of rollouts that have ended, and of open ones that
nobody has asked for since the start, only the summary is in memory.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from weakref import WeakValueDictionary

import msgspec
from blake3 import blake3

from dsec.protocol.errors import ErrorKind, Fault
from dsec.protocol.export import exported
from dsec.protocol.rollouts import RolloutInfo, RolloutState, StepRecord
from dsec.protocol.specs import DSecContainerRunArgs

from .contents import Output
from .inspection import Verified, verified
from .known import Summary
from .records import Head
from .scan import summary_in
from .steplog import REMOVED, Shelf, Trajectory

__all__ = ["INLINE", "KEEP", "Output", "Trajectory", "TrajectoryStore", "Verified"]

INLINE = 16 * 1024
KEEP = 16 * 1024 * 1024
_PAGE = 256
_PAGE_BYTES = 4 * 1024 * 1024
_ID = re.compile(r"ro-[a-z0-9]{1,16}-[0-9a-z]{12}")
_summary = msgspec.msgpack.Decoder(Summary).decode


class _Entry:
    """A rollout that is known. summary and steps (how many) are what is kept of it while there is no `Trajectory`."""

    __slots__ = ("job", "key", "steps", "summary")

    def __init__(self, job: str, key: bytes, summary: bytes, steps: int) -> None:
        self.job, self.key, self.summary, self.steps = job, key, summary, steps


class TrajectoryStore:
    """All rollouts whose log lies here. One process at a time has it, and one event loop of that."""

    def __init__(
        self, root: Path, *, inline: int = INLINE, keep: int = KEEP, clock: Callable[[], float] = time.time
    ) -> None:
        """inline: bytes of a content that still go into the record; keep: bytes of a content that are kept at all.

        Fault conflict when another process has the directory.
        """
        self._root = root
        self._shelf = Shelf(inline, keep, clock, self._ended)
        self._entries: dict[str, _Entry] = {}
        self._ids: dict[bytes, str] = {}
        self._open: dict[str, Trajectory] = {}
        self._closed: WeakValueDictionary[str, Trajectory] = WeakValueDictionary()
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._lock = _locked(root)

    @property
    def keep(self) -> int:
        """Bytes of one content that are kept, unless its step says otherwise."""
        return self._shelf.keep

    def load(self) -> None:
        """Finds what is there, and removes what a removal or a creation left. OSError.

        Of a log whose summary is true nothing is read; of others what was written since.
        """
        for entry in sorted(self._root.iterdir()):
            if entry.name.startswith(REMOVED):
                shutil.rmtree(entry, ignore_errors=True)
            elif _ID.fullmatch(entry.name):
                self._load(entry)

    def _load(self, path: Path) -> None:
        summary = summary_in(path)
        if summary is not None and summary.size == _size(path / "log"):
            info = summary.info
            self._enter(info.id, info.job, info.name, msgspec.msgpack.encode(summary), info.steps)
            return
        trajectory = Trajectory.found(self._shelf, path)
        if trajectory is None:
            shutil.rmtree(path, ignore_errors=True)
            return
        self._enter(trajectory.id, trajectory.job, trajectory.name, trajectory.summary(), trajectory.steps)
        if trajectory.state is RolloutState.OPEN:
            self._open[trajectory.id] = trajectory
        else:
            trajectory.summarize()

    def _enter(self, id: str, job: str, name: str, summary: bytes, steps: int) -> None:
        key = _key(job, name)
        self._entries[id] = _Entry(job, key, summary, steps)
        self._ids[key] = id

    def create(self, id: str, *, job: str, name: str, args: DSecContainerRunArgs) -> Trajectory:
        """A new log, durable with the first `opened`.

        Fault conflict when that job has a rollout of that name, or the id is taken; invalid_request; no_space, internal.
        """
        if _ID.fullmatch(id) is None:
            raise Fault(ErrorKind.INVALID, f"{id[:80]!r} is no rollout's id")
        if id in self._entries or (known := self._ids.get(_key(job, name))) is not None:
            known = id if id in self._entries else known
            raise Fault(
                ErrorKind.CONFLICT,
                f"job {job[:80]!r} has a rollout {name[:80]!r} already: {known}",
                hint="open that one, or choose another name",
                rollout=known or id,
            )
        head = Head(id=id, job=job, name=name, args=args, at=self._shelf.clock())
        trajectory = self._open[id] = Trajectory.begin(self._shelf, self._root / id, head)
        self._enter(id, job, name, b"", 0)
        return trajectory

    def get(self, id: str) -> Trajectory:
        """Fault not_found."""
        entry = self._entries.get(id)
        if entry is None:
            raise Fault(
                ErrorKind.NOT_FOUND,
                f"there is no rollout {id[:80]!r} here",
                hint="`dsec rollout ls` lists them; ended ones are removed after a time",
            )
        trajectory = self._open.get(id) or self._closed.get(id)
        if trajectory is None:
            trajectory = Trajectory.again(self._shelf, self._root / id, _summary(entry.summary))
            kept = self._open if trajectory.state is RolloutState.OPEN else self._closed
            kept[id] = trajectory
        return trajectory

    def find(self, job: str, name: str) -> Trajectory | None:
        """By what its caller named it."""
        id = self._ids.get(_key(job, name))
        return None if id is None else self.get(id)

    def list(self, job: str | None = None) -> list[RolloutInfo]:
        """Of one job, or of all; oldest first."""
        found = [self._info(id) for id, entry in self._entries.items() if job is None or entry.job == job]
        return sorted(found, key=lambda info: (info.created_at, info.id))

    def count(self, job: str) -> tuple[int, int]:
        """Rollouts of a job, and steps recorded in them."""
        of_it = [(self._open.get(id), entry.steps) for id, entry in self._entries.items() if entry.job == job]
        return len(of_it), sum(steps if trajectory is None else trajectory.steps for trajectory, steps in of_it)

    def _info(self, id: str) -> RolloutInfo:
        trajectory = self._open.get(id) or self._closed.get(id)
        return trajectory.info() if trajectory is not None else _summary(self._entries[id].summary).info

    def _ended(self, trajectory: Trajectory) -> None:
        """What ended is let go of when nobody uses it any more."""
        if (entry := self._entries.get(trajectory.id)) is not None:
            entry.summary, entry.steps = trajectory.summary(), trajectory.steps
            self._open.pop(trajectory.id, None)
            self._closed[trajectory.id] = trajectory

    async def verify(self, id: str) -> Verified:
        """Every byte of a rollout, as far as it is written. Fault not_found."""
        self.get(id)
        return await asyncio.to_thread(verified, self._root / id)

    def export(self, id: str) -> Iterator[bytes]:
        """A line of JSON for each step, one before and one after them: `protocol.export`. Fault not_found; of a damaged
        log, outcome_unknown in place of the rest."""
        trajectory = self.get(id)
        info = trajectory.info()

        def steps() -> Iterator[list[StepRecord]]:
            start = 0
            while page := trajectory.read(start, min(_PAGE, info.steps - start), _PAGE_BYTES):
                yield page
                start += len(page)

        return exported(
            info, (record for page in steps() for record in page), lambda blob: trajectory.blob(blob.digest)
        )

    async def remove(self, id: str) -> None:
        """Log and contents, whatever its state. Fault not_found."""
        trajectory = self.get(id)
        entry = self._entries.pop(id)
        if self._ids.get(entry.key) == id:
            del self._ids[entry.key]
        self._open.pop(id, None)
        self._closed.pop(id, None)
        await trajectory.removed()

    async def retain(self, *, max_age_s: float, max_bytes: int) -> int:
        """Removes what ended longer ago, and the oldest of what ended until all that is here has at most so many bytes;
        returns how many. Open ones stay, and count."""
        infos = self.list()
        ended = sorted((i for i in infos if i.state is not RolloutState.OPEN), key=lambda info: info.finished_at or 0.0)
        total = sum(info.bytes for info in infos)
        removed = 0
        for info in ended:
            if self._shelf.clock() - (info.finished_at or 0.0) <= max_age_s and total <= max_bytes:
                break
            if info.id in self._entries:
                await self.remove(info.id)
                removed += 1
            total -= info.bytes
        return removed

    def close(self) -> None:
        """Lets go of everything. What was written stays."""
        for trajectory in self._open.values():
            trajectory.summarize()
        self._shelf.syncer.close()
        self._shelf.files.close()
        if self._lock >= 0:
            os.close(self._lock)
        self._lock = -1


def _key(job: str, name: str) -> bytes:
    """Short, whatever the names are. Fault invalid_request when they are no text."""
    try:
        return blake3(msgspec.msgpack.encode((job, name))).digest()
    except UnicodeEncodeError:
        raise Fault(ErrorKind.INVALID, "the name of a job or rollout has a character that is none") from None


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return -1


def _locked(root: Path) -> int:
    """A descriptor that holds the lock; it goes with the process."""
    fd = os.open(root / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        raise Fault(
            ErrorKind.CONFLICT,
            f"another process has the trajectory logs in {root}",
            hint="end it with `dsec down`, or choose another state directory",
        ) from None
    return fd
