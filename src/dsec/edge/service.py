"""The edge's methods (ARCHITECTURE.md, apiserver to edge), one handler each."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections import Counter
from pathlib import Path

import msgspec

from dsec.backends.launcher import LauncherFailed
from dsec.layers import LayerStore
from dsec.protocol.errors import ErrorKind, Fault
from dsec.protocol.link import Call, Handler, pack_record
from dsec.protocol.specs import (
    Capability,
    CreateOutcome,
    DSecContainerRunArgs,
    EdgeStatus,
    Limits,
    Reason,
    SandboxInfo,
    State,
    Usage,
)

from . import changes, hosts
from .accounting import Accounts, usage_of
from .admission import memory
from .forward import Forward
from .jobs import JobService
from .journal import Change, Record
from .lifecycle import Lifecycle
from .network import Networks
from .proxy.rules import check_rules
from .recording import Recorder
from .relay import Relay, Target
from .rollouts import Rollouts
from .sandbox import Sandbox
from .sealing import refuse_if_sealed

MAX_BURST = 100_000
FRESH_S = 1.0
"""How old the usages may be that a list carries."""
_BATCH = 32 * 1024  # bytes of records in one frame
MAX_CHANGES = 256 * 1024 * 1024  # one file's contents are held whole on their way
_FILE_METHODS = ("fs.stat", "fs.list", "fs.read", "fs.write", "fs.mkdir", "fs.move", "fs.remove", "fs.tar", "fs.untar")
_EXEC_METHODS = ("exec.stage", "exec.write", "exec.close_stdin", "exec.signal", "exec.resize", "exec.list")


_SESSION_METHODS = ("session.open", "session.list", "session.close", "session.interrupt")


class _Create(msgspec.Struct, frozen=True):
    args: DSecContainerRunArgs
    timeout: float = 120
    job: str = ""
    request_id: str = ""


class _CreateMany(msgspec.Struct, frozen=True):
    args: tuple[DSecContainerRunArgs, ...]
    count: int = 1
    timeout: float = 120
    job: str = ""
    request_id: str = ""


class _List(msgspec.Struct, frozen=True):
    """usage: what each uses now, not only which there are."""

    labels: dict[str, str] | None = None
    states: tuple[State, ...] | None = None
    job: str | None = None
    usage: bool = False
    request_id: str = ""

    def wants(self, found: Sandbox | Record) -> bool:
        return (
            (self.states is None or found.state in self.states)
            and (not self.labels or _matches(found.args.labels, self.labels))
            and (self.job is None or found.job == self.job)
        )


class _Stop(Target, frozen=True):
    wait: bool = True


class _StopBurst(msgspec.Struct, frozen=True):
    burst: str
    keep: tuple[str, ...] = ()
    request_id: str = ""


class _Ttl(Target, frozen=True):
    running_stop: float | msgspec.UnsetType | None = msgspec.UNSET
    total: float | msgspec.UnsetType | None = msgspec.UNSET


class _Network(Target, frozen=True, kw_only=True):
    rules: dict[str, bool]


class _Changes(Target, frozen=True):
    include: tuple[str, ...] = ()
    contents: tuple[str, ...] = ()
    bare: tuple[str, ...] = ()
    max_bytes: int = 64 * 1024 * 1024


class _LayerFiles(msgspec.Struct, frozen=True):
    ref: str
    include: tuple[str, ...] = ()
    known: str = ""
    request_id: str = ""


class _LayerRef(msgspec.Struct, frozen=True):
    ref: str
    name: str = ""
    request_id: str = ""


class Service:
    def __init__(
        self,
        *,
        lifecycle: Lifecycle,
        networks: Networks,
        rollouts: Rollouts,
        recorder: Recorder,
        store: LayerStore,
        runtime: Path,
        version: str,
    ) -> None:
        self._lifecycle = lifecycle
        self._networks = networks
        self._rollouts = rollouts
        self._recorder = recorder
        self._store = store
        self._runtime = runtime
        self._version = version
        self.features: tuple[Capability, ...] = ()  # set when the probes are through
        self._started = time.time()
        self._relay = Relay(lifecycle, networks, runtime)
        self.forward = Forward(lifecycle)
        self.accounts = Accounts(lifecycle)
        self.jobs = JobService(lifecycle, self.accounts, rollouts.count)

    def handlers(self) -> dict[str, Handler]:
        table: dict[str, Handler] = {
            "sandbox.create": self.create,
            "sandbox.create_many": self.create_many,
            "sandbox.info": self.info,
            "sandbox.list": self.list,
            "sandbox.stop": self.stop,
            "sandbox.stop_many": self.stop_many,
            "sandbox.stop_burst": self.stop_burst,
            "sandbox.pause": self.pause,
            "sandbox.resume": self.resume,
            "sandbox.seal": self.seal,
            "sandbox.ttl": self.ttl,
            "sandbox.network": self.network,
            "sandbox.logs": self.logs,
            "sandbox.changes": self.changes,
            "exec": self._relay.exec,
            "exec.attach": self._relay.attach,
            "fs.watch": self._relay.watch,
            "exec.poll": self._relay.poll,
            "port.connect": self.forward.connect,
            "port.listen": self.forward.listen,
            "port.accept": self.forward.accept,
            "edge.status": self.status,
            "layers.list": self.layers_list,
            "layers.inspect": self.layers_inspect,
            "layers.files": self.layers_files,
            "layers.remove": self.layers_remove,
            "layers.tag": self.layers_tag,
            **self.jobs.handlers(),
        }
        table.update((method, self._relay.plain) for method in (*_FILE_METHODS, *_EXEC_METHODS, *_SESSION_METHODS))
        table.update(self._rollouts.handlers())
        return self._recorder.over(table)

    # -- sandboxes --

    async def create(self, call: Call) -> object:
        params = call.params(_Create)
        return await self._lifecycle.create(params.args, params.timeout, params.job)

    async def create_many(self, call: Call) -> object:
        """Each outcome as it comes. A caller that goes away stops what is not yet created."""
        params = call.params(_CreateMany)
        wanted = params.args * params.count if len(params.args) == 1 else params.args
        if not 0 < len(wanted) <= MAX_BURST:
            raise Fault(ErrorKind.INVALID, f"count: {len(wanted)} is not between 1 and {MAX_BURST}")

        async def one(index: int, args: DSecContainerRunArgs) -> None:
            try:
                created = await self._lifecycle.create(args, params.timeout, params.job)
                call.note(CreateOutcome(index=index, created=created))
            except Fault as fault:
                call.note(CreateOutcome(index=index, error=msgspec.to_builtins(fault.body)))

        async with asyncio.TaskGroup() as group:
            for index, args in enumerate(wanted):
                group.create_task(one(index, args))
        return {}

    async def info(self, call: Call) -> object:
        found = self._lifecycle.get(call.params(Target).sandbox)
        usage = Usage()
        if isinstance(found, Sandbox) and found.lives:
            with contextlib.suppress(LauncherFailed):  # it ends just now; the state says so
                usage = usage_of(await self._lifecycle.backend.usage(found.id))
        return self._info(found, usage)

    async def list(self, call: Call) -> object:
        params = call.params(_List)
        chosen = [found for found in self._lifecycle.all() if params.wants(found)]
        usages: dict[str, Usage] = {}
        if params.usage:
            usages = await self.accounts.measure((one for one in chosen if isinstance(one, Sandbox)), FRESH_S)
        batch = bytearray()
        for found in chosen:
            batch += pack_record(self._info(found, usages.get(found.id, Usage())))
            if len(batch) > 32 * 1024:
                await call.send(bytes(batch))
                batch.clear()
        if batch:
            await call.send(bytes(batch))
        return {"count": len(chosen)}

    async def stop(self, call: Call) -> object:
        params = call.params(_Stop)
        await asyncio.shield(self._lifecycle.stop(params.sandbox, wait=params.wait))
        return {}

    async def stop_many(self, call: Call) -> object:
        params = call.params(_List)
        chosen = [s for s in self._lifecycle.live() if _matches(s.args.labels, params.labels or {})]
        await asyncio.gather(*(self._lifecycle.stop(s.id, Reason.USER) for s in chosen))
        return {"count": len(chosen)}

    async def stop_burst(self, call: Call) -> object:
        """Everything of one burst, still in creation or not, but what its caller took."""
        params = call.params(_StopBurst)
        return {"count": await self._lifecycle.stop_burst(params.burst, frozenset(params.keep))}

    async def pause(self, call: Call) -> object:
        params = call.params(Target)
        await self._lifecycle.pause(params.sandbox, params.incarnation)
        return {}

    async def resume(self, call: Call) -> object:
        params = call.params(Target)
        await self._lifecycle.resume(params.sandbox, params.incarnation)
        return {}

    async def seal(self, call: Call) -> object:
        """Answered when nothing but PID 1 runs there."""
        params = call.params(Target)
        await self._lifecycle.seal(params.sandbox, params.incarnation)
        return {}

    async def ttl(self, call: Call) -> object:
        params = call.params(_Ttl)
        sandbox = self._lifecycle.running(params.sandbox, params.incarnation)
        for name, value in (("running_stop", params.running_stop), ("total", params.total)):
            if isinstance(value, float) and not 0 < value < float("inf"):
                raise Fault(ErrorKind.INVALID, f"{name}: {value} is not a positive number of seconds (None: never)")
        await self._lifecycle.set_ttl(sandbox, Change(idle_limit=params.running_stop, total_limit=params.total))
        return {}

    async def network(self, call: Call) -> object:
        """New rules; `Network` when they hold."""
        params = call.params(_Network)
        check_rules(params.rules)
        sandbox = await self._lifecycle.ready(params.sandbox, params.incarnation)
        refuse_if_sealed(sandbox, call.method)
        args = msgspec.structs.replace(sandbox.args, network_rules=params.rules)
        await self._lifecycle.set_args(sandbox, args)
        return await self._networks.change(sandbox)

    async def logs(self, call: Call) -> object:
        found = self._lifecycle.get(call.params(Target).sandbox)
        for at, line in found.lines if isinstance(found, Sandbox) else ():
            call.note({"t": at, "line": line})
        return {}

    async def changes(self, call: Call) -> object:
        params = call.params(_Changes)
        if not 0 <= params.max_bytes <= MAX_CHANGES:
            raise Fault(
                ErrorKind.INVALID,
                f"max_bytes: {params.max_bytes} is not between 0 and {MAX_CHANGES}",
                hint="narrow `include`, or fetch large files with files.download",
            )
        sandbox = self._lifecycle.running(params.sandbox, params.incarnation)
        count, truncated = 0, False
        with sandbox.activity():
            upper = await self._lifecycle.backend.upper(sandbox.id)
            walked = changes.walk(self._runtime, upper, params.include, params.max_bytes, params.contents, params.bare)
            batch = _Batch(call)
            residue = self._networks.residue(sandbox)
            if sandbox.hosts is not None and (etc := sandbox.hosts.directory) is not None:
                residue.know_directory(b"etc", etc.mode, etc.uid, etc.gid)
            async for item in residue.without(hosts.without(walked, sandbox.hosts, sandbox.services)):
                if isinstance(item, bool):
                    truncated = item
                else:
                    count += 1
                    await batch.put(item)
            await batch.out()
        return {"count": count, "truncated": truncated}

    def _info(self, found: Sandbox | Record, usage: Usage) -> SandboxInfo:
        args = found.args
        return SandboxInfo(
            id=found.id,
            backend=self._lifecycle.backend.name,
            state=found.state,
            reason=found.reason,
            created_at=found.created_at,
            labels=args.labels,
            limits=Limits(args.cpu_cores_limit, args.memory_limit_mb, args.disk_limit_mb, args.pids_limit),
            usage=usage,
            layers=found.layers,
            network=self._networks.describe(found),
            edge=self._lifecycle.edge,
            incarnation=found.incarnation,
            detail=found.detail,
            job=found.job,
        )

    # -- the edge itself --

    async def status(self, call: Call) -> object:
        available, total = memory()
        admission = self._lifecycle.admission
        launcher = await self._lifecycle.backend.status()
        return EdgeStatus(
            edge=self._lifecycle.edge,
            epoch=self._lifecycle.epoch,
            version=self._version,
            started_at=self._started,
            sandboxes=dict(Counter(s.state.value for s in self._lifecycle.live())),
            max_sandboxes=admission.max_sandboxes,
            creating=admission.creating,
            queued=admission.queued,
            memory_available=available,
            memory_total=total,
            disk_free=launcher.uppers.free,
            created_total=self._lifecycle.created_total,
            failed_total=self._lifecycle.failed_total,
            features=self.features,
            mirrors={mirror.name: mirror.kind.value for mirror in self._networks.mirrors},
        )

    # -- layers --

    async def layers_list(self, call: Call) -> object:
        return await asyncio.to_thread(self._store.list)

    async def layers_inspect(self, call: Call) -> object:
        return await asyncio.to_thread(self._store.inspect, call.params(_LayerRef).ref)

    async def layers_files(self, call: Call) -> object:
        """What is in a layer, as changes without contents; nothing when its digest is the one that is known already."""
        params = call.params(_LayerFiles)
        manifest = await asyncio.to_thread(self._store.resolve, params.ref)
        count = 0
        if manifest.digest != params.known:
            mount = await self._lifecycle.backend.mounts.held(manifest)
            batch = _Batch(call)
            async for item in changes.walk(self._runtime, mount, params.include, 0):
                if not isinstance(item, bool):
                    count += 1
                    await batch.put(item)
            await batch.out()
        return {"digest": manifest.digest, "config": manifest.config, "count": count}

    async def layers_remove(self, call: Call) -> object:
        ref = call.params(_LayerRef).ref
        manifest = await asyncio.to_thread(self._store.resolve, ref)
        mounts = self._lifecycle.backend.mounts
        if manifest.digest in mounts.in_use():
            raise Fault(ErrorKind.CONFLICT, f"layer {ref} is used by live sandboxes", hint="stop them first")
        await mounts.drop(manifest.digest)
        await asyncio.to_thread(self._store.remove, ref)
        return {}

    async def layers_tag(self, call: Call) -> object:
        params = call.params(_LayerRef)
        await asyncio.to_thread(self._store.tag, params.ref, params.name)
        return {}


class _Batch:
    """Records on their way to the caller, many in a frame."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self._held = bytearray()

    async def put(self, record: object) -> None:
        self._held += pack_record(record)
        if len(self._held) > _BATCH:
            await self.out()

    async def out(self) -> None:
        if self._held:
            held, self._held = bytes(self._held), bytearray()
            await self._call.send(held)


def _matches(labels: dict[str, str], wanted: dict[str, str]) -> bool:
    return all(labels.get(key) == value for key, value in wanted.items())


def socket_directory(run: Path) -> None:
    """<run>/sb, where aethers listen: for root only."""
    os.makedirs(run / "sb", mode=0o700, exist_ok=True)
