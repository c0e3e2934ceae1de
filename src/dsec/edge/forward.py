"""`port.*` for the apiserver: connections into a sandbox, and services of the caller that code inside reaches by name."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

from dsec.protocol.errors import ErrorKind, Fault
from dsec.protocol.link import Call
from dsec.protocol.specs import Listening

from . import ports
from .lifecycle import Lifecycle
from .names import Names
from .ports import Duplex, Listener
from .relay import Target
from .sandbox import Sandbox
from .sealing import refuse_if_sealed


class _Connect(Target, frozen=True):
    port: int = 0


class _Listen(Target, frozen=True):
    """wake: False for one who asks again after a loss, and so does not resume a paused sandbox."""

    port: int = 0
    name: str = ""
    wake: bool = True


class _Accept(Target, frozen=True):
    connection: int = 0


class Forward:
    def __init__(self, lifecycle: Lifecycle) -> None:
        self._lifecycle = lifecycle
        self.names = Names(lifecycle)

    async def connect(self, call: Call) -> object:
        """`port.connect`: an open connection is activity."""
        params = call.params(_Connect)
        _check_port(params.port)
        sandbox = await self._lifecycle.ready(params.sandbox, params.incarnation)
        with sandbox.activity():
            try:
                async with await ports.connect(sandbox, params.port) as inside:
                    call.note({"connected": True})
                    await _splice(call, inside)
            except Fault as fault:
                raise await _told(sandbox, fault) from fault
        return {}

    async def accept(self, call: Call) -> object:
        """`port.accept`: one connection of a listener."""
        params = call.params(_Accept)
        sandbox = await self._lifecycle.ready(params.sandbox, params.incarnation)
        with sandbox.activity():
            try:
                async with await ports.accept(sandbox, params.connection) as inside:
                    call.note({"connected": True})  # before that, who leaves has not taken it
                    await _splice(call, inside)
            except Fault as fault:
                raise await _told(sandbox, fault) from fault
        return {}

    async def listen(self, call: Call) -> object:
        """`port.listen`: until the caller's END, or its leaving. The name is gone when this is answered."""
        params = call.params(_Listen)
        _check_port(params.port)
        sandbox = await self._reached(call, params)
        if sandbox is None:
            return {}
        refuse_if_sealed(sandbox, call.method)
        try:
            async with AsyncExitStack() as stack:
                address = await stack.enter_async_context(self.names.reserved(sandbox, params.name))
                listener = await stack.enter_async_context(ports.listen(sandbox, address, params.port))
                await stack.enter_async_context(self.names.published(sandbox, params.name, address))
                sandbox.log(f"{params.name} is at {address}:{listener.port}")
                call.note(Listening(listener.address, listener.port))
                await _announce(call, listener)
        except Fault as fault:
            raise await _told(sandbox, fault) from fault
        return {}

    async def _reached(self, call: Call, params: _Listen) -> Sandbox | None:
        """The sandbox, awake; None when a caller who only waits for that has had enough."""
        if params.wake:
            return await self._lifecycle.ready(params.sandbox, params.incarnation)
        awake = asyncio.create_task(self._lifecycle.awake(params.sandbox, params.incarnation))
        leaving = asyncio.create_task(_drain(call))
        try:
            await asyncio.wait({awake, leaving}, return_when=asyncio.FIRST_COMPLETED)
            return awake.result() if awake.done() else None
        finally:
            awake.cancel()
            leaving.cancel()
            await asyncio.gather(awake, leaving, return_exceptions=True)


def _check_port(port: int) -> None:
    if not 1 <= port <= 65535:
        raise Fault(ErrorKind.INVALID, f"port={port} is not between 1 and 65535")


async def _splice(call: Call, inside: Duplex) -> None:
    """Bytes both ways, each at its reader's pace, until both directions have ended."""
    sending = asyncio.create_task(_into(call, inside))
    try:
        while data := await inside.read():
            await call.send(data)
        call.end()
        await inside.finished()
    finally:
        sending.cancel()


async def _into(call: Call, inside: Duplex) -> None:
    """The caller's bytes and its end. What fails here is the reader's to tell, or the caller is gone."""
    try:
        async for chunk in call.data():
            await inside.write(chunk)
        await inside.end()
    except Fault:
        return


async def _announce(call: Call, listener: Listener) -> None:
    """Tells of each connection until the caller has had enough; Fault when the listener ends before."""
    passing = asyncio.create_task(_pass_arrivals(call, listener))
    listening = asyncio.create_task(_drain(call))
    try:
        await asyncio.wait({passing, listening}, return_when=asyncio.FIRST_COMPLETED)
        if not listening.done():
            passing.result()
    finally:
        passing.cancel()
        listening.cancel()
        await asyncio.gather(passing, listening, return_exceptions=True)


async def _pass_arrivals(call: Call, listener: Listener) -> None:
    async for arrival in listener.arrivals():
        call.note(arrival)


async def _drain(call: Call) -> None:
    async for _ in call.data():
        pass


async def _told(sandbox: Sandbox, fault: Fault) -> Fault:
    """What the caller is told: when the sandbox ended, that, and not that its connections broke."""
    if fault.body.kind is ErrorKind.CONNECTION_LOST and (sandbox.ended.is_set() or sandbox.pidfd < 0):
        await sandbox.ended.wait()
        return sandbox.unavailable()
    return fault
