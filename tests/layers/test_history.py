"""Cutting git histories: whatever names or hides what comes after HEAD, not one object of it is left."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from dsec.layers import LayerStore, build_directory, history

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="takes git")


def _git(folder: Path, *words: str) -> str:
    who = {f"GIT_{role}_{what}": "a@b.c" for role in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    env = {"PATH": os.environ["PATH"], "HOME": "/nonexistent", "GIT_CONFIG_NOSYSTEM": "1", **who}
    return subprocess.run(["git", *words], cwd=folder, env=env, check=True, capture_output=True, text=True).stdout


@pytest.fixture
def work(tmp_path: Path) -> Path:
    """A repository at its second commit, with the future in every place that git has for it."""
    work = tmp_path / "tree" / "workspace"
    work.mkdir(parents=True)
    _git(work, "init", "--quiet", "--initial-branch=main")
    for number in (1, 2):
        (work / "code.py").write_text(f"answer = {number}\n")
        _git(work, "add", "code.py")
        _git(work, "commit", "--quiet", f"--message=commit {number}")
    start = _git(work, "rev-parse", "HEAD").strip()
    for number, how in ((42, "branch"), (43, "tag"), (44, "update-ref"), (45, "")):
        (work / "code.py").write_text(f"answer = {number}\n")
        _git(work, "commit", "--quiet", "--all", "--message=the fix")
        if how == "update-ref":
            _git(work, "update-ref", "refs/remotes/origin/main", "HEAD")
        elif how:
            _git(work, how, f"future-{number}")
        _git(work, "reset", "--quiet", "--hard", start)
    (work / "code.py").write_text("answer = 46\n")
    _git(work, "stash")
    _git(work, "notes", "add", "--message=answer = 47")
    _git(work, "gc", "--quiet")
    (work / "code.py").write_text("answer = 48\n")
    _git(work, "hash-object", "-w", "code.py")
    _git(work, "checkout", "--quiet", "code.py")
    (work / ".git" / "hooks" / "pre-commit").write_text("#!/bin/sh\n# answer = 49\n")
    return work


def test_everything_beyond_head_is_found(work: Path) -> None:
    found = history.inspect(work)
    assert len(found.beyond) > 12
    assert {"refs/heads/future-42", "refs/tags/future-43", "refs/remotes/origin/main", "refs/stash"} <= set(found.refs)
    assert "logs/HEAD" in found.refs


def test_nothing_beyond_head_is_left(work: Path) -> None:
    head, log = _git(work, "rev-parse", "HEAD"), _git(work, "log", "--format=%H %s")
    left = history.cut(work)
    assert (left.beyond, left.refs, left.objects) == ((), (), 6)
    assert (_git(work, "rev-parse", "HEAD"), _git(work, "log", "--all", "--format=%H %s")) == (head, log)
    assert _git(work, "status", "--porcelain") == ""
    assert _git(work, "branch", "--show-current") == "main\n"
    assert _git(work, "fsck", "--unreachable", "--no-progress") == ""
    files = [path for path in (work / ".git").rglob("*") if path.is_file()]
    assert not any(b"answer = 4" in path.read_bytes() for path in files)
    assert not [path for path in files if "hooks" in path.parts or "logs" in path.parts]
    assert [path.name for path in work.iterdir() if path.name.startswith(".git")] == [".git"]


def test_a_detached_head_and_a_shallow_history_are_cut_too(work: Path, tmp_path: Path) -> None:
    shallow = tmp_path / "shallow"
    _git(tmp_path, "clone", "--quiet", "--depth=1", f"file://{work}", str(shallow))
    _git(shallow, "checkout", "--quiet", "--detach")
    left = history.cut(shallow)
    assert (left.beyond, left.refs, left.objects) == ((), (), 3)


def test_a_layer_is_built_of_the_cut_history_and_the_tree_stays(work: Path, store: LayerStore) -> None:
    before = history.inspect(work)
    ref = build_directory(store, work.parent, name="cut", version="1", kind="workspace", cut_history=True)
    assert history.inspect(work) == before
    manifest = store.resolve(f"{ref.name}@{ref.version}")
    meta, blobs = store.paths(manifest)
    data = b"".join(path.read_bytes() for path in (meta, *blobs))
    assert b"answer = 2" in data
    assert b"answer = 49" not in data


def test_repositories_are_found_wherever_they_lie(work: Path) -> None:
    inner = work / "vendor" / "lib"
    inner.mkdir(parents=True)
    _git(inner, "init", "--quiet")
    os.symlink(work / ".git", work / "vendor" / ".git")
    assert set(history.repositories(work.parent)) == {work, inner}
