"""The stream that carries changes: read back by the standard library's tarfile, byte for byte."""

from __future__ import annotations

import io
import tarfile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsec.protocol.specs import Change, ChangeKind
from dsec.rollout.grading.ground import Owned
from dsec.rollout.grading.patch import END, PatchWriter


def stream(*changes: Change, owned: tuple[bytes, ...] = ()) -> bytes:
    writer = PatchWriter(Owned(owned), 1_700_000_000)
    return b"".join(piece for change in changes for piece in writer.entry(change)) + END


def unpacked(data: bytes) -> list[tarfile.TarInfo]:
    with tarfile.open(fileobj=io.BytesIO(data), encoding="utf-8", errors="surrogateescape") as archive:
        return archive.getmembers()


def write(path: bytes, data: bytes = b"x", mode: int = 0o644) -> Change:
    return Change(path=path, kind=ChangeKind.WRITE, mode=mode, size=len(data), data=data)


_paths = st.lists(
    st.binary(min_size=1, max_size=90).map(lambda b: b.translate(None, b"\0/") or b"x"), min_size=1, max_size=5
).map(b"/".join)


@given(_paths, st.binary(max_size=1500), st.sampled_from((0o644, 0o755, 0o444)))
def test_files_come_through(path: bytes, data: bytes, mode: int) -> None:
    raw = stream(write(path, data, mode))
    (found,) = unpacked(raw)
    assert (found.name.encode("utf-8", "surrogateescape"), found.size, found.mode) == (path, len(data), mode)
    with tarfile.open(fileobj=io.BytesIO(raw), encoding="utf-8", errors="surrogateescape") as archive:
        held = archive.extractfile(found)
        assert held is not None and held.read() == data
    assert len(raw) % 512 == 0


def test_deletions_and_opaque_directories() -> None:
    gone = Change(path=b"w/src/old.py", kind=ChangeKind.DELETE)
    new = Change(path=b"w/src/pkg", kind=ChangeKind.MKDIR, mode=0o755, opaque=True)
    plain = Change(path=b"w/src/other", kind=ChangeKind.MKDIR, mode=0o755)
    found = unpacked(stream(gone, new, plain))
    assert [(one.name, one.isdir()) for one in found] == [
        ("w/src/.wh.old.py", False), ("w/src/pkg/.wh..wh..opq", False), ("w/src/pkg", True), ("w/src/other", True),
    ]  # fmt: skip


def test_what_is_owned_is_kept_before_its_directory_goes() -> None:
    gone = Change(path=b"w/pkg", kind=ChangeKind.DELETE)
    raw = stream(gone, owned=(b"w/pkg/conftest.py", b"w/pkg\nx", b"w/pkg/tests"))
    assert raw.index(b"31 DSEC.keep=w/pkg/conftest.py\n") < raw.index(b"w/.wh.pkg")
    assert b"DSEC.keep=w/pkg/tests\n" in raw and b"w/pkg\nx" not in raw


@pytest.mark.parametrize("length", range(80, 110))
def test_lengths_of_records_count_themselves(length: int) -> None:
    (found,) = unpacked(stream(write(b"d/" + b"n" * length)))
    assert len(found.name) == length + 2
