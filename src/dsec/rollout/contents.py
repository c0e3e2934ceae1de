"""What steps gave and took, by content: short ones in the record, long ones as files `blobs/<blake3>` of their rollout."""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Container
from contextlib import suppress
from pathlib import Path

from blake3 import blake3

from dsec.protocol.rollouts import Blob

from .disk import unwritten, write_whole

DIGEST = re.compile(r"[0-9a-f]{64}")
TEMPORARY = ".new-"


class Output:
    """Collects one stream of a step: memory up to `inline` bytes, then a file, `keep` bytes at most; `total` counts on.

    Memory stays bounded whatever is written. With keep 0 nothing is kept, and the digest is that of the whole. Of what is not
    kept to its end, there is the digest of all, too.
    """

    __slots__ = ("_blobs", "_hash", "_held", "_inline", "_keep", "_path", "_whole", "size", "total")

    def __init__(self, blobs: Path, inline: int, keep: int) -> None:
        self._blobs, self._inline, self._keep = blobs, min(inline, keep), keep
        self._held = bytearray()
        self._path: Path | None = None
        self._hash: blake3 | None = None
        self._whole: blake3 | None = None
        self.size = 0
        """Bytes kept."""
        self.total = 0
        """Bytes written."""

    def write(self, data: bytes | memoryview) -> None:
        """Fault no_space when the disk of the log is full; what was written before stays."""
        if not self._keep:
            self._digest(data)
        elif len(kept := memoryview(data)[: self._keep - self.size]):
            if self._path is None and self.size + len(kept) <= self._inline:
                self._held += kept
            else:
                self._spill(kept)
            self.size += len(kept)
        if self._keep and len(rest := memoryview(data)[len(kept) :]):
            self._beyond(rest)
        self.total += len(data)

    def _beyond(self, rest: memoryview) -> None:
        """What is not kept counts in the digest of all."""
        if self._whole is None:
            self._whole = blake3(self._held) if self._hash is None else self._hash.copy()
        self._whole.update(rest)

    def _digest(self, data: bytes | bytearray | memoryview) -> None:
        if self._hash is None:
            self._hash = blake3()
        self._hash.update(data)

    def _spill(self, data: memoryview) -> None:
        """Behind what is in the file already; what was in memory so far goes first. All of it, or it did not happen."""
        whole = memoryview(bytes(self._held) + data) if self._held else data
        path = self._path or self._blobs / f"{TEMPORARY}{secrets.token_hex(8)}"
        try:
            self._blobs.mkdir(mode=0o700, exist_ok=True)
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                write_whole(fd, whole, self.size - len(self._held))
            finally:
                os.close(fd)
        except OSError as error:
            raise unwritten(f"an output of a step ({path})", error) from None
        self._path = path
        self._held.clear()
        self._digest(whole)

    @property
    def path(self) -> Path | None:
        """Of the file that holds it; None: it is short enough for the record."""
        return self._path

    def blob(self) -> Blob:
        """As it is now."""
        whole = "" if self._whole is None else self._whole.hexdigest()
        if self._path is None and self._keep:
            digest, data = blake3(self._held).hexdigest(), bytes(self._held)
            return Blob(digest=digest, size=self.size, total=self.total, whole=whole, data=data)
        digest = (self._hash or blake3()).hexdigest()
        return Blob(digest=digest, size=self.size, total=self.total, whole=whole)

    def named(self, path: Path) -> bool:
        """Its file gets the name of its content; False when that is there already, or it has it."""
        if self._path is None or self._path == path:
            return False
        if known := path.exists():
            self._path.unlink()
        else:
            os.rename(self._path, path)
        self._path = path
        return not known

    def discard(self) -> None:
        """Of a step that is not recorded, nothing is kept."""
        if self._path is not None and self._path.name.startswith(TEMPORARY):
            self._path.unlink(missing_ok=True)
            self._path = None


def sweep(blobs: Path, used: Container[str] | None) -> int:
    """Removes contents that no record speaks of: the process died before it could be written. None: nobody knows which those
    are. Returns the bytes of what stays. OSError."""
    size = 0
    with suppress(FileNotFoundError):
        for entry in os.scandir(blobs):
            if entry.name.startswith(TEMPORARY) or (used is not None and entry.name not in used):
                os.unlink(entry.path)
            else:
                size += entry.stat().st_size
    return size
