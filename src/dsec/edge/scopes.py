"""How far a scoped key reaches on this edge: which methods, and whose sandboxes and rollouts. Everything else is refused.

The apiserver signs and checks keys and sends what they give with each request; what belongs to which job, and whether that
job still runs, is known here.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import NamedTuple, Protocol

import msgspec

from dsec.protocol.errors import ErrorKind, Fault
from dsec.protocol.link import Call, Handler
from dsec.protocol.rollouts import JobState, StepRef
from dsec.protocol.scopes import Right, Scope

from .lifecycle import Lifecycle
from .rollouts import Rollouts


class Owned(NamedTuple):
    """What a sandbox or rollout belongs to: id of the job, name of the rollout; "" for none."""

    job: str
    rollout: str


class Owners(Protocol):
    """Who knows. None for what is not here."""

    def of_sandbox(self, sandbox: str) -> Owned | None: ...
    def of_rollout(self, rollout: str) -> Owned | None: ...
    def named(self, job: str) -> str:
        """The id of the job of that name, "" for none."""
        ...

    def job_runs(self, job: str) -> bool: ...


class _Asked(msgspec.Struct, frozen=True):
    """The part of every request that says about what, and how far its caller's key reaches."""

    scope: Scope | None = None
    sandbox: str = ""
    rollout: str = ""
    step_of: StepRef | None = None


class _Open(msgspec.Struct, frozen=True):
    job: str = ""
    name: str = ""


class _Rules(msgspec.Struct, frozen=True):
    rules: dict[str, bool] = {}


OF_SANDBOXES = frozenset(
    (
        "sandbox.info", "sandbox.stop", "sandbox.pause", "sandbox.resume", "sandbox.network", "sandbox.logs",
        "sandbox.changes", "exec", "exec.attach", "exec.stage", "exec.poll", "exec.wait", "exec.write", "exec.close_stdin",
        "exec.signal",
        "exec.resize", "exec.list", "session.open", "session.list", "session.close", "session.interrupt", "port.connect",
        "port.listen", "port.accept", "fs.stat", "fs.list", "fs.read", "fs.write", "fs.mkdir", "fs.move", "fs.remove",
        "fs.tar", "fs.untar", "fs.watch",
    )
)  # fmt: skip


OF_ROLLOUTS = frozenset(("rollout.info", "rollout.steps", "rollout.blob", "rollout.finish"))
BY_NAME = frozenset(
    ("rollout.open", "rollout.find")
)  # whether one may be made, `Rollouts.open` asks of the scope itself


class Known:
    """`Owners` by what this edge has: a sandbox belongs to the rollout whose log names it, and that names its job."""

    def __init__(self, lifecycle: Lifecycle, rollouts: Rollouts) -> None:
        self._lifecycle = lifecycle
        self._rollouts = rollouts

    def of_sandbox(self, sandbox: str) -> Owned | None:
        try:
            found = self._lifecycle.get(sandbox)
        except Fault:
            return None
        trajectory = self._rollouts.of_sandbox(found)
        return None if trajectory is None else Owned(trajectory.job, trajectory.name)

    def of_rollout(self, rollout: str) -> Owned | None:
        trajectory = self._rollouts.known(rollout)
        return None if trajectory is None else Owned(trajectory.job, trajectory.name)

    def named(self, job: str) -> str:
        found = self._lifecycle.jobs.known(job)
        return "" if found is None else found.record.id

    def job_runs(self, job: str) -> bool:
        ended = (JobState.STOPPING, JobState.STOPPED)
        return any(one.record.id == job and one.record.state not in ended for one in self._lifecycle.jobs.all())


class Guard:
    def __init__(self, owners: Owners) -> None:
        self._owners = owners

    def over(self, handlers: Mapping[str, Handler]) -> dict[str, Handler]:
        """The same handlers, behind the guard."""
        return {method: self._guarded(method, handler) for method, handler in handlers.items()}

    def _guarded(self, method: str, handler: Handler) -> Callable[[Call], Awaitable[object]]:
        async def guarded(call: Call) -> object:
            asked = call.params(_Asked)
            if asked.scope is not None:
                self._check(method, call, asked, asked.scope)
            return await handler(call)

        return guarded

    def _check(self, method: str, call: Call, asked: _Asked, scope: Scope) -> None:
        if method not in OF_SANDBOXES | OF_ROLLOUTS | BY_NAME:
            raise scope.refusal(f"{method} on this node")
        if not self._owners.job_runs(scope.job):
            raise Fault(
                ErrorKind.PERMISSION, f"key {scope.key} is over: the job that it is for has ended",
                hint="open a job and make a new key",
            )  # fmt: skip
        owned = self._owned(method, call, asked)
        if owned is None or not scope.covers(*owned):
            raise scope.refused_target()
        if method == "sandbox.info":  # by which the apiserver asks whether it may be graded
            scope.require(Right.USE, Right.GRADE)
        elif method not in BY_NAME:  # they ask for what they need
            scope.require(Right.USE)
        if asked.step_of is not None and self._owners.of_rollout(asked.step_of.rollout) != owned:
            raise scope.refused_target()
        if method == "sandbox.network":
            scope.require_network(call.params(_Rules).rules)

    def _owned(self, method: str, call: Call, asked: _Asked) -> Owned | None:
        if method in BY_NAME:
            wanted = call.params(_Open)
            return Owned(self._owners.named(wanted.job), wanted.name)
        return (
            self._owners.of_rollout(asked.rollout) if method in OF_ROLLOUTS else self._owners.of_sandbox(asked.sandbox)
        )
