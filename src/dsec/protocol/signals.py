"""Signals by name or number."""

from __future__ import annotations

import signal

from .errors import ErrorKind, Fault


def signal_number(name: str | int) -> int:
    """`TERM`, `SIGTERM`, `RTMIN+3` or 15 -> 15. Fault invalid_request for anything else."""
    number = int(name) if isinstance(name, str) and name.isascii() and name.isdigit() and len(name) < 3 else name
    if isinstance(number, str):
        base, plus, more = number.upper().removeprefix("SIG").partition("+")
        found = getattr(signal, f"SIG{base}", None)
        if isinstance(found, signal.Signals) and (not plus or (base == "RTMIN" and more.isascii() and more.isdigit())):
            number = int(found) + int(more[:3] or 0)
    if isinstance(number, int) and 0 < number < signal.NSIG:
        return number
    raise Fault(
        ErrorKind.INVALID,
        f"signal {str(name)[:40]!r} is unknown",
        hint="use a name such as TERM, or a number from 1 to 64",
    )
