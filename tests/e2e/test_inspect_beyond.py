"""The Inspect AI provider beyond Inspect's own checks: what dies, what raises, what a model is told, what is left behind."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from inspect_ai import Task, eval_async
from inspect_ai.dataset import Sample
from inspect_ai.log import EvalLog
from inspect_ai.model import get_model
from inspect_ai.model._call_tools import tool_call_error
from inspect_ai.scorer import includes
from inspect_ai.solver import Generate, Solver, TaskState, generate, solver, use_tools
from inspect_ai.tool import ToolError, bash
from inspect_ai.util import (
    OutputLimitExceededError,
    SandboxEnvironment,
    SandboxEnvironmentSpec,
    override_sandbox_output_limit,
    sandbox,
)

import dsec
from dsec import DSecClient, State
from dsec.cluster.embedded import Endpoint
from dsec.integrations.inspect import DSecSandbox, DSecSandboxConfig, DSecSandboxEnvironment
from dsec.integrations.inspect.platform import MADE_BY

from .inspect_parts import MODEL, calls, host_processes

pytestmark = pytest.mark.e2e
_LIVE = (State.CREATING, State.RUNNING, State.PAUSED)


@pytest.fixture(autouse=True)
def _discovered(platform: Endpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSEC_STATE", platform.state)


async def _environments(config: DSecSandboxConfig) -> AsyncIterator[dict[str, SandboxEnvironment]]:
    made = await DSecSandboxEnvironment.sample_init("ours", config, {})
    yield made
    await DSecSandboxEnvironment.sample_cleanup("ours", config, made, False)


@pytest.fixture
async def environment() -> AsyncIterator[DSecSandboxEnvironment]:
    async for made in _environments(DSecSandboxConfig(memory_limit_mb=128)):
        yield made["default"].as_type(DSecSandboxEnvironment)


# -- what dies --

_TREE = """
trap '' TERM HUP INT
sleep {n} &
setsid sleep {n} &
(setsid sh -c 'sleep {n} & exec sleep {n}' &)
python3 -c '
import os
os.fork() or os.setsid() or os.fork() or os.execvp("sleep", ["sleep", "{n}"])
os.execvp("sleep", ["sleep", "{n}"])' &
sleep {n}
"""
_IN_TREE = 8  # the shell's child, a session, a daemon and its child, three of Python's, the shell itself


async def _appeared(words: list[str], count: int) -> None:
    async with asyncio.timeout(20):
        while len(host_processes(words)) < count:
            await asyncio.sleep(0.02)


_COUNT = """
import glob, sys
def words(path):
    try:
        return open(path, "rb").read().split(b"\\0")[:-1]
    except OSError:
        return []
print(sum(words(path) == [b"sleep", sys.argv[1].encode()] for path in glob.glob("/proc/[0-9]*/cmdline")))
"""


async def _inside(environment: DSecSandboxEnvironment, number: str) -> int:
    return int((await environment.exec(["python3", "-c", _COUNT, number])).stdout)


async def test_every_child_is_dead_after_a_timeout(environment: DSecSandboxEnvironment) -> None:
    """In sessions of their own, orphaned, deaf to signals: counted while they live, then inside and from the host."""
    number = f"86400.{secrets.randbelow(10**9):09d}"
    running = asyncio.create_task(environment.exec(["sh", "-c", _TREE.format(n=number)], timeout=6))
    await _appeared(["sleep", number], _IN_TREE)
    assert await _inside(environment, number) == _IN_TREE
    with pytest.raises(TimeoutError):
        await running
    assert host_processes(["sleep", number]) == []
    assert await _inside(environment, number) == 0


async def test_every_child_is_dead_after_a_cancellation(environment: DSecSandboxEnvironment) -> None:
    number = f"86400.{secrets.randbelow(10**9):09d}"
    running = asyncio.create_task(environment.exec(["sh", "-c", _TREE.format(n=number)]))
    await _appeared(["sleep", number], _IN_TREE)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    async with asyncio.timeout(10):
        while host_processes(["sleep", number]):
            await asyncio.sleep(0.02)


async def test_a_timeout_keeps_the_output_until_then(environment: DSecSandboxEnvironment) -> None:
    with pytest.raises(TimeoutError) as late:
        await environment.exec(["sh", "-c", "echo out; echo err >&2; sleep 60"], timeout=1)
    assert late.value.truncated_output == "out\nerr\n"  # type: ignore[attr-defined]


async def test_a_timeout_runs_nothing_twice(environment: DSecSandboxEnvironment) -> None:
    with pytest.raises(TimeoutError):
        await environment.exec(["sh", "-c", "echo once >> runs; sleep 60"], timeout=1, timeout_retry=True)
    assert await environment.read_file("runs") == "once\n"


# -- what a model is told --


async def test_too_much_output_is_a_limit_with_its_beginning(environment: DSecSandboxEnvironment) -> None:
    with override_sandbox_output_limit(1000), pytest.raises(OutputLimitExceededError) as over:
        await environment.exec(["sh", "-c", "yes | head -c 1001"])
    assert over.value.truncated_output == "y\n" * 500
    with override_sandbox_output_limit(1000):
        assert len((await environment.exec(["sh", "-c", "yes | head -c 1000"])).stdout) == 1000


async def test_bytes_that_are_no_text_are_replaced(environment: DSecSandboxEnvironment) -> None:
    assert (await environment.exec(["printf", r"a\377b"])).stdout == "a\ufffdb"
    await environment.write_file("raw", b"a\xffb")
    with pytest.raises(UnicodeDecodeError):
        await environment.read_file("raw")


async def test_out_of_memory_is_said(environment: DSecSandboxEnvironment) -> None:
    hog = await environment.exec(["python3", "-c", "b = bytearray(512 << 20); b[::4096] = b'x' * len(b[::4096])"])
    assert hog.returncode == 137
    assert "out of memory: limit 128 MiB" in hog.stderr


@pytest.mark.parametrize("reader", ["head -c 1", "true", "exec <&-; echo closed"])
async def test_input_that_is_not_read_does_not_matter(environment: DSecSandboxEnvironment, reader: str) -> None:
    result = await environment.exec(["sh", "-c", reader], input=b"x" * (12 << 20), timeout=60)
    assert result.success


class Told:
    """Calls of an agent's making that must reach its model as a tool's error or result, never end the sample."""

    ERRORS = {
        "a NUL": (lambda e: e.exec(["echo", "a\0b"]), "parsing"),
        "a lone surrogate": (lambda e: e.exec(["echo", "a\ud800b"]), "unknown"),
        "a working directory that is not there": (lambda e: e.exec(["true"], cwd="nowhere"), "file_not_found"),
        "a working directory that is a file": (lambda e: e.exec(["true"], cwd="/etc/passwd"), "file_not_found"),
        "not executable": (lambda e: e.exec(["/etc/passwd"]), "permission"),
        "a file below a file": (lambda e: e.read_file("/etc/passwd/x"), "file_not_found"),
        "writing below a file": (lambda e: e.write_file("/etc/passwd/x", ""), "file_not_found"),
        "a file that is none": (lambda e: e.read_file("/dev/null"), "unknown"),
        "a name that is too long": (lambda e: e.write_file("x" * 300, ""), "unknown"),
        "a directory": (lambda e: e.read_file("/etc"), "is_a_directory"),
        "writing to a directory": (lambda e: e.write_file("/etc", ""), "is_a_directory"),
        "a read-only file system": (lambda e: e.write_file("/proc/version", ""), "permission"),
        "an endless file": (lambda e: e.read_file("/endless"), "limit"),
    }
    RESULTS = {
        "no such program": (["nosuch"], 127, "command not found"),
        "no such file": (["/nosuch/program"], 127, "No such file"),
        "a shell's own 126": (["sh", "-c", "exit 126"], 126, ""),
        "killed by itself": (["sh", "-c", "kill -9 $$"], 137, ""),
        "too long an argument": (["echo", "x" * (200 << 10)], 126, "dsec:"),
    }


@pytest.mark.parametrize("what", Told.ERRORS)
async def test_a_model_is_told_an_error(environment: DSecSandboxEnvironment, what: str) -> None:
    call, kind = Told.ERRORS[what]
    if what == "an endless file":
        await environment.exec(["truncate", "-s", "200G", "/endless"])
    with pytest.raises((OSError, ValueError, ToolError, OutputLimitExceededError)) as raised:
        await call(environment)
    mapped = tool_call_error(raised.value, "bash")
    assert mapped is not None, repr(raised.value)
    assert mapped.error.type == kind


@pytest.mark.parametrize("what", Told.RESULTS)
async def test_a_model_is_told_a_result(environment: DSecSandboxEnvironment, what: str) -> None:
    argv, code, words = Told.RESULTS[what]
    result = await environment.exec(argv)
    assert (result.returncode, result.success) == (code, False)
    assert words in result.stderr


async def test_a_full_disk_is_told() -> None:
    async for made in _environments(DSecSandboxConfig(disk_limit_mb=8)):
        with pytest.raises(ToolError, match="disk"):
            await made["default"].write_file("big", b"x" * (32 << 20))


async def test_variables_user_and_directory(environment: DSecSandboxEnvironment) -> None:
    await environment.exec(["mkdir", "-m", "755", "below"])
    script = 'echo "$A $(id -u):$(id -g) $PWD"'
    result = await environment.exec(["sh", "-c", script], cwd="below", env={"A": "b c"}, user="65534")
    assert result.stdout == "b c 65534:65534 /workspace/below\n"
    assert (await environment.exec(["pwd"])).stdout == "/workspace\n"


# -- what raises --


async def test_a_lost_sandbox_is_no_tool_result(environment: DSecSandboxEnvironment, client: DSecClient) -> None:
    async with client.attach(environment.sandbox.id) as other:
        await other.stop()
    for call in (environment.exec(["true"]), environment.read_file("/etc/passwd"), environment.write_file("x", "")):
        with pytest.raises(dsec.DSecError) as raised:
            await call
        assert tool_call_error(raised.value, "bash") is None
    with pytest.raises(ConnectionError):
        await environment.connection()


@solver
def lose_the_sandbox() -> Solver:
    async def solve(state: TaskState, generate: Generate) -> TaskState:
        await sandbox().as_type(DSecSandboxEnvironment).sandbox.stop()
        return state

    return solve


async def _evaluated(
    logs: Path, *samples: Sample, config: object = None, lost: bool = False, **options: object
) -> EvalLog:
    task = Task(
        dataset=list(samples),
        solver=[use_tools(bash(timeout=30)), *([lose_the_sandbox()] if lost else []), generate()],
        scorer=includes(),
        sandbox=SandboxEnvironmentSpec("dsec", config),  # type: ignore[arg-type]
    )
    model = get_model(MODEL, custom_outputs=calls("cat question", "sh -c 'exit 3'; cat question"))
    [log] = await eval_async(task, model=model, log_dir=str(logs), **options)  # type: ignore[arg-type]
    return log


async def _left(client: DSecClient) -> list[str]:
    return [info.id async for info in client.list(labels=MADE_BY, states=_LIVE)]


async def test_an_evaluation_runs_in_sandboxes_and_leaves_none(tmp_path: Path, client: DSecClient) -> None:
    config = tmp_path / "dsec.yaml"
    config.write_text("memory_limit_mb: 256\ninit_user: '1000:1000'\n")
    samples = [Sample(input="?", target=f"answer {i}", files={"question": f"answer {i}"}) for i in range(6)]
    log = await _evaluated(tmp_path, *samples, config=str(config))
    assert log.status == "success", log.error
    assert log.results is not None and log.results.scores[0].metrics["accuracy"].value == 1
    assert await _left(client) == []


async def test_a_sample_whose_sandbox_is_lost_is_an_error_and_no_zero(tmp_path: Path, client: DSecClient) -> None:
    log = await _evaluated(
        tmp_path, Sample(input="?", target="x", files={"question": "x"}), lost=True, fail_on_error=False
    )
    [sample] = log.samples or []
    assert sample.error is not None and "SandboxUnavailable" in sample.error.traceback
    assert not sample.scores
    assert await _left(client) == []


async def test_sandboxes_that_are_to_stay_stay_until_they_are_cleaned_up(tmp_path: Path, client: DSecClient) -> None:
    log = await _evaluated(tmp_path, Sample(input="?", target="x", files={"question": "x"}), sandbox_cleanup=False)
    assert log.status == "success"
    [left] = await _left(client)
    await DSecSandboxEnvironment.cli_cleanup(left)
    assert await _left(client) == []


@pytest.mark.parametrize("config", [DSecSandboxConfig(container_image="nosuch@1"), "nosuch.yaml"])
async def test_a_wrong_configuration_fails_before_any_sample(tmp_path: Path, config: object) -> None:
    with pytest.raises((dsec.NotFound, ValueError), match="nosuch"):
        await _evaluated(tmp_path, Sample(input="?", target="x"), config=config)


# -- life --


async def test_several_sandboxes_of_a_sample() -> None:
    config = DSecSandboxConfig(
        memory_limit_mb=128, sandboxes={"attacker": DSecSandbox(), "victim": DSecSandbox(env={"SECRET": "s"})}
    )
    async for made in _environments(config):
        assert list(made) == ["attacker", "victim"]
        await made["victim"].write_file("/tmp/mine", "v")
        assert (await made["victim"].exec(["sh", "-c", "cat /tmp/mine; echo $SECRET"])).stdout == "vs\n"
        assert not (await made["attacker"].exec(["cat", "/tmp/mine"])).success


async def test_one_of_several_that_fails_takes_the_others_along(client: DSecClient) -> None:
    config = DSecSandboxConfig(sandboxes={"good": DSecSandbox(), "bad": DSecSandbox(container_image="nosuch@1")})
    with pytest.raises(dsec.DSecError):
        await DSecSandboxEnvironment.sample_init("ours", config, {})
    assert await _left(client) == []


async def test_connection_is_a_command_line(environment: DSecSandboxEnvironment) -> None:
    connection = await environment.connection(user="nobody")
    assert connection.command == (
        f"dsec exec -it {environment.sandbox.id} --workdir /workspace --user nobody -- bash -l"
    )
