"""Disk limits where the uppers' filesystem cannot keep them itself (plain directories): watched, and ended by name.

Walking every upper all the time would cost more than it saves, so the filesystem is asked how much it holds, which is one
cheap call, and only when that has grown are the uppers walked. A writer of 500 MB/s gets at most 128 MB past its limit.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from dsec.backends.launcher import LauncherFailed
from dsec.protocol.specs import Reason

from .lifecycle import Lifecycle
from .sandbox import Sandbox

TICK_S = 0.05
GROWTH = 16 * 1024 * 1024
AT_ONCE = 64
MIB = 1024 * 1024


class DiskWatch:
    def __init__(self, lifecycle: Lifecycle, runtime: Path, directory: Path) -> None:
        self._lifecycle = lifecycle
        self._runtime = runtime
        self._directory = directory
        self._seen = self._used()

    async def run(self) -> None:
        """As long as the edge runs."""
        while True:
            await asyncio.sleep(TICK_S)
            used = self._used()
            if used - self._seen >= GROWTH:
                await self._check([s for s in self._lifecycle.live() if s.lives])
                self._seen = used
            self._seen = min(self._seen, used)  # what was removed makes room for new growth

    def _used(self) -> int:
        stat = os.statvfs(self._directory)
        return (stat.f_blocks - stat.f_bfree) * stat.f_frsize

    async def _check(self, sandboxes: list[Sandbox]) -> None:
        for start in range(0, len(sandboxes), AT_ONCE):
            some = sandboxes[start : start + AT_ONCE]
            for sandbox, disk in zip(some, await self._measure(some), strict=False):
                if disk > sandbox.args.disk_limit_mb * MIB:
                    limit = sandbox.args.disk_limit_mb
                    self._lifecycle.end(sandbox, Reason.DISK_FULL, f"{disk / MIB:.0f} MiB on disk, limit {limit} MiB")

    async def _measure(self, sandboxes: list[Sandbox]) -> list[int]:
        """Bytes on disk of each, counted by one helper process; nothing for a sandbox that ends just now."""
        fds: list[int] = []
        try:
            for sandbox in sandboxes:
                try:
                    fds.append(await self._lifecycle.backend.upper(sandbox.id))
                except LauncherFailed:
                    return []
            process = await asyncio.create_subprocess_exec(
                self._runtime, "helper", "usage", *map(str, fds), pass_fds=fds, env={},
                stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE,
            )  # fmt: skip
            out, _ = await process.communicate()
            return [int(line) for line in out.split()]
        finally:
            for fd in fds:
                os.close(fd)
