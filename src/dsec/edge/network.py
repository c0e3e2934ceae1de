"""What a sandbox may reach: nothing. No route and no names; a rule is recorded until an edge can have mirrors."""

from __future__ import annotations

from collections.abc import Mapping

from dsec.protocol.specs import Network


def describe(rules: Mapping[str, bool]) -> Network:
    """The rules as asked, and for each what is enforced and why."""
    return Network(mode="none", rules=dict(rules), enforced={name: _verdict(name, ok) for name, ok in rules.items()})


def _verdict(name: str, allowed: bool) -> str:
    if not allowed:
        return "refused: denied by the rule"
    return f"refused: no mirror named {name!r} is configured on this edge"
