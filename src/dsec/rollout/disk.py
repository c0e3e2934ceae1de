"""Files of a store: few descriptors for many of them, writes that happen whole or not at all, errors in words."""

from __future__ import annotations

import errno
import os
from collections import Counter, OrderedDict
from contextlib import suppress
from itertools import islice
from pathlib import Path

from dsec.protocol.errors import ErrorKind, Fault

MOST_OPEN = 256
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class Descriptors:
    """Keeps the files that were used last open; opens others again when they are used."""

    def __init__(self, most: int = MOST_OPEN) -> None:
        self._most = most
        self._open: OrderedDict[Path, int] = OrderedDict()
        self._pins: Counter[int] = Counter()
        self._unwanted: set[int] = set()

    def __len__(self) -> int:
        return len(self._open) + len(self._unwanted)

    def use(self, path: Path, flags: int = os.O_RDWR) -> int:
        """An open descriptor; it stays open until the next call, or longer with `pin`."""
        fd = self._open.get(path)
        if fd is not None:
            self._open.move_to_end(path)
            return fd
        fd = os.open(path, flags | os.O_CLOEXEC, 0o600)
        self._open[path] = fd
        if len(self._open) > self._most:
            self._close_oldest(path)
        return fd

    def _close_oldest(self, but: Path) -> None:
        unpinned = (path for path, fd in self._open.items() if fd not in self._pins and path is not but)
        for path in list(islice(unpinned, len(self._open) - self._most)):
            os.close(self._open.pop(path))

    def pin(self, fd: int) -> None:
        """Until the matching `unpin` it is not closed."""
        self._pins[fd] += 1

    def unpin(self, fd: int) -> None:
        self._pins[fd] -= 1
        if not self._pins[fd]:
            del self._pins[fd]
            if fd in self._unwanted:
                self._unwanted.discard(fd)
                os.close(fd)

    def drop(self, path: Path) -> None:
        """The path is another file from now on, or none."""
        fd = self._open.pop(path, None)
        if fd is not None and fd in self._pins:
            self._unwanted.add(fd)
        elif fd is not None:
            os.close(fd)

    def close(self) -> None:
        for fd in (*self._open.values(), *self._unwanted):
            os.close(fd)
        self._open.clear()
        self._unwanted.clear()
        self._pins.clear()


def write_whole(fd: int, data: bytes | memoryview, at: int) -> None:
    """All of it at that place, or the file ends there. OSError."""
    written = os.pwrite(fd, data, at)
    try:
        while written < len(data):
            written += os.pwrite(fd, memoryview(data)[written:], at + written)
    except OSError:
        os.ftruncate(fd, at)
        raise


def replace(path: Path, data: bytes, *, durable: bool) -> None:
    """The file has these bytes, or what it had. OSError."""
    beside = path.with_name(f".{path.name}.new")
    try:
        fd = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            write_whole(fd, data, 0)
            if durable:
                os.fdatasync(fd)
        finally:
            os.close(fd)
        os.rename(beside, path)
    except OSError:
        with suppress(OSError):
            beside.unlink(missing_ok=True)
        raise
    if durable:
        sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """What names it has is durable. OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def unwritten(what: str, error: OSError) -> Fault:
    """no_space when the disk is full, else internal."""
    full = error.errno in _FULL
    return Fault(
        ErrorKind.NO_SPACE if full else ErrorKind.INTERNAL,
        f"{what} cannot be written: {error.strerror or error}",
        hint="make room on the disk of the state directory" if full else "look at the disk of the state directory",
        retryable=full,
    )
