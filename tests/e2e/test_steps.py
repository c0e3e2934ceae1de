"""Steps of a rollout: what was asked and what came of it is kept, and nothing runs twice, whoever dies."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from blake3 import blake3

from dsec import Conflict, DSecClient, DSecContainerRunArgs, DSecError, Sandbox
from dsec.cluster import embedded
from dsec.edge.journal import Journal, Step

from .conftest import BASE
from .test_crashes import client_of, kill, pid_of, states, until_started  # noqa: F401 (a fixture)

pytestmark = pytest.mark.e2e


async def test_a_step_runs_once(sandbox: Sandbox) -> None:
    first = await sandbox.run_shell("echo x >> /count; cat /count; exit 3", step=0)
    again = await sandbox.run_shell("echo x >> /count; cat /count; exit 3", step=0, exec_id="another-name")
    assert (first.step, first.replayed, first.text, first.exit_code) == (0, False, "x\n", 3)
    assert (again.step, again.replayed, again.text, again.exit_code) == (0, True, "x\n", 3)
    assert (await sandbox.run_shell("echo x >> /count; cat /count", step=1)).text == "x\nx\n"


@pytest.mark.parametrize("other", ["echo 2", "echo 1 "])
async def test_another_request_under_the_same_number_is_a_conflict(sandbox: Sandbox, other: str) -> None:
    await sandbox.run_shell("echo 1", step=7)
    for changed in ({"line": other}, {"line": "echo 1", "env": {"A": "b"}}, {"line": "echo 1", "stdin": b"x"}):
        with pytest.raises(Conflict, match="step 7"):
            await sandbox.run_shell(**changed, step=7)  # type: ignore[arg-type]


async def test_a_step_that_runs_is_attached_to(sandbox: Sandbox) -> None:
    line = "echo x >> /n; until [ -e /go ]; do sleep 0.02; done; cat /n"
    one = asyncio.create_task(sandbox.run_shell(line, step=1))
    await until_started(sandbox)
    two = asyncio.create_task(sandbox.run_shell(line, step=1))
    await sandbox.files.write("/go", b"")
    assert (await one).text == (await two).text == "x\n"


async def test_requests_of_one_number_at_once_run_one_command(sandbox: Sandbox) -> None:
    """Between the intent in the journal and the start of its command nobody may take the number for free."""
    for number in range(20):
        same = [sandbox.run_shell(f"echo x >> /same{number}", step=number, exec_id=f"s{number}.{k}") for k in range(3)]
        assert {result.exec_id for result in await asyncio.gather(*same)} < {f"s{number}.{k}" for k in range(3)}
        names = (None, f"o{number}")
        other = [sandbox.run_shell(f"echo {n} >> /other{number}", step=100 + number, exec_id=n) for n in names]
        first, second = await asyncio.gather(*other, return_exceptions=True)
        assert isinstance(first, Conflict) != isinstance(second, Conflict)
    counts = await sandbox.run_shell("cat /same* | wc -l; cat /other* | wc -l")
    assert counts.text.split() == ["20", "20"]


async def test_an_outcome_is_kept_before_a_waiting_client_hears_of_it(states: list[Path]) -> None:  # noqa: F811
    async with client_of(embedded.up(states[0], port=0)) as client:
        sandbox = await client.run(DSecContainerRunArgs(container_image=BASE))
        asking = asyncio.create_task(sandbox.run_shell("until [ -e /go ]; do sleep 0.02; done; exit 4", step=5))
        await until_started(sandbox)
        asking.cancel()
        process = await sandbox.process("step-5")
        waiting = asyncio.create_task(process.wait())
        await sandbox.files.write("/go", b"")
        assert (await waiting).exit_code == 4
        kill(pid_of(states[0], "edge"))
        await sandbox.stop()
    embedded.down(states[0])
    journal = Journal(states[0] / "journal")
    kept = journal.steps(sandbox.id)[5].done
    journal.close()
    assert kept is not None and kept.exit_code == 4


async def test_a_command_that_never_started_leaves_its_number_free(sandbox: Sandbox) -> None:
    with pytest.raises(DSecError):
        await sandbox.run_shell("echo 1", user="nobody-of-that-name", step=1)
    async with asyncio.timeout(10):
        while True:
            try:
                assert (await sandbox.run_shell("echo 2", step=1)).text == "2\n"
                return
            except Conflict:
                await asyncio.sleep(0.02)


async def test_a_long_command_line_counts(sandbox: Sandbox) -> None:
    words = ["sh", "-c", "echo x >> /n; wc -l < /n", *["a" * 100_000] * 8]
    for _ in range(2):
        assert (await sandbox.exec(words, step=1)).text == "1\n"
    with pytest.raises(Conflict):
        await sandbox.exec([*words[:-1], "a" * 99_999 + "b"], step=1)


async def test_stdin_that_follows_the_request_counts(sandbox: Sandbox) -> None:
    data = b"a" * 600_000
    line = "wc -c; echo x >> /n; wc -l < /n"
    for _ in range(2):
        assert (await sandbox.run_shell(line, stdin=data, step=1)).text == "600000\n1\n"
    with pytest.raises(Conflict):
        await sandbox.run_shell(line, stdin=data[:-1] + b"b", step=1)


async def test_outcomes_are_kept_whoever_dies(states: list[Path]) -> None:  # noqa: F811
    args = DSecContainerRunArgs(container_image=BASE)
    async with client_of(embedded.up(states[0], port=0)) as client:
        sandbox = await client.run(args)
        await sandbox.run_shell("printf out; printf err >&2; exit 5", step=0)
        line = "echo x >> /n; echo begun; sleep 1; cat /n; exit 6"
        waiting = asyncio.create_task(sandbox.run_shell(line, step=1))
        await until_started(sandbox)
        kill(pid_of(states[0], "edge"))
        result = await waiting
        assert (result.exit_code, result.text, result.step) == (6, "begun\nx\n", 1)
        await nobody_waits_for(sandbox, client, states[0])
        assert (await sandbox.run_shell("printf out; printf err >&2; exit 5", step=0)).replayed
        kept = sandbox.id
        await sandbox.stop()
    embedded.down(states[0])
    journal = Journal(states[0] / "journal")
    steps = journal.steps(kept)
    journal.close()
    assert summary(steps[0]) == (5, 3, 3, blake3(b"out").hexdigest(), blake3(b"err").hexdigest())
    assert summary(steps[1]) == (6, 8, 0, blake3(b"begun\nx\n").hexdigest(), blake3(b"").hexdigest())
    assert summary(steps[2]) == (7, 4, 0, blake3(b"end\n").hexdigest(), blake3(b"").hexdigest())


async def nobody_waits_for(sandbox: Sandbox, client: DSecClient, state: Path) -> None:
    """A step whose edge dies, and whose client goes away."""
    alone = asyncio.create_task(sandbox.run_shell("sleep 1; echo end; exit 7", step=2))
    await until_started(sandbox)
    kill(pid_of(state, "edge"))
    alone.cancel()
    async with asyncio.timeout(30):
        while (await sandbox.run_shell("sleep 1; echo end; exit 7", step=2)).exit_code != 7:
            pass


def summary(step: Step) -> tuple[int, int, int, str, str]:
    assert step.done is not None
    return (
        step.done.exit_code, step.done.stdout_bytes, step.done.stderr_bytes, step.stdout_digest, step.stderr_digest
    )  # fmt: skip
