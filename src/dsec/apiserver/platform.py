"""The platform itself: layers, capabilities, status, health, the document that describes all this."""

from __future__ import annotations

import msgspec
from starlette.responses import Response

from dsec.protocol.errors import ErrorKind, Fault
from dsec.protocol.specs import Capabilities, Capability

from .bodies import EdgeHealth, Health, PlatformStatus
from .exchange import JSON, Exchange
from .fleet import EdgeLink


async def health(x: Exchange) -> Response:
    """Open to everybody: says that the process answers and how many edges it holds, nothing more."""
    edges = sum(view.connected for view in x.services.fleet.watcher.view())
    return x.reply(Health(ok=edges > 0, version=x.services.version, edges=edges))


async def openapi(x: Exchange) -> Response:
    return Response(x.services.openapi, media_type=JSON)


async def status(x: Exchange) -> Response:
    views = await x.services.fleet.views()
    edges = [EdgeHealth(view.status, view.connected, view.suspect) for view in views]
    return x.reply(PlatformStatus(x.services.version, edges))


async def capabilities(x: Exchange) -> Response:
    """What every edge can do: a feature holds when it holds on all of them. The holder of a scoped key learns no more than that
    it is valid."""
    if x.principal is None or x.principal.claims is not None:
        return x.reply(Capabilities(x.services.version, {"container": True}, (), {}))
    views = await x.services.fleet.views()
    features: dict[str, Capability] = {}
    for view in views:
        for feature in view.status.features:
            if feature.name not in features or not feature.ok:
                features[feature.name] = feature
    limits = {
        "max_sandboxes": sum(view.status.max_sandboxes for view in views),
        "memory_total": sum(view.status.memory_total for view in views),
    }
    backends = {"container": bool(views)}
    mirrors = {name: kind for view in views for name, kind in view.status.mirrors.items()}
    return x.reply(Capabilities(x.services.version, backends, tuple(features.values()), limits, mirrors))


async def layers(x: Exchange) -> Response:
    link = await _any_edge(x)
    return _transcoded(await link.call("layers.list", {"request_id": x.request_id}))


async def layer(x: Exchange) -> Response:
    link = await _any_edge(x)
    return _transcoded(await link.call("layers.inspect", {"request_id": x.request_id, "ref": x.path_param("ref")}))


async def _any_edge(x: Exchange) -> EdgeLink:
    """Edges share one layer store, so any of them knows."""
    return (await x.services.fleet.links())[0]


def _transcoded(payload: bytes) -> Response:
    """msgpack to JSON without a type: the manifest's shape belongs to the layer store, not to this process."""
    try:
        return Response(msgspec.json.encode(msgspec.msgpack.decode(payload)), media_type=JSON)
    except msgspec.DecodeError as error:
        raise Fault(ErrorKind.INTERNAL, f"unreadable answer from the edge: {error}") from error
