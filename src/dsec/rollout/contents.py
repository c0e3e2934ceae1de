"""What steps gave and took, by content: short ones in the record, long ones as files `blobs/<blake3>` of their rollout."""

from __future__ import annotations

import os
import re
import secrets
from pathlib import Path

from blake3 import blake3

from dsec.protocol.errors import ErrorKind, Fault
from dsec.protocol.rollouts import Blob

DIGEST = re.compile(r"[0-9a-f]{64}")
TEMPORARY = ".new-"


class Output:
    """Collects one stream of a step: memory up to `inline` bytes, then a file, `keep` bytes at most; `total` counts on.

    Memory stays bounded whatever is written. With keep 0 nothing is kept, and the digest is that of the whole.
    """

    def __init__(self, blobs: Path, inline: int, keep: int) -> None:
        self._blobs, self._inline, self._keep = blobs, min(inline, keep), keep
        self._held = bytearray()
        self._path: Path | None = None
        self._hash = blake3()
        self.size = 0
        self.total = 0

    def write(self, data: bytes | memoryview) -> None:
        """Fault no_space when the disk of the log is full; what was written before stays."""
        self.total += len(data)
        if self._keep == 0:
            self._hash.update(data)
            return
        kept = memoryview(data)[: self._keep - self.size]
        if not len(kept):
            return
        if self._path is None and self.size + len(kept) <= self._inline:
            self._held += kept
        else:
            self._spill(kept)
        self._hash.update(kept)
        self.size += len(kept)

    def _spill(self, data: memoryview) -> None:
        """Behind what is in the file already; what was in memory so far goes first. All of it, or it did not happen."""
        at = self.size - len(self._held)
        whole = memoryview(bytes(self._held) + data) if self._held else data
        path = self._path or self._blobs / f"{TEMPORARY}{secrets.token_hex(8)}"
        try:
            self._blobs.mkdir(mode=0o700, exist_ok=True)
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                written = 0
                while written < len(whole):
                    written += os.pwrite(fd, whole[written:], at + written)
            except OSError:
                os.ftruncate(fd, at)
                raise
            finally:
                os.close(fd)
        except OSError as error:
            raise no_space(str(path), error) from None
        self._path = path
        self._held = bytearray()

    @property
    def path(self) -> Path | None:
        """Of the file that holds it; None: it is short enough for the record."""
        return self._path

    def blob(self) -> Blob:
        """As it is now."""
        data = bytes(self._held) if self._path is None and self._keep else None
        return Blob(digest=self._hash.hexdigest(), size=self.size, total=self.total, data=data)

    def keep_as(self, path: Path) -> None:
        """Its file gets its name."""
        if self._path is not None:
            os.rename(self._path, path)
            self._path = path

    def discard(self) -> None:
        """What is not recorded is not kept."""
        if self._path is not None and self._path.name.startswith(TEMPORARY):
            self._path.unlink(missing_ok=True)


def no_space(what: str, error: OSError) -> Fault:
    return Fault(
        ErrorKind.NO_SPACE,
        f"{what} cannot be written: {error.strerror}",
        hint="make room on the disk of the state directory",
        retryable=True,
    )
