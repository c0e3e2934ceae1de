"""Steps of a rollout: commands with a number, of which the journal keeps what was asked and what came of it.

The intent is in the journal before the command starts, the outcome before it is told. The same request of the same number
again is the same command: it is attached to, whether its outcome is known or not, and never run twice; another request under
that number is a conflict. An outcome that nobody waited for is learned from aether, also by a restarted edge.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import msgspec
import structlog
from blake3 import blake3

from dsec.protocol.errors import ErrorKind, Fault
from dsec.protocol.link import Call, Data
from dsec.protocol.specs import ExecDone, ExecSpec, ProcessInfo
from dsec.protocol.steps import step as durable

from .journal import Step
from .lifecycle import Lifecycle
from .sandbox import Sandbox

MAX_STEP = 2**53  # what JSON carries
_NOT_ASKED = ("exec_id", "step")
_log = structlog.get_logger("edge")


class StepParams(ExecSpec, frozen=True, kw_only=True):
    """ahead_digest: blake3 of a command line that came before the request, being too long for it."""

    ahead_digest: str = ""


class Begun(NamedTuple):
    """A step that is asked for. known: it was asked for before, and may be running, or done."""

    step: Step
    known: bool


class Digests:
    """blake3 of both streams of a command, as they pass."""

    def __init__(self) -> None:
        self._streams = {1: blake3(), 2: blake3()}

    def take(self, item: Data) -> None:
        self._streams[item.channel].update(item.data)

    def of(self, step: Step, done: ExecDone) -> Step:
        stdout, stderr = (self._streams[channel].hexdigest() for channel in (1, 2))
        return msgspec.structs.replace(step, done=done, stdout_digest=stdout, stderr_digest=stderr)


Run = Callable[[str, "Digests | None"], Awaitable[bytes]]
"""One request to aether by its method; output that passes is digested."""


class Stepping:
    def __init__(self, lifecycle: Lifecycle, finish: Callable[[Sandbox, bytes], Awaitable[ExecDone]]) -> None:
        """finish makes an `ExecDone` of aether's reply."""
        self._lifecycle = lifecycle
        self._finish = finish
        self._settling: dict[tuple[str, int], asyncio.Task[None]] = {}
        self._starting: Counter[tuple[str, int]] = Counter()

    def number(self, sandbox: Sandbox, exec_id: str) -> int | None:
        """Of the step that a command is."""
        step = self._of(sandbox, exec_id)
        return None if step is None else step.step

    def _of(self, sandbox: Sandbox, exec_id: str) -> Step | None:
        steps = self._lifecycle.journal.steps(sandbox.id).values()
        return next((step for step in steps if step.exec_id == exec_id), None)

    async def recorded(self, sandbox: Sandbox, exec_id: str) -> None:
        """A command has ended: until its outcome is in the journal, if it is a step."""
        if (step := self._of(sandbox, exec_id)) is not None:
            await self.settled(sandbox, step)

    async def begin(self, sandbox: Sandbox, call: Call) -> Begun:
        """The step that is asked for, in the journal; Fault conflict when that number was another request."""
        params = call.params(StepParams)
        number = params.step
        assert number is not None
        if not 0 <= number <= MAX_STEP:
            raise Fault(ErrorKind.INVALID, f"step: {number} is not between 0 and {MAX_STEP}")
        digest = digest_of(params)
        known = await self._known(sandbox, number)
        if known is None:
            known = Step(step=number, digest=digest, exec_id=params.exec_id)
            begun = self._start(sandbox, known)
            try:
                with durable("exec.intent", sandbox.id):
                    self._lifecycle.journal.stepped(sandbox.id, known)
                    await self._lifecycle.journal.commit()
            except BaseException:
                self._started(sandbox, begun)
                raise
            return begun
        if known.digest != digest:
            raise Fault(
                ErrorKind.CONFLICT,
                f"step {number} of sandbox {sandbox.id} was another request than this one",
                hint="repeat the step as it was, or go on with the next number",
                step=number,
                sandbox_id=sandbox.id,
            )
        return self._start(sandbox, known) if self._starts(sandbox, number) else Begun(known, known=True)

    async def _known(self, sandbox: Sandbox, number: int) -> Step | None:
        """The step of that number; None: it is free, and stays so until the caller next waits for something."""
        while (known := self._lifecycle.journal.step(sandbox.id, number)) is not None:
            if known.done is not None or self._starts(sandbox, number) or not await self._never_started(sandbox, known):
                return known
            if self._lifecycle.journal.step(sandbox.id, number) is known and not self._starts(sandbox, number):
                return None
        return None

    # -- between the intent and the moment from which aether knows the command, another request must not take it for lost --

    def _starts(self, sandbox: Sandbox, number: int) -> bool:
        return (sandbox.id, number) in self._starting

    def _start(self, sandbox: Sandbox, step: Step) -> Begun:
        """Whoever asks for the same meanwhile sends the same command with the same exec id, which aether runs once."""
        self._starting[sandbox.id, step.step] += 1
        return Begun(step, known=False)

    def _started(self, sandbox: Sandbox, begun: Begun) -> None:
        key = (sandbox.id, begun.step.step)
        self._starting[key] -= 1
        if not self._starting[key]:
            del self._starting[key]

    @contextmanager
    def starting(self, sandbox: Sandbox, begun: Begun | None) -> Iterator[None]:
        """For as long as a step that `begin` gave is at work here."""
        try:
            yield
        finally:
            if begun is not None and not begun.known:
                self._started(sandbox, begun)

    async def _never_started(self, sandbox: Sandbox, step: Step) -> bool:
        """Whether aether does not know the command: whoever had the intent died, or was refused, before it began."""
        return await self._found(sandbox, step) is None

    async def _found(self, sandbox: Sandbox, step: Step) -> ProcessInfo | None:
        processes = await (await sandbox.link()).call("exec.list", {}, list[ProcessInfo])
        return next((process for process in processes if process.exec_id == step.exec_id), None)

    async def started(self, sandbox: Sandbox, begun: Begun, run: Run) -> object:
        """Starts a detached one, and sees to its outcome; one that was started before is not started again."""
        if begun.known:
            process = await self._found(sandbox, begun.step)
            return {"pid": 0 if process is None else process.pid}
        try:
            return msgspec.Raw(await run("exec", None))
        finally:
            self.settle(sandbox, begun.step)

    async def run(self, sandbox: Sandbox, begun: Begun, run: Run, *, whole: bool) -> ExecDone:
        """Runs or attaches, in the foreground; whole: all of the output passes here."""
        step, known = begun
        try:
            if step.done is not None:
                return await self._again(sandbox, step, run)
            digests = Digests() if whole else None
            done = await self._finish(sandbox, await run("exec.attach" if known else "exec", digests))
            if digests is not None:
                await self._record(sandbox, digests.of(step, done))
            else:
                await self.settled(sandbox, step)
        except BaseException:
            self.settle(sandbox, step)
            raise
        return done

    async def _again(self, sandbox: Sandbox, step: Step, run: Run) -> ExecDone:
        """What is known already, with its output as far as aether still keeps that."""
        assert step.done is not None
        try:
            await run("exec.attach", None)
        except Fault as fault:
            if fault.body.kind is not ErrorKind.NOT_FOUND:
                raise
            cut = {"stdout_truncated": step.done.stdout_bytes > 0, "stderr_truncated": step.done.stderr_bytes > 0}
            return msgspec.structs.replace(step.done, step=step.step, replayed=True, **cut)
        return msgspec.structs.replace(step.done, step=step.step, replayed=True)

    async def _record(self, sandbox: Sandbox, step: Step) -> None:
        with durable("exec.outcome", sandbox.id):
            self._lifecycle.journal.stepped(sandbox.id, step)
            await self._lifecycle.journal.commit()

    # -- outcomes that nobody waits for --

    def settle_open(self) -> None:
        """After a restart: every step of a live sandbox whose outcome is not in the journal."""
        for sandbox in self._lifecycle.live():
            for step in self._lifecycle.journal.steps(sandbox.id).values():
                if step.done is None:
                    self.settle(sandbox, step)

    def settle(self, sandbox: Sandbox, step: Step) -> asyncio.Task[None] | None:
        """Learns the outcome beside all else, if it is not known."""
        key = (sandbox.id, step.step)
        if key not in self._settling and (step.done is None):
            task = self._settling[key] = asyncio.get_running_loop().create_task(self._settle(sandbox, step))
            task.add_done_callback(lambda _: self._settling.pop(key, None))
        return self._settling.get(key)

    async def settled(self, sandbox: Sandbox, step: Step) -> None:
        if (task := self.settle(sandbox, step)) is not None:
            await asyncio.shield(task)

    async def _settle(self, sandbox: Sandbox, step: Step) -> None:
        """Follows the command to its end. One that aether does not know has never started, and its number is free again."""
        try:
            for _ in range(2):  # a connection that an earlier edge left shows at the first request
                try:
                    return await self._follow(sandbox, step)
                except Fault as fault:
                    if fault.body.kind is not ErrorKind.CONNECTION_LOST:
                        raise
        except Fault as fault:
            journal = self._lifecycle.journal
            if fault.body.kind is ErrorKind.NOT_FOUND and sandbox.lives:
                if journal.step(sandbox.id, step.step) is step and not self._starts(sandbox, step.step):
                    journal.unstepped(sandbox.id, step.step)  # unless it was asked for again meanwhile
            elif fault.body.kind is not ErrorKind.UNAVAILABLE:
                _log.error("a step's outcome is not known", sandbox=sandbox.id, step=step.step, error=str(fault))

    async def _follow(self, sandbox: Sandbox, step: Step) -> None:
        await self._lifecycle.awake(sandbox.id)
        digests = Digests()
        stream = await (await sandbox.link()).open("exec.attach", {"exec_id": step.exec_id, "cursor": 0})
        try:
            async for item in stream:
                if isinstance(item, Data):
                    digests.take(item)
            done = await self._finish(sandbox, await stream.result())
        finally:
            stream.cancel()
        await self._record(sandbox, digests.of(step, done))


def digest_of(params: StepParams) -> str:
    """blake3 of all that makes the command what it is: not its id, its number, or how the answer is taken."""
    asked = [getattr(params, name) for name in (*ExecSpec.__struct_fields__, "ahead_digest") if name not in _NOT_ASKED]
    return blake3(msgspec.msgpack.encode(asked, order="deterministic")).hexdigest()
