"""The one error the demo raises on its own account."""

from __future__ import annotations


class DemoError(Exception):
    """Something outside the sandboxes is in the way: a download, a task name, a tool. `hint` says what to do."""

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint
