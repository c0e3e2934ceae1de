"""Tar archives: what honest ones give, and that hostile ones give a typed refusal and nothing outside the tree."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import os
import stat
import subprocess
import tarfile
import tempfile
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dsec.layers import Bounds, LayerStore, build_directory, build_tar
from dsec.layers.tar import TarReader, apply_tar
from dsec.layers.tree import TreeWriter, parse_name
from dsec.layers.unpack import Unpacked
from dsec.protocol.errors import ErrorKind, Fault
from tests.layers.look import Seen, entries
from tests.layers.test_image import rich_tree

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="owners and device nodes need root")


def archive(
    *members: tuple[str, bytes, dict[str, object]] | tuple[str, bytes], form: int = tarfile.PAX_FORMAT
) -> bytes:
    """A tar of (name, contents, fields of TarInfo)."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=form) as tar:
        for name, data, *fields in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            for key, value in (fields[0] if fields else {}).items():
                setattr(info, key, value)
            tar.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


def unpack(data: bytes, root: Path, **options: object) -> list[Seen]:
    """Unpack into `root`/tree and return what is there."""
    tree = root / "tree"
    tree.mkdir(mode=0o700)
    whiteouts = bool(options.pop("whiteouts", False))
    with TreeWriter(tree, **options) as writer:  # type: ignore[arg-type]
        apply_tar(TarReader(Unpacked(io.BytesIO(data), "the archive"), "the archive"), writer, whiteouts=whiteouts)  # type: ignore[arg-type]
        writer.finish()
    return entries(os.fsencode(tree))


def names(seen: list[Seen]) -> list[bytes]:
    return [entry.path for entry in seen]


# -- honest archives ---------------------------------------------------------------------------------------------------

_SQUEEZE: dict[str, Callable[[bytes], bytes]] = {
    "plain": bytes,
    "gzip": gzip.compress,
    "two gzip members": lambda data: gzip.compress(data[:5000]) + gzip.compress(data[5000:]),
    "xz": lzma.compress,
    "two xz streams": lambda data: lzma.compress(data[:5000]) + bytes(8) + lzma.compress(data[5000:]),
    "zstd": zstandard.compress,
    "two zstd frames": lambda data: zstandard.compress(data[:5000]) + zstandard.compress(data[5000:]),
    "bzip2": bz2.compress,
}


@pytest.mark.parametrize(
    ("form", "sparse"), [("gnu", []), ("gnu", ["--sparse"]), ("pax", []), ("pax", ["--sparse"]), ("ustar", [])]
)
def test_what_gnu_tar_wrote_comes_back(scratch: Path, form: str, sparse: list[str]) -> None:
    tree = rich_tree(scratch / "source")
    (tree / "socket").unlink()  # tar stores none
    attributes = ["--xattrs", "--xattrs-include=*"] if form == "pax" else []
    if form == "ustar":
        for path in (tree / "dir", tree / "dir" / "inner"):  # numbers that ustar can hold
            os.chown(path, 70_000, 70_000)
    deep = tree / ("d" * 45) / ("e" * 45) / ("f" * 45)
    deep.mkdir(parents=True)
    (deep / ("g" * (90 if form == "ustar" else 240))).write_text("long name")
    (deep / "target").symlink_to("t" * (90 if form == "ustar" else 300))
    run = subprocess.run(
        ["tar", "-C", str(tree), f"--format={form}", "--sort=name", *sparse, *attributes, "-cf", "-", "."],
        capture_output=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    seen, made = unpack(run.stdout, scratch), entries(os.fsencode(tree))
    assert names(seen) == names(made)
    for here, there in zip(seen, made, strict=True):
        whole = form == "pax"
        assert here.mtime_ns == (there.mtime_ns if whole else there.mtime_ns // 10**9 * 10**9)
        assert here.attributes == (there.attributes if whole else {})
        same = [field for field in Seen.__struct_fields__ if field not in ("mtime_ns", "attributes")]
        assert [getattr(here, field) for field in same] == [getattr(there, field) for field in same]


@pytest.mark.parametrize("squeeze", _SQUEEZE)
def test_every_compression(scratch: Path, squeeze: str) -> None:
    data = os.urandom(40_000)
    seen = unpack(_SQUEEZE[squeeze](archive(("a/b", data))), scratch)
    assert names(seen) == [b".", b"a", b"a/b"]
    assert (scratch / "tree/a/b").read_bytes() == data


@pytest.mark.parametrize("version", ["0.1", "1.0"])
def test_sparse_files_of_pax(scratch: Path, version: str) -> None:
    (scratch / "sparse").write_bytes(b"")
    with (scratch / "sparse").open("r+b") as file:
        for number in range(40):
            file.seek(number * 100_000)
            file.write(b"%d" % number)
        file.truncate(5_000_000)
    command = [
        "tar",
        "-C",
        str(scratch),
        "--format=pax",
        f"--sparse-version={version}",
        "--sparse",
        "-cf",
        "-",
        "sparse",
    ]
    data = subprocess.run(command, capture_output=True, check=True).stdout
    assert len(data) < 400_000
    unpack(data, scratch)
    assert (scratch / "tree/sparse").read_bytes() == (scratch / "sparse").read_bytes()
    assert (scratch / "tree/sparse").stat().st_blocks <= (scratch / "sparse").stat().st_blocks + 8


def test_the_last_of_one_name_counts(scratch: Path) -> None:
    members = (
        ("a", b"1"),
        ("a", b"2"),
        ("d", b"file"),
        ("d/x", b"", {"type": tarfile.DIRTYPE}),
        ("e/f", b"1"),
        ("e", b"now a file"),
    )
    with pytest.raises(Fault):  # d is a file, and files hold nothing
        unpack(archive(*members[:4]), scratch)
    (scratch / "tree").rename(scratch / "old")
    seen = unpack(archive(*members[:2], *members[4:]), scratch)
    assert names(seen) == [b".", b"a", b"e"]
    assert (scratch / "tree/a").read_bytes() == b"2"


def test_writing_over_a_hard_link_leaves_the_other_name_alone(scratch: Path) -> None:
    link = {"type": tarfile.LNKTYPE, "linkname": "a"}
    unpack(archive(("a", b"first"), ("b", b"", link), ("a", b"second")), scratch)
    assert (scratch / "tree/b").read_bytes() == b"first"


_parts = st.binary(min_size=1, max_size=12).filter(
    lambda part: b"/" not in part and b"\0" not in part and part not in (b".", b"..")
)
_paths = st.lists(_parts, min_size=1, max_size=4).map(b"/".join)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.dictionaries(_paths, st.binary(max_size=2000), max_size=12),
    st.sampled_from([tarfile.PAX_FORMAT, tarfile.GNU_FORMAT]),
)
def test_any_names_and_contents(disk: Path, files: dict[bytes, bytes], form: int) -> None:
    """Whatever an archive of files holds, the tree is exactly what Python's tarfile says the last entries are."""
    clear = {path: data for path, data in files.items() if not any(other.startswith(path + b"/") for other in files)}
    members = [(os.fsdecode(path), data) for path, data in clear.items()]
    with tempfile.TemporaryDirectory(dir=disk) as directory:
        unpack(archive(*members, form=form), Path(directory))
        for path, data in clear.items():
            with open(os.path.join(os.fsencode(directory), b"tree", path), "rb") as file:
                assert file.read() == data


# -- hostile archives --------------------------------------------------------------------------------------------------

_LINK = {"type": tarfile.SYMTYPE}
_HARD = {"type": tarfile.LNKTYPE}
_DIR = {"type": tarfile.DIRTYPE}


def _hostile(outside: str) -> dict[str, list[tuple[str, bytes, dict[str, object]]]]:
    to = lambda target: {**_LINK, "linkname": target}  # noqa: E731
    return {
        "absolute": [(f"{outside}/pwned", b"x", {})],
        "dot dot": [("../pwned", b"x", {})],
        "dot dot inside": [("a/../../pwned", b"x", {})],
        "dot dot directory": [("..", b"", _DIR)],
        "root as a file": [(".", b"x", {})],
        "root as a link": [("./", b"", to(outside))],
        "through a link": [("a", b"", to(outside)), ("a/pwned", b"x", {})],
        "through a relative link": [("a", b"", to("../outside")), ("a/pwned", b"x", {})],
        "through a link to itself": [("a", b"", to(".")), ("a/pwned", b"x", {})],
        "through two links": [("d", b"", _DIR), ("d/a", b"", to("..")), ("d/a/outside/pwned", b"x", {})],
        "directory through a link": [("a", b"", to(outside)), ("a/pwned", b"", _DIR)],
        "link through a link": [("a", b"", to(outside)), ("a/pwned", b"", to("x"))],
        "hard link outside": [("a", b"", {**_HARD, "linkname": f"{outside}/secret"})],
        "hard link by dot dot": [("a", b"", {**_HARD, "linkname": "../outside/secret"})],
        "hard link through a link": [("l", b"", to(outside)), ("a", b"", {**_HARD, "linkname": "l/secret"})],
        "hard link to nothing": [("a", b"", {**_HARD, "linkname": "b"})],
        "hard link to a directory": [("d", b"", _DIR), ("a", b"", {**_HARD, "linkname": "d"})],
        "hard link into what it replaces": [("d/x", b"1", {}), ("d", b"", {**_HARD, "linkname": "d/x"})],
        "device through a link": [
            ("a", b"", to(outside)),
            ("a/null", b"", {"type": tarfile.CHRTYPE, "devmajor": 1, "devminor": 3}),
        ],
        "too long a component": [("n" * 256, b"x", {})],
        "too long a path": [("/".join(["n" * 200] * 25), b"x", {})],
        "too deep": [("/".join("n" * 300), b"x", {})],
        "empty link": [("a", b"", to(""))],
        "huge link": [("a", b"", to("x" * 5000))],
        "whiteout of dot dot": [("a/.wh...", b"", {})],
        "whiteout of dot": [("a/.wh..", b"", {})],
        "whiteout of nothing": [("a/.wh.", b"", {})],
        "whiteout through a link": [("a", b"", to(outside)), ("a/.wh.secret", b"", {})],
        "opaque through a link": [("a", b"", to(outside)), ("a/.wh..wh..opq", b"", {})],
    }


@pytest.mark.parametrize("attack", _hostile("/x"))
def test_hostile_archives_stay_inside(scratch: Path, store: LayerStore, attack: str) -> None:
    outside = scratch / "outside"
    outside.mkdir()
    (outside / "secret").write_text("secret")
    before = entries(os.fsencode(outside))
    data = archive(*_hostile(str(outside))[attack])
    (scratch / "hostile.tar").write_bytes(data)
    with pytest.raises(Fault) as caught:
        build_tar(store, scratch / "hostile.tar", name="evil", version="1", kind="toolkit")
    assert caught.value.body.kind is ErrorKind.INVALID, caught.value
    (scratch / "inside").mkdir()
    with pytest.raises(Fault):
        unpack(data, scratch / "inside", whiteouts=True)
    assert entries(os.fsencode(outside)) == before
    assert sorted(os.listdir(scratch / "inside")) == ["tree"]
    assert sorted(os.listdir(scratch)) == ["hostile.tar", "inside", "outside", "store"]
    assert store.list() == [] and os.listdir(store.root / "tmp") == [] and os.listdir(store.root / "blobs") == []


def test_a_link_that_gives_way_to_a_directory_is_not_followed(scratch: Path) -> None:
    outside = scratch / "outside"
    outside.mkdir()
    seen = unpack(archive(("a", b"", {**_LINK, "linkname": str(outside)}), ("a", b"", _DIR), ("a/b", b"x")), scratch)
    assert names(seen) == [b".", b"a", b"a/b"] and seen[1].kind == stat.S_IFDIR
    assert os.listdir(outside) == []


_pieces = st.sampled_from(["a", "b", "..", ".", "", ".wh.a", ".wh..wh..opq", ".wh..."])
_members = st.tuples(
    st.lists(_pieces, min_size=1, max_size=4).map("/".join),
    st.sampled_from(
        [tarfile.REGTYPE, tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE]
    ),
    st.lists(_pieces, min_size=1, max_size=4).map("/".join),
)


@settings(max_examples=250, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(_members, max_size=10), st.booleans())
def test_no_sequence_of_entries_leaves_the_tree(disk: Path, members: list[tuple[str, bytes, str]], keep: bool) -> None:
    with tempfile.TemporaryDirectory(dir=disk) as directory:
        root = Path(directory)
        (root / "a").mkdir()
        (root / "a" / "b").write_text("outside")
        before = entries(os.fsencode(root / "a"))
        data = archive(*((name, b"", {"type": kind, "linkname": target}) for name, kind, target in members))
        try:
            unpack(data, root, whiteouts=True, keep_whiteouts=keep)
        except Fault as refused:
            assert refused.body.kind is ErrorKind.INVALID
        assert sorted(os.listdir(root)) == ["a", "tree"]
        assert entries(os.fsencode(root / "a")) == before


@given(st.binary(max_size=300))
def test_names_that_parse_stay_below(path: bytes) -> None:
    try:
        parts = parse_name(path)
    except Fault as refused:
        assert refused.body.kind is ErrorKind.INVALID
        return
    assert all(part and part not in (b".", b"..") and b"/" not in part and b"\0" not in part for part in parts)


# -- damage and absurd sizes -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("squeeze", _SQUEEZE)
@pytest.mark.parametrize("keep", [0.0, 0.02, 0.4, 0.75])
def test_archives_cut_off_anywhere_are_refused(scratch: Path, squeeze: str, keep: float) -> None:
    whole = _SQUEEZE[squeeze](archive(*((f"f{number}", os.urandom(3000)) for number in range(20))))
    with pytest.raises(Fault) as caught:
        unpack(whole[: int(len(whole) * keep)], scratch)
    assert caught.value.body.kind is ErrorKind.INVALID
    assert "the archive" in caught.value.body.message


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_changed_bytes_give_a_tree_or_a_fault(disk: Path, data: st.DataObject) -> None:
    """No damage to headers may raise anything but a Fault."""
    long = "d" * 120 + "/" + "e" * 120
    good = bytearray(
        archive((long, b"some data"), ("a", b"", {**_LINK, "linkname": "b"}), form=data.draw(st.sampled_from([1, 2])))
    )
    for at, value in data.draw(
        st.dictionaries(st.integers(0, len(good) - 1), st.integers(0, 255), min_size=1, max_size=4)
    ).items():
        good[at] = value
    for start in range(0, 4096, 512):  # repair the sums, so that the damage is looked at
        block = good[start : start + 512]
        good[start + 148 : start + 156] = b"%06o\0 " % (sum(block) - sum(block[148:156]) + 256)
    with tempfile.TemporaryDirectory(dir=disk) as directory:
        try:
            unpack(bytes(good), Path(directory), bounds=Bounds(bytes=1 << 30))
        except Fault as refused:
            assert refused.body.kind in (ErrorKind.INVALID, ErrorKind.TOO_LARGE)


def test_a_file_larger_than_the_bound_is_refused_before_it_is_read(scratch: Path) -> None:
    header = tarfile.TarInfo("huge")
    header.size = 1 << 50
    with pytest.raises(Fault) as caught:
        unpack(header.tobuf(tarfile.GNU_FORMAT), scratch)
    assert caught.value.body.kind is ErrorKind.TOO_LARGE


def test_a_sparse_file_cannot_claim_more_than_the_bound(scratch: Path) -> None:
    pax = {
        "GNU.sparse.major": "1",
        "GNU.sparse.minor": "0",
        "GNU.sparse.name": "huge",
        "GNU.sparse.realsize": str(1 << 60),
    }
    body = b"0\n".ljust(512, b"\0")
    with pytest.raises(Fault) as caught:
        unpack(archive(("x", body, {"pax_headers": pax})), scratch)
    assert caught.value.body.kind is ErrorKind.TOO_LARGE


@pytest.mark.parametrize(
    "spans", [b"2\n100\n10\n50\n10\n", b"1\n0\n999\n", b"1\n9999\n20\n", b"99999999999999\n", b"x\n", b"1\n-5\n20\n"]
)
def test_sparse_maps_that_lie_are_refused(scratch: Path, spans: bytes) -> None:
    pax = {"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.name": "f", "GNU.sparse.realsize": "1000"}
    with pytest.raises(Fault) as caught:
        unpack(archive(("x", spans.ljust(512, b"\0") + b"y" * 20, {"pax_headers": pax})), scratch)
    assert caught.value.body.kind is ErrorKind.INVALID


def test_an_extended_header_of_any_size_is_not_read_into_memory(scratch: Path) -> None:
    header = tarfile.TarInfo("././@PaxHeader")
    header.type, header.size = tarfile.XHDTYPE, 1 << 40
    with pytest.raises(Fault) as caught:
        unpack(header.tobuf(tarfile.GNU_FORMAT), scratch)
    assert "extended header" in caught.value.body.message


def test_a_bomb_stops_at_the_bound(scratch: Path) -> None:
    """Ten gigabytes of zeros in ten megabytes: refused by what the header claims, or by the number of entries."""
    packer = zlib.compressobj(wbits=31)
    small = archive(("f", b""))[:512]
    bomb = b"".join(packer.compress(small * 2000) for _ in range(20)) + packer.flush()
    with pytest.raises(Fault) as caught:
        unpack(bomb, scratch, bounds=Bounds(entries=1000))
    assert caught.value.body.kind is ErrorKind.TOO_LARGE
    (scratch / "tree").rename(scratch / "old")
    empty = gzip.compress(archive(("a", b"x")) + bytes(200 << 20), 1)
    with pytest.raises(Fault) as caught:
        unpack(empty, scratch)
    assert caught.value.body.kind is ErrorKind.INVALID and "after the archive" in caught.value.body.message


@pytest.mark.parametrize("data", [b"", b"no tar at all" * 200, b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"BZh9", bytes(10)])
def test_what_is_no_archive_is_said(scratch: Path, data: bytes) -> None:
    with pytest.raises(Fault) as caught:
        unpack(data, scratch)
    assert caught.value.body.kind is ErrorKind.INVALID and caught.value.body.hint


# -- layers of tars ----------------------------------------------------------------------------------------------------


def test_a_tar_layer_is_the_directory_layer(store: LayerStore, scratch: Path) -> None:
    tree = rich_tree(scratch / "source")
    (tree / "socket").unlink()
    command = [
        "tar",
        "-C",
        str(tree),
        "--format=pax",
        "--xattrs",
        "--xattrs-include=*",
        "--zstd",
        "-cf",
        str(scratch / "t"),
        ".",
    ]
    subprocess.run(command, check=True)
    build_directory(store, tree, name="tree", version="dir", kind="base")
    build_tar(store, scratch / "t", name="tree", version="tar", kind="base")
    with (scratch / "t").open("rb") as stream:
        build_tar(store, stream, name="tree", version="stream", kind="base")
    manifests = [store.resolve(f"tree@{version}") for version in ("dir", "tar", "stream")]
    assert len({(manifest.meta, manifest.data) for manifest in manifests}) == 1
    assert manifests[1].provenance == manifests[2].provenance
    assert manifests[1].provenance.digest.startswith("sha256:")


def test_incoming_overlay_attributes_are_stripped(scratch: Path) -> None:
    pax = {
        f"SCHILY.xattr.{name}": "y"
        for name in ("user.overlay.opaque", "trusted.overlay.opaque", "user.overlay.redirect", "user.ok")
    }
    seen = unpack(archive(("d", b"", {**_DIR, "pax_headers": pax})), scratch)
    assert seen[1].attributes == {"user.ok": b"y"}
