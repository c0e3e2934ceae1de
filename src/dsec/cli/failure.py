"""Failures as a user sees them: `error: what happened`, `hint: what to do`, and an exit code that scripts can test."""

from __future__ import annotations

import sys
from enum import IntEnum


class ExitCode(IntEnum):
    """A command run in a sandbox exits with its own code instead; these are for everything else."""

    FAILURE = 1
    USAGE = 2
    NOT_RUNNING = 69  # EX_UNAVAILABLE: no platform answers
    INTERRUPTED = 130
    BROKEN_PIPE = 141
    TERMINATED = 143


class CliFailure(Exception):
    """Ends the command with two lines on stderr and `code`."""

    def __init__(self, message: str, *, hint: str = "", code: int = ExitCode.FAILURE) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.code = int(code)


def usage(message: str, *, hint: str = "") -> CliFailure:
    return CliFailure(message, hint=hint, code=ExitCode.USAGE)


def not_running(detail: str, *, hint: str = "") -> CliFailure:
    text = f"the platform is not running ({detail})"
    return CliFailure(text, hint=hint or "start it with: dsec up", code=ExitCode.NOT_RUNNING)


def one_line(text: str) -> str:
    return " ".join(text.split())


def report(message: str, hint: str = "") -> None:
    print(f"error: {one_line(message)}", file=sys.stderr)
    if hint:
        print(f"hint: {one_line(hint)}", file=sys.stderr)
