"""Patterns over paths as `sandbox.changes` has them: `*` and `?` within a name, `[a-z]`, `**` for any number of directories.

Bytes throughout, exact; `dir/**` names `dir` too. Which names of a pattern may come next is worked out name by name, so that
a hostile path costs no more than its length, and files of one directory share what is known of it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from fnmatch import translate
from functools import reduce

_ANY = b"**"

State = tuple[frozenset[int], ...]
"""Where in each pattern a walk along a directory's path may be."""


class Globs:
    """Any of some patterns. A leading slash means nothing."""

    def __init__(self, patterns: Iterable[str]) -> None:
        self._patterns = [[_name(part) for part in _parts(pattern.encode())] for pattern in patterns]
        self.root: State = tuple(_skipped(pattern, frozenset((0,))) for pattern in self._patterns)

    def below(self, state: State, name: bytes) -> State:
        """One name further down."""
        return tuple(_step(pattern, at, name) for pattern, at in zip(self._patterns, state, strict=True))

    def ends(self, state: State) -> bool:
        """Whether one of them names what the walk has come to."""
        return any(len(pattern) in at for pattern, at in zip(self._patterns, state, strict=True))

    def match(self, path: bytes) -> bool:
        """Whether one of them names this path."""
        return self.ends(reduce(self.below, _parts(path), self.root))


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
