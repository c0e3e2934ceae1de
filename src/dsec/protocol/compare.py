"""What differs between two trajectories, step by step: requests, results, errors and contents.

Not what differs between any two runs: times, ids of sandboxes and commands, process ids, epochs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import zip_longest

import msgspec

from .rollouts import Blob, StepRecord

PASSING = frozenset(
    (
        "duration_s", "started_at", "created_at", "mtime", "exec_id", "sandbox", "sandbox_id", "incarnation", "pid", "step",
        "replayed", "detail", "request_id",
    )
)  # fmt: skip
"""Fields of results, at any depth, that say nothing about what the step did."""
_LONG = 100
_decode = msgspec.json.decode


class Difference(msgspec.Struct, frozen=True):
    """One field of one step: "request.argv", "result.exit_code", "error.kind", "stdout", "step". Values as JSON or text,
    shortened; "" where one has it not."""

    step: int
    kind: str
    field: str
    first: str
    second: str


class Comparison(msgspec.Struct, frozen=True):
    """first, second: how many steps each has."""

    first: int
    second: int
    differences: tuple[Difference, ...]

    @property
    def same(self) -> bool:
        return not self.differences

    def __str__(self) -> str:
        return told(self)


def compare(first: Iterable[StepRecord], second: Iterable[StepRecord]) -> Comparison:
    """By number of step, both in order from the same one on."""
    counts = [0, 0]
    found: list[Difference] = []
    for one, other in zip_longest(first, second):
        counts[0] += one is not None
        counts[1] += other is not None
        if one is not None and other is not None:
            found += _between(one, other)
        elif (there := one or other) is not None:
            what = bytes(there.request).decode()
            found.append(_difference(there, "step", what if one else "", what if other else ""))
    return Comparison(counts[0], counts[1], tuple(found))


def _between(one: StepRecord, other: StepRecord) -> Iterator[Difference]:
    for name, old, new in (
        ("request", one.request, other.request),
        ("result", one.result, other.result),
        ("error", _error(one), _error(other)),
    ):
        for field, value, changed in _fields(name, _plain(old), _plain(new)):
            yield _difference(one, field, value, changed)
    if (one.done_at is None) != (other.done_at is None):
        yield _difference(one, "outcome", *("unknown" if r.done_at is None else "known" for r in (one, other)))
    for group in ("outputs", "inputs"):
        blobs, others = getattr(one, group), getattr(other, group)
        for name in sorted(blobs.keys() | others.keys()):
            yield from _contents(one, name, blobs.get(name), others.get(name))


def _error(step: StepRecord) -> bytes | None:
    return None if step.error is None else msgspec.json.encode(step.error)


def _plain(text: msgspec.Raw | bytes | None) -> object:
    return None if text is None else _decode(bytes(text))


def _fields(path: str, one: object, other: object) -> Iterator[tuple[str, str, str]]:
    """Leaves that differ."""
    if isinstance(one, dict) and isinstance(other, dict):
        for name in sorted(one.keys() | other.keys()):
            if name not in PASSING or path.startswith("request"):
                yield from _fields(f"{path}.{name}", one.get(name), other.get(name))
    elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other) and any(map(_deep, one)):
        for number, (item, changed) in enumerate(zip(one, other, strict=True)):
            yield from _fields(f"{path}[{number}]", item, changed)
    elif one != other:
        yield path, _json(one), _json(other)


def _deep(value: object) -> bool:
    return isinstance(value, dict | list)


def _json(value: object) -> str:
    return "" if value is None else msgspec.json.encode(value).decode()


def _contents(step: StepRecord, name: str, one: Blob | None, other: Blob | None) -> Iterator[Difference]:
    """By digest and true size; where both are at hand and text, the first line that differs is shown."""
    if (
        one is not None
        and other is not None
        and (one.digest, one.total, one.whole) == (other.digest, other.total, other.whole)
    ):
        return
    lines = _first_lines(one, other)
    if lines is not None:
        number, old, new = lines
        yield _difference(step, f"{name} line {number}", old, new)
    else:
        yield _difference(step, name, *("" if b is None else f"{b.total} bytes, {b.digest[:16]}" for b in (one, other)))


def _first_lines(one: Blob | None, other: Blob | None) -> tuple[int, str, str] | None:
    if one is None or other is None or one.data is None or other.data is None:
        return None
    try:
        texts = one.data.decode().splitlines(keepends=True), other.data.decode().splitlines(keepends=True)
    except UnicodeDecodeError:
        return None
    for number, (old, new) in enumerate(zip_longest(*texts, fillvalue=""), 1):
        if old != new:
            return number, repr(old) if old else "", repr(new) if new else ""
    return None


def _difference(step: StepRecord, field: str, first: str, second: str) -> Difference:
    return Difference(step.step, step.kind, field, *(_shortened(first, second)))


def _shortened(first: str, second: str) -> tuple[str, str]:
    """Long values lose what they begin with alike, and what is too long behind that."""
    alike = 0
    if max(len(first), len(second)) > _LONG:
        while alike < min(len(first), len(second)) and first[alike] == second[alike]:
            alike += 1
    start = max(0, alike - 20)

    def cut(text: str) -> str:
        end = start + _LONG
        return ("..." if start and text else "") + text[start:end] + ("..." if len(text) > end else "")

    return cut(first), cut(second)


def told(comparison: Comparison, first: str = "first", second: str = "second") -> str:
    """For people: a paragraph for each step that differs."""
    lines: list[str] = []
    last = -1
    for difference in comparison.differences:
        if difference.step != last:
            lines.append(f"step {difference.step} ({difference.kind})")
            last = difference.step
        lines += [
            f"  {difference.field}",
            f"    - {difference.first or 'nothing'}",
            f"    + {difference.second or 'nothing'}",
        ]
    differing = len({difference.step for difference in comparison.differences})
    if not differing:
        return f"the same {comparison.first} steps"
    counts = f"{comparison.first} steps (-, {first}), {comparison.second} steps (+, {second})"
    return "\n".join([*lines, f"{differing} steps differ of {counts}"])
