"""A shell that lives on between commands and keeps what they change."""

from __future__ import annotations

from collections.abc import AsyncIterable
from types import TracebackType
from typing import Self

import msgspec

from .commands import body_of, run, text_or_bytes
from .errors import DSecError, NotFound
from .results import ExecResult
from .transport import Target, Transport

_MIB = 1024 * 1024


class _Interrupted(msgspec.Struct):
    ended: bool


class Session:
    """One shell of a sandbox: directory, variables, functions, aliases, options, traps and background jobs stay.

    It lives in the sandbox: a program that ends, or loses its connection, joins it again with `sandbox.open_session(name)`.
    `async with session:` closes it at the end. When its shell is gone, commands raise SessionEnded, which says how it ended.
    """

    def __init__(self, transport: Transport, target: Target, name: str) -> None:
        self.name = name
        self._transport = transport
        self._target = target
        self._path = f"/v1/sandboxes/{target.sandbox_id}/sessions/{name}"

    def __repr__(self) -> str:
        return f"Session({self.name!r})"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            await self.close()
        except DSecError as failed:
            if error is None:
                raise
            error.add_note(f"session {self.name} could not be closed: {failed}")

    async def run_shell(
        self,
        line: str,
        *,
        stdin: bytes | bytearray | memoryview | str | AsyncIterable[bytes] | None = None,
        timeout: float | None = 600,
        idle_timeout: float | None = None,
        max_output_bytes: int = 16 * _MIB,
        exec_id: str | None = None,
        check: bool = False,
    ) -> ExecResult:
        """Runs a line (or many) in the session's shell and waits for its end. Arguments as of `Sandbox.run_shell`.

        `exit` and `set -e` end the line, not the session. At a time-out what the line started is killed and earlier
        background jobs go on. One line at a time: Conflict while another runs. SessionEnded when the shell is gone.
        """
        body = body_of(
            text_or_bytes(line), cwd=None, env=None, user=None, stdin=stdin, timeout=timeout, idle_timeout=idle_timeout,
            max_output_bytes=max_output_bytes, merge_stderr=False, exec_id=exec_id, limits=None, session=self.name,
        )  # fmt: skip
        result = await run(self._transport, self._target, body, stdin)
        return result.check() if check else result

    async def interrupt(self) -> bool:
        """Ctrl-C for what runs: its result is exit code 130 unless it handles the signal; the session goes on.

        Returns when the line has ended, and True; False when it still runs after a second. Nothing runs: nothing happens.
        """
        path = f"{self._path}/interrupt"
        return (await self._transport.call("POST", path, _Interrupted, body=b"", target=self._target)).ended

    async def close(self) -> None:
        """Ends its shell and everything started in it; returns when that is gone. Idempotent."""
        try:
            await self._transport.request("DELETE", self._path, target=self._target)
        except NotFound:
            return
