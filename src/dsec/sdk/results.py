"""What commands and bursts give back."""

from __future__ import annotations

from typing import Literal, Self

import msgspec

from dsec.protocol.specs import ExecDone

from .errors import CommandFailed, CommandTimedOut


class ExecResult(msgspec.Struct, frozen=True, kw_only=True):
    """How a command ended and what it printed.

    exit_code: 127 for a missing command, 126 for one that cannot be executed, 128+n for signal n, whose name is in `signal`
    ("KILL"). A deadline gives 137, KILL and `timed_out`. stdout_bytes and stderr_bytes are the true sizes even where the
    output kept is shorter (`*_truncated`). duration_s in seconds. reason names a limit of the sandbox that a failed command
    met ("oom", "disk_full", "pids"), `detail` the limit and the use. step and replayed belong to rollouts: the step's number,
    and whether it was answered from the log.
    """

    exit_code: int
    signal: str | None
    stdout: bytes
    stderr: bytes
    stdout_bytes: int
    stderr_bytes: int
    stdout_truncated: bool
    stderr_truncated: bool
    timed_out: Literal["deadline", "idle"] | None
    duration_s: float
    exec_id: str
    incarnation: int
    step: int | None = None
    replayed: bool = False
    reason: Literal["oom", "disk_full", "pids"] | None = None
    detail: str = ""

    @property
    def ok(self) -> bool:
        """Exit code 0, no signal, no time-out."""
        return self.exit_code == 0 and self.signal is None and self.timed_out is None

    @property
    def stdout_text(self) -> str:
        """stdout as UTF-8, undecodable bytes replaced."""
        return self.stdout.decode("utf-8", "replace")

    @property
    def stderr_text(self) -> str:
        """stderr as UTF-8, undecodable bytes replaced."""
        return self.stderr.decode("utf-8", "replace")

    @property
    def text(self) -> str:
        """The same as `stdout_text`."""
        return self.stdout_text

    def check(self) -> Self:
        """Itself when `ok`, else raises `CommandFailed` (`CommandTimedOut` at a deadline)."""
        if self.ok:
            return self
        raise (CommandTimedOut if self.timed_out else CommandFailed)(self)


def exec_result(done: ExecDone, stdout: bytes, stderr: bytes) -> ExecResult:
    return ExecResult(
        exit_code=done.exit_code,
        signal=done.signal,
        stdout=stdout,
        stderr=stderr,
        stdout_bytes=done.stdout_bytes,
        stderr_bytes=done.stderr_bytes,
        stdout_truncated=done.stdout_truncated,
        stderr_truncated=done.stderr_truncated,
        timed_out=done.timed_out,
        duration_s=done.duration_s,
        exec_id=done.exec_id,
        incarnation=done.incarnation,
        step=done.step,
        replayed=done.replayed,
        reason=done.reason,
        detail=done.detail,
    )


class Stdout(msgspec.Struct, frozen=True):
    """Bytes of standard output. offset is the cursor of their first byte; `offset + len(data)` resumes behind them."""

    data: bytes
    offset: int


class Stderr(msgspec.Struct, frozen=True):
    """Bytes of standard error; offset as in `Stdout` (one count for both streams)."""

    data: bytes
    offset: int


class Exit(msgspec.Struct, frozen=True):
    """The end. The result carries no output: that came as events."""

    result: ExecResult


Event = Stdout | Stderr | Exit


class LogLine(str):
    """A line of a sandbox's life; `.t` is its time in Unix seconds."""

    __slots__ = ("t",)
    t: float

    def __new__(cls, line: str, t: float) -> Self:
        made = super().__new__(cls, line)
        made.t = t
        return made
