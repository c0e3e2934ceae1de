"""The file of one trajectory: what is appended to it, what is read from it, and what became of its bytes.

An end that was cut off while it was written (by the death of the process or of the machine) is cut away; that is how every
log may end. Anything else that is not as it was written is damage: someone or something changed the file. Then nothing is
cut, and nothing is written any more, since what followed was told to somebody, too.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import msgspec
from blake3 import blake3

from dsec.protocol.checked import HEAD, MAX_PAYLOAD, payload_at
from dsec.protocol.errors import ErrorKind, Fault

from .disk import Descriptors, replace, unwritten, write_whole
from .records import BODY, FIRST_LINK, MAGIC, PREFIX, Body, Head, body_of, packed

_WINDOW = 256 * 1024


class Place(NamedTuple):
    """A record in the file: its first byte, and the length of all of it."""

    position: int
    length: int


class Broken(Exception):
    """The bytes of a log at `position` are not what was written there."""

    def __init__(self, position: int) -> None:
        super().__init__(f"byte {position}")
        self.position = position


class LogFile:
    """Bytes and records of one log, `size` of them and up to the link `link`."""

    def __init__(self, path: Path, files: Descriptors, size: int = 0, link: bytes = FIRST_LINK) -> None:
        self.path, self._files, self.size, self.link = path, files, size, link
        self._ragged = False

    def fd(self) -> int:
        """Open; see `Descriptors.use`. OSError."""
        return self._files.use(self.path)

    def begin(self, head: Head) -> None:
        """A new file. The head is there twice: with it goes the name of all the rest. OSError."""
        self._files.drop(self.path)
        data, link = _joined([head, head], FIRST_LINK)
        fd = self._files.use(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        write_whole(fd, data, 0)
        self.size, self.link = len(data), link

    def append(self, body: Body) -> Place:
        """One record, whole or not at all, in the file when it returns. Fault no_space, internal, too_large."""
        data, link = packed(self.link, body)
        if len(data) > HEAD.size + MAX_PAYLOAD:
            raise Fault(ErrorKind.TOO_LARGE, f"a record of {len(data)} bytes is longer than a trajectory log takes")
        place = Place(self.size, len(data))
        try:
            fd = self.fd()
            if self._ragged:
                os.ftruncate(fd, self.size)
                self._ragged = False
            write_whole(fd, data, self.size)
        except OSError as error:
            self._mend()
            raise unwritten(f"the trajectory log {self.path}", error) from None
        self.size += len(data)
        self.link = link
        return place

    def _mend(self) -> None:
        """After a failed write: no half of a record may stay in front of the next one."""
        self._ragged = True
        with suppress(OSError):
            os.ftruncate(self.fd(), self.size)
            self._ragged = False

    def rewrite(self, bodies: list[Body]) -> list[Place]:
        """Only these, durable, in a file that takes the old one's place. Fault no_space, internal; then all is as it was."""
        data, link = _joined(bodies, FIRST_LINK)
        try:
            replace(self.path, data, durable=True)
        except OSError as error:
            raise unwritten(f"the trajectory log {self.path}", error) from None
        self._files.drop(self.path)
        self.size, self.link, self._ragged = len(data), link, False
        places = []
        position = len(MAGIC)
        for _ in bodies:
            length = HEAD.size + HEAD.unpack_from(data, position)[0]
            places.append(Place(position, length))
            position += length
        return places

    def window(self) -> Window:
        """For reading up to what is written now."""
        return Window(self.fd(), self.size)


def _joined(bodies: list[Body], link: bytes) -> tuple[bytes, bytes]:
    parts = [MAGIC]
    for body in bodies:
        data, link = packed(link, body)
        parts.append(data)
    return b"".join(parts), link


class Window:
    """Reads a file forwards in large pieces. Valid while its descriptor is open."""

    def __init__(self, fd: int, end: int) -> None:
        self._fd, self._end = fd, end
        self._at, self._data = 0, memoryview(b"")

    def bytes(self, position: int, length: int) -> memoryview:
        """Fewer at the end of the file. OSError."""
        start = position - self._at
        if start < 0 or start + length > len(self._data):
            if position >= self._end:
                return memoryview(b"")
            wanted = min(max(length, _WINDOW), self._end - position)
            self._at, self._data = position, memoryview(os.pread(self._fd, wanted, position))
            start = 0
        return self._data[start : start + length]

    def payload(self, position: int) -> memoryview:
        """Of the record there. Broken."""
        head = self.bytes(position, HEAD.size)
        if len(head) == HEAD.size:
            length, _ = HEAD.unpack(head)
            if BODY < length <= MAX_PAYLOAD:
                payload = payload_at(self.bytes(position, HEAD.size + length), 0)
                if payload is not None and payload[: len(PREFIX)] == PREFIX:
                    return payload
        raise Broken(position)

    def body(self, position: int) -> Body:
        """Broken."""
        try:
            return body_of(self.payload(position))
        except msgspec.MsgspecError:
            raise Broken(position) from None


class Reading:
    """Goes through a log record by record; afterwards `size` and `link` are those of what is whole, and `broken` says
    where damage begins. An end that was cut off in writing is not damage, and lies behind `size`."""

    def __init__(self, fd: int, size: int = 0, link: bytes = FIRST_LINK) -> None:
        """Goes on behind the first `size` bytes, whose link is `link`; 0: from the beginning."""
        self._fd, self.size, self.link = fd, size, link
        self.end = os.fstat(fd).st_size
        self.broken: int | None = None

    def bodies(self) -> Iterator[tuple[Body, Place]]:
        """OSError."""
        window = Window(self._fd, self.end)
        if self.size == 0 and not self._begun(window):
            return
        last: memoryview | None = None
        while self.size < self.end:
            try:
                payload = window.payload(self.size)
                body = body_of(payload)
            except (Broken, msgspec.MsgspecError):
                if not _cut_off(window, self.size, self.end):
                    self.broken = self.size
                break
            last, place = payload, Place(self.size, HEAD.size + len(payload))
            self.size += place.length
            yield body, place
        if last is not None:
            self.link = blake3(last).digest()

    def _begun(self, window: Window) -> bool:
        """Whether there is anything to read behind the magic."""
        magic = bytes(window.bytes(0, len(MAGIC)))
        if len(magic) < len(MAGIC) and MAGIC.startswith(magic):
            return False
        self.size = len(MAGIC)
        if magic != MAGIC:
            self.broken = 0
        return magic == MAGIC


def salvaged(fd: int, position: int) -> Iterator[Body]:
    """Whole records behind damage, wherever they begin. OSError."""
    for payload in _whole_in(os.pread(fd, HEAD.size + MAX_PAYLOAD, position)):
        with suppress(msgspec.MsgspecError):
            yield body_of(payload)


def _whole_in(rest: bytes) -> Iterator[memoryview]:
    """Payloads of whole records at any place of these bytes."""
    at = rest.find(PREFIX, HEAD.size)
    while at >= 0:
        payload = payload_at(rest, at - HEAD.size)
        if payload is not None and len(payload) > BODY:
            yield payload
        at = rest.find(PREFIX, at + 1)


def _cut_off(window: Window, position: int, end: int) -> bool:
    """Whether the bytes from there to the end are a record, or several, that were being written when all ended."""
    if end - position > HEAD.size + MAX_PAYLOAD:
        return False
    rest = bytes(window.bytes(position, end - position))
    if len(rest) < HEAD.size or not rest.strip(b"\0"):
        return True  # zeros: the size of the file reached the disk before its bytes
    length, crc = HEAD.unpack_from(rest)
    if HEAD.size + length <= len(rest):
        return False  # all of it is there, and it is wrong
    if zlib.crc32(rest[HEAD.size :]) == crc:
        return False  # all of it is there, and its length is wrong
    return next(_whole_in(rest), None) is None
