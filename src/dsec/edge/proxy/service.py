"""The proxy's methods over the link: rules of sandboxes, and the bytes of their connections.

The edge has one link connection for each sandbox, so that one that does not read holds up nobody else.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import msgspec

from dsec.protocol.errors import ErrorKind, Fault
from dsec.protocol.link import Call, Handler
from dsec.protocol.mirrors import Mirror

from .limits import Limits
from .rules import Denial, Policy
from .session import Decided, Session, Shared
from .upstream import Upstreams


class RulesOf(msgspec.Struct, frozen=True):
    """`proxy.rules`: from now on these count; connections that they deny are cut."""

    sandbox: str
    rules: dict[str, bool]


class Which(msgspec.Struct, frozen=True):
    """`proxy.serve` (client DATA: from the sandbox, server DATA: to it, NOTE: `Verdict`), `proxy.forget`."""

    sandbox: str


class Verdict(msgspec.Struct, frozen=True):
    allowed: bool
    target: str
    why: str


class _Client:
    """A stream of the link as a session's client; its loss is a lost connection."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self._data = aiter(call.data())

    async def read(self) -> bytes:
        try:
            while (piece := await anext(self._data, None)) is not None:
                if piece:
                    return piece
        except Fault as fault:
            raise ConnectionResetError(fault.body.message) from fault
        return b""

    async def write(self, data: bytes) -> None:
        try:
            await self._call.send(data)
        except Fault as fault:
            raise ConnectionResetError(fault.body.message) from fault


class _Sandbox:
    def __init__(self, policy: Policy, limits: Limits) -> None:
        self.policy = policy
        self.sessions: dict[Session, asyncio.Task[None]] = {}
        self.turn = asyncio.Semaphore(limits.resolutions)

    def cut(self) -> None:
        """Ends what the rules of now deny."""
        for session, task in self.sessions.items():
            if session.target is not None and isinstance(self.policy.decide(session.target), Denial):
                task.cancel()


class ProxyService:
    def __init__(self, mirrors: Sequence[Mirror], upstreams: Upstreams, limits: Limits) -> None:
        self._mirrors = tuple(mirrors)
        self._upstreams = upstreams
        self._limits = limits
        self._sandboxes: dict[str, _Sandbox] = {}

    def handlers(self) -> dict[str, Handler]:
        return {"proxy.rules": self.rules, "proxy.serve": self.serve, "proxy.forget": self.forget}

    async def rules(self, call: Call) -> object:
        asked = call.params(RulesOf)
        policy = Policy(asked.rules, self._mirrors)
        known = self._sandboxes.get(asked.sandbox)
        if known is None:
            self._sandboxes[asked.sandbox] = _Sandbox(policy, self._limits)
        else:
            known.policy = policy
            known.cut()
        return {}

    async def forget(self, call: Call) -> object:
        known = self._sandboxes.pop(call.params(Which).sandbox, None)
        for task in list(known.sessions.values()) if known is not None else ():
            task.cancel()
        return {}

    async def serve(self, call: Call) -> object:
        sandbox = self._sandboxes.get(call.params(Which).sandbox)
        if sandbox is None:
            raise Fault(ErrorKind.NOT_FOUND, "a connection of a sandbox without rules")
        if len(sandbox.sessions) >= self._limits.connections:
            raise Fault(ErrorKind.CAPACITY, f"more than {self._limits.connections} connections at once", retryable=True)

        def log(decided: Decided) -> None:
            call.note(Verdict(decided.allowed, decided.target, decided.why))

        shared = Shared(
            policy=lambda: sandbox.policy,
            upstreams=self._upstreams,
            limits=self._limits,
            turn=sandbox.turn,
            log=log,
            crowded=lambda: len(sandbox.sessions) > self._limits.crowded,
        )
        session = Session(_Client(call), shared)
        task = asyncio.get_running_loop().create_task(session.run())
        sandbox.sessions[session] = task
        try:
            await asyncio.wait({task})
        finally:
            sandbox.sessions.pop(session, None)
            task.cancel()
        if task.cancelled():
            raise Fault(ErrorKind.PERMISSION, "cut: the rules were changed")
        task.result()
        return {}
