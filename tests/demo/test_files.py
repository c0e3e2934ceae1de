"""Downloads, trees and wheels: what becomes a layer."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from dsec.demo import fetch, trees, wheels
from dsec.demo.tasks import Sdist
from dsec.layers.python import compile_tree

from .conftest import TASK


def test_a_workspace_has_one_commit_and_no_other_object(releases: tuple[Path, Path], tmp_path: Path) -> None:
    trees.make_workspace(releases[0], tmp_path / "root")
    workspace = tmp_path / "root/workspace"

    def git(*arguments: str) -> list[str]:
        safe = ("-c", f"safe.directory={workspace}")
        return subprocess.run(
            ["git", *safe, *arguments], cwd=workspace, check=True, capture_output=True, text=True
        ).stdout.split()

    commits = git("rev-list", "--all", "--reflog")
    assert len(commits) == 1
    reachable = set(git("rev-list", "--objects", "--no-object-names", "--all"))
    assert set(git("cat-file", "--batch-all-objects", "--batch-check=%(objectname)")) == reachable
    assert git("status", "--porcelain") == []
    assert not list((workspace / ".git/hooks").glob("*")) if (workspace / ".git/hooks").exists() else True


def test_the_same_release_gives_the_same_commit(releases: tuple[Path, Path], tmp_path: Path) -> None:
    heads = []
    for name in ("one", "two"):
        trees.make_workspace(releases[0], tmp_path / name)
        heads.append((tmp_path / name / "workspace/.git/refs/heads/main").read_text())
    assert heads[0] == heads[1]


def test_the_fix_is_the_source_that_differs_and_no_test(releases: tuple[Path, Path]) -> None:
    assert [change.path for change in trees.real_fix(TASK, *releases)] == ["calc/__init__.py"]


def test_hidden_tests_are_the_fixed_releases_own(releases: tuple[Path, Path], tmp_path: Path) -> None:
    trees.make_hidden_tests(TASK, releases[1], tmp_path / "hidden")
    found = {path.relative_to(tmp_path / "hidden").as_posix() for path in (tmp_path / "hidden").rglob("*.py")}
    assert found == {"calc/tests/__init__.py", "calc/tests/test_calc.py"}


def test_nothing_of_an_archive_lands_outside(tmp_path: Path) -> None:
    (tmp_path / "sdists").mkdir()
    with tarfile.open(tmp_path / "sdists/evil-1.tar.gz", "w:gz") as tar:
        for name in ("evil-1/ok.py", "evil-1/../../out.py", str(tmp_path / "absolute.py")):
            info = tarfile.TarInfo(name)
            info.size = 1
            tar.addfile(info, io.BytesIO(b"x"))
        link = tarfile.TarInfo("evil-1/link")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc"
        tar.addfile(link)
    root = trees.unpack(tmp_path, Sdist("evil-1.tar.gz", "", 0), tmp_path / "out")
    assert [path.name for path in root.iterdir()] == ["ok.py"]
    assert not (tmp_path / "out.py").exists() and not (tmp_path / "absolute.py").exists()


def test_a_wheel_is_installed_with_its_scripts_and_data(tmp_path: Path) -> None:
    wheel = tmp_path / "pkg-1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("pkg/__init__.py", "def main():\n    return 0\n")
        archive.writestr("pkg-1.data/scripts/tool", "#!python\n")
        archive.writestr("pkg-1.data/purelib/extra.py", "")
        archive.writestr("pkg-1.dist-info/entry_points.txt", "[console_scripts]\npkg = pkg:main\n")
        archive.writestr("../../../../../escape.py", "")
    wheels.make_prefix(tmp_path / "root", [wheel])
    prefix = tmp_path / "root/opt/venv"
    assert (prefix / "bin/tool").exists() and (prefix / wheels.SITE / "extra.py").exists()
    assert "from pkg import main" in (prefix / "bin/pkg").read_text()
    assert os.access(prefix / "bin/pkg", os.X_OK)
    assert os.readlink(prefix / "bin/python") == "/usr/bin/python3.11"
    assert not list(tmp_path.rglob("escape.py"))


@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="bytecode of another version is not written")
def test_modules_are_compiled_for_the_place_they_will_have(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("def where():\n    return __file__\n")
    (tmp_path / "broken.py").write_text("def (:\n")
    compile_tree(tmp_path, "/opt/venv/lib")
    compiled = (tmp_path / "__pycache__/a.cpython-311.pyc").read_bytes()
    assert b"/opt/venv/lib/a.py" in compiled and str(tmp_path).encode() not in compiled
    assert int.from_bytes(compiled[4:8], "little") == 0b01  # hash-based, not checked against the source


def test_two_versions_of_one_package_are_asked_for_apart() -> None:
    rounds = fetch._rounds(["a==1", "a==2", "b==1"])
    assert sorted(sorted(r) for r in rounds) == [["a==1", "b==1"], ["a==2"]]


def test_wheels_are_known_by_normalised_name(tmp_path: Path) -> None:
    (tmp_path / "wheels").mkdir()
    (tmp_path / "wheels/Typing_Extensions-4.0-py3-none-any.whl").touch()
    assert fetch.wheel_path(tmp_path, "typing-extensions==4.0") is not None
    assert fetch.wheel_path(tmp_path, "typing-extensions==4.1") is None


def test_the_cache_lies_outside_the_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DSEC_DEMO_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert fetch.cache_dir() == Path("/var/cache/dsec/demo")
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert fetch.cache_dir() == Path("/somewhere/dsec/demo")


@pytest.mark.parametrize(
    "backend", ["setuptools.build_meta", "hatchling.build", "flit_core.buildapi", "poetry.core.masonry.api"]
)
def test_metadata_of_an_sdist_is_read_and_not_built(tmp_path: Path, backend: str) -> None:
    (tmp_path / "PKG-INFO").write_text("Metadata-Version: 2.1\nName: some-pkg\nVersion: 1.2\n\nText: 3\n")
    (tmp_path / "setup.py").write_text("raise SystemExit('this must not run')\n")
    ask = f"import {backend} as b; print(b.prepare_metadata_for_build_wheel('out'))"
    env = {"PYTHONPATH": str(fetch._BACKEND), "PATH": os.environ["PATH"]}
    done = subprocess.run(
        [sys.executable, "-c", ask], cwd=tmp_path, env=env, check=True, capture_output=True, text=True
    )
    metadata = (tmp_path / "out" / done.stdout.strip() / "METADATA").read_text()
    assert "Name: some-pkg\nVersion: 1.2\n" in metadata
