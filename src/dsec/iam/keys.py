"""API keys: read once from a file, held only as hashes, compared in constant time."""

from __future__ import annotations

import hashlib
import hmac
import os
from pathlib import Path

import msgspec

from dsec.protocol.errors import ErrorKind, Fault

DEFAULT_PROJECT = "default"
_HINT = (
    "the SDK takes the key from its api_key argument, then DSEC_API_KEY, then the key file that `dsec up` left on this "
    "machine (named in <state>/endpoint.json, readable by its owner only)"
)


class Principal(msgspec.Struct, frozen=True):
    """Who asks, and for which project."""

    name: str
    project: str


_SALT = os.urandom(32)


def _digest(key: bytes) -> bytes:
    # Keys are random and long, so a plain hash cannot be searched; it only keeps keys out of memory dumps and logs.
    return hashlib.blake2b(key, digest_size=32, key=_SALT).digest()


class KeyRing:
    """The keys that are valid here, by hash."""

    def __init__(self, keys: dict[str, str]) -> None:
        """keys: principal name -> key."""
        self._digests = tuple((name, _digest(key.encode("utf-8", "surrogateescape"))) for name, key in keys.items())

    @classmethod
    def from_file(cls, path: str | os.PathLike[str]) -> KeyRing:
        """The key in a file of one line. Fault when the file is missing, empty, or readable by others."""
        file = Path(path)
        try:
            mode = file.stat().st_mode & 0o777
            key = file.read_text(encoding="utf-8").strip()
        except OSError as error:
            raise Fault(
                ErrorKind.AUTHENTICATION,
                f"cannot read the key file {file}: {error.strerror}",
                hint="`dsec up` makes one at its first start",
            ) from error
        if mode & 0o077:
            raise Fault(
                ErrorKind.AUTHENTICATION,
                f"the key file {file} has mode {mode:04o}, so others than its owner can use it",
                hint=f"chmod 600 {file}, and make a new key if the old one may have been seen",
            )
        if len(key) < 16:
            raise Fault(
                ErrorKind.AUTHENTICATION, f"the key file {file} holds no key", hint="remove it and run `dsec up`"
            )
        return cls({"owner": key})

    def check(self, authorization: bytes | None, project: str = "") -> Principal:
        """The principal of an Authorization header; Fault authentication (401) or permission (403)."""
        if authorization is None:
            raise Fault(ErrorKind.AUTHENTICATION, "no API key was sent", hint=_HINT)
        scheme, _, key = authorization.partition(b" ")
        if scheme.lower() != b"bearer":
            raise Fault(ErrorKind.AUTHENTICATION, "the Authorization header is not `Bearer <key>`", hint=_HINT)
        sent = _digest(key.strip() if key.isascii() else key.decode("latin-1").strip().encode())
        name = ""
        for known, digest in self._digests:  # all of them, so that time tells nothing about which one matched
            if hmac.compare_digest(sent, digest):
                name = known
        if not name:
            raise Fault(ErrorKind.AUTHENTICATION, "the API key is not valid here", hint=_HINT)
        if project not in ("", DEFAULT_PROJECT):
            raise Fault(
                ErrorKind.PERMISSION,
                f"there is no project {project[:64]!r} here; this installation has one, {DEFAULT_PROJECT!r}",
                hint="leave out project and DSEC_PROJECT",
            )
        return Principal(name, DEFAULT_PROJECT)
