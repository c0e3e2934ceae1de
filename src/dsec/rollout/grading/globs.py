"""Patterns over paths as `sandbox.changes` has them: `*` and `?` within a name, `[a-z]`, `**` for any number of directories.

Bytes throughout, exact; `dir/**` names `dir` too. Which names of a pattern may come next is worked out name by name, so a
hostile path costs no more than its length, and what is known of its directory is kept for its neighbours.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from fnmatch import translate

_ANY = b"**"
_KEPT = 64  # directories whose state is kept: those on the way to where a walk is


class Globs:
    """Any of some patterns."""

    def __init__(self, patterns: Iterable[str]) -> None:
        self._patterns = [[_name(part) for part in _parts(pattern.encode())] for pattern in patterns]
        self._start = tuple(_skipped(pattern, frozenset((0,))) for pattern in self._patterns)
        self._known: dict[bytes, tuple[frozenset[int], ...]] = {}

    def match(self, path: bytes) -> bool:
        """Whether one of them names this path. A leading slash means nothing."""
        after = self._after(b"/".join(_parts(path)))
        return any(len(pattern) in state for pattern, state in zip(self._patterns, after, strict=True))

    def _after(self, path: bytes) -> tuple[frozenset[int], ...]:
        """Where in each pattern a walk along the path may be."""
        directory, slash, name = path.rpartition(b"/")
        if not slash:
            return self._start if not path else self._next(self._start, name)
        state = self._known.get(directory)
        if state is None:
            state = self._after(directory)
            if len(self._known) >= _KEPT:
                self._known.clear()
            self._known[directory] = state
        return self._next(state, name)

    def _next(self, states: tuple[frozenset[int], ...], name: bytes) -> tuple[frozenset[int], ...]:
        return tuple(_step(pattern, state, name) for pattern, state in zip(self._patterns, states, strict=True))


_Name = re.Pattern[str] | None  # None: `**`


def _parts(path: bytes) -> list[bytes]:
    return [part for part in path.split(b"/") if part]


def _name(part: bytes) -> _Name:
    return None if part == _ANY else re.compile(translate(part.decode("latin-1").replace("[^", "[!")))


def _step(pattern: list[_Name], state: frozenset[int], name: bytes) -> frozenset[int]:
    text = name.decode("latin-1")
    after = set[int]()
    for at in state:
        if at < len(pattern):
            one = pattern[at]
            if one is None:
                after.add(at)
            elif one.match(text):
                after.add(at + 1)
    return _skipped(pattern, frozenset(after))


def _skipped(pattern: list[_Name], state: frozenset[int]) -> frozenset[int]:
    """`**` may also stand for nothing."""
    more = set(state)
    for at, one in enumerate(pattern):
        if at in more and one is None:
            more.add(at + 1)
    return frozenset(more)
