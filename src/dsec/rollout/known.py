"""What the records of a log come to: all that is known of a rollout but the steps themselves."""

from __future__ import annotations

from array import array

import msgspec

from dsec.protocol.rollouts import RolloutInfo, RolloutState
from dsec.protocol.specs import DSecContainerRunArgs, Reason

from .logfile import Place
from .records import Body, Ended, Head, Intent, Made, Opened, Outcome


class Summary(msgspec.Struct, frozen=True):
    """What the first `size` bytes of a log come to, so that they need not be read again; link: theirs."""

    size: int
    link: bytes
    waste: int
    info: RolloutInfo


class Known:
    """Grows by one record at a time; what `apply` is told in the order of the log."""

    def __init__(self, id: str) -> None:
        self.id = id
        self.job = self.name = self.sandbox = self.note = ""
        self.args = DSecContainerRunArgs()
        self.begun = False
        self.state = RolloutState.OPEN
        self.epoch = self.incarnation = self.steps = 0
        self.layers: tuple[str, ...] = ()
        self.unknown: set[int] = set()
        self.created_at = self.changed_at = 0.0
        self.finished_at: float | None = None
        self.reason: Reason | None = None
        self.reward: float | None = None
        self.valid: bool | None = None
        self.damaged: int | None = None
        self.waste = 0
        """Bytes of records that later ones make needless."""
        self._epoch_length = self._made_length = self._end_length = 0

    @classmethod
    def of(cls, summary: Summary) -> Known:
        """As it was then."""
        known, info = cls(summary.info.id), summary.info
        known.begun, known.waste, known.unknown = True, summary.waste, set(info.unknown)
        for name in _SAME:
            setattr(known, name, getattr(info, name))
        return known

    def info(self, bytes: int) -> RolloutInfo:
        return RolloutInfo(
            id=self.id, job=self.job, name=self.name, state=self.state, epoch=self.epoch, sandbox=self.sandbox,
            incarnation=self.incarnation, layers=self.layers, args=self.args, steps=self.steps,
            unknown=tuple(sorted(self.unknown)), created_at=self.created_at, changed_at=self.changed_at,
            finished_at=self.finished_at, reason=self.reason, reward=self.reward, valid=self.valid, bytes=bytes,
            damaged=self.damaged,
        )  # fmt: skip

    def apply(self, body: Body, length: int) -> None:
        """length: of the record, bytes."""
        if isinstance(body, Intent):
            self.steps += 1
            self.unknown.add(body.step)
            self.changed_at = body.asked_at
        elif isinstance(body, Outcome):
            if body.step in self.unknown:
                self.unknown.discard(body.step)
                self.changed_at = body.done_at
            else:
                self.waste += length
        elif isinstance(body, Opened):
            self.epoch, self.note, self.changed_at = body.epoch, body.note, body.at
            self.waste += self._epoch_length
            self._epoch_length = length
        elif isinstance(body, Made):
            self.sandbox, self.incarnation, self.layers, self.changed_at = (
                body.sandbox,
                body.incarnation,
                body.layers,
                body.at,
            )
            self.waste += self._made_length
            self._made_length = length
        elif isinstance(body, Ended):
            self.state, self.reason, self.reward, self.valid = body.state, body.reason, body.reward, body.valid
            self.finished_at = self.changed_at = body.at
            self.waste += self._end_length
            self._end_length = length
        else:
            self._named(body)

    def _named(self, head: Head) -> None:
        self.id, self.job, self.name, self.args, self.begun = head.id, head.job, head.name, head.args, True
        self.created_at = self.changed_at = head.at

    def broken(self) -> None:
        """What follows in the log is damaged: the first step without an outcome, and all after it, cannot be told."""
        self.damaged = min(self.unknown, default=self.steps)

    def bodies(self, follows: bytes) -> list[Body]:
        """The records that say all of this again, without the steps; the end comes last."""
        head = Head(id=self.id, job=self.job, name=self.name, args=self.args, at=self.created_at, follows=follows)
        found: list[Body] = [head, head]
        if self.sandbox:
            found.append(Made(self.sandbox, self.incarnation, self.layers, self.changed_at))
        if self.epoch:
            found.append(Opened(self.epoch, self.changed_at, self.note))
        return found

    def end(self) -> list[Body]:
        """The record of its end, if it has ended."""
        if self.finished_at is None:
            return []
        return [Ended(state=self.state, at=self.finished_at, reason=self.reason, reward=self.reward, valid=self.valid)]


class Index:
    """Where in the log each step is; 16 bytes a step."""

    def __init__(self) -> None:
        self.intents, self.outcomes = array("Q"), array("Q")

    def apply(self, body: Body, place: Place) -> None:
        if isinstance(body, Intent):
            self.intents.append(place.position)
            self.outcomes.append(0)
        elif isinstance(body, Outcome) and not self.outcomes[body.step]:
            self.outcomes[body.step] = place.position


_SAME = (
    "job", "name", "state", "epoch", "sandbox", "incarnation", "layers", "args", "steps", "created_at", "changed_at",
    "finished_at", "reason", "reward", "valid", "damaged",
)  # fmt: skip
