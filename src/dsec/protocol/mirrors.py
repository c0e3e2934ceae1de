"""Mirrors: named upstreams that the operator of a node lets its sandboxes reach, and the file that names them.

A mirror's upstream may be private or on loopback, since the operator chose it; its credentials stay on the node.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Iterable, Mapping
from enum import Enum
from pathlib import Path
from typing import TypeAlias
from urllib.parse import urlsplit

import msgspec

from .errors import ErrorKind, Fault

_NAME = re.compile(r"(?!-)[a-z0-9-]{1,63}(?:\.[a-z0-9-]{1,63}){0,8}")
PLATFORM = "dsec"
"""The name under which a platform's sandboxes reach its own API, where a rule allows it."""
_WORDS = re.compile(r"[A-Za-z0-9._/~+-]+(?: [A-Za-z0-9._/~+-]+)*")
_HEADER = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_VALUE = re.compile(r"[\t\x20-\x7e\x80-\xff]*")
_MAX_FILE = 1024 * 1024
_RELEASE = "bookworm"


class MirrorKind(str, Enum):
    """What speaks through a mirror: it decides which settings a sandbox gets for it.

    pypi: pip and uv find it; npm: npm, yarn and pnpm; apt: apt's sources. http: reachable as http://<name>/, nothing is set
    up. tunnel: reachable as https://<name>/ end to end, with the sandbox's own TLS. api: a DSec API, which the SDK inside finds;
    all methods and WebSockets pass.
    """

    PYPI = "pypi"
    NPM = "npm"
    APT = "apt"
    HTTP = "http"
    TUNNEL = "tunnel"
    API = "api"


class Mirror(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One upstream under a name that `network_rules` can allow.

    url: where it is; for pypi the index (`.../simple/`). headers: added to every request (credentials), never seen inside.
    ca: PEM file of the authorities that the upstream's certificate may come from, instead of the system's. also: public
    domains that its answers point to, reachable while the mirror is. writable: other methods than GET and HEAD pass.
    suites, components, trusted: of apt (trusted: unsigned is accepted).
    """

    name: str
    url: str
    kind: MirrorKind = MirrorKind.HTTP
    headers: dict[str, str] = {}
    ca: str = ""
    also: tuple[str, ...] = ()
    writable: bool = False
    suites: tuple[str, ...] = (_RELEASE, f"{_RELEASE}-updates")
    components: tuple[str, ...] = ("main",)
    trusted: bool = False

    @property
    def takes_writes(self) -> bool:
        return self.writable or self.kind is MirrorKind.API


# What callers may give: a file, name -> URL (or `kind+URL`), or mirrors.
Mirrors: TypeAlias = "str | os.PathLike[str] | Mapping[str, str] | Iterable[Mirror]"
_FOR_NAME = {"pypi": MirrorKind.PYPI, "npm": MirrorKind.NPM, "debian": MirrorKind.APT, "ubuntu": MirrorKind.APT,
             "apt": MirrorKind.APT}  # fmt: skip


def _invalid(message: str, hint: str = "see docs/guide/network.md") -> Fault:
    return Fault(ErrorKind.INVALID, message, hint=hint)


def mirror_of(name: str, text: str) -> Mirror:
    """A mirror from `URL` or `kind+URL`; the kind of a well-known name (pypi, npm, debian) need not be said."""
    kind, plus, rest = text.partition("+")
    if plus and kind in set(MirrorKind):
        return checked(Mirror(name=name, url=rest, kind=MirrorKind(kind)))
    return checked(Mirror(name=name, url=text, kind=_FOR_NAME.get(name, MirrorKind.HTTP)))


def mirrors_of(given: Mirrors | None) -> tuple[Mirror, ...]:
    """Checked mirrors from whatever form they were given in."""
    if given is None:
        return ()
    if isinstance(given, Mapping):
        return tuple(mirror_of(name, url) for name, url in given.items())
    if isinstance(given, (str, os.PathLike)):
        return load(Path(given))
    return tuple(checked(mirror) for mirror in given)


def load(path: Path) -> tuple[Mirror, ...]:
    """The mirrors of a TOML or JSON file: a table each, `[name]` with the fields of `Mirror`."""
    try:
        with open(path, "rb") as file:
            data = file.read(_MAX_FILE + 1)
    except OSError as error:
        raise _invalid(f"mirrors file {path}: {error.strerror}", "give the path of a file that can be read") from error
    if len(data) > _MAX_FILE:
        raise _invalid(f"mirrors file {path} is larger than {_MAX_FILE} bytes")
    try:
        if path.suffix == ".json":
            tables = msgspec.json.decode(data, type=dict[str, dict[str, object]])
        else:
            tables = msgspec.convert(tomllib.loads(data.decode()), dict[str, dict[str, object]])
        return tuple(_from_table(name, table) for name, table in tables.items())
    except (msgspec.DecodeError, msgspec.ValidationError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise _invalid(f"mirrors file {path}: {error}") from error


def _from_table(name: str, table: Mapping[str, object]) -> Mirror:
    kind = {"kind": _FOR_NAME[name].value} if name in _FOR_NAME else {}
    try:
        return checked(msgspec.convert({**kind, **table, "name": name}, Mirror))
    except msgspec.ValidationError as error:
        raise msgspec.ValidationError(f"[{name}]: {error}") from error


def dump(mirrors: Iterable[Mirror]) -> bytes:
    """As `load` reads them from a `.json` file."""
    tables = {mirror.name: msgspec.to_builtins(mirror) for mirror in mirrors}
    for table in tables.values():
        del table["name"]
    return msgspec.json.encode(tables)


def checked(mirror: Mirror) -> Mirror:
    """The mirror, or a Fault that names the field that is wrong."""
    if _NAME.fullmatch(mirror.name) is None or mirror.name.rpartition(".")[2].isdigit():
        raise _invalid(f"mirror name {mirror.name[:80]!r} is not lower-case letters, digits, '-' and '.'")
    _check_url(mirror)
    for name, value in mirror.headers.items():
        if _HEADER.fullmatch(name) is None or _VALUE.fullmatch(value) is None or name.lower() in _OURS:
            raise _invalid(f"mirror {mirror.name}: header {name[:80]!r} cannot be added to requests")
    for word in (*mirror.suites, *mirror.components):
        if _WORDS.fullmatch(word) is None:
            raise _invalid(f"mirror {mirror.name}: {word[:80]!r} is no name of a suite or component")
    if mirror.ca and not os.path.isabs(mirror.ca):
        raise _invalid(f"mirror {mirror.name}: ca {mirror.ca!r} is not an absolute path")
    return mirror


_OURS = frozenset(("host", "connection", "content-length", "transfer-encoding", "upgrade", "te", "trailer"))


def _check_url(mirror: Mirror) -> None:
    try:
        url = urlsplit(mirror.url)
        port = url.port
    except ValueError as error:
        raise _invalid(f"mirror {mirror.name}: url {mirror.url!r}: {error}") from error
    schemes = ("https",) if mirror.kind is MirrorKind.TUNNEL else ("http", "https")
    if url.scheme not in schemes or not url.hostname or port == 0:
        raise _invalid(f"mirror {mirror.name}: url {mirror.url!r} is not {' or '.join(schemes)}://host[:port]/...")
    if "@" in url.netloc:
        raise _invalid(
            f"mirror {mirror.name}: credentials in its url", "give them as headers in a mirrors file of mode 0600"
        )
    if url.query or url.fragment or not re.fullmatch(r"[!-~]*", mirror.url):
        raise _invalid(f"mirror {mirror.name}: url {mirror.url!r} has a query, a fragment or characters to be escaped")
    if mirror.kind is MirrorKind.TUNNEL and (url.path not in ("", "/") or mirror.headers or mirror.ca):
        raise _invalid(f"mirror {mirror.name}: a tunnel has no path, headers or ca: its TLS is the sandbox's own")
