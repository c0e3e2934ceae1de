"""API keys: the owner's is read once from a file, held only as a hash, compared in constant time; scoped ones are signed."""

from __future__ import annotations

import hashlib
import hmac
import os
import time
from pathlib import Path

import msgspec

from dsec.protocol.errors import ErrorKind, Fault

from .scoped import PREFIX, Claims, Signer, Wanted, claims_of

DEFAULT_PROJECT = "default"
_HINT = (
    "the SDK takes the key from its api_key argument, then DSEC_API_KEY, then the key file that `dsec up` left on this "
    "machine (named in <state>/endpoint.json, readable by its owner only)"
)


class Principal(msgspec.Struct, frozen=True):
    """Who asks, and for which project. claims: of a scoped key; None for one that may do everything."""

    name: str
    project: str
    claims: Claims | None = None


_SALT = os.urandom(32)


def _digest(key: bytes) -> bytes:
    # Keys are random and long, so a plain hash cannot be searched; it only keeps keys out of memory dumps and logs.
    return hashlib.blake2b(key, digest_size=32, key=_SALT).digest()


class KeyRing:
    """The keys that are valid here, by hash."""

    def __init__(self, keys: dict[str, str]) -> None:
        """keys: principal name -> key."""
        secrets = {name: key.encode("utf-8", "surrogateescape") for name, key in keys.items()}
        self._digests = tuple((name, _digest(secret)) for name, secret in secrets.items())
        self._signers = {name: Signer(secret) for name, secret in secrets.items()}

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

    def check(self, authorization: bytes | None, project: str = "", *, inside: bool = False) -> Principal:
        """The principal of an Authorization header; Fault authentication (401) or permission (403).

        inside: the request came from a sandbox, where only scoped keys count: one that got hold of the owner's has no use for it.
        """
        if authorization is None:
            raise Fault(ErrorKind.AUTHENTICATION, "no API key was sent", hint=_HINT)
        scheme, _, key = authorization.partition(b" ")
        if scheme.lower() != b"bearer":
            raise Fault(ErrorKind.AUTHENTICATION, "the Authorization header is not `Bearer <key>`", hint=_HINT)
        found = self._scoped(key) if key.strip().startswith(PREFIX.encode()) else self._owner(key, inside)
        if project not in ("", DEFAULT_PROJECT):
            raise Fault(
                ErrorKind.PERMISSION,
                f"there is no project {project[:64]!r} here; this installation has one, {DEFAULT_PROJECT!r}",
                hint="leave out project and DSEC_PROJECT",
            )
        return found

    def issue(self, asker: Principal, wanted: Wanted) -> tuple[str, Claims]:
        """A scoped key of what the asker holds, or less; told once and kept nowhere. Fault permission for more."""
        claims = claims_of(wanted, asker.claims)
        return self._signers[asker.name].sign(claims), claims

    def _owner(self, key: bytes, inside: bool) -> Principal:
        sent = _digest(key.strip() if key.isascii() else key.decode("latin-1").strip().encode())
        name = ""
        for known, digest in self._digests:  # all of them, so that time tells nothing about which one matched
            if hmac.compare_digest(sent, digest):
                name = known
        if not name:
            raise Fault(ErrorKind.AUTHENTICATION, "the API key is not valid here", hint=_HINT)
        if inside:
            raise Fault(
                ErrorKind.PERMISSION,
                "the owner's key is not taken from inside a sandbox",
                hint="give the sandbox a scoped key (client.keys.create, `dsec key create`); change the owner's if it leaked",
            )
        return Principal(name, DEFAULT_PROJECT)

    def _scoped(self, key: bytes) -> Principal:
        text, now = key.decode("latin-1").strip(), time.time()
        found = [(name, claims) for name, signer in self._signers.items() if (claims := signer.claims(text, now))]
        if not found:
            raise Fault(ErrorKind.AUTHENTICATION, "the API key is not valid here", hint=_HINT)
        return Principal(found[0][0], DEFAULT_PROJECT, found[0][1])
