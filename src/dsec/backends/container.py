"""The container backend: layers mounted once a node, sandboxes made by the launcher."""

from __future__ import annotations

import asyncio
import os
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from dsec.layers import Environment, LayerStore, Manifest, mount_layer
from dsec.protocol.errors import ErrorKind, Fault
from dsec.protocol.specs import DSecContainerRunArgs
from dsec.protocol.steps import step

from .launcher import (
    CreateReply,
    Empty,
    KeepReply,
    LauncherClient,
    LauncherFailed,
    LauncherGone,
    LauncherStatus,
    LauncherUsage,
    Reclaimed,
    ReclaimReply,
    StopReply,
    SweepReply,
)

T = TypeVar("T")
MAX_MOUNTED = 2048
RESTORE_S = 30.0
KEPT_AT_ONCE = 256
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


class Kept(msgspec.Struct, frozen=True, array_like=True):
    """A sandbox that a new launcher has to keep, with what it was promised: bytes, cores."""

    sandbox: str
    memory: int
    cpu: float
    pids: int
    disk: int

    @classmethod
    def of(cls, sandbox: str, args: DSecContainerRunArgs) -> Kept:
        return cls(
            sandbox, args.memory_limit_mb * MIB, float(args.cpu_cores_limit), args.pids_limit, args.disk_limit_mb * MIB
        )


class _Keep(msgspec.Struct, frozen=True):
    keep_with: list[Kept]


class LayerMounts:
    """One detached mount per layer, held here and in the launcher; least recently used ones go when there are too many."""

    def __init__(self, runtime: Path, store: LayerStore, launcher: Callable[[], Awaitable[LauncherClient]]) -> None:
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

    def hold(self, manifests: tuple[Manifest, ...]) -> None:
        """Counts one more user of each, without mounting: a sandbox that is there has mounts of its own."""
        for manifest in manifests:
            self._users[manifest.digest] = self._users.get(manifest.digest, 0) + 1

    async def hand_over(self, launcher: LauncherClient) -> None:
        """A new launcher gets what is mounted here."""
        for digest, fd in list(self._mounted.items()):
            await launcher.call("layer", _Digest(digest), fds=(fd,))

    async def held(self, manifest: Manifest) -> int:
        """A descriptor of the layer's mount, the caller's to close."""
        await self.acquire((manifest,))
        try:
            return os.dup(self._mounted[manifest.digest])
        finally:
            self.release((manifest,))

    def in_use(self) -> set[str]:
        return set(self._users)

    async def _mount(self, manifest: Manifest) -> None:
        meta, data = self._store.paths(manifest)
        fd = await asyncio.to_thread(mount_layer, self._runtime, meta, data)
        try:
            await (await self._launcher()).call("layer", _Digest(manifest.digest), fds=(fd,))
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
            await (await self._launcher()).call("unlayer", _Digest(digest))

    def close(self) -> None:
        while self._mounted:
            os.close(self._mounted.popitem()[1])


class ContainerBackend:
    """Creates, watches and removes containers; knows nothing of lifecycles."""

    name = "container"

    def __init__(self, runtime: Path, store: LayerStore, run: Path, max_output: int) -> None:
        self.launcher: LauncherClient | None = None
        self._restored = asyncio.Event()
        self._run = run
        self._max_output = max_output
        self.mounts = LayerMounts(runtime, store, self._live_launcher)

    async def _live_launcher(self) -> LauncherClient:
        """The launcher, once it knows what earlier ones made; LauncherGone when none comes in time."""
        try:
            if not self._restored.is_set():
                async with asyncio.timeout(RESTORE_S):
                    await self._restored.wait()
        except TimeoutError:
            raise LauncherGone("launcher", f"there has been no launcher for {RESTORE_S:g} s") from None
        assert self.launcher is not None
        return self.launcher

    async def _call(self, verb: str, sandbox: str, kind: type[T]) -> T:
        """A request that may be made twice: again to the next launcher when this one dies over it."""
        try:
            return await (await self._live_launcher()).call(verb, _Name(sandbox), kind)
        except LauncherGone:
            return await (await self._live_launcher()).call(verb, _Name(sandbox), kind)

    def lost(self) -> None:
        """The launcher died: requests wait for the next one."""
        self._restored.clear()

    async def restore(self, kept: Sequence[Kept]) -> dict[str, int]:
        """Tells a launcher that has just started what it must keep; it removes all else: how many of what."""
        launcher = self.launcher
        assert launcher is not None
        await self.mounts.hand_over(launcher)
        for start in range(0, len(kept), KEPT_AT_ONCE):
            await launcher.call("keep", _Keep(list(kept[start : start + KEPT_AT_ONCE])), KeepReply)
        removed = (await launcher.call("sweep", None, SweepReply)).removed
        self._restored.set()
        return removed

    def socket_path(self, sandbox: str) -> Path:
        return self._run / "sb" / f"{sandbox}.sock"

    async def create(
        self, sandbox: str, incarnation: int, args: DSecContainerRunArgs, environment: Environment
    ) -> Started:
        """A container that is ready for its first command, or Fault create_failed with its stage.

        When the launcher dies over it, what it had made goes, and the next launcher makes it anew; once.
        """
        try:
            try:
                return await self._create(sandbox, incarnation, args, environment)
            except LauncherGone:
                return await self._create(sandbox, incarnation, args, environment)
        except LauncherFailed as failed:
            raise _create_failed(failed.stage, failed.error, sandbox) from failed

    async def _create(
        self, sandbox: str, incarnation: int, args: DSecContainerRunArgs, environment: Environment
    ) -> Started:
        stage = "layers"
        try:
            with step("create.mount", sandbox):
                await self.mounts.acquire(environment.layers)
            try:
                stage = "launch"
                request = self._request(sandbox, incarnation, args, environment)
                with step("create.launch", sandbox):
                    launcher = await self._live_launcher()
                    reply, pidfd = await launcher.call_for_fd("create", request, CreateReply)
            except BaseException:
                self.mounts.release(environment.layers)
                raise
        except LauncherFailed as failed:
            failed.stage = f"{stage}.{failed.stage}"
            raise
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
            return (await self._call("stop", sandbox, StopReply)).usage
        except LauncherFailed as failed:
            if failed.stage != "unknown":
                raise
            return LauncherUsage()  # gone already
        finally:  # whatever the launcher says: nobody will ask again
            if environment is not None:
                self.mounts.release(environment.layers)

    async def usage(self, sandbox: str) -> LauncherUsage:
        return (await self._call("usage", sandbox, StopReply)).usage

    async def freeze(self, sandbox: str) -> None:
        """Every process of it stands still when this returns."""
        await self._call("freeze", sandbox, Empty)

    async def thaw(self, sandbox: str) -> None:
        await self._call("thaw", sandbox, Empty)

    async def kill(self, sandbox: str) -> None:
        """Every process of it but PID 1 is dead when this returns, frozen ones too."""
        await self._call("kill", sandbox, Empty)

    async def reclaim(self, sandbox: str) -> Reclaimed:
        """Lets the memory of a frozen sandbox go; a thaw ends it early."""
        return (await self._call("reclaim", sandbox, ReclaimReply)).reclaimed

    async def prefetch(self, sandbox: str) -> Reclaimed:
        """Asks for what was in memory at the last `reclaim`; does not wait until it is there."""
        return (await self._call("prefetch", sandbox, ReclaimReply)).reclaimed

    async def upper(self, sandbox: str) -> int:
        """A descriptor of the upper directory; hostile content, to be handed to a helper and closed."""
        try:
            return (await (await self._live_launcher()).call_for_fd("upper", _Name(sandbox), Empty))[1]
        except LauncherGone:
            return (await (await self._live_launcher()).call_for_fd("upper", _Name(sandbox), Empty))[1]

    async def status(self) -> LauncherStatus:
        return await (await self._live_launcher()).call("status", None, LauncherStatus)


def _create_failed(stage: str, error: str, sandbox: str) -> Fault:
    return Fault(
        ErrorKind.CREATE_FAILED,
        f"the container could not be made, at {stage}: {error}",
        hint="`dsec doctor` tells what this machine can do; the edge's log has more",
        retryable=True,
        stage=stage,
        sandbox_id=sandbox,
    )
