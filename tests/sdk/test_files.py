"""Files: exact bytes and names, typed errors, directories both ways, nothing outside the target."""

from __future__ import annotations

import io
import os
import tarfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from dsec import FileKind, NoSpace, Sandbox
from tests.apiserver.fake_edge import FakeEdge

ODD = b"a b\n\xff\xc3"


async def test_bytes_and_names_are_exact(sandbox: Sandbox) -> None:
    files, data = sandbox.files, os.urandom(1_000_000)
    assert await files.write(b"/d/" + ODD, data, mode=0o600) == len(data)
    assert await files.read(b"/d/" + ODD) == data
    assert await files.read(b"/d/" + ODD, offset=10, length=5) == data[10:15]
    stat = await files.stat(b"/d/" + ODD)
    assert (stat.path, stat.kind, stat.size, stat.mode) == (b"/d/" + ODD, FileKind.FILE, len(data), 0o600)
    assert [info.path for info in await files.list("/d")] == [b"/d/" + ODD]
    await files.write("/text", "héllo")
    assert await files.read_text("/text") == "héllo"
    await files.write("/empty", b"")
    assert await files.read("/empty") == b""


async def test_streams_both_ways(sandbox: Sandbox) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        for i in range(100):
            yield bytes([i]) * 50_000

    assert await sandbox.files.write("/big", pieces()) == 5_000_000
    size = 0
    async for chunk in sandbox.files.stream("/big"):
        size += len(chunk)
    assert size == 5_000_000


async def test_an_upload_that_breaks_off_changes_nothing(sandbox: Sandbox) -> None:
    async def broken() -> AsyncIterator[bytes]:
        yield b"half" * 100_000
        raise RuntimeError("the source failed")

    await sandbox.files.write("/kept", b"before")
    with pytest.raises(RuntimeError, match="the source failed"):
        await sandbox.files.write("/kept", broken())
    assert await sandbox.files.read("/kept") == b"before"
    assert [info.path for info in await sandbox.files.list("/")] == [b"/kept"]


async def test_typed_errors(sandbox: Sandbox) -> None:
    files = sandbox.files
    await files.mkdir("/dir/sub")
    with pytest.raises(FileNotFoundError, match="missing"):
        await files.read("/missing")
    with pytest.raises(IsADirectoryError):
        await files.read("/dir")
    with pytest.raises(IsADirectoryError):
        await files.write("/dir", b"x")
    with pytest.raises(FileExistsError):
        await files.mkdir("/dir", parents=False)
    with pytest.raises(NotADirectoryError):
        await files.write("/f", b"")
        await files.list("/f")
    with pytest.raises(NoSpace) as full:
        await files.write("/full", bytes(3_000_000))
    assert full.value.errno == 28 and full.value.details["limit"] == "disk_limit_mb"
    with pytest.raises(ValueError, match="NUL"):
        await files.read("/a\0b")
    with pytest.raises(OSError):
        await files.remove("/dir")
    await files.remove("/dir", recursive=True)
    assert not await files.exists("/dir") and await files.exists("/f")
    await files.move("/f", "/g")
    assert await files.exists("/g") and not await files.exists("/f")


def tree(root: Path) -> Path:
    (root / "sub").mkdir(parents=True)
    (root / "sub" / "run.sh").write_text("#!/bin/sh\n")
    (root / "sub" / "run.sh").chmod(0o755)
    Path(os.fsdecode(os.fsencode(root) + b"/" + ODD)).write_bytes(b"odd")
    (root / "link").symlink_to("sub/run.sh")
    (root / "empty").mkdir()
    return root


async def test_directories_both_ways(sandbox: Sandbox, tmp_path: Path) -> None:
    source = tree(tmp_path / "source")
    await sandbox.files.upload(source, "/w")
    assert (await sandbox.files.stat("/w/sub/run.sh")).mode == 0o755
    assert (await sandbox.files.stat("/w/link", follow=False)).target == b"sub/run.sh"
    result = await sandbox.files.download("/w", tmp_path / "back")
    assert result.files == 2 and result.bytes == 13 and result.skipped == {}
    back = tmp_path / "back"
    assert sorted(os.listdir(os.fsencode(back))) == sorted(os.listdir(os.fsencode(source)))
    assert os.readlink(back / "link") == "sub/run.sh" and os.access(back / "sub" / "run.sh", os.X_OK)
    assert Path(os.fsdecode(os.fsencode(back) + b"/" + ODD)).read_bytes() == b"odd"


async def test_single_files_and_symlinks(sandbox: Sandbox, tmp_path: Path) -> None:
    source = tree(tmp_path / "source")
    await sandbox.files.upload(source / "sub" / "run.sh", "/x/run.sh")
    assert (await sandbox.files.stat("/x/run.sh")).mode == 0o755
    await sandbox.files.upload(source / "link", "/x/link")
    assert (await sandbox.files.stat("/x/link", follow=False)).target == b"sub/run.sh"
    assert (await sandbox.files.download("/x/run.sh", tmp_path / "local")).bytes == 10
    assert (tmp_path / "local").read_text() == "#!/bin/sh\n"
    with pytest.raises(FileNotFoundError):
        await sandbox.files.upload(tmp_path / "nothing", "/y")
    with pytest.raises(FileNotFoundError):
        await sandbox.files.download("/nothing", tmp_path / "z")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["local", "source"]


def member(name: str, kind: bytes = tarfile.REGTYPE, link: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.mode = kind, link, 0o4777
    return info


async def test_hostile_archives_stay_inside(sandbox: Sandbox, edge: FakeEdge, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.write_text("untouched")
    await sandbox.files.write("/h/good", "good")
    edge.extra_members = [
        member("../outside"), member("/etc/hostile"), member("a/../../outside"),
        member("abs", tarfile.SYMTYPE, "/etc"), member("up", tarfile.SYMTYPE, "../outside"),
        member("in", tarfile.SYMTYPE, "."), member("in/through"), member("hard", tarfile.LNKTYPE, "../outside"),
        member("fifo", tarfile.FIFOTYPE), member("disk", tarfile.BLKTYPE), member("setuid"),
    ]  # fmt: skip
    try:
        result = await sandbox.files.download("/h", tmp_path / "h")
    finally:
        edge.extra_members = []
    assert set(result.skipped) == {
        "../outside", "/etc/hostile", "a/../../outside", "abs", "up", "in/through", "hard", "fifo", "disk"
    }  # fmt: skip
    assert outside.read_text() == "untouched" and not Path("/etc/hostile").exists()
    assert sorted(os.listdir(tmp_path / "h")) == ["good", "in", "setuid"]
    assert (tmp_path / "h" / "setuid").stat().st_mode & 0o7777 == 0o755


async def test_a_damaged_archive_is_typed(tmp_path: Path) -> None:
    from dsec.sdk.archive import unpack_tree
    from dsec.sdk.errors import FileInvalid

    async def garbage() -> AsyncIterator[bytes]:
        yield b"not a tar" * 1000

    with pytest.raises(FileInvalid, match="damaged"):
        await unpack_tree(garbage(), tmp_path / "g")
    whole = io.BytesIO()
    with tarfile.open(fileobj=whole, mode="w") as tar:
        info = tarfile.TarInfo("f")
        info.size = 100_000
        tar.addfile(info, io.BytesIO(bytes(100_000)))

    async def cut() -> AsyncIterator[bytes]:
        yield whole.getvalue()[:50_000]

    with pytest.raises(FileInvalid):
        await unpack_tree(cut(), tmp_path / "c")


async def test_a_local_file_goes_with_the_length_it_had(tmp_path: Path, sandbox: Sandbox) -> None:
    from dsec.sdk.archive import read_file
    from dsec.sdk.errors import FileInvalid

    local = tmp_path / "f"
    local.write_bytes(b"12345")
    assert b"".join([piece async for piece in read_file(os.fsencode(local), 3)]) == b"123", "it grew meanwhile"
    with pytest.raises(FileInvalid, match="cut short"):
        _ = [piece async for piece in read_file(os.fsencode(local), 6)]
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(FileInvalid, match="neither"):
        await sandbox.files.upload(tmp_path / "fifo", "/f")
