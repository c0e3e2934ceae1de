"""Where the edges are. Embedded it is one socket; a cluster's registry changes while it runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class EdgeRegistry(Protocol):
    def addresses(self) -> Sequence[str]:
        """Link addresses (socket paths) of every edge that should be there, whether it answers or not."""
        ...


class FixedRegistry:
    """A list that never changes: the one edge of `dsec up`."""

    def __init__(self, addresses: Sequence[str]) -> None:
        self._addresses = tuple(addresses)

    def addresses(self) -> Sequence[str]:
        return self._addresses
