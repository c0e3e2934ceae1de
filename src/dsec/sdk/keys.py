"""Scoped keys: what a program in a sandbox needs to drive rollouts of one job, and nothing else."""

from __future__ import annotations

from collections.abc import Sequence

from dsec.protocol.scopes import Right, ScopedKey

from .commands import seconds
from .errors import InvalidRequest
from .transport import Transport, encode


class Keys:
    """`client.keys`."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    async def create(
        self,
        job: str,
        *,
        rollouts: str | Sequence[str] | None = None,
        may: Sequence[str] = ("use",),
        network: Sequence[str] = (),
        layers: str | Sequence[str] | None = None,
        ttl: float | None = None,
        note: str = "",
    ) -> ScopedKey:
        """A key for the rollouts of a job that match `rollouts` (globs, `agent/*`; None: all of them). `.key` is told once.

        may: "use" (open those that are there again, and use their sandboxes), "create" (make new ones), "grade" (by any tests,
        whose output is shown). network: names that `network_rules` of their sandboxes may allow. layers: globs of what new
        ones may be made from (None: any; name them where the store has layers that the holder must not see, as hidden
        tests). ttl: seconds; an hour when left out. It ends with its job at the latest. PermissionDenied for more than the
        asking key may, Conflict for an ended job.
        """
        seconds("ttl", ttl, low=0)
        body = {
            "job": job,
            "rollouts": _globs(rollouts),
            "may": [_right(one) for one in may],
            "network": list(network),
            "layers": _globs(layers),
            "ttl_s": ttl,
            "note": note,
        }
        return await self._transport.call("POST", "/v1/keys", ScopedKey, body=encode(body))


def _globs(given: str | Sequence[str] | None) -> list[str] | None:
    if given is None:
        return None
    return [given] if isinstance(given, str) else list(given)


def _right(name: str) -> str:
    try:
        return Right(name).value
    except ValueError:
        known = ", ".join(right.value for right in Right)
        raise InvalidRequest(f"may: {name!r} is no right", hint=f"rights are {known}") from None
