"""What the SDK raises: one class per kind of error, each also the builtin exception it is a case of.

Every error has `.kind` (closed set), `.message`, `.hint` (what to do next), `.retryable`, `.sandbox_id`, `.request_id`.
"""

from __future__ import annotations

import errno as _errno
from typing import TYPE_CHECKING

from dsec.protocol.errors import ErrorBody, ErrorKind

if TYPE_CHECKING:
    from .results import ExecResult

Details = dict[str, str | int | float | dict[str, int]]


class DSecError(Exception):
    """Base of everything that DSec raises on purpose."""

    kind: ErrorKind = ErrorKind.INTERNAL

    def __init__(
        self,
        message: str,
        *,
        kind: ErrorKind | None = None,
        hint: str = "",
        retryable: bool = False,
        details: Details | None = None,
    ) -> None:
        super().__init__(message)
        self.kind = kind or type(self).kind
        self.message = message
        self.hint = hint
        self.retryable = retryable
        self.details: Details = details or {}

    @property
    def sandbox_id(self) -> str | None:
        value = self.details.get("sandbox_id")
        return value if isinstance(value, str) else None

    @property
    def request_id(self) -> str | None:
        value = self.details.get("request_id")
        return value if isinstance(value, str) else None

    def __str__(self) -> str:
        return f"{self.message} ({self.hint})" if self.hint else self.message


class AuthenticationError(DSecError):
    """No key, or one that is not valid there."""

    kind = ErrorKind.AUTHENTICATION


class PermissionDenied(DSecError):
    """The key is valid but does not allow this."""

    kind = ErrorKind.PERMISSION


class QuotaExceeded(DSecError):
    """The project's quota does not allow this now."""

    kind = ErrorKind.QUOTA


class InvalidRequest(DSecError, ValueError):
    """A request that cannot be right; the message names the field."""

    kind = ErrorKind.INVALID


class TooLarge(InvalidRequest):
    """More bytes than the request may carry."""

    kind = ErrorKind.TOO_LARGE


class NotFound(DSecError, LookupError):
    """No such sandbox, layer or command."""

    kind = ErrorKind.NOT_FOUND


class SessionEnded(DSecError):
    """The shell of a session has ended, and with it what it kept; the message says how. The sandbox lives."""

    kind = ErrorKind.SESSION_ENDED


class Conflict(DSecError):
    """It is there already, or in a state that does not allow this."""

    kind = ErrorKind.CONFLICT


class ReplayDivergence(Conflict):
    """A rollout was asked for another step than the recorded one; the message has both, field by field. Nothing was run.

    `.step` is its number; `.recorded` and `.asked` are the two requests, canonical JSON.
    """

    kind = ErrorKind.DIVERGED

    @property
    def step(self) -> int | None:
        value = self.details.get("step")
        return value if isinstance(value, int) else None

    @property
    def recorded(self) -> str:
        return str(self.details.get("recorded", ""))

    @property
    def asked(self) -> str:
        return str(self.details.get("asked", ""))


class RolloutFenced(Conflict):
    """Another client has opened the rollout since: this one may not go on. Whoever opened it last has it."""

    kind = ErrorKind.FENCED


class OutcomeUnknown(Conflict):
    """A recorded step may have run, and nothing can tell any more what came of it. It is not run again."""

    kind = ErrorKind.OUTCOME_UNKNOWN


class Unsupported(DSecError, NotImplementedError):
    """This installation cannot do it; `dsec doctor` says why."""

    kind = ErrorKind.UNSUPPORTED


class InternalError(DSecError):
    """A defect of DSec; the log of the process has the cause under `.request_id`."""

    kind = ErrorKind.INTERNAL


class CapacityError(DSecError):
    """No room: `.limit` is the name of the limit, `.value` its value, `.holders` who holds it (name -> count)."""

    kind = ErrorKind.CAPACITY

    @property
    def limit(self) -> str:
        return str(self.details.get("limit", ""))

    @property
    def value(self) -> float | None:
        value = self.details.get("value")
        return value if isinstance(value, int | float) else None

    @property
    def holders(self) -> dict[str, int]:
        value = self.details.get("holders")
        return dict(value) if isinstance(value, dict) else {}

    def __str__(self) -> str:
        """Names the limit and its holders even where the server's sentence does not."""
        text = super().__str__()
        if self.limit and self.limit not in text:
            text += f"; limit {self.limit}={self.value}"
        if self.holders and not any(name in text for name in self.holders):
            text += "; held by " + ", ".join(f"{name}: {count}" for name, count in self.holders.items())
        return text


class ConnectionLost(DSecError, ConnectionError):
    """Nothing answered, or what answered went away. Commands and sandboxes are not touched by it."""

    kind = ErrorKind.CONNECTION_LOST


class ConnectTimeout(ConnectionLost, TimeoutError):
    """No answer within `request_timeout`."""


class RequestTimeout(DSecError, TimeoutError):
    """The server gave up a request in time. Never raised for a command."""

    kind = ErrorKind.TIMEOUT


class CreateFailed(DSecError):
    """A sandbox did not come to be; `.stage` says how far it got."""

    kind = ErrorKind.CREATE_FAILED

    @property
    def stage(self) -> str:
        return str(self.details.get("stage", ""))


class CreateTimeout(CreateFailed, TimeoutError):
    """A creation overran its `timeout`; `.stage` says where."""


class SandboxUnavailable(DSecError):
    """The infrastructure, not the command, failed: `.reason` is of a closed set. Nothing of it may be rewarded (report, 6)."""

    kind = ErrorKind.UNAVAILABLE
    reward_valid = False

    @property
    def reason(self) -> str:
        return str(self.details.get("reason", ""))


class CommandFailed(DSecError):
    """`check=True` and the command did not exit with 0; `.result` is its `ExecResult`."""

    def __init__(self, result: ExecResult) -> None:
        how = f"was killed by SIG{result.signal}" if result.signal else f"exited with {result.exit_code}"
        if result.reason:
            how += f" ({result.reason}{': ' + result.detail if result.detail else ''})"
        tail = result.stderr_text.strip()[-400:]
        super().__init__(f"the command {how}" + (f": {tail}" if tail else ""), details={"exec_id": result.exec_id})
        self.result = result


class CommandTimedOut(CommandFailed, TimeoutError):
    """`check=True` and the command met its deadline or idle time-out; `.result` has what it printed until then."""


class FileError(DSecError, OSError):
    """A file operation inside a sandbox. `.errno` is set as for local files."""

    kind = ErrorKind.FILE_IO
    code = _errno.EIO

    def __init__(self, message: str, *, kind: ErrorKind | None = None, hint: str = "", retryable: bool = False,
                 details: Details | None = None) -> None:  # fmt: skip
        super().__init__(message, kind=kind, hint=hint, retryable=retryable, details=details)
        self.errno = type(self).code
        self.strerror = message


class FileMissing(FileError, FileNotFoundError):
    kind = ErrorKind.FILE_NOT_FOUND
    code = _errno.ENOENT


class FileAlreadyThere(FileError, FileExistsError):
    kind = ErrorKind.FILE_EXISTS
    code = _errno.EEXIST


class IsADirectory(FileError, IsADirectoryError):
    kind = ErrorKind.IS_A_DIRECTORY
    code = _errno.EISDIR


class NotADirectory(FileError, NotADirectoryError):
    kind = ErrorKind.NOT_A_DIRECTORY
    code = _errno.ENOTDIR


class FilePermission(FileError, PermissionError):
    kind = ErrorKind.FILE_PERMISSION
    code = _errno.EACCES


class NoSpace(FileError):
    """The sandbox's disk limit, or the node's disk."""

    kind = ErrorKind.NO_SPACE
    code = _errno.ENOSPC


class FileInvalid(FileError, ValueError):
    """Not a regular file or directory, a name with NUL, too many links."""

    kind = ErrorKind.FILE_INVALID
    code = _errno.EINVAL


_CLASSES: dict[ErrorKind, type[DSecError]] = {
    cls.kind: cls
    for cls in (
        AuthenticationError, PermissionDenied, QuotaExceeded, InvalidRequest, TooLarge, NotFound, Conflict, Unsupported,
        InternalError, CapacityError, ConnectionLost, SessionEnded, RequestTimeout, CreateFailed, SandboxUnavailable, FileError,
        FileMissing, FileAlreadyThere, IsADirectory, NotADirectory, FilePermission, NoSpace, FileInvalid, ReplayDivergence,
        RolloutFenced, OutcomeUnknown,
    )
}  # fmt: skip


def from_body(body: ErrorBody, sandbox_id: str | None = None) -> DSecError:
    """The exception for an error that came over the wire."""
    details: Details = dict(body.details)
    if sandbox_id is not None:
        details.setdefault("sandbox_id", sandbox_id)
    cls = _CLASSES[body.kind]
    if "stage" in details and (body.kind is ErrorKind.TIMEOUT or str(details["stage"]).startswith("timeout")):
        cls = CreateTimeout
    return cls(body.message, kind=body.kind, hint=body.hint, retryable=body.retryable, details=details)


def replaced(sandbox_id: str, known: int, found: int) -> SandboxUnavailable:
    """Another incarnation answered than the one this handle was made for."""
    return SandboxUnavailable(
        f"sandbox {sandbox_id} is incarnation {found} now, not {known}: what this handle knew is gone",
        hint="make a new sandbox, or attach to this one anew; a result of it must not be rewarded",
        details={"sandbox_id": sandbox_id, "reason": "replaced"},
    )
