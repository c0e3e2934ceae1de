"""How long recorded rollouts are kept: those that ended go by age, and by the size of all that is recorded."""

from __future__ import annotations

import asyncio

import structlog

from dsec.protocol.errors import Fault
from dsec.rollout.trajectory import TrajectoryStore

EVERY_S = 600.0
_DAY = 86_400.0
_GB = 1e9
_log = structlog.get_logger("edge")


class Retention:
    def __init__(self, store: TrajectoryStore, *, keep_days: float, keep_gb: float, every_s: float = EVERY_S) -> None:
        self._store = store
        self._age_s, self._bytes = keep_days * _DAY, int(keep_gb * _GB)
        self._every_s = every_s

    async def run(self) -> None:
        """At the start, when there may be much, and then every so often."""
        while True:
            try:
                removed = await self._store.retain(max_age_s=self._age_s, max_bytes=self._bytes)
            except (Fault, OSError) as error:
                _log.error("rollouts that are through could not be removed", error=str(error))
            else:
                if removed:
                    _log.info("removed rollouts that ended", count=removed)
            await asyncio.sleep(self._every_s)
