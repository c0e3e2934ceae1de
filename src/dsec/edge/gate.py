"""The proxy process of this edge: started when first needed, started again when it ends, one link connection a sandbox.

The edge passes bytes and rules to it and reads none of what sandboxes and servers say.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec
import structlog

from dsec.protocol.errors import ErrorKind, Fault
from dsec.protocol.link import LinkClient, LinkStream
from dsec.protocol.mirrors import Mirror

from .proxy.setup import Setup

_START_S = 20.0
_STOP_S = 3.0
_AGAIN_S = 0.5
"""Between two starts: one that ends whenever it is used must not keep the node busy."""
_log = structlog.get_logger("edge")


class Gate:
    def __init__(self, run: Path, mirrors: Sequence[Mirror]) -> None:
        self._socket = run / "proxy.sock"
        self._setup = Setup(mirrors=tuple(mirrors))
        self._process: asyncio.subprocess.Process | None = None
        self._starting = asyncio.Lock()
        self._closed = False
        self._not_before = 0.0

    @property
    def pid(self) -> int | None:
        """Of the running process."""
        return self._process.pid if self._process is not None and self._process.returncode is None else None

    async def ready(self) -> None:
        """Until the process serves. Fault says why it does not."""
        if self.pid is not None:
            return
        async with self._starting:
            if self.pid is None:
                if time.monotonic() < self._not_before:
                    raise Fault(ErrorKind.INTERNAL, "the network proxy does not start", hint="see the edge's log")
                self._not_before = time.monotonic() + _AGAIN_S
                await self._start()

    async def _start(self) -> None:
        if self._closed:
            raise Fault(ErrorKind.CONNECTION_LOST, "the edge is stopping", retryable=True)
        try:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "dsec.edge.proxy", str(self._socket),
                stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, start_new_session=True, cwd="/",
            )  # fmt: skip
        except OSError as error:
            why = error.strerror or str(error)
            raise Fault(ErrorKind.INTERNAL, f"the network proxy did not start: {why}", retryable=True) from error
        assert process.stdin is not None and process.stdout is not None
        said = b""
        try:
            async with asyncio.timeout(_START_S):
                process.stdin.write(msgspec.json.encode(self._setup) + b"\n")
                await process.stdin.drain()
                said = (await process.stdout.readline()).strip()
        except (OSError, TimeoutError) as error:
            said = str(error).encode()
        if said != b"ok":
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()
            why = said.decode(errors="replace") or "it ended without a word"
            raise Fault(ErrorKind.INTERNAL, f"the network proxy did not start: {why}", hint="see the edge's log")
        self._process = process
        _log.info("network proxy started", pid=process.pid, mirrors=[mirror.name for mirror in self._setup.mirrors])

    async def close(self) -> None:
        """Ends the process; every connection ends with it."""
        self._closed = True
        process, self._process = self._process, None
        if process is None or process.returncode is not None:
            return
        assert process.stdin is not None
        process.stdin.close()
        try:
            async with asyncio.timeout(_STOP_S):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()
        self._socket.unlink(missing_ok=True)

    def way(self, sandbox: str) -> Way:
        return Way(self, self._socket, sandbox)


class _Which(msgspec.Struct, frozen=True):
    sandbox: str


class _Rules(msgspec.Struct, frozen=True):
    sandbox: str
    rules: Mapping[str, bool]


class Way:
    """One sandbox's way to the proxy. The rules are told again whenever its connection had to be made anew."""

    def __init__(self, gate: Gate, socket: Path, sandbox: str) -> None:
        self._gate = gate
        self._socket = socket
        self._sandbox = sandbox
        self._link: LinkClient | None = None
        self._rules: Mapping[str, bool] = {}
        self._connecting = asyncio.Lock()

    async def _connected(self) -> LinkClient:
        async with self._connecting:
            if self._link is None or self._link.closed:
                await self._gate.ready()
                link = await LinkClient.connect_unix(self._socket)
                await link.call("proxy.rules", _Rules(self._sandbox, self._rules))
                self._link = link
            return self._link

    async def enforce(self, rules: Mapping[str, bool]) -> None:
        """From now on these rules; connections that they deny are cut when this returns."""
        self._rules = dict(rules)
        if self._link is not None and not self._link.closed:
            with suppress(Fault):  # a proxy that is gone has no connections, and the next one is told the rules first
                await self._link.call("proxy.rules", _Rules(self._sandbox, self._rules))

    async def serve(self) -> LinkStream:
        """A stream for one connection of the sandbox."""
        link = await self._connected()
        return await link.open("proxy.serve", _Which(self._sandbox))

    async def close(self) -> None:
        """The proxy forgets the sandbox."""
        link, self._link = self._link, None
        if link is not None:
            with suppress(Fault, TimeoutError):  # one that hangs must not hold up the end of a sandbox
                async with asyncio.timeout(_STOP_S):
                    await link.call("proxy.forget", _Which(self._sandbox))
            await link.close()
