"""Git histories in trees that become layers: what an agent must not find there is everything after the commit it starts from.

A repository holds more than its branches: tags, remote branches, stashes, reflogs, packs with objects that nothing names any
more. A history is cut by copying what HEAD reaches into a new repository, and proved by listing every object of that one.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import msgspec

from dsec.protocol.errors import ErrorKind, Fault

_QUIET = {
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_CONFIG_GLOBAL": os.devnull,
    "GIT_TERMINAL_PROMPT": "0",
    "HOME": "/nonexistent",
}


class History(msgspec.Struct, frozen=True, kw_only=True):
    """One repository. beyond: objects (hex) that HEAD does not reach; refs: names that are neither HEAD nor its branch."""

    path: str
    head: str
    objects: int
    beyond: tuple[str, ...] = ()
    refs: tuple[str, ...] = ()


def repositories(tree: Path) -> list[Path]:
    """The work trees below `tree` (itself included) that have a repository of their own."""
    found = []
    for folder, names, _ in os.walk(tree):
        if ".git" in names and not os.path.islink(os.path.join(folder, ".git")):
            found.append(Path(folder))
            names.remove(".git")
    return found


def inspect(work: Path) -> History:
    """Every object and every name of a repository, against what its HEAD reaches."""
    head = _git(work, "rev-parse", "--verify", "HEAD^{commit}").strip()
    reached = {line.partition(" ")[0] for line in _git(work, "rev-list", "--objects", "HEAD").splitlines()}
    every = _git(work, "cat-file", "--batch-all-objects", "--batch-check=%(objectname)", "--unordered").split()
    branch = _git(work, "symbolic-ref", "--quiet", "HEAD", may_fail=True).strip()
    names = _git(work, "for-each-ref", "--format=%(refname)").split()
    logs = work / ".git" / "logs"
    reflogs = (
        [f"logs/{path.relative_to(logs)}" for path in sorted(logs.rglob("*")) if path.is_file()]
        if logs.is_dir()
        else []
    )
    return History(
        path=str(work),
        head=head,
        objects=len(set(every)),
        beyond=tuple(sorted(set(every) - reached)),
        refs=tuple(name for name in names if name != branch) + tuple(reflogs),
    )


def cut(work: Path) -> History:
    """Replace a repository by one that holds what HEAD reaches and nothing else; Fault conflict when that cannot be proved.

    The files stay as they are, the index is HEAD's; hooks, configuration, remotes, stashes, tags, other branches, submodules'
    repositories and all logs go.
    """
    head = _git(work, "rev-parse", "--verify", "HEAD^{commit}").strip()
    branch = _git(work, "symbolic-ref", "--quiet", "--short", "HEAD", may_fail=True).strip() or "main"
    with tempfile.TemporaryDirectory(dir=work, prefix=".git-cut-") as folder:
        new = Path(folder)
        _git(new, "init", "--quiet", f"--initial-branch={branch}", "--template=")
        fetch = ("fetch", "--quiet", "--update-head-ok", "--update-shallow", "--no-tags", "--no-write-fetch-head")
        _git(new, *fetch, str(work), f"HEAD:refs/heads/{branch}")
        shutil.rmtree(new / ".git" / "logs", ignore_errors=True)
        shutil.rmtree(work / ".git")
        os.rename(new / ".git", work / ".git")
    _git(work, "read-tree", head)
    _git(work, "update-index", "-q", "--refresh", may_fail=True)
    left = inspect(work)
    if left.beyond or left.refs or left.head != head:
        raise Fault(
            ErrorKind.CONFLICT,
            f"{work}: {len(left.beyond)} objects and {len(left.refs)} names of git are left that HEAD does not reach",
            hint="remove .git and commit the tree anew",
        )
    return left


def _git(folder: Path, *arguments: str, may_fail: bool = False) -> str:
    options = ("-c", "safe.directory=*", "-c", "gc.auto=0", "-c", "core.logAllRefUpdates=false")
    return _run(("git", *options, *arguments), folder, may_fail)


def _run(argv: Sequence[str], folder: Path, may_fail: bool) -> str:
    env = {"PATH": os.environ.get("PATH", os.defpath), **_QUIET}
    try:
        done = subprocess.run(argv, cwd=folder, env=env, capture_output=True, text=True, errors="surrogateescape")
    except FileNotFoundError as error:
        raise Fault(ErrorKind.UNSUPPORTED, "git is not installed", hint="apt-get install git") from error
    if done.returncode and not may_fail:
        raise Fault(
            ErrorKind.INVALID, f"{' '.join(('git', *argv[7:9]))} in {folder} failed: {done.stderr.strip()[:500]}"
        )
    return done.stdout
