"""The files of a task: the workspace an agent sees, the hidden tests it never sees, and the real fix."""

from __future__ import annotations

import os
import shutil
import subprocess
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import msgspec

from dsec.demo.errors import DemoError
from dsec.demo.fetch import sdist_path
from dsec.demo.tasks import Sdist, Task

WORKSPACE = "/workspace"  # inside the sandbox
_COMMIT_DATE = "2020-01-01T00:00:00+0000"


class FileFix(msgspec.Struct, frozen=True):
    """One file of the real fix. old is None for a new file, new is None for one that goes."""

    path: str
    old: bytes | None
    new: bytes | None


def unpack(cache: Path, sdist: Sdist, into: Path) -> Path:
    """Unpack a source distribution and return its root folder. Nothing is written outside `into`."""
    archive = sdist_path(cache, sdist)
    into.mkdir(parents=True)
    if archive.suffix == ".zip":
        with zipfile.ZipFile(archive) as zipped:
            zipped.extractall(into)
    else:
        with tarfile.open(archive) as tar:
            tar.extractall(into, members=[member for member in tar if _harmless(member)])
    tops = [path for path in into.iterdir() if path.is_dir()]
    if len(tops) != 1:
        raise DemoError(f"{sdist.filename} holds {len(tops)} folders at its top, not one", hint="remove this task")
    return tops[0]


def _harmless(member: tarfile.TarInfo) -> bool:
    """Whether a member can only land inside the folder. (Debian 12's tarfile has no extraction filters.)"""
    parts = PurePosixPath(member.name).parts
    return (member.isreg() or member.isdir()) and not member.name.startswith("/") and ".." not in parts


def make_workspace(base: Path, root: Path) -> None:
    """Write the buggy release to `root` + WORKSPACE as a git repository with one commit and nothing of the future."""
    workspace = root / WORKSPACE.lstrip("/")
    workspace.parent.mkdir(parents=True, exist_ok=True)
    shutil.copytree(base, workspace, symlinks=True)
    for path in (workspace, *workspace.rglob("*")):
        if not path.is_symlink():
            path.chmod(0o755 if path.is_dir() or path.stat().st_mode & 0o111 else 0o644)
    shutil.rmtree(workspace / ".git", ignore_errors=True)
    _git(workspace, "init", "--quiet", "--initial-branch=main")
    _git(workspace, "add", "--all", "--force")
    _git(workspace, "commit", "--quiet", "--message=The release under work")
    for leftover in ("hooks", "branches", "description"):
        path = workspace / ".git" / leftover
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


def make_hidden_tests(task: Task, fixed: Path, folder: Path) -> None:
    """Copy the fixed release's tests to `folder`, at their paths in the tree."""
    for top in task.test_paths:
        source, target = fixed / top, folder / top
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        elif source.exists():
            shutil.copy2(source, target)


def real_fix(task: Task, base: Path, fixed: Path) -> tuple[FileFix, ...]:
    """What the fixed release changed in the source, by file, in order of path."""
    before, after = dict(_sources(task, base)), dict(_sources(task, fixed))
    paths = sorted(path for path in before.keys() | after.keys() if before.get(path) != after.get(path))
    return tuple(FileFix(path, before.get(path), after.get(path)) for path in paths)


def _sources(task: Task, root: Path) -> Iterator[tuple[str, bytes]]:
    for top in task.source_dirs:
        start = root / top
        for path in [start] if start.is_file() else sorted(start.rglob("*")):
            relative = path.relative_to(root).as_posix()
            if path.is_file() and task.is_source(relative) and "__pycache__" not in relative:
                yield relative, path.read_bytes()


def _git(folder: Path, *arguments: str) -> None:
    """Git without this user's configuration, and with fixed names and dates: the same release gives the same layer."""
    env = {
        "PATH": os.environ.get("PATH", os.defpath),
        "HOME": "/nonexistent",
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_CONFIG_GLOBAL": os.devnull,
        **{f"GIT_{who}_NAME": "dsec" for who in ("AUTHOR", "COMMITTER")},
        **{f"GIT_{who}_EMAIL": "demo@dsec.invalid" for who in ("AUTHOR", "COMMITTER")},
        **{f"GIT_{who}_DATE": _COMMIT_DATE for who in ("AUTHOR", "COMMITTER")},
    }
    options = ["-c", "gc.auto=0", "-c", "core.autocrlf=false", "-c", "core.logAllRefUpdates=false"]
    try:
        done = subprocess.run(["git", *options, *arguments], cwd=folder, env=env, capture_output=True, text=True)
    except FileNotFoundError as error:
        raise DemoError("git is not installed", hint="apt-get install git") from error
    if done.returncode:
        raise DemoError(
            f"git {arguments[0]} in {folder} failed: {done.stderr.strip()}", hint="look at the disk and at git itself"
        )
