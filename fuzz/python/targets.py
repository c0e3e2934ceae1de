"""What fuzzers feed with bytes, and what must hold whatever the bytes are. Tests replay the corpus with the same functions."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import hashlib
import io
import os
import queue
import shutil
import stat
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

from dsec.layers import Bounds
from dsec.layers.tar import TarReader, apply_tar
from dsec.layers.tree import TreeWriter
from dsec.layers.unpack import Unpacked
from dsec.protocol import link as link_module
from dsec.protocol.errors import Fault
from dsec.protocol.frames import FrameReader, PreambleReader, ProtocolError, pack_frame
from dsec.protocol.link import Call, LinkServer, RecordReader
from dsec.sdk import archive
from dsec.sdk.errors import DSecError

_BLOCK = 512
_CLONE_FS, _CLONE_NEWNS = 0x200, 0x20000
_MS_PRIVATE_REC = 0x44000

# -- the link decoder --


def _cut(data: bytes, sizes: Callable[[], int]) -> tuple[list[tuple[int, int, bytes]], str]:
    """Frames of a stream that comes in pieces, and what was wrong with it."""
    reader, frames, at = FrameReader(), [], 0
    try:
        while at < len(data):
            size = sizes()
            frames += reader.feed(data[at : at + size])
            at += size
    except ProtocolError as error:
        return frames, type(error).__name__
    return frames, ""


class _Transport(asyncio.Transport):
    """What a connection writes, counted."""

    def __init__(self) -> None:
        super().__init__()
        self.written = 0
        self.is_closed = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written += len(data)

    def close(self) -> None:
        self.is_closed = True

    abort = close

    def is_closing(self) -> bool:
        return self.is_closed

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass


async def _echo(call: Call) -> object:
    return {"taken": sum([len(data) async for data in call.data()])}


def _give(connection: asyncio.BufferedProtocol, data: bytes, step: int) -> None:
    while data:
        room = connection.get_buffer(-1)
        size = min(len(room), len(data), step)
        room[:size] = data[:size]
        connection.buffer_updated(size)
        data = data[size:]


_PREAMBLE = b"\xd5ECLK\x01\r\n" + bytes(24)


async def _serve(data: bytes, step: int) -> None:
    """Both sides read it: a server behind a preamble, and a client of which some streams are open."""
    server = LinkServer({"a": _echo, "exec": _echo}, on_error=lambda method, error: _unexpected(error))
    client = link_module._ClientConnection(0)
    for connection, sent in ((link_module._ServerConnection(server), _PREAMBLE + data), (client, data)):
        transport = _Transport()
        connection.connection_made(transport)
        if connection is client:
            client._preamble = None  # its own nonce cannot be guessed
            for _ in range(3):
                client.open("exec", {})
        _give(connection, sent, step)
        await asyncio.sleep(0)
        connection.connection_lost(None)
        assert transport.written <= 64 * len(sent) + 4096, "more is answered than was asked"
    await asyncio.sleep(0)
    await server.close()


def _unexpected(error: Exception) -> None:
    if not isinstance(error, Fault):
        raise AssertionError("a handler saw something else than bytes or a fault") from error


def _loop_error(loop: asyncio.AbstractEventLoop, context: dict[str, object]) -> None:
    _broken.append(context)


_broken: list[dict[str, object]] = []
_loop = asyncio.new_event_loop()
_loop.set_exception_handler(_loop_error)


def link(data: bytes) -> None:
    """Preamble, frames, records, and both sides' rules over them. Cuts in the stream must make no difference."""
    whole, wrong = _cut(data, lambda: 1 << 30)
    state = len(data) | 1

    def piece() -> int:
        nonlocal state
        state = (state * 1_103_515_245 + 12_345) & 0xFFFFFFFF
        return 1 + (state >> 16) % 37

    cut, wrong_cut = _cut(data, piece)
    assert wrong == wrong_cut, "cuts make a difference"
    if wrong:  # those before the fault are handed out only as far as the pieces went
        assert cut == whole[: len(cut)] or whole == cut[: len(whole)]
    else:
        assert cut == whole
    at = 0
    for kind, stream, payload in whole:
        again = pack_frame(kind, stream, payload)  # type: ignore[arg-type]
        assert again == data[at : at + len(again)], "a frame is not what it was made from"
        at += len(again)
    try:
        PreambleReader().feed(data)
        list(RecordReader(dict, 1 << 16).feed(data))
    except (ProtocolError, Fault):
        pass
    _loop.run_until_complete(_serve(data, 1 << 20 if len(data) % 3 else 1 + len(data) % 61))
    assert not _broken, _broken


# -- unpacking --


def _repaired(data: bytes) -> bytes:
    """Check sums that fit, so that changes of a header get further than the header."""
    blocks = bytearray(data)
    for at in range(0, len(blocks) - _BLOCK + 1, _BLOCK):
        if blocks[at + 257 : at + 262] == b"ustar":
            blocks[at + 148 : at + 156] = b" " * 8
            blocks[at + 148 : at + 156] = b"%06o\0 " % sum(blocks[at : at + _BLOCK])
    return bytes(blocks)


class _Cell:
    """A thread whose root is a file system of its own: even a fault could not reach the machine, and would be seen."""

    def __init__(self) -> None:
        self._inputs: queue.SimpleQueue[tuple[Callable[[Path], object], bytes]] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        self._scratch = tempfile.mkdtemp(prefix="dsec-fuzz-")
        threading.Thread(target=self._work, daemon=True).start()
        self._result()
        os.rmdir(self._scratch)  # the thread's own mount over it is seen by nobody else

    def run(self, unpack: Callable[[Path], object]) -> None:
        self._inputs.put((unpack, b""))
        self._result()

    def _result(self) -> None:
        error = self._answers.get()
        if error is not None:
            raise error

    def _work(self) -> None:
        try:
            self._enter()
        except BaseException as error:  # noqa: BLE001 - told to who waits
            self._answers.put(error)
            return
        self._answers.put(None)
        while True:
            unpack, _ = self._inputs.get()
            try:
                self._checked(unpack)
            except BaseException as error:  # noqa: BLE001 - told to who waits
                self._answers.put(error)
            else:
                self._answers.put(None)

    def _enter(self) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        scratch = os.fsencode(self._scratch)
        for done in (
            libc.unshare(_CLONE_FS | _CLONE_NEWNS),
            libc.mount(b"none", b"/", None, _MS_PRIVATE_REC, None),
            libc.mount(b"none", scratch, b"tmpfs", 0, b"size=64m"),
            libc.chroot(scratch),
            libc.chdir(b"/"),
        ):
            if done != 0:
                raise OSError(ctypes.get_errno(), "the unpackers need root")
        os.mkdir("/outside")
        Path("/outside/file").write_bytes(b"contents")
        os.symlink("/target", "/link")

    def _checked(self, unpack: Callable[[Path], object]) -> None:
        before = _outside()
        os.mkdir("/target")
        try:
            unpack(Path("/target"))
            after = _outside()
            assert before == after, f"something outside the target changed: {after}"
        finally:
            shutil.rmtree("/target")


def _outside() -> list[tuple[object, ...]]:
    """Every file outside the target, with all that an escape could change of it."""
    found: list[tuple[object, ...]] = []
    for folder, directories, names in os.walk("/"):
        if folder == "/" and "target" in directories:
            directories.remove("target")
        for name in [*directories, *names]:
            path = os.path.join(folder, name)
            status = os.lstat(path)
            contents = Path(path).read_bytes() if stat.S_ISREG(status.st_mode) else b""
            found.append(
                (path, status.st_mode, status.st_uid, status.st_gid, status.st_nlink, status.st_mtime_ns, contents)
            )
    return sorted(found, key=repr)


_cells: list[_Cell] = []


def _cell() -> _Cell:
    if not _cells:
        _cells.append(_Cell())
    return _cells[0]


def layer_tar(data: bytes) -> None:
    """The layer builder's reader and writer, with and without whiteouts."""
    data = _repaired(data)

    def unpack(target: Path) -> None:
        bounds = Bounds(bytes=1 << 22, entries=1000)
        try:
            with TreeWriter(target, bounds=bounds, keep_whiteouts=bool(len(data) & 1)) as writer:
                source = Unpacked(io.BytesIO(data), "it")  # type: ignore[arg-type]
                apply_tar(TarReader(source, "it"), writer, whiteouts=bool(len(data) & 2))
                writer.finish()
        except Fault:
            pass

    _cell().run(unpack)


def download(data: bytes) -> None:
    """What the SDK unpacks on the machine of its caller."""
    data = _repaired(data)

    def unpack(target: Path) -> None:
        with contextlib.suppress(DSecError):
            archive._unpack(io.BytesIO(data), target)
        for folder, _, names in os.walk(target):
            for name in names:
                path = Path(folder, name)
                if path.is_symlink():
                    end = os.path.normpath(os.path.join(folder, os.readlink(path)))
                    assert end == "/target" or end.startswith("/target/"), f"{path} leads to {end}"

    _cell().run(unpack)


TARGETS: dict[str, tuple[Callable[[bytes], None], str]] = {
    "link": (link, "link"),
    "layer_tar": (layer_tar, "tar"),
    "download": (download, "tar"),
}


def name_of(data: bytes) -> str:
    """An input's file name in the corpus."""
    return hashlib.sha1(data).hexdigest()[:16]
