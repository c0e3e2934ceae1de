"""The container backend against a launcher that is only a socket: what it counts and holds when things go wrong."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest

from dsec.backends.container import ContainerBackend
from dsec.backends.launcher import CreateReply, LauncherClient, LauncherFailed
from dsec.layers import Environment
from dsec.layers.manifest import Blob, Config, Manifest, Provenance


class Far(NamedTuple):
    """Both ends: the client under test and the socket that plays the launcher."""

    client: LauncherClient
    sock: socket.socket


class _Asked(msgspec.Struct):
    id: int
    v: str


@pytest.fixture
async def far() -> AsyncIterator[Far]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setblocking(False)
    process = await asyncio.create_subprocess_exec("true")
    client = LauncherClient(ours, process, lambda why: None)
    yield Far(client, theirs)
    await client.close()
    theirs.close()


async def asked(far: Far) -> _Asked:
    return msgspec.msgpack.decode(await asyncio.to_thread(far.sock.recv, 65536), type=_Asked)


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


async def test_a_descriptor_that_comes_with_the_cancellation_is_closed(far: Far) -> None:
    read, write = os.pipe()
    request = asyncio.create_task(far.client.call_for_fd("create", None, CreateReply))
    number = (await asked(far)).id
    before = descriptors()
    socket.send_fds(far.sock, [msgspec.msgpack.encode({"id": number, "ok": True, "pid": 1})], [read])
    far.client._readable()  # the reply is there, its waiter not yet run
    assert descriptors() == before + 1
    request.cancel()
    with pytest.raises(asyncio.CancelledError):
        await request
    assert descriptors() == before
    os.close(read)
    os.close(write)


async def test_a_stop_that_fails_gives_the_layers_back(far: Far) -> None:
    backend = ContainerBackend(Path("/nowhere"), None, Path("/nowhere"), 0)  # type: ignore[arg-type]
    backend.launcher = far.client
    restoring = asyncio.create_task(backend.restore([]))
    number = (await asked(far)).id
    far.sock.send(msgspec.msgpack.encode({"id": number, "ok": True, "removed": {}}))
    assert await restoring == {}
    blob = Blob(digest="blake3:00", size=1)
    layer = Manifest(
        name="a", version="1", kind="base", meta=blob, data=(), config=Config(), labels={},
        provenance=Provenance(source="directory"), entries=0, uncompressed_size=0,
    )  # fmt: skip
    backend.mounts._mounted[layer.digest] = os.open("/dev/null", os.O_RDONLY)
    await backend.mounts.acquire((layer,))
    assert backend.mounts.in_use() == {layer.digest}
    stopping = asyncio.create_task(
        backend.stop("sb-x-000000000000", Environment(layers=(layer,), env={}, workdir=None, user=None))
    )
    number = (await asked(far)).id
    far.sock.send(msgspec.msgpack.encode({"id": number, "ok": False, "stage": "sweep", "error": "groups are busy"}))
    with pytest.raises(LauncherFailed):
        await stopping
    assert backend.mounts.in_use() == set()
    backend.mounts.close()
