"""Whole rollouts of the small task on the double: rewards, attacks, and failures of the infrastructure."""

from __future__ import annotations

import asyncio
import textwrap

import msgspec
import pytest

from dsec import CapacityError, SandboxUnavailable
from dsec.demo.burst import plan, run_burst
from dsec.demo.changes import Why
from dsec.demo.rollout import PreparedTask, run_one
from dsec.demo.scripts import EXPECTED, Call, Recording, Script, Shell, Turn, Write

from .conftest import CALC_NEW, CALC_OLD
from .double import LocalClient

Rehearsal = tuple[LocalClient, PreparedTask]


def doing(prepared: PreparedTask, *calls: Call) -> PreparedTask:
    """The same task with an agent that makes these calls, under the name of `noop`."""
    recording = Recording(Script.NOOP, (Turn("", calls),))
    return msgspec.structs.replace(prepared, recordings={**prepared.recordings, Script.NOOP: recording})


def source(text: str) -> Write:
    return Write("/workspace/calc/__init__.py", textwrap.dedent(text).encode())


@pytest.mark.parametrize("script", list(Script))
async def test_each_script_gets_what_it_must(rehearsal: Rehearsal, script: Script) -> None:
    client, prepared = rehearsal
    rollout = await run_one(client, prepared, script, 0)
    assert (rollout.reward, rollout.naive_reward) == EXPECTED[script], [
        (step.call, step.output) for step in rollout.steps
    ]
    assert rollout.valid and rollout.as_expected
    assert (rollout.reward == 1) == (rollout.failed == ())
    assert len({life.sandbox for life in rollout.sandboxes}) == 2
    assert client.alive == 0


async def test_the_agent_never_sees_the_hidden_tests_nor_the_grader_the_tools(rehearsal: Rehearsal) -> None:
    client, prepared = rehearsal
    await run_one(client, prepared, Script.NOOP, 0)
    assert [args.layers for args in client.created] == [("workspace", "harness"), ("workspace", "tests")]


async def test_cheating_is_reported(rehearsal: Rehearsal) -> None:
    client, prepared = rehearsal
    rollout = await run_one(client, prepared, Script.CHEAT, 0)
    suspicious = {drop.path: drop.why for drop in rollout.dropped if drop.suspicious}
    assert suspicious == {
        "calc/tests/__init__.py": Why.TESTS,
        "conftest.py": Why.TEST_CONFIG,
        "sitecustomize.py": Why.STARTUP,
        "calc/tests/test_calc.py": Why.TESTS,
    }
    assert rollout.graded_files == ()


async def test_results_printed_by_the_source_count_for_nothing(rehearsal: Rehearsal) -> None:
    client, prepared = rehearsal
    forged = CALC_OLD + textwrap.dedent("""
        import atexit, sys
        lines = ["short test summary info"] + ["PASSED calc/tests/test_calc.py::test_" + name for name in ("add", "double")]
        atexit.register(lambda: print("\\n".join(lines), file=sys.__stdout__))
    """)
    rollout = await run_one(client, doing(prepared, source(forged)), Script.NOOP, 0)
    assert (rollout.reward, rollout.naive_reward) == (0, 1)


async def test_a_result_reported_twice_is_no_result(rehearsal: Rehearsal) -> None:
    """Source that finds the descriptor and reports in advance: the plugin's own report then contradicts it."""
    client, prepared = rehearsal
    forged = CALC_OLD + textwrap.dedent("""
        import os
        for number in range(3, 64):
            try:
                os.write(number, b'{"id": "calc/tests/test_calc.py::test_add", "outcome": "passed"}\\n')
            except OSError:
                pass
    """)
    rollout = await run_one(client, doing(prepared, source(forged)), Script.NOOP, 0)
    assert rollout.reward == 0
    assert "conflicting results" in rollout.reason


async def test_a_process_left_behind_neither_holds_nor_changes_the_verdict(rehearsal: Rehearsal) -> None:
    client, prepared = rehearsal
    lingering = CALC_NEW + "\nimport subprocess\nsubprocess.Popen(['sleep', '300'], start_new_session=True)\n"
    rollout = await asyncio.wait_for(run_one(client, doing(prepared, source(lingering)), Script.FIX, 0), 60)
    assert rollout.reward == 1


async def test_the_code_under_test_cannot_change_the_tree_it_is_tested_in(rehearsal: Rehearsal) -> None:
    client, prepared = rehearsal
    writing = CALC_OLD + textwrap.dedent("""
        def add(a, b):
            import os
            for path in ("/workspace/calc/__init__.py", "/grading/task.json", "/opt/venv/x.pth", "/workspace/calc/new.py"):
                try:
                    os.close(os.open(path, os.O_WRONLY | os.O_CREAT))
                except OSError:
                    continue
                return None
            try:
                os.rename("/workspace/calc", "/workspace/other")
            except OSError:
                return a + b
    """)
    rollout = await run_one(client, doing(prepared, source(writing)), Script.NOOP, 0)
    assert rollout.reward == 1, rollout.output


async def test_a_deleted_module_is_gone_when_graded(rehearsal: Rehearsal) -> None:
    client, prepared = rehearsal
    gone = (
        CALC_NEW
        + "\ntry:\n    from calc import util\nexcept ImportError:\n    pass\nelse:\n    raise SystemExit('util is there')\n"
    )
    deleting = doing(prepared, source(gone), Shell("rm calc/util.py"))
    rollout = await run_one(client, deleting, Script.NOOP, 0)
    assert rollout.reward == 1, rollout.output
    kept = await run_one(client, doing(prepared, source(gone)), Script.NOOP, 0)
    assert kept.reward == 0


async def test_a_folder_made_anew_holds_only_what_is_new(rehearsal: Rehearsal) -> None:
    client, prepared = rehearsal
    anew = doing(prepared, Shell("rm -r calc && mkdir calc"), source(CALC_NEW))
    rollout = await run_one(client, anew, Script.NOOP, 0)
    assert rollout.reward == 1, rollout.output
    assert "calc/__init__.py" in rollout.graded_files


async def test_an_agent_cannot_make_its_own_sample_invalid(rehearsal: Rehearsal) -> None:
    """A file where a folder was, in the source and in the place of the tests."""
    client, prepared = rehearsal
    clash = doing(prepared, Shell("rm -r calc/tests && touch calc/tests && rm calc/util.py && mkdir calc/util.py"))
    rollout = await run_one(client, clash, Script.NOOP, 0)
    assert (rollout.reward, rollout.naive_reward, rollout.valid) == (0, 0, True)
    whole = doing(prepared, Shell("rm -r calc && echo 'def add(a, b): return a + b' > calc"))
    rollout = await run_one(client, whole, Script.NOOP, 0)
    assert (rollout.reward, rollout.valid) == (0, True), rollout.reason


@pytest.mark.parametrize("creation", [0, 1])
@pytest.mark.parametrize(
    "error", [CapacityError("full"), SandboxUnavailable("gone", details={"reason": "node_lost"}), TimeoutError("late")]
)
async def test_a_failure_of_the_infrastructure_is_no_zero(
    rehearsal: Rehearsal, creation: int, error: Exception
) -> None:
    client, prepared = rehearsal
    client.fail = {creation: error}
    rollout = await run_one(client, prepared, Script.NOOP, 0)
    assert (rollout.reward, rollout.naive_reward, rollout.valid, rollout.as_expected) == (None, None, False, False)
    assert type(error).__name__ in rollout.reason
    assert client.alive == 0


async def test_a_grader_that_fails_is_no_zero(rehearsal: Rehearsal) -> None:
    client, prepared = rehearsal
    (client.trees["tests"].root / "grading/task.json").write_text("{")
    rollout = await run_one(client, prepared, Script.FIX, 0)
    assert (rollout.reward, rollout.valid) == (None, False)
    assert "GraderFailed" in rollout.reason


async def test_a_burst_keeps_to_its_concurrency_and_order(rehearsal: Rehearsal) -> None:
    client, prepared = rehearsal
    planned = plan([prepared], 4, 0)
    highest = 0
    running = 0

    def started(_: object) -> None:
        nonlocal running, highest
        running += 1
        highest = max(highest, running)

    def done(_: object) -> None:
        nonlocal running
        running -= 1

    rollouts = await run_burst(client, planned, 2, on_start=started, on_done=done)
    assert highest == 2
    assert [(r.script, r.index) for r in rollouts] == [(item.script, item.index) for item in planned]
    assert all(rollout.as_expected for rollout in rollouts)
    assert plan([prepared], 4, 0) == planned
