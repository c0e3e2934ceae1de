"""The container backend: layers mounted once a node, sandboxes made by the launcher."""

from __future__ import annotations

import asyncio
import os
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

import msgspec

from dsec.layers import Environment, LayerStore, Manifest, mount_layer
from dsec.protocol.errors import ErrorKind, Fault
from dsec.protocol.specs import DSecContainerRunArgs
from dsec.protocol.steps import step

from .launcher import (
    CreateReply,
    Empty,
    LauncherClient,
    LauncherFailed,
    LauncherStatus,
    LauncherUsage,
    Reclaimed,
    ReclaimReply,
    StopReply,
    SweepReply,
)

MAX_MOUNTED = 2048
MIB = 1024 * 1024
_DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class Started(msgspec.Struct, frozen=True):
    """A container that answers: PID 1 in the host's numbering, its pidfd (the caller's to close), its socket."""

    pid: int
    start: int
    pidfd: int
    socket: Path
    stages_us: dict[str, int]


class _CreateRequest(msgspec.Struct, frozen=True):
    sandbox: str
    layers: list[str]
    memory: int
    cpu: float
    pids: int
    disk: int
    hostname: str
    incarnation: int
    socket: str
    init_user: str
    env: list[tuple[str, str]]
    workdir: str
    max_output: int


class _Digest(msgspec.Struct, frozen=True):
    digest: str


class _Name(msgspec.Struct, frozen=True):
    sandbox: str


class _Keep(msgspec.Struct, frozen=True):
    keep: list[str]


class LayerMounts:
    """One detached mount per layer, held here and in the launcher; least recently used ones go when there are too many."""

    def __init__(self, runtime: Path, store: LayerStore, launcher: Callable[[], LauncherClient]) -> None:
        self._runtime = runtime
        self._store = store
        self._launcher = launcher
        self._mounted: OrderedDict[str, int] = OrderedDict()
        self._users: dict[str, int] = {}
        self._locks: dict[str, asyncio.Lock] = {}

    async def acquire(self, manifests: tuple[Manifest, ...]) -> None:
        """Mounts what is not mounted yet and counts one more user of each."""
        for manifest in manifests:
            digest = manifest.digest
            self._users[digest] = self._users.get(digest, 0) + 1
            if digest in self._mounted:
                self._mounted.move_to_end(digest)
                continue
            lock = self._locks.setdefault(digest, asyncio.Lock())
            try:
                async with lock:
                    if digest not in self._mounted:
                        await self._mount(manifest)
            except BaseException:
                self.release(manifests[: manifests.index(manifest) + 1])
                raise

    def release(self, manifests: tuple[Manifest, ...]) -> None:
        for manifest in manifests:
            self._users[manifest.digest] -= 1
            if not self._users[manifest.digest]:
                del self._users[manifest.digest]

    def in_use(self) -> set[str]:
        return set(self._users)

    async def _mount(self, manifest: Manifest) -> None:
        meta, data = self._store.paths(manifest)
        fd = await asyncio.to_thread(mount_layer, self._runtime, meta, data)
        try:
            await self._launcher().call("layer", _Digest(manifest.digest), fds=(fd,))
        except BaseException:
            os.close(fd)
            raise
        self._mounted[manifest.digest] = fd
        if len(self._mounted) > MAX_MOUNTED:
            idle = next((d for d in self._mounted if d not in self._users), None)
            if idle is not None:
                await self.drop(idle)

    async def drop(self, digest: str) -> None:
        """Unmounts a layer that nobody uses (a sandbox that does keeps the mount alive by itself)."""
        fd = self._mounted.pop(digest, None)
        if (lock := self._locks.get(digest)) is not None and not lock.locked():
            del self._locks[digest]
        if fd is not None:
            os.close(fd)
            await self._launcher().call("unlayer", _Digest(digest))

    def close(self) -> None:
        while self._mounted:
            os.close(self._mounted.popitem()[1])


class ContainerBackend:
    """Creates, watches and removes containers; knows nothing of lifecycles."""

    name = "container"

    def __init__(self, runtime: Path, store: LayerStore, run: Path, max_output: int) -> None:
        self.launcher: LauncherClient | None = None
        self._run = run
        self._max_output = max_output
        self.mounts = LayerMounts(runtime, store, self._live_launcher)

    def _live_launcher(self) -> LauncherClient:
        if self.launcher is None:
            raise LauncherFailed("launcher", "the launcher is not running")
        return self.launcher

    def socket_path(self, sandbox: str) -> Path:
        return self._run / "sb" / f"{sandbox}.sock"

    async def create(
        self, sandbox: str, incarnation: int, args: DSecContainerRunArgs, environment: Environment
    ) -> Started:
        """A container that is ready for its first command, or Fault create_failed with its stage."""
        stage = "layers"
        try:
            with step("create.mount", sandbox):
                await self.mounts.acquire(environment.layers)
            try:
                stage = "launch"
                request = self._request(sandbox, incarnation, args, environment)
                with step("create.launch", sandbox):
                    reply, pidfd = await self._live_launcher().call_for_fd("create", request, CreateReply)
            except BaseException:
                self.mounts.release(environment.layers)
                raise
        except LauncherFailed as failed:
            raise _create_failed(f"{stage}.{failed.stage}", failed.error, sandbox) from failed
        except OSError as error:
            raise _create_failed(stage, str(error), sandbox) from error
        return Started(
            pid=reply.pid, start=reply.start, pidfd=pidfd, socket=self.socket_path(sandbox), stages_us=reply.create_us
        )

    def _request(
        self, sandbox: str, incarnation: int, args: DSecContainerRunArgs, environment: Environment
    ) -> _CreateRequest:
        env = {"PATH": _DEFAULT_PATH, "LANG": "C.UTF-8", **environment.env, **args.env}
        return _CreateRequest(
            sandbox=sandbox,
            layers=list(environment.digests()),
            memory=args.memory_limit_mb * MIB,
            cpu=float(args.cpu_cores_limit),
            pids=args.pids_limit,
            disk=args.disk_limit_mb * MIB,
            hostname=sandbox,
            incarnation=incarnation,
            socket=str(self.socket_path(sandbox)),
            init_user=args.init_user if args.init_user != "root" else environment.user or "root",
            env=list(env.items()),
            workdir=args.workdir or environment.workdir or "",
            max_output=self._max_output,
        )

    async def stop(self, sandbox: str, environment: Environment | None) -> LauncherUsage:
        """Returns when its processes, cgroups, upper and socket are gone."""
        try:
            return (await self._live_launcher().call("stop", _Name(sandbox), StopReply)).usage
        finally:  # whatever the launcher says: nobody will ask again
            if environment is not None:
                self.mounts.release(environment.layers)

    async def usage(self, sandbox: str) -> LauncherUsage:
        return (await self._live_launcher().call("usage", _Name(sandbox), StopReply)).usage

    async def freeze(self, sandbox: str) -> None:
        """Every process of it stands still when this returns."""
        await self._live_launcher().call("freeze", _Name(sandbox))

    async def thaw(self, sandbox: str) -> None:
        await self._live_launcher().call("thaw", _Name(sandbox))

    async def reclaim(self, sandbox: str) -> Reclaimed:
        """Lets the memory of a frozen sandbox go; a thaw ends it early."""
        return (await self._live_launcher().call("reclaim", _Name(sandbox), ReclaimReply)).reclaimed

    async def prefetch(self, sandbox: str) -> Reclaimed:
        """Asks for what was in memory at the last `reclaim`; does not wait until it is there."""
        return (await self._live_launcher().call("prefetch", _Name(sandbox), ReclaimReply)).reclaimed

    async def upper(self, sandbox: str) -> int:
        """A descriptor of the upper directory; hostile content, to be handed to a helper and closed."""
        return (await self._live_launcher().call_for_fd("upper", _Name(sandbox), Empty))[1]

    async def status(self) -> LauncherStatus:
        return await self._live_launcher().call("status", None, LauncherStatus)

    async def sweep(self, keep: list[str]) -> dict[str, int]:
        return (await self._live_launcher().call("sweep", _Keep(keep), SweepReply)).removed


def _create_failed(stage: str, error: str, sandbox: str) -> Fault:
    return Fault(
        ErrorKind.CREATE_FAILED,
        f"the container could not be made, at {stage}: {error}",
        hint="`dsec doctor` tells what this machine can do; the edge's log has more",
        retryable=True,
        stage=stage,
        sandbox_id=sandbox,
    )
