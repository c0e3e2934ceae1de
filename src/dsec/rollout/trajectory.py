"""The trajectory logs of a node: what each step of each rollout asked for, and what came of it, durably and in order.

    <root>/lock, <root>/<rollout id>/log, <root>/<rollout id>/blobs/<blake3>

An intent is in the file before its step runs (the death of this process does not undo it), an outcome is on the disk before
anybody is told. Nothing that a caller names becomes part of a path.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import re
import shutil
import time
from array import array
from collections.abc import Callable, Mapping
from pathlib import Path

from blake3 import blake3

from dsec.protocol.checked import HEAD, payload_at
from dsec.protocol.errors import ErrorBody, ErrorKind, Fault
from dsec.protocol.rollouts import RolloutInfo, RolloutState, StepRecord
from dsec.protocol.specs import DSecContainerRunArgs, Reason

from .commit import Syncer
from .contents import DIGEST, TEMPORARY, Output, no_space
from .records import (
    FIRST_LINK,
    MAGIC,
    Body,
    Ended,
    Head,
    Intent,
    Made,
    Opened,
    Outcome,
    body_of,
    intent_of,
    packed,
    step_of,
)

__all__ = ["INLINE", "KEEP", "Output", "Trajectory", "TrajectoryStore"]

INLINE = 16 * 1024
KEEP = 16 * 1024 * 1024
_ID = re.compile(r"ro-[a-z0-9]{1,16}-[0-9a-z]{12}")
_REMOVED = ".removed-"
Clock = Callable[[], float]


class TrajectoryStore:
    """All rollouts whose log lies here. One process at a time has it."""

    def __init__(self, root: Path, *, inline: int = INLINE, keep: int = KEEP, clock: Clock = time.time) -> None:
        """inline: bytes of a content that still go into the record; keep: bytes of a content that are kept at all.

        Fault conflict when another process has the directory.
        """
        self._root, self.inline, self.keep, self.clock = root, inline, keep, clock
        self._rollouts: dict[str, Trajectory] = {}
        self._names: dict[tuple[str, str], str] = {}
        self.syncer = Syncer()
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._lock = _locked(root)

    def load(self) -> None:
        """Finds what is there; removes what a removal or a creation left behind."""
        for entry in sorted(self._root.iterdir()):
            if entry.name.startswith(_REMOVED):
                shutil.rmtree(entry, ignore_errors=True)
            elif _ID.fullmatch(entry.name):
                trajectory = Trajectory(self, entry)
                if trajectory.id:
                    self._add(trajectory)
                else:
                    shutil.rmtree(entry, ignore_errors=True)

    def _add(self, trajectory: Trajectory) -> None:
        self._rollouts[trajectory.id] = trajectory
        self._names[trajectory.job, trajectory.name] = trajectory.id

    def create(self, id: str, *, job: str, name: str, args: DSecContainerRunArgs) -> Trajectory:
        """A new log, durable with the first `opened`. Fault conflict when that job has a rollout of that name already."""
        if _ID.fullmatch(id) is None:
            raise Fault(ErrorKind.INVALID, f"{id[:80]!r} is no rollout's id")
        if id in self._rollouts or (job, name) in self._names:
            raise Fault(ErrorKind.CONFLICT, f"job {job[:80]!r} has a rollout {name[:80]!r} already")
        path = self._root / id
        try:
            path.mkdir(mode=0o700)
            trajectory = Trajectory(self, path, Head(id=id, job=job, name=name, args=args, at=self.clock()))
        except OSError as error:
            shutil.rmtree(path, ignore_errors=True)
            raise no_space(str(path), error) from None
        self._add(trajectory)
        return trajectory

    def get(self, id: str) -> Trajectory:
        """Fault not_found."""
        if (trajectory := self._rollouts.get(id)) is None:
            raise Fault(ErrorKind.NOT_FOUND, f"there is no rollout {id[:80]!r} here", hint="see `dsec rollout ls`")
        return trajectory

    def find(self, job: str, name: str) -> Trajectory | None:
        """By what its caller named it."""
        id = self._names.get((job, name))
        return None if id is None else self._rollouts[id]

    def list(self, job: str | None = None) -> list[RolloutInfo]:
        """Of one job, or of all; oldest first."""
        found = [t.info() for t in self._rollouts.values() if job is None or t.job == job]
        return sorted(found, key=lambda info: (info.created_at, info.id))

    async def remove(self, id: str) -> None:
        """Log and contents. Fault not_found."""
        trajectory = self.get(id)
        del self._rollouts[id], self._names[trajectory.job, trajectory.name]
        await trajectory.removed()

    async def retain(self, *, max_age_s: float, max_bytes: int) -> int:
        """Removes finished and lost rollouts that ended longer ago, and the oldest of them until all that is here has at
        most so many bytes; returns how many. Open ones stay."""
        infos = self.list()
        ended = sorted((i for i in infos if i.state is not RolloutState.OPEN), key=lambda info: info.changed_at)
        total = sum(info.bytes for info in infos)
        removed = 0
        for info in ended:
            if self.clock() - info.changed_at <= max_age_s and total <= max_bytes:
                break
            await self.remove(info.id)
            total -= info.bytes
            removed += 1
        return removed

    def close(self) -> None:
        """Lets go of everything. What was written stays."""
        for trajectory in self._rollouts.values():
            trajectory.close()
        os.close(self._lock)


class Trajectory:
    """One rollout's log. Its methods belong to one event loop."""

    def __init__(self, store: TrajectoryStore, path: Path, head: Head | None = None) -> None:
        """Of what lies at `path`, or new with `head`. id is "" when there is nothing whole."""
        self._store, self._path = store, path
        self.id = self.job = self.name = self.sandbox = ""
        self.args = DSecContainerRunArgs()
        self.epoch = self.incarnation = 0
        self.layers: tuple[str, ...] = ()
        self.steps = 0
        self._intents, self._outcomes = array("Q"), array("Q")
        self._state, self._ended = RolloutState.OPEN, Ended(state=RolloutState.OPEN, at=0.0)
        self._created_at = self._changed_at = 0.0
        self._unknown: set[int] = set()
        self._blob_bytes = 0
        self._size, self._link = len(MAGIC), FIRST_LINK
        self._file = os.open(path / "log", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        if head is not None:
            os.pwrite(self._file, MAGIC, 0)
            self._append(head)
        else:
            self._load()

    # -- reading --

    def _load(self) -> None:
        data = os.pread(self._file, os.fstat(self._file).st_size, 0)
        if not data.startswith(MAGIC):
            return
        position = len(MAGIC)
        while (payload := payload_at(data, position)) is not None:
            self._apply(body_of(payload), position)
            position += HEAD.size + len(payload)
            self._link = blake3(payload).digest()
        os.ftruncate(self._file, position)
        self._size = position

    def _apply(self, body: Body, position: int) -> None:
        if isinstance(body, Intent):
            self._unknown.add(body.step)
            self._intents.append(position)
            self._outcomes.append(0)
            self.steps += 1
            self._changed_at = body.asked_at
        elif isinstance(body, Outcome):
            if body.step in self._unknown:
                self._outcomes[body.step] = position
                self._unknown.discard(body.step)
                self._blob_bytes += _apart(body)
            self._changed_at = body.done_at
        elif isinstance(body, Opened):
            self.epoch, self._changed_at = body.epoch, body.at
        elif isinstance(body, Made):
            self.sandbox, self.incarnation, self.layers = body.sandbox, body.incarnation, body.layers
            self._changed_at = body.at
        elif isinstance(body, Ended):
            self._state, self._ended, self._changed_at = body.state, body, body.at
        else:
            self.id, self.job, self.name, self.args = body.id, body.job, body.name, body.args
            self._created_at = self._changed_at = body.at

    def _body(self, position: int) -> Body:
        length, _ = HEAD.unpack(os.pread(self._file, HEAD.size, position))
        payload = payload_at(os.pread(self._file, HEAD.size + length, position), 0)
        if payload is None:
            raise Fault(ErrorKind.OUTCOME_UNKNOWN, f"the log of rollout {self.id} is damaged at byte {position}")
        return body_of(payload)

    def info(self) -> RolloutInfo:
        """As it is now."""
        end = self._ended
        return RolloutInfo(
            id=self.id, job=self.job, name=self.name, state=self._state, epoch=self.epoch, sandbox=self.sandbox,
            incarnation=self.incarnation, layers=self.layers, args=self.args, steps=self.steps,
            unknown=tuple(sorted(self._unknown)), created_at=self._created_at, changed_at=self._changed_at,
            finished_at=end.at if end.state is not RolloutState.OPEN else None, reason=end.reason, reward=end.reward,
            valid=end.valid, bytes=self._size + self._blob_bytes,
        )  # fmt: skip

    def step(self, number: int) -> StepRecord | None:
        """The step as recorded, durable outcomes only; None when it never began. Fault outcome_unknown when the log is
        damaged there."""
        if not 0 <= number < self.steps:
            return None
        intent = self._body(self._intents[number])
        outcome = self._body(self._outcomes[number]) if self._outcomes[number] else None
        assert isinstance(intent, Intent) and (outcome is None or isinstance(outcome, Outcome))
        return step_of(intent, outcome)

    def read(self, start: int, limit: int, max_bytes: int) -> list[StepRecord]:
        """Steps from `start` on, at most so many, and no more than `max_bytes` of log unless the first alone is longer."""
        found: list[StepRecord] = []
        size = 0
        for number in range(start, min(self.steps, start + limit)):
            record = self.step(number)
            assert record is not None
            size += sum(len(blob.data or b"") for blob in (*record.outputs.values(), *record.inputs.values()))
            size += len(bytes(record.request)) + len(bytes(record.result or b""))
            if found and size > max_bytes:
                break
            found.append(record)
        return found

    def blob_path(self, digest: str) -> Path:
        """Where a content lies that is not in its record; Fault not_found when it is none or is not there (any more)."""
        path = self._path / "blobs" / digest
        if DIGEST.fullmatch(digest) is None or not path.exists():
            raise Fault(ErrorKind.NOT_FOUND, f"rollout {self.id} has no content {digest[:80]!r}")
        return path

    def blob(self, digest: str) -> bytes:
        """A content that is not in its record, checked. Fault not_found, or internal when it is not what was written."""
        data = self.blob_path(digest).read_bytes()
        if blake3(data).hexdigest() != digest:
            raise Fault(ErrorKind.INTERNAL, f"content {digest} of rollout {self.id} was altered on the disk")
        return data

    # -- writing --

    def _append(self, body: Body) -> int:
        """One record, whole or not at all; returns its position. Fault no_space."""
        data, link = packed(self._link, body)
        position = self._size
        written = 0
        try:
            while written < len(data):
                written += os.pwrite(self._file, data[written:], position + written)
        except OSError as error:
            os.ftruncate(self._file, position)
            raise no_space(f"the log of rollout {self.id}", error) from None
        self._size += len(data)
        self._link = link
        if not isinstance(body, Outcome):
            self._apply(body, position)
        return position

    async def _durable(self) -> None:
        try:
            await asyncio.shield(self._store.syncer.sync(self._file))
        except OSError as error:
            raise no_space(f"the log of rollout {self.id}", error) from None

    async def opened(self, epoch_note: str = "") -> int:
        """The next epoch, durable with all before it."""
        self._append(Opened(self.epoch + 1, self._store.clock(), epoch_note))
        epoch = self.epoch
        await self._durable()
        return epoch

    async def made(self, sandbox: str, incarnation: int, layers: tuple[str, ...]) -> None:
        """The sandbox in which it runs from here on, durable."""
        self._append(Made(sandbox, incarnation, layers, self._store.clock()))
        await self._durable()

    def intent(self, record: StepRecord) -> None:
        """That a step is about to run; in the file when it returns. record.step is `steps`.

        Fault conflict when it is not, or when the rollout has ended; no_space when the disk is full, and then nothing of it
        is in the log.
        """
        if self._state is not RolloutState.OPEN:
            raise Fault(ErrorKind.CONFLICT, f"rollout {self.id} is {self._state.value}")
        if record.step != self.steps:
            raise Fault(ErrorKind.CONFLICT, f"rollout {self.id} goes on with step {self.steps}, not {record.step}")
        self._append(intent_of(record))

    def output(self) -> Output:
        """Collects a content for `outcome`."""
        return Output(self._path / "blobs", self._store.inline, self._store.keep)

    async def outcome(
        self,
        step: int,
        *,
        result: bytes | None,
        error: ErrorBody | None,
        outputs: Mapping[str, Output],
        inputs: Mapping[str, Output],
        done_at: float,
    ) -> StepRecord:
        """What came of it, durable when it returns. result: JSON. Of a step that has an outcome, that one is returned.

        Fault conflict when the step never began; no_space: nothing is recorded, and it may be tried again.
        """
        if not 0 <= step < self.steps:
            raise Fault(ErrorKind.CONFLICT, f"step {step} of rollout {self.id} never began")
        if step in self._unknown:
            for output in (*outputs.values(), *inputs.values()):
                self._keep(output)
            body = Outcome(
                step=step, done_at=done_at, result=result, error=error,
                outputs={name: output.blob() for name, output in outputs.items()},
                inputs={name: output.blob() for name, output in inputs.items()},
            )  # fmt: skip
            position = self._append(body)
            await self._durable()
            self._apply(body, position)
        record = self.step(step)
        assert record is not None
        return record

    def _keep(self, output: Output) -> None:
        if (path := output.path) is not None and path.name.startswith(TEMPORARY):
            output.keep_as(self._path / "blobs" / output.blob().digest)

    async def finished(
        self, reason: Reason | None = None, reward: float | None = None, valid: bool | None = None
    ) -> None:
        """Its caller is done with it; durable."""
        await self._end(RolloutState.FINISHED, reason, reward, valid)

    async def lost(self, reason: Reason | None = None) -> None:
        """Its sandbox is gone; durable. Nothing when it has ended already."""
        if self._state is RolloutState.OPEN:
            await self._end(RolloutState.LOST, reason, None, None)

    async def _end(self, state: RolloutState, reason: Reason | None, reward: float | None, valid: bool | None) -> None:
        self._append(Ended(state=state, at=self._store.clock(), reason=reason, reward=reward, valid=valid))
        await self._durable()

    async def removed(self) -> None:
        """Takes it off the disk. For the store."""
        self.close()
        gone = self._path.with_name(f"{_REMOVED}{self.id}")
        os.rename(self._path, gone)
        await asyncio.to_thread(shutil.rmtree, gone, True)

    def close(self) -> None:
        """For the store."""
        if self._file >= 0:
            os.close(self._file)
        self._file = -1


def _apart(outcome: Outcome) -> int:
    """Bytes of its contents that are not in the record."""
    return sum(blob.size for blob in (*outcome.outputs.values(), *outcome.inputs.values()) if blob.data is None)


def _locked(root: Path) -> int:
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
