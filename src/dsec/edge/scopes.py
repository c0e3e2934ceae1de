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
from dsec.protocol.rollouts import StepRef
from dsec.protocol.scopes import Scope


class Owned(NamedTuple):
    """What a sandbox or rollout belongs to: id of the job, name of the rollout; "" for none."""

    job: str
    rollout: str


class Owners(Protocol):
    """Who knows. None for what is not here."""

    def of_sandbox(self, sandbox: str) -> Owned | None: ...
    def of_rollout(self, rollout: str) -> Owned | None: ...
    def job_runs(self, job: str) -> bool: ...


class _Asked(msgspec.Struct, frozen=True):
    """The part of every request that says about what, and how far its caller's key reaches."""

    scope: Scope | None = None
    sandbox: str = ""
    rollout: str = ""
    step_of: StepRef | None = None


class _Rules(msgspec.Struct, frozen=True):
    rules: dict[str, bool] = {}


OF_SANDBOXES = frozenset(
    (
        "sandbox.info", "sandbox.stop", "sandbox.pause", "sandbox.resume", "sandbox.network", "sandbox.logs",
        "sandbox.changes", "exec", "exec.attach", "exec.stage", "exec.poll", "exec.write", "exec.close_stdin", "exec.signal",
        "exec.resize", "exec.list", "session.open", "session.list", "session.close", "session.interrupt", "port.connect",
        "port.listen", "port.accept", "fs.stat", "fs.list", "fs.read", "fs.write", "fs.mkdir", "fs.move", "fs.remove",
        "fs.tar", "fs.untar", "fs.watch",
    )
)  # fmt: skip


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
        if method not in OF_SANDBOXES:
            raise scope.refusal(f"{method} on this node")
        if not self._owners.job_runs(scope.job):
            raise Fault(
                ErrorKind.PERMISSION, f"key {scope.key} is over: the job that it is for has ended",
                hint="open a job and make a new key",
            )  # fmt: skip
        owned = self._owners.of_sandbox(asked.sandbox)
        if owned is None or not scope.covers(*owned):
            raise scope.refused_target()
        if asked.step_of is not None and self._owners.of_rollout(asked.step_of.rollout) != owned:
            raise scope.refused_target()
        if method == "sandbox.network":
            scope.require_network(call.params(_Rules).rules)
