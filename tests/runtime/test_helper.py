"""The helper's verbs, alone and against what a sandbox wrote."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from dsec.backends.runtime import runtime_path
from dsec.layers.mount import mount_layer
from dsec.protocol.errors import Fault
from dsec.protocol.link import RecordReader
from tests.runtime.driver import Launcher, attack


def walk(directory: int, *options: str) -> list[dict[str, Any]]:
    command = [runtime_path(), "helper", "walk", "--dir-fd", str(directory), *options]
    ended = subprocess.run(command, pass_fds=[directory], capture_output=True, check=True, timeout=60)
    return list(RecordReader(dict).feed(ended.stdout))


def walk_path(directory: Path, *options: str) -> list[dict[str, Any]]:
    fd = os.open(directory, os.O_RDONLY)
    try:
        return walk(fd, *options)
    finally:
        os.close(fd)


@pytest.fixture
def tree(place: Path) -> Path:
    directory = place / "tree"
    subprocess.run(["rm", "-rf", directory], check=True)
    (directory / "a/b").mkdir(parents=True)
    (directory / "a/file").write_bytes(b"x" * 300_000)
    (directory / "a/b/other").write_bytes(b"y")
    os.symlink("/etc/passwd", directory / "link")
    os.mkfifo(directory / "fifo")
    os.mknod(directory / "gone", 0o020000, os.makedev(0, 0))
    os.setxattr(directory / "a/b", "user.overlay.opaque", b"y")
    return directory


def test_kinds(tree: Path) -> None:
    found = {record["path"]: record for record in walk_path(tree) if "kind" in record}
    kinds = {path.decode(): record["kind"] for path, record in found.items()}
    assert kinds == {
        "a": "mkdir", "a/b": "mkdir", "a/b/other": "write", "a/file": "write", "fifo": "special", "gone": "delete",
        "link": "symlink",
    }  # fmt: skip
    assert found[b"a/b"]["opaque"] and not found[b"a"]["opaque"]
    assert found[b"link"]["target"] == b"/etc/passwd"
    assert found[b"a/file"]["size"] == 300_000


def test_data_is_whole_or_absent(tree: Path) -> None:
    records = walk_path(tree, "--data", "1000000")
    assert b"".join(r["data"] for r in records if "data" in r and r["path"] == b"a/file") == b"x" * 300_000
    assert records[-1] == {"end": True, "count": 7, "truncated": False}
    records = walk_path(tree, "--data", "1000")
    assert {r["path"] for r in records if "data" in r} == {b"a/b/other"}
    assert records[-1]["truncated"]


def test_include(tree: Path) -> None:
    paths = {r["path"] for r in walk_path(tree, "--include", "a/b/**") if "kind" in r}
    assert paths == {b"a/b", b"a/b/other"}
    (tree / "x").mkdir()
    os.mknod(tree / "x/src", 0o020000, os.makedev(0, 0))
    kinds = {r["path"]: r["kind"] for r in walk_path(tree, "--include", "x/src/*.py") if "kind" in r}
    assert kinds == {b"x/src": "delete"}, "what held the named files is gone"


def test_deep_trees_and_long_directories_end(place: Path) -> None:
    directory = place / "deep"
    directory.mkdir()
    top = os.open(directory, os.O_RDONLY)
    here = top
    for _ in range(1500):
        os.mkdir("d", dir_fd=here)
        below = os.open("d", os.O_RDONLY, dir_fd=here)
        if here != top:
            os.close(here)
        here = below
    os.close(here)
    for n in range(5000):
        (directory / f"file-{n:05}").touch()
    records = walk(top, "--data", "10")
    os.close(top)
    subprocess.run(["rm", "-rf", directory], check=True)
    assert records[-1]["truncated"] and sum(r.get("kind") == "write" for r in records) == 5000


async def test_a_sandbox_is_walked_with_its_own_ids(launcher: Launcher) -> None:
    launcher.create("sb-a")
    assert (await attack(launcher, "sb-a", "put", "/home/user/mine", 1, user="user")) == "1 0"
    assert (await attack(launcher, "sb-a", "call", 87, "s:/hidden")) == "ok 0"
    assert (await attack(launcher, "sb-a", "call", 92, "s:/", 1000, 1000)) == "ok 0"
    _, [upper] = launcher.reply_with_fds(launcher.send("upper", sandbox="sb-a"))
    found = {r["path"]: r for r in walk(upper, "--data", "100") if "kind" in r}
    os.close(upper)
    assert found[b"hidden"]["kind"] == "delete"
    assert (found[b"home/user/mine"]["uid"], found[b"home/user/mine"]["gid"]) == (1000, 1000)
    assert set(found) == {b"hidden", b"home", b"home/user", b"home/user/mine"}


def test_mount_layer(images: dict[str, Path], place: Path) -> None:
    mount = mount_layer(runtime_path(), images["top"], [])
    try:
        assert os.fstatvfs(mount).f_flag & os.ST_RDONLY
    finally:
        os.close(mount)
    wrong = place / "wrong"
    wrong.write_bytes(b"no image" * 1000)
    for path, text in ((wrong, "not an EROFS image"), (place / "nowhere", "No such file")):
        with pytest.raises(Fault, match=text):
            mount_layer(runtime_path(), path, [])
    cut = place / "cut"
    cut.write_bytes(images["base"].read_bytes()[:2048])
    with pytest.raises(Fault):
        mount_layer(runtime_path(), cut, [Path("/nowhere")])
