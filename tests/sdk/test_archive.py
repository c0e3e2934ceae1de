"""Archives that no honest sandbox sends: bounded, typed, and nothing outside the directory."""

from __future__ import annotations

import io
import itertools
import os
import tarfile
import tracemalloc
from collections.abc import AsyncIterator, Iterable
from pathlib import Path

import pytest

from dsec.sdk.archive import Downloaded, unpack_tree
from dsec.sdk.errors import FileInvalid


def member(name: str, kind: bytes = tarfile.REGTYPE, data: bytes = b"", target: str = "", **fields: object) -> bytes:
    info = tarfile.TarInfo(name)
    info.type, info.size, info.linkname = kind, len(data), target
    for key, value in fields.items():
        setattr(info, key, value)
    form = tarfile.GNU_FORMAT if kind == tarfile.GNUTYPE_SPARSE else tarfile.PAX_FORMAT
    return info.tobuf(form) + data + bytes(-len(data) % 512)


async def unpacked(target: Path, *parts: bytes | Iterable[bytes]) -> Downloaded:
    async def pieces() -> AsyncIterator[bytes]:
        for part in parts:
            for piece in [part] if isinstance(part, bytes) else part:
                yield piece
        yield bytes(1024)

    return await unpack_tree(pieces(), target)


def sparse(size: int) -> bytes:
    """512 bytes that say they are a file of so many."""
    head = bytearray(member("sparse", tarfile.GNUTYPE_SPARSE, b"x" * 512))
    head[386:410] = b"00000000000\x0000000001000\0"
    head[483:495] = b"\x80" + bytes(3) + size.to_bytes(8, "big")
    head[148:156] = b" " * 8
    head[148:156] = b"%06o\0 " % sum(head[:512])
    return bytes(head)


@pytest.mark.parametrize(
    "part",
    [
        sparse(1 << 62),
        member("x", tarfile.XHDTYPE, b"30 GNU.sparse.major=1\n30 GNU.sparse.minor=0\n") + member("f"),
        member("x", tarfile.XGLTYPE, b"12 a=bcdefg\n") + member("f"),
        b"".join(member("x", tarfile.XHDTYPE, b"9 a=bcd\n\n") for _ in range(3000)) + member("f"),
        member("x", tarfile.XHDTYPE, b"99999999999999999999 a=b\n") + member("f"),
        b"no archive at all".ljust(512, b"."),
    ],
    ids=["sparse", "pax sparse", "for all of it", "headers of headers", "a wrong length", "no archive"],
)
async def test_what_no_sandbox_sends_is_refused(tmp_path: Path, part: bytes) -> None:
    with pytest.raises(FileInvalid, match="damaged archive"):
        await unpacked(tmp_path / "t", part)
    size = sum(path.lstat().st_size for path in (tmp_path / "t").rglob("*"))
    assert size < 4096


@pytest.mark.parametrize(
    "kind", [tarfile.XHDTYPE, tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK, tarfile.SOLARIS_XHDTYPE]
)
async def test_headers_are_not_taken_into_memory_at_their_word(tmp_path: Path, kind: bytes) -> None:
    info = tarfile.TarInfo("x")
    info.type, info.size = kind, 1 << 32
    tracemalloc.start()
    with pytest.raises(FileInvalid, match="extended header"):
        await unpacked(tmp_path / "t", info.tobuf(tarfile.GNU_FORMAT), itertools.repeat(bytes(1 << 20), 64))
    assert tracemalloc.get_traced_memory()[1] < 24 << 20
    tracemalloc.stop()


async def test_many_members_do_not_pile_up(tmp_path: Path) -> None:
    one = member("same", data=b"x")
    tracemalloc.start()
    found = await unpacked(tmp_path / "t", one, itertools.repeat(one * 1000, 4))
    assert tracemalloc.get_traced_memory()[1] < 6 << 20
    tracemalloc.stop()
    assert found.files == 4_001 and (tmp_path / "t" / "same").read_bytes() == b"x"


async def test_what_meets_something_in_its_way_is_left_out_by_name(tmp_path: Path) -> None:
    target = tmp_path / "t"
    found = await unpacked(
        target,
        member("d", tarfile.DIRTYPE),
        member("d", data=b"over a directory"),
        member("f", data=b"kept"),
        member("f", tarfile.LNKTYPE, target="f"),  # to itself
        member("h", tarfile.LNKTYPE, target="nowhere"),
        member("h2", tarfile.LNKTYPE, target="d"),
        member("f/below", data=b"x"),
        member("n" * 300, data=b"x"),
        member("new", data=b"x", mtime=2**62),
        member("g", tarfile.LNKTYPE, target="f"),
    )
    assert (target / "f").read_bytes() == b"kept" and os.path.samefile(target / "f", target / "g")
    assert set(found.skipped) == {"d", "h", "h2", "f/below", "n" * 300}
    assert found.skipped["f/below"] == "a symlink or file stands in its way"
    assert {path.name for path in target.iterdir()} == {"d", "f", "g", "new"}


async def test_a_nul_in_a_name_names_nothing(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as tar:
        info = tarfile.TarInfo("x")
        info.pax_headers = {"path": "a\0b"}
        tar.addfile(info)
    found = await unpacked(tmp_path / "t", buffer.getvalue())
    assert found.files == 0 or not any("\0" in path.name for path in (tmp_path / "t").iterdir())
