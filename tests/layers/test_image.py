"""Images: everything of a tree comes back, builds repeat exactly, overlays honour what layers hide."""

from __future__ import annotations

import os
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from dsec.layers import Bounds, LayerStore, build_directory
from dsec.layers.scan import private_attribute
from dsec.protocol.errors import ErrorKind, Fault
from tests.layers.conftest import Look, Tiny
from tests.layers.look import Answer, Seen, entries

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="device nodes and mounts need root")


def rich_tree(root: Path) -> Path:
    """One of everything that a root filesystem can hold."""
    root.mkdir()
    (root / "plain").write_bytes(b"text\n")
    os.link(root / "plain", root / "second name")
    os.symlink("/nowhere/../x", root / "link")
    os.symlink(b"\xff\xfe", root / "odd link")
    os.mknod(root / "null", stat.S_IFCHR | 0o666, os.makedev(1, 3))
    os.mknod(root / "disk", stat.S_IFBLK | 0o660, os.makedev(259, 70_000))
    os.mkfifo(root / "pipe", 0o622)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(os.fspath(root / "socket"))
    Path(os.fsdecode(os.fsencode(root) + b"/n\xff\n name")).write_bytes(b"x")
    with (root / "sparse").open("wb") as file:
        file.seek(9_000_000)
        file.write(b"middle")
        file.truncate(20_000_000)
    (root / "big").write_bytes(os.urandom(300_001))
    (root / "empty").touch()
    (root / "setuid").write_bytes(b"#!")
    os.chown(root / "setuid", 1000, 1001)
    (root / "setuid").chmod(0o6755)
    os.setxattr(root / "setuid", "user.note", b"\0binary\xff" * 40)
    os.setxattr(root / "plain", "security.capability", bytes.fromhex("0100000200200000" + "00" * 12))
    (root / "dir").mkdir()
    os.chown(root / "dir", 70_000, 4_000_000_000)
    (root / "dir").chmod(0o3770)
    os.setxattr(root / "dir", "user.note", b"on a directory")
    (root / "dir" / "inner").write_text("inner")
    os.utime(root / "dir" / "inner", ns=(0, 1_234_567_890_123_456_789))
    os.utime(root / "empty", ns=(0, 0))
    (root / "many").mkdir()
    for number in range(700):
        (root / "many" / f"file-{number}").write_text(str(number % 5))
    return root


def build(store: LayerStore, tree: Path, version: str = "1", **options: object) -> Seen:
    return build_directory(store, tree, name="tree", version=version, kind="base", **options)  # type: ignore[arg-type,return-value]


def by_path(answer: Answer) -> dict[bytes, Seen]:
    return {seen.path: seen for seen in answer.entries}


def test_everything_comes_back(store: LayerStore, scratch: Path, look: Look) -> None:
    tree = rich_tree(scratch / "tree")
    build(store, tree)
    seen, made = look("tree@1").entries, entries(os.fsencode(tree))
    assert seen == made
    manifest = store.resolve("tree@1")
    assert manifest.entries == len(made) - 1
    assert manifest.data[0].size < 2_000_000  # the holes of the sparse file take no room
    assert manifest.uncompressed_size > 20_000_000


def test_a_copied_tree_is_the_same_image(store: LayerStore, scratch: Path) -> None:
    """The copying path (prefix, attributes to strip) writes what mkfs.erofs would have read."""
    tree = rich_tree(scratch / "tree")
    build(store, tree)
    os.setxattr(tree / "dir", "trusted.overlay.origin", b"x")  # forces the copy, which strips it
    build(store, tree, "2")
    first, second = store.resolve("tree@1"), store.resolve("tree@2")
    assert (first.meta, first.data) == (second.meta, second.data)


def test_the_same_input_gives_the_same_digest(scratch: Path) -> None:
    tree = rich_tree(scratch / "tree")
    subprocess.run(["cp", "-a", str(tree), str(scratch / "copy")], check=True)
    digests = {
        build_directory(LayerStore(scratch / store), scratch / source, name="tree", version="1", kind="base").digest
        for store, source in (("one", "tree"), ("two", "tree"), ("three", "copy"))
    }
    assert len(digests) == 1


def test_owner_and_prefix(store: LayerStore, scratch: Path, look: Look) -> None:
    tree = rich_tree(scratch / "tree")
    build(store, tree, prefix="/opt/tool", owner=(5, 6))
    seen = by_path(look("tree@1"))
    assert {(entry.uid, entry.gid) for entry in seen.values()} == {(5, 6)}
    assert seen[b"opt/tool/dir/inner"].mtime_ns == 1_234_567_890_123_456_789
    assert seen[b"opt"].mode == 0o755 and seen[b"opt"].mtime_ns == 0
    assert seen[b"opt/tool/setuid"].mode == 0o6755
    with pytest.raises(Fault) as caught:
        build(store, tree, prefix="/opt/../..")
    assert caught.value.body.kind is ErrorKind.INVALID


def test_times_before_1970_become_1970(store: LayerStore, scratch: Path, look: Look) -> None:
    tree = scratch / "tree"
    tree.mkdir()
    (tree / "old").touch()
    os.utime(tree / "old", ns=(-5, -5_000_000_000))
    build(store, tree)
    assert by_path(look("tree@1"))[b"old"].mtime_ns == 0


@pytest.mark.parametrize(("bounds", "what"), [(Bounds(entries=20), "20 entries"), (Bounds(bytes=1000), "1000 bytes")])
def test_bounds(store: LayerStore, scratch: Path, bounds: Bounds, what: str) -> None:
    with pytest.raises(Fault) as caught:
        build(store, rich_tree(scratch / "tree"), bounds=bounds)
    assert caught.value.body.kind is ErrorKind.TOO_LARGE and what in caught.value.body.message
    assert store.list() == []


def test_the_top_may_be_a_link(store: LayerStore, scratch: Path, look: Look) -> None:
    (scratch / "tree").mkdir()
    (scratch / "tree" / "file").touch()
    (scratch / "link").symlink_to("tree")
    build(store, scratch / "link")
    assert b"file" in by_path(look("tree@1"))


def test_a_file_or_nothing_is_no_tree(store: LayerStore, scratch: Path) -> None:
    (scratch / "file").touch()
    for path in (scratch / "file", scratch / "missing"):
        with pytest.raises(Fault) as caught:
            build(store, path)
        assert caught.value.body.kind is ErrorKind.INVALID


# -- overlays ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def hiding(store: LayerStore, tiny: Tiny, scratch: Path) -> None:
    """base@1 below; upper@1, the upper directory of an overlay, with a whiteout and an opaque directory, above."""
    tiny("base@1", files={"gone": "1", "stays": "2", "dir/old": "3", "dir/both": "4", "merged/old": "5"})
    upper = scratch / "upper"
    (upper / "dir").mkdir(parents=True)
    os.mknod(upper / "gone", stat.S_IFCHR, os.makedev(0, 0))
    (upper / "dir" / "both").write_text("new")
    (upper / "merged").mkdir()
    (upper / "merged" / "new").write_text("6")
    os.setxattr(upper / "dir", "trusted.overlay.opaque", b"y")
    os.setxattr(upper / "dir", "trusted.overlay.origin", b"x")
    build_directory(store, upper, name="upper", version="1", kind="toolkit", upper=True)
    build_directory(store, upper, name="plain", version="1", kind="toolkit")


def test_whiteouts_and_opaque_directories_hide(hiding: None, look: Look) -> None:
    seen = by_path(look("base@1", "upper@1", script="cat dir/both; ls"))
    assert sorted(seen) == [b".", b"dir", b"dir/both", b"merged", b"merged/new", b"merged/old", b"stays"]
    assert seen[b"dir/both"].size == 3


def test_overlay_attributes_of_ordinary_trees_mean_nothing(hiding: None, look: Look) -> None:
    """Without `upper` nobody can smuggle in an opaque directory; a 0/0 device is what it is, a whiteout, to every overlay."""
    seen = by_path(look("base@1", "plain@1"))
    assert b"dir/old" in seen and b"gone" not in seen
    alone = by_path(look("plain@1"))
    assert not any(map(private_attribute, alone[b"dir"].attributes))
    assert alone[b"gone"].kind == stat.S_IFCHR and alone[b"gone"].device == 0


def test_three_layers_in_order(store: LayerStore, tiny: Tiny, look: Look) -> None:
    tiny("base@1", files={"a": "base", "b": "base", "c": "base"})
    tiny("work@1", kind="workspace", files={"b": "work", "c": "work"})
    tiny("tool@1", kind="toolkit", files={"c": "tool"})
    answer = look("base@1", "work@1", "tool@1", script="cat a b c; echo changed > a; cat a; rm b; mv c d; ls")
    assert answer.output.split() == ["baseworktoolchanged", "a", "d"]
    answer = look("base@1", script="mkdir x; cat a")  # the next sandbox sees nothing of it
    assert answer.output == "base"


# -- a full disk -------------------------------------------------------------------------------------------------------

_FULL = """
import os, subprocess, sys
from pathlib import Path
from tests.layers.look import private_namespace
from dsec.layers import LayerStore, build_directory, build_tar
from dsec.protocol.errors import Fault
image, mountpoint, tree, archive = map(Path, sys.argv[1:])
private_namespace()
subprocess.run(["mount", "-o", "loop", image, mountpoint], check=True)
store = LayerStore(mountpoint / "store")
kept = build_directory(store, tree / "small", name="kept", version="1", kind="base")
before = sorted(str(p) for p in store.root.rglob("*") if p.is_file())
free = os.statvfs(mountpoint).f_bfree
for number, build in enumerate((
    lambda: build_directory(store, tree / "big", name="big", version="1", kind="base"),
    lambda: build_directory(store, tree / "big", name="big", version="1", kind="base", prefix="/x"),
    lambda: build_tar(store, archive, name="big", version="1", kind="base"),
)):
    try:
        build()
    except Fault as fault:
        print(fault.body.kind.value, "full" in fault.body.message)
    print(before == sorted(str(p) for p in store.root.rglob("*") if p.is_file()), free - os.statvfs(mountpoint).f_bfree)
store.verify("kept@1")
for size in (1 << 20, 4096, 1):  # now until not a block and not a name is left
    try:
        for number in range(100_000):
            with (mountpoint / f"fill{size}-{number}").open("wb") as file:
                file.write(bytes(size))
                file.flush()
                os.fsync(file.fileno())
    except OSError:
        pass
for build in (
    lambda: build_directory(store, tree / "small", name="new", version="1", kind="base"),
    lambda: store.tag("kept@1", "x@1"),
):
    try:
        build()
    except Fault as fault:
        print(fault.body.kind.value)
print([str(ref) for ref in store.list()], os.listdir(store.root / "tmp"))
"""


def test_a_full_disk_is_said_and_leaves_nothing(scratch: Path) -> None:
    image = scratch / "disk"
    with image.open("wb") as file:
        file.truncate(24 << 20)
    subprocess.run(["mkfs.ext4", "-q", "-I", "128", str(image)], check=True)
    for name, size in (("small", 10_000), ("big", 30 << 20)):
        (scratch / "trees" / name).mkdir(parents=True)
        (scratch / "trees" / name / "file").write_bytes(os.urandom(size))
    subprocess.run(["tar", "-C", str(scratch / "trees" / "big"), "-cf", str(scratch / "big.tar"), "."], check=True)
    (scratch / "mnt").mkdir()
    paths = [str(image), str(scratch / "mnt"), str(scratch / "trees"), str(scratch / "big.tar")]
    run = subprocess.run([sys.executable, "-c", _FULL, *paths], capture_output=True, text=True, check=False)
    if "loop" in run.stderr:
        pytest.skip(f"no loop device: {run.stderr}")
    assert run.returncode == 0, run.stderr
    lines = run.stdout.splitlines()
    assert lines[:6] == ["no_space True", "True 0"] * 3
    assert lines[6:] == ["no_space", "no_space", "['kept@1'] []"]
