"""Where a store lies: which filesystem that is, and how files are made durable there."""

from __future__ import annotations

import os
from pathlib import Path

from dsec.protocol.errors import ErrorKind, Fault

# EROFS reads its backing file through that file's page cache: tmpfs has none of its own, overlayfs passes it on.
_UNFIT = {
    "tmpfs": "the kernel cannot mount EROFS from a file on tmpfs",
    "ramfs": "the kernel cannot mount EROFS from a file on ramfs",
    "overlay": "the kernel cannot mount EROFS from a file on overlayfs (a container's own root?)",
}


def filesystem_of(directory: Path) -> str:
    """Type of the filesystem that holds `directory` ("ext4", "tmpfs", ...), "" where /proc does not say."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fields = Path(f"/proc/self/fdinfo/{fd}").read_text().splitlines()
    finally:
        os.close(fd)
    mount = next((line.split()[1] for line in fields if line.startswith("mnt_id:")), "")
    for line in Path("/proc/self/mountinfo").read_bytes().splitlines():
        before, _, after = line.partition(b" - ")
        if before.split(b" ", 1)[0] == mount.encode():
            return after.split(b" ", 1)[0].decode()
    return ""


def check_place(root: Path) -> None:
    """Fault UNSUPPORTED when layers below `root` could never be mounted."""
    kind = filesystem_of(root)
    if kind in _UNFIT:
        raise Fault(
            ErrorKind.UNSUPPORTED,
            f"the layer store {root} lies on {kind}: {_UNFIT[kind]}",
            hint="point DSEC_STORE to a directory on a disk (ext4, XFS or btrfs)",
        )


def sync_file(path: Path) -> None:
    """fsync a file or a directory."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_durably(target: Path, data: bytes, scratch: Path) -> None:
    """Replace `target` atomically: write into `scratch` (same filesystem), fsync, rename, fsync the directory."""
    temporary = scratch / f"write-{os.urandom(8).hex()}"
    try:
        with temporary.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(target)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    sync_file(target.parent)
