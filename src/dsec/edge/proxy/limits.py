"""What one sandbox and one connection may take of the proxy; seconds and counts. Injected, so that tests need not wait."""

from __future__ import annotations

import msgspec


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """head: from a request's first byte to the end of its head, and for a ClientHello. keep_alive: between requests.
    idle: without a byte either way. crowded: connections from which on none is kept open between requests."""

    head: float = 15.0
    keep_alive: float = 30.0
    idle: float = 300.0
    resolve: float = 8.0
    connect: float = 8.0
    linger: float = 2.0
    connections: int = 14
    crowded: int = 8
    resolutions: int = 4
    addresses: int = 4
