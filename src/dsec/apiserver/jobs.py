"""Jobs: opened, renewed, looked at, paused, resumed, stopped. A job lives on one edge, its sandboxes with it.

Whose edge that is, is asked of the edges; a name that none of them knows gets the edge that its hash names, so that two who
open it at the same time meet there.
"""

from __future__ import annotations

import asyncio

from blake3 import blake3
from starlette.responses import Response

from dsec.protocol.errors import ErrorKind, Fault
from dsec.protocol.ids import home_of
from dsec.protocol.rollouts import JobInfo, JobUsage
from dsec.rollout.jobs import check_lease, check_name

from .bodies import JobList, JobRequest, RenewRequest
from .exchange import Exchange
from .fleet import EdgeLink, Fleet
from .records import collect

WAIT_S = 25.0


async def open_(x: Exchange) -> Response:
    """Opens a job, or joins the one of that name; it is running when this is answered."""
    asked = await x.json(JobRequest)
    check_name(asked.name)
    check_lease(asked.lease)
    link = await home_or_new(x, asked.name)
    params = {"name": asked.name, "lease": asked.lease, "limits": asked.limits, "labels": asked.labels}
    return x.reply(await link.call("job.open", {"request_id": x.request_id, **params}, JobInfo), status=201)


async def renew(x: Exchange) -> Response:
    asked = await x.json(RenewRequest)
    return await _asked(x, "job.renew", JobInfo, lease=asked.lease, id=asked.id)


async def listing(x: Exchange) -> Response:
    """Jobs of every edge, oldest first, stopped ones too while they are remembered."""
    found = [job for jobs in (await _by_edge(x.services.fleet, x.request_id, None)).values() for job in jobs]
    return x.reply(JobList(sorted(found, key=lambda job: job.created_at)))


async def info(x: Exchange) -> Response:
    return await _asked(x, "job.info", JobInfo)


async def usage(x: Exchange) -> Response:
    return await _asked(x, "job.usage", JobUsage)


async def pause(x: Exchange) -> Response:
    """Answered when all of it stands still, or after `wait_s`: `under_way` then says so, and asking again waits on."""
    return await _asked(x, "job.pause", JobInfo, wait_s=x.number("wait_s", int(WAIT_S), high=300))


async def resume(x: Exchange) -> Response:
    return await _asked(x, "job.resume", JobInfo, wait_s=x.number("wait_s", int(WAIT_S), high=300))


async def stop(x: Exchange) -> Response:
    """Ends the job and everything in it."""
    return await _asked(x, "job.stop", JobInfo, wait_s=x.number("wait_s", int(WAIT_S), high=300))


async def _asked(x: Exchange, method: str, kind: type[JobInfo | JobUsage], **params: object) -> Response:
    name = x.path_param("name")
    _, link = await home(x, name)
    return x.reply(await link.call(method, {"request_id": x.request_id, "name": name, **params}, kind))


async def home(x: Exchange, name: str) -> tuple[str, EdgeLink]:
    """Name and link of the edge that has the job, by its name or id; Fault not_found."""
    fleet = x.services.fleet
    if (edge := home_of(name)) is not None:
        return edge, await fleet.home("job", name)
    views = await fleet.views()
    if len(views) == 1:  # it knows best itself
        return views[0].name, fleet.link(views[0].name)
    for edge, jobs in (await _by_edge(fleet, x.request_id, name)).items():
        if jobs:
            return edge, fleet.link(edge)
    if silent := [view.name for view in views if not view.connected]:
        raise Fault(ErrorKind.CONNECTION_LOST, f"edge {', '.join(silent)} does not answer, and may have job {name[:120]!r}",
                    hint="it is restarting, or it is down: see `dsec status`", retryable=True)  # fmt: skip
    raise Fault(ErrorKind.NOT_FOUND, f"no job {name[:120]!r}", hint="`dsec job ls` lists them", job=name[:120])


async def home_or_new(x: Exchange, name: str) -> EdgeLink:
    """The edge that has the job, or is to have it."""
    try:
        return (await home(x, name))[1]
    except Fault as fault:
        if fault.body.kind is not ErrorKind.NOT_FOUND:
            raise
    names = [view.name for view in await x.services.fleet.views() if view.connected]
    if not names:
        await x.services.fleet.links()  # says what is wrong
    return x.services.fleet.link(max(names, key=lambda edge: blake3(f"{edge}/{name}".encode()).digest()))


async def _by_edge(fleet: Fleet, request_id: str, name: str | None) -> dict[str, list[JobInfo]]:
    """The jobs (of that name) of every edge that answers."""
    names = [view.name for view in await fleet.views() if view.connected]
    if not names:
        await fleet.links()  # says what is wrong
    params = {"request_id": request_id, "name": name}
    streams = [await fleet.link(edge).open("job.list", params) for edge in names]
    answers = await asyncio.gather(*(collect(stream, JobInfo) for stream in streams))
    return {edge: jobs for edge, (jobs, _) in zip(names, answers, strict=True)}
