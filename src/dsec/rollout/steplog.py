"""One rollout's log as its edge uses it: steps go in, and come out as they went in."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path

import msgspec

from dsec.protocol.checked import pack
from dsec.protocol.errors import ErrorBody, ErrorKind, Fault
from dsec.protocol.rollouts import RolloutInfo, RolloutState, StepRecord
from dsec.protocol.specs import DSecContainerRunArgs, Reason

from .commit import Syncer
from .contents import TEMPORARY, Output, sweep
from .disk import Descriptors, replace, unwritten
from .inspection import content, content_path
from .known import Index, Known, Summary
from .logfile import Broken, LogFile, Place, Window
from .records import Body, Ended, Head, Intent, Made, Opened, Outcome, body_of, intent_of, step_of
from .scan import Scan, since, summary_in, whole

REMOVED = ".removed-"
_COMPACT_FROM = 64 * 1024
_SUMMARY_EVERY = 64 * 1024
"""Bytes of log, after which the summary is written anew; so much is read of a log after a crash."""
_encode_summary = msgspec.msgpack.Encoder().encode


class Shelf:
    """What all logs of a store have in common."""

    def __init__(self, inline: int, keep: int, clock: Callable[[], float], ended: Callable[[Trajectory], None]) -> None:
        """ended: called when a log is whole, and again whenever it changes afterwards."""
        self.inline, self.keep, self.clock, self.ended = inline, keep, clock, ended
        self.files = Descriptors()
        self.syncer = Syncer()


class _Recording:
    """An outcome that is in the file and not yet durable."""

    def __init__(self, body: Outcome, place: Place, record: StepRecord, done: asyncio.Future[None]) -> None:
        self.body, self.place, self.record, self.done = body, place, record, done


class Trajectory:
    """One rollout. Its methods belong to one event loop."""

    def __init__(self, shelf: Shelf, path: Path, known: Known, file: LogFile, blob_bytes: int = 0) -> None:
        """Use `begin`, `found` or `again`."""
        self._shelf, self._path, self._known, self._file = shelf, path, known, file
        self._blobs = path / "blobs"
        self._blob_bytes = blob_bytes
        self._index: Index | None = None
        self._asked: dict[int, Intent] = {}
        """Of the steps that began here and have no outcome yet."""
        self._recording: dict[int, _Recording] = {}
        self._summarized = -1
        self._broken = self._gone = False

    @classmethod
    def begin(cls, shelf: Shelf, path: Path, head: Head) -> Trajectory:
        """A new one. Fault no_space, internal; then nothing of it is left."""
        known, file = Known(head.id), LogFile(path / "log", shelf.files)
        try:
            path.mkdir(mode=0o700)
            file.begin(head)
        except OSError as error:
            shelf.files.drop(path / "log")
            shutil.rmtree(path, ignore_errors=True)
            raise unwritten(f"a trajectory log in {path.parent}", error) from None
        known.apply(head, 0)
        trajectory = cls(shelf, path, known, file)
        trajectory._index = Index()
        return trajectory

    @classmethod
    def found(cls, shelf: Shelf, path: Path) -> Trajectory | None:
        """What lies there, read as far as is needed; None: it died before it began. OSError."""
        summary = summary_in(path)
        if summary is not None:
            trajectory = cls.again(shelf, path, summary)
            if not (path / "log").exists():
                return trajectory._ruined()
            if (scan := since(trajectory._file.fd(), summary)) is not None:
                trajectory._adopt(scan)
                return trajectory
        elif not (path / "log").exists():
            return None
        trajectory = cls(shelf, path, Known(path.name), LogFile(path / "log", shelf.files))
        trajectory._adopt(whole(trajectory._file.fd(), path.name))
        if trajectory._known.begun:
            return trajectory
        if summary is not None:
            return cls.again(shelf, path, summary)._ruined()
        return trajectory if trajectory.damaged is not None else None

    def _ruined(self) -> Trajectory:
        """The log is not there, or not even its head: only the summary says that there was one."""
        self._known.damaged, self._index = 0, Index()
        return self

    @classmethod
    def again(cls, shelf: Shelf, path: Path, summary: Summary) -> Trajectory:
        """As its summary has it, the log's size being what that says."""
        file = LogFile(path / "log", shelf.files, summary.size, summary.link)
        trajectory = cls(shelf, path, Known.of(summary), file, summary.info.bytes - summary.size)
        trajectory._summarized = summary.size
        return trajectory

    # -- what is known --

    @property
    def id(self) -> str:
        return self._known.id

    @property
    def job(self) -> str:
        return self._known.job

    @property
    def name(self) -> str:
        return self._known.name

    @property
    def args(self) -> DSecContainerRunArgs:
        return self._known.args

    @property
    def epoch(self) -> int:
        return self._known.epoch

    @property
    def sandbox(self) -> str:
        return self._known.sandbox

    @property
    def incarnation(self) -> int:
        return self._known.incarnation

    @property
    def layers(self) -> tuple[str, ...]:
        return self._known.layers

    @property
    def steps(self) -> int:
        """How many began: 0 to steps - 1."""
        return self._known.steps

    @property
    def state(self) -> RolloutState:
        return self._known.state

    @property
    def damaged(self) -> int | None:
        """From this step on nothing can be told, and nothing recorded any more."""
        return self._known.damaged

    def info(self) -> RolloutInfo:
        """As it is now."""
        return self._known.info(self._file.size + self._blob_bytes)

    # -- reading --

    def step(self, number: int) -> StepRecord | None:
        """The step as recorded, with its outcome if that is durable; None when it never began.

        Fault outcome_unknown when the log is damaged there.
        """
        if self._gone:
            raise self._not_there()
        if number < 0 or (self._known.damaged is None and number >= self._known.steps):
            return None
        found = self.read(number, 1, 0)
        return found[0] if found else None

    def read(self, start: int, limit: int, max_bytes: int) -> list[StepRecord]:
        """Steps from `start` on, at most so many, and of at most so many bytes of log, but one if there is one.

        Fault outcome_unknown when the log is damaged there; before it, as many as are whole.
        """
        index = self._indexed()
        if self._known.damaged is not None and start >= self._known.damaged:
            raise self._damage()
        found: list[StepRecord] = []
        taken = 0
        try:
            window = self._file.window()
            for number in range(start, min(self._end_of_steps(), start + limit)):
                intent, outcome, length = _record(window, index, number)
                taken += length
                if found and taken > max_bytes:
                    break
                found.append(step_of(intent, outcome))
        except Broken:
            damage = self._damage(start + len(found))
            if not found:
                raise damage from None
        except OSError as error:
            raise self._unreadable(error) from None
        return found

    def _end_of_steps(self) -> int:
        damaged = self._known.damaged
        return self._known.steps if damaged is None else min(damaged, self._known.steps)

    def blob(self, digest: str) -> bytes:
        """A content by its digest, checked; long ones take their time, and may be read by another thread.

        Fault not_found (names the step when it is missing, or when nothing of it was kept), internal when it was altered.
        """
        return content(self._path, self.id, digest)

    def blob_path(self, digest: str) -> Path:
        """Where a content lies that is not in its record; Fault not_found."""
        return content_path(self._path, self.id, digest)

    async def ready(self) -> None:
        """Reads the log, if it was not read, beside all else; without it the first who reads or writes has to wait for that."""
        if self._index is None and not self._gone:
            size = self._file.size
            try:
                scan = await asyncio.to_thread(_read, self._path / "log", self._path.name)
            except OSError as error:
                raise self._unreadable(error) from None
            if self._index is None and not self._gone and self._file.size == size:
                self._adopt(scan)
        self._indexed()

    def _indexed(self) -> Index:
        """Fault not_found when it was removed, internal."""
        if self._gone:
            raise self._not_there()
        if self._index is None:
            try:
                self._adopt(whole(self._file.fd(), self._path.name))
            except OSError as error:
                raise self._unreadable(error) from None
        assert self._index is not None
        return self._index

    def _adopt(self, scan: Scan) -> None:
        """What was being written when all ended is cut off; of a damaged log nothing is. OSError."""
        self._known, self._index = scan.known, scan.index
        self._file.size, self._file.link = scan.size, scan.link
        if scan.known.damaged is not None:
            self._file.size = scan.end
        elif scan.size < scan.end:
            os.ftruncate(self._file.fd(), scan.size)
        if scan.contents is not None:
            self._blob_bytes = sweep(self._blobs, None if scan.known.damaged is not None else scan.contents)

    # -- writing --

    def _writable(self) -> Index:
        """Whatever a failure left is repaired first. Fault."""
        index = self._indexed()
        if self._known.damaged is not None:
            raise self._damage()
        if self._broken:
            self._rewrite()
        return index

    def _append(self, body: Body) -> Place:
        place = self._file.append(body)
        if not isinstance(body, Outcome):
            self._known.apply(body, place.length)
        return place

    def _sync(self, path: Path) -> asyncio.Future[None]:
        """OSError."""
        files = self._shelf.files
        fd = (
            files.use(path, os.O_RDONLY if path.is_dir() else os.O_RDWR) if path != self._file.path else files.use(path)
        )
        done = self._shelf.syncer.sync(fd)
        files.pin(fd)
        done.add_done_callback(lambda _: files.unpin(fd))
        return done

    async def _durable(self, *directories: Path) -> None:
        """The log so far, and the names in these directories."""
        try:
            done = self._sync(self._file.path)
            await asyncio.gather(asyncio.shield(done), *map(self._synced, directories))
        except OSError as error:
            self._broken = True
            raise unwritten(f"the trajectory log of rollout {self.id}", error) from None

    async def _synced(self, path: Path) -> None:
        """Of a file or directory that is not needed open afterwards. OSError."""
        try:
            await asyncio.shield(self._sync(path))
        finally:
            self._shelf.files.drop(path)

    async def opened(self, epoch_note: str = "") -> int:
        """The next epoch, durable with all that is before it. Of a damaged log it is not recorded: nothing runs there."""
        await self.ready()
        if self._known.damaged is not None:
            self._known.epoch += 1
            return self._known.epoch
        self._writable()
        first = self._known.epoch == 0
        self._append(Opened(self._known.epoch + 1, self._shelf.clock(), epoch_note))
        epoch = self._known.epoch
        await self._durable(*((self._path, self._path.parent) if first else ()))
        self._compact()
        if self._known.state is not RolloutState.OPEN:
            self._settle()  # or whoever asks for it next finds the epoch before
        return epoch

    async def made(self, sandbox: str, incarnation: int, layers: tuple[str, ...]) -> None:
        """The sandbox in which it runs from here on, durable."""
        self._writable()
        self._append(Made(sandbox, incarnation, tuple(layers), self._shelf.clock()))
        await self._durable()

    def intent(self, record: StepRecord) -> None:
        """That a step is about to run; in the file when it returns, durable with the next outcome. Its number is `steps`.

        Fault conflict when it is not, or when the rollout has ended; no_space when the disk is full, and then nothing of it
        is in the log; outcome_unknown when the log is damaged.
        """
        index = self._writable()
        if self._known.state is not RolloutState.OPEN:
            raise self._ended()
        if record.step != self._known.steps:
            raise Fault(
                ErrorKind.CONFLICT,
                f"rollout {self.id} goes on with step {self.steps}, not with {record.step}",
                hint="take the steps in order",
                rollout=self.id,
                step=self.steps,
            )
        body = intent_of(record)
        index.apply(body, self._append(body))
        self._asked[body.step] = body

    def output(self, keep: int | None = None) -> Output:
        """Collects a content for `outcome`; keep: bytes of it that are kept at most, instead of the store's."""
        self._indexed()
        return Output(self._blobs, self._shelf.inline, self._shelf.keep if keep is None else keep)

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

        Fault conflict when the step never began; no_space, internal: it is not recorded, and may be tried again.
        """
        self._writable()
        if not 0 <= step < self._known.steps:
            raise Fault(ErrorKind.CONFLICT, f"step {step} of rollout {self.id} never began", rollout=self.id, step=step)
        await self._keep([*outputs.values(), *inputs.values()])
        self._writable()
        if step not in self._known.unknown:
            return self._recorded_step(step)
        recording = self._recording.get(step)
        if recording is None:
            body = Outcome(
                step=step,
                done_at=done_at,
                result=result,
                error=error,
                outputs={name: output.blob() for name, output in outputs.items()},
                inputs={name: output.blob() for name, output in inputs.items()},
            )
            recording = self._record(body)
        try:
            await asyncio.shield(recording.done)
        except OSError as failed:
            raise unwritten(f"the trajectory log of rollout {self.id}", failed) from None
        return recording.record

    def _record(self, body: Outcome) -> _Recording:
        intent = self._intent(body.step)
        place = self._append(body)
        try:
            done = self._sync(self._file.path)
        except OSError as error:
            self._broken = True
            raise unwritten(f"the trajectory log of rollout {self.id}", error) from None
        recording = self._recording[body.step] = _Recording(body, place, step_of(intent, body), done)
        done.add_done_callback(partial(self._recorded, recording))
        return recording

    def _intent(self, step: int) -> Intent:
        if (asked := self._asked.get(step)) is not None:
            return asked
        index = self._writable()
        try:
            return _record(self._file.window(), index, step)[0]
        except Broken:
            raise self._damage(step) from None
        except OSError as error:
            raise self._unreadable(error) from None

    def _recorded(self, recording: _Recording, done: asyncio.Future[None]) -> None:
        """From here on it is told to whoever asks."""
        del self._recording[recording.body.step]
        if done.cancelled() or done.exception() is not None:
            self._broken = True
            return
        self._asked.pop(recording.body.step, None)
        self._known.apply(recording.body, recording.place.length)
        if self._index is not None:
            self._index.apply(recording.body, recording.place)
        if self._known.state is not RolloutState.OPEN:
            self._settle()
        elif self._file.size - self._summarized >= _SUMMARY_EVERY:
            self.summarize()

    def _recorded_step(self, number: int) -> StepRecord:
        record = self.step(number)
        assert record is not None
        return record

    async def _keep(self, outputs: list[Output]) -> None:
        """Long contents are on the disk under their names before a record speaks of them."""
        spilled = [output for output in outputs if output.path is not None and output.path.name.startswith(TEMPORARY)]
        if not spilled:
            return
        try:
            await asyncio.gather(*(self._synced(output.path) for output in spilled if output.path is not None))
            for output in spilled:
                blob = output.blob()
                if output.named(self._blobs / blob.digest):
                    self._blob_bytes += blob.size
            await asyncio.gather(self._synced(self._blobs), self._synced(self._path))
        except OSError as error:
            raise unwritten(f"an output of rollout {self.id}", error) from None

    async def finished(
        self, reason: Reason | None = None, reward: float | None = None, valid: bool | None = None
    ) -> None:
        """Its caller is done with it; durable. Again: the last word counts."""
        await self._end(RolloutState.FINISHED, reason, reward, valid)

    async def lost(self, reason: Reason | None = None) -> None:
        """Its sandbox is gone; durable. Nothing when it has ended already."""
        if self._known.state is RolloutState.OPEN:
            await self._end(RolloutState.LOST, reason, None, None)

    async def _end(self, state: RolloutState, reason: Reason | None, reward: float | None, valid: bool | None) -> None:
        self._writable()
        self._append(Ended(state=state, at=self._shelf.clock(), reason=reason, reward=reward, valid=valid))
        await self._durable()
        self._compact()
        self._settle()

    # -- upkeep --

    def _compact(self) -> None:
        """When most of the log is needless. A failure leaves it as it is."""
        if self._known.waste > max(_COMPACT_FROM, self._file.size // 2):
            with suppress(Fault):
                self._rewrite()

    def _rewrite(self) -> None:
        """Only what counts, durable, in a new file. Fault; then the old one stays."""
        index = self._indexed()
        try:
            window = self._file.window()
            bodies = self._known.bodies(self._file.link)
            steps: list[Body] = []
            for number in range(self._known.steps):
                intent, outcome, _ = _record(window, index, number)
                if outcome is None and number in self._recording:
                    outcome = self._recording[number].body
                steps += [intent] if outcome is None else [intent, outcome]
        except Broken:
            raise self._damage() from None
        except OSError as error:
            raise self._unreadable(error) from None
        (self._path / "summary").unlink(missing_ok=True)
        self._summarized = -1
        places = self._file.rewrite([*bodies, *steps, *self._known.end()])
        self._index = Index()
        for body, place in zip(steps, places[len(bodies) :], strict=False):
            if isinstance(body, Outcome) and body.step in self._recording:
                self._recording[body.step].place = place
            else:
                self._index.apply(body, place)
        self._known.waste, self._broken = 0, False

    def summary(self) -> bytes:
        """See `Summary`."""
        return _encode_summary(Summary(self._file.size, self._file.link, self._known.waste, self.info()))

    def summarize(self) -> None:
        """Writes down what the log comes to, so that the next start need not read it. Of no consequence when it fails."""
        if self._recording or self._broken or self._gone or self._known.damaged is not None:
            return
        if self._file.size != self._summarized:
            with suppress(OSError):
                replace(self._path / "summary", pack(self.summary()), durable=False)
                self._summarized = self._file.size

    def _settle(self) -> None:
        """It has ended: little of it stays in memory."""
        if not self._gone:
            self.summarize()
            self._shelf.files.drop(self._file.path)
            self._shelf.ended(self)

    async def removed(self) -> None:
        """Takes it off the disk. For the store."""
        self._gone = True
        self._shelf.files.drop(self._file.path)
        gone = self._path.with_name(f"{REMOVED}{self._path.name}")
        os.rename(self._path, gone)
        await asyncio.to_thread(shutil.rmtree, gone, True)

    # -- errors --

    def _not_there(self) -> Fault:
        return Fault(ErrorKind.NOT_FOUND, f"rollout {self.id} was removed", rollout=self.id)

    def _ended(self) -> Fault:
        return Fault(
            ErrorKind.CONFLICT,
            f"rollout {self.id} is {self.state.value}, and has no step {self.steps}",
            hint="its recorded steps can be had; for more, open a rollout under another name",
            rollout=self.id,
            step=self.steps,
        )

    def _damage(self, step: int | None = None) -> Fault:
        if step is not None:
            self._known.damaged = min(step, self._known.damaged if self._known.damaged is not None else step)
        return Fault(
            ErrorKind.OUTCOME_UNKNOWN,
            f"the log of rollout {self.id} is damaged from step {self.damaged} on: what came of that step cannot be told",
            hint="the steps before it can be had; look at the disk of the state directory",
            rollout=self.id,
            step=self.damaged or 0,
        )

    def _unreadable(self, error: OSError) -> Fault:
        return Fault(
            ErrorKind.INTERNAL,
            f"the log of rollout {self.id} cannot be read: {error.strerror}",
            hint="look at the disk of the state directory",
            rollout=self.id,
        )


def _record(window: Window, index: Index, number: int) -> tuple[Intent, Outcome | None, int]:
    """With the length of both. Broken, OSError."""
    at = index.intents[number]
    payload = window.payload(at)
    intent, length = _body(payload, at), len(payload)
    if not isinstance(intent, Intent) or intent.step != number:
        raise Broken(at)
    if not (at := index.outcomes[number]):
        return intent, None, length
    payload = window.payload(at)
    outcome = _body(payload, at)
    if not isinstance(outcome, Outcome) or outcome.step != number:
        raise Broken(at)
    return intent, outcome, length + len(payload)


def _body(payload: memoryview, at: int) -> Body:
    try:
        return body_of(payload)
    except msgspec.MsgspecError:
        raise Broken(at) from None


def _read(path: Path, id: str) -> Scan:
    """By a descriptor of its own. OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return whole(fd, id)
    finally:
        os.close(fd)
