"""A rollout as JSON lines, for other programs and other times.

    {"head": RolloutInfo, "chain": ...}
    {"step": StepRecord, "contents": {"outputs": {name: {"text" | "b64": ...}}, "inputs": ...}, "chain": ...}     for each step
    {"end": {"steps": n}, "chain": ...}

`chain` is the hex blake3 of the chain before it ("" at first) and of its own line without it (up to the comma, and `}`). So a
line that was changed, dropped or added shows, and one digest, the last one, stands for the whole export.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterable, Iterator

import msgspec
from blake3 import blake3

from .errors import ErrorKind, Fault
from .rollouts import Blob, RolloutInfo, StepRecord

_CHAIN = b',"chain":"'
_TAIL = len(_CHAIN) + 64 + len(b'"}')
_encode = msgspec.json.Encoder().encode

Content = Callable[[Blob], bytes]


class _Text(msgspec.Struct, frozen=True):
    text: str


class _Bytes(msgspec.Struct, frozen=True):
    b64: str


class _Contents(msgspec.Struct, frozen=True, omit_defaults=True):
    outputs: dict[str, _Text | _Bytes] = {}
    inputs: dict[str, _Text | _Bytes] = {}


class _Head(msgspec.Struct, frozen=True):
    head: RolloutInfo


class _Step(msgspec.Struct, frozen=True):
    step: StepRecord
    contents: _Contents


class _Count(msgspec.Struct, frozen=True):
    steps: int


class _End(msgspec.Struct, frozen=True):
    end: _Count


def exported(info: RolloutInfo, steps: Iterable[StepRecord], content: Content) -> Iterator[bytes]:
    """The lines, each with its newline. content fetches what is kept of a blob that is not in its record."""
    chain = b""
    line, chain = _chained(_encode(_Head(info)), chain)
    yield line
    count = 0
    for record in steps:
        line, chain = _chained(_encode(_Step(*_apart(record, content))), chain)
        yield line
        count += 1
    yield _chained(_encode(_End(_Count(count))), chain)[0]


def _apart(record: StepRecord, content: Content) -> tuple[StepRecord, _Contents]:
    """The record without its contents, and these."""

    def bare(blobs: dict[str, Blob]) -> dict[str, Blob]:
        return {name: msgspec.structs.replace(blob, data=None) for name, blob in blobs.items()}

    def shown(blobs: dict[str, Blob]) -> dict[str, _Text | _Bytes]:
        return {
            name: _shown(_kept(blob, content)) for name, blob in blobs.items() if blob.data is not None or blob.size
        }

    return (
        msgspec.structs.replace(record, outputs=bare(record.outputs), inputs=bare(record.inputs)),
        _Contents(shown(record.outputs), shown(record.inputs)),
    )


def _kept(blob: Blob, content: Content) -> bytes:
    return blob.data if blob.data is not None else content(blob)


def _shown(data: bytes) -> _Text | _Bytes:
    try:
        return _Text(data.decode())
    except UnicodeDecodeError:
        return _Bytes(base64.b64encode(data).decode())


def _chained(line: bytes, chain: bytes) -> tuple[bytes, bytes]:
    link = blake3(chain + line).hexdigest().encode()
    return line[:-1] + _CHAIN + link + b'"}\n', link


def check_export(lines: Iterable[bytes]) -> str:
    """The last chain of a whole export; Fault invalid_request names the first line that is not as it was exported."""
    chain, last, number = b"", b"", 0
    for number, whole in enumerate(lines, 1):
        line = whole.rstrip(b"\n")
        bare = line[:-_TAIL] + b"}"
        link = blake3(chain + bare).hexdigest().encode()
        if line != bare[:-1] + _CHAIN + link + b'"}':
            raise Fault(ErrorKind.INVALID, f"line {number} of the export is not as it was exported", line=number)
        chain, last = link, bare
    if not last.startswith(b'{"end":'):
        raise Fault(ErrorKind.INVALID, f"the export ends after line {number}, before its end", line=number)
    return chain.decode()
