"""`python -m dsec.apiserver`: one replica. Started by `dsec up` or a service manager; logs JSON lines to stderr."""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import os
import resource
import socket
import sys
from contextlib import suppress
from importlib.metadata import version

import structlog
import uvicorn

from dsec.iam.keys import KeyRing
from dsec.placement.registry import FixedRegistry
from dsec.protocol.errors import Fault
from dsec.protocol.priority import prefer_this_process
from dsec.protocol.privilege import keep_capabilities

from .app import build
from .fleet import Fleet
from .guard import Bounds, GuardedProtocol

KEEP_ALIVE_S = 75  # longer than the SDK keeps idle connections, so that it is never the server that closes first
GRACE_S = 2
BACKLOG = 4096


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m dsec.apiserver", description=__doc__)
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--listen", default="127.0.0.1:7707", metavar="HOST:PORT")
    where.add_argument("--fd", type=int, help="a bound socket, inherited")
    parser.add_argument("--edge-socket", action="append", required=True, metavar="PATH", help="repeat for more edges")
    parser.add_argument("--key-file", required=True, metavar="PATH", help="one line, mode 0600")
    parser.add_argument(
        "--max-connections", type=int, default=Bounds().connections, metavar="N", help="at once; more replace idle ones"
    )
    parser.add_argument(
        "--header-timeout", type=float, default=Bounds().header_s, metavar="S", help="for the headers of a request"
    )
    parser.add_argument(
        "--body-timeout", type=float, default=Bounds().body_s, metavar="S", help="for the next part of a request's body"
    )
    parser.add_argument("--ready", type=int, default=-1, metavar="FD", help="`ok` is written here when it serves")
    parser.add_argument("--lifeline", type=int, default=-1, metavar="FD", help="ends when this reads end-of-file")
    parser.add_argument("--log-level", default="info", choices=("debug", "info", "warning", "error"))
    return parser.parse_args()


def _log_json(level: str) -> None:
    """structlog and the libraries' own records alike, as JSON lines on stderr."""
    shared: list[structlog.typing.Processor] = [
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.format_exc_info,
    ]
    number = logging.getLevelNamesMapping()[level.upper()]
    structlog.configure(
        processors=[*shared, structlog.processors.JSONRenderer()],
        wrapper_class=structlog.make_filtering_bound_logger(number),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(processor=structlog.processors.JSONRenderer(), foreign_pre_chain=shared)
    )
    logging.basicConfig(handlers=[handler], level=max(number, logging.WARNING), force=True)


class _Server(uvicorn.Server):
    """Says when it serves, and ends with its lifeline."""

    def __init__(self, config: uvicorn.Config, fleet: Fleet, ready: int, lifeline: int) -> None:
        super().__init__(config)
        self._fleet = fleet
        self._ready = ready
        self._lifeline = lifeline

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self._lifeline >= 0:
            os.set_blocking(self._lifeline, False)
            asyncio.get_running_loop().add_reader(self._lifeline, self._lifeline_readable)
        if self._ready >= 0 and self.started:
            await self._fleet.views()  # the edge, when it is there; without it we serve all the same, with typed errors
            say(self._ready, "ok")
        gc.collect()
        gc.freeze()
        gc.set_threshold(20_000, 20, 50)  # requests make few cycles and many objects

    def _lifeline_readable(self) -> None:
        with suppress(BlockingIOError):
            if not os.read(self._lifeline, 64):
                asyncio.get_running_loop().remove_reader(self._lifeline)
                self.should_exit = True


def say(fd: int, text: str) -> None:
    """To who started us: `ok`, or what went wrong with a hint on the second line."""
    if fd >= 0:
        with suppress(OSError):
            os.write(fd, text.encode())
            os.close(fd)


def _sockets(arguments: argparse.Namespace) -> list[socket.socket]:
    if arguments.fd is not None:
        return [socket.socket(fileno=arguments.fd)]
    host, _, port = arguments.listen.rpartition(":")
    if not port.isdigit():
        raise ValueError(f"--listen {arguments.listen!r} is not HOST:PORT")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return [socket.create_server((host.strip("[]"), int(port)), family=family, backlog=BACKLOG)]


def _raise_descriptor_limit() -> int:
    """As many descriptors as we may have; how many that are."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


def main() -> int:
    arguments = _arguments()
    _log_json(arguments.log_level)
    log = structlog.get_logger("dsec.apiserver")
    try:
        keys = KeyRing.from_file(arguments.key_file)
        sockets = _sockets(arguments)
        most = _raise_descriptor_limit() // 2  # the other half is for what requests open
        GuardedProtocol.bounds = Bounds(
            connections=max(1, min(arguments.max_connections, most)),
            header_s=arguments.header_timeout,
            body_s=arguments.body_timeout,
        )
        prefer_this_process()
        if os.geteuid() == 0:
            keep_capabilities()
    except (Fault, OSError, ValueError) as error:
        hint = error.body.hint if isinstance(error, Fault) else ""
        say(arguments.ready, f"{error}\n{hint}")
        log.critical("the apiserver could not run", error=str(error), hint=hint)
        return 2
    fleet = Fleet(FixedRegistry(arguments.edge_socket))
    config = uvicorn.Config(
        build(fleet, keys, version=version("dsec")),
        loop="uvloop",
        http=GuardedProtocol,
        ws="websockets-sansio",
        ws_max_size=1024 * 1024,
        ws_ping_timeout=None,  # who is slow to read is slow to answer pings; who is gone does not acknowledge them
        ws_per_message_deflate=False,
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        date_header=False,
        backlog=BACKLOG,
        proxy_headers=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=GRACE_S,
    )
    server = _Server(config, fleet, arguments.ready, arguments.lifeline)
    server.run(sockets)
    return 0 if server.started else 1


if __name__ == "__main__":
    sys.exit(main())
