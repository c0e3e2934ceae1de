"""The way of a sandbox to the proxy process, when that process is of no help."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from dsec.edge import gate as module
from dsec.edge.gate import Gate
from dsec.protocol.errors import ErrorKind, Fault
from dsec.protocol.link import Call, LinkServer


async def test_a_proxy_that_hangs_holds_up_no_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_STOP_S", 0.1)

    async def at_once(call: Call) -> object:
        return {}

    async def never(call: Call) -> object:
        await asyncio.Event().wait()
        return {}

    async def ready(self: Gate) -> None:
        pass

    monkeypatch.setattr(Gate, "ready", ready)
    server = LinkServer({"proxy.rules": at_once, "proxy.serve": never, "proxy.forget": never})
    await server.listen_unix(tmp_path / "proxy.sock")
    way = Gate(tmp_path, ()).way("sb-x")
    await way.serve()
    await asyncio.wait_for(way.close(), 5)
    await server.close()


async def test_a_proxy_that_cannot_be_started_is_a_named_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module.sys, "executable", str(tmp_path / "missing"))
    with pytest.raises(Fault) as caught:
        await Gate(tmp_path, ()).way("sb-x").serve()
    assert caught.value.body.kind is ErrorKind.INTERNAL and "No such file" in caught.value.body.message
