"""A real apiserver process on a free port, over fake edges in this process."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import urllib.request
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from tests.apiserver.fake_edge import FakeEdge

KEY = "test-key-0123456789abcdef"
DEADLINE_S = 20


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@asynccontextmanager
async def apiserver(
    directory: Path, *edges: FakeEdge, port: int | None = None, ready: bool = True, arguments: Sequence[str] = ()
) -> AsyncIterator[str]:
    """The URL of a running apiserver; its log must hold no traceback at the end."""
    key = directory / "api.key"
    if not key.exists():
        key.touch(0o600)
        key.write_text(KEY)
    port = port or free_port()
    url = f"http://127.0.0.1:{port}"
    sockets = [part for edge in edges for part in ("--edge-socket", str(edge.socket))]
    log = directory / f"apiserver-{port}.log"
    with log.open("ab") as sink:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "dsec.apiserver", "--listen", f"127.0.0.1:{port}", "--key-file", str(key), *sockets, *arguments,
            stdin=asyncio.subprocess.DEVNULL, stdout=sink, stderr=sink, env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )  # fmt: skip
    try:
        async with asyncio.timeout(DEADLINE_S):
            while not await asyncio.to_thread(_answers, url, len(edges) if ready else 0):
                if process.returncode is not None:
                    raise AssertionError(f"the apiserver ended: {log.read_text()}")
        yield url
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()
    text = log.read_text()
    assert "Traceback" not in text and KEY not in text, text


def _answers(url: str, edges: int) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/healthz", timeout=1) as answer:
            return f'"edges":{edges}' in answer.read().decode() or not edges
    except OSError:
        return False
