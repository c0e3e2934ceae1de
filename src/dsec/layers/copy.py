"""Copying a directory of this machine into a tree: for what cannot become an image as it lies there."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator

from dsec.layers.scan import private_attribute
from dsec.layers.tree import Metadata, Name, Piece, TreeWriter

_STEP = 1 << 20
_OPAQUE_BELOW = ("user.overlay.opaque", "trusted.overlay.opaque")


def copy_tree(source: bytes, writer: TreeWriter, *, upper: bool) -> None:
    """Copy everything below `source`. upper: it is the upper directory of an overlay, so its opaque directories stay so."""
    linked: dict[tuple[int, int], Name] = {}
    pending: list[Name] = [()]
    while pending:
        where = pending.pop()
        directory = os.path.join(source, *where)
        status = os.lstat(directory)
        writer.directory(where, _metadata(directory, status))
        if upper and where and _is_opaque(directory):
            writer.opaque(where)
        for entry in sorted(os.scandir(directory), key=lambda entry: entry.name):
            name = (*where, entry.name)
            if entry.is_dir(follow_symlinks=False):
                pending.append(name)
            else:
                _copy_leaf(entry.path, name, writer, linked)


def _copy_leaf(path: bytes, name: Name, writer: TreeWriter, linked: dict[tuple[int, int], Name]) -> None:
    status = os.lstat(path)
    inode = (status.st_dev, status.st_ino)
    if inode in linked:
        writer.hard_link(name, linked[inode])
        return
    if status.st_nlink > 1:
        linked[inode] = name
    kind = stat.S_IFMT(status.st_mode)
    metadata = _metadata(path, status)
    if kind == stat.S_IFREG:
        writer.file(name, metadata, status.st_size, _pieces(path, status.st_size))
    elif kind == stat.S_IFLNK:
        writer.symlink(name, metadata, os.readlink(path))
    else:
        writer.special(name, metadata, kind, status.st_rdev)


def _pieces(path: bytes, size: int) -> Iterator[Piece]:
    """The data of a file without its holes."""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        at = 0
        while at < size:
            try:
                start = os.lseek(fd, at, os.SEEK_DATA)
            except OSError:  # ENXIO: only a hole is left
                return
            end = min(os.lseek(fd, start, os.SEEK_HOLE), size)
            while start < end and (data := os.pread(fd, min(_STEP, end - start), start)):
                yield Piece(start, data)
                start += len(data)
            at = end
    finally:
        os.close(fd)


def _metadata(path: bytes, status: os.stat_result) -> Metadata:
    names = os.listxattr(path, follow_symlinks=False)
    return Metadata(
        mode=stat.S_IMODE(status.st_mode),
        uid=status.st_uid,
        gid=status.st_gid,
        mtime_ns=status.st_mtime_ns,
        attributes={
            name: os.getxattr(path, name, follow_symlinks=False) for name in names if not private_attribute(name)
        },
    )


def _is_opaque(directory: bytes) -> bool:
    names = os.listxattr(directory, follow_symlinks=False)
    return any(name in names and os.getxattr(directory, name, follow_symlinks=False) == b"y" for name in _OPAQUE_BELOW)
