"""Commands and files: what the apiserver asks of a sandbox goes to its aether, and what aether says goes back.

Bytes are passed on as they come, under credit on both sides, so a slow reader holds the sender and not this process's memory.
A caller that goes away never touches a command: its exec id attaches again later.
"""

from __future__ import annotations

import asyncio
import contextlib
from contextlib import ExitStack, suppress
from pathlib import Path

import msgspec
from blake3 import blake3

from dsec.backends.launcher import LauncherFailed
from dsec.protocol.errors import ErrorKind, Fault
from dsec.protocol.link import Call, Data, LinkStream, Note, decode
from dsec.protocol.specs import ExecDone, ExecSpec
from dsec.protocol.steps import step

from .lifecycle import Lifecycle
from .network import Networks
from .sandbox import Sandbox
from .sealing import refuse_if_sealed
from .starts import Starts
from .terminals import Terminals


class Target(msgspec.Struct, frozen=True):
    """The part of every sandbox method that says which one."""

    sandbox: str
    incarnation: int | None = None
    request_id: str = ""


class ExecParams(ExecSpec, frozen=True, kw_only=True):
    sandbox: str
    incarnation: int | None = None
    request_id: str = ""
    cursor: int = 0
    follow: bool = True
    staged: int | None = None
    ahead_digest: str = ""


_SPEC = ("argv", "line", "cwd", "env", "user", "stdin", "merge_stderr", "limits", "session", "pty", "ahead_digest")


def _spec(params: ExecParams) -> int:
    """What tells one command from another that comes under the same exec_id, before anything of ours is added: 63 bits of a
    digest. How long it may run and how much of it is kept is not part of it."""
    asked = [getattr(params, name) for name in _SPEC]
    return int.from_bytes(blake3(_encode(asked)).digest(8), "little") >> 1


class _Variables(Target, frozen=True):
    env: dict[str, str] = {}


class _Attach(Target, frozen=True):
    """wake: False for one who goes on waiting, and so does not resume a paused sandbox."""

    exec_id: str = ""
    cursor: int = 0
    wake: bool = True


class _Done(ExecDone, frozen=True, kw_only=True):
    """As aether tells it: amount says how much of what `reason` names."""

    amount: int = 0


_EXEC_FIELDS = ("exec_id", "argv", "line", "cwd", "env", "user", "stdin", "stdin_open", "timeout", "idle_timeout",
                "max_output_bytes", "merge_stderr", "detached", "limits", "session", "pty", "cursor",
                "follow", "staged")  # fmt: skip
_OF_THE_EDGE = frozenset(("sandbox", "incarnation", "request_id", "scope", "step_of"))
_RESENDABLE = frozenset(
    (
        "exec.attach",
        "exec.list",
        "exec.stage",
        "exec.close_stdin",
        "exec.resize",
        "session.open",
        "session.list",
        "fs.stat",
        "fs.list",
        "fs.read",
        "fs.tar",
    )
)
_encode = msgspec.msgpack.Encoder(order="sorted").encode
_DEATH_S = 0.25  # from the end of a connection to the news of the process's end, at most
_NIL = b"\xc0"
_MIB = 1024 * 1024
_UPLOADS = frozenset(("fs.write", "fs.untar"))


class Relay:
    def __init__(self, lifecycle: Lifecycle, networks: Networks, runtime: Path) -> None:
        self._lifecycle = lifecycle
        self._networks = networks
        self._terminals = Terminals(runtime)
        self._starts = Starts()

    async def exec(self, call: Call) -> object:
        """`exec`: foreground commands count as activity; how a limit ended one is added to its result."""
        params = call.params(ExecParams)
        if not params.argv and params.line is None and params.staged is None:
            raise Fault(
                ErrorKind.INVALID, "an empty command: neither argv nor line", hint="give a program and its arguments"
            )
        sandbox = await self._lifecycle.ready(params.sandbox, params.incarnation)
        fields = {name: getattr(params, name) for name in _EXEC_FIELDS}
        if fields.get("session") is None:  # a session has had them since it was opened, and may have changed them
            fields["env"] = await self._networks.with_variables(sandbox, params.env)
        fields["spec"] = _spec(params)
        detached = params.detached and not params.follow
        with sandbox.sleep.short() if detached else sandbox.activity():
            if params.pty is not None and params.session is None:
                await self._terminals.ready(sandbox)
            place = await self._starts.take()
            try:
                with step("exec.run", sandbox.id):
                    reply = await self._forward(
                        call, sandbox, "exec", fields, upload=params.stdin_open, resend=not params.stdin_open
                    )
            finally:
                place.free()
        if detached:
            sandbox.log(f"exec {params.exec_id} detached")
            return msgspec.Raw(reply)
        return await self._done(sandbox, reply)

    async def attach(self, call: Call) -> object:
        params = call.params(_Attach)
        reach = self._lifecycle.ready if params.wake else self._lifecycle.awake
        sandbox = await reach(params.sandbox, params.incarnation)
        fields = {"exec_id": params.exec_id, "cursor": params.cursor}
        with sandbox.activity():
            reply = await self._forward(call, sandbox, "exec.attach", fields, upload=False, resend=True)
        return await self._done(sandbox, reply)

    async def poll(self, call: Call) -> object:
        """`exec.poll`: the end of a command, or None while it runs."""
        params = call.params(_Attach)
        sandbox = await self._lifecycle.ready(params.sandbox, params.incarnation)
        fields = {"exec_id": params.exec_id}
        reply = await self._forward(call, sandbox, "exec.poll", fields, upload=False, resend=True)
        if reply == _NIL:
            return None
        return await self._done(sandbox, reply)

    async def plain(self, call: Call) -> object:
        """Every other method of aether, unchanged but for the fields that name the sandbox."""
        target = call.params(Target)
        sandbox = await self._lifecycle.ready(target.sandbox, target.incarnation)
        fields: dict[str, object] = dict(_fields(call))
        if call.method == "session.open":
            fields["env"] = await self._networks.with_variables(sandbox, call.params(_Variables).env)
        durable = step("write.file", sandbox.id) if call.method in _UPLOADS else ExitStack()
        with sandbox.sleep.short(), durable, sandbox.activity() if call.method.startswith("fs.") else ExitStack():
            reply = await self._forward(call, sandbox, call.method, fields, upload=call.method in _UPLOADS,
                                        resend=_harmless_twice(call.method, fields))  # fmt: skip
        return msgspec.Raw(reply)

    async def watch(self, call: Call) -> object:
        """`fs.watch`: who only looks on keeps nothing alive, and holds no pause up."""
        target = call.params(Target)
        sandbox = await self._lifecycle.ready(target.sandbox, target.incarnation)
        return msgspec.Raw(await self._forward(call, sandbox, call.method, _fields(call), upload=False, resend=True))

    async def _forward(
        self,
        call: Call,
        sandbox: Sandbox,
        method: str,
        fields: object,
        *,
        upload: bool,
        resend: bool = False,
    ) -> bytes:
        """One request to aether; sent once more when the connection turns out dead before anything came back."""
        for attempt in range(2):
            link = await sandbox.link()
            refuse_if_sealed(sandbox, method)
            stream = await link.open(method, fields)
            passed = 0
            pump = asyncio.create_task(_pump(call, stream)) if upload else None
            try:
                async for item in stream:
                    passed += 1
                    if isinstance(item, Data):
                        await call.send(item.data, item.channel)
                    elif isinstance(item, Note):
                        call.note_raw(item.payload)
                return await stream.result()
            except Fault as fault:
                if fault.body.kind is not ErrorKind.CONNECTION_LOST:
                    raise
                if pump is not None and _failed(pump):
                    raise  # it is the caller that is gone
                if await _has_ended(sandbox):
                    raise sandbox.unavailable() from fault
                if attempt or passed or not resend:
                    raise
            finally:
                stream.cancel()
                if pump is not None:
                    pump.cancel()
        raise AssertionError("unreachable")

    async def _done(self, sandbox: Sandbox, reply: bytes) -> ExecDone:
        done = decode(reply, _Done)
        detail = await self._detail(sandbox, done) if done.reason is not None else ""
        sandbox.log(f"exec {done.exec_id} exit {done.exit_code}" + (f" ({done.reason})" if done.reason else ""))
        return msgspec.structs.replace(done, incarnation=sandbox.incarnation, detail=detail)

    async def _detail(self, sandbox: Sandbox, done: _Done) -> str:
        """The limit that a command met, and the use of it."""
        args = sandbox.args
        if done.reason == "pids":
            return f"too many processes: limit {args.pids_limit}, {done.amount} refused while it ran"
        if done.reason == "disk_full":
            return f"the disk is full: limit {args.disk_limit_mb} MiB, {done.amount / _MIB:.1f} MiB used"
        peak = ""
        with suppress(LauncherFailed):  # it ends just now
            usage = await self._lifecycle.backend.usage(sandbox.id)
            self._lifecycle.account_oom(sandbox, usage.oom_kills)
            peak = f", peak {usage.memory_peak >> 20} MiB" if usage.memory_peak > 0 else ""
        return f"out of memory: limit {args.memory_limit_mb} MiB{peak}, {done.amount} killed while it ran"


def _harmless_twice(method: str, fields: dict[str, object]) -> bool:
    """A write to stdin that says where it belongs is taken once, however often it comes; so is what has an op id."""
    return (
        method in _RESENDABLE
        or (method == "exec.write" and "offset" in fields)
        or ("op" in fields and method not in _UPLOADS)
    )


async def _has_ended(sandbox: Sandbox) -> bool:
    """Whether a lost connection was the sandbox's end: the kernel closes sockets before it says that the process is gone."""
    if sandbox.pidfd >= 0 and not sandbox.ended.is_set():
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_DEATH_S):
                await sandbox.dying.wait()
    if sandbox.pidfd < 0 or sandbox.dying.is_set():
        await sandbox.ended.wait()
    return sandbox.ended.is_set()


def _fields(call: Call) -> dict[str, msgspec.Raw]:
    """What a request asks of aether."""
    return {k: v for k, v in decode(call.raw, dict[str, msgspec.Raw]).items() if k not in _OF_THE_EDGE}


def _failed(task: asyncio.Task[None]) -> bool:
    return task.done() and not task.cancelled() and task.exception() is not None


async def _pump(call: Call, stream: LinkStream) -> None:
    """The caller's bytes to aether. When the caller goes away before its END, aether is told by a cancel.

    When aether takes no more, its reply is there or the connection is gone: both are the reader's to tell.
    """
    chunks = aiter(call.data())
    while True:
        try:
            chunk = await anext(chunks, None)
        except Fault:
            stream.cancel()
            raise
        try:
            if chunk is None:
                await stream.end()
                return
            await stream.send(chunk)
        except Fault:
            return
