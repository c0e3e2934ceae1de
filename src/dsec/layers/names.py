"""Names, versions and references of layers: `name`, `name@version`, `name@sha256:...`."""

from __future__ import annotations

import re

import msgspec

from dsec.protocol.errors import ErrorKind, Fault

LATEST = "latest"  # what `tag(ref, "name")` sets and what a bare `name` looks for first

_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,127}")
_VERSION = re.compile(r"[a-z0-9][a-z0-9._+-]{0,127}")
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")


class Ref(msgspec.Struct, frozen=True):
    """A parsed reference. At most one of version and digest is set; neither means "the latest or the only one"."""

    name: str
    version: str | None = None
    digest: str | None = None

    def __str__(self) -> str:
        tail = self.version or self.digest
        return f"{self.name}@{tail}" if tail else self.name


def check_name(name: str) -> str:
    if _NAME.fullmatch(name) is None:
        raise Fault(
            ErrorKind.INVALID,
            f"{name!r} is not a layer name",
            hint="up to 128 characters of a-z, 0-9, '.', '_' and '-', the first a letter or digit",
        )
    return name


def check_version(version: str) -> str:
    if _VERSION.fullmatch(version) is None:
        raise Fault(
            ErrorKind.INVALID,
            f"{version!r} is not a layer version",
            hint="up to 128 characters of a-z, 0-9, '.', '_', '-' and '+', the first a letter or digit",
        )
    return version


def parse_ref(text: str) -> Ref:
    """Parse a reference; Fault INVALID for anything that could not name a layer (path separators, upper case, ...)."""
    name, at, tail = text.partition("@")
    try:
        check_name(name)
        if not at:
            return Ref(name)
        if tail.startswith("sha256:"):
            if _DIGEST.fullmatch(tail) is None:
                raise Fault(ErrorKind.INVALID, f"{tail!r} is not a digest", hint="sha256: and 64 hexadecimal digits")
            return Ref(name, digest=tail)
        return Ref(name, version=check_version(tail))
    except Fault as fault:
        raise Fault(
            ErrorKind.INVALID,
            f"{text!r} is not a layer reference: {fault.body.message}",
            hint=f"write name@version or name@sha256:...; {fault.body.hint}",
        ) from None
