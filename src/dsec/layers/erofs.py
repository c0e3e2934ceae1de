"""EROFS images: making one from a directory with mkfs.erofs, and reading its superblock.

An image is split in two: the metadata blob (inodes, names, attributes) that a node keeps whole on its own disk, and the
data blob (contents of regular files) that may stay far away. erofs-utils 1.5 does this for chunk-based files.
"""

from __future__ import annotations

import errno
import os
import struct
import subprocess
from pathlib import Path

import msgspec

from dsec.protocol.errors import ErrorKind, Fault

# Chunks of one block keep holes as they are and share equal blocks; bigger ones read no faster (measured: reading
# 400 MB differs by less than the noise from 4 KiB to 1 MiB) and save 0.2 % of the data's size in metadata.
CHUNK = 4096
MAGIC = 0xE0F5E1E2
_SUPER_AT = 1024
_SUPER = struct.Struct("<I8xB3xQ12xI46xH")  # magic, block bits, inodes, blocks, extra devices
# mkfs keeps modification times up to this one (its clamp) and calls it the build time: a constant far ahead, so that
# equal trees give equal images. (-T would overwrite the times of all files.)
_BUILD_TIME = 2**34
_UUID = "64736563-0000-4000-8000-6c6179657231"  # any constant


class Superblock(msgspec.Struct, frozen=True):
    """inodes: how many; size: bytes that the metadata blob has at least; devices: how many data blobs it needs."""

    inodes: int
    size: int
    devices: int


def make_image(tree: Path, meta: Path, data: Path, *, owner: tuple[int, int] | None = None) -> None:
    """Write the image of `tree` to the two new files. owner overrides every file's uid and gid.

    OSError ENOSPC when the disk is full; Fault UNSUPPORTED without mkfs.erofs, CREATE_FAILED with its words.
    """
    command = ["mkfs.erofs", "--quiet", "-d1", f"-U{_UUID}", f"--chunksize={CHUNK}", f"--blobdev={data}"]
    if owner is not None:
        command += [f"--force-uid={owner[0]}", f"--force-gid={owner[1]}"]
    environment = {"PATH": os.environ.get("PATH", os.defpath), "SOURCE_DATE_EPOCH": str(_BUILD_TIME), "LC_ALL": "C"}
    try:
        run = subprocess.run(
            [*command, str(meta), str(tree)],
            env=environment,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
        )
    except FileNotFoundError:
        raise Fault(
            ErrorKind.UNSUPPORTED, "mkfs.erofs is not installed", hint="apt-get install erofs-utils (1.5 or later)"
        ) from None
    if run.returncode != 0:
        message = (run.stderr or run.stdout).strip().splitlines()
        text = "; ".join(message[-3:]) or f"exit code {run.returncode}"
        if "No space left" in text or "[Error 28]" in text:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(meta))
        raise Fault(ErrorKind.CREATE_FAILED, f"mkfs.erofs could not make an image of {tree}: {text}", stage="image")


def read_superblock(meta: Path) -> Superblock | None:
    """The superblock of a metadata blob; None when the file is not EROFS."""
    with meta.open("rb") as file:
        file.seek(_SUPER_AT)
        head = file.read(_SUPER.size)
    if len(head) < _SUPER.size:
        return None
    magic, block_bits, inodes, blocks, devices = _SUPER.unpack(head)
    return Superblock(inodes, blocks << block_bits, devices) if magic == MAGIC else None
