"""Links to the edges, kept up, and the way from a sandbox id to its edge."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable
from typing import TypeVar, overload

import structlog

from dsec.placement.registry import EdgeRegistry
from dsec.protocol.errors import ErrorKind, Fault
from dsec.protocol.ids import edge_of, home_of
from dsec.protocol.link import LinkClient, LinkStream
from dsec.protocol.specs import EdgeStatus
from dsec.watcher.watcher import EdgeView, Watcher

T = TypeVar("T")
_FIRST_BEAT = 5.0
_RETRY = (0.02, 0.05, 0.1)  # an edge that is started again is back in half a second

log = structlog.get_logger("dsec.apiserver.fleet")


class EdgeLink:
    """One edge's link; reconnects for ever. While it is down every call fails at once, typed and retryable."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._client: LinkClient | None = None
        self.up = asyncio.Event()

    @property
    def address(self) -> str:
        return self._address

    @property
    def connected(self) -> bool:
        return self._client is not None and not self._client.closed

    def _connected(self) -> LinkClient:
        client = self._client
        if client is None or client.closed:
            raise Fault(
                ErrorKind.CONNECTION_LOST,
                "the edge does not answer",
                hint="it is restarting, or it is down: see `dsec status`",
                retryable=True,
            )
        return client

    def _told(self, params: object) -> object:
        """What is sent for these parameters."""
        return params

    async def open(self, method: str, params: object) -> LinkStream:
        return await self._connected().open(method, self._told(params))

    @overload
    async def call(self, method: str, params: object) -> bytes: ...
    @overload
    async def call(self, method: str, params: object, kind: type[T]) -> T: ...
    async def call(self, method: str, params: object, kind: type[T] | None = None) -> T | bytes:
        client, told = self._connected(), self._told(params)
        return await (client.call(method, told) if kind is None else client.call(method, told, kind))

    async def status(self) -> EdgeStatus:
        return await self.call("edge.status", {"request_id": "beat"}, EdgeStatus)

    async def run(self, watcher: Watcher) -> None:
        """Until cancelled: connect, tell the watcher, wait for the loss, connect again."""
        failures = 0
        try:
            while True:
                try:
                    self._client = await LinkClient.connect_unix(self._address, shared=True)
                except Fault as fault:
                    if failures == 0:
                        log.warning("edge unreachable", address=self._address, error=fault.body.message)
                    await asyncio.sleep(_RETRY[min(failures, len(_RETRY) - 1)])
                    failures += 1
                    continue
                failures = 0
                self.up.set()
                log.info("edge connected", address=self._address)
                await watcher.beat(self)
                # shield: a future of the link must not be cancelled together with this task
                lost = await asyncio.shield(self._client.lost)
                self.up.clear()
                log.warning("edge lost", address=self._address, error=lost.body.message)
        finally:
            if self._client is not None:
                await self._client.close()


class Fleet:
    """Every edge of the registry: links, views, routing."""

    def __init__(self, registry: EdgeRegistry) -> None:
        self._registry = registry
        self._links: dict[str, EdgeLink] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self.watcher = Watcher(self._refresh)
        self._watching: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._refresh()
        self._watching = asyncio.create_task(self.watcher.run())

    async def stop(self) -> None:
        tasks = [*self._tasks.values(), *([self._watching] if self._watching else [])]
        for task in tasks:
            task.cancel()
        for task in tasks:
            with contextlib.suppress(asyncio.CancelledError):
                await task

    def _refresh(self) -> Iterable[EdgeLink]:
        """Links for the addresses that the registry names now."""
        wanted = set(self._registry.addresses())
        for address in wanted - self._links.keys():
            link = self._links[address] = EdgeLink(address)
            self._tasks[address] = asyncio.create_task(link.run(self.watcher))
        for address in self._links.keys() - wanted:
            self._tasks.pop(address).cancel()
            del self._links[address]
        return list(self._links.values())

    async def views(self) -> list[EdgeView]:
        """Every edge that is not dead; waits for the first beat after a start."""
        if not self.watcher.view():
            await self.watcher.wait_for_first(_FIRST_BEAT)
        return self.watcher.view()

    def link(self, edge: str) -> EdgeLink:
        view = self.watcher.find(edge)
        if view is None:
            raise Fault(
                ErrorKind.CONNECTION_LOST,
                f"edge {edge!r} is not reachable",
                hint="it is starting or down: see `dsec status`",
                retryable=True,
            )
        return self._links[view.source.address]

    async def links(self) -> list[EdgeLink]:
        """All links that are up; Fault connection_lost when there is none."""
        up = [self._links[view.source.address] for view in await self.views() if view.connected]
        if not up:
            raise Fault(
                ErrorKind.CONNECTION_LOST,
                "no edge answers",
                hint="see `dsec status`; `dsec up` starts one",
                retryable=True,
            )
        return up

    async def route(self, sandbox: str) -> EdgeLink:
        """The edge a sandbox id names. Fault not_found for what is no id or names an edge that is not here."""
        edge = edge_of(sandbox)
        if edge is None:
            raise Fault(
                ErrorKind.NOT_FOUND,
                f"{sandbox[:64]!r} is not a sandbox id",
                hint="ids look like sb-<edge>-<12 characters>; `dsec ps` lists them",
            )
        return await self._named("sandbox", sandbox, edge)

    async def home(self, what: str, id: str) -> EdgeLink:
        """The same for the id of a rollout or a job (`what`)."""
        edge = home_of(id)
        if edge is None:
            raise Fault(ErrorKind.NOT_FOUND, f"{id[:64]!r} is not the id of a {what}", hint=f"see `dsec {what} ls`")
        return await self._named(what, id, edge)

    async def _named(self, what: str, id: str, edge: str) -> EdgeLink:
        view = self.watcher.find(edge)
        if view is not None:
            return self._links[view.source.address]
        known = [view.name for view in await self.views()]
        if known and edge not in known:
            raise Fault(
                ErrorKind.NOT_FOUND,
                f"{what} {id} is on edge {edge!r}, which does not exist here",
                hint=f"edges here: {', '.join(sorted(known))}",
                id=id,
            )
        return self.link(edge)
