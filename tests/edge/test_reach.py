"""What programs inside are told, and how it is told from the agent's own files."""

from __future__ import annotations

import configparser
from collections.abc import AsyncIterator

from dsec.edge import reach
from dsec.edge.network import _MAX_LINES, _REMEMBERED, _UNAVAILABLE, _Decisions
from dsec.edge.proxy.rules import Policy
from dsec.edge.proxy.service import Verdict
from dsec.edge.residue import Residue
from dsec.edge.sandbox import Sandbox
from dsec.protocol.mirrors import Mirror, MirrorKind, mirrors_of
from dsec.protocol.specs import Change, ChangeKind, DSecContainerRunArgs

MIRRORS = mirrors_of(
    {
        "pypi": "https://a.example/simple/",
        "wheels": "pypi+http://b.example/w/",
        "npm": "https://c.example/",
        "debian": "http://d.example/debian/",
    }
)


def policy(**rules: bool) -> Policy:
    return Policy(rules, MIRRORS)


def text(of: Policy, path: str) -> str:
    data = reach.contents(of)[path]
    assert data is not None
    return data.decode()


def test_every_file_says_that_it_is_ours_and_is_well_formed() -> None:
    everything = policy(pypi=True, wheels=True, npm=True, debian=True)
    for data in reach.contents(everything).values():
        assert data is not None and reach.is_ours(data) and data.endswith(b"\n")
    assert not reach.is_ours(b"[global]\n") and not reach.is_ours(b"x" * 300 + reach.MARK.encode())
    pip = configparser.ConfigParser()
    pip.read_string(text(everything, "/etc/pip.conf"))
    assert dict(pip["global"])["index-url"] == "http://pypi/simple/"
    assert dict(pip["global"])["extra-index-url"] == "http://wheels/w/"
    sources = text(everything, "/etc/apt/sources.list.d/dsec-network.sources")
    assert "URIs: http://debian/debian/\nSuites: bookworm bookworm-updates\nComponents: main\n" in sources
    assert "Trusted" not in sources


def test_only_what_is_allowed_is_named() -> None:
    some = policy(npm=True, pypi=False)
    assert reach.contents(some)["/etc/apt/sources.list.d/dsec-network.sources"] is None
    assert "index-url" not in text(some, "/etc/pip.conf") and "retries = 0" in text(some, "/etc/pip.conf")
    variables = reach.environment(some)
    assert variables["npm_config_registry"] == "http://npm/" and "PIP_INDEX_URL" not in variables
    assert variables["http_proxy"] == variables["HTTPS_PROXY"] == reach.PROXY
    assert set(reach.contents(None).values()) == {None}


def test_the_answer_without_a_proxy_is_whole() -> None:
    head, _, body = _UNAVAILABLE.partition(b"\r\n\r\n")
    assert b"Content-Length: %d\r\n" % len(body) in head


async def left(residue: Residue, *changes: Change) -> list[bytes]:
    async def walked() -> AsyncIterator[Change | bool]:
        for change in changes:
            yield change
        yield False

    return [item.path async for item in residue.without(walked()) if isinstance(item, Change)]


def mkdir(path: bytes, mode: int = 0o755, opaque: bool = False) -> Change:
    return Change(path=path, kind=ChangeKind.MKDIR, mode=mode, opaque=opaque)


def write(path: bytes, size: int = 3, digest: str = "") -> Change:
    return Change(path=path, kind=ChangeKind.WRITE, size=size, digest=digest)


async def test_changes_leave_out_ours_and_nothing_else() -> None:
    residue = Residue()
    residue._files = {b"etc/apt/a": b"abc", b"etc/pip.conf": b"abc"}
    residue._directories = {b"etc": (0o755, 0, 0), b"etc/apt": (0o755, 0, 0)}
    ours = (mkdir(b"etc"), mkdir(b"etc/apt"), write(b"etc/apt/a"), write(b"etc/pip.conf"))
    assert await left(residue, *ours, mkdir(b"tmp")) == [b"tmp"]
    assert await left(residue, *ours[:3], write(b"etc/apt/b"), ours[3]) == [b"etc", b"etc/apt", b"etc/apt/b"]
    assert await left(residue, *ours, write(b"etc/zzz")) == [b"etc", b"etc/zzz"]
    assert await left(residue, *ours, write(b"etcetera")) == [b"etcetera"]
    # changed by somebody: another size, another content, another kind, other attributes, a directory in its place
    assert b"etc/pip.conf" in await left(residue, *ours[:3], write(b"etc/pip.conf", size=4))
    assert b"etc/pip.conf" in await left(residue, *ours[:3], write(b"etc/pip.conf", digest="other"))
    assert b"etc/pip.conf" in await left(residue, *ours[:3], Change(path=b"etc/pip.conf", kind=ChangeKind.DELETE))
    assert await left(residue, mkdir(b"etc", mode=0o700)) == [b"etc"]
    assert await left(residue, mkdir(b"etc"), mkdir(b"etc/apt", opaque=True)) == [b"etc", b"etc/apt"]
    assert await left(Residue(), *ours) == [change.path for change in ours]


def test_decisions_in_the_log_are_bounded() -> None:
    sandbox = Sandbox("sb-x", DSecContainerRunArgs(), None, 1, "")
    decisions = _Decisions(sandbox)
    for _ in range(1000):
        decisions.add(Verdict(False, "a.example", "no rule"))
    lines = [line for _, line in sandbox.lines]
    assert lines == [f"network: denied a.example (no rule){times}" for times in
                     ("", " (10 times)", " (100 times)", " (1000 times)")]  # fmt: skip
    for number in range(10_000):
        decisions.add(Verdict(False, f"{number}.example" + "x" * 1000, "no rule"))
    assert len(sandbox.lines) == _MAX_LINES and len(decisions._counts) <= _REMEMBERED
    assert sandbox.lines[-1][1].endswith("further decisions are not listed")
    assert max(len(line) for _, line in sandbox.lines) < 600


def test_the_sdk_is_told_where_its_api_is() -> None:
    own = Mirror(name="dsec", url="http://127.0.0.1:7707", kind=MirrorKind.API)
    variables = reach.environment(Policy({"dsec": True}, [own]))
    assert variables["DSEC_URL"] == "http://dsec" and variables["DSEC_PROXY"] == reach.PROXY
    for rules in ({"dsec": False}, {"pypi": True}):
        assert not {"DSEC_URL", "DSEC_PROXY"} & reach.environment(Policy(rules, [own])).keys()
