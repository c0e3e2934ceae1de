"""Every kind that can cross a boundary has a class, and the builtin it is a case of."""

from __future__ import annotations

import errno

import pytest

from dsec import DSecError, ErrorKind, InternalError
from dsec.protocol.errors import ErrorBody
from dsec.sdk.errors import from_body

BUILTINS = {
    ErrorKind.INVALID: ValueError,
    ErrorKind.NOT_FOUND: LookupError,
    ErrorKind.TIMEOUT: TimeoutError,
    ErrorKind.CONNECTION_LOST: ConnectionError,
    ErrorKind.FILE_NOT_FOUND: FileNotFoundError,
    ErrorKind.FILE_EXISTS: FileExistsError,
    ErrorKind.IS_A_DIRECTORY: IsADirectoryError,
    ErrorKind.NOT_A_DIRECTORY: NotADirectoryError,
    ErrorKind.FILE_PERMISSION: PermissionError,
    ErrorKind.NO_SPACE: OSError,
    ErrorKind.FILE_INVALID: OSError,
    ErrorKind.FILE_IO: OSError,
}


@pytest.mark.parametrize("kind", list(ErrorKind))
def test_every_kind_has_its_class(kind: ErrorKind) -> None:
    error = from_body(
        ErrorBody(kind=kind, message="what", hint="do", retryable=True, details={"request_id": "rq"}), "sb"
    )
    assert isinstance(error, DSecError) and isinstance(error, BUILTINS.get(kind, Exception))
    assert (error.kind, error.message, error.hint, error.retryable) == (kind, "what", "do", True)
    assert (error.sandbox_id, error.request_id, str(error)) == ("sb", "rq", "what (do)")
    assert (type(error) is InternalError) == (kind is ErrorKind.INTERNAL)


def test_errno_is_set() -> None:
    error = from_body(ErrorBody(kind=ErrorKind.FILE_NOT_FOUND, message="m"))
    assert isinstance(error, OSError) and error.errno == errno.ENOENT
