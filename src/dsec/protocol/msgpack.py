"""Is a payload one well-formed MessagePack value within the link's bounds? (docs/link.md, frames)

The peer may be hostile (an aether runs beside untrusted code), so this is asked before anything is decoded into objects of ours.
"""

from __future__ import annotations

import msgspec

from .frames import MAX_DEPTH, MAX_ELEMENTS, ProtocolError

_decode = msgspec.msgpack.Decoder().decode
_raw = msgspec.msgpack.Decoder(msgspec.Raw).decode

# (bytes of the length field, bytes an element) of the headers that carry a length
_SIZED = {0xC4: 1, 0xC5: 2, 0xC6: 4, 0xD9: 1, 0xDA: 2, 0xDB: 4}
_CONTAINERS = {0xDC: (2, 1), 0xDD: (4, 1), 0xDE: (2, 2), 0xDF: (4, 2)}
_FIXED = {0xC0: 0, 0xC2: 0, 0xC3: 0, 0xCA: 4, 0xCB: 8, 0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8, 0xD0: 1, 0xD1: 2, 0xD2: 4,
          0xD3: 8, 0xD4: 2, 0xD5: 3, 0xD6: 5, 0xD7: 9, 0xD8: 17}  # fmt: skip
_EXT = {0xC7: 1, 0xC8: 2, 0xC9: 4}


def check(payload: bytes) -> None:
    """ProtocolError unless payload is one value, nested at most 16 deep, with at most 65,536 elements in a container."""
    try:
        if len(payload) <= MAX_ELEMENTS:  # too short to hold too many elements: the decoder's C code does the rest
            _check_depth(_decode(payload), 0)
        else:
            _walk(payload)
            _raw(payload)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError, TypeError) as error:
        raise ProtocolError(f"malformed msgpack: {error}") from error


def _check_depth(value: object, depth: int) -> None:
    if isinstance(value, dict | list):
        if depth == MAX_DEPTH:
            raise ProtocolError("msgpack nested too deep")
        for item in value.values() if isinstance(value, dict) else value:
            if isinstance(item, dict | list):
                _check_depth(item, depth + 1)


def _walk(payload: bytes) -> None:
    """Headers only, without making objects; the bounds are checked as each container is met."""
    position = 0
    open_containers = [1]  # values still to come at each level; the outermost is the payload itself
    while open_containers:
        if open_containers[-1] == 0:
            open_containers.pop()
            continue
        open_containers[-1] -= 1
        if position >= len(payload):
            raise ProtocolError("msgpack cut off")
        code = payload[position]
        position += 1
        count = -1
        if code <= 0x7F or code >= 0xE0:
            continue
        if code <= 0x8F:
            count = 2 * (code & 0x0F)
        elif code <= 0x9F:
            count = code & 0x0F
        elif code <= 0xBF:
            position += code & 0x1F
        elif code in _FIXED:
            position += _FIXED[code]
        elif code in _SIZED or code in _EXT:
            width = _SIZED.get(code) or _EXT[code]
            position += width + int.from_bytes(payload[position : position + width]) + (code in _EXT)
        elif code in _CONTAINERS:
            width, values = _CONTAINERS[code]
            size = int.from_bytes(payload[position : position + width])
            if size > MAX_ELEMENTS:
                raise ProtocolError("msgpack container too large")
            position += width
            count = size * values
        else:
            raise ProtocolError(f"msgpack code {code:#x}")
        if count >= 0:
            if len(open_containers) > MAX_DEPTH:
                raise ProtocolError("msgpack nested too deep")
            open_containers.append(count)
    if position != len(payload):
        raise ProtocolError("bytes behind the msgpack value")
