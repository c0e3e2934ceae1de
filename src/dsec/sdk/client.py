"""The client: how sandboxes come to be and are found again."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Self

import msgspec

from dsec.protocol.grading import CommandRunner, GradeSource, GradeSpec, PytestRunner, TestSet, Verdict
from dsec.protocol.ids import edge_of
from dsec.protocol.rollouts import JobInfo, JobState
from dsec.protocol.specs import Capabilities, ChangeSet, Created, DSecContainerRunArgs, LayerRef, SandboxInfo, State

from . import grading
from .bursts import Burst
from .creation import Opening
from .errors import DSecError, InvalidRequest, NotFound
from .jobs import Job, JobList, chosen, limits_of
from .keys import Keys
from .layers import Layers
from .rollout import RolloutOpening, opening
from .rollouts import Rollouts
from .sandbox import Sandbox
from .transport import NDJSON, Transport, decode, encode, json_lines

_CLEAN_UP_S = 10.0


class _Count(msgspec.Struct):
    count: int


class DSecClient:
    """A connection to one DSec service (report, 2.1).

    url, api_key and project default to DSEC_URL, DSEC_API_KEY and DSEC_PROJECT, then to what `dsec up` left on this machine.
    request_timeout (seconds) bounds connecting and management calls; it never bounds a command, which is awaited by
    re-attaching to it. Belongs to the event loop that opened it; any number of tasks may use it at once.
    """

    def __init__(
        self,
        url: str | None = None,
        api_key: str | None = None,
        *,
        project: str | None = None,
        request_timeout: float = 60,
    ) -> None:
        if not request_timeout > 0:
            raise InvalidRequest(f"request_timeout={request_timeout} is not a positive number of seconds")
        self._transport = Transport(url, api_key, project, request_timeout)
        self._clean_ups: set[asyncio.Task[None]] = set()
        self.layers = Layers(self._transport)
        self.keys = Keys(self._transport)
        self.rollouts = Rollouts(self._transport)

    async def open(self) -> None:
        """Connects and checks the key. ConnectionLost or AuthenticationError say what to do; idempotent."""
        await self._transport.open()
        try:
            await self.capabilities()
        except BaseException:
            await self._transport.close()
            raise

    async def close(self) -> None:
        """Closes the connections. Sandboxes live on; creations that were abandoned half-way are first seen to their end."""
        if self._clean_ups:
            await asyncio.wait(self._clean_ups, timeout=_CLEAN_UP_S)
        await self._transport.close()

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    def run(self, args: DSecContainerRunArgs, *, timeout: float = 120) -> Opening:
        """A sandbox of the backend that the type of `args` names. See `run_container`."""
        if not isinstance(args, DSecContainerRunArgs):
            raise InvalidRequest(f"{type(args).__name__} is no DSec...RunArgs", hint="pass DSecContainerRunArgs(...)")
        return self.run_container(args, timeout=timeout)

    def run_container(self, args: DSecContainerRunArgs, *, timeout: float = 120) -> Opening:
        """A container sandbox: `await` gives the `Sandbox`, `async with` also stops it at the end.

        timeout: seconds from the request until it is ready; CreateTimeout when that is not enough. CapacityError names the
        limit and who holds it, CreateFailed the stage. A creation that is cancelled under way ends in the sandbox's removal.
        """
        return self._opening(args, timeout, "")

    def run_many(
        self, args: DSecContainerRunArgs | Iterable[DSecContainerRunArgs], *, count: int = 1, timeout: float = 120
    ) -> Burst:
        """Many sandboxes by one request: `count` of each of `args`, all of one before the next in `outcome.index`.

        Use it as `async with client.run_many(...) as burst: async for outcome in burst: ...`; outcomes come in order of
        completion. Leaving the block cancels what is not yet created and stops every sandbox that was not claimed; a
        sandbox is claimed when the caller takes it, by reading `outcome.sandbox`. A failed one raises nothing by itself: its
        `outcome.error` is the exception, and reading its `outcome.sandbox` raises it.
        """
        items = [args] if isinstance(args, DSecContainerRunArgs) else list(args)
        return Burst(self._transport, items, count, timeout)

    def job(
        self,
        name: str,
        *,
        lease: float = 60,
        max_sandboxes: int | None = None,
        cpu_cores: float | None = None,
        memory_mb: int | None = None,
        labels: Mapping[str, str] | None = None,
    ) -> Job:
        """The sandboxes of one run: `async with client.job("grpo-17", max_sandboxes=512) as job:`.

        Opens the job of that name, or joins it: a program that was killed goes on with what it had. lease: seconds after the
        last sign of life of its last client until the job is paused. max_sandboxes, cpu_cores, memory_mb: of all its sandboxes
        together (of their own limits); None leaves what it was. Without `async with` it is only a handle, that opens and
        renews nothing: `await client.job("grpo-17").stop()`.
        """
        limits = limits_of(max_sandboxes, cpu_cores, memory_mb)
        return Job(self, self._transport, name, lease, limits, labels, self._opening)

    async def jobs(self, *, states: Iterable[JobState | str] | None = None) -> list[JobInfo]:
        """Jobs in any of `states`, those that ended lately too when no state is asked for. Oldest first."""
        return chosen((await self._transport.call("GET", "/v1/jobs", JobList)).jobs, states)

    def rollout(
        self, name: str, args: DSecContainerRunArgs, *, timeout: float = 120, restart: bool = False
    ) -> RolloutOpening:
        """A sandbox whose requests are recorded: `async with client.rollout("task-3/7", args) as rollout:`.

        Opened again by its name it replays: the same steps give the recorded results, and from the first that has none it goes
        on. Other `args` than the first time are ReplayDivergence; a client that opened it before is fenced. timeout: seconds for
        making its sandbox, the first time. restart=True drops an earlier rollout of that name with all that is recorded.
        """
        return opening(self._transport, "", name, args, timeout=timeout, restart=restart)

    def attach(self, sandbox_id: str) -> Opening:
        """A handle to a sandbox that is there already. Leaving its `async with` detaches, never stops."""
        return Opening(lambda: self._attach(sandbox_id), stop=False)

    async def list(
        self,
        *,
        labels: Mapping[str, str] | None = None,
        states: Iterable[State | str] | None = None,
        job: str | None = None,
        usage: bool = False,
    ) -> AsyncIterator[SandboxInfo]:
        """Sandboxes with all of `labels` in any of `states`, ended ones included when no state is asked for. Oldest first.

        job: only those of the job of that name. usage: with what each uses now, which costs the node something; else zeros.
        """
        pairs = [("label", f"{name}={value}") for name, value in (labels or {}).items()]
        pairs += [("job", job)] if job is not None else []
        pairs += [("usage", "true")] if usage else []
        pairs += [("state", _state(state)) for state in states or ()]
        async with self._transport.stream("GET", "/v1/sandboxes", query=pairs, accept=NDJSON, again=True) as response:
            async for line in json_lines(response):
                yield decode(line, SandboxInfo)

    async def stop_many(self, *, labels: Mapping[str, str]) -> int:
        """Stops every sandbox that carries all of `labels` (at least one); how many there were."""
        body = encode({"labels": dict(labels)})
        return (await self._transport.call("POST", "/v1/sandboxes/stop", _Count, body=body)).count

    async def grade(
        self,
        args: DSecContainerRunArgs,
        changes: Sandbox | ChangeSet,
        *,
        tests: LayerRef | str,
        expect: TestSet = TestSet(),
        runner: PytestRunner | CommandRunner = PytestRunner(),
        include: Sequence[str] = ("**",),
        exclude: Sequence[str] = (),
        workdir: str | None = None,
        timeout: float = 600,
        grade_id: str | None = None,
    ) -> Verdict:
        """Judges what an agent changed: in a fresh sandbox of `args` with the `tests` layer on top, which nobody else mounts.

        changes: a sandbox is sealed first (it takes no command any more, and can still be read and stopped). Those below workdir
        (default that of args, else /workspace) count that `include` names and `exclude` does not, but for what could decide the
        tests' outcome by other means: `verdict.evidence.dropped` tells. expect: the tests that must pass; runner: how they run.
        timeout in seconds, of the tests. The same grade_id again is the same grade.

        What the code under test can cause is a valid zero with its reason. When the infrastructure failed, `verdict.reward` is
        None and `verdict.valid` False: such a sample is to be left out. See docs/guide/grading.md.
        """
        spec = GradeSpec(
            args=args,
            source=GradeSource(changes=changes) if isinstance(changes, ChangeSet) else changes._source(),
            tests=grading.layer(tests),
            expect=expect,
            runner=runner,
            include=tuple(include),
            exclude=tuple(exclude),
            workdir=workdir,
            timeout=timeout,
        )
        return await grading.grade(self._transport, spec, grade_id)

    async def capabilities(self) -> Capabilities:
        """What this installation can and cannot do, with a remedy for each no."""
        return await self._transport.call("GET", "/v1/capabilities", Capabilities)

    async def _attach(self, sandbox_id: str) -> Sandbox:
        if edge_of(sandbox_id) is None:
            raise NotFound(
                f"{sandbox_id[:64]!r} is not a sandbox id",
                hint="ids look like sb-<edge>-<12 characters>; `dsec ps` lists them",
            )
        found = await self._transport.call("GET", f"/v1/sandboxes/{sandbox_id}", SandboxInfo)
        return Sandbox(self._transport, found.id, found.incarnation)

    def _opening(self, args: DSecContainerRunArgs, timeout: float, job: str) -> Opening:
        return Opening(lambda: self._create(args, timeout, job), stop=True)

    async def _create(self, args: DSecContainerRunArgs, timeout: float, job: str = "") -> Sandbox:
        creating = asyncio.ensure_future(self._request_creation(args, timeout, job))
        try:
            return await asyncio.shield(creating)
        except asyncio.CancelledError:
            task = asyncio.create_task(_undo(creating))
            self._clean_ups.add(task)
            task.add_done_callback(self._clean_ups.discard)
            raise

    async def _request_creation(self, args: DSecContainerRunArgs, timeout: float, job: str) -> Sandbox:
        # The key makes the request safe to repeat when its answer is lost: the same key is the same sandbox.
        if args.idempotency_key is None:
            args = msgspec.structs.replace(args, idempotency_key=f"cr-{secrets.token_hex(10)}")
        body = encode({"args": args, "timeout": timeout, "job": job} if job else {"args": args, "timeout": timeout})
        created = await self._transport.call("POST", "/v1/sandboxes", Created, body=body, wait=timeout)
        return Sandbox(self._transport, created.id, created.incarnation, owned=True)


def _state(state: State | str) -> str:
    try:
        return State(state).value
    except ValueError:
        names = ", ".join(known.value for known in State)
        raise InvalidRequest(f"{state!r} is no state of a sandbox", hint=f"states are {names}") from None


async def _undo(creating: asyncio.Future[Sandbox]) -> None:
    """Nobody waits for this sandbox any more: it goes as soon as it came."""
    try:
        await (await creating).stop()
    except (DSecError, asyncio.CancelledError):
        return
