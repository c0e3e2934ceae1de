"""Durable steps by name, so that a test can end any process exactly before or after one of them.

DSEC_STEPS names a Unix socket; without it a step costs a comparison. With it the edge tells who listens there that it stands
before (or after) the step, and stands still until it is answered: whatever is to die dies meanwhile.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress

import msgspec

_PATIENCE_S = 10.0
_WATCHER = os.environ.get(
    "DSEC_STEPS"
)  # a look into the environment each time would be the larger part of a step's price
_NOTHING: AbstractContextManager[None] = nullcontext()


class Standing(msgspec.Struct, frozen=True):
    """Where the edge stands; when is "before" or "after"."""

    step: str
    when: str
    sandbox: str


def step(name: str, sandbox: str) -> AbstractContextManager[None]:
    """Around a durable step: `operation.step`. One that fails has no "after"."""
    return _watched(_WATCHER, name, sandbox) if _WATCHER else _NOTHING


@contextmanager
def _watched(watcher: str, name: str, sandbox: str) -> Iterator[None]:
    _tell(watcher, Standing(name, "before", sandbox))
    yield
    _tell(watcher, Standing(name, "after", sandbox))


def _tell(watcher: str, standing: Standing) -> None:
    with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.settimeout(_PATIENCE_S)
        sock.connect(watcher)
        sock.send(msgspec.json.encode(standing))
        sock.recv(1)
