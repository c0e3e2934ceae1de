"""Files on real sandboxes: exact bytes and names, atomic writes, typed errors, and nothing that hangs or leads out."""

from __future__ import annotations

import asyncio
import os
import stat
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest
from benchmarks import processes

import dsec
from dsec import DSecClient, DSecContainerRunArgs, FileInfo, FileKind, InvalidRequest, NoSpace, Sandbox, TooLarge
from dsec.cluster import embedded
from dsec.protocol.ids import edge_of

from .conftest import BASE

pytestmark = pytest.mark.e2e
MIB = 1 << 20
BIG_MIB = int(os.environ.get("DSEC_TEST_FILE_MIB", "192"))  # 2048 for the whole truth
FLAT_MB = 32
ODD = (b"a b", b"\n", b"-rf", b"\xff\xc3", b"x" * 255, "grün".encode(), b"'\"$(id)`", b"*", b" ", b"...")


def args(**more: object) -> DSecContainerRunArgs:
    return DSecContainerRunArgs(BASE, **more)  # type: ignore[arg-type]


SAME = """
import os
block = open("/block", "rb").read()
with open("/big", "rb") as file:
    assert all(file.read(len(block)) == block for _ in range(int(os.environ["COUNT"]))) and not file.read(1)
"""


@asynccontextmanager
async def observed(
    platform: embedded.Endpoint, client: DSecClient, *, disk_limit_mb: int = 4096
) -> AsyncIterator[tuple[Sandbox, Callable[[], float]]]:
    """A sandbox, and how far the resident set of any process that its files go through has risen above what it was, in MB."""
    async with client.run(args()) as first:
        edge = edge_of(first.id) or ""
    before = processes.agents(edge)
    async with client.run(args(disk_limit_mb=disk_limit_mb)) as sandbox:
        await sandbox.files.write("/warm", os.urandom(MIB))
        assert len(await sandbox.files.read("/warm")) == MIB
        (aether,) = processes.agents(edge) - before
        peaks = [processes.ResidentPeak(pid) for pid in processes.roles(platform.state, aether).values()]
        yield sandbox, lambda: max(peak.grown_mb() for peak in peaks)


async def shell(sandbox: Sandbox, line: str) -> str:
    return (await sandbox.run_shell(line, check=True)).text


# -- much, in little memory ----------------------------------------------------------------------------------------------


async def test_large_files_take_no_memory_anywhere(platform: embedded.Endpoint, client: DSecClient) -> None:
    block = os.urandom(MIB)

    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(BIG_MIB):
            yield block

    async with observed(platform, client, disk_limit_mb=4 * BIG_MIB) as (sandbox, grown_mb):

        async def drained(path: str) -> int:
            return sum([len(piece) async for piece in sandbox.files.stream(path)])

        assert await sandbox.files.write("/big", pieces()) == BIG_MIB * MIB
        assert await drained("/big") == BIG_MIB * MIB
        await shell(sandbox, f"truncate -s {BIG_MIB}M /sparse")
        assert await drained("/sparse") == BIG_MIB * MIB
        assert grown_mb() < FLAT_MB
        await sandbox.files.write("/block", block)
        await sandbox.exec(["python3", "-c", SAME], env={"COUNT": str(BIG_MIB)}, check=True)


async def test_reading_a_whole_file_is_capped_before_it_costs_anything(
    platform: embedded.Endpoint, sandbox: Sandbox
) -> None:
    await shell(sandbox, "truncate -s 50G /sparse; echo -n tail >> /sparse")
    peak = processes.ResidentPeak(os.getpid())
    with pytest.raises(TooLarge, match="1024 MiB") as caught:
        await sandbox.files.read("/sparse")
    assert "files.stream" in caught.value.hint and peak.grown_mb() < FLAT_MB
    end = 50 << 30
    assert await sandbox.files.read("/sparse", offset=end - 2) == b"\0\0tail"
    assert await sandbox.files.read("/sparse", offset=end + 1, length=2) == b"ai"
    assert await sandbox.files.read("/sparse", offset=end + 100) == b""
    assert await sandbox.files.read("/sparse", offset=0, length=0) == b""


async def test_a_hundred_thousand_entries(platform: embedded.Endpoint, client: DSecClient) -> None:
    async with observed(platform, client) as (sandbox, grown_mb):
        await shell(sandbox, "mkdir -p /many/d; cd /many; seq 100000 | xargs touch; touch d/below")
        found = await sandbox.files.list("/many", depth=2)
        assert grown_mb() < 2 * FLAT_MB, "of which the list itself is most, here in the caller"
    assert {entry.path for entry in found} == {b"/many/%d" % n for n in range(1, 100_001)} | {
        b"/many/d",
        b"/many/d/below",
    }
    assert len(found) == 100_002


# -- writing -------------------------------------------------------------------------------------------------------------


async def test_a_reader_sees_the_old_or_the_new_and_nothing_else(sandbox: Sandbox) -> None:
    size = 2 * MIB
    await sandbox.files.write("/f", b"0" * size)
    watcher = await sandbox.start(
        ["python3", "-c", "import os\nwhile not os.path.exists('/stop'):\n data = open('/f').read()\n"
         f" assert len(data) == {size} and len(set(data)) == 1, 'half a file'"]
    )  # fmt: skip
    for number in range(20):
        await sandbox.files.write("/f", str(number % 10).encode() * size)
    await sandbox.files.write("/stop", b"")
    assert (await watcher.wait()).ok
    assert await shell(sandbox, "ls -A / | grep dsec; true") == ""


async def test_a_writer_that_breaks_off_leaves_the_old_file_and_no_other(sandbox: Sandbox) -> None:
    await sandbox.files.write("/d/f", b"old")
    begun = asyncio.Event()

    async def stuck() -> AsyncIterator[bytes]:
        yield b"new" * MIB
        begun.set()
        await asyncio.Event().wait()

    writing = asyncio.create_task(sandbox.files.write("/d/f", stuck()))
    await begun.wait()
    async with asyncio.timeout(20):
        while await shell(sandbox, "ls -A /d") == "f\n":  # the first bytes are on their way
            pass
        writing.cancel()
        while await shell(sandbox, "ls -A /d") != "f\n":
            pass
    assert await sandbox.files.read("/d/f") == b"old"

    async def broken() -> AsyncIterator[bytes]:
        yield b"new" * MIB
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await sandbox.files.write("/d/f", broken())
    async with asyncio.timeout(20):
        while await shell(sandbox, "ls -A /d") != "f\n":
            pass
    assert await sandbox.files.read("/d/f") == b"old"


async def test_mode_owner_and_parents(sandbox: Sandbox) -> None:
    files = sandbox.files
    await files.write("/a/b/c/f", "x", mode=0o4751, owner="games:daemon")
    assert await shell(sandbox, "stat -c '%a %U %G' /a/b/c/f /a/b") == "4751 games daemon\n755 root root\n"
    await files.write("/a/b/c/f", "y")
    assert await shell(sandbox, "stat -c '%a %U %G' /a/b/c/f") == "4751 games daemon\n", "as writing in place would"
    await files.write("/a/n", "x", mode=0)
    assert await shell(sandbox, "stat -c %a /a/n") == "0\n"
    await files.write("/a/12", "x", owner="12345:54321")
    assert await shell(sandbox, "stat -c '%u %g' /a/12") == "12345 54321\n"
    with pytest.raises(dsec.DSecError, match="no-such"):
        await files.write("/a/x", "x", owner="no-such")
    with pytest.raises(NotADirectoryError):
        await files.write("/a/n/below", "x")
    with pytest.raises(dsec.FileError):
        await files.write("/" + "y" * 256, "x")
    await files.mkdir("/a/m", mode=0o1777)
    assert await shell(sandbox, "stat -c %a /a/m") == "1777\n"
    await files.mkdir("/a/m")
    with pytest.raises(FileExistsError):
        await files.mkdir("/a/m", parents=False)
    with pytest.raises(FileNotFoundError):
        await files.mkdir("/no/m", parents=False)
    with pytest.raises(NotADirectoryError):
        await files.mkdir("/a/n")


async def test_permissions_are_those_of_who_asks(sandbox: Sandbox) -> None:
    files = sandbox.files
    await shell(
        sandbox,
        "mkdir -m 700 /secret; echo s > /secret/s; echo r > /r; chmod 600 /r; mkdir -m 777 /open; echo w > /w; ln /r /open/r",
    )
    await files.write("/open/theirs", "x", user="nobody")
    assert (await files.stat("/open/theirs")).uid == 65534
    for refused in (
        files.read("/r", user="nobody"),
        files.stat("/secret/s", user="nobody"),
        files.list("/secret", user="nobody"),
        files.write("/secret/n", "", user="nobody"),
        files.write("/w", "", user="nobody"),
        files.write("/open/r", "", user="nobody"),
        files.mkdir("/n", user="nobody"),
        files.move("/w", "/open/w", user="nobody"),
        files.remove("/w", user="nobody"),
        files.remove("/secret", recursive=True, user="65534:65534"),
    ):
        with pytest.raises(PermissionError):
            await refused
    with pytest.raises(dsec.DSecError, match="no-such"):
        await files.read("/r", user="no-such")
    assert await files.read("/r") == b"r\n" and await shell(sandbox, "cat /w /secret/s") == "w\ns\n"


async def test_a_full_disk_is_typed_everywhere(client: DSecClient, tmp_path: Path) -> None:
    (tmp_path / "big").write_bytes(os.urandom(MIB) * 40)
    async with client.run(args(disk_limit_mb=20)) as sandbox:
        await sandbox.files.write("/kept", b"old")
        for refused in (sandbox.files.write("/kept", os.urandom(MIB) * 40), sandbox.files.upload(tmp_path, "/tree")):
            with pytest.raises(NoSpace):
                await refused
        assert await sandbox.files.read("/kept") == b"old"
        await sandbox.files.remove("/tree", recursive=True)
        await sandbox.files.write("/after", os.urandom(4 * MIB))
        assert await shell(sandbox, "find / -xdev -name '.dsec-*'") == ""


# -- what is no regular file ---------------------------------------------------------------------------------------------


async def test_fifos_sockets_devices_and_directories_hang_nobody(sandbox: Sandbox, tmp_path: Path) -> None:
    await shell(sandbox, "mkdir /s; cd /s; mkfifo fifo; ln -s fifo to-fifo; ln -s /dev/zero zero; mkdir dir; echo f > file; "
                "python3 -c 'import socket; socket.socket(socket.AF_UNIX).bind(\"sock\")'")  # fmt: skip
    files = sandbox.files
    async with asyncio.timeout(60):
        for name in ("fifo", "to-fifo", "zero", "sock", "dir", "/dev/zero", "/dev/null", "/dev/tty"):
            path = os.path.join("/s", name)
            with pytest.raises(dsec.FileError):
                await files.read(path)
            with pytest.raises(dsec.FileError):
                await files.write(path, "x")
            assert await files.exists(path)
        kinds = {entry.path.rpartition(b"/")[2]: entry.kind for entry in await files.list("/s")}
        assert kinds == {
            b"fifo": FileKind.FIFO, b"sock": FileKind.SOCKET, b"dir": FileKind.DIRECTORY, b"file": FileKind.FILE,
            b"to-fifo": FileKind.SYMLINK, b"zero": FileKind.SYMLINK,
        }  # fmt: skip
        assert (await files.stat("/dev/zero")).kind is FileKind.CHAR_DEVICE
        result = await files.download("/s", tmp_path / "s")
        assert sorted(os.listdir(tmp_path / "s")) == ["dir", "file", "to-fifo"] and set(result.skipped) == {"zero"}
        assert await shell(sandbox, "stat -c %F /s/fifo /s/sock") == "fifo\nsocket\n", "untouched"


async def test_links_lead_nowhere_but_inside(sandbox: Sandbox) -> None:
    marker = Path("/tmp/dsec-outside-of-every-sandbox")
    marker.write_text("outside")
    try:
        links = {
            "host": marker, "up": f"../../../../../..{marker}", "loop": "loop", "a": "b", "b": "a", "root": "/proc/self/root",
            "one": "/proc/1/root", "fd": "/proc/self/fd/0", "cwd": "/proc/self/cwd", "dangling": "dangling-target", "ok": "real",
            "dirlink": "/l",
        }  # fmt: skip
        await shell(
            sandbox, "mkdir /l; cd /l; echo in > real; " + "; ".join(f"ln -s {to} {at}" for at, to in links.items())
        )
        files = sandbox.files
        for name in ("host", "up"):
            with pytest.raises(FileNotFoundError):
                await files.read(f"/l/{name}")
        for name in ("loop", "a", f"root{marker}", f"one{marker}", "fd", "cwd/../etc/passwd"):
            with pytest.raises(dsec.FileError):
                await files.read(f"/l/{name}")
            with pytest.raises(dsec.FileError):
                await files.write(f"/l/{name}", "x")
        with pytest.raises(dsec.FileError):
            await files.write("/l/../l/root/etc/new", "x")
        assert await files.read("/l/dirlink/ok") == b"in\n"
        await files.write("/l/ok", "through")
        assert await shell(sandbox, "cat /l/real; readlink /l/ok") == "throughreal\n", (
            "a link is written through, as by a shell"
        )
        await files.write("/l/dangling", "made")
        assert await shell(sandbox, "cat /l/dangling-target") == "made"
        await files.write("/l/host", "inside")
        assert marker.read_text() == "outside" and await shell(sandbox, f"cat {marker}") == "inside"
        with pytest.raises(PermissionError):
            await files.read("/proc/self/environ")
        await files.remove("/l/dirlink", recursive=True)
        assert await files.exists("/l/real"), "of a link only the link goes"
    finally:
        marker.unlink()


# -- names and trees -----------------------------------------------------------------------------------------------------


async def test_odd_names_survive_everything(sandbox: Sandbox, tmp_path: Path) -> None:
    files = sandbox.files
    for number, name in enumerate(ODD):
        await files.write(b"/n/" + name, str(number))
    assert {entry.path for entry in await files.list("/n")} == {b"/n/" + name for name in ODD}
    for number, name in enumerate(ODD):
        assert await files.read(b"/n/" + name) == str(number).encode()
        assert (await files.stat(b"/n/" + name)).path == b"/n/" + name
    await files.download("/n", tmp_path / "n")
    assert set(os.listdir(os.fsencode(tmp_path / "n"))) == set(ODD)
    await files.upload(tmp_path / "n", b"/up/\xfe\n")
    assert {entry.path for entry in await files.list(b"/up/\xfe\n")} == {b"/up/\xfe\n/" + name for name in ODD}
    for name in ODD:
        await files.move(b"/n/" + name, b"/m-" + name[:250])
        await files.remove(b"/m-" + name[:250])
    for bad in ("", "a\0b", "x" * 5000):
        with pytest.raises(dsec.FileError):
            await files.read(bad)


def tree(top: bytes) -> dict[bytes, tuple[object, ...]]:
    """Everything below a directory: kinds, modes, contents, targets, which names are one file."""
    found: dict[bytes, tuple[object, ...]] = {}
    first: dict[int, bytes] = {}
    for folder, directories, names in os.walk(top):
        for name in sorted([*directories, *names]):
            path = os.path.join(folder, name)
            shown, about = os.path.relpath(path, top), os.lstat(path)
            what: object = None
            if stat.S_ISLNK(about.st_mode):
                found[shown] = ("link", os.readlink(path))
                continue
            if stat.S_ISREG(about.st_mode):
                what = Path(os.fsdecode(path)).read_bytes()
            twin = first.setdefault(about.st_ino, shown) if stat.S_ISREG(about.st_mode) else shown
            found[shown] = (
                stat.S_IFMT(about.st_mode),
                stat.S_IMODE(about.st_mode),
                what,
                twin,
                int(about.st_mtime) if what else 0,
            )
    return found


async def test_trees_come_back_as_they_went(sandbox: Sandbox, tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "empty").mkdir(parents=True)
    (source / "deep" / "er").mkdir(parents=True)
    (source / "deep").chmod(0o750)
    (source / "big").write_bytes(os.urandom(3 * MIB + 17))
    (source / "script").write_text("#!/bin/sh\n")
    (source / "script").chmod(0o755)
    (source / "nothing").touch()
    os.link(source / "script", source / "deep" / "er" / "same")
    (source / "to-dir").symlink_to("deep")
    (source / "deep" / "up").symlink_to("../script")
    (source / "dangling").symlink_to("not-there")
    os.utime(source / "script", (1_000_000_000, 1_000_000_000))
    for name in ODD:
        Path(os.fsdecode(os.fsencode(source) + b"/deep/" + name)).write_bytes(name)
    files = sandbox.files
    await files.upload(source, "/t")
    assert await shell(sandbox, "stat -c %Y /t/script; stat -c %h /t/script; find /t | wc -l; stat -c %U /t/big") == (
        f"1000000000\n2\n{1 + len(tree(os.fsencode(source))) + 1}\nroot\n"  # one name has a newline in it
    )
    await files.download("/t", tmp_path / "back")
    assert tree(os.fsencode(tmp_path / "back")) == tree(os.fsencode(source))
    await files.upload(source, "/t")  # over itself
    await files.download("/t", tmp_path / "back")
    assert tree(os.fsencode(tmp_path / "back")) == tree(os.fsencode(source))


async def test_a_download_writes_inside_its_target_only(sandbox: Sandbox, tmp_path: Path) -> None:
    line = "mkdir -p /h/sub; cd /h; ln -s /tmp abs; ln -s ../../x rel; ln -s sub fine; ln -s fine/../.. sly; echo x > sub/f"
    await shell(sandbox, f"{line}; echo set > suid; chmod 6755 suid; mkdir -m 0 locked")
    victim = tmp_path / "victim"
    victim.write_text("victim")
    target = tmp_path / "target"
    target.mkdir()
    (target / "sub").symlink_to(tmp_path)  # stands where a directory comes
    (target / "suid").symlink_to(victim)
    result = await sandbox.files.download("/h", target)
    assert {"abs", "rel", "sly"} <= set(result.skipped), result.skipped
    assert victim.read_text() == "victim" and not (tmp_path / "f").exists()
    assert (target / "suid").read_text() == "set\n" and not (target / "suid").is_symlink()
    assert stat.S_IMODE((target / "suid").lstat().st_mode) == 0o755


async def test_moving(sandbox: Sandbox) -> None:
    files = sandbox.files
    await files.write("/a", "a")
    await files.write("/dev/shm/b", "b", mode=0o640, owner="games")
    await files.move("/a", "/dev/shm/a")
    await files.move("/dev/shm/b", "/b")
    assert await shell(sandbox, "cat /dev/shm/a /b; stat -c '%a %U' /b; ls -A /dev/shm") == "ab640 games\na\n"
    await files.move("/b", "/dev/shm/a")
    assert await files.read("/dev/shm/a") == b"b" and not await files.exists("/b")
    await files.mkdir("/d/sub")
    await files.write("/f", "f")
    for source, target, error in (
        ("/missing", "/x", FileNotFoundError),
        ("/f", "/missing/x", FileNotFoundError),
        ("/f", "/d", IsADirectoryError),
        ("/d", "/f", NotADirectoryError),
        ("/d", "/d/sub/in", dsec.FileError),
        ("/d", "/etc", FileExistsError),
    ):
        with pytest.raises(error):
            await files.move(source, target)
    await files.move("/d", "/e")
    assert await shell(sandbox, "ls -d /e/sub; cat /f") == "/e/sub\nf"


DEEP = 10_000
MAKE_DEEP = f"""
import os
os.mkdir("/deep")
os.chdir("/deep")
for _ in range({DEEP}):
    os.mkdir("d")
    os.chdir("d")
open("end", "w").write("end")
"""


async def test_ten_thousand_directories_deep(platform: embedded.Endpoint, client: DSecClient) -> None:
    async with observed(platform, client) as (sandbox, grown_mb):
        await sandbox.exec(["python3", "-c", MAKE_DEEP], check=True)
        found = await sandbox.files.list("/deep", depth=300)
        assert len(found) == 300 and found[-1].path == b"/deep" + b"/d" * 300
        ends = 0
        async with sandbox.files._transport.stream(
            "GET", f"{sandbox.files._path}/archive", query={"path": "/deep"}, target=sandbox.files._target
        ) as answer:
            async for piece in answer.content.iter_any():
                ends += piece.count(b"/end")
        assert ends >= 1, "the tar goes down to the end"
        async with asyncio.timeout(60):
            await sandbox.files.remove("/deep", recursive=True)
        assert not await sandbox.files.exists("/deep") and grown_mb() < FLAT_MB


async def test_removing_what_changes_meanwhile(sandbox: Sandbox) -> None:
    await shell(
        sandbox,
        "for i in $(seq 300); do mkdir -p /t/$i/a/b; touch /t/$i/a/b/{1..20}; done; mkdir /out; touch /out/safe",
    )
    busy = await sandbox.start(
        "exec 2>/dev/null; i=0; while [ ! -e /stop ]; do i=$((i+1)); d=/t/$((i%300)); mkdir -p $d/a/b; touch $d/a/b/n$i; "
        "mv $d/a /t/moved$i; ln -sfn /out $d/link; done"
    )
    async with asyncio.timeout(60):
        for _ in range(5):
            with suppress(
                dsec.FileError
            ):  # filled again and again, or moved from under the walk: typed, and never outside
                await sandbox.files.remove("/t", recursive=True)
            with suppress(dsec.FileError):
                await sandbox.files.list("/t", depth=4)
        await sandbox.files.write("/stop", "")
        await busy.wait()
        if await sandbox.files.exists("/t"):
            await sandbox.files.remove("/t", recursive=True)
    assert await sandbox.files.exists("/out/safe") and not await sandbox.files.exists("/t")
    with pytest.raises(FileNotFoundError):
        await sandbox.files.remove("/t", recursive=True)


async def test_files_that_change_while_they_are_read(sandbox: Sandbox, tmp_path: Path) -> None:
    await shell(sandbox, "mkdir /c; head -c 300M /dev/zero | tr '\\0' x > /c/f")
    stream = sandbox.files.stream("/c/f")
    first = await anext(stream)
    await shell(sandbox, "head -c 1000 /dev/null > /c/f; echo short > /c/f; : > /c/growing")
    rest = b"".join([piece async for piece in stream])
    assert len(first) + len(rest) < 300 << 20, "an end, not an error and not invented bytes"
    assert set(first) == {ord("x")}
    grower = await sandbox.start("while [ ! -e /stop ]; do head -c 1M /dev/zero; done >> /c/growing")
    async with asyncio.timeout(60):
        while (await sandbox.files.stat("/c/growing")).size < 8 * MIB:
            pass
        size = sum([len(piece) async for piece in sandbox.files.stream("/c/growing")])
        assert size >= 8 * MIB, "as long as it was when it was opened, so it comes to an end"
        result = await sandbox.files.download("/c", tmp_path / "c")
        assert result.files == 2
        await sandbox.files.write("/stop", "")
        await grower.wait()


# -- HTTP ----------------------------------------------------------------------------------------------------------------


async def test_compressed_bodies_are_refused_not_stored(sandbox: Sandbox) -> None:
    transport = sandbox.files._transport
    await transport.open()
    assert transport._session is not None
    url = transport.url(sandbox.files._path, {"path": "/gz"})
    async with transport._session.put(url, data=b"\x1f\x8b", headers={"Content-Encoding": "gzip"}) as answer:
        assert answer.status == 400 and "Content-Encoding" in await answer.text()
    assert not await sandbox.files.exists("/gz")
    assert isinstance(await sandbox.files.stat("/"), FileInfo)
    with pytest.raises(InvalidRequest):
        await sandbox.files.read("/etc/passwd", offset=-1)


async def test_relative_paths_start_where_commands_do(client: DSecClient) -> None:
    async with client.run(args(workdir="/srv")) as sandbox:
        await sandbox.run_shell("mkdir sub; pwd > sub/mark", user="root", check=True)
        for user in ("root", "nobody", "4242"):
            assert (await sandbox.run_shell("cat mark; pwd", cwd="sub", user=user)).text == "/srv\n/srv/sub\n"
            assert await sandbox.files.read_text("sub/mark", user=user) == "/srv\n"
        with pytest.raises(FileNotFoundError, match="nowhere"):
            await sandbox.run_shell("true", cwd="nowhere")
