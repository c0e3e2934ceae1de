"""A look through a directory tree before it becomes an image: counts, limits, and what must not go in as it is."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import msgspec

from dsec.protocol.errors import ErrorKind, Fault

MAX_BYTES = 32 * 1024**3
MAX_ENTRIES = 4_000_000


class Bounds(msgspec.Struct, frozen=True):
    """The most a layer may hold: bytes (sum of file sizes, holes included) and entries. More is a Fault TOO_LARGE."""

    bytes: int = MAX_BYTES
    entries: int = MAX_ENTRIES

    def check(self, size: int, entries: int, what: str) -> None:
        if size > self.bytes:
            raise Fault(
                ErrorKind.TOO_LARGE,
                f"{what} holds more than {self.bytes} bytes",
                hint="raise the bound, or split it into several layers",
                limit=self.bytes,
            )
        if entries > self.entries:
            raise Fault(
                ErrorKind.TOO_LARGE,
                f"{what} holds more than {self.entries} entries",
                hint="raise the bound, or split it into several layers",
                limit=self.entries,
            )


class Survey(msgspec.Struct, frozen=True):
    """entries: everything below the root. size: sum of the sizes of regular files, in bytes, hard links once.

    as_is: nothing needs to be changed before mkfs.erofs reads the tree (see `unfit`).
    """

    entries: int
    size: int
    as_is: bool


def private_attribute(name: str) -> bool:
    """Whether an extended attribute must not reach a layer: overlayfs's own would be obeyed, the others mean nothing there."""
    space, _, rest = name.partition(".")
    return (
        space == "trusted"
        or rest.startswith("overlay.")
        or name in ("security.selinux", "security.ima", "security.evm")
    )


def _unfit(path: bytes, status: os.stat_result) -> bool:
    """Whether this entry needs to be changed: private attributes, or a time before 1970 (the image cannot hold it)."""
    return status.st_mtime_ns < 0 or any(map(private_attribute, os.listxattr(path, follow_symlinks=False)))


def survey(root: Path, bounds: Bounds) -> Survey:
    """Walk `root` without following links. Fault INVALID when it is no directory, TOO_LARGE beyond the bounds."""
    try:
        return _survey(os.fsencode(root), bounds, str(root))
    except OSError as error:
        where = os.fsdecode(error.filename) if error.filename is not None else str(root)
        raise Fault(ErrorKind.INVALID, f"cannot read {where}: {error.strerror}", hint="check the path") from None


def _survey(top: bytes, bounds: Bounds, what: str) -> Survey:
    status = os.lstat(top)
    if not stat.S_ISDIR(status.st_mode):
        raise Fault(ErrorKind.INVALID, f"{what} is not a directory", hint="a tar file is built with `build_tar`")
    entries = size = 0
    as_is = not _unfit(top, status)
    linked: set[tuple[int, int]] = set()
    pending = [top]
    while pending:
        for entry in os.scandir(pending.pop()):
            status = entry.stat(follow_symlinks=False)
            entries += 1
            as_is = as_is and not _unfit(entry.path, status)
            if stat.S_ISDIR(status.st_mode):
                pending.append(entry.path)
            elif stat.S_ISREG(status.st_mode) and (status.st_dev, status.st_ino) not in linked:
                size += status.st_size
                if status.st_nlink > 1:
                    linked.add((status.st_dev, status.st_ino))
            bounds.check(size, entries, what)
    return Survey(entries=entries, size=size, as_is=as_is)
