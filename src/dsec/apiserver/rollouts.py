"""Rollouts: open by name, look, read back, finish, remove. Their steps are requests to their sandboxes with a header."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import cast

from starlette.responses import Response

from dsec.protocol.errors import ErrorKind, Fault
from dsec.protocol.link import Data, LinkStream
from dsec.protocol.rollouts import RolloutInfo, RolloutState

from . import jobs
from .bodies import Done, FinishRequest, RolloutList, RolloutRequest
from .exchange import BYTES, MAX_JSON, NDJSON, Exchange, announced, encode, error_line
from .fleet import EdgeLink
from .placing import placed
from .records import ListReply, collect

_Found = cast("type[RolloutInfo | None]", RolloutInfo | None)
_PAGE = 1000
_MAX_PAGE = 100_000


async def open_(x: Exchange) -> Response:
    """Opens it, wherever it is, else makes it on an edge with room; that of a job is where the job is."""
    asked = await x.json(RolloutRequest, 16 * MAX_JSON)
    name: dict[str, object] = {"request_id": x.request_id, "job": asked.job, "name": asked.name}
    params = {**name, "args": asked.args, "timeout": asked.timeout}
    home = ""
    if asked.job:
        home, _ = await jobs.home(x, asked.job)
    else:
        for link, found in await _everywhere(x, name):
            if found is not None:
                return x.reply(await link.call("rollout.open", params, RolloutInfo))
    return x.reply(await placed(x, "rollout.open", params, asked.timeout, RolloutInfo, home=home))


async def _everywhere(x: Exchange, name: dict[str, object]) -> list[tuple[EdgeLink, RolloutInfo | None]]:
    """What each edge knows of that name."""
    links = await x.services.fleet.links()
    found = await asyncio.gather(*(link.call("rollout.find", name, _Found) for link in links))
    return list(zip(links, found, strict=True))


async def listing(x: Exchange) -> Response:
    """Rollouts of every edge, oldest first; `job=`, `name=` and `state=` (repeatable, any may hold) narrow it."""
    job, name = x.query("job"), x.query("name")
    states = _states(x.queries("state"))
    if name is not None and job is not None:
        asked: dict[str, object] = {"request_id": x.request_id, "job": job, "name": name}
        found = [info for _, info in await _everywhere(x, asked) if info is not None]
        found = [info for info in found if not states or info.state in states]
    else:
        params = {"request_id": x.request_id, "job": job, "states": states}
        streams = [await link.open("rollout.list", params) for link in await x.services.fleet.links()]
        answers = await asyncio.gather(*(collect(stream, RolloutInfo) for stream in streams))
        found = [info for infos, _ in answers for info in infos if name is None or info.name == name]
    found.sort(key=lambda info: (info.created_at, info.id))
    if x.wants_ndjson():
        return Response(b"".join(encode(info) + b"\n" for info in found), media_type=NDJSON)
    return x.reply(RolloutList(found))


def _states(names: list[str]) -> list[RolloutState]:
    try:
        return [RolloutState(name) for name in names]
    except ValueError as error:
        known = ", ".join(state.value for state in RolloutState)
        raise Fault(ErrorKind.INVALID, f"{error}; states are {known}") from error


async def info(x: Exchange) -> Response:
    link, params = await _home(x)
    return x.reply(await link.call("rollout.info", params, RolloutInfo))


async def steps(x: Exchange) -> Response:
    """NDJSON: a `StepRecord` each, then `{"end": {"count", "truncated"}}`: whether there are more."""
    start = x.number("from", 0)
    limit = x.number("limit", _PAGE, low=1, high=_MAX_PAGE)
    link, params = await _home(x)
    stream = await link.open("rollout.steps", {**params, "start": start, "limit": limit})
    try:
        while not (stream.has_arrived or stream.ended):  # a refusal gets a status of its own
            await stream.change()
        if stream.ended and not stream.has_arrived:
            await stream.result()
    except BaseException:
        stream.cancel()
        raise
    return x.stream(_lines(x, stream), NDJSON, end=stream.cancel)


async def _lines(x: Exchange, stream: LinkStream) -> AsyncIterator[bytes]:
    try:
        async for item in stream:
            if isinstance(item, Data):
                yield item.data
        yield encode({"end": await stream.result(ListReply)}) + b"\n"
    except Fault as fault:
        yield error_line(fault.body, x.request_id)


async def blob(x: Exchange) -> Response:
    """A content that is too long for its step's record."""
    link, params = await _home(x)
    stream = await link.open("rollout.blob", {**params, "digest": x.path_param("digest")})
    size, pieces = await announced(stream)
    response = x.stream(pieces, BYTES, end=stream.cancel)
    if size is not None:
        response.headers["x-dsec-size"] = str(size)
    return response


async def finish(x: Exchange) -> Response:
    """By the client that opened it last; its sandbox is stopped unless `stop` is false. The same again is the same."""
    asked = await x.json(FinishRequest)
    link, params = await _home(x)
    told = {"epoch": asked.epoch, "reward": asked.reward, "valid": asked.valid, "stop": asked.stop}
    return x.reply(await link.call("rollout.finish", {**params, **told}, RolloutInfo))


async def remove(x: Exchange) -> Response:
    link, params = await _home(x)
    await link.call("rollout.remove", params)
    return x.reply(Done())


async def _home(x: Exchange) -> tuple[EdgeLink, dict[str, object]]:
    rollout = x.path_param("rollout")
    link = await x.services.fleet.home("rollout", rollout)
    return link, {"request_id": x.request_id, "rollout": rollout}
