"""Sessions of a sandbox: open, list, interrupt, close. Their commands are `exec` with the name of a session."""

from __future__ import annotations

import msgspec
from starlette.responses import Response

from dsec.protocol.errors import ErrorKind, Fault
from dsec.protocol.ids import valid_exec_id
from dsec.protocol.specs import SessionInfo

from .bodies import Done, Interrupted, SessionRequest
from .exchange import Exchange


async def open_(x: Exchange) -> Response:
    """Opens a session, or joins the one of that name; answered when its shell is ready."""
    asked = await x.json(SessionRequest)
    link, params, incarnation = await x.target()
    fields = {**msgspec.structs.asdict(asked), **params, "name": _checked(asked.name)}
    return x.reply(await link.call("session.open", fields, SessionInfo), incarnation=incarnation, status=201)


async def listing(x: Exchange) -> Response:
    link, params, incarnation = await x.target()
    return x.reply(await link.call("session.list", params, list[SessionInfo]), incarnation=incarnation)


async def interrupt(x: Exchange) -> Response:
    """Interrupts the command that runs; answered when it has ended, or after a second."""
    link, params, incarnation = await x.target()
    return x.reply(
        await link.call("session.interrupt", {**params, "name": _name(x)}, Interrupted), incarnation=incarnation
    )


async def close(x: Exchange) -> Response:
    """Ends its shell and all that it started; answered when they are gone."""
    link, params, incarnation = await x.target()
    await link.call("session.close", {**params, "name": _name(x)})
    return x.reply(Done(), incarnation=incarnation)


def _name(x: Exchange) -> str:
    return _checked(x.path_param("name"))


def _checked(name: str) -> str:
    if not valid_exec_id(name):
        raise Fault(
            ErrorKind.INVALID, f"session name {name[:80]!r} is not 1 to 64 of letters, digits, '.', '_', ':' and '-'"
        )
    return name
