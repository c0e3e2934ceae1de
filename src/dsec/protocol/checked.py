"""Checked records, by which what is written survives the death of its writer and what is broken is noticed.

record = u32 length of payload, u32 crc32 of payload, payload        (little endian)
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator

HEAD = struct.Struct("<II")
MAX_PAYLOAD = 64 * 1024 * 1024
"""Bytes; a longer one is taken for a broken length."""


def pack(payload: bytes) -> bytes:
    return HEAD.pack(len(payload), zlib.crc32(payload)) + payload


def payload_at(data: bytes | memoryview, position: int) -> memoryview | None:
    """Of the record that begins there, or None when it is cut off or does not match its checksum."""
    start = position + HEAD.size
    if start > len(data):
        return None
    length, crc = HEAD.unpack_from(data, position)
    if length > MAX_PAYLOAD or start + length > len(data):
        return None
    payload = memoryview(data)[start : start + length]
    return payload if zlib.crc32(payload) == crc else None


def intact(data: bytes | memoryview, position: int) -> Iterator[tuple[memoryview, int]]:
    """Payloads and where each record ends, up to the first record that is not whole."""
    while (payload := payload_at(data, position)) is not None:
        position += HEAD.size + len(payload)
        yield payload, position
