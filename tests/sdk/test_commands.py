"""Commands through SDK, HTTP, apiserver and link."""

from __future__ import annotations

from dsec import Sandbox


async def test_run_shell(sandbox: Sandbox) -> None:
    result = await sandbox.run_shell("echo out; echo err >&2; exit 3", env={"A": "b"})
    assert (result.exit_code, result.text, result.stderr_text, result.ok) == (3, "out\n", "err\n", False)
    assert (result.stdout_bytes, result.stderr_bytes, result.incarnation) == (4, 4, 1)
    assert result.step is None and not result.replayed and result.reason is None
    assert (await sandbox.run_shell("echo $A", env={"A": "b"})).stdout == b"b\n"
