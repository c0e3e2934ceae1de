"""Mirrors as files, options and mappings name them."""

from __future__ import annotations

from pathlib import Path

import pytest

from dsec.protocol.errors import Fault
from dsec.protocol.mirrors import Mirror, MirrorKind, dump, load, mirror_of, mirrors_of

TOML = """
[pypi]
url = "https://pypi.example.org/simple/"
also = ["files.example.org"]
headers = { Authorization = "Basic eDp5" }

[wheels]
kind = "pypi"
url = "http://10.0.0.7:8080/simple"

["git.corp"]
kind = "tunnel"
url = "https://10.0.0.11"

[debian]
url = "http://deb.example.org/debian/"
suites = ["bookworm"]
trusted = true
"""


def test_a_file(tmp_path: Path) -> None:
    (tmp_path / "mirrors.toml").write_text(TOML)
    found = {mirror.name: mirror for mirror in mirrors_of(tmp_path / "mirrors.toml")}
    assert found["pypi"].kind is MirrorKind.PYPI and found["pypi"].headers == {"Authorization": "Basic eDp5"}
    assert found["wheels"].kind is MirrorKind.PYPI and found["git.corp"].kind is MirrorKind.TUNNEL
    assert found["debian"].kind is MirrorKind.APT and found["debian"].suites == ("bookworm",)
    (tmp_path / "mirrors.json").write_bytes(dump(found.values()))
    assert load(tmp_path / "mirrors.json") == tuple(found.values())


def test_options_and_mappings() -> None:
    assert mirror_of("npm", "https://x.example/").kind is MirrorKind.NPM
    assert mirror_of("other", "https://x.example/").kind is MirrorKind.HTTP
    assert mirror_of("mine", "pypi+https://x.example/simple/") == Mirror(
        name="mine", kind=MirrorKind.PYPI, url="https://x.example/simple/"
    )
    assert mirror_of("odd", "https://x.example/a+b").url == "https://x.example/a+b"
    assert [one.name for one in mirrors_of({"pypi": "http://127.0.0.1:1/simple/"})] == ["pypi"]
    assert mirrors_of(None) == ()


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"name": "Upper"}, "Upper"),
        ({"name": "a b"}, "a b"),
        ({"name": ""}, "name"),
        ({"name": "10.0.0.1"}, "10.0.0.1"),
        ({"name": "-x"}, "-x"),
        ({"url": "ftp://x/"}, "ftp"),
        ({"url": "x.example"}, "url"),
        ({"url": "http://"}, "url"),
        ({"url": "http://user:secret@x/"}, "credentials"),
        ({"url": "http://x/?a=b"}, "query"),
        ({"url": "http://x:99999/"}, "url"),
        ({"url": "http://x/a b"}, "escaped"),
        ({"url": "http://x/\r\nX: y"}, "url"),
        ({"kind": MirrorKind.TUNNEL, "url": "http://x"}, "https"),
        ({"kind": MirrorKind.TUNNEL, "url": "https://x/path"}, "tunnel"),
        ({"kind": MirrorKind.TUNNEL, "url": "https://x", "headers": {"A": "b"}}, "tunnel"),
        ({"headers": {"A": "b\r\nC: d"}}, "header"),
        ({"headers": {"A b": "c"}}, "header"),
        ({"headers": {"Host": "x"}}, "header"),
        ({"headers": {"Transfer-Encoding": "x"}}, "header"),
        ({"suites": ("a\nTrusted: yes",)}, "suite"),
        ({"components": ("",)}, "component"),
        ({"ca": "relative.pem"}, "ca"),
    ],
)
def test_what_is_wrong_is_named(fields: dict[str, object], named: str) -> None:
    with pytest.raises(Fault, match=named):
        mirrors_of([Mirror(**{"name": "m", "url": "http://x/", **fields})])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("[pypi", "mirrors.toml"),
        ("[pypi]\n", "url"),
        ("[pypi]\nurl = 5", r"\[pypi\]"),
        ("[pypi]\nurl = 'http://x/'\nnosuch = 1", "nosuch"),
        ("[pypi]\nurl = 'http://x/'\nkind = 'gem'", "gem"),
        ("pypi = 'http://x/'", "mirrors.toml"),
    ],
)
def test_files_that_are_wrong(tmp_path: Path, text: str, named: str) -> None:
    (tmp_path / "mirrors.toml").write_text(text)
    with pytest.raises(Fault, match=named):
        load(tmp_path / "mirrors.toml")
    with pytest.raises(Fault, match="No such file"):
        load(tmp_path / "nosuch.toml")
