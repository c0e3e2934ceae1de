"""Identifiers. A sandbox id encodes its edge, so that any apiserver routes without a look-up (report, 3)."""

from __future__ import annotations

import os
import random
import re
import secrets
from collections.abc import Callable

_ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"  # Crockford's base 32: no i, l, o, u
_PAIRS = [low + high for high in _ALPHABET for low in _ALPHABET]
EDGE_NAME = re.compile(r"[a-z0-9]([a-z0-9]{0,14}[a-z0-9])?")
_SANDBOX_ID = re.compile(r"sb-(?P<edge>[a-z0-9]{1,16})-(?P<random>[0-9a-z]{12})")
_HOME_ID = re.compile(r"(?:ro|jb)-(?P<edge>[a-z0-9]{1,16})-(?P<random>[0-9a-z]{12})")
_EXEC_ID = re.compile(r"[A-Za-z0-9._:-]{1,64}")


def _random(length: int, bits: Callable[[int], int] = secrets.randbits) -> str:
    """length is even."""
    number = bits(5 * length)
    return "".join([_PAIRS[(number >> shift) & 1023] for shift in range(0, 5 * length, 10)])


def new_sandbox_id(edge: str) -> str:
    """`sb-<edge>-<12 random characters>`; 60 random bits."""
    return f"sb-{edge}-{_random(12)}"


def new_rollout_id(edge: str) -> str:
    """`ro-<edge>-<12 random characters>`: the edge that keeps its log."""
    return f"ro-{edge}-{_random(12)}"


def new_job_id(edge: str) -> str:
    """`jb-<edge>-<12 random characters>`: the edge that keeps its record."""
    return f"jb-{edge}-{_random(12)}"


def new_key_id() -> str:
    """`ky-<12 random characters>`: names a scoped key in logs and refusals; it is no secret."""
    return f"ky-{_random(12)}"


def home_of(id: str) -> str | None:
    """The edge that a rollout's or a job's id names, or None when it is neither."""
    match = _HOME_ID.fullmatch(id)
    return match["edge"] if match else None


def edge_of(sandbox_id: str) -> str | None:
    """The edge a sandbox id names, or None when it is no sandbox id."""
    match = _SANDBOX_ID.fullmatch(sandbox_id)
    return match["edge"] if match else None


# Seeded by the system, again in each child, and untouched by a program that seeds the module's own: for names that must
# differ but are nobody's secret, so not worth a system call each.
_names = random.Random()
os.register_at_fork(after_in_child=_names.seed)


def new_exec_id() -> str:
    return f"ex-{_random(16, _names.getrandbits)}"


_OF_STEP = "step:"


def step_exec_id(step: int) -> str:
    """The command, or operation, that a step of a rollout is: whoever asks for the step again finds it by this one."""
    return f"{_OF_STEP}{step}"


def is_step_exec_id(exec_id: str) -> bool:
    """Names of this kind are given by steps only."""
    return exec_id.startswith(_OF_STEP)


def new_session_name() -> str:
    return f"s-{_random(12, _names.getrandbits)}"


def valid_exec_id(exec_id: str) -> bool:
    """Of commands, and of the names of sessions."""
    return _EXEC_ID.fullmatch(exec_id) is not None


def new_request_id() -> str:
    """Names a request in logs."""
    return f"rq-{_random(12, _names.getrandbits)}"
