"""What the layers say before anybody changed anything: which paths the tests own, what is installed, what programs are called.

Found once per layer and remembered by its digest: a layer never changes.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol, TypeVar

import msgspec

from dsec.protocol.grading import DropReason
from dsec.protocol.link import Data, LinkStream, RecordReader
from dsec.protocol.specs import Change, ChangeKind

from . import names
from .names import folded

T = TypeVar("T")
_KEPT = 512
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_INSTALLED = ("usr/**/{}/*", "opt/**/{}/*", "home/**/{}/*", "root/**/{}/*")
_PACKAGES = ("site-packages", "dist-packages")


class Link(Protocol):
    """One edge."""

    async def open(self, method: str, params: object) -> LinkStream: ...
    async def call(self, method: str, params: object, kind: type[T]) -> T: ...


class Owned:
    """Paths that no change may touch, with all below them: found by path, by what looks like one, by a directory above."""

    def __init__(self, paths: Iterable[bytes] = ()) -> None:
        self._sorted = sorted(set(paths))
        self._folded = frozenset(map(folded, self._sorted))

    def is_one(self, path: bytes) -> bool:
        """One of them, or one that differs from such only in case or normalisation."""
        return bool(self._sorted) and folded(path) in self._folded

    def has(self, path: bytes) -> bool:
        """The same, or below such a one."""
        parts = path.split(b"/")
        return any(self.is_one(b"/".join(parts[: at + 1])) for at in range(len(parts)))

    def below(self, directory: bytes) -> list[bytes]:
        prefix = directory + b"/"
        at = end = bisect_left(self._sorted, prefix)
        while end < len(self._sorted) and self._sorted[end].startswith(prefix):
            end += 1
        return self._sorted[at:end]


class Ground:
    """workdir: relative to the root, without slashes around it. imports: directories where modules are looked for; entries: what
    the layers have there; installed: modules from elsewhere, folded; path: where programs are looked for."""

    def __init__(
        self,
        workdir: bytes,
        *,
        imports: Iterable[bytes] = (),
        owned: Iterable[bytes] = (),
        entries: Iterable[bytes] = (),
        installed: Iterable[str] = (),
        path: Iterable[bytes] = (),
    ) -> None:
        self.workdir = workdir
        self.imports = frozenset(imports)
        self.owned = Owned(owned)
        self.entries = frozenset(entries)
        self.installed = frozenset(installed)
        self.path = frozenset(path)


# -- from layers to ground ---------------------------------------------------------------------------------------------


class _Config(msgspec.Struct, frozen=True):
    env: dict[str, str] = {}


class LayerFacts(msgspec.Struct, frozen=True):
    """digest: `sha256:...` of its manifest. changes: the paths in it that were asked for."""

    digest: str
    config: _Config = _Config()
    changes: tuple[Change, ...] = ()


class Surveyor:
    """Looks at layers, each once."""

    def __init__(self) -> None:
        self._known: OrderedDict[tuple[str, tuple[str, ...]], LayerFacts] = OrderedDict()
        self._grounds: dict[tuple[str, ...], Ground] = {}
        self._imports: dict[tuple[str, ...], tuple[str, ...]] = {}

    async def survey(
        self,
        link: Link,
        layers: Sequence[str],
        tests: str,
        workdir: str,
        pythonpath: Sequence[str],
        env: Mapping[str, str],
    ) -> tuple[Ground, str]:
        """The ground of a grade, and the digest of its tests. Fault not_found for a layer that is not there."""
        work = workdir.strip("/")
        held = await self._facts(link, tests, ("**",))
        imports = self._imports_of(held, work, tuple(pythonpath))
        wanted = (
            *(f"{work}/**/{name}" for name in names.TEST_CONFIG),
            *(f"{directory}/*" for directory in imports),
            *(pattern.format(name) for pattern in (*_INSTALLED, work + "/**/{}/*") for name in _PACKAGES),
        )
        facts = await asyncio.gather(*(self._facts(link, ref, wanted) for ref in layers))
        path = env.get("PATH", "")
        key = (held.digest, *(one.digest for one in facts), work, *imports, path)
        ground = self._grounds.get(key)
        if ground is None:
            if len(self._grounds) >= _KEPT:
                self._grounds.clear()
            ground = self._grounds[key] = _ground(work.encode(), imports, held, facts, path)
        return ground, held.digest

    def _imports_of(self, held: LayerFacts, work: str, pythonpath: tuple[str, ...]) -> tuple[str, ...]:
        key = (held.digest, work, *pythonpath)
        found = self._imports.get(key)
        if found is None:
            if len(self._imports) >= _KEPT:
                self._imports.clear()
            found = self._imports[key] = _imports(work, pythonpath, held)
        return found

    async def _facts(self, link: Link, ref: str, include: tuple[str, ...]) -> LayerFacts:
        known = self._known.get((ref, include))
        asked = {"ref": ref, "include": include, "known": known.digest if known else ""}
        stream = await link.open("layers.files", asked)
        reader = RecordReader(Change)
        changes: list[Change] = []
        try:
            async for item in stream:
                if isinstance(item, Data):
                    changes += reader.feed(item.data)
            told = await stream.result(LayerFacts)
        finally:
            stream.cancel()
        if known is None or known.digest != told.digest:
            known = msgspec.structs.replace(told, changes=tuple(changes))
        self._known[ref, include] = known
        self._known.move_to_end((ref, include))
        while len(self._known) > _KEPT:
            self._known.popitem(last=False)
        return known


def _name(path: bytes) -> bytes:
    return path.rpartition(b"/")[2]


def _below(path: bytes, directory: bytes) -> bool:
    return not directory or path.startswith(directory + b"/")


def _is_installed(path: bytes) -> bool:
    return _name(path.rpartition(b"/")[0]).decode("latin-1") in _PACKAGES


def _is_config(change: Change, workdir: bytes) -> bool:
    name = names.special(_name(change.path))
    return name is DropReason.TEST_CONFIG and change.kind is not ChangeKind.MKDIR and _below(change.path, workdir)


def _owned_by(held: Iterable[Change], workdir: bytes) -> set[bytes]:
    """What a layer of tests holds (deletions too), and whole the directories of tests in which it holds something."""
    owned = set[bytes]()
    for change in held:
        if change.kind is ChangeKind.MKDIR and not change.opaque:
            continue
        owned.add(_tests_around(change.path, workdir) or change.path)
    return owned


def _tests_around(path: bytes, workdir: bytes) -> bytes | None:
    """The outermost directory below workdir that is called as directories of tests are."""
    if not _below(path, workdir):
        return None
    parts = path.split(b"/")
    first = len(workdir.split(b"/")) if workdir else 0
    for at in range(first, len(parts) - 1):
        if folded(parts[at]) in names.TEST_DIRECTORIES:
            return b"/".join(parts[: at + 1])
    return None


def _ground(work: bytes, imports: Sequence[str], held: LayerFacts, facts: Sequence[LayerFacts], path: str) -> Ground:
    found = [change for one in facts for change in one.changes]
    programs = ":".join([_PATH, path, *(one.config.env.get("PATH", "") for one in (*facts, held))]).split(":")
    return Ground(
        work,
        imports=(directory.encode() for directory in imports),
        owned=[*_owned_by(held.changes, work), *(change.path for change in found if _is_config(change, work))],
        entries=(change.path for change in found),
        installed=(names.module(_name(change.path)) for change in found if _is_installed(change.path)),
        path=(one.strip("/").encode() for one in programs if one.startswith("/")),
    )


def _imports(work: str, pythonpath: Sequence[str], held: LayerFacts) -> tuple[str, ...]:
    """Where the tests' imports look first: the workdir, what the runner is told, and beside test files."""
    given = [one if one.startswith("/") else f"{work}/{one}" for one in pythonpath]
    imports = {_plain(one) for one in (work, f"{work}/src", f"{work}/lib", *given)}
    for change in held.changes:
        parent = change.path.rpartition(b"/")[0]
        is_beside = change.path.endswith(b".py") and _below(change.path, work.encode())
        if is_beside and _tests_around(change.path, work.encode()) is None:
            imports.add(parent.decode("utf-8", "replace"))
    return tuple(sorted(imports))


def _plain(path: str) -> str:
    return "/".join(part for part in path.split("/") if part not in ("", "."))
