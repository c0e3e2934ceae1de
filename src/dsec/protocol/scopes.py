"""What the holder of a scoped key may do: it travels with each of its requests to the edge, which knows what belongs to whom."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from fnmatch import fnmatchcase

import msgspec

from .errors import ErrorKind, Fault
from .specs import DSecContainerRunArgs

MAX_GLOBS = 32
MAX_GLOB = 200  # characters
_WILD = frozenset("*?[")


class Right(str, Enum):
    """use: rollouts that are there, and their sandboxes; create: rollouts that are not; grade: changes of their sandboxes, or
    given ones, by any tests. What a graded run prints is shown: who may grade can read the tests."""

    USE = "use"
    CREATE = "create"
    GRADE = "grade"


class Scope(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Some rollouts of one job. rollouts: globs of their names (`*` covers `/` too), None for all of them.

    key: id of the key, for logs and refusals. job: id of the job, so that a later one of the same name is another. network:
    names that `network_rules` of its sandboxes may allow. layers: globs of what new sandboxes may be made from, None for any.
    """

    key: str
    job: str
    rollouts: tuple[str, ...] | None = None
    may: tuple[Right, ...] = (Right.USE,)
    network: tuple[str, ...] = ()
    layers: tuple[str, ...] | None = None

    def covers(self, job: str, rollout: str) -> bool:
        """Whether a rollout of this name, or its sandbox, is within reach. What belongs to no rollout ("") never is."""
        if job != self.job or not rollout:
            return False
        return self.rollouts is None or any(fnmatchcase(rollout, glob) for glob in self.rollouts)

    def require(self, *rights: Right) -> None:
        """Fault permission without any of them."""
        if not set(rights) & set(self.may):
            have = ", ".join(one.value for one in self.may) or "nothing"
            raise self.refusal(f"the right {rights[0].value!r} (it has: {have})")

    def require_creation(self, args: DSecContainerRunArgs) -> None:
        """Fault permission unless its holder may make a rollout of this."""
        self.require(Right.CREATE)
        self.require_network(args.network_rules)
        self.require_layers(args)

    def require_layers(self, args: DSecContainerRunArgs) -> None:
        """Fault permission for an environment of other layers than its holder may use."""
        for layer in (args.container_image or "", *args.layers) if self.layers is not None else ():
            if not any(fnmatchcase(layer, glob) for glob in self.layers or ()):
                raise self.refusal(
                    f"sandboxes of the layer {layer[:120]!r} (those of: {', '.join(self.layers or ())[:200]})"
                )

    def require_network(self, rules: dict[str, bool]) -> None:
        """Fault permission for rules that allow more than the key's holder may."""
        more = sorted(name for name, allowed in rules.items() if allowed and name not in self.network)
        if more:
            raise self.refusal(f"network_rules that allow {', '.join(more)[:200]}")

    def refusal(self, what: str) -> Fault:
        """It does not go so far."""
        return Fault(
            ErrorKind.PERMISSION,
            f"key {self.key} does not give {what}",
            hint="it is for some rollouts of one job; who made it can make another (`dsec key create`)",
        )

    def refused_target(self) -> Fault:
        """The same words for what is another's, what is not there and what has ended: they tell nothing about it."""
        return self.refusal("this sandbox or rollout: it is none of those that the key is for")


class ScopedKey(msgspec.Struct, frozen=True, kw_only=True):
    """A new scoped key. key is told once and kept nowhere; the rest says what it is good for. expires_at: Unix seconds."""

    id: str
    key: str
    job: str
    rollouts: tuple[str, ...] | None
    may: tuple[Right, ...]
    network: tuple[str, ...]
    layers: tuple[str, ...] | None
    expires_at: float
    note: str = ""

    def __repr__(self) -> str:  # keys do not belong in logs and tracebacks
        return f"ScopedKey(id={self.id!r}, job={self.job!r}, expires_at={self.expires_at})"


def narrower(held: tuple[str, ...] | None, asked: tuple[str, ...] | None) -> bool:
    """Whether every rollout that `asked` covers is one that `held` covers, as far as their spelling shows: an asked glob is
    one of the held ones, or a plain name that one of them covers."""
    if held is None:
        return True
    return asked is not None and all(
        one in held or (not _WILD & set(one) and any(fnmatchcase(one, glob) for glob in held)) for one in asked
    )


def check_globs(what: str, globs: Iterable[str]) -> tuple[str, ...]:
    """Fault invalid_request for what can be no list of globs."""
    found = tuple(globs)
    if not 1 <= len(found) <= MAX_GLOBS:
        raise Fault(ErrorKind.INVALID, f"{what}: {len(found)} globs are not between 1 and {MAX_GLOBS}")
    for glob in found:
        if not 1 <= len(glob) <= MAX_GLOB or not glob.isprintable():
            raise Fault(
                ErrorKind.INVALID, f"{what}: {glob[:80]!r} is not 1 to {MAX_GLOB} printable characters",
                hint="globs of names, as agent/*",
            )  # fmt: skip
    return found
