"""The closed set of error kinds that cross a boundary, and the one exception type of the server side.

The SDK turns an `ErrorBody` into its exception classes (`dsec.sdk.errors`); servers raise `Fault`.
"""

from __future__ import annotations

from enum import Enum

import msgspec


class ErrorKind(str, Enum):
    """Each kind has one HTTP status (`STATUS`) and one SDK exception class."""

    AUTHENTICATION = "authentication"
    PERMISSION = "permission"
    QUOTA = "quota"
    INVALID = "invalid_request"
    NOT_FOUND = "not_found"
    CONFLICT = "conflict"
    CAPACITY = "capacity"
    CREATE_FAILED = "create_failed"
    UNAVAILABLE = "sandbox_unavailable"
    SESSION_ENDED = "session_ended"
    DIVERGED = "replay_divergence"
    FENCED = "rollout_fenced"
    OUTCOME_UNKNOWN = "outcome_unknown"
    TIMEOUT = "timeout"
    TOO_LARGE = "too_large"
    UNSUPPORTED = "unsupported"
    CONNECTION_LOST = "connection_lost"
    INTERNAL = "internal"
    # files: each is also the builtin OSError of its kind in the SDK
    FILE_NOT_FOUND = "file_not_found"
    FILE_EXISTS = "file_exists"
    IS_A_DIRECTORY = "is_a_directory"
    NOT_A_DIRECTORY = "not_a_directory"
    FILE_PERMISSION = "file_permission"
    NO_SPACE = "no_space"
    FILE_INVALID = "file_invalid"  # not a regular file or directory, a name with NUL, too many links
    FILE_IO = "file_io"


STATUS: dict[ErrorKind, int] = {
    ErrorKind.AUTHENTICATION: 401,
    ErrorKind.PERMISSION: 403,
    ErrorKind.QUOTA: 429,
    ErrorKind.INVALID: 400,
    ErrorKind.NOT_FOUND: 404,
    ErrorKind.CONFLICT: 409,
    ErrorKind.CAPACITY: 503,
    ErrorKind.CREATE_FAILED: 500,
    ErrorKind.UNAVAILABLE: 410,
    ErrorKind.SESSION_ENDED: 410,
    ErrorKind.DIVERGED: 409,
    ErrorKind.FENCED: 409,
    ErrorKind.OUTCOME_UNKNOWN: 409,
    ErrorKind.TIMEOUT: 504,
    ErrorKind.TOO_LARGE: 413,
    ErrorKind.UNSUPPORTED: 501,
    ErrorKind.CONNECTION_LOST: 502,
    ErrorKind.INTERNAL: 500,
    ErrorKind.FILE_NOT_FOUND: 404,
    ErrorKind.FILE_EXISTS: 409,
    ErrorKind.IS_A_DIRECTORY: 409,
    ErrorKind.NOT_A_DIRECTORY: 409,
    ErrorKind.FILE_PERMISSION: 403,
    ErrorKind.NO_SPACE: 507,
    ErrorKind.FILE_INVALID: 400,
    ErrorKind.FILE_IO: 500,
}


class ErrorBody(msgspec.Struct, frozen=True, kw_only=True):
    """`{"error": {...}}` of the HTTP interface and the payload of an ERROR frame.

    details holds strings and numbers only: `stage` (create_failed), `reason` (sandbox_unavailable), `limit`, `value`,
    `holders` (capacity), `sandbox_id`, `request_id`.
    """

    kind: ErrorKind
    message: str
    hint: str = ""
    retryable: bool = False
    details: dict[str, str | int | float | dict[str, int]] = {}


def sendable(text: str) -> str:
    """The text, with what no encoding carries (the lone surrogates of undecodable file names) written out as `\\udcff`.

    An error that could not be sent would be one that nobody is ever told.
    """
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode()


class Fault(Exception):
    """An error with a kind, raised by servers; crosses every boundary unchanged as an `ErrorBody`."""

    def __init__(
        self,
        kind: ErrorKind,
        message: str,
        *,
        hint: str = "",
        retryable: bool = False,
        **details: str | int | float | dict[str, int],
    ) -> None:
        message = sendable(message)
        super().__init__(message)
        details = {name: sendable(value) if isinstance(value, str) else value for name, value in details.items()}
        self.body = ErrorBody(kind=kind, message=message, hint=sendable(hint), retryable=retryable, details=details)

    @classmethod
    def from_body(cls, body: ErrorBody) -> Fault:
        fault = cls(body.kind, body.message)
        fault.body = body
        return fault
