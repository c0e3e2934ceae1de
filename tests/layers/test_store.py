"""The store: names, atomic publishing, damage, collection, several processes at once."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from dsec.layers import LayerStore, build_directory, place
from dsec.layers.manifest import Manifest, decode_manifest
from dsec.protocol.errors import ErrorKind, Fault
from tests.layers.conftest import Tiny


def files_of(store: LayerStore) -> set[str]:
    """Every file of a store but its lock."""
    return {
        str(path.relative_to(store.root)) for path in store.root.rglob("*") if path.is_file() and path.name != "lock"
    }


def fault(kind: ErrorKind, call: object, *arguments: object) -> Fault:
    with pytest.raises(Fault) as caught:
        call(*arguments)  # type: ignore[operator]
    assert caught.value.body.kind is kind, caught.value
    return caught.value


# -- names -------------------------------------------------------------------------------------------------------------


def test_resolves_every_form_of_a_reference(store: LayerStore, tiny: Tiny) -> None:
    ref = tiny("tool@1.0+x")
    for text in ("tool@1.0+x", "tool", f"tool@{ref.digest}"):
        assert store.resolve(text).digest == ref.digest
    assert store.list() == [ref]


def test_a_bare_name_is_the_only_version_or_the_latest_tag(store: LayerStore, tiny: Tiny) -> None:
    tiny("tool@1")
    second = tiny("tool@2")
    ambiguous = fault(ErrorKind.INVALID, store.resolve, "tool")
    assert "1, 2" in ambiguous.body.message
    store.tag("tool@2", "tool")
    assert store.resolve("tool").digest == second.digest
    store.tag("tool@1", "other@stable")
    assert store.resolve("other").version == "1"


def test_an_unknown_layer_names_near_ones(store: LayerStore, tiny: Tiny) -> None:
    assert "empty" in fault(ErrorKind.NOT_FOUND, store.resolve, "debian@12").body.hint
    tiny("debian@12")
    assert "debian@12" in fault(ErrorKind.NOT_FOUND, store.resolve, "debain@12").body.hint
    assert "debian@12" in fault(ErrorKind.NOT_FOUND, store.resolve, "debian@13").body.hint
    assert "debian@12" in fault(ErrorKind.NOT_FOUND, store.resolve, "zzz").body.hint
    fault(ErrorKind.NOT_FOUND, store.resolve, "debian@sha256:" + "0" * 64)


def test_a_digest_under_a_foreign_name_is_refused(store: LayerStore, tiny: Tiny) -> None:
    ref = tiny("tool@1")
    assert "tool@1" in fault(ErrorKind.INVALID, store.resolve, f"debian@{ref.digest}").body.message


def test_a_version_is_immutable_unless_forced(store: LayerStore, tiny: Tiny) -> None:
    first = tiny("tool@1", files={"a": "1"})
    assert tiny("tool@1", files={"a": "1"}) == first
    with pytest.raises(Fault) as caught:
        tiny("tool@1", files={"a": "2"})
    assert caught.value.body.kind is ErrorKind.CONFLICT
    assert store.resolve("tool@1").digest == first.digest
    second = tiny("tool@1", files={"a": "2"}, force=True)
    assert store.resolve("tool@1").digest == second.digest != first.digest


def test_the_canonical_form_has_no_time_in_it(store: LayerStore, tiny: Tiny) -> None:
    manifest = store.resolve(str(tiny("tool@1", labels={"b": "1", "a": "2"})))
    assert manifest.created > 1_600_000_000
    again = decode_manifest(manifest.canonical(), created=5.0)
    assert again.digest == manifest.digest and again.created == 5.0
    assert isinstance(again, Manifest) and list(again.labels) == ["a", "b"]


# -- damage ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("part", ["meta", "data"])
def test_a_truncated_blob_is_named(store: LayerStore, tiny: Tiny, part: str) -> None:
    manifest = store.resolve(str(tiny("tool@1", files={"a": "x" * 10_000})))
    blob = manifest.meta if part == "meta" else manifest.data[0]
    path = store.root / "blobs" / blob.digest.removeprefix("blake3:")
    path.chmod(0o600)
    os.truncate(path, blob.size - 4096)
    damaged = fault(ErrorKind.CREATE_FAILED, store.paths, manifest)
    assert blob.digest in damaged.body.message and "truncated" in damaged.body.message
    assert damaged.body.details["stage"] == "layer"
    path.unlink()
    assert "missing" in fault(ErrorKind.CREATE_FAILED, store.paths, manifest).body.message


def test_a_layer_that_is_not_erofs_is_named(store: LayerStore, tiny: Tiny) -> None:
    manifest = store.resolve(str(tiny("tool@1")))
    path = store.root / "blobs" / manifest.meta.digest.removeprefix("blake3:")
    path.chmod(0o600)
    path.write_bytes(b"\x7fELF".ljust(manifest.meta.size, b"\0"))
    assert "not an EROFS image" in fault(ErrorKind.CREATE_FAILED, store.paths, manifest).body.message


def test_verify_finds_one_changed_bit(store: LayerStore, tiny: Tiny) -> None:
    manifest = store.resolve(str(tiny("tool@1", files={"a": "x" * 10_000})))
    store.verify("tool@1")
    path = store.root / "blobs" / manifest.data[0].digest.removeprefix("blake3:")
    path.chmod(0o600)
    data = bytearray(path.read_bytes())
    data[5000] ^= 1
    path.write_bytes(data)
    store.paths(manifest)
    assert manifest.data[0].digest in fault(ErrorKind.CREATE_FAILED, store.verify, "tool@1").body.message


def test_building_again_heals_a_truncated_blob_and_a_manifest(store: LayerStore, tiny: Tiny) -> None:
    ref = tiny("tool@1", files={"a": "x" * 10_000})
    for path in [*(store.root / "blobs").iterdir(), *(store.root / "manifests").iterdir()]:
        path.chmod(0o600)
        os.truncate(path, 100)
    fault(ErrorKind.CREATE_FAILED, store.resolve, "tool@1")
    assert [entry.size for entry in store.list()] == [-1]
    assert tiny("tool@1", files={"a": "x" * 10_000}) == ref
    store.verify("tool@1")


def test_a_layer_with_a_damaged_manifest_can_be_removed(store: LayerStore, tiny: Tiny) -> None:
    ref = tiny("tool@1")
    path = store.root / "manifests" / ref.digest.removeprefix("sha256:")
    path.write_text("{}")
    fault(ErrorKind.CREATE_FAILED, store.resolve, "tool@1")
    assert store.remove("tool@1").size == -1
    store.gc(set())
    assert files_of(store) == set()


# -- publishing --------------------------------------------------------------------------------------------------------


def steps_of_a_publish(monkeypatch: pytest.MonkeyPatch, fail_at: int) -> None:
    """Make the publish step number `fail_at` (each rename, each fsync) fail as a sick disk does."""
    count = 0

    def counted(real: object) -> object:
        def step(*arguments: object) -> object:
            nonlocal count
            count += 1
            if count == fail_at:
                raise OSError(5, "Input/output error")
            return real(*arguments)  # type: ignore[operator]

        return step

    monkeypatch.setattr(os, "fsync", counted(os.fsync))
    monkeypatch.setattr(Path, "rename", counted(Path.rename))


def test_a_failure_at_any_step_publishes_nothing(
    store: LayerStore, tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = tiny("kept@1")
    before = files_of(store)
    failures = 0
    for step in range(1, 50):
        with monkeypatch.context() as patch:
            steps_of_a_publish(patch, step)
            try:
                tiny("tool@1", files={"a": "new"})
            except OSError:
                failures += 1
            else:
                break
        tag = store.root / "tags" / "tool" / "1"
        if tag.exists():  # only the very last fsync failed: the tag is there, and so must be everything it names
            store.verify("tool@1")
            store.remove("tool@1")
            store.gc(set())
        assert files_of(store) == before
        assert store.list() == [kept]
    assert failures >= 8
    store.verify("tool@1")


_KILLED = """
import os, sys
from pathlib import Path
from dsec.layers import LayerStore, build_directory
left = int(sys.argv[3])
def dying(real):
    def step(*arguments):
        global left
        left -= 1
        if left == 0:
            os._exit(9)
        return real(*arguments)
    return step
os.fsync = dying(os.fsync)
Path.rename = dying(Path.rename)
build_directory(LayerStore(Path(sys.argv[1])), Path(sys.argv[2]), name="tool", version="1", kind="base")
"""


def test_a_killed_publisher_leaves_only_garbage(store: LayerStore, tiny: Tiny, scratch: Path) -> None:
    kept = tiny("kept@1")
    before = files_of(store)
    tree = scratch / "tree"
    tree.mkdir()
    (tree / "file").write_text("some text")
    died = 0
    for step in range(1, 50):
        run = subprocess.run([sys.executable, "-c", _KILLED, str(store.root), str(tree), str(step)], check=False)
        for ref in store.list():  # whatever is visible is whole
            store.verify(str(ref))
        if run.returncode == 0:
            break
        assert run.returncode == 9
        died += 1
        if len(store.list()) > 1:
            store.remove("tool@1")
        store.gc(set())
        assert files_of(store) == before
        assert os.listdir(store.root / "tmp") == []
    assert died >= 8
    assert {str(ref) for ref in store.list()} == {str(kept), "tool@1"}


def test_two_publishers_of_one_version_give_one_layer(store: LayerStore, scratch: Path) -> None:
    for number in range(6):
        trees = []
        for side in ("left", "right"):
            tree = scratch / f"{side}{number}"
            tree.mkdir()
            (tree / "file").write_text(side)
            trees.append(tree)
        barrier = threading.Barrier(2)

        def publish(tree: Path, version: str = str(number), barrier: threading.Barrier = barrier) -> object:
            barrier.wait(30)
            try:
                return build_directory(LayerStore(store.root), tree, name="tool", version=version, kind="base")
            except Fault as refused:
                return refused.body.kind

        with ThreadPoolExecutor(2) as pool:
            results = list(pool.map(publish, trees))
        assert [result for result in results if isinstance(result, ErrorKind)] == [ErrorKind.CONFLICT]
        store.verify(f"tool@{number}")
    store.gc(set())
    assert len(os.listdir(store.root / "manifests")) == 6


def test_publishers_of_one_content_agree(store: LayerStore, scratch: Path) -> None:
    tree = scratch / "tree"
    tree.mkdir()
    (tree / "file").write_text("same")

    def publish(_: int) -> object:
        return build_directory(LayerStore(store.root), tree, name="tool", version="1", kind="base")

    with ThreadPoolExecutor(4) as pool:
        assert len(set(map(str, pool.map(publish, range(8))))) == 1
    store.verify("tool")
    assert len(files_of(store)) == 4  # two blobs, a manifest, a tag


def test_a_store_on_tmpfs_is_refused(tmp_path_factory: pytest.TempPathFactory, tiny: Tiny, scratch: Path) -> None:
    if place.filesystem_of(Path("/dev/shm")) != "tmpfs":
        pytest.skip("/dev/shm is no tmpfs here")
    root = Path("/dev/shm") / f"dsec-test-{os.getpid()}"
    (scratch / "tree").mkdir()
    try:
        refused = fault(ErrorKind.UNSUPPORTED, lambda: _build(LayerStore(root), scratch / "tree"))
    finally:
        subprocess.run(["rm", "-rf", str(root)], check=True)
    assert "tmpfs" in refused.body.message and "DSEC_STORE" in refused.body.hint


def _build(store: LayerStore, tree: Path) -> None:
    build_directory(store, tree, name="tool", version="1", kind="base")


# -- removal and collection --------------------------------------------------------------------------------------------


def test_gc_removes_only_what_nothing_names(store: LayerStore, tiny: Tiny) -> None:
    shared = {"shared": "s" * 5000}
    tagged, running, dead = (
        tiny("a@1", files=shared | {"a": "1"}),
        tiny("b@1", files=shared),
        tiny("c@1", files={"c": "3"}),
    )
    store.tag("c@1", "alias@1")
    for name in ("b@1", "c@1"):
        store.remove(name)
    collected = store.gc(keep={running.digest})
    assert collected.manifests == 0
    store.verify("alias@1")
    store.remove("alias@1")
    collected = store.gc(keep={running.digest})
    assert (collected.manifests, collected.blobs) == (1, 2) and collected.bytes > dead.size
    store.verify(str(tagged))
    store.paths(store.resolve(f"b@{running.digest}"))
    fault(ErrorKind.NOT_FOUND, store.resolve, "c@1")
    store.gc(keep=set())
    fault(ErrorKind.NOT_FOUND, store.resolve, f"b@{running.digest}")
    store.verify(str(tagged))


def test_removing_by_digest_removes_every_name(store: LayerStore, tiny: Tiny) -> None:
    ref = tiny("a@1")
    store.tag("a@1", "b@2")
    fault(ErrorKind.NOT_FOUND, store.remove, "c@1")
    store.remove(f"a@{ref.digest}")
    assert store.list() == []
    fault(ErrorKind.NOT_FOUND, store.remove, "a@1")


def test_gc_leaves_living_builds_alone_and_removes_dead_ones(store: LayerStore) -> None:
    with store.staging() as stage:
        (stage / "half").write_text("done")
        assert store.gc(set()).builds == 0
        assert (stage / "half").is_file()
    abandoned = store.root / "tmp" / "abandoned"
    abandoned.mkdir()
    (abandoned / "half").write_text("done")
    (store.root / "tmp" / "write-1").write_text("never renamed")
    assert store.gc(set()).builds == 2
    assert os.listdir(store.root / "tmp") == []
