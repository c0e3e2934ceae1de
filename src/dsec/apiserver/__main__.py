"""`python -m dsec.apiserver`: one replica. Started by `dsec up` or a service manager; logs JSON lines to stderr."""

from __future__ import annotations

import argparse
import logging
import sys
from importlib.metadata import version

import structlog
import uvicorn

from dsec.iam.keys import KeyRing
from dsec.placement.registry import FixedRegistry
from dsec.protocol.errors import Fault

from .app import build
from .fleet import Fleet

KEEP_ALIVE_S = 75  # longer than the SDK keeps idle connections, so that it is never the server that closes first
GRACE_S = 2
BACKLOG = 2048


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m dsec.apiserver", description=__doc__)
    parser.add_argument("--listen", default="127.0.0.1:7070", metavar="HOST:PORT")
    parser.add_argument("--edge-socket", action="append", required=True, metavar="PATH", help="repeat for more edges")
    parser.add_argument("--key-file", required=True, metavar="PATH", help="one line, mode 0600")
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


def main() -> int:
    arguments = _arguments()
    _log_json(arguments.log_level)
    log = structlog.get_logger("dsec.apiserver")
    host, _, port = arguments.listen.rpartition(":")
    if not port.isdigit():
        log.error("bad --listen", value=arguments.listen, hint="HOST:PORT")
        return 2
    try:
        keys = KeyRing.from_file(arguments.key_file)
    except Fault as fault:
        log.error(fault.body.message, hint=fault.body.hint)
        return 2
    app = build(Fleet(FixedRegistry(arguments.edge_socket)), keys, version=version("dsec"))
    server = uvicorn.Server(
        uvicorn.Config(
            app,
            host=host.strip("[]"),
            port=int(port),
            loop="uvloop",
            http="httptools",
            ws="websockets-sansio",
            ws_max_size=1024 * 1024,
            ws_per_message_deflate=False,
            lifespan="on",
            log_config=None,
            access_log=False,
            server_header=False,
            date_header=False,
            backlog=BACKLOG,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=GRACE_S,
        )
    )
    server.run()
    return 0 if server.started else 1


if __name__ == "__main__":
    sys.exit(main())
