"""Scoped keys: made for who holds at least as much, told once, kept nowhere."""

from __future__ import annotations

import structlog
from starlette.responses import Response

from dsec.iam.scoped import Wanted
from dsec.protocol.errors import ErrorKind, Fault
from dsec.protocol.rollouts import JobInfo, JobState
from dsec.protocol.scopes import ScopedKey

from .bodies import KeyRequest
from .exchange import Exchange
from .jobs import home

log = structlog.get_logger("dsec.apiserver.keys")


async def create(x: Exchange) -> Response:
    asked = await x.json(KeyRequest)
    assert x.principal is not None
    held = x.principal.claims
    # Whoever may ask about one job only is told nothing about others, not even whether they are there.
    job = (held.job if asked.job == held.name else "") if held is not None else await _job(x, asked.job)
    wanted = Wanted(
        job=job, name=asked.job, rollouts=None if asked.rollouts is None else tuple(asked.rollouts), may=asked.may,
        network=tuple(asked.network), layers=None if asked.layers is None else tuple(asked.layers), ttl_s=asked.ttl_s,
        note=asked.note,
    )  # fmt: skip
    key, claims = x.issue(wanted)
    log.info("key made", key=claims.key, job=claims.name, by=held.key if held else x.principal.name, note=claims.note)
    made = ScopedKey(
        id=claims.key, key=key, job=claims.name, rollouts=claims.rollouts, may=claims.may, network=claims.network,
        layers=claims.layers, expires_at=claims.until, note=claims.note,
    )  # fmt: skip
    return x.reply(made, status=201)


async def _job(x: Exchange, name: str) -> str:
    """The id of a job that runs; Fault not_found, conflict."""
    _, link = await home(x, name)
    info = await link.call("job.info", {"request_id": x.request_id, "name": name}, JobInfo)
    if info.state in (JobState.STOPPING, JobState.STOPPED):
        raise Fault(
            ErrorKind.CONFLICT, f"job {name} has ended", hint="keys are for jobs that run: open it anew", job=name
        )
    return info.id
