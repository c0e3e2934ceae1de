"""Something that `await` gives and `async with` gives and takes back."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Generator
from types import TracebackType
from typing import Any

from .sandbox import Sandbox


class Opening:
    """A sandbox to come: `sandbox = await opening`, or `async with opening as sandbox: ...`.

    Nothing happens before one of the two; each use asks for a sandbox of its own.
    """

    def __init__(self, make: Callable[[], Coroutine[Any, Any, Sandbox]], *, stop: bool) -> None:
        self._make = make
        self._stop = stop
        self._sandbox: Sandbox | None = None

    def __await__(self) -> Generator[Any, None, Sandbox]:
        return self._make().__await__()

    async def __aenter__(self) -> Sandbox:
        self._sandbox = await self._make()
        return self._sandbox

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._stop and self._sandbox is not None:
            await self._sandbox._end(error)
