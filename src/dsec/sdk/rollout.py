"""A rollout: a sandbox whose requests are recorded, so that a program that is run again goes on where it was (report, 6)."""

from __future__ import annotations

import math
from collections.abc import AsyncIterable, AsyncIterator, Callable, Coroutine, Generator, Mapping, Sequence
from ssl import SSLContext
from types import TracebackType
from typing import Any, Self

import msgspec
from msgspec import UNSET, UnsetType

from dsec.protocol.grading import CommandRunner, GradeSource, GradeSpec, PytestRunner, TestSet, Verdict, grade_params
from dsec.protocol.link import MAX_RECORD
from dsec.protocol.rollouts import RolloutInfo, RolloutState
from dsec.protocol.specs import (
    Change,
    ChangeSet,
    DSecContainerRunArgs,
    ExecLimits,
    LayerRef,
    Network,
    ProcessInfo,
    PtySize,
    SessionInfo,
    SessionSpec,
    Usage,
)

from . import grading
from .commands import ExecBody, Started, body_of, text_or_bytes
from .errors import Conflict, InvalidRequest, NotFound, ReplayDivergence
from .ports import Exposed, Forward
from .results import ExecResult, LogLine
from .rollout_files import RolloutFiles
from .rollout_process import RolloutProcess, RolloutSession, command, named, within
from .sandbox import Sandbox
from .steps import Asked, Steps, records_of, request_of, result_of
from .transport import Target, Transport, encode

_MIB = 1024 * 1024
_MAX_CHANGE = 257 * _MIB  # what a set of changes may carry, and a path


class _List(msgspec.Struct):
    rollouts: list[RolloutInfo]


class _Totals(msgspec.Struct):
    count: int
    truncated: bool = False


class _Pid(msgspec.Struct):
    pid: int = 0


class Rollout:
    """A sandbox whose requests are steps: numbered, recorded before they run and after, and replayed when it is opened again.

    Opened again, the same steps in the same order give the recorded results and run nothing; from the first that has none it
    goes on live. Another step is ReplayDivergence. A step gets its number when its method is called, so steps made at once
    (`asyncio.gather`) keep that order; one whose caller is cancelled goes on and is recorded.
    `async with` finishes it at the end of the block; left by an exception it stays open, to be opened again.
    files: `sandbox.files`, recorded. sandbox: the same sandbox without recording, for looking at it.
    """

    def __init__(self, transport: Transport, info: RolloutInfo) -> None:
        self.id = info.id
        self.name = info.name
        self.job = info.job
        self.epoch = info.epoch
        self.sandbox_id = info.sandbox
        self.incarnation = info.incarnation
        self.sandbox = Sandbox(transport, info.sandbox, info.incarnation)
        self._transport = transport
        self._steps = Steps(transport, info)
        self._finished = False
        self._processes: dict[str, RolloutProcess] = {}
        self.files = RolloutFiles(self._steps)

    def __repr__(self) -> str:
        return f"Rollout({self.name!r}, {self.id!r})"

    @property
    def steps(self) -> int:
        """Steps made so far: the number of the next one."""
        return self._steps.count

    @property
    def replaying(self) -> bool:
        """Whether the next step is one that was made before."""
        return self._steps.replaying

    @property
    def replayed(self) -> int:
        """Steps answered from the log so far."""
        return self._steps.replayed

    # -- its life --

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if error is None and not self._finished:
                self._check_complete()
                if self._steps.info.state is not RolloutState.FINISHED:
                    await self.finish()
        finally:
            await self.close()

    async def close(self) -> None:
        """Lets go of it without finishing it. What is under way goes on, and is recorded."""
        what = f"rollout {self.name!r} was closed here"
        self._steps.close(Conflict(what, hint="open it again", details={"rollout": self.id}))

    async def finish(self, *, reward: float | None = None, valid: bool | None = None, stop: bool = True) -> RolloutInfo:
        """Says that it is complete, with what came of it; its sandbox is stopped unless `stop` is false. No step follows.

        The same again is the same, another reward is a Conflict. ReplayDivergence when fewer steps were made than are recorded.
        """
        if reward is not None and not math.isfinite(reward):
            raise InvalidRequest(f"reward={reward} is not a finite number", hint="None means that there is none")
        if not self._finished:
            self._steps.check()
            self._check_complete()
        body = encode({"epoch": self.epoch, "reward": reward, "valid": valid, "stop": stop})
        path = f"/v1/rollouts/{self.id}/finish"
        info = await self._transport.call("POST", path, RolloutInfo, body=body)
        self._finished = True
        self._steps.end(
            Conflict(f"rollout {self.name!r} is finished: it has no further steps", details={"rollout": self.id})
        )
        return info

    def _check_complete(self) -> None:
        recorded = self._steps.info.steps
        if self._steps.count < recorded:
            raise ReplayDivergence(
                f"rollout {self.name!r} ({self.id}) has {recorded} recorded steps, of which only {self._steps.count} were made",
                hint="it stays open; leave the block by an exception to go on later, or open it with restart=True",
                details={"rollout": self.id, "step": self._steps.count},
            )

    async def info(self) -> RolloutInfo:
        """What the service knows of it: state, epoch, steps, sandbox, size. `rollout.sandbox.info()` tells of the sandbox."""
        return await self._transport.call("GET", f"/v1/rollouts/{self.id}", RolloutInfo)

    # -- commands --

    def run_shell(
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
        limits: ExecLimits | None = None,
        check: bool = False,
    ) -> Coroutine[Any, Any, ExecResult]:
        """Runs a line in the image's bash (else sh) and waits for its end. Arguments as of `Sandbox.run_shell`.

        `result.step` is its number, `result.replayed` whether it was answered from the log. stdin given piece by piece is read
        to its end first. max_output_bytes is 16 MiB at most.
        """

        def make(whole: bytes | None) -> ExecBody:
            return body_of(
                text_or_bytes(line), cwd=cwd, env=env, user=user, stdin=whole, timeout=timeout, idle_timeout=idle_timeout,
                max_output_bytes=max_output_bytes, merge_stderr=merge_stderr, exec_id=None, limits=limits,
            )  # fmt: skip

        return command(self._steps, stdin, make, check=check)

    def exec(
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
        limits: ExecLimits | None = None,
        check: bool = False,
    ) -> Coroutine[Any, Any, ExecResult]:
        """Runs a program with its arguments, no shell in between. Everything else as in `run_shell`."""

        def make(whole: bytes | None) -> ExecBody:
            return body_of(
                argv, cwd=cwd, env=env, user=user, stdin=whole, timeout=timeout, idle_timeout=idle_timeout,
                max_output_bytes=max_output_bytes, merge_stderr=merge_stderr, exec_id=None, limits=limits,
            )  # fmt: skip

        return command(self._steps, stdin, make, check=check)

    def start(
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
        limits: ExecLimits | None = None,
    ) -> Coroutine[Any, Any, RolloutProcess]:
        """Starts a command and returns at once. Arguments as of `Sandbox.start`; what is asked of the process are steps, too."""
        line = text_or_bytes(argv_or_line) if isinstance(argv_or_line, str) else argv_or_line

        def make(number: int) -> Asked[RolloutProcess]:
            body = within(named(body_of(
                line, cwd=cwd, env=env, user=user, stdin=None, timeout=timeout, idle_timeout=idle_timeout,
                max_output_bytes=max_output_bytes, merge_stderr=merge_stderr, exec_id=None, limits=limits,
                stdin_open=stdin or pty is not None, pty=pty,
            ), number, None))  # fmt: skip
            asked = encode(body)

            async def live(target: Target) -> RolloutProcess:
                path = f"/v1/sandboxes/{target.sandbox_id}/processes"
                return self._process(await self._transport.call("POST", path, Started, body=asked, target=target))

            return Asked(
                request_of("exec", {**msgspec.structs.asdict(body), "detached": True}),
                live,
                lambda record, _: self._process(Started(body.exec_id, result_of(record, _Pid).pid)),
            )

        return self._steps.step(make)

    def _process(self, started: Started) -> RolloutProcess:
        made = self._processes[started.exec_id] = RolloutProcess(self._steps, started.exec_id, started.pid)
        return made

    async def process(self, exec_id: str) -> RolloutProcess:
        """One of the commands that this rollout has started. NotFound when it has not."""
        if (found := self._processes.get(exec_id)) is None:
            raise NotFound(f"rollout {self.name!r} has started no command {exec_id!r}", hint="`start` gives it")
        return found

    async def processes(self) -> list[ProcessInfo]:
        """Commands of the sandbox as it is now. Not recorded: take no decision by it."""
        return await self.sandbox.processes()

    # -- sessions --

    def open_session(
        self,
        name: str | None = None,
        *,
        cwd: str | bytes | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
    ) -> Coroutine[Any, Any, RolloutSession]:
        """A shell that keeps its state between commands, as of `Sandbox.open_session`. Without a name it has its step's."""

        def make(number: int) -> Asked[RolloutSession]:
            spec = SessionSpec(
                name=name or f"s-step-{number}",
                cwd=None if cwd is None else text_or_bytes(cwd),
                env=dict(env or {}),
                user=user,
            )

            async def live(target: Target) -> RolloutSession:
                await Sandbox._of(self._transport, target).open_session(spec.name, cwd=cwd, env=env, user=user)
                return RolloutSession(self._steps, spec.name)

            request = request_of("session.open", msgspec.structs.asdict(spec))
            return Asked(request, live, lambda *_: RolloutSession(self._steps, spec.name))

        return self._steps.step(make)

    async def sessions(self) -> list[SessionInfo]:
        """Sessions of the sandbox as it is now. Not recorded: take no decision by it."""
        return await self.sandbox.sessions()

    # -- the sandbox itself --

    def set_network(self, rules: Mapping[str, bool]) -> Coroutine[Any, Any, Network]:
        """Replaces the network rules, as of `Sandbox.set_network`."""
        asked = dict(rules)
        request = request_of("sandbox.network", {"rules": asked})
        return self._steps.step(
            lambda _: Asked(
                request,
                lambda target: Sandbox._of(self._transport, target).set_network(asked),
                lambda record, _: result_of(record, Network),
            )
        )

    def changes(self, *, include: Sequence[str] = (), max_bytes: int = 64 * _MIB) -> Coroutine[Any, Any, ChangeSet]:
        """What differs from the layers, as of `Sandbox.changes`."""
        globs = list(include)
        request = request_of("sandbox.changes", {"include": globs, "max_bytes": max_bytes})
        return self._steps.step(
            lambda _: Asked(
                request,
                lambda target: Sandbox._of(self._transport, target).changes(include=globs, max_bytes=max_bytes),
                lambda record, contents: ChangeSet(
                    tuple(records_of(record, contents, Change, max(_MAX_CHANGE, MAX_RECORD))),
                    result_of(record, _Totals).truncated,
                ),
            )
        )

    def grade(
        self,
        *,
        tests: LayerRef | str,
        expect: TestSet = TestSet(),
        runner: PytestRunner | CommandRunner = PytestRunner(),
        include: Sequence[str] = ("**",),
        exclude: Sequence[str] = (),
        workdir: str | None = None,
        timeout: float = 600,
        args: DSecContainerRunArgs | None = None,
    ) -> Coroutine[Any, Any, Verdict]:
        """Judges what its agent changed, as of `DSecClient.grade`: the sandbox is sealed, the verdict recorded. args: the
        environment of the tests, else that of the rollout.

        A verdict that is not valid is not recorded: opened again, the rollout grades anew.
        """
        spec = GradeSpec(
            args=args or self._steps.info.args,
            source=GradeSource(sandbox=self.sandbox_id, incarnation=self.incarnation),
            tests=grading.layer(tests),
            expect=expect,
            runner=runner,
            include=tuple(include),
            exclude=tuple(exclude),
            workdir=workdir,
            timeout=timeout,
        )
        request = request_of("grade", grade_params(spec))
        return self._steps.step(
            lambda _: Asked(
                request,
                lambda target: grading.grade_step(self._transport, spec, target),
                lambda record, _: result_of(record, Verdict),
            )
        )

    # -- what is no step --

    def forward(self, port: int, *, local_port: int = 0, local_host: str = "127.0.0.1") -> Forward:
        """A port inside as one of this machine, as of `Sandbox.forward`. Not recorded."""
        return self.sandbox.forward(port, local_port=local_port, local_host=local_host)

    def expose(self, url: str, *, name: str, port: int = 80, ssl: SSLContext | None = None) -> Exposed:
        """A service of this side for code inside, as of `Sandbox.expose`. Not recorded."""
        return self.sandbox.expose(url, name=name, port=port, ssl=ssl)

    async def metrics(self) -> Usage:
        """What the sandbox uses now. Not recorded."""
        return await self.sandbox.metrics()

    async def set_ttl(
        self, *, running_stop: float | UnsetType | None = UNSET, total: float | UnsetType | None = UNSET
    ) -> None:
        """Changes the idle and the total time to live of the sandbox, seconds (None: never). Not recorded."""
        await self.sandbox.set_ttl(running_stop=running_stop, total=total)

    async def pause(self) -> None:
        """Freezes every process and gives the memory back; the next step resumes it. Not recorded."""
        await self.sandbox.pause()

    async def resume(self) -> None:
        """Lets a paused sandbox run on. Not recorded."""
        await self.sandbox.resume()

    def logs(self) -> AsyncIterator[LogLine]:
        """Lines of the sandbox's life so far. Not recorded."""
        return self.sandbox.logs()


class RolloutOpening:
    """A rollout to come: `async with opening as rollout:`, or `rollout = await opening` and, at its end, `finish` or `close`."""

    def __init__(self, make: Callable[[], Coroutine[Any, Any, Rollout]]) -> None:
        self._make = make
        self._rollout: Rollout | None = None

    def __await__(self) -> Generator[Any, None, Rollout]:
        return self._make().__await__()

    async def __aenter__(self) -> Rollout:
        self._rollout = await self._make()
        return self._rollout

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._rollout is not None:
            await self._rollout.__aexit__(kind, error, traceback)


def opening(
    transport: Transport,
    job: str,
    name: str,
    args: DSecContainerRunArgs,
    *,
    timeout: float = 120,
    restart: bool = False,
) -> RolloutOpening:
    """Of the rollout `name` of a job ("": of none). restart: an earlier one of that name is dropped."""
    if not name:
        raise InvalidRequest("a rollout needs a name", hint='such as "task-3/7": opening that again goes on with it')
    return RolloutOpening(lambda: _opened(transport, job, name, args, timeout, restart))


async def _opened(
    transport: Transport, job: str, name: str, args: DSecContainerRunArgs, timeout: float, restart: bool
) -> Rollout:
    if restart:
        await _drop(transport, job, name)
    body = encode({"job": job, "name": name, "args": args, "timeout": timeout})
    info = await transport.call("POST", "/v1/rollouts", RolloutInfo, body=body, wait=timeout)
    return Rollout(transport, info)


async def _drop(transport: Transport, job: str, name: str) -> None:
    """Ends the present rollout of that name, and removes what is recorded of it."""
    query = {"job": job, "name": name}
    for info in (await transport.call("GET", "/v1/rollouts", _List, query=query)).rollouts:
        try:
            if info.state is RolloutState.OPEN and info.sandbox:
                body = encode({"epoch": info.epoch, "valid": False, "stop": True})
                await transport.request("POST", f"/v1/rollouts/{info.id}/finish", body=body)
            await transport.request("DELETE", f"/v1/rollouts/{info.id}")
        except NotFound:
            continue
