"""`dsec network`, and where commands take rules and mirrors from."""

from __future__ import annotations

from pathlib import Path

import pytest

from dsec.cli.platform import _mirrors
from dsec.protocol.errors import Fault
from dsec.protocol.mirrors import MirrorKind

from .conftest import Invoke
from .fake import FakeClient, info


def test_rules_are_set_and_shown(dsec: Invoke, client: FakeClient) -> None:
    ran = dsec("network", "sb-e1-a", "--allow", "pypi", "--allow", "x.example", "--deny", "x.example")
    assert client.did[0] == "network {'pypi': True, 'x.example': False}"
    assert ran.code == 0 and "pypi" in ran.out and "allowed" in ran.out
    assert dsec("network", "sb-e1-a", "--none").code == 0 and client.did[2] == "network {}"
    assert dsec("network", "sb-e1-a", "--none", "--deny", "npm").code == 2


def test_rules_are_shown(dsec: Invoke, client: FakeClient) -> None:
    client.sandboxes = [info("sb-e1-a")]
    ran = dsec("network", "sb-e1-a", "--json")
    assert ran.json == {"mode": "none", "rules": {}, "enforced": {}}
    assert "nothing is reachable" in dsec("network", "sb-e1-a").err


def test_run_takes_rules(dsec: Invoke, client: FakeClient) -> None:
    dsec("run", "debian@12", "--allow", "pypi", "--deny", "npm", "--", "true")
    assert client.asked[0].network_rules == {"pypi": True, "npm": False}


def test_single_mirrors_go_before_those_of_the_file(tmp_path: Path) -> None:
    file = tmp_path / "mirrors.toml"
    file.write_text("[pypi]\nurl = 'http://a.example/simple/'\n[npm]\nurl = 'http://b.example/'\n")
    given = ["pypi=http://c.example/simple/", "x=http+http://d.example/"]
    found = {mirror.name: mirror for mirror in _mirrors(file, given) or ()}
    assert [mirror.url for mirror in found.values()] == [
        "http://c.example/simple/",
        "http://b.example/",
        "http://d.example/",
    ]
    assert found["pypi"].kind is MirrorKind.PYPI and found["x"].kind is MirrorKind.HTTP
    assert _mirrors(None, []) is None, "left to the state directory"
    with pytest.raises(Fault, match="NAME=URL"):
        _mirrors(None, ["pypi"])


def test_a_wrong_mirror_is_said_before_anything_starts(dsec: Invoke) -> None:
    ran = dsec("up", "--mirror", "pypi=ftp://x/", "--state", "/nonexistent/never-made")
    assert ran.code != 0 and "ftp" in ran.err and not Path("/nonexistent").exists()
