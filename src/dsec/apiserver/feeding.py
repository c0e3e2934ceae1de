"""What is too much for one message of the link: long command lines, sent ahead of their command, and long stdin, sent behind.

Both are sent in pieces that say where they belong, so that a piece, or the whole request, may be repeated: nothing of it
arrives twice or out of order.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine

import msgspec
from blake3 import blake3

from dsec.protocol.errors import ErrorKind, Fault
from dsec.protocol.link import LinkStream
from dsec.protocol.requests import plain_of

from .fleet import EdgeLink

PIECE = 256 * 1024  # a link message takes 1 MiB
MAX_AHEAD = 4 * 1024 * 1024  # twice what the kernel takes of arguments and environment
_MANY = 30_000  # entries; the link takes 65,536 in one container
_AGAIN_S = 0.005
_encode = msgspec.msgpack.Encoder().encode


class Fed(msgspec.Struct, frozen=True):
    """How many bytes of a writer the command's stdin has taken, and whether it takes more."""

    accepted: int = 0
    open: bool = True


def _base(params: dict[str, object]) -> dict[str, object]:
    names = ("request_id", "sandbox", "incarnation", "exec_id")
    return {name: params[name] for name in names if name in params}


# -- ahead --


async def send_ahead(link: EdgeLink, params: dict[str, object]) -> None:
    """Sends line, argv and environment on their own when they are too much for `exec`, whose parameters then say so."""
    line, argv, env = params["line"], params["argv"], params["env"]
    assert isinstance(argv, list | tuple) and isinstance(env, dict)
    whole: dict[str, object] = {"line": line, "argv": argv, "env": env}
    if isinstance(line, bytes) and len(line) > PIECE:
        ahead, params["line"] = {"line": line}, None
    elif len(argv) > _MANY or sum(map(len, argv)) > PIECE:
        ahead, params["argv"] = {"argv": _terminated("argument", argv)}, ()
    else:
        ahead = {}
    if len(env) > _MANY or sum(len(name) + len(value) for name, value in env.items()) > PIECE:
        variables = [f"{_named(name)}={value}".encode() for name, value in env.items()]
        ahead["env"], params["env"] = _terminated("environment variable", variables), {}
    if not ahead:
        return
    if "step_of" in params:
        params["ahead"] = {name: _shown(value) for name, value in whole.items() if name in ahead}
    blob = _encode(ahead)
    if len(blob) > MAX_AHEAD:
        raise Fault(
            ErrorKind.TOO_LARGE,
            f"a command line, arguments and environment of {len(blob)} bytes are over the limit of {MAX_AHEAD}",
            hint="write the script or the data to a file with files.write, or pass it through stdin",
            limit=MAX_AHEAD,
            value=len(blob),
        )
    for offset in range(0, len(blob), PIECE):
        piece = {"data": blob[offset : offset + PIECE], "offset": offset}
        await link.call("exec.stage", {**_base(params), **piece, "step_of": params.get("step_of")})
    params["staged"] = len(blob)
    params["ahead_digest"] = blake3(blob).hexdigest()


def _shown(value: object) -> object:
    """For the log of a rollout: as the canonical request has it, or its digest where that is too long."""
    plain = plain_of(value)
    text = msgspec.json.encode(plain, order="sorted")
    return plain if len(text) <= PIECE else {"blake3": blake3(text).hexdigest(), "size": len(text)}


def _named(name: str) -> str:
    if not name or "=" in name:
        raise Fault(ErrorKind.INVALID, f"environment variable {name!r} is empty or has '=' or NUL in it")
    return name


def _terminated(what: str, words: list[bytes] | tuple[bytes, ...]) -> bytes:
    for index, word in enumerate(words):
        if b"\0" in word:
            raise Fault(ErrorKind.INVALID, f"{what} {index} has a NUL byte in it")
    return b"".join(word + b"\0" for word in words)


# -- behind --


def split_stdin(params: dict[str, object]) -> bytes:
    """Takes from the request what is too much for one message; the pipe is then held open until that was written."""
    data = params["stdin"]
    if not isinstance(data, bytes) or len(data) <= PIECE:
        return b""
    params["stdin"] = data[:PIECE]
    params["stdin_open"] = True
    return data[PIECE:]


_feeders: dict[tuple[str, str], asyncio.Task[None]] = {}


def feed(link: EdgeLink, params: dict[str, object], data: bytes, running: LinkStream | None = None) -> None:
    """Gives a command the rest of its stdin beside the request. running: its own stream, which may not have reached it yet.

    A repeated request finds the feeder at work, or, on another apiserver, goes through the bytes that are there already.
    """
    key = (str(params["sandbox"]), str(params["exec_id"]))
    if key not in _feeders:
        task = _feeders[key] = asyncio.create_task(_feed(link, _base(params), data, running))
        task.add_done_callback(lambda _: _feeders.pop(key, None))


async def _feed(link: EdgeLink, base: dict[str, object], data: bytes, running: LinkStream | None) -> None:
    with contextlib.suppress(Fault):  # it ended without reading everything, or is gone: its own result says so
        for start in range(0, len(data), PIECE):
            piece = {**base, "data": data[start : start + PIECE], "offset": PIECE + start}
            while not await _written(link.call("exec.write", piece, Fed), running):
                await asyncio.sleep(_AGAIN_S)
        await link.call("exec.close_stdin", {**base, "offset": PIECE + len(data)})


async def _written(writing: Coroutine[None, None, Fed], running: LinkStream | None) -> bool:
    try:
        await writing
    except Fault as fault:
        if fault.body.kind is not ErrorKind.NOT_FOUND or running is None or running.ended:
            raise
        return False
    return True


async def write(
    link: EdgeLink, params: dict[str, object], data: bytes, *, offset: int | None, writer: str, wait_s: float | None
) -> Fed:
    """Appends to stdin, as far as it takes within `wait_s` (None: all, however long that takes)."""
    where: dict[str, object] = {**_base(params), "writer": writer}
    told = Fed()
    try:
        async with asyncio.timeout(wait_s):
            for start in range(0, max(1, len(data)), PIECE):
                piece: dict[str, object] = {**where, "data": data[start : start + PIECE]}
                if offset is not None:
                    piece["offset"] = offset + start
                told = await link.call("exec.write", piece, Fed)
    except TimeoutError:
        return await link.call("exec.write", {**where, "data": b""}, Fed)
    return told
