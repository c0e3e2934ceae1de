"""The bytes of the link: preamble and frames, without any I/O. docs/link.md describes them byte by byte."""

from __future__ import annotations

import struct
import threading
from enum import IntEnum

MAGIC = b"\xd5ECLK\x01\r\n"
PREAMBLE_SIZE = 32
MAX_PAYLOAD = 1024 * 1024
MAX_NOTE = 64 * 1024
MAX_PING = 64
DATA_CHUNK = 256 * 1024 + 1  # the payload of DATA: a channel, and whole pages of bytes
STREAM_CREDIT = 1024 * 1024
CONNECTION_CREDIT = 16 * 1024 * 1024
MAX_GARBAGE = 1024 * 1024
MAX_DEPTH = 16
MAX_ELEMENTS = 65_536
MAX_CHANNEL = 2
HEADER = 9
READ_AT_ONCE = 64 * 1024

_HEAD = struct.Struct("<IBI")
_unpack_head = _HEAD.unpack_from
_PREAMBLE = struct.Struct("<8s16sQ")


class FrameType(IntEnum):
    OPEN = 1
    DATA = 2
    END = 3
    REPLY = 4
    ERROR = 5
    CREDIT = 6
    CANCEL = 7
    PING = 8
    PONG = 9
    NOTE = 10


_LIMITS = {
    FrameType.OPEN: (1, MAX_PAYLOAD),
    FrameType.DATA: (1, MAX_PAYLOAD),
    FrameType.END: (0, 0),
    FrameType.REPLY: (1, MAX_PAYLOAD),
    FrameType.ERROR: (1, MAX_PAYLOAD),
    FrameType.CREDIT: (4, 4),
    FrameType.CANCEL: (0, 0),
    FrameType.PING: (0, MAX_PING),
    FrameType.PONG: (0, MAX_PING),
    FrameType.NOTE: (1, MAX_NOTE),
}


# Which frames belong to the connection (stream 0) and which to a stream; CREDIT and NOTE may be either.
_CONNECTION_ONLY = (FrameType.PING, FrameType.PONG)
_EITHER = (FrameType.CREDIT, FrameType.NOTE)
# By type as plain numbers, since this is looked at for each frame: least and most bytes, may be on stream 0, on another.
_RULES = {
    int(kind): (low, high, kind in _CONNECTION_ONLY or kind in _EITHER, kind not in _CONNECTION_ONLY)
    for kind, (low, high) in _LIMITS.items()
}
_NO_RULE = (1, -1, False, False)
_DATA = int(FrameType.DATA)


class ProtocolError(Exception):
    """The peer broke the rules of docs/link.md; the connection is closed."""


def pack_preamble(nonce: bytes, epoch: int) -> bytes:
    return _PREAMBLE.pack(MAGIC, nonce, epoch)


def pack_head(kind: FrameType, stream: int, size: int) -> bytes:
    """What comes before a payload of `size` bytes."""
    return _HEAD.pack(5 + size, kind, stream)


def pack_frame(kind: FrameType, stream: int, payload: bytes = b"") -> bytes:
    return _HEAD.pack(5 + len(payload), kind, stream) + payload


class PreambleReader:
    """Finds the next preamble in a byte stream, dropping what comes before its magic."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._dropped = 0

    def feed(self, data: bytes) -> tuple[bytes, int] | None:
        """(nonce, epoch) once a preamble is complete; the bytes after it are in `rest()`."""
        self._buffer += data
        found = self._buffer.find(MAGIC)
        # Without the magic, all but the last 7 bytes can never become part of one.
        drop = found if found >= 0 else max(0, len(self._buffer) - len(MAGIC) + 1)
        if drop:
            del self._buffer[:drop]
            self._dropped += drop
            if self._dropped > MAX_GARBAGE:
                raise ProtocolError("no preamble in the first MiB")
        if found < 0 or len(self._buffer) < PREAMBLE_SIZE:
            return None
        _, nonce, epoch = _PREAMBLE.unpack_from(self._buffer)
        del self._buffer[:PREAMBLE_SIZE]
        return nonce, epoch

    def rest(self) -> bytes:
        """The bytes after the last preamble; the reader is empty then."""
        rest = bytes(self._buffer)
        self._buffer.clear()
        return rest


Frames = list[tuple[int, int, memoryview]]  # type, stream id, payload


class FrameReader:
    """Cuts a byte stream into frames, checking length and type before anything is kept.

    Bytes come straight from a socket: `room` says where to put them, `filled` how many there are. A long frame that has begun
    gets a place of its own; everything else passes through one buffer that all readers of a thread share, so the payloads that
    `filled` hands out are good until the next bytes are read.
    """

    def __init__(self) -> None:
        self._rest = (
            bytearray()
        )  # the frame that has begun, `_have` bytes of `_needed`, and room for the head of the next
        self._have = self._needed = 0

    def room(self) -> memoryview:
        return memoryview(self._rest)[self._have :] if self._rest else _shared.view

    def filled(self, size: int) -> Frames:
        """The frames that `size` bytes written to `room` complete."""
        if not self._rest:
            return self._cut(_shared.view[:size])
        self._have += size
        if self._have < self._needed:
            if self._needed == HEADER:
                _plausible(memoryview(self._rest)[: self._have])
            return []
        view, self._rest = memoryview(self._rest)[: self._have], bytearray()
        return self._cut(view)

    def feed(self, data: bytes) -> list[tuple[int, int, bytes]]:
        """The same for bytes that are there already."""
        frames: list[tuple[int, int, bytes]] = []
        while data:
            room = self.room()
            size = min(len(room), len(data))
            room[:size] = data[:size]
            frames += ((kind, stream, bytes(payload)) for kind, stream, payload in self.filled(size))
            data = data[size:]
        return frames

    def _cut(self, view: memoryview) -> Frames:
        frames: Frames = []
        position, end = 0, len(view)
        needed = HEADER
        while end - position >= HEADER:
            length, kind, stream = _unpack_head(view, position)
            low, high, on_connection, on_stream = _RULES.get(kind, _NO_RULE)
            if not low <= length - 5 <= high:
                raise ProtocolError(f"frame of type {kind} with length {length}")
            if not (on_stream if stream else on_connection):
                raise ProtocolError(f"frame of type {kind} on stream {stream}")
            after = position + 4 + length
            if end < after:
                needed = 4 + length
                break
            payload = view[position + HEADER : after]
            if kind == _DATA and payload[0] > MAX_CHANNEL:
                raise ProtocolError(f"DATA on channel {payload[0]}")
            frames.append((kind, stream, payload))
            position = after
        if position < end:
            _plausible(view[position:])
            self._keep(view[position:], needed)
        return frames

    def _keep(self, begun: memoryview, needed: int) -> None:
        self._rest = bytearray(needed + HEADER)
        self._rest[: len(begun)] = begun
        self._have, self._needed = len(begun), needed


def _plausible(begun: memoryview) -> None:
    """A length that cannot be is known before the rest of its head is there."""
    if len(begun) >= 4 and not 5 <= int.from_bytes(begun[:4], "little") <= MAX_PAYLOAD + 5:
        raise ProtocolError("impossible length")


class _Shared(threading.local):
    """An event loop reads one socket at a time."""

    def __init__(self) -> None:
        self.view = memoryview(bytearray(READ_AT_ONCE))


_shared = _Shared()
