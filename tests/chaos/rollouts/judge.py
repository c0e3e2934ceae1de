"""What a rollout came to, compared with an undisturbed one of the same seed and with what its sandbox itself shows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import msgspec

from dsec import ChangeKind, DSecClient, RolloutInfo, StepRecord
from dsec.protocol.compare import compare

from .script import EVIDENCE
from .trainer import Told

_REWARD = ("verdict", "finished")
"""What is told of the reward: a fault of its own kind."""
_TIMED = (("sandbox.changes", "data"), ("exec.write", "result.open"))
"""What of a trajectory depends on time. Of changes that are times of files; the rest of them is compared otherwise
(`Script._changes`, `Seen.files`). Of a write, whether the command is still there when it is answered."""
FAULTS = ("lost", "doubled", "diverged", "wrong_rewards")
Fault = tuple[str, str]
"""Which of FAULTS, and in words."""


class Seen(msgspec.Struct, frozen=True):
    """told: what all lives of the trainer were told, in order. files: what is in the sandbox, by path, read without the log;
    evidence: the lines that its commands left."""

    told: Sequence[Told]
    info: RolloutInfo | None
    steps: Sequence[StepRecord]
    files: dict[str, tuple[str, bytes | None]]
    evidence: Sequence[str]

    def answers(self, name: str) -> list[object]:
        return [told.answer for told in self.told if told.name == name]

    @property
    def names(self) -> dict[str, None]:
        """Of all that was asked, in order."""
        return dict.fromkeys(told.name for told in self.told if told.name != "failed")


async def look(client: DSecClient, job: str, name: str, told: Sequence[Told]) -> Seen:
    """At a rollout whose trainer is through: its log by the service, its sandbox by itself."""
    info = next(iter([info async for info in client.rollouts.list(job=job, name=name)]), None)
    if info is None:
        return Seen(told, None, (), {}, ())
    steps = [step async for step in client.rollouts.steps(info.id)]
    async with client.attach(info.sandbox) as sandbox:
        changes = (await sandbox.changes(include=["var/**", "workspace/**"])).changes
    files = {
        change.path.decode(): (change.kind.value, change.data)
        for change in changes
        if change.path.startswith((b"var/", b"workspace/")) and change.kind is not ChangeKind.MKDIR
    }
    evidence = files.pop(EVIDENCE.lstrip("/"), ("", b""))[1] or b""
    return Seen(told, info, steps, files, evidence.decode().splitlines())


def judge(seen: Seen, undisturbed: Seen) -> list[Fault]:
    return [
        *_tellings(seen, undisturbed),
        *_traces(seen, undisturbed),
        *_log(seen, undisturbed),
        *_reward(seen, undisturbed),
    ]


def _tellings(seen: Seen, undisturbed: Seen) -> Iterator[Fault]:
    for words in seen.answers("failed"):
        yield ("diverged" if str(words).startswith("ReplayDivergence") else "lost"), f"the trainer failed: {words}"
    for name in undisturbed.names:
        answers, [expected, *_] = seen.answers(name), undisturbed.answers(name)
        if not answers:
            yield "lost", f"{name} never came to an end"
        elif name not in _REWARD and (other := [answer for answer in answers if answer != expected]):
            yield "diverged", f"{name}: {_short(other[0])} instead of {_short(expected)}"


def _traces(seen: Seen, undisturbed: Seen) -> Iterator[Fault]:
    [wanted, *_] = undisturbed.answers("tags")
    assert isinstance(wanted, list)
    lines = Counter(seen.evidence)
    for tag, times in lines.items():
        if times > 1:
            yield "doubled", f"{tag} ran {times} times"
    if missing := [tag for tag in wanted if tag not in lines]:
        yield "lost", f"no trace of {', '.join(missing)}"
    if strange := lines.keys() - set(wanted):
        yield "doubled", f"traces of what was not asked for: {', '.join(sorted(strange))}"
    for path in sorted(seen.files.keys() | undisturbed.files.keys()):
        if seen.files.get(path) != undisturbed.files.get(path):
            found, expected = seen.files.get(path), undisturbed.files.get(path)
            yield "lost", f"{path}: {_short(found)} instead of {_short(expected)}"


def _log(seen: Seen, undisturbed: Seen) -> Iterator[Fault]:
    if len(seen.steps) < len(undisturbed.steps):
        yield "lost", f"{len(seen.steps)} steps are recorded, not {len(undisturbed.steps)}"
    comparison = compare(undisturbed.steps, seen.steps)
    differences = [one for one in comparison.differences if (one.kind, one.field) not in _TIMED]
    for difference in differences[:4]:
        yield (
            "diverged",
            f"step {difference.step}, {difference.field}: {difference.second} instead of {difference.first}",
        )


def _reward(seen: Seen, undisturbed: Seen) -> Iterator[Fault]:
    assert undisturbed.info is not None
    [verdict, *_] = undisturbed.answers("verdict")
    for other in [answer for answer in seen.answers("verdict") if answer != verdict]:
        yield "wrong_rewards", f"the verdict was {other} instead of {verdict}"
    wanted = (undisturbed.info.state, undisturbed.info.reward, undisturbed.info.valid)
    found = None if seen.info is None else (seen.info.state, seen.info.reward, seen.info.valid)
    if found != wanted:
        yield "wrong_rewards", f"recorded is {found} instead of {wanted}"


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 120 else f"{text[:120]}..."
