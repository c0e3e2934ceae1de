"""Which rule counts, and what is said of it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsec.edge.proxy.rules import Denial, Policy, Route, Target, check_rules, method_allowed, prefix, where
from dsec.protocol.errors import ErrorKind, Fault
from dsec.protocol.mirrors import Mirror, MirrorKind

PYPI = Mirror(
    name="pypi", url="http://10.0.0.5:8081/repository/pypi/simple/", kind=MirrorKind.PYPI, also=("files.example.net",)
)
NPM = Mirror(name="npm", url="https://npm.corp.example/", kind=MirrorKind.NPM)
GIT = Mirror(name="git.corp", url="https://127.0.0.1:8443", kind=MirrorKind.TUNNEL)
LINKS = Mirror(name="deb", url="http://deb.corp:3142/debian/", kind=MirrorKind.APT)
MIRRORS = (PYPI, NPM, GIT, LINKS)


def http(name: str, port: int = 80) -> Target:
    return Target(name, port, False)


def tls(name: str, port: int = 443) -> Target:
    return Target(name, port, True)


def allows(rules: dict[str, bool], target: Target) -> bool:
    return isinstance(Policy(rules, MIRRORS).decide(target), Route)


@pytest.mark.parametrize(
    ("rules", "target", "allowed"),
    [
        ({}, tls("example.com"), False),
        ({"example.com": True}, tls("example.com"), True),
        ({"example.com": True}, http("example.com"), True),
        ({"example.com": True}, tls("www.example.com"), False),
        ({"example.com": True}, tls("badexample.com"), False),
        ({"example.com": True}, tls("example.com.evil.net"), False),
        ({"*.example.com": True}, tls("a.b.example.com"), True),
        ({"*.example.com": True}, tls("example.com"), False),
        ({"*.example.com": True}, tls("xexample.com"), False),
        ({"*.example.com": True, "secret.example.com": False}, tls("secret.example.com"), False),
        ({"*.example.com": False, "open.example.com": True}, tls("open.example.com"), True),
        ({"*.example.com": True, "*.a.example.com": False}, tls("x.a.example.com"), False),
        ({"*.a.example.com": True, "*.example.com": False}, tls("x.a.example.com"), True),
        ({"example.com": True, "EXAMPLE.com.": False}, tls("example.com"), False),
        ({"EXAMPLE.com.": False, "example.com": True}, tls("example.com"), False),
        ({"bücher.example": True}, tls("xn--bcher-kva.example"), True),
        # ports
        ({"example.com": True}, tls("example.com", 8443), False),
        ({"example.com": True}, tls("example.com", 80), False),
        ({"example.com": True}, http("example.com", 443), False),
        ({"example.com:8443": True}, tls("example.com", 8443), True),
        ({"example.com:8443": True}, tls("example.com"), False),
        ({"example.com": True, "example.com:443": False}, tls("example.com"), False),
        # mirrors
        ({"pypi": True}, http("pypi"), True),
        ({"pypi": False}, http("pypi"), False),
        ({"npm": True}, http("pypi"), False),
        ({"pypi": True}, tls("pypi"), False),
        ({"pypi": True}, http("pypi", 8081), False),
        ({"pypi": True}, tls("files.example.net"), True),
        ({"pypi": True, "files.example.net": False}, tls("files.example.net"), False),
        ({"pypi": False}, tls("files.example.net"), False),
        ({"git.corp": True}, tls("git.corp"), True),
        ({"git.corp": True}, http("git.corp"), False),
        ({"deb": True}, http("deb.corp", 3142), True),
        ({"deb": True}, http("deb.corp"), False),
        ({"deb": False}, http("deb.corp", 3142), False),
        ({"unknown": True}, http("unknown"), False),
    ],
)
def test_decisions(rules: dict[str, bool], target: Target, allowed: bool) -> None:
    check_rules(rules)
    assert allows(rules, target) is allowed


LABEL = st.sampled_from(["a", "b", "c", "xn--q"])
NAME = st.lists(LABEL, min_size=2, max_size=4).map(".".join)
RULE = st.tuples(st.booleans(), NAME).map(lambda pair: "*." * pair[0] + pair[1])


@given(st.dictionaries(RULE, st.booleans(), max_size=8), NAME)
def test_the_most_specific_rule_counts(rules: dict[str, bool], name: str) -> None:
    """Against a plain reading: the exact name, else its nearest parent with a wildcard."""
    labels = name.split(".")
    keys = [name, *("*." + ".".join(labels[start:]) for start in range(1, len(labels)))]
    verdict = next((rules[key] for key in keys if key in rules), False)
    assert allows(rules, tls(name)) is verdict


@pytest.mark.parametrize(
    "key", ["", "*", "*.", "127.0.0.1", "[::1]", "10.0.0.0/8", "http://example.com", "example.com/x", "a b", "a*b.com", "*.*.com",
            "user@example.com", "example.com:0", "example.com:99999", "x" * 300, "\ud800.com"],
)  # fmt: skip
def test_keys_that_are_none(key: str) -> None:
    with pytest.raises(Fault, match="network_rules") as caught:
        check_rules({key: True})
    assert caught.value.body.kind is ErrorKind.INVALID


def test_a_refusal_tells_what_to_do() -> None:
    policy = Policy({"pypi": True, "*.example.org": True, "npm": False}, MIRRORS)
    refusal = policy.decide(tls("api.example.com"))
    assert refusal == Denial("api.example.com", "no network rule allows it")
    assert policy.in_short() == "pypi, *.example.org"
    assert "http://pypi/repository/pypi/simple/" in policy.in_full()
    denied = policy.decide(http("npm"))
    assert isinstance(denied, Denial) and "'npm' denies it" in denied.why
    other_port = Policy({"example.com:8443": True}, ()).decide(tls("example.com"))
    assert isinstance(other_port, Denial) and "another port" in other_port.why


def test_info_tells_the_truth() -> None:
    rules = {"pypi": True, "npm": False, "crates": True, "example.com": True, "git.corp": True, "EXAMPLE.com": False}
    told = Policy(rules, MIRRORS).describe(rules)
    assert told.mode == "proxy" and told.rules == rules
    assert told.enforced["pypi"] == told.enforced["git.corp"] == "allowed"
    assert told.enforced["npm"] == "refused: denied by the rule"
    assert "no mirror named 'crates'" in told.enforced["crates"] and "pypi" in told.enforced["crates"]
    assert told.enforced["example.com"].startswith("refused"), "another spelling of it is denied, and denial wins"
    assert Policy({}, MIRRORS).describe({}).mode == "none"


def test_mirrors_inside() -> None:
    assert where(PYPI) == "http://pypi/repository/pypi/simple/" and prefix(PYPI) == "/repository/pypi/"
    assert where(GIT) == "https://git.corp/"
    assert prefix(NPM) == "/" and prefix(LINKS) == "/debian/"
    assert method_allowed(PYPI, "GET") and not method_allowed(PYPI, "PUT") and method_allowed(None, "PUT")
