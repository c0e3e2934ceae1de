"""Network rules: which name may be reached, and how a refusal is put to a model that can act on it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import NamedTuple
from urllib.parse import urlsplit

from dsec.protocol.errors import ErrorKind, Fault
from dsec.protocol.mirrors import Mirror, MirrorKind
from dsec.protocol.specs import Network

from .names import MAX_NAME, BadName, normal, split_authority

HTTP, TLS = 80, 443
MAX_RULES = 1024
_LISTED = 12  # names that a refusal tells
_READING = frozenset(("GET", "HEAD"))


class Target(NamedTuple):
    """What a request asks for: a name, a port, and whether it wants to speak TLS with it (CONNECT)."""

    name: str
    port: int
    tls: bool

    def __str__(self) -> str:
        return self.name if self.port == (TLS if self.tls else HTTP) else f"{self.name}:{self.port}"


class Route(NamedTuple):
    """Allowed: to a mirror's upstream, or to the public address of a name."""

    target: Target
    mirror: Mirror | None


class Denial(NamedTuple):
    """Refused: `why` completes "... is not reachable from this sandbox: "."""

    target: str
    why: str


class Rule(NamedTuple):
    """One parsed key. suffix: `*.name` covers everything below name; port None: 80 and 443."""

    name: str
    suffix: bool
    port: int | None
    key: str
    allowed: bool

    def covers(self, target: Target) -> bool:
        if self.port is not None and self.port != target.port:
            return False
        return target.name.endswith("." + self.name) if self.suffix else target.name == self.name

    def rank(self) -> tuple[bool, int, bool, bool]:
        """The most specific rule counts; of equals the one that denies."""
        return not self.suffix, self.name.count("."), self.port is not None, not self.allowed


def parse_rule(key: str, allowed: bool) -> Rule:
    """Fault invalid_request for a key that can be neither a mirror nor a domain."""
    text = key.strip()
    suffix = text.startswith("*.")
    try:
        ascii_text = text.removeprefix("*.").encode("idna").decode() if not text.isascii() else text.removeprefix("*.")
        name, port = split_authority(ascii_text)
    except (BadName, UnicodeError) as error:
        raise Fault(
            ErrorKind.INVALID,
            f"network_rules: {key[:80]!r} is neither a mirror nor a domain ({error})",
            hint="keys are like 'pypi', 'example.com', '*.example.com' or 'example.com:8443'; addresses and URLs are none",
            field="network_rules",
        ) from None
    return Rule(name, suffix, port, key, allowed)


def check_rules(rules: Mapping[str, bool]) -> None:
    """Every key can be a rule; whether a mirror of that name exists is the edge's to tell later."""
    if len(rules) > MAX_RULES:
        raise Fault(ErrorKind.INVALID, f"network_rules: {len(rules)} rules are more than {MAX_RULES}")
    for key, allowed in rules.items():
        if len(key) > MAX_NAME + 8:
            raise Fault(ErrorKind.INVALID, f"network_rules: {key[:80]!r}... is longer than a name can be")
        parse_rule(key, allowed)


class Policy:
    """The rules of one sandbox on an edge with these mirrors."""

    def __init__(self, rules: Mapping[str, bool], mirrors: Iterable[Mirror]) -> None:
        self._mirrors = {mirror.name: mirror for mirror in mirrors}
        self._rules = sorted((parse_rule(key, ok) for key, ok in rules.items()), key=Rule.rank, reverse=True)
        own = [rule for rule in self._rules if self._mirror_of(rule) is not None]
        denied = {rule.name for rule in own if not rule.allowed}
        self._allowed_mirrors = {rule.name for rule in own if rule.allowed} - denied
        self._also = {parse_rule(domain, True) for name in self._allowed_mirrors for domain in self._mirrors[name].also}
        self._aliases = self._upstream_names()

    def _mirror_of(self, rule: Rule) -> Mirror | None:
        return None if rule.suffix or rule.port is not None else self._mirrors.get(rule.name)

    def _upstream_names(self) -> dict[tuple[str, int], Mirror]:
        """An index may link to its files by its upstream's own name."""
        found: dict[tuple[str, int], Mirror] = {}
        for name in self._allowed_mirrors:
            url = urlsplit(self._mirrors[name].url)
            assert url.hostname is not None
            if url.scheme == "http":
                with suppress(BadName):  # an address: nobody can ask for one
                    found[normal(url.hostname), url.port or HTTP] = self._mirrors[name]
        return found

    @property
    def mirrors(self) -> tuple[Mirror, ...]:
        """Those that are allowed, in the order of the rules' names."""
        return tuple(self._mirrors[name] for name in sorted(self._allowed_mirrors))

    def decide(self, target: Target) -> Route | Denial:
        mirror = self._mirrors.get(target.name)
        if mirror is not None:
            return self._to_mirror(target, mirror)
        covering = [rule for rule in self._rules if rule.covers(target)]
        if covering and not covering[0].allowed:
            return Denial(str(target), f"the rule {covering[0].key!r} denies it")
        if not target.tls and (alias := self._aliases.get((target.name, target.port))) is not None:
            return Route(target, alias)
        covering = covering or [rule for rule in self._also if rule.covers(target)]
        if not covering:
            return Denial(str(target), self._why_none(target))
        if "." not in target.name:
            return Denial(str(target), f"no mirror named {target.name!r} is configured on this edge")
        if covering[0].port is None and target.port != (TLS if target.tls else HTTP):
            wanted = f"{TLS} (https)" if target.tls else f"{HTTP} (http)"
            return Denial(str(target), f"the rule {covering[0].key!r} allows port {wanted} only")
        return Route(target, None)

    def _why_none(self, target: Target) -> str:
        elsewhere = [
            rule for rule in self._rules if rule.allowed and rule.covers(target._replace(port=rule.port or target.port))
        ]
        if elsewhere:
            return f"the rule {elsewhere[0].key!r} allows another port"
        return "no network rule allows it"

    def _to_mirror(self, target: Target, mirror: Mirror) -> Route | Denial:
        if mirror.name not in self._allowed_mirrors:
            return Denial(str(target), self._why_not(mirror))
        tunnel = mirror.kind is MirrorKind.TUNNEL
        if target.tls and not tunnel:
            return Denial(
                str(target), f"this mirror is reached as http://{mirror.name}/ (encrypted outside the sandbox)"
            )
        if tunnel and not target.tls:
            return Denial(str(target), f"this mirror is reached as https://{mirror.name}/ only")
        if target.port != (TLS if tunnel else HTTP):
            return Denial(str(target), f"a mirror is reached without a port, as http{'s' * tunnel}://{mirror.name}/")
        return Route(target, mirror)

    def _why_not(self, mirror: Mirror) -> str:
        denying = [rule.key for rule in self._rules if rule.name == mirror.name and not rule.allowed]
        return f"the rule {denying[0]!r} denies it" if denying else "no network rule allows this mirror"

    # -- what is told --

    def allowed_names(self) -> list[str]:
        mirrors = [mirror.name for mirror in self.mirrors]
        return mirrors + [rule.key for rule in self._rules if rule.allowed and self._reachable(rule)]

    def _reachable(self, rule: Rule) -> bool:
        return "." in rule.name and self._mirror_of(rule) is None

    def in_short(self) -> str:
        """The allowed names in a few words."""
        names = self.allowed_names()
        more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
        return (", ".join(names[:_LISTED]) or "nothing") + more

    def in_full(self) -> str:
        """The allowed names with their addresses, a line each."""
        lines = [f"  {where(mirror)}  (mirror {mirror.name})" for mirror in self.mirrors]
        lines += [f"  {rule.key}" for rule in self._rules if rule.allowed and self._reachable(rule)]
        more = [f"  and {len(lines) - _LISTED} more"] if len(lines) > _LISTED else []
        return "\n".join(lines[:_LISTED] + more) or "  nothing"

    def describe(self, rules: Mapping[str, bool]) -> Network:
        """The rules as asked, and for each what is enforced and why."""
        enforced = {key: self._verdict(parse_rule(key, allowed)) for key, allowed in rules.items()}
        return Network(mode="proxy" if rules else "none", rules=dict(rules), enforced=enforced)

    def _verdict(self, rule: Rule) -> str:
        if not rule.allowed:
            return "refused: denied by the rule"
        mirror = self._mirror_of(rule)
        if mirror is not None:
            return "allowed" if mirror.name in self._allowed_mirrors else "refused: another rule denies it"
        if "." not in rule.name:
            known = ", ".join(sorted(self._mirrors)) or "none"
            return f"refused: no mirror named {rule.name!r} is configured on this edge (configured: {known})"
        port = rule.port or TLS
        named = Target(f"x.{rule.name}" if rule.suffix else rule.name, port, True)
        first = next(other for other in self._rules if other.covers(named))
        return "allowed" if first.allowed else f"refused: the rule {first.key!r} denies it"


def where(mirror: Mirror) -> str:
    """The address of a mirror inside."""
    url = urlsplit(mirror.url)
    return f"https://{mirror.name}/" if mirror.kind is MirrorKind.TUNNEL else f"http://{mirror.name}{url.path or '/'}"


def prefix(mirror: Mirror) -> str:
    """Where the paths of a mirror begin; files of an index lie beside it, not below it."""
    path = urlsplit(mirror.url).path.rstrip("/")
    if mirror.kind is MirrorKind.PYPI and path.rpartition("/")[2] in ("simple", "+simple"):
        path = path.rpartition("/")[0]
    return path + "/"


def method_allowed(mirror: Mirror | None, method: str) -> bool:
    """A mirror is for reading: with the operator's credentials a PUT could publish."""
    return mirror is None or mirror.takes_writes or method in _READING
