"""What a sandbox may reach. Default: no route and no names; a rule can only be honoured once its mirror is configured."""

from __future__ import annotations

from collections.abc import Mapping

from dsec.protocol.specs import Network


def describe(rules: Mapping[str, bool], mirrors: Mapping[str, str]) -> Network:
    """The rules as asked, and for each what is enforced and why."""
    return Network(
        mode="none", rules=dict(rules), enforced={name: _verdict(name, ok, mirrors) for name, ok in rules.items()}
    )


def _verdict(name: str, allowed: bool, mirrors: Mapping[str, str]) -> str:
    if not allowed:
        return "refused: denied by the rule"
    if name not in mirrors:
        return f"refused: no mirror named {name!r} is configured on this edge"
    return "refused: this edge has no proxy for mirrors yet"
