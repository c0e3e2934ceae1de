"""Reads a log from end to end, or from where its summary ends."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from dsec.protocol.checked import payload_at

from .known import Index, Known, Summary
from .logfile import Reading, salvaged
from .records import LINK, Body, Head, Intent, Outcome


class Scan(msgspec.Struct, frozen=True):
    """What was found. size, link: of what is whole; end: size of the file. contents: digests that records speak of; with
    index, None where only the end was read."""

    known: Known
    size: int
    link: bytes
    end: int
    index: Index | None = None
    contents: frozenset[str] | None = None


def whole(fd: int, id: str) -> Scan:
    """All of the log of the rollout `id`. OSError."""
    known, index = Known(id), Index()
    reading = Reading(fd)
    broken = reading.broken
    contents: set[str] = set()
    for body, place in reading.bodies():
        if not _follows(body, known):
            broken = place.position
            break
        known.apply(body, place.length)
        index.apply(body, place)
        if isinstance(body, Outcome):
            contents.update(blob.digest for blob in (*body.outputs.values(), *body.inputs.values()))
    broken = reading.broken if broken is None else broken
    if broken is not None:
        known.broken()
        if not known.begun:
            _name_again(fd, known, broken)
    return Scan(known, reading.size, reading.link, reading.end, index, frozenset(contents))


def _name_again(fd: int, known: Known, position: int) -> None:
    """The second head says whose log this is, when the first cannot be read."""
    for body in salvaged(fd, position):
        if isinstance(body, Head) and body.id == known.id:
            known.apply(body, 0)
            return


def since(fd: int, summary: Summary) -> Scan | None:
    """What was written after the summary; None when it does not go on from there, or is damaged. OSError."""
    known = Known.of(summary)
    reading = Reading(fd, summary.size, summary.link)
    if reading.end < summary.size:
        return None  # it lost something
    if reading.size < reading.end and summary.link not in os.pread(fd, 2 * LINK, summary.size):
        return None  # the first record names another one before it
    for body, place in reading.bodies():
        if not _follows(body, known):
            return None
        known.apply(body, place.length)
    return None if reading.broken is not None else Scan(known, reading.size, reading.link, reading.end)


def _follows(body: Body, known: Known) -> bool:
    """Whether a record can come next."""
    if isinstance(body, Head):
        return body.id == known.id and not known.epoch
    if isinstance(body, Intent):
        return body.step == known.steps
    if isinstance(body, Outcome):
        return 0 <= body.step < known.steps
    return known.begun


def summary_in(path: Path) -> Summary | None:
    """Of the rollout that lies there; None: there is none, or none that is whole."""
    try:
        payload = payload_at((path / "summary").read_bytes(), 0)
        return None if payload is None else _decode(payload)
    except (OSError, msgspec.MsgspecError):
        return None


_decode = msgspec.msgpack.Decoder(Summary).decode
