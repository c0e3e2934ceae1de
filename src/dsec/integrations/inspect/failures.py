"""Which error of DSec is whose: the agent's, which its model hears of, or the infrastructure's, which ends the sample."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from inspect_ai.tool import ToolError

from dsec import ConnectionLost, DSecError, FileError

_CONTRACT = (FileNotFoundError, PermissionError, IsADirectoryError)


@contextmanager
def told(what: str) -> Iterator[None]:
    """Turns DSec's errors into those that Inspect tells a model, or into such as it does not take for a tool's result."""
    try:
        yield
    except _CONTRACT:
        raise
    except NotADirectoryError as error:
        raise FileNotFoundError(20, f"{error.strerror}", what) from error
    except FileError as error:  # a full disk, a FIFO, a name that is too long: done inside, so the agent's to hear
        raise ToolError(str(error)) from error
    except TimeoutError as error:
        if isinstance(error, DSecError):  # of the service; Inspect would call it the command's
            raise ConnectionLost(f"{what}: {error.message}", hint=error.hint, details=error.details) from error
        raise
