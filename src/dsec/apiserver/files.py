"""Files of a sandbox, streamed both ways at the pace of the slower side; nothing is held whole."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TypeVar

from starlette.responses import Response

from dsec.protocol.errors import ErrorKind, Fault
from dsec.protocol.link import MAX_FRAME, LinkStream
from dsec.protocol.specs import FileChange, FileInfo

from .bodies import Done, Entries, MkdirRequest, MoveRequest, Size
from .exchange import BYTES, NDJSON, Exchange, announced, checked_path, first_item
from .records import collect, kept_alive, lines, lines_from

T = TypeVar("T")
TAR = "application/x-tar"


async def read(x: Exchange) -> Response:
    """Bytes of a regular file, `offset` and `length` optional."""
    path, offset, length = x.file_path(), x.number("offset", 0), x.number("length")
    link, params, incarnation = await x.target()
    request = {**params, "path": path, "offset": offset, "length": length, "user": x.query("user")}
    stream = await link.open("fs.read", request)
    size, pieces = await announced(stream)
    response = x.stream(pieces, BYTES, end=stream.cancel, incarnation=incarnation)
    if size is not None:
        response.headers["x-dsec-size"] = str(size)
    return response


async def write(x: Exchange) -> Response:
    """The body becomes the file, atomically: a request that breaks off changes nothing."""
    path = x.file_path()
    _check_encoding(x)
    mode = x.query("mode")
    if mode is not None and not (0 < len(mode) <= 5 and all(digit in "01234567" for digit in mode)):
        raise Fault(ErrorKind.INVALID, f"query parameter mode={mode[:20]!r} is not octal permission bits such as 644")
    link, params, incarnation = await x.target()
    request = {
        **params,
        "path": path,
        "mode": None if mode is None else int(mode, 8),
        "owner": x.query("owner"),
        "user": x.query("user"),
    }
    stream = await link.open("fs.write", request)
    size = await _send_body(x, stream, Size)
    return x.reply(size, incarnation=incarnation, status=201)


async def archive_read(x: Exchange) -> Response:
    """A pax tar of a directory or file, names relative to it."""
    path = x.file_path()
    link, params, incarnation = await x.target()
    stream = await link.open("fs.tar", {**params, "path": path, "user": x.query("user")})
    return x.stream(await first_item(stream), TAR, end=stream.cancel, incarnation=incarnation)


async def archive_write(x: Exchange) -> Response:
    """The body, a tar, is unpacked under `path`, which is made if it is not there."""
    path = x.file_path()
    _check_encoding(x)
    link, params, incarnation = await x.target()
    stream = await link.open("fs.untar", {**params, "path": path, "user": x.query("user")})
    entries = await _send_body(x, stream, Entries)
    return x.reply(entries, incarnation=incarnation)


def _check_encoding(x: Exchange) -> None:
    """A compressed body would become a compressed file without anybody having said so."""
    encoding = x.header("content-encoding")
    if encoding not in (None, "", "identity"):
        raise Fault(
            ErrorKind.INVALID, f"Content-Encoding {encoding[:40]!r} is not taken", hint="send the bytes as they are"
        )


async def _send_body(x: Exchange, stream: LinkStream, reply: type[T]) -> T:
    """Body to stream, then its result. A refusal in the middle of the body wins over what is still to be sent."""
    try:
        async for pieces in _whole_frames(x.chunks()):
            try:
                await stream.send_frame(pieces)
            except Fault:
                break  # the edge closed the stream: the result says why
        else:
            await stream.end()
        return await stream.result(reply)
    finally:
        stream.cancel()


async def _whole_frames(parts: AsyncIterator[bytes]) -> AsyncIterator[list[memoryview]]:
    """The same bytes, cut where frames are, so that files are written in whole pages. Nothing is copied."""
    pieces: list[memoryview] = []
    room = MAX_FRAME
    async for part in parts:
        view = memoryview(part)
        while len(view) >= room:
            pieces.append(view[:room])
            yield pieces
            view, pieces, room = view[room:], [], MAX_FRAME
        if view:
            pieces.append(view)
            room -= len(view)
    if pieces:
        yield pieces


async def stat(x: Exchange) -> Response:
    path = x.file_path()
    follow = x.flag("follow", True)
    link, params, incarnation = await x.target()
    request = {**params, "path": path, "follow": follow, "user": x.query("user")}
    return x.reply(await link.call("fs.stat", request, FileInfo), incarnation=incarnation)


async def listing(x: Exchange) -> Response:
    """Entries below a directory down to `depth`; JSON list, or NDJSON when asked for."""
    path, depth = x.file_path(), x.number("depth", 1, low=1, high=4096)
    link, params, incarnation = await x.target()
    stream = await link.open("fs.list", {**params, "path": path, "depth": depth, "user": x.query("user")})
    if x.wants_ndjson():
        return x.stream(lines(stream, FileInfo, x.request_id), NDJSON, end=stream.cancel, incarnation=incarnation)
    found, _ = await collect(stream, FileInfo)
    return x.reply(found, incarnation=incarnation)


async def watch(x: Exchange) -> Response:
    """Changes below a path, the first of them `ready`, until it is gone or the caller is; an empty line now and then."""
    path, recursive = x.file_path(), x.flag("recursive")
    link, params, incarnation = await x.target()
    asked = {**params, "path": path, "recursive": recursive, "user": x.query("user")}
    stream = await link.open("fs.watch", asked)
    try:
        first = await lines_from(stream, FileChange, x.request_id)
    except BaseException:
        stream.cancel()
        raise
    return x.stream(kept_alive(first), NDJSON, end=stream.cancel, incarnation=incarnation)


async def remove(x: Exchange) -> Response:
    path, recursive = x.file_path(), x.flag("recursive")
    link, params, incarnation = await x.target()
    await link.call("fs.remove", {**params, "path": path, "recursive": recursive, "user": x.query("user")})
    return x.reply(Done(), incarnation=incarnation)


async def move(x: Exchange) -> Response:
    asked = await x.json(MoveRequest)
    link, params, incarnation = await x.target()
    request = {
        **params,
        "source": checked_path(asked.source),
        "target": checked_path(asked.target),
        "user": asked.user,
    }
    await link.call("fs.move", request)
    return x.reply(Done(), incarnation=incarnation)


async def mkdir(x: Exchange) -> Response:
    asked = await x.json(MkdirRequest)
    if not 0 <= asked.mode <= 0o7777:
        raise Fault(ErrorKind.INVALID, f"mode={asked.mode} is not permission bits")
    link, params, incarnation = await x.target()
    request = {
        **params,
        "path": checked_path(asked.path),
        "mode": asked.mode,
        "parents": asked.parents,
        "user": asked.user,
    }
    await link.call("fs.mkdir", request)
    return x.reply(Done(), incarnation=incarnation)
