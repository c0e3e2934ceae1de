"""The network of sandboxes: none, or a proxy on a loopback port inside whose every connection is decided by name.

Without rules there is nothing: no listener, no file, no task. With rules a listener is made inside (through aether), its
connections are carried to the proxy process (`gate`), and programs inside are told where it is (`reach`).
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec
import structlog

from dsec.protocol.errors import Fault
from dsec.protocol.link import Data, LinkStream, decode
from dsec.protocol.mirrors import Mirror, MirrorKind
from dsec.protocol.specs import Network, State

from . import ports, reach
from .gate import Gate, Way
from .journal import Record
from .ports import Duplex
from .proxy.limits import Limits
from .proxy.rules import Policy
from .proxy.service import Verdict
from .residue import Residue
from .sandbox import Sandbox

_LINGER_S = 2.0
_RETRY_S = (0.05, 0.2, 1.0, 5.0)
_UNAVAILABLE = (
    b"HTTP/1.1 503 The network proxy of this node is not available\r\nContent-Type: text/plain\r\n"
    b"Content-Length: 69\r\nRetry-After: 1\r\nConnection: close\r\n\r\n"
    b"DSec: the network proxy of this node is not available; try again soon"
)
_REMEMBERED = 64  # different decisions counted of a sandbox
_MAX_LINES = 100  # of a sandbox's log, which has room for more of its life
_NONE = Network(mode="none", rules={}, enforced={})
_log = structlog.get_logger("edge")


class Networks:
    """Every sandbox's network on this edge."""

    def __init__(self, run: Path, mirrors: Sequence[Mirror]) -> None:
        self.mirrors = tuple(mirrors)
        self._gate = Gate(run, mirrors)
        self._of: dict[str, _Attached] = {}

    @property
    def gate(self) -> Gate:
        return self._gate

    def describe(self, found: Sandbox | Record) -> Network:
        """What is asked and what holds."""
        rules = found.args.network_rules
        if not rules:
            return _NONE
        attached = self._of.get(found.id)
        told = Policy(rules, self.mirrors).describe(rules)
        if attached is None or attached.problem is None:
            return told
        refused = dict.fromkeys(told.enforced, f"refused: {attached.problem}")
        return msgspec.structs.replace(told, enforced=refused)

    async def begin(self, adopted: Sequence[Sandbox]) -> None:
        """At the edge's start: what an earlier edge had connected is again; with an operator's mirrors the proxy will be needed.

        A paused sandbox answers when it is resumed.
        """
        if any(mirror.kind is not MirrorKind.API for mirror in self.mirrors):
            with suppress(Fault):  # told to who needs it
                await self._gate.ready()
        await asyncio.gather(*(self._connect_again(sandbox) for sandbox in adopted))

    async def _connect_again(self, sandbox: Sandbox) -> None:
        try:
            await self.prepare(sandbox)
        except Fault as fault:  # the next command tries again
            _log.error("no network", sandbox=sandbox.id, error=fault.body.message)

    async def prepare(self, sandbox: Sandbox) -> None:
        """Before the first command: the network is up. At once when it is, or when there are no rules."""
        if not sandbox.args.network_rules:
            return
        attached = self._of.get(sandbox.id)
        if attached is None:
            if sandbox.dying.is_set():  # it has been forgotten here already, and would be remembered for ever
                raise sandbox.unavailable()
            attached = self._of[sandbox.id] = _Attached(sandbox, self)
            sandbox.detach = lambda: self.ended(sandbox)
        await attached.up()

    async def with_variables(self, sandbox: Sandbox, own: Mapping[str, str]) -> Mapping[str, str]:
        """A command's variables, with the network's under them and under the sandbox's. The network is up when it returns."""
        if not sandbox.args.network_rules:
            return own
        await self.prepare(sandbox)
        attached = self._of.get(sandbox.id)
        ours = attached.environment if attached is not None else {}
        ours = reach.beside_services(ours, sandbox.services)
        return {name: value for name, value in ours.items() if name not in sandbox.args.env} | dict(own)

    async def change(self, sandbox: Sandbox) -> Network:
        """Its rules are others now: when it returns they hold, and connections that they deny are cut."""
        rules = sandbox.args.network_rules
        attached = self._of.get(sandbox.id)
        if attached is None:
            await self.prepare(sandbox)
        elif rules:
            await attached.change()
        else:
            await attached.down()
        sandbox.log(f"network: rules {dict(rules)}")
        return self.describe(sandbox)

    def residue(self, sandbox: Sandbox) -> Residue:
        """What of the sandbox's files is the platform's."""
        attached = self._of.get(sandbox.id)
        return attached.residue if attached is not None else Residue()

    async def ended(self, sandbox: Sandbox) -> None:
        attached = self._of.pop(sandbox.id, None)
        if attached is not None:
            await attached.ended()

    async def close(self) -> None:
        for attached in list(self._of.values()):
            await attached.ended()
        self._of.clear()
        await self._gate.close()


class _Attached:
    """The network of one sandbox that has rules."""

    def __init__(self, sandbox: Sandbox, networks: Networks) -> None:
        self._sandbox = sandbox
        self._networks = networks
        self._way: Way = networks.gate.way(sandbox.id)
        self._turn = asyncio.Lock()
        self._listener: asyncio.Task[None] | None = None
        self._slots = asyncio.Semaphore(Limits().connections)
        self._carriers: set[asyncio.Task[None]] = set()
        self._decisions = _Decisions(sandbox)
        self.residue = Residue()
        self.problem: str | None = None
        self.environment: Mapping[str, str] = {}

    async def up(self) -> None:
        if self._listener is not None:
            return
        async with self._turn:
            if self._listener is None:
                await self._apply()

    async def _apply(self) -> None:
        policy = Policy(self._sandbox.args.network_rules, self._networks.mirrors)
        await self._way.enforce(self._sandbox.args.network_rules)
        self.environment = reach.environment(policy)
        await self.residue.write(self._sandbox, reach.contents(policy))
        if self._listener is None:
            told: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._listener = asyncio.get_running_loop().create_task(self._listen(told))
            await asyncio.wait({told, self._listener}, return_when=asyncio.FIRST_COMPLETED)

    async def change(self) -> None:
        async with self._turn:
            await self._apply()

    async def down(self) -> None:
        """The rules are gone: so are the listener, its connections and the files."""
        async with self._turn:
            await self.ended()
            self.environment = {}
            await self.residue.write(self._sandbox, reach.contents(None))

    async def ended(self) -> None:
        tasks = [task for task in (self._listener, *self._carriers) if task is not None]
        self._listener = None
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._way.close()

    # -- connections --

    async def _listen(self, told: asyncio.Future[None]) -> None:
        """As long as the sandbox lives: a listener, made again when the connection to aether was."""
        failures = 0
        while self._sandbox.state in (State.CREATING, State.RUNNING, State.PAUSED):
            try:
                await self._accept_all(told)
            except Fault as fault:
                self.problem = f"no proxy inside: {fault.body.message}"
                if not told.done():
                    told.set_result(None)
                if not failures:
                    self._sandbox.log(f"network: {self.problem}")
            await asyncio.sleep(_RETRY_S[min(failures, len(_RETRY_S) - 1)])
            failures = 0 if self.problem is None else failures + 1

    async def _accept_all(self, told: asyncio.Future[None]) -> None:
        async with ports.listen(self._sandbox, reach.ADDRESS, reach.PORT) as listener:
            self.problem = None
            if not told.done():
                told.set_result(None)
            async for arrival in listener.arrivals():
                await self._slots.acquire()  # more wait inside
                inside = await listener.take(arrival.connection)
                task = asyncio.get_running_loop().create_task(self._carry(inside))
                self._carriers.add(task)
                task.add_done_callback(self._carried)

    def _carried(self, task: asyncio.Task[None]) -> None:
        self._carriers.discard(task)
        self._slots.release()

    async def _carry(self, inside: Duplex) -> None:
        """One connection between the sandbox and the proxy, byte for byte, until the proxy is done with it."""
        async with inside:
            try:
                outside = await self._way.serve()
            except Fault as fault:
                _log.error("no way to the network proxy", sandbox=self._sandbox.id, error=fault.body.message)
                with suppress(Fault):
                    await inside.write(_UNAVAILABLE)
                    await inside.end()
                    await _drained(inside)
                return
            outwards = asyncio.create_task(_outwards(inside, outside))
            try:
                await self._inwards(outside, inside)
                await inside.end()
                async with asyncio.timeout(_LINGER_S):
                    await outwards  # what is still said is read, so that the answer is seen and no reset
                    await inside.finished()
            except (Fault, TimeoutError):
                return  # either side is gone
            finally:
                outwards.cancel()
                outside.cancel()

    async def _inwards(self, outside: LinkStream, inside: Duplex) -> None:
        async for item in outside:
            if isinstance(item, Data):
                await inside.write(item.data)
            else:
                self._decisions.add(decode(item.payload, Verdict))
        await outside.result()


async def _drained(inside: Duplex) -> None:
    """Until the other side has ended too; not for long."""
    with suppress(TimeoutError):
        async with asyncio.timeout(_LINGER_S):
            while await inside.read():
                pass


async def _outwards(inside: Duplex, outside: LinkStream) -> None:
    """When the proxy no longer listens, what comes is dropped."""
    listening = True
    with suppress(Fault):
        while data := await inside.read():
            if listening:
                try:
                    await outside.send(data)
                except Fault:
                    listening = False
        await outside.end()


class _Decisions:
    """Decisions in the sandbox's log: each once, then at every power of ten, in a bounded number of lines."""

    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox
        self._counts: OrderedDict[tuple[bool, str, str], int] = OrderedDict()
        self._lines = 0

    def add(self, verdict: Verdict) -> None:
        key = (verdict.allowed, verdict.target[:200], verdict.why[:200])
        count = self._counts.pop(key, 0) + 1
        self._counts[key] = count
        if len(self._counts) > _REMEMBERED:
            self._counts.popitem(last=False)
        if count == 10 ** (len(str(count)) - 1) and self._lines < _MAX_LINES:
            self._lines += 1
            word = "allowed" if verdict.allowed else "denied"
            times = f" ({count} times)" if count > 1 else ""
            last = "; further decisions are not listed" if self._lines == _MAX_LINES else ""
            self._sandbox.log(f"network: {word} {key[1]} ({key[2]}){times}{last}")
