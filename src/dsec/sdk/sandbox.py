"""A handle to one sandbox, whatever its backend."""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator, Mapping, Sequence
from ssl import SSLContext
from types import TracebackType
from typing import Self

import msgspec
from msgspec import UNSET, UnsetType

from dsec.protocol.grading import GradeSource
from dsec.protocol.ids import new_session_name
from dsec.protocol.specs import (
    Change,
    ChangeSet,
    ExecLimits,
    Network,
    ProcessInfo,
    PtySize,
    SandboxInfo,
    SessionInfo,
    SessionSpec,
    Usage,
)

from .commands import Started, body_of, run, seconds, text_or_bytes
from .errors import DSecError, NotFound
from .files import Files
from .ports import Exposed, Forward
from .process import Process
from .results import ExecResult, LogLine
from .session import Session
from .transport import NDJSON, Target, Transport, cut, decode, encode, json_lines

_MIB = 1024 * 1024


class _Line(msgspec.Struct):
    t: float
    line: str


class _Totals(msgspec.Struct):
    count: int
    truncated: bool = False


class _End(msgspec.Struct):
    """The last line of a list, so that a cut one is noticed."""

    end: _Totals


class Sandbox:
    """One sandbox. Every answer is checked to come from the incarnation that this handle was made for.

    `async with sandbox:` stops a sandbox that this program created and merely detaches from one it attached to.
    An infrastructure failure raises SandboxUnavailable with its reason; it is never a command's result.
    """

    def __init__(self, transport: Transport, sandbox_id: str, incarnation: int, *, owned: bool = False) -> None:
        self.id = sandbox_id
        self.incarnation = incarnation
        self._transport = transport
        self._owned = owned
        self._path = f"/v1/sandboxes/{sandbox_id}"
        self._target = Target(sandbox_id, incarnation)
        self.files = Files(transport, self._target)

    def __repr__(self) -> str:
        return f"Sandbox({self.id!r})"

    @classmethod
    def _of(cls, transport: Transport, target: Target) -> Self:
        """A handle whose requests are about this target, a step of a rollout too."""
        made = cls(transport, target.sandbox_id, target.incarnation)
        made._target, made.files = target, Files(transport, target)
        return made

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._owned:
            await self._end(error)

    async def _end(self, error: BaseException | None) -> None:
        """Stops it at the end of a block; what is gone already is fine, and the block's own error goes before ours."""
        try:
            await self.stop()
        except NotFound:
            return
        except DSecError as failed:
            if error is None:
                raise
            error.add_note(f"sandbox {self.id} could not be stopped: {failed}")

    # -- commands --

    async def run_shell(
        self,
        line: str,
        *,
        cwd: str | bytes | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        stdin: bytes | bytearray | memoryview | str | AsyncIterable[bytes] | None = None,
        timeout: float | None = 600,
        idle_timeout: float | None = None,
        max_output_bytes: int = 16 * _MIB,
        merge_stderr: bool = False,
        exec_id: str | None = None,
        limits: ExecLimits | None = None,
        check: bool = False,
    ) -> ExecResult:
        """Runs a line in the image's bash (else sh) and waits for its end, however long that takes.

        cwd and user default to the sandbox's; env is added to it; stdin None is /dev/null. timeout and idle_timeout (no
        output) in seconds: at either the command's whole tree is killed, the output so far kept (`result.timed_out`).
        max_output_bytes is kept of each stream. The same exec_id again gives the first run's result and runs nothing;
        with another command it is a Conflict.
        limits: resource limits of its processes below the sandbox's own. stdin may be given piece by piece.
        check=True raises CommandFailed unless the exit code is 0.
        """
        body = body_of(
            text_or_bytes(line), cwd=cwd, env=env, user=user, stdin=stdin, timeout=timeout, idle_timeout=idle_timeout,
            max_output_bytes=max_output_bytes, merge_stderr=merge_stderr, exec_id=exec_id, limits=limits,
        )  # fmt: skip
        result = await run(self._transport, self._target, body, stdin)
        return result.check() if check else result

    async def exec(
        self,
        argv: Sequence[str | bytes],
        *,
        cwd: str | bytes | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        stdin: bytes | bytearray | memoryview | str | AsyncIterable[bytes] | None = None,
        timeout: float | None = 600,
        idle_timeout: float | None = None,
        max_output_bytes: int = 16 * _MIB,
        merge_stderr: bool = False,
        exec_id: str | None = None,
        limits: ExecLimits | None = None,
        check: bool = False,
    ) -> ExecResult:
        """Runs a program with its arguments, no shell in between. Everything else as in `run_shell`."""
        body = body_of(
            argv, cwd=cwd, env=env, user=user, stdin=stdin, timeout=timeout, idle_timeout=idle_timeout,
            max_output_bytes=max_output_bytes, merge_stderr=merge_stderr, exec_id=exec_id, limits=limits,
        )  # fmt: skip
        result = await run(self._transport, self._target, body, stdin)
        return result.check() if check else result

    async def start(
        self,
        argv_or_line: str | Sequence[str | bytes],
        *,
        pty: PtySize | None = None,
        stdin: bool = False,
        cwd: str | bytes | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        timeout: float | None = None,
        idle_timeout: float | None = None,
        max_output_bytes: int = 16 * _MIB,
        merge_stderr: bool = False,
        exec_id: str | None = None,
        limits: ExecLimits | None = None,
    ) -> Process:
        """Starts a command (a string is a shell line) and returns at once; stdin=True keeps a pipe open for `process.write`.

        pty gives it a terminal of that size, which is its stdin (open for `process.write`), stdout and stderr.
        It is detached: it has no deadline unless given, and by itself it does not keep an idle sandbox alive.
        """
        command = text_or_bytes(argv_or_line) if isinstance(argv_or_line, str) else argv_or_line
        body = body_of(
            command, cwd=cwd, env=env, user=user, stdin=None, timeout=timeout, idle_timeout=idle_timeout,
            max_output_bytes=max_output_bytes, merge_stderr=merge_stderr, exec_id=exec_id,
            limits=limits, stdin_open=stdin or pty is not None, pty=pty,
        )  # fmt: skip
        path = f"{self._path}/processes"
        started = await self._transport.call("POST", path, Started, body=encode(body), target=self._target)
        return Process(self._transport, self._target, started.exec_id, started.pid)

    async def process(self, exec_id: str) -> Process:
        """A command of this sandbox by its id, running or ended. NotFound when there is none."""
        for info in await self.processes():
            if info.exec_id == exec_id:
                return Process(self._transport, self._target, exec_id, info.pid)
        raise NotFound(
            f"sandbox {self.id} has no command {exec_id!r}",
            hint="sandbox.processes() lists them",
            details={"sandbox_id": self.id},
        )

    async def processes(self) -> list[ProcessInfo]:
        """Commands of this sandbox, ended ones too while their output is kept."""
        return await self._transport.call("GET", f"{self._path}/processes", list[ProcessInfo], target=self._target)

    # -- ports --

    def forward(self, port: int, *, local_port: int = 0, local_host: str = "127.0.0.1") -> Forward:
        """A port inside as one of this machine: `async with sandbox.forward(8000) as url:`, `url` is http://127.0.0.1:PORT.

        Bytes are carried as they are: HTTP, WebSocket, any protocol over TCP (`url.host`, `url.port`). local_port 0 takes a
        free one. While nothing listens inside, a connection here is accepted and reset at once. An open connection keeps an
        idle sandbox alive.
        """
        return Forward(self._transport, self._target, port, local_port, local_host)

    def expose(self, url: str, *, name: str, port: int = 80, ssl: SSLContext | None = None) -> Exposed:
        """A service of this side for code inside: `async with sandbox.expose("http://127.0.0.1:9000", name="model") as url:`,
        `url` is http://model. The name is gone at the end of the block.

        url: http, https or tcp, as this program reaches it; with https, TLS is spoken on this side and HTTP inside. ssl: whom
        it trusts, and what it shows of itself; by default the system's authorities, and nothing. Bytes are
        carried as they are, so the Host header is what code inside asked for. Conflict when the sandbox has the name, or
        the port is taken inside; InvalidRequest for what is no host name (lower case letters, digits, hyphens, dots).
        """
        return Exposed(self._transport, self._target, url, name, port, ssl)

    # -- sessions --

    async def open_session(
        self,
        name: str | None = None,
        *,
        cwd: str | bytes | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
    ) -> Session:
        """A shell (the image's bash, else sh) that keeps its state between commands. A name that is open is joined as it is.

        cwd, env and user are the new shell's, as of `run_shell`. CapacityError when the sandbox has 32 already; SessionEnded
        for a name whose shell has ended: close it first.
        """
        spec = SessionSpec(
            name=name or new_session_name(),
            cwd=None if cwd is None else text_or_bytes(cwd),
            env=dict(env or {}),
            user=user,
        )
        path = f"{self._path}/sessions"
        info = await self._transport.call("POST", path, SessionInfo, body=encode(spec), target=self._target)
        return Session(self._transport, self._target, info.name)

    async def sessions(self) -> list[SessionInfo]:
        """Open sessions, and those whose shell has ended but that nobody closed."""
        return await self._transport.call("GET", f"{self._path}/sessions", list[SessionInfo], target=self._target)

    # -- the sandbox itself --

    async def info(self) -> SandboxInfo:
        """State, reason, limits, usage, layers, network. Works on an ended sandbox too."""
        return await self._transport.call("GET", self._path, SandboxInfo, target=self._target)

    async def metrics(self) -> Usage:
        """What it uses now."""
        return (await self.info()).usage

    async def set_ttl(
        self, *, running_stop: float | UnsetType | None = UNSET, total: float | UnsetType | None = UNSET
    ) -> None:
        """Changes the idle and the total time to live, seconds (None: never); what is left out stays."""
        asked = {"running_stop": running_stop, "total": total}
        for name, value in asked.items():
            if value is not UNSET:
                seconds(name, value, low=0)
        body = encode({name: value for name, value in asked.items() if value is not UNSET})
        await self._transport.request("POST", f"{self._path}/ttl", body=body, target=self._target)

    async def pause(self) -> None:
        """Freezes every process and gives the memory back; idempotent. Commands that run stand still, and who waits for them
        goes on waiting. Their time-outs stand still too; the sandbox's times to live do not. Any request that needs the
        processes resumes first.
        """
        await self._transport.request("POST", f"{self._path}/pause", target=self._target)

    async def resume(self) -> None:
        """Lets a paused sandbox run on; idempotent. Nobody needs to ask: the next command or file does it."""
        await self._transport.request("POST", f"{self._path}/resume", target=self._target)

    async def set_network(self, rules: Mapping[str, bool]) -> Network:
        """Replaces the network rules (as `network_rules` of the args); returns what is enforced when it holds.

        Connections that the new rules deny are cut; {} takes the network away. Programs that run already keep their variables.
        """
        body = encode({"rules": dict(rules)})
        return await self._transport.call("POST", f"{self._path}/network", Network, body=body, target=self._target)

    async def stop(self) -> None:
        """Ends it; idempotent. Returns when processes, memory and disk of it are gone."""
        await self._transport.request("DELETE", self._path, target=self._target)

    async def changes(self, *, include: Sequence[str] = (), max_bytes: int = 64 * _MIB) -> ChangeSet:
        """What differs from the layers: path (relative to `/`), kind, attributes, contents.

        include: globs such as `src/**`, all when empty. max_bytes of contents in all; beyond it `truncated` is true and
        `data` None, with the paths still complete.
        """
        body = encode({"include": list(include), "max_bytes": max_bytes})
        async with self._transport.stream(
            "POST", f"{self._path}/changes", body=body, target=self._target, accept=NDJSON, again=True
        ) as response:
            found: list[Change] = []
            async for line in json_lines(response, self._target):
                if line.startswith(b'{"end":'):
                    return ChangeSet(tuple(found), decode(line, _End).end.truncated)
                found.append(decode(line, Change))
        raise cut(EOFError("no end of the list"), self._target)

    async def seal(self) -> None:
        """Ends everything that runs there and refuses every later command and change of files; it can still be read.

        Idempotent, and for good: so its changes stay what they are, whoever grades them.
        """
        await self._transport.request("POST", f"{self._path}/seal", target=self._target)

    def _source(self) -> GradeSource:
        return GradeSource(sandbox=self.id, incarnation=self.incarnation)

    async def logs(self) -> AsyncIterator[LogLine]:
        """Lines of its life so far: created, commands, ends. Each is a `str` with its time in `.t`."""
        async with self._transport.stream("GET", f"{self._path}/logs", target=self._target, again=True) as response:
            async for line in json_lines(response, self._target):
                entry = decode(line, _Line)
                yield LogLine(entry.line, entry.t)
