"""Sandboxes as wholes: create, burst, list, look, stop, TTL, changes, logs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import msgspec
from msgspec import UNSET
from starlette.responses import Response

from dsec.protocol.errors import ErrorKind, Fault
from dsec.protocol.link import Note
from dsec.protocol.specs import Change, ChangeSet, Created, Network, SandboxInfo, State

from . import jobs
from .bodies import (
    MAX_BURST,
    ChangesRequest,
    Count,
    CreateRequest,
    Done,
    NetworkRequest,
    SandboxList,
    StopManyRequest,
    TtlRequest,
)
from .bursts import Burst
from .exchange import MAX_JSON, NDJSON, Exchange, encode, error_line
from .placing import placed
from .records import collect, lines

_MAX_CREATE_BODY = 64 * MAX_JSON


async def create(x: Exchange) -> Response:
    """`Created` for one, an NDJSON stream of `CreateOutcome` for a burst."""
    asked = await x.json(CreateRequest, _MAX_CREATE_BODY)
    if not 0 < asked.timeout <= 86_400:
        raise Fault(ErrorKind.INVALID, f"timeout={asked.timeout} is not between 0 and 86400 seconds")
    if isinstance(asked.args, list) or asked.count is not UNSET:
        return await _create_many(x, asked)
    params = {"request_id": x.request_id, "args": asked.args, "timeout": asked.timeout, "job": asked.job}
    home = (await jobs.home(x, asked.job))[0] if asked.job else ""
    created = await placed(x, "sandbox.create", params, asked.timeout, Created, home=home)
    return x.reply(created, incarnation=created.incarnation, status=201)


async def _create_many(x: Exchange, asked: CreateRequest) -> Response:
    count = 1 if asked.count is UNSET else asked.count
    args = asked.args if isinstance(asked.args, list) else [asked.args]
    total = count * len(args)
    if count < 1 or not 0 < total <= MAX_BURST:
        raise Fault(ErrorKind.INVALID, f"a burst of {count} x {len(args)} sandboxes is not between 1 and {MAX_BURST}")
    home = (await jobs.home(x, asked.job))[0] if asked.job else ""
    burst = Burst(x.services.fleet, x.services.placement, x.request_id, args, count, asked.timeout, asked.job)
    await burst.start(home)
    return x.stream(burst.lines(), NDJSON, end=burst.cancel)


async def listing(x: Exchange) -> Response:
    """Sandboxes of every edge; `label=k=v` (repeatable, all must hold), `state=` (repeatable, any may hold), `job=`."""
    params = {
        "request_id": x.request_id,
        "labels": _label_filter(x.queries("label")),
        "states": _state_filter(x.queries("state")) or None,
        "job": x.query("job"),
        "usage": x.flag("usage"),
    }
    streams = [await link.open("sandbox.list", params) for link in await x.services.fleet.links()]
    answers = await asyncio.gather(*(collect(stream, SandboxInfo) for stream in streams))
    found = [info for infos, _ in answers for info in infos]
    found.sort(key=lambda info: info.created_at)
    if x.wants_ndjson():
        return Response(b"".join(encode(info) + b"\n" for info in found), media_type=NDJSON)
    return x.reply(SandboxList(found))


def _label_filter(pairs: list[str]) -> dict[str, str]:
    labels = dict[str, str]()
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals:
            raise Fault(ErrorKind.INVALID, f"query parameter label={pair[:80]!r} is not name=value")
        labels[name] = value
    return labels


def _state_filter(names: list[str]) -> list[State]:
    try:
        return [State(name) for name in names]
    except ValueError as error:
        raise Fault(ErrorKind.INVALID, f"{error}; states are {', '.join(state.value for state in State)}") from error


async def info(x: Exchange) -> Response:
    link = await x.link()
    params = x.params()
    asked = x.asked_incarnation()
    if asked is not None:
        params["incarnation"] = asked
    found = await link.call("sandbox.info", params, SandboxInfo)
    return x.reply(found, incarnation=found.incarnation)


async def stop(x: Exchange) -> Response:
    """Idempotent; answered when it is gone unless `wait=0`."""
    wait = x.flag("wait", True)
    link, params, incarnation = await x.target()
    await link.call("sandbox.stop", {**params, "wait": wait})
    return x.reply(Done(), incarnation=incarnation)


async def stop_many(x: Exchange) -> Response:
    asked = await x.json(StopManyRequest, 16 * MAX_JSON)
    links = await x.services.fleet.links()
    if asked.burst:
        params: dict[str, object] = {"request_id": x.request_id, "burst": asked.burst, "keep": asked.keep}
        counts = await asyncio.gather(*(link.call("sandbox.stop_burst", params, Count) for link in links))
        return x.reply(Count(sum(one.count for one in counts)))
    if not asked.labels and not asked.all:
        raise Fault(ErrorKind.INVALID, "labels is empty", hint="to stop every sandbox send all=true")
    params = {"request_id": x.request_id, "labels": asked.labels}
    counts = await asyncio.gather(*(link.call("sandbox.stop_many", params, Count) for link in links))
    return x.reply(Count(sum(one.count for one in counts)))


async def pause(x: Exchange) -> Response:
    """Answered when its processes stand still and its memory is given back."""
    link, params, incarnation = await x.target()
    await link.call("sandbox.pause", params)
    return x.reply(Done(), incarnation=incarnation)


async def resume(x: Exchange) -> Response:
    link, params, incarnation = await x.target()
    await link.call("sandbox.resume", params)
    return x.reply(Done(), incarnation=incarnation)


async def seal(x: Exchange) -> Response:
    """Answered when nothing of it runs any more that could change what is there."""
    link, params, incarnation = await x.target()
    await link.call("sandbox.seal", params)
    return x.reply(Done(), incarnation=incarnation)


async def ttl(x: Exchange) -> Response:
    asked = await x.json(TtlRequest)
    link, params, incarnation = await x.target()
    for name in ("running_stop", "total"):
        value = getattr(asked, name)
        if value is UNSET:
            continue
        if value is not None and not 0 < value < 1e9:
            raise Fault(ErrorKind.INVALID, f"{name}={value} is not a positive number of seconds or null")
        params[name] = value
    await link.call("sandbox.ttl", params)
    return x.reply(Done(), incarnation=incarnation)


async def network(x: Exchange) -> Response:
    """New rules; answered when they hold and what they deny is cut."""
    asked = await x.json(NetworkRequest)
    link, params, incarnation = await x.target()
    told = await link.call("sandbox.network", {**params, "rules": asked.rules}, Network)
    return x.reply(told, incarnation=incarnation)


async def changes(x: Exchange) -> Response:
    asked = await x.json(ChangesRequest)
    link, params, incarnation = await x.target()
    stream = await link.open("sandbox.changes", {**params, "include": asked.include, "max_bytes": asked.max_bytes})
    if x.wants_ndjson():
        return x.stream(lines(stream, Change, x.request_id), NDJSON, end=stream.cancel, incarnation=incarnation)
    found, reply = await collect(stream, Change)
    return x.reply(ChangeSet(tuple(found), reply.truncated), incarnation=incarnation)


async def logs(x: Exchange) -> Response:
    """NDJSON of `{"t": Unix seconds, "line": text}`."""
    link, params, incarnation = await x.target()
    stream = await link.open("sandbox.logs", params)

    async def noted() -> AsyncIterator[bytes]:
        async for item in stream:
            if isinstance(item, Note):
                yield encode(msgspec.msgpack.decode(item.payload)) + b"\n"
        try:
            await stream.result()
        except Fault as fault:
            yield error_line(fault.body, x.request_id)

    return x.stream(noted(), NDJSON, end=stream.cancel, incarnation=incarnation)
