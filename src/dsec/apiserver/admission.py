"""Whether a request gets to its handler: one place for all of them, whichever way they came."""

from __future__ import annotations

from dsec.protocol.errors import ErrorKind, Fault

from .exchange import Exchange
from .routes import PARAMETERS, PUBLIC, SCOPED, Handler, SocketHandler


def admit(x: Exchange, handler: Handler | SocketHandler) -> None:
    """Fault unless the caller's key is good for this and its query has no parameter that means nothing here.

    A scoped key is good for what `SCOPED` names and nothing else; which sandboxes and rollouts, the edge knows.
    """
    if x.principal is None:
        if handler not in PUBLIC:
            raise Fault(ErrorKind.AUTHENTICATION, "no API key was sent")
    elif (claims := x.principal.claims) is not None:
        if handler not in SCOPED:
            raise claims.refusal("this operation")
        if (right := SCOPED[handler]) is not None:
            claims.require(right)
    x.only(PARAMETERS[handler])
