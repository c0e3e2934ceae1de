"""Reading tar archives: ustar, pax, GNU long names and sparse files, as a stream and with bounded memory.

Our own reader, because names must stay bytes, an extended header must not be read into memory whatever size it claims,
and everything odd must be refused instead of guessed.
"""

from __future__ import annotations

import stat
import struct
from collections.abc import Iterator
from enum import Enum

import msgspec

from dsec.layers.tree import Metadata, Piece, TreeWriter, hostile, parse_name
from dsec.layers.unpack import Unpacked
from dsec.protocol.errors import ErrorKind, Fault

_BLOCK = 512
_STEP = 1 << 20
_MAX_EXTENDED = 1 << 20  # bytes of one pax or long-name header
_MAX_EXTENDED_RUN = 16  # of them before one entry
_MAX_PIECES = 1 << 18
_MAX_TRAILER = 64 << 20
_HEADER = struct.Struct("100s8s8s8s12s12s8sc100s8s32s32s8s8s155s12x")

_WHITEOUT = b".wh."
_OPAQUE = b".wh..wh..opq"
_AUFS = b".wh..wh."

Extended = dict[str, bytes]
Spans = tuple[tuple[int, int], ...]  # (offset, length) of stored bytes


class Type(Enum):
    FILE = b"0"
    HARD_LINK = b"1"
    SYMLINK = b"2"
    CHAR_DEVICE = b"3"
    BLOCK_DEVICE = b"4"
    DIRECTORY = b"5"
    FIFO = b"6"


class Entry(msgspec.Struct, frozen=True):
    """size: of the file once unpacked; spans: where its stored bytes go, (offset, length), in order."""

    name: bytes
    type: Type
    metadata: Metadata
    target: bytes = b""
    device: int = 0
    size: int = 0
    spans: Spans = ()


class TarReader:
    """Iterates over the entries; `pieces` gives the contents of the entry that came last.

    `whole`: it is known from elsewhere that nothing is cut off, so a missing end mark is no fault.
    """

    def __init__(self, source: Unpacked, what: str, *, whole: bool = False) -> None:
        self._source = source
        self._what = what
        self._whole = whole
        self._left = 0  # stored bytes of the current entry not yet read
        self._padding = 0
        self._global: Extended = {}

    def __iter__(self) -> Iterator[Entry]:
        while (entry := self._next()) is not None:
            yield entry
        self._source.drain(_MAX_TRAILER)

    def pieces(self, entry: Entry) -> Iterator[Piece]:
        for offset, length in entry.spans:
            while length:
                data = self._take(min(length, _STEP))
                yield Piece(offset, data)
                offset, length = offset + len(data), length - len(data)

    # -- headers ------------------------------------------------------------------------------------------------------

    def _next(self) -> Entry | None:
        extended: Extended = {}
        for _ in range(_MAX_EXTENDED_RUN):
            self._skip()
            block = self._source.read(_BLOCK)
            if not block or block == bytes(_BLOCK):
                self._check_end(block)
                return None
            header = self._header(block)
            if header.type == b"x" or header.type == b"X":
                extended |= _pax_records(self._extended(header), self._what)
            elif header.type == b"g":
                self._global |= _pax_records(self._extended(header), self._what)
            elif header.type == b"L":
                extended["path"] = self._extended(header).rstrip(b"\0")
            elif header.type == b"K":
                extended["linkpath"] = self._extended(header).rstrip(b"\0")
            else:
                return self._entry(header, self._global | extended, block)
        raise self._bad("has too many extended headers in a row")

    def _header(self, block: bytes) -> _Header:
        if len(block) < _BLOCK:
            raise self._bad("is cut off in a header")
        fields = _HEADER.unpack(block)
        unsigned = sum(block) - sum(block[148:156]) + 8 * 32
        if _number(fields[6], self._what) != unsigned:
            raise self._bad("has a header whose check sum is wrong, or is no tar archive")
        header = _Header.of(fields, self._what)
        if header.size < 0:
            raise self._bad("has an entry of negative size")
        return header

    def _extended(self, header: _Header) -> bytes:
        if header.size > _MAX_EXTENDED:
            raise self._bad(f"has an extended header of {header.size} bytes; at most {_MAX_EXTENDED} are possible")
        self._left, self._padding = header.size, -header.size % _BLOCK
        return self._take(header.size)

    def _entry(self, header: _Header, extended: Extended, block: bytes) -> Entry:
        name = extended.get("GNU.sparse.name") or extended.get("path") or header.name
        kind = self._type(header, name)
        stored = _decimal(extended["size"], self._what) if "size" in extended else header.size
        if kind is not Type.FILE:
            stored = 0
        self._left, self._padding = stored, -stored % _BLOCK
        size = stored
        spans: Spans = ((0, stored),)
        if header.type == b"S":
            size, spans = self._old_sparse(block)
        elif any(key.startswith("GNU.sparse.") for key in extended):
            size, spans = self._pax_sparse(extended, stored)
        self._check_spans(size, spans)
        device = 0
        if kind in (Type.CHAR_DEVICE, Type.BLOCK_DEVICE):
            device = header.device
        return Entry(
            name=name,
            type=kind,
            metadata=_metadata(header, extended, self._what),
            target=extended.get("linkpath") or header.target,
            device=device,
            size=size,
            spans=spans,
        )

    def _type(self, header: _Header, name: bytes) -> Type:
        if header.type in (b"0", b"\0", b"7", b"S"):
            return Type.DIRECTORY if name.endswith(b"/") and header.type != b"S" else Type.FILE
        try:
            return Type(header.type)
        except ValueError:
            raise self._bad(f"has an entry of the unknown type {header.type!r}") from None

    # -- sparse files -------------------------------------------------------------------------------------------------

    def _old_sparse(self, block: bytes) -> tuple[int, Spans]:
        """The map of the old GNU format: four spans in the header, 21 in each block that follows it."""
        spans = self._span_fields(block[386:482])
        more = block[482] != 0
        size = _number(block[483:495], self._what)
        while more:
            following = self._source.read(_BLOCK)
            if len(following) < _BLOCK or len(spans) > _MAX_PIECES:
                raise self._bad("has a sparse file whose map has no end")
            spans += self._span_fields(following[:504])
            more = following[504] != 0
        return size, tuple(spans)

    def _span_fields(self, data: bytes) -> list[tuple[int, int]]:
        pairs = (data[at : at + 24] for at in range(0, len(data), 24))
        found = [
            (_number(pair[:12], self._what), _number(pair[12:], self._what)) for pair in pairs if pair.strip(b"\0")
        ]
        return [(offset, length) for offset, length in found if length]

    def _pax_sparse(self, extended: Extended, stored: int) -> tuple[int, Spans]:
        """The maps of the pax formats: in the records (0.1), or at the start of the stored bytes (1.0)."""
        size = _decimal(
            extended.get("GNU.sparse.realsize") or extended.get("GNU.sparse.size") or b"%d" % stored, self._what
        )
        if "GNU.sparse.map" in extended:
            numbers = [_decimal(number, self._what) for number in extended["GNU.sparse.map"].split(b",") if number]
        elif extended.get("GNU.sparse.major") == b"1":
            numbers = self._leading_map()
        else:
            raise self._bad("has a sparse file in a format that is not known (GNU pax 0.0)")
        if len(numbers) % 2 or len(numbers) > 2 * _MAX_PIECES:
            raise self._bad("has a sparse file whose map is malformed")
        pairs = zip(numbers[::2], numbers[1::2], strict=True)
        return size, tuple((offset, length) for offset, length in pairs if length)

    def _leading_map(self) -> list[int]:
        text = b""
        wanted = 1
        while text.count(b"\n") < wanted:
            if len(text) > _MAX_EXTENDED * 8:
                raise self._bad("has a sparse file whose map has no end")
            text += self._take(_BLOCK)
            if wanted == 1 and b"\n" in text:
                wanted = 1 + 2 * _decimal(text.partition(b"\n")[0], self._what)
        return [_decimal(number, self._what) for number in text.split(b"\n")[1:wanted]]

    def _check_spans(self, size: int, spans: Spans) -> None:
        """The spans must be in order, apart, within the file, and use up exactly what is stored."""
        end = total = 0
        for offset, length in spans:
            if offset < end or length < 0:
                raise self._bad("has a sparse file whose map overlaps")
            end = offset + length
            total += length
        if end > size or total != self._left:
            raise self._bad("has a sparse file whose map does not fit its size")

    # -- bytes --------------------------------------------------------------------------------------------------------

    def _take(self, size: int) -> bytes:
        """Stored bytes of the current entry."""
        if size > self._left:
            raise self._bad("has an entry that is shorter than its map")
        data = self._source.read(size)
        if len(data) < size:
            raise self._bad("is cut off in an entry")
        self._left -= size
        return data

    def _skip(self) -> None:
        """Go to the end of the current entry's blocks."""
        while self._left:
            self._take(min(self._left, _STEP))
        if self._padding and len(self._source.read(self._padding)) < self._padding:
            raise self._bad("is cut off in an entry")
        self._padding = 0

    def _check_end(self, block: bytes) -> None:
        if not block and not self._whole:
            raise self._bad("has no end mark: it is empty or cut off")

    def _bad(self, why: str) -> Fault:
        return Fault(ErrorKind.INVALID, f"{self._what} {why}", hint="get or make the archive again")


class _Header(msgspec.Struct, frozen=True):
    name: bytes
    mode: int
    uid: int
    gid: int
    size: int
    mtime: int
    type: bytes
    target: bytes
    device: int

    @classmethod
    def of(cls, fields: tuple[bytes, ...], what: str) -> _Header:
        name, mode, uid, gid, size, mtime, _, kind, target, magic, _, _, major, minor, prefix = fields
        full = _text(name)
        if magic[:6] == b"ustar\0" and prefix[0]:  # GNU's own format has other things there
            full = _text(prefix) + b"/" + full
        device = 0
        if kind in (b"3", b"4"):
            device = _device(_number(major, what), _number(minor, what), what)
        numbers = [_number(field, what) for field in (mode, uid, gid, size, mtime)]
        return cls(full, numbers[0], numbers[1], numbers[2], numbers[3], numbers[4], kind, _text(target), device)


def _device(major: int, minor: int, what: str) -> int:
    if not (0 <= major < 1 << 12 and 0 <= minor < 1 << 20):
        raise Fault(ErrorKind.INVALID, f"{what} has a device node with impossible numbers", hint="repack the archive")
    return (minor & 0xFF) | (major << 8) | ((minor & ~0xFF) << 12)


def _text(field: bytes) -> bytes:
    return field.partition(b"\0")[0]


def _number(field: bytes, what: str) -> int:
    """Octal digits, or GNU's base 256 when the highest bit is set."""
    if field[0] & 0x80:
        value = int.from_bytes(bytes([field[0] & 0x7F]) + field[1:], "big")
        return value - (1 << (8 * len(field) - 1)) if field[0] & 0x40 else value
    digits = field.strip(b" \0").split(b"\0")[0].strip()
    try:
        return int(digits, 8) if digits else 0
    except ValueError:
        raise Fault(ErrorKind.INVALID, f"{what} has a malformed header", hint="get or make the archive again") from None


def _decimal(digits: bytes, what: str) -> int:
    if not digits.isdigit() or len(digits) > 19:
        raise Fault(
            ErrorKind.INVALID, f"{what} has a malformed number {digits[:32]!r}", hint="get or make the archive again"
        )
    return int(digits)


def _pax_records(data: bytes, what: str) -> Extended:
    """`LENGTH KEY=VALUE\\n` records; the last of a key counts."""
    records: Extended = {}
    while data:
        length, space, _ = data[:32].partition(b" ")
        size = _decimal(length, what)
        record = data[len(length) + 1 : size]
        key, equals, value = record.partition(b"=")
        if not space or not equals or size > len(data) or not value.endswith(b"\n"):
            raise Fault(ErrorKind.INVALID, f"{what} has a malformed pax header", hint="get or make the archive again")
        records[key.decode(errors="surrogateescape")] = value[:-1]
        data = data[size:]
    return records


def _metadata(header: _Header, extended: Extended, what: str) -> Metadata:
    mtime_ns = header.mtime * 10**9
    if "mtime" in extended:
        mtime_ns = _nanoseconds(extended["mtime"], what)
    uid = _decimal(extended["uid"], what) if "uid" in extended else header.uid
    gid = _decimal(extended["gid"], what) if "gid" in extended else header.gid
    if not (0 <= uid < 2**32 - 1 and 0 <= gid < 2**32 - 1):
        raise Fault(ErrorKind.INVALID, f"{what} has an entry with an impossible owner", hint="repack the archive")
    space = "SCHILY.xattr."
    attributes = {key.removeprefix(space): value for key, value in extended.items() if key.startswith(space)}
    return Metadata(mode=header.mode & 0o7777, uid=uid, gid=gid, mtime_ns=mtime_ns, attributes=attributes)


def _nanoseconds(text: bytes, what: str) -> int:
    """Decimal seconds, with a fraction and a sign, exactly."""
    whole, _, fraction = text.lstrip(b"-").partition(b".")
    value = _decimal(whole or b"0", what) * 10**9
    value += _decimal(fraction[:9].ljust(9, b"0"), what) if fraction else 0
    return -value if text.startswith(b"-") else value


def apply_tar(reader: TarReader, writer: TreeWriter, *, whiteouts: bool) -> None:
    """Put every entry into the tree. whiteouts: `.wh.NAME` removes NAME, `.wh..wh..opq` hides a directory's former contents."""
    for entry in reader:
        name = parse_name(entry.name)
        if whiteouts and name and name[-1].startswith(_WHITEOUT):
            _apply_whiteout(name, entry.name, writer)
        elif entry.type is Type.FILE:
            writer.file(name, entry.metadata, entry.size, reader.pieces(entry))
        elif entry.type is Type.DIRECTORY:
            writer.directory(name, entry.metadata)
        elif entry.type is Type.SYMLINK:
            writer.symlink(name, entry.metadata, entry.target)
        elif entry.type is Type.HARD_LINK:
            writer.hard_link(name, parse_name(entry.target))
        else:
            kind = {Type.CHAR_DEVICE: stat.S_IFCHR, Type.BLOCK_DEVICE: stat.S_IFBLK, Type.FIFO: stat.S_IFIFO}[
                entry.type
            ]
            writer.special(name, entry.metadata, kind, entry.device)


def _apply_whiteout(name: tuple[bytes, ...], path: bytes, writer: TreeWriter) -> None:
    directory, last = name[:-1], name[-1]
    if last == _OPAQUE:
        writer.opaque(directory)
    elif not last.startswith(_AUFS):  # other marks of aufs mean nothing outside it
        hidden = last.removeprefix(_WHITEOUT)
        if hidden in (b"", b".", b".."):
            raise hostile(path, "is a whiteout of no possible name")
        writer.remove((*directory, hidden))
