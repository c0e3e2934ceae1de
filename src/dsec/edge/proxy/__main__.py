"""`python -m dsec.edge.proxy SOCKET`: started by the edge with its mirrors on stdin, ends with its edge.

It binds its socket, reads what it must, gives up every privilege, says so on stdout and serves.
"""

from __future__ import annotations

import asyncio
import encodings.idna  # noqa: F401 - loaded before the file system is out of reach, as all that is loaded late elsewhere
import os
import resource
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import msgspec
import structlog

from dsec.protocol.link import LinkServer

from .confine import confine
from .service import ProxyService
from .setup import Setup
from .upstream import Upstreams

_LOOK_UPS = 32
_log = structlog.get_logger("proxy")


def _trusted(setup: Setup) -> Upstreams:
    upstreams = Upstreams(setup.limits)
    for mirror in setup.mirrors:
        upstreams.trust(mirror, Path(mirror.ca).read_text(encoding="ascii") if mirror.ca else "")
    return upstreams


async def _serve(socket: str, setup: Setup) -> None:
    upstreams = _trusted(setup)
    service = ProxyService(setup.mirrors, upstreams, setup.limits)
    server = LinkServer(
        service.handlers(), on_error=lambda method, error: _log.error("failed", method=method, exc_info=error)
    )
    await server.listen_unix(socket)
    confine()
    loop = asyncio.get_running_loop()
    loop.set_default_executor(ThreadPoolExecutor(_LOOK_UPS, "look-up"))
    ended = asyncio.Event()
    os.set_blocking(0, False)
    loop.add_reader(0, _edge_said, ended)
    os.write(1, b"ok\n")
    os.close(1)
    await ended.wait()
    os._exit(0)  # nothing here outlives the edge, and a look-up that hangs must not hold the process


def _edge_said(ended: asyncio.Event) -> None:
    """Nothing more is expected on stdin but its end, which is the edge's."""
    with suppress(BlockingIOError):
        if not os.read(0, 4096):
            asyncio.get_running_loop().remove_reader(0)
            ended.set()


def main() -> int:
    os.closerange(3, 1 << 20)  # whatever was inheritable in the edge is none of ours
    structlog.configure(
        processors=[structlog.processors.add_log_level, structlog.processors.TimeStamper(fmt="iso"),
                    structlog.processors.format_exc_info, structlog.processors.JSONRenderer()],
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )  # fmt: skip
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        setup = msgspec.json.decode(_line(0), type=Setup)
        asyncio.run(_serve(sys.argv[1], setup))  # not uvloop: it wants io_uring, which the filter refuses
    except (OSError, ValueError, msgspec.MsgspecError) as error:
        with suppress(OSError):
            os.write(1, f"{error}\n".encode())
        _log.critical("the proxy could not run", error=str(error))
        return 1
    return 0


def _line(fd: int) -> bytes:
    """Up to the newline; the edge writes nothing more before it is answered."""
    line = bytearray()
    while not line.endswith(b"\n"):
        piece = os.read(fd, 65536)
        if not piece:
            break
        line += piece
    return bytes(line)


if __name__ == "__main__":
    sys.exit(main())
