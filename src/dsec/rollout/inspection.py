"""Looks at a rollout's log and contents from outside, with descriptors of its own, so that any thread may."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import msgspec
from blake3 import blake3

from dsec.protocol.checked import HEAD
from dsec.protocol.errors import ErrorKind, Fault
from dsec.protocol.rollouts import Blob

from .contents import DIGEST
from .logfile import Reading
from .records import BODY, FIRST_LINK, PREFIX, Body, Intent, Outcome


class Verified(msgspec.Struct, frozen=True, kw_only=True):
    """What a check of every byte came to. link: of the last record, hex: it vouches for all of the log; problems: none when
    all is as it was written."""

    steps: int
    records: int
    link: str
    problems: tuple[str, ...]


class _Use(msgspec.Struct, frozen=True):
    """A content of a step."""

    step: int
    name: str
    blob: Blob


def verified(path: Path) -> Verified:
    """Of the rollout that lies there: each record's checksum, the chain of their links, each content's digest. OSError."""
    problems: list[str] = []
    fd = os.open(path / "log", os.O_RDONLY | os.O_CLOEXEC)
    try:
        reading = Reading(fd)
        records = steps = 0
        link = FIRST_LINK
        for body, place in reading.bodies():
            payload = os.pread(fd, place.length - HEAD.size, place.position + HEAD.size)
            if payload[len(PREFIX) : BODY] != link:
                problems.append(f"the record at byte {place.position} does not follow the one before it")
            link = blake3(payload).digest()
            records += 1
            steps += isinstance(body, Intent)
            problems += [problem for use in _uses(body) if (problem := _problem(path, use))]
        if reading.broken is not None:
            problems.append(f"the log is damaged at byte {reading.broken}")
    finally:
        os.close(fd)
    return Verified(steps=steps, records=records, link=link.hex(), problems=tuple(problems))


def _uses(body: Body) -> Iterator[_Use]:
    if isinstance(body, Outcome):
        for group in (body.outputs, body.inputs):
            for name, blob in group.items():
                yield _Use(body.step, name, blob)


def _problem(path: Path, use: _Use) -> str:
    blob = use.blob
    if blob.data is None and not blob.size:
        return ""  # nothing was kept
    where = f"{use.name} of step {use.step} ({blob.digest})"
    try:
        data = blob.data if blob.data is not None else (path / "blobs" / blob.digest).read_bytes()
    except FileNotFoundError:
        return f"{where} is missing"
    if len(data) != blob.size or blake3(data).hexdigest() != blob.digest:
        return f"{where} was altered"
    return ""


def content_path(path: Path, id: str, digest: str) -> Path:
    """See `Trajectory.blob_path`."""
    if DIGEST.fullmatch(digest) is None:
        raise Fault(ErrorKind.INVALID, f"{digest[:80]!r} is not the digest of a content")
    found = path / "blobs" / digest
    if not found.is_file():
        raise _missing(path, id, digest)
    return found


def content(path: Path, id: str, digest: str) -> bytes:
    """See `Trajectory.blob`."""
    try:
        data = content_path(path, id, digest).read_bytes()
    except FileNotFoundError:
        raise _missing(path, id, digest) from None
    except Fault:
        if (use := _used(path, digest)) is not None and use.blob.data is not None:
            return use.blob.data
        raise
    if blake3(data).hexdigest() != digest:
        raise _told(path, id, digest, "is not what was written: its file was altered", ErrorKind.INTERNAL)
    return data


def _missing(path: Path, id: str, digest: str) -> Fault:
    return _told(path, id, digest, "is missing", ErrorKind.NOT_FOUND)


def _told(path: Path, id: str, digest: str, what: str, kind: ErrorKind) -> Fault:
    use = _used(path, digest)
    if use is None:
        return Fault(ErrorKind.NOT_FOUND, f"no step of rollout {id} has a content {digest}", rollout=id)
    if not use.blob.size and use.blob.data is None:
        what, kind = "was not kept", ErrorKind.NOT_FOUND
    return Fault(
        kind,
        f"{use.name} of step {use.step} of rollout {id} ({digest}) {what}",
        hint="the other steps can be had",
        rollout=id,
        step=use.step,
    )


def _used(path: Path, digest: str) -> _Use | None:
    """The first step that has it."""
    if DIGEST.fullmatch(digest) is None:
        return None
    try:
        fd = os.open(path / "log", os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        uses = (use for body, _ in Reading(fd).bodies() for use in _uses(body))
        return next((use for use in uses if use.blob.digest == digest), None)
    finally:
        os.close(fd)
