"""Names inside a sandbox for services of the caller: a line of its /etc/hosts (`hosts`) and a loopback address each.

The address is the name's own, so that several names share a port.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress

import structlog

from dsec.backends.launcher import LauncherFailed
from dsec.protocol.errors import ErrorKind, Fault

from . import hosts
from .lifecycle import Lifecycle
from .sandbox import Sandbox

MAX_NAMES = 64
_LABEL = r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?"
_NAME = re.compile(rf"(?:{_LABEL}\.)*[a-z](?:[a-z0-9-]{{0,61}}[a-z0-9])?")  # a last label of digits would be an address
_TAKEN = frozenset(("localhost", "ip6-localhost", "ip6-loopback", "ip6-allnodes", "ip6-allrouters"))
_log = structlog.get_logger("edge")


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
        self._published: dict[str, dict[str, str]] = {}  # of a sandbox: names in its file, or about to be
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
        names[name] = address = next(a for a in map(hosts.address, range(MAX_NAMES + 1)) if a not in taken)
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
        published = self._published.setdefault(sandbox.id, {})
        published[name] = address
        try:
            await self._rewrite(sandbox)
            yield
        except BaseException:
            self._forget(sandbox, name)
            task = asyncio.get_running_loop().create_task(self._tidy(sandbox))
            self._later.add(task)
            task.add_done_callback(self._later.discard)
            raise
        self._forget(sandbox, name)
        with suppress(Fault):
            await self._rewrite(await self._lifecycle.ready(sandbox.id, sandbox.incarnation))

    def _forget(self, sandbox: Sandbox, name: str) -> None:
        published = self._published[sandbox.id]
        del published[name]
        if not published:
            del self._published[sandbox.id]

    async def begin(self, adopted: Sequence[Sandbox]) -> None:
        """After a restart of the edge: names of the earlier one lead nowhere, and go. Of a paused sandbox when it is resumed."""
        await asyncio.gather(*(self._tidy(sandbox) for sandbox in adopted if sandbox.hosts is not None))

    async def _tidy(self, sandbox: Sandbox) -> None:
        try:
            await self._rewrite(await self._lifecycle.awake(sandbox.id, sandbox.incarnation))
        except Fault as fault:  # the next name takes them out
            _log.info("names of services were not taken out", sandbox=sandbox.id, error=fault.body.message)
        if not sandbox.services:
            self._writing.pop(sandbox.id, None)

    async def _rewrite(self, sandbox: Sandbox) -> None:
        """The names of now, and no others of ours."""
        async with self._writing.setdefault(sandbox.id, asyncio.Lock()):
            services: Mapping[str, str] = self._published.get(sandbox.id, {})
            link = await sandbox.link()
            found = await hosts.read(link, sandbox.id)
            text = hosts.with_services(found, services)
            if text == found:
                return
            if sandbox.hosts is None:
                try:
                    upper = await self._lifecycle.backend.upper(sandbox.id)
                except LauncherFailed as failed:  # it ends just now
                    raise sandbox.unavailable() from failed
                before = await hosts.look(link, upper, hosts.without_own(found))
                await self._lifecycle.set_hosts(sandbox, before)
            await hosts.write(link, text)
