"""The fleet as the holder of a scoped key sees it: every request to an edge says how far it may go, whoever sends it.

Handlers cannot forget it, since they have no other way to an edge; the edge decides (`edge/scopes.py`).
"""

from __future__ import annotations

from collections.abc import Mapping

from dsec.protocol.ids import home_of
from dsec.protocol.link import LinkClient
from dsec.protocol.scopes import Scope
from dsec.watcher.watcher import EdgeView

from .fleet import EdgeLink, Fleet


class ScopedLink(EdgeLink):
    def __init__(self, link: EdgeLink, scope: Scope) -> None:
        self._link = link
        self._scope = scope

    @property
    def address(self) -> str:
        return self._link.address

    @property
    def connected(self) -> bool:
        return self._link.connected

    def _connected(self) -> LinkClient:
        return self._link._connected()

    def _told(self, params: object) -> object:
        assert isinstance(params, Mapping)
        return {**params, "scope": self._scope}


class ScopedFleet(Fleet):
    def __init__(self, whole: Fleet, scope: Scope) -> None:
        self._whole = whole
        self._scope = scope
        self.watcher = whole.watcher

    async def views(self) -> list[EdgeView]:
        """Only the edge of its job: sandboxes and rollouts of a job are where it is."""
        return [view for view in await self._whole.views() if view.name == home_of(self._scope.job)]

    def link(self, edge: str) -> EdgeLink:
        return ScopedLink(self._whole.link(edge), self._scope)

    async def links(self) -> list[EdgeLink]:
        return [self.link(home_of(self._scope.job) or "")]

    async def route(self, sandbox: str) -> EdgeLink:
        return ScopedLink(await self._whole.route(sandbox), self._scope)

    async def home(self, what: str, id: str) -> EdgeLink:
        return ScopedLink(await self._whole.home(what, id), self._scope)
