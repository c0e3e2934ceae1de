"""The first message of TLS, read for one thing: which name the client asks for (RFC 8446, 4.1.2; RFC 6066, 3).

Everything is refused that could hide another name: several names, an encrypted ClientHello, an older TLS's formats, a
message that does not end where it says.
"""

from __future__ import annotations

MAX_HELLO = 16 * 1024
_MAX_RECORDS = 16
_MAX_RECORD = 16 * 1024 + 256
_HANDSHAKE, _CLIENT_HELLO = 22, 1
_SERVER_NAME, _HOST_NAME = 0, 0
# encrypted_client_hello and its forerunner ESNI: the name that counts would be inside.
_ENCRYPTED = frozenset((0xFE0D, 0xFFCE, 0xFF02, 0xFF03))

UNRECOGNIZED_NAME, ACCESS_DENIED, DECODE_ERROR = 112, 49, 50


class BadHello(ValueError):
    """Not a ClientHello with exactly one name to go by."""

    def __init__(self, message: str, alert: int = DECODE_ERROR) -> None:
        super().__init__(message)
        self.alert = alert


def alert(description: int) -> bytes:
    """A fatal alert, in the clear: it is what a TLS client shows as the reason."""
    return bytes((21, 3, 3, 0, 2, 2, description))


def server_name(data: bytes | bytearray) -> bytes | None:
    """The name of the ClientHello at the start of `data`; None while it is not all there; BadHello when it is none."""
    message = _message(data)
    return None if message is None else _name(_extensions(message))


class _Cursor:
    """Takes length-prefixed fields off a message."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def take(self, count: int) -> bytes:
        end = self._at + count
        if end > len(self._data):
            raise BadHello("the ClientHello is cut off")
        piece = self._data[self._at : end]
        self._at = end
        return piece

    def number(self, size: int) -> int:
        return int.from_bytes(self.take(size), "big")

    def vector(self, size: int) -> _Cursor:
        return _Cursor(self.take(self.number(size)))

    @property
    def left(self) -> int:
        return len(self._data) - self._at

    def finish(self) -> None:
        if self.left:
            raise BadHello("the ClientHello has bytes after its end")


def _message(data: bytes | bytearray) -> bytes | None:
    """The body of the first handshake message, put together from its records."""
    body = bytearray()
    at = records = 0
    while at < len(data):
        records += 1
        if records > _MAX_RECORDS:
            raise BadHello("the ClientHello is cut into too many records")
        if data[at] != _HANDSHAKE:
            raise BadHello("what was sent is not TLS")
        if len(data) >= at + 2 and data[at + 1] != 3:
            raise BadHello("an unknown version of TLS")
        if len(data) < at + 5:
            return None
        length = int.from_bytes(data[at + 3 : at + 5], "big")
        if not 0 < length <= _MAX_RECORD:
            raise BadHello("a TLS record of impossible length")
        body += data[at + 5 : at + 5 + length]
        at += 5 + length
        if body and body[0] != _CLIENT_HELLO:
            raise BadHello("the first message is no ClientHello")
        if len(body) >= 4:
            wanted = 4 + int.from_bytes(body[1:4], "big")
            if wanted > MAX_HELLO:
                raise BadHello("the ClientHello is too large")
            if len(body) > wanted:
                raise BadHello("something follows the ClientHello in its record")
            if len(body) == wanted and at <= len(data):
                return bytes(body[4:])
    return None


def _extensions(message: bytes) -> list[tuple[int, _Cursor]]:
    hello = _Cursor(message)
    hello.take(2 + 32)  # version, random
    hello.vector(1)  # session id
    hello.vector(2)  # cipher suites
    hello.vector(1)  # compression methods
    if not hello.left:
        raise BadHello("the ClientHello names no server (SNI)", UNRECOGNIZED_NAME)
    block = hello.vector(2)
    hello.finish()
    found: list[tuple[int, _Cursor]] = []
    while block.left:
        kind = block.number(2)
        found.append((kind, block.vector(2)))
    return found


def _name(extensions: list[tuple[int, _Cursor]]) -> bytes:
    kinds = [kind for kind, _ in extensions]
    if len(set(kinds)) != len(kinds):
        raise BadHello("the ClientHello has an extension twice")
    if not _ENCRYPTED.isdisjoint(kinds):
        raise BadHello("the ClientHello is encrypted (ECH), which hides the name", ACCESS_DENIED)
    for kind, body in extensions:
        if kind == _SERVER_NAME:
            names = body.vector(2)
            body.finish()
            if names.number(1) != _HOST_NAME:
                raise BadHello("the ClientHello names its server in an unknown way", UNRECOGNIZED_NAME)
            name = names.vector(2)
            names.finish()
            return name.take(name.left)
    raise BadHello("the ClientHello names no server (SNI)", UNRECOGNIZED_NAME)
