"""Running one command for Inspect: its input, its end, and what Inspect calls the ways to end."""

from __future__ import annotations

import asyncio
import errno
import secrets

from inspect_ai.tool import ToolError
from inspect_ai.util import ExecResult, OutputLimitExceededError, SandboxEnvironmentLimits

import dsec
from dsec import DSecError, InvalidRequest, NotFound, Sandbox, TooLarge

from .platform import Platform

_INLINE_INPUT = 4 * 1024 * 1024  # more is written to the command's stdin in pieces of as much
_NOT_EXECUTABLE = 126
_KILL_TRIES, _KILL_PAUSE_S = 20, 0.1


async def run(
    platform: Platform,
    sandbox: Sandbox,
    cmd: list[str],
    *,
    input: str | bytes | None,
    cwd: str | None,
    env: dict[str, str] | None,
    user: str | None,
    timeout: float | None,
) -> ExecResult[str]:
    """To its end. TimeoutError at the deadline; its whole tree is dead then, as it is when this is cancelled."""
    words = [_encoded(word) for word in cmd]
    stdin = input.encode() if isinstance(input, str) else input
    limit = SandboxEnvironmentLimits.MAX_EXEC_OUTPUT_SIZE
    exec_id = f"inspect-{secrets.token_hex(10)}"
    try:
        if stdin is None or len(stdin) <= _INLINE_INPUT:
            result = await sandbox.exec(
                words,
                cwd=cwd,
                env=env,
                user=user,
                stdin=stdin,
                timeout=timeout,
                max_output_bytes=limit,
                exec_id=exec_id,
            )
        else:
            process = await sandbox.start(
                words, stdin=True, cwd=cwd, env=env, user=user, timeout=timeout, max_output_bytes=limit, exec_id=exec_id
            )
            await _feed(process, stdin)
            result = await process.wait()
    except asyncio.CancelledError:
        platform.in_background(_kill(sandbox, exec_id))
        raise
    except TooLarge as error:  # more arguments than a kernel takes: as a shell says it
        return ExecResult(False, _NOT_EXECUTABLE, "", f"dsec: {error.message}\n")
    except (
        InvalidRequest
    ) as error:  # no such user, an impossible variable: the command never ran, and a model may mend it
        return ExecResult(False, _NOT_EXECUTABLE, "", f"dsec: {error.message}\n")
    return _judged(cmd, timeout, result)


def _encoded(word: str) -> bytes:
    if "\0" in word:
        raise ValueError("embedded null byte")  # the words by which Inspect knows a model's slip
    try:
        return word.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError as error:
        raise ToolError(f"an argument holds a lone surrogate, which is no text: {error}") from error


def _judged(cmd: list[str], timeout: float | None, result: dsec.ExecResult) -> ExecResult[str]:
    stdout, stderr = result.stdout_text, result.stderr_text
    if result.timed_out:
        late = TimeoutError(f"Command timed out after {timeout:g} seconds")
        late.truncated_output = stdout + stderr  # type: ignore[attr-defined]
        raise late
    if result.stdout_truncated or result.stderr_truncated:
        raise OutputLimitExceededError(SandboxEnvironmentLimits.MAX_EXEC_OUTPUT_SIZE_STR, stdout + stderr)
    if result.exit_code == _NOT_EXECUTABLE and stderr == f"dsec: {cmd[0]}: Permission denied\n":
        raise PermissionError(errno.EACCES, f"{cmd[0]}: Permission denied", cmd[0])
    if result.reason:
        stderr += f"dsec: killed: {result.detail or result.reason}\n"
    return ExecResult(result.exit_code == 0, result.exit_code, stdout, stderr)


async def _feed(process: dsec.Process, data: bytes) -> None:
    """A command that ends, or closes its stdin, without having read everything is none of our business."""
    view = memoryview(data)
    try:
        for start in range(0, len(view), _INLINE_INPUT):
            await process.write(bytes(view[start : start + _INLINE_INPUT]))
        await process.close_stdin()
    except (dsec.Conflict, NotFound, InvalidRequest):
        return


async def _kill(sandbox: Sandbox, exec_id: str) -> None:
    """Of a command whose caller was cancelled, perhaps before the sandbox heard of it."""
    for _ in range(_KILL_TRIES):
        try:
            await (await sandbox.process(exec_id)).signal("KILL")
            return
        except NotFound:
            await asyncio.sleep(_KILL_PAUSE_S)
        except DSecError:
            return
