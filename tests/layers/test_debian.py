"""The Debian base: whose apt sources it takes, and what the finished layer must and must not hold."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from dsec.layers import LayerStore, build_debian
from dsec.layers.apt_sources import debian_sources
from dsec.layers.debian import _Meter
from dsec.protocol.errors import ErrorKind, Fault
from tests.layers.conftest import Look, Tiny
from tests.layers.look import Answer

_DEB822 = """\
# a comment
Types: deb deb-src
URIs: http://mirror.test/debian
Suites: bookworm bookworm-updates trixie bookworm-backports
Components: main contrib
Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg

Types: deb
URIs: http://mirror.test/off
Suites: bookworm
Components: main
Enabled: no

Types: deb
uris: http://inline.test/debian
suites: bookworm-security
components: main
signed-by:
 -----BEGIN PGP PUBLIC KEY BLOCK-----
 .
 abc
 -----END PGP PUBLIC KEY BLOCK-----
"""
_ONE_LINE = """\
deb [arch=amd64 signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] http://old.test/debian bookworm main non-free  # why
deb-src http://old.test/debian bookworm main
# deb http://commented.test/debian bookworm main
deb [signed-by=/etc/apt/keyrings/vendor.asc] http://vendor.test/linux bookworm main
deb http://vendor.test/other bookworm stable
deb http://pg.test/ bookworm-pgdg main
"""


def etc(root: Path, **files: str) -> Path:
    (root / "sources.list.d").mkdir()
    for name, text in files.items():
        stem, _, ending = name.rpartition("_")
        (root / "sources.list.d" / f"{stem}.{ending}").write_text(text)
    return root


def test_only_the_archive_of_the_release_is_taken(tmp_path: Path) -> None:
    (tmp_path / "sources.list").write_text(_ONE_LINE)
    text = debian_sources(
        "bookworm", etc(tmp_path, debian_sources=_DEB822, more_list="deb http://old.test/x bookworm main")
    )
    stanzas = text.rstrip("\n").split("\n\n")
    assert [stanza.splitlines()[1] for stanza in stanzas] == [
        "URIs: http://old.test/debian",
        "URIs: http://old.test/x",
        "URIs: http://mirror.test/debian",
        "URIs: http://inline.test/debian",
    ]
    assert all("Types: deb\n" in stanza and "Components: main" in stanza for stanza in stanzas)
    assert "Suites: bookworm bookworm-updates\n" in stanzas[2]
    assert stanzas[3].endswith("abc\n -----END PGP PUBLIC KEY BLOCK-----")


@pytest.mark.parametrize("files", [{}, {"debian_sources": _DEB822.replace("bookworm", "sid")}])
def test_a_machine_without_the_release_says_so(tmp_path: Path, files: dict[str, str]) -> None:
    with pytest.raises(Fault) as caught:
        debian_sources("bookworm", etc(tmp_path, **files))
    assert caught.value.body.kind is ErrorKind.UNSUPPORTED and "OCI" in caught.value.body.hint


def test_progress_only_grows() -> None:
    seen: list[tuple[str, float]] = []
    meter = _Meter(lambda stage, done: seen.append((stage, done)))
    lines = ["0 upgraded, 200 newly installed", *(f"Get:{n} http://x bookworm/main" for n in range(200))]
    lines += [
        "I: extracting",
        *("Unpacking bash (5.2)" for _ in range(20)),
        "Get:1 http://x again",
        "Setting up bash (5.2)",
    ]
    for line in lines:
        meter.line(line)
    done = [fraction for _, fraction in seen]
    assert done == sorted(done) and 0 < done[0] < done[-1] < 1
    assert list(dict.fromkeys(stage for stage, _ in seen)) == ["download", "unpack", "configure"]


def test_a_whole_layer_is_not_built_again(store: LayerStore, tiny: Tiny) -> None:
    ref = tiny("debian@12")
    seen: list[tuple[str, float]] = []
    assert build_debian(store, progress=lambda stage, done: seen.append((stage, done))) == ref
    assert seen == [("already there", 1.0)]


# -- the layer itself, where it was built ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def debian() -> LayerStore:
    store = LayerStore()
    try:
        store.paths(store.resolve("debian@12"))
    except Fault as fault:
        pytest.skip(f"{fault.body.message} (dsec layer build debian)")
    return store


@pytest.fixture
def store(debian: LayerStore, request: pytest.FixtureRequest, scratch: Path) -> LayerStore:
    """Tests of the finished layer look into the machine's store; the others get one of their own."""
    return debian if "inside" in request.fixturenames else LayerStore(scratch / "store")


_PROBE = r"""
export PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LC_ALL=C.UTF-8
mkdir -p dev && mknod dev/null c 1 3
chroot . /bin/sh -c '
python3 -c "import sys, ssl, sqlite3, venv, ensurepip; print(sys.version_info[:2])"
tools="bash git curl less ps killall find grep sed gawk patch diff file make rg jq tree xz unzip zip bzip2 zstd vi nano ip pip3"
for tool in $tools; do
    command -v $tool >/dev/null || echo "missing: $tool"
done
id agent
python3 -c "print(chr(228))"
getent ahosts localhost | head -1
python3 -v -c "import json" 2>&1 | grep -c "code object from .*/json/.*\.py[^c]"
'
"""


@pytest.fixture
def inside(look: Look) -> Answer:
    return look("debian@12", script=_PROBE)


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
def test_debian_has_what_agents_expect_and_nothing_of_the_builder(inside: Answer, debian: LayerStore) -> None:
    assert "missing" not in inside.output
    lines = inside.output.splitlines()
    assert lines[0] == "(3, 11)"
    assert lines[1].startswith("uid=1000(agent) gid=1000(agent)")
    assert lines[2] == "ä"
    assert lines[-1] == "0"  # no module of the standard library is compiled anew
    seen = {entry.path: entry for entry in inside.entries}
    for path in (b"etc/machine-id", b"etc/resolv.conf"):
        assert seen[path].size == 0
    assert b"etc/hostname" not in seen
    kept = (b"var/cache/", b"var/log/", b"var/lib/apt/lists/", b"usr/share/man/man")
    assert not [path for path, entry in seen.items() if path.startswith(kept) and entry.kind != stat.S_IFDIR]
    assert not [path for path in seen if path.startswith(b"etc/apt/") and b"mmdebstrap" in path]
    assert [path for path in seen if path.startswith(b"etc/apt/sources.list")] == [
        b"etc/apt/sources.list.d",
        b"etc/apt/sources.list.d/mirrors.sources",
    ]
    manifest = debian.resolve("debian@12")
    assert manifest.size < 450_000_000 and manifest.kind == "base"
