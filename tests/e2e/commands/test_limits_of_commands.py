"""Resource limits of one command: what each ends as, and that none can be raised above the sandbox's own."""

from __future__ import annotations

import pytest

import dsec
from dsec import ExecLimits, Sandbox

pytestmark = pytest.mark.e2e


async def test_cpu_time_ends_with_xcpu_and_then_kill(sandbox: Sandbox) -> None:
    spin = "while :; do :; done"
    result = await sandbox.run_shell(spin, limits=ExecLimits(cpu_s=1), timeout=60)
    assert (result.exit_code, result.signal, result.reason) == (152, "XCPU", None)
    result = await sandbox.run_shell(f"trap '' XCPU; {spin}", limits=ExecLimits(cpu_s=1), timeout=60)
    assert (result.exit_code, result.signal, result.timed_out) == (137, "KILL", None)


async def test_address_space_fails_allocations(sandbox: Sandbox) -> None:
    result = await sandbox.exec(["python3", "-c", "bytearray(300 << 20)"], limits=ExecLimits(memory_mb=200))
    assert result.exit_code == 1 and "MemoryError" in result.stderr_text and result.reason is None
    assert (await sandbox.exec(["python3", "-c", "bytearray(300 << 20)"])).ok


async def test_file_size_ends_with_xfsz(sandbox: Sandbox) -> None:
    line = "head -c 3000000 /dev/zero > /var/f; exit $?"
    result = await sandbox.run_shell(line, limits=ExecLimits(file_mb=1))
    assert result.exit_code == 153
    assert (await sandbox.files.stat("/var/f")).size == 1 << 20
    result = await sandbox.exec(["head", "-c", "10", "/dev/zero"], limits=ExecLimits(file_mb=0))
    assert result.ok, "pipes are no files"


async def test_open_files_and_processes(sandbox: Sandbox) -> None:
    code = "import os\ntry:\n  while True: os.dup(1)\nexcept OSError as e: print(e.strerror, os.dup2(1, 3))"
    result = await sandbox.exec(["python3", "-c", code], limits=ExecLimits(open_files=20))
    assert result.text == "Too many open files 3\n"
    fork = "import os\ntry:\n  os.fork()\nexcept OSError as e: print(e.strerror)"
    result = await sandbox.exec(["python3", "-c", fork], limits=ExecLimits(processes=1))
    assert result.text == "Resource temporarily unavailable\n" and result.ok
    assert (await sandbox.exec(["true"], user="nobody", limits=ExecLimits(processes=1))).ok


async def test_core_and_stack(sandbox: Sandbox) -> None:
    assert (await sandbox.run_shell("ulimit -c")).text == "0\n", "no core files unless asked for"
    asked = await sandbox.run_shell("ulimit -c; ulimit -s", limits=ExecLimits(core_mb=1, stack_mb=1))
    assert asked.text == "1024\n1024\n"
    result = await sandbox.exec(["sh", "-c", "echo $#", "sh", *["x" * 1000] * 400], limits=ExecLimits(stack_mb=16))
    assert result.text == "400\n"


async def test_children_inherit_and_cannot_raise(sandbox: Sandbox) -> None:
    line = "bash -c 'ulimit -n; ulimit -n 100' 2>&1"
    result = await sandbox.run_shell(line, limits=ExecLimits(open_files=32))
    assert result.text.startswith("32\n") and "cannot modify limit" in result.text


@pytest.mark.parametrize(
    ("limits", "named"),
    [
        (ExecLimits(open_files=10**9), "open_files"),
        (ExecLimits(open_files=2), "open_files"),
        (ExecLimits(cpu_s=0), "cpu_s"),
        (ExecLimits(memory_mb=-1), "memory_mb"),
        (ExecLimits(memory_mb=2**62), "memory_mb"),
        (ExecLimits(processes=0), "processes"),
    ],
)
async def test_senseless_limits_are_named(sandbox: Sandbox, limits: ExecLimits, named: str) -> None:
    with pytest.raises(dsec.InvalidRequest, match=named):
        await sandbox.run_shell("true", limits=limits)


async def test_unknown_limits_are_refused_over_http(sandbox: Sandbox) -> None:
    body = b'{"line": "dHJ1ZQ==", "limits": {"cpu": 1}}'
    with pytest.raises(dsec.InvalidRequest, match="cpu"):
        await sandbox._transport.request("POST", f"/v1/sandboxes/{sandbox.id}/exec", body=body)
