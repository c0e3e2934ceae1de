"""`dsec layer` on a store of its own."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from .conftest import Invoke

pytestmark = pytest.mark.skipif(shutil.which("mkfs.erofs") is None, reason="needs erofs-utils")


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DSEC_STORE", str(tmp_path / "store"))
    source = tmp_path / "tree"
    (source / "opt").mkdir(parents=True)
    (source / "opt" / "tool").write_text("#!/bin/sh\necho tool\n")
    return source


def test_build_list_inspect_tag_verify_remove(dsec: Invoke, tree: Path) -> None:
    assert dsec("layer", "ls").err.startswith("no layers; build the first")
    built = dsec("layer", "build", "--from-dir", str(tree), "--kind", "toolkit", "tool@1", "--json").json
    assert isinstance(built, dict)
    assert (built["name"], built["version"], built["kind"]) == ("tool", "1", "toolkit")
    assert dsec("layer", "tag", "tool@1", "tool@stable").out == "tool@stable\n"
    listed = dsec("layer", "ls", "--json").json
    assert isinstance(listed, list) and [one["version"] for one in listed] == ["1", "stable"]
    manifest = dsec("layer", "inspect", "tool@1", "--json").json
    assert isinstance(manifest, dict)
    assert manifest["digest"] == built["digest"] and manifest["provenance"]["source"] == "directory"
    assert "entries" in dsec("layer", "inspect", "tool@stable").out
    assert "is whole" in dsec("layer", "verify", "tool@1").out
    assert dsec("layer", "rm", "tool@1", "tool@stable").out == "removed tool@1\nremoved tool@stable\n"
    assert dsec("layer", "ls", "--json").json == []


def test_an_unknown_layer_suggests_near_ones(dsec: Invoke, tree: Path) -> None:
    dsec("layer", "build", "--from-dir", str(tree), "--kind", "toolkit", "tool@1")
    for command in ("inspect", "verify", "rm"):
        ran = dsec("layer", command, "tool@2")
        assert ran.code == 1 and ran.err.splitlines()[0].startswith("error: ")
        assert "tool@1" in ran.err


def test_another_content_under_the_same_version_needs_force(dsec: Invoke, tree: Path) -> None:
    build = ("layer", "build", "--from-dir", str(tree), "tool@1")
    assert dsec(*build).code == 0
    (tree / "opt" / "tool").write_text("changed\n")
    ran = dsec(*build)
    assert ran.code == 1 and "already published" in ran.err and ran.out == ""
    assert dsec(*build, "--force").code == 0


@pytest.mark.parametrize("name", ["../x@1", "a/b@1", "x@../1", "@1", "x@"])
def test_a_name_with_path_separators_is_refused(dsec: Invoke, tree: Path, tmp_path: Path, name: str) -> None:
    ran = dsec("layer", "build", "--from-dir", str(tree), name)
    assert ran.code in (1, 2) and ran.err.startswith("error: ")
    assert not list((tmp_path / "store").rglob("1")) if (tmp_path / "store").exists() else True


def test_a_truncated_blob_is_named(dsec: Invoke, tree: Path, tmp_path: Path) -> None:
    dsec("layer", "build", "--from-dir", str(tree), "tool@1")
    blob = max((tmp_path / "store" / "blobs").iterdir(), key=lambda path: path.stat().st_size)
    blob.chmod(0o600)
    with blob.open("r+b") as handle:
        handle.truncate(100)
    ran = dsec("layer", "verify", "tool@1")
    assert ran.code == 1 and "truncated" in ran.err and "build or import" in ran.err
