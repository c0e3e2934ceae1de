"""/etc/hosts of a sandbox, and the lines of ours in it.

The file belongs to the sandbox, whose code may write anything there: only lines that are exactly ours are taken out again,
everything else stays byte for byte. What it was before the first of them is remembered (`Before`, in the journal too), so that
`changes` tells of the file only what the sandbox did to it.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Container, Iterator, Mapping
from contextlib import contextmanager, suppress

import msgspec
from blake3 import blake3

from dsec.protocol.errors import ErrorKind, Fault
from dsec.protocol.link import Data, LinkClient
from dsec.protocol.specs import Change, ChangeKind, FileInfo

from .journal import Before, Looks

HOSTS = b"/etc/hosts"
MAX_HOSTS = 256 * 1024
_DIRECTORY, _PATH = b"etc", b"etc/hosts"
_DEFAULT = b"127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\n"
_OWN = b"# dsec expose"
_ADDRESSES = b"127.77."
_NO_FILE = Looks(mode=0o644)


class _Read(msgspec.Struct):
    size: int = 0


def address(index: int) -> str:
    return f"{_ADDRESSES.decode()}{1 + index // 250}.{1 + index % 250}"


def _line(name: str, address: str) -> bytes:
    return f"{address}\t{name}\t".encode() + _OWN


def _is_own(line: bytes, kept: Container[bytes] = ()) -> bool:
    """Whether a line is one of ours, but not of those to be kept."""
    fields = line.split(b"\t")
    return len(fields) == 3 and fields[2] == _OWN and fields[0].startswith(_ADDRESSES) and line not in kept


def without_own(text: bytes) -> bytes:
    """What the sandbox has written of it."""
    return b"\n".join(line for line in text.split(b"\n") if not _is_own(line))


def with_services(text: bytes, services: Mapping[str, str]) -> bytes:
    """The text with one line for each name, the new ones first, where they win; of other names of ours, none."""
    lines = [_line(name, where) for name, where in services.items()]
    kept = [old for old in text.split(b"\n") if not _is_own(old, lines)]
    return b"\n".join([line for line in reversed(lines) if line not in kept] + kept)


async def read(link: LinkClient, sandbox: str) -> bytes:
    """Root's view of the file; a sandbox without one gets the usual."""
    stream = await link.open("fs.read", {"path": HOSTS, "offset": 0, "length": MAX_HOSTS + 1, "user": "root"})
    try:
        found = b"".join([item.data async for item in stream if isinstance(item, Data)])
        await stream.result(_Read)
    except Fault as fault:
        if fault.body.kind is ErrorKind.FILE_NOT_FOUND:
            return _DEFAULT
        raise
    finally:
        stream.cancel()
    if len(found) > MAX_HOSTS:
        raise Fault(ErrorKind.TOO_LARGE, f"/etc/hosts in sandbox {sandbox} is over {MAX_HOSTS} bytes", limit=MAX_HOSTS)
    return found


async def write(link: LinkClient, text: bytes) -> None:
    stream = await link.open("fs.write", {"path": HOSTS, "mode": None, "owner": None, "user": "root"})
    try:
        await stream.send(text)
        await stream.end()
        await stream.result()
    finally:
        stream.cancel()


# -- what of it is a change of the sandbox's ---------------------------------------------------------------------------


async def look(link: LinkClient, upper: int, text: bytes) -> Before:
    """Before the first line of ours is written into `text`: what of the file and its directory is the layers'. Closes `upper`."""
    with _closed(upper):
        directory_is_changed, file_is_changed = _changed(upper)
    directory = None if directory_is_changed else await _looks(link, b"/" + _DIRECTORY)
    if file_is_changed:
        return Before(directory=directory)
    looks = await _looks(link, HOSTS) or _NO_FILE
    return Before(directory=directory, file=looks, size=len(text), digest=blake3(text).hexdigest())


@contextmanager
def _closed(fd: int) -> Iterator[None]:
    try:
        yield
    finally:
        os.close(fd)


def _changed(upper: int) -> tuple[bool, bool]:
    """Whether the sandbox has written to /etc, and to the file. What lies there is its own, so no link is followed."""
    try:
        directory = os.open(_DIRECTORY, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=upper)
    except FileNotFoundError:
        return False, False
    except OSError:  # something else stands there
        return True, True
    with _closed(directory):
        try:
            os.stat(b"hosts", dir_fd=directory, follow_symlinks=False)
        except FileNotFoundError:
            return True, False
        return True, True


async def _looks(link: LinkClient, path: bytes) -> Looks | None:
    with suppress(Fault):
        info = await link.call("fs.stat", {"path": path, "follow": False, "user": "root"}, FileInfo)
        return Looks(info.mode, info.uid, info.gid)
    return None


async def without(
    changes: AsyncIterator[Change | bool], before: Before | None, services: Mapping[str, str]
) -> AsyncIterator[Change | bool]:
    """Changes with our lines left out of the file, and without the file when nothing else of it has changed."""
    async for item in changes:
        if before is None or isinstance(item, bool) or item.path != _PATH or item.kind is not ChangeKind.WRITE:
            yield item
        elif (rest := _rest(item, before, services)) is not None:
            yield rest


def _rest(change: Change, before: Before, services: Mapping[str, str]) -> Change | None:
    as_it_was = before.file == Looks(change.mode, change.uid, change.gid)
    if change.data is None:  # only its size is known
        ours = sum(len(_line(*service)) + 1 for service in services.items())
        return None if as_it_was and change.size - ours == before.size else change
    data = without_own(change.data)
    digest = blake3(data).hexdigest()
    if as_it_was and digest == before.digest:
        return None
    return msgspec.structs.replace(change, data=data, size=len(data), digest=digest)
