"""Names inside a sandbox for services of the caller: a line of its /etc/hosts and a loopback address each.

The address is the name's own, so that several names share a port. The file belongs to the sandbox, whose code may write
anything there: only lines that are exactly ours are taken out again, everything else stays byte for byte.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import msgspec

from dsec.protocol.errors import ErrorKind, Fault
from dsec.protocol.link import Data

from .lifecycle import Lifecycle
from .sandbox import Sandbox

HOSTS = b"/etc/hosts"
MAX_HOSTS = 256 * 1024
MAX_NAMES = 64
_LABEL = r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?"
_NAME = re.compile(rf"(?:{_LABEL}\.)*[a-z](?:[a-z0-9-]{{0,61}}[a-z0-9])?")  # a last label of digits would be an address
_TAKEN = frozenset(("localhost", "ip6-localhost", "ip6-loopback", "ip6-allnodes", "ip6-allrouters"))
_DEFAULT = b"127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\n"
_OWN = b"# dsec expose"


class _Read(msgspec.Struct):
    size: int = 0


def check_name(name: str) -> None:
    """Fault invalid_request for what a resolver inside could not or should not look up."""
    if len(name) <= 253 and _NAME.fullmatch(name) and name not in _TAKEN and not name.endswith(".localhost"):
        return
    raise Fault(
        ErrorKind.INVALID,
        f"name={name[:80]!r} cannot be a host name of a service",
        hint="use lower case letters, digits and hyphens, for example model; dots only between labels",
    )


class Names:
    """Gives names and takes them back; which a sandbox has now is in `Sandbox.services`."""

    def __init__(self, lifecycle: Lifecycle) -> None:
        self._lifecycle = lifecycle
        self._writing: dict[str, asyncio.Lock] = {}
        self._later: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def reserved(self, sandbox: Sandbox, name: str) -> AsyncIterator[str]:
        """A loopback address for the name. Fault conflict when the sandbox has the name already."""
        check_name(name)
        names = sandbox.services
        if name in names:
            raise Fault(
                ErrorKind.CONFLICT,
                f"sandbox {sandbox.id} has a service named {name!r} already",
                hint="choose another name, or end the other expose first",
                sandbox_id=sandbox.id,
            )
        if len(names) >= MAX_NAMES:
            raise Fault(ErrorKind.CAPACITY, f"sandbox {sandbox.id} has {MAX_NAMES} names", sandbox_id=sandbox.id,
                        limit="max_names", value=MAX_NAMES)  # fmt: skip
        taken = set(names.values())
        names[name] = address = next(a for a in map(_address, range(MAX_NAMES + 1)) if a not in taken)
        try:
            yield address
        finally:
            del names[name]
            if not names:
                self._writing.pop(sandbox.id, None)

    @asynccontextmanager
    async def published(self, sandbox: Sandbox, name: str, address: str) -> AsyncIterator[None]:
        """The name in the sandbox's /etc/hosts, until the block is left (or the sandbox ends, which is as good).

        A caller who is lost wakes no paused sandbox by it: the line then goes when that is resumed.
        """
        line = f"{address}\t{name}\t".encode() + _OWN
        await self._rewrite(sandbox, name, line)
        try:
            yield
        except BaseException:
            task = asyncio.get_running_loop().create_task(self._take_out_later(sandbox, name))
            self._later.add(task)
            task.add_done_callback(self._later.discard)
            raise
        with suppress(Fault):
            await self._rewrite(await self._lifecycle.ready(sandbox.id, sandbox.incarnation), name, None)

    async def _take_out_later(self, sandbox: Sandbox, name: str) -> None:
        with suppress(Fault):
            await self._rewrite(await self._lifecycle.awake(sandbox.id, sandbox.incarnation), name, None, late=True)
        if not sandbox.services:
            self._writing.pop(sandbox.id, None)

    async def _rewrite(self, sandbox: Sandbox, name: str, line: bytes | None, *, late: bool = False) -> None:
        """Takes out what an earlier service of the name left, and puts the line first, where it wins."""
        async with self._writing.setdefault(sandbox.id, asyncio.Lock()):
            if late and name in sandbox.services:
                return  # it was given anew meanwhile
            found = await _read(sandbox)
            kept = [old for old in found.split(b"\n") if not _is_own(old, name)]
            text = b"\n".join(kept if line is None else [line, *kept])
            if text != found:
                await _write(sandbox, text)


def _address(index: int) -> str:
    return f"127.77.{1 + index // 250}.{1 + index % 250}"


def _is_own(line: bytes, name: str) -> bool:
    fields = line.split(b"\t")
    return len(fields) == 3 and fields[1] == name.encode() and fields[2] == _OWN


async def _read(sandbox: Sandbox) -> bytes:
    """Root's view of the file; a sandbox without one gets the usual."""
    params = {"path": HOSTS, "offset": 0, "length": MAX_HOSTS + 1, "user": "root"}
    stream = await (await sandbox.link()).open("fs.read", params)
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
        raise Fault(
            ErrorKind.TOO_LARGE, f"/etc/hosts in sandbox {sandbox.id} is over {MAX_HOSTS} bytes", limit=MAX_HOSTS
        )
    return found


async def _write(sandbox: Sandbox, text: bytes) -> None:
    params = {"path": HOSTS, "mode": None, "owner": None, "user": "root"}
    stream = await (await sandbox.link()).open("fs.write", params)
    try:
        await stream.send(text)
        await stream.end()
        await stream.result()
    finally:
        stream.cancel()
