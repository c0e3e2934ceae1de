"""What a restarted edge learns of the steps that an earlier one had under way, without anybody asking for them.

A command is followed to its end by its exec id; an operation is asked for by its op id. Of what the sandbox does not know
nothing has begun, and whoever asks for the step again runs it.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import structlog

from dsec.protocol.errors import ErrorBody, ErrorKind, Fault
from dsec.protocol.ids import step_exec_id
from dsec.protocol.link import Handler
from dsec.protocol.rollouts import StepRecord
from dsec.protocol.specs import ProcessInfo
from dsec.rollout.trajectory import Trajectory

from .kinds import OPERATIONS
from .lifecycle import Lifecycle
from .tape import Tape

_ATTEMPTS = 3
_log = structlog.get_logger("edge")


class Ended(msgspec.Struct, frozen=True, eq=False):
    """What came of a step: what passed, and either a reply or an error."""

    tape: Tape
    reply: object = None
    error: ErrorBody | None = None


class _Command(msgspec.Struct, frozen=True):
    """Of a recorded request, what tells how to find its command."""

    exec_id: str = ""
    detached: bool = False


class _Known(msgspec.Struct, frozen=True):
    """What aether remembers of an operation: reply or error (both msgpack) when it is done."""

    state: str
    reply: bytes = b""
    error: bytes = b""


class Settler:
    def __init__(self, lifecycle: Lifecycle, handlers: Mapping[str, Handler]) -> None:
        self._lifecycle = lifecycle
        self._handlers = handlers

    async def found(self, trajectory: Trajectory, record: StepRecord) -> Ended | None:
        """What came of it, as far as the sandbox can tell; it may take as long as a command does."""
        for attempt in range(_ATTEMPTS):  # a connection that an earlier edge left shows at the first request
            try:
                return await self._found(trajectory, record)
            except Fault as fault:
                if fault.body.kind is ErrorKind.CONNECTION_LOST and attempt + 1 < _ATTEMPTS:
                    continue
                if fault.body.kind is not ErrorKind.UNAVAILABLE:
                    _log.error(
                        "a step's outcome is not known", rollout=trajectory.id, step=record.step, error=str(fault)
                    )
                return None
        return None

    async def _found(self, trajectory: Trajectory, record: StepRecord) -> Ended | None:
        command = msgspec.json.decode(record.request, type=_Command)
        if record.kind == "exec" and command.detached:
            return await self._started(trajectory, record)
        if record.kind in ("exec", "exec.wait"):
            return await self._followed(trajectory, command.exec_id or step_exec_id(record.step))
        if record.kind in OPERATIONS:
            return await self._operation(trajectory, record)
        return None

    async def _followed(self, trajectory: Trajectory, exec_id: str) -> Ended | None:
        params = {"sandbox": trajectory.sandbox, "exec_id": exec_id, "cursor": 0, "wake": False}
        tape = Tape("exec.attach", params, trajectory)
        try:
            return Ended(tape, await self._handlers["exec.attach"](tape))
        except BaseException as error:
            tape.discard()
            if isinstance(error, Fault) and error.body.kind is ErrorKind.NOT_FOUND:
                return None
            raise

    async def _started(self, trajectory: Trajectory, record: StepRecord) -> Ended | None:
        sandbox = await self._lifecycle.awake(trajectory.sandbox, trajectory.incarnation)
        processes = await (await sandbox.link()).call("exec.list", {}, list[ProcessInfo])
        for process in processes:
            if process.exec_id == step_exec_id(record.step):
                return Ended(Tape("exec", {}, trajectory), {"pid": process.pid})
        return None

    async def _operation(self, trajectory: Trajectory, record: StepRecord) -> Ended | None:
        sandbox = await self._lifecycle.awake(trajectory.sandbox, trajectory.incarnation)
        known = await (await sandbox.link()).call("op.wait", {"op": step_exec_id(record.step)}, _Known)
        if known.state != "done":
            return None
        tape = Tape(record.kind, {}, trajectory)
        if known.error:
            return Ended(tape, error=msgspec.msgpack.decode(known.error, type=ErrorBody))
        return Ended(tape, msgspec.Raw(known.reply))
