"""Where the static binary `dsec-runtime` is."""

from __future__ import annotations

import os
from pathlib import Path

from dsec.protocol.errors import ErrorKind, Fault

_PACKAGE = Path(__file__).resolve().parent.parent
_TARGET = "target/x86_64-unknown-linux-gnu/release/dsec-runtime"


def runtime_path() -> Path:
    """DSEC_RUNTIME, else the wheel's copy, else the checkout's release build."""
    override = os.environ.get("DSEC_RUNTIME")
    candidates = (
        [Path(override)] if override else [_PACKAGE / "_bin" / "dsec-runtime", _PACKAGE.parent.parent / _TARGET]
    )
    for candidate in candidates:
        if os.access(candidate, os.X_OK):
            return candidate
    raise Fault(
        ErrorKind.INTERNAL,
        f"dsec-runtime is not at {' or '.join(map(str, candidates))}",
        hint="build it with `make runtime` (needs cargo), or set DSEC_RUNTIME",
    )
