"""A probe: a named function that tries one thing and says what it found."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec

from dsec.protocol.specs import Capability


class Finding(msgspec.Struct, frozen=True):
    """What a probe saw. remedy overrides the probe's usual one when the cause is a particular one."""

    ok: bool
    detail: str
    remedy: str | None = None


ProbeFunction = Callable[[Path], Finding]


class Probe(msgspec.Struct, frozen=True):
    """forked: run in a child of its own, because it changes its process (namespaces, filters) for good."""

    name: str
    run: ProbeFunction
    remedy: str
    forked: bool


REGISTRY: list[Probe] = []


def probe(name: str, *, remedy: str, forked: bool = False) -> Callable[[ProbeFunction], ProbeFunction]:
    """Register a function that takes a scratch directory and returns a Finding."""

    def register(function: ProbeFunction) -> ProbeFunction:
        REGISTRY.append(Probe(name, function, remedy, forked))
        return function

    return register


def capability(which: Probe, finding: Finding) -> Capability:
    remedy = "" if finding.ok else (which.remedy if finding.remedy is None else finding.remedy)
    return Capability(which.name, finding.ok, finding.detail, remedy)
