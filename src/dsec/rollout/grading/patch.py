"""Changes as one tar stream with whiteouts, for `fs.untar` of a grading sandbox: made as they come, in bounded pieces."""

from __future__ import annotations

from collections.abc import Iterator

from dsec.protocol.specs import Change, ChangeKind

from .ground import Owned

_BLOCK = 512
_LONGEST = 100
_MAX_HEAD = 512 * 1024
"""Of one head of extensions; the reader takes up to 1 MiB."""
END = bytes(2 * _BLOCK)


class PatchWriter:
    """owned: what a deletion must not take with it. mtime: of everything, Unix seconds.

    That is the time of grading: bytecode that the layers brought for an older source of the same size must not pass for that
    of the new one.
    """

    def __init__(self, owned: Owned, mtime: int) -> None:
        self._owned = owned
        self._mtime = mtime

    def entry(self, change: Change) -> Iterator[bytes]:
        """The pieces of one change."""
        parent, _, name = change.path.rpartition(b"/")
        if change.kind is ChangeKind.DELETE:
            yield from self._kept(change.path)
            yield self._head((parent + b"/" if parent else b"") + b".wh." + name, b"0", 0o644, 0)
        elif change.kind is ChangeKind.MKDIR:
            if change.opaque:
                yield from self._kept(change.path)
                yield self._head(change.path + b"/.wh..wh..opq", b"0", 0o644, 0)
            yield self._head(change.path, b"5", change.mode, 0)
        else:
            yield from self.file(change.path, change.data or b"", change.mode)

    def file(self, path: bytes, data: bytes, mode: int) -> Iterator[bytes]:
        yield self._head(path, b"0", mode, len(data))
        yield data
        yield bytes(-len(data) % _BLOCK)

    def _kept(self, directory: bytes) -> Iterator[bytes]:
        """Global heads that name what stays of it."""
        body = b""
        for path in self._owned.below(directory):
            body += _record(b"DSEC.keep", path)
            if len(body) >= _MAX_HEAD:
                yield self._extension(b"g", body)
                body = b""
        if body:
            yield self._extension(b"g", body)

    def _head(self, path: bytes, flag: bytes, mode: int, size: int) -> bytes:
        if len(path) <= _LONGEST:
            return _block(path, flag, mode, size, self._mtime)
        return self._extension(b"x", _record(b"path", path)) + _block(path[-_LONGEST:], flag, mode, size, self._mtime)

    def _extension(self, flag: bytes, body: bytes) -> bytes:
        return _block(b"extended", flag, 0o644, len(body), self._mtime) + body + bytes(-len(body) % _BLOCK)


def _record(key: bytes, value: bytes) -> bytes:
    """`length key=value\\n`; the length counts itself."""
    rest = b" " + key + b"=" + value + b"\n"
    length = len(rest) + 1
    while len(str(length)) + len(rest) != length:
        length = len(str(length)) + len(rest)
    return str(length).encode() + rest


def _number(value: int, width: int) -> bytes:
    """Octal with a NUL, or base 256 where that is too short."""
    if value < 8 ** (width - 1):
        return f"{value:0{width - 1}o}\0".encode()
    return bytes((0x80,)) + value.to_bytes(width - 1, "big")


def _block(name: bytes, flag: bytes, mode: int, size: int, mtime: int) -> bytes:
    block = bytearray(_BLOCK)
    block[: len(name)] = name
    block[100:108] = _number(mode, 8)
    block[108:124] = _number(0, 8) * 2
    block[124:136] = _number(size, 12)
    block[136:148] = _number(mtime, 12)
    block[148:156] = b" " * 8
    block[156:157] = flag
    block[257:265] = b"ustar\x0000"
    block[148:156] = f"{sum(block):06o}\0 ".encode()
    return bytes(block)
