"""Environments' layers, as the service's store has them."""

from __future__ import annotations

from urllib.parse import quote

from dsec.protocol.specs import LayerRef

from .transport import Transport


class Layers:
    """`client.layers`."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    async def list(self) -> list[LayerRef]:
        """Every layer in the store."""
        return await self._transport.call("GET", "/v1/layers", list[LayerRef])

    async def inspect(self, ref: str | LayerRef) -> dict[str, object]:
        """The manifest of one layer: name, version, kind, blobs, provenance, sizes. NotFound when it is not there."""
        return await self._transport.call("GET", f"/v1/layers/{quote(str(ref), safe='@:')}", dict[str, object])
