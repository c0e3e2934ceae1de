"""Which changes of an agent count: source that the caller allows. The rest is dropped, with a reason.

Nothing here trusts a name, a mode or a kind: what is kept becomes a plain file or directory of root's, or a deletion. Changes
come as a stream, directories before what is in them, and are judged one by one.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
from blake3 import blake3

from dsec.protocol.grading import Dropped, DropReason, Signal
from dsec.protocol.specs import Change, ChangeKind

from . import names
from .globs import Globs, State
from .ground import Ground

MAX_KEPT = 200_000
MAX_BYTES = 256 * 1024 * 1024
"""Of the contents of what is kept."""
MAX_LISTED = 1_000
MAX_PATH = 4095
"""Bytes: what programs can open by name."""
MAX_DEPTH = 255
_RESERVED = b".wh."
_REMEMBERED = 4096


class Sifted(msgspec.Struct, frozen=True, kw_only=True):
    """What became of all changes. too_large: why they cannot be graded, "" when they can. digest: blake3 of what is kept.
    written: files that are kept, below the workdir."""

    kept: int = 0
    kept_bytes: int = 0
    digest: str = ""
    dropped: tuple[Dropped, ...] = ()
    dropped_total: int = 0
    signals: tuple[Signal, ...] = ()
    too_large: str = ""
    written: tuple[bytes, ...] = ()


class _Place(msgspec.Struct, frozen=True, kw_only=True):
    """What a directory's path says of everything in it. included, excluded: how far the globs have come."""

    included: State
    excluded: State
    why: DropReason | None = None
    has_programs: bool = False
    is_inside: bool = False
    is_owned: bool = False
    is_imported: bool = False
    shadows: bool = False


class Sift:
    """include, exclude: globs below the workdir."""

    def __init__(
        self, ground: Ground, include: Iterable[str], exclude: Iterable[str] = (), most: int = MAX_KEPT
    ) -> None:
        self._ground = ground
        self._most = most
        self._include, self._exclude = Globs(include), Globs(exclude)
        self._places: dict[bytes, _Place] = {}
        self._kept = self._bytes = self._dropped = 0
        self._digests: list[bytes] = []
        self._suspicious: list[Dropped] = []
        self._plain: list[Dropped] = []
        self._noted: dict[str, tuple[str, int]] = {}  # signal -> its first example, how many
        self._alike: dict[str, bytes] = {}
        self._too_large = ""
        self._written: list[bytes] = []

    def take(self, change: Change) -> Change | None:
        """The change as it is to be applied; None when it does not count."""
        path = change.path.strip(b"/")
        if len(path) > MAX_PATH or path.count(b"/") > MAX_DEPTH:
            self._drop(path[:MAX_PATH], change, DropReason.TOO_DEEP)
            return None
        why = self._why(path, change) or self._why_not_this(path, change)
        if why is not None:
            self._drop(path, change, why)
            return None
        return self._keep(path, change)

    def result(self) -> Sifted:
        listed = (self._suspicious + self._plain)[:MAX_LISTED]
        whole = blake3()
        for digest in sorted(self._digests):
            whole.update(digest)
        return Sifted(
            kept=self._kept,
            kept_bytes=self._bytes,
            digest=whole.hexdigest(),
            dropped=tuple(listed),
            dropped_total=self._dropped,
            signals=tuple(Signal(name, _and_more(*noted)) for name, noted in sorted(self._noted.items())),
            too_large=self._too_large,
            written=tuple(self._written),
        )

    # -- judging --

    def _why(self, path: bytes, change: Change) -> DropReason | None:
        """By what the path says. The more telling reason comes first."""
        parent, _, name = path.rpartition(b"/")
        place = self._place(parent)
        if name in (b"", b".", b".."):
            return DropReason.RESERVED
        if place.why is not None:
            return place.why
        if names.is_git(name):
            return DropReason.GIT
        if (why := names.special(name)) is not None:
            return why
        if place.has_programs:
            return DropReason.ON_PATH
        if not place.is_inside:
            return _outside(path)
        if name.startswith(_RESERVED):
            return DropReason.RESERVED
        if place.is_owned or self._ground.owned.is_one(path):
            return DropReason.TESTS
        if not self._include.ends(self._include.below(place.included, name)):
            return DropReason.NOT_INCLUDED
        if self._exclude.ends(self._exclude.below(place.excluded, name)):
            return DropReason.NOT_INCLUDED
        shadows = place.shadows or (place.is_imported and self._shadows(parent, name))
        return DropReason.SHADOWS if shadows and change.kind is not ChangeKind.DELETE else None

    def _place(self, directory: bytes) -> _Place:
        """What a directory says of all that is in it; remembered, since changes come directory by directory."""
        known = self._places.get(directory)
        if known is None:
            if len(self._places) >= _REMEMBERED:
                self._places.clear()
            known = self._places[directory] = self._look_around(directory)
        return known

    def _look_around(self, directory: bytes) -> _Place:
        ground = self._ground
        if not directory:
            above = _Place(included=self._include.root, excluded=self._exclude.root)
            return msgspec.structs.replace(above, is_inside=not ground.workdir)
        parent, _, name = directory.rpartition(b"/")
        around = self._place(parent)
        why = around.why
        if why is None:
            why = _why_below(name)
        place = _Place(
            why=why,
            has_programs=directory in ground.path,
            is_inside=around.is_inside or directory == ground.workdir,
            is_owned=around.is_owned or ground.owned.is_one(directory),
            is_imported=directory in ground.imports,
            shadows=around.shadows or (around.is_imported and self._shadows(parent, name)),
            included=around.included,
            excluded=around.excluded,
        )
        if not around.is_inside:
            return place
        included, excluded = self._include.below(place.included, name), self._exclude.below(place.excluded, name)
        return msgspec.structs.replace(place, included=included, excluded=excluded)

    def _shadows(self, directory: bytes, name: bytes) -> bool:
        """Whether it would be a module that the layers do not have there but somewhere else, for others to import."""
        module = names.module(name)
        if module not in names.IMPORTED and module not in self._ground.installed:
            return False
        return directory + b"/" + name not in self._ground.entries

    def _why_not_this(self, path: bytes, change: Change) -> DropReason | None:
        """By what is there, although its path is one that counts."""
        match change.kind:
            case ChangeKind.SYMLINK:
                return DropReason.LINK
            case ChangeKind.SPECIAL:
                return DropReason.SPECIAL
            case ChangeKind.WRITE:
                if self._ground.owned.below(path):  # a file in the place of a directory of theirs
                    return DropReason.TESTS
                if change.data is None:
                    return DropReason.TOO_LARGE
                return DropReason.COMPILED if names.is_compiled(change.data) else None
            case _:
                return None

    def _inside(self, path: bytes) -> bytes | None:
        """Seen from the workdir; the workdir itself is no change of what is in it."""
        work = self._ground.workdir
        if not work:
            return path
        return path[len(work) + 1 :] if path.startswith(work + b"/") else None

    # -- keeping --

    def _keep(self, path: bytes, change: Change) -> Change | None:
        size = len(change.data or b"")
        if self._kept >= self._most or self._bytes + size > MAX_BYTES:
            what = f"{self._most:,} changes" if self._kept >= self._most else f"{MAX_BYTES >> 20} MiB"
            self._too_large = self._too_large or f"more than {what} would count"
            return None
        self._kept += 1
        self._bytes += size
        self._look_at(path, change)
        runs = change.kind is ChangeKind.MKDIR
        mode = (change.mode & 0o755) | (0o555 if runs else 0o444)
        kept = Change(
            path=path,
            kind=change.kind,
            mode=mode,
            size=size,
            digest=change.digest,
            data=change.data,
            opaque=change.opaque,
        )
        self._digests.append(_digest(kept))
        if change.kind is ChangeKind.WRITE:
            self._written.append(self._inside(path) or path)
        return kept

    def _look_at(self, path: bytes, change: Change) -> None:
        """What is not carried over, and what only looks like something else, is said."""
        if change.links > 1:
            self._note("hard_link", path)
        if change.mode & 0o6000:
            self._note("set_id", path)
        if change.xattrs:
            self._note("xattrs", path)
        text = names.folded(path)
        if self._alike.setdefault(text, path) != path:
            self._note("names_alike", path)

    def _drop(self, path: bytes, change: Change, why: DropReason) -> None:
        is_noise = why is DropReason.BYTECODE or (change.kind is ChangeKind.MKDIR and not change.opaque)
        suspicious = why.suspicious
        if why is DropReason.GIT:
            parts = path.split(b"/")
            at = next(at for at, part in enumerate(parts) if names.is_git(part))
            suspicious = names.git_is_effective(parts[at + 1 :]) and change.kind is not ChangeKind.DELETE
            is_noise = is_noise or not suspicious
        if why is DropReason.LINK:
            suspicious = self._leads_away(path, change.target or b"")
        if why is DropReason.TOO_LARGE:
            self._too_large = self._too_large or f"{shown(path, self._ground.workdir)} has {change.size:,} bytes"
        if is_noise:
            return
        self._dropped += 1
        listed = self._suspicious if suspicious else self._plain
        text = shown(path, self._ground.workdir)
        if len(listed) < MAX_LISTED:
            listed.append(Dropped(text, change.kind, why, suspicious))
        if suspicious:
            self._note(f"dropped_{why.name.lower()}", path)

    def _leads_away(self, path: bytes, target: bytes) -> bool:
        """Whether a link leads out of the workdir, or to what is the tests'."""
        if target.startswith(b"/"):
            parts = target.split(b"/")
        else:
            parts = path.split(b"/")[:-1] + target.split(b"/")
        way: list[bytes] = []
        for part in parts:
            if part == b"..":
                way[-1:] = []
            elif part not in (b"", b"."):
                way.append(part)
        end = b"/".join(way)
        return self._inside(end) is None or self._ground.owned.has(end) or bool(self._ground.owned.below(end))

    def _note(self, name: str, path: bytes) -> None:
        first, count = self._noted.get(name, (shown(path, self._ground.workdir), 0))
        self._noted[name] = first, count + 1


def _why_below(name: bytes) -> DropReason | None:
    """What a directory's own name says of all that is in it."""
    if name in (b"", b".", b"..") or name.startswith(_RESERVED):
        return DropReason.RESERVED
    if names.is_git(name):
        return DropReason.GIT
    why = names.special(name)
    return None if why is DropReason.COMPILED else why


def _outside(path: bytes) -> DropReason:
    if path.startswith(names.SHELL_DIRECTORIES) or path in (b"etc/profile", b"etc/environment", b"etc/bash.bashrc"):
        return DropReason.SHELL
    return DropReason.LOADER if path.startswith(names.LOADER_DIRECTORIES) else DropReason.OUTSIDE


def _digest(change: Change) -> bytes:
    data = change.data or b""
    head = f"{change.kind.value} {change.mode:o} {change.opaque} {len(change.path)} {len(data)} ".encode()
    return blake3(head + change.path + data).digest()


def _and_more(first: str, count: int) -> str:
    return first if count == 1 else f"{first} and {count - 1:,} more"


def shown(path: bytes, workdir: bytes = b"") -> str:
    """For people and JSON: below the workdir or absolute; what is no printable text is escaped."""
    inside = path[len(workdir) + 1 :] if workdir and path.startswith(workdir + b"/") else b"/" + path
    text = inside.decode("utf-8", "backslashreplace")
    return "".join(letter if letter.isprintable() else letter.encode("unicode_escape").decode() for letter in text)
