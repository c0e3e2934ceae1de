"""Compressed streams: told apart by their first bytes, read with bounded memory."""

from __future__ import annotations

import bz2
import gzip
import hashlib
import io
import lzma
import os
import stat
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol, cast

import zstandard

from dsec.protocol.errors import ErrorKind, Fault

_STEP = 1 << 18
_HEAD = 512  # a tar header, to tell formats apart
_XZ_MEMORY = 512 << 20  # what `xz -9` needs is 65 MiB; a header may claim 4 GiB
_ZSTD_WINDOW = 128 << 20  # `zstd --long=27`


class Source(Protocol):
    """What an archive is read from: a file, a pipe, the body of a request."""

    def read(self, size: int, /) -> bytes: ...


def open_regular(path: Path) -> io.FileIO:
    """Open a regular file to read; anything else (a FIFO would block, a device never end) is a Fault INVALID."""
    try:
        file = io.FileIO(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC))
    except OSError as error:
        raise Fault(ErrorKind.INVALID, f"cannot read {path}: {error.strerror}", hint="check the path") from None
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise Fault(ErrorKind.INVALID, f"{path} is not a regular file", hint="check the path")
    return file


class Hashing(io.RawIOBase):
    """Passes a source on and hashes (sha256) what went through."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._hasher = hashlib.sha256()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]
        data = self._source.read(len(buffer))
        buffer[: len(data)] = data
        self._hasher.update(data)
        return len(data)

    def digest(self) -> str:
        return "sha256:" + self._hasher.hexdigest()


class _Xz(io.RawIOBase):
    """xz (and lzma) with a limit on memory, which lzma.LZMAFile does not offer; concatenated streams are one."""

    def __init__(self, source: io.BufferedReader[io.RawIOBase]) -> None:
        self._source = source
        self._decoder = lzma.LZMADecompressor(memlimit=_XZ_MEMORY)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]
        data = b""
        while not data:
            if self._decoder.eof:
                following = self._next_stream()
                if not following:
                    return 0
                self._decoder = lzma.LZMADecompressor(memlimit=_XZ_MEMORY)
                data = self._decoder.decompress(following, len(buffer))
                continue
            more = self._source.read1(_STEP) if self._decoder.needs_input else b""
            if self._decoder.needs_input and not more:
                raise EOFError("the xz stream ends early")
            data = self._decoder.decompress(more, len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def _next_stream(self) -> bytes:
        """The first bytes of the stream after this one (zeros between them are padding), empty at the end."""
        rest = self._decoder.unused_data.lstrip(b"\0")
        while not rest:
            more = self._source.read1(_STEP)
            if not more:
                return b""
            rest = more.lstrip(b"\0")
        return rest


class _Whole(io.RawIOBase):
    """Bytes that were read already, then the rest of the stream."""

    def __init__(self, head: bytes, rest: io.BufferedReader[io.RawIOBase]) -> None:
        self._head = head
        self._rest = rest

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]
        data, self._head = self._head[: len(buffer)], self._head[len(buffer) :]
        data = data or self._rest.read1(len(buffer))
        buffer[: len(data)] = data
        return len(data)


class Unpacked:
    """A reader of the decompressed bytes; every kind of damage is the same Fault INVALID."""

    def __init__(self, raw: io.RawIOBase, what: str) -> None:
        self._what = what
        self._packed = io.BufferedReader(raw, _STEP)
        with self._damage():
            self._stream = _decoder(self._packed)

    def read(self, size: int) -> bytes:
        """Exactly `size` bytes, fewer only at the end."""
        parts: list[bytes] = []
        with self._damage():
            while size > 0 and (part := self._stream.read(min(size, _STEP))):
                parts.append(part)
                size -= len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def drain(self, limit: int) -> None:
        """Read to the end, so that check sums are checked and a hash is of the whole; Fault beyond `limit` bytes."""
        while part := self.read(_STEP):
            limit -= len(part)
            if limit < 0:
                raise Fault(ErrorKind.INVALID, f"{self._what} has other data after the archive", hint="repack it")
        while self._packed.read(_STEP):
            pass

    @contextmanager
    def _damage(self) -> Iterator[None]:
        try:
            yield
        except (EOFError, gzip.BadGzipFile, zlib.error, lzma.LZMAError, zstandard.ZstdError) as error:
            raise self._damaged(str(error)) from None
        except OSError as error:
            if error.errno is None:  # bz2 says OSError("Invalid data stream")
                raise self._damaged(str(error)) from None
            raise

    def _damaged(self, why: str) -> Fault:
        return Fault(ErrorKind.INVALID, f"{self._what} is cut off or damaged: {why}", hint="get or make it again")


def _decoder(packed: io.BufferedReader[io.RawIOBase]) -> Source:
    head = packed.read(_HEAD)
    stream = io.BufferedReader(cast(io.RawIOBase, _Whole(head, packed)), _STEP)
    if head[257:262] == b"ustar":  # a plain archive, even if its first name looks like something else
        return stream
    if head.startswith(b"\x1f\x8b"):
        return gzip.GzipFile(fileobj=stream)
    if head.startswith((b"\xfd7zXZ\0", b"\x5d\0\0")):
        return io.BufferedReader(_Xz(stream), _STEP)
    if head.startswith(b"\x28\xb5\x2f\xfd"):
        return zstandard.ZstdDecompressor(max_window_size=_ZSTD_WINDOW).stream_reader(stream, read_across_frames=True)
    if head.startswith(b"BZh"):
        return bz2.BZ2File(stream)
    return stream
