"""How runs end: whatever code under test can do is a zero with its name, in time, and never an invalid sample."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import dsec
from dsec import ExitCode, GradeReason, JUnit, Score

from .conftest import FIXED, Shop, changes, file

PYTHON = "python3"


async def run(shop: Shop, code: str, verdict: ExitCode | JUnit | Score = ExitCode(), **options: object) -> dsec.Verdict:
    """Grades nothing but what a program of the tests does."""
    user = options.pop("user", "65534:65534")
    runner = dsec.CommandRunner(argv=(PYTHON, "-c", code), verdict=verdict, user=str(user))
    return await shop.grade(changes(), runner=runner, **options)


DEAF = """
import os, signal, time
for number in range(1, 65):
    try:
        signal.signal(number, signal.SIG_IGN)
    except (OSError, ValueError):
        pass
if os.fork():
    os.wait()
os.setsid()
os.close(1)
os.close(2)
while True:
    time.sleep(1)
"""
FORKS = """
import os, time
try:
    while True:
        if os.fork() == 0:
            time.sleep(60)
finally:
    os._exit(1)
"""
HOGS = {
    "hangs": ("while True: pass", GradeReason.TIMED_OUT),
    "hangs and hears nothing": (DEAF, GradeReason.TIMED_OUT),
    "memory": ("x = []\nwhile True: x.append(bytearray(1 << 20))", GradeReason.OUT_OF_MEMORY),
    "forks": (FORKS, GradeReason.TOO_MANY_PROCESSES),
    "disk": ("f = open('/var/tmp/x', 'wb')\nwhile True: f.write(b'x' * (1 << 20)); f.flush()", GradeReason.DISK_FULL),
    "kills everything it can": ("import os\nos.kill(-1, 9)", GradeReason.EXIT_CODE),
    "crashes": ("import os\nos.abort()", GradeReason.EXIT_CODE),
    "removes the tests": ("import shutil, sys\nshutil.rmtree('/workspace', True)\nsys.exit(1)", GradeReason.EXIT_CODE),
}


@pytest.mark.parametrize("name", HOGS)
async def test_what_code_can_do_is_a_zero_with_its_name(shop: Shop, name: str) -> None:
    code, reason = HOGS[name]
    user = "0:0" if name in ("disk", "removes the tests") else "65534:65534"
    shop_args, shop.args = (
        shop.args,
        dsec.DSecContainerRunArgs(
            "debian@12", layers=(shop.workspace,), memory_limit_mb=128, disk_limit_mb=64, pids_limit=32
        ),
    )
    try:
        verdict = await run(shop, code, timeout=5, user=user)
    finally:
        shop.args = shop_args
    assert (verdict.reward, verdict.valid, verdict.reason) == (0.0, True, reason), verdict
    assert verdict.detail and not verdict.evidence.lost


async def test_ten_gigabytes_of_output_are_counted_and_dropped(shop: Shop) -> None:
    """As much of them as come in the time given."""
    code = "import os\nb = b'x' * (1 << 20)\nfor _ in range(10240): os.write(1, b)"
    verdict = await run(shop, code, timeout=20)
    assert verdict.valid and verdict.reason in (GradeReason.PASSED, GradeReason.TIMED_OUT), verdict
    assert verdict.evidence.output_bytes > 100 << 20 and len(verdict.evidence.output) < 20_000


REPORT = '<testsuite><testcase classname="a" name="b"/><testcase name="c"/></testsuite>'


async def test_a_junit_report_decides(shop: Shop) -> None:
    expect = dsec.TestSet(("a::b",), ("c",))
    wanted = JUnit("/tmp/report.xml")
    code = f"open('/tmp/report.xml', 'w').write({REPORT!r})"
    verdict = await run(shop, code, wanted, expect=expect)
    assert (verdict.reward, verdict.reason, verdict.evidence.passed) == (1.0, GradeReason.PASSED, 2), verdict
    failed = code.replace('<testcase name="c"/>', '<testcase name="c"><failure/></testcase>')
    verdict = await run(shop, failed + "\nimport sys; sys.exit(1)", wanted, expect=expect)
    assert (verdict.reward, verdict.reason, verdict.evidence.failed_total) == (0.0, GradeReason.TESTS_FAILED, 1), (
        verdict
    )


NO_REPORTS = {
    "none": ("", GradeReason.REPORT_MISSING),
    "a directory": ("import os; os.mkdir('/tmp/report.xml')", GradeReason.REPORT_UNREADABLE),
    "a link to elsewhere": ("import os; os.symlink('/proc/1/environ', '/tmp/report.xml')", GradeReason.REPORT_UNREADABLE),
    "a pipe": ("import os; os.mkfifo('/tmp/report.xml')", GradeReason.REPORT_UNREADABLE),
    "rubbish": ("open('/tmp/report.xml', 'w').write('PASSED')", GradeReason.REPORT_UNREADABLE),
    "a bomb": (
        "open('/tmp/report.xml', 'w').write('<!DOCTYPE x [<!ENTITY a \"a\">]><testsuite/>')", GradeReason.REPORT_UNREADABLE,
    ),
    "an endless one": (
        "f = open('/tmp/report.xml', 'w'); f.write('<testsuite>')\nfor _ in range(40): f.write('<testcase/>' * 100_000)",
        GradeReason.REPORT_UNREADABLE,
    ),
    "a late one": (
        f"import os, time\nif os.fork() == 0:\n os.setsid()\n while True: open('/tmp/report.xml', 'w').write({REPORT!r})",
        GradeReason.REPORT_MISSING,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", NO_REPORTS)
async def test_what_is_no_report(shop: Shop, name: str) -> None:
    code, reason = NO_REPORTS[name]
    verdict = await run(shop, code, JUnit("/tmp/report.xml"), expect=dsec.TestSet(("x::y",)))
    if name == "a late one":  # whichever it is: nothing writes it while it is read
        assert verdict.reward == 0.0 and verdict.valid, verdict
    else:
        assert (verdict.reward, verdict.valid, verdict.reason) == (0.0, True, reason), verdict


async def test_a_planted_report_is_removed_first(shop: Shop) -> None:
    runner = dsec.CommandRunner(argv=("true",), verdict=JUnit("src/shop/report.xml"))
    planted = changes(file("src/shop/report.xml", REPORT))
    verdict = await shop.grade(planted, runner=runner, expect=dsec.TestSet(("a::b",)))
    assert verdict.reason is GradeReason.REPORT_MISSING, verdict


SAY = """
import json, os, sys
told = json.load(sys.stdin)
os.write(3, json.dumps({'nonce': told['nonce'], 'score': SCORE}).encode())
"""


@pytest.mark.parametrize(
    ("code", "reward", "reason"),
    [
        (SAY.replace("SCORE", "0.75"), 0.75, GradeReason.SCORE),
        (SAY.replace("SCORE", "1.5"), 0.0, GradeReason.SCORE_INVALID),
        (SAY.replace("SCORE", "float('nan')"), 0.0, GradeReason.SCORE_INVALID),
        (SAY.replace("SCORE", "1") * 2, 0.0, GradeReason.RUN_CRASHED),  # stdin is read once
        (SAY.replace("SCORE", "1") + "os.write(3, b'\\n{\"nonce\": \"x\", \"score\": 1}')", 0.0, GradeReason.RESULTS_CONFLICT),
        ("print('{\"score\": 1}')", 0.0, GradeReason.SCORE_MISSING),
        ("import os; os.write(3, b'{\"nonce\": \"x\", \"score\": 1}')", 0.0, GradeReason.RESULTS_CONFLICT),
        (SAY.replace("SCORE", "1") + "os.abort()", 0.0, GradeReason.RUN_CRASHED),
    ],
)  # fmt: skip
async def test_a_score_decides(shop: Shop, code: str, reward: float, reason: GradeReason) -> None:
    verdict = await run(shop, code, Score())
    assert (verdict.reward, verdict.valid, verdict.reason) == (reward, True, reason), verdict


async def test_a_runner_of_ones_own_as_the_guide_has_it(shop: Shop) -> None:
    """The program in docs/guide/grading.md: half of the cases, and a code under test that tries to score itself."""
    guide = (Path(__file__).parents[3] / "docs/guide/grading.md").read_text()
    program = guide.partition("# /workspace/score.py")[2].partition("\n")[2].partition("```")[0]
    cases = [{"input": "2", "output": "4"}, {"input": "3", "output": "9"}]
    tests = shop.hidden("scored", {"score.py": program, "cases.json": json.dumps(cases)})
    runner = dsec.CommandRunner(argv=("python3", "-B", "score.py"), verdict=Score(0, 1), user="root")
    for solve, reward in (("print(4, end='')", 0.5), ("import os\nos.write(3, b'{\"score\": 1}')", 0.0)):
        verdict = await shop.grade(changes(file("src/solve.py", solve)), tests=tests, runner=runner)
        assert (verdict.reward, verdict.reason) == (reward, GradeReason.SCORE), verdict


async def test_a_command_that_only_the_changes_stop_is_a_zero(shop: Shop) -> None:
    """A directory that is gone makes no sample invalid, unless it never was there."""
    gone = changes(dsec.Change(path=b"workspace/docs", kind=dsec.ChangeKind.DELETE))
    verdict = await shop.grade(gone, runner=dsec.CommandRunner(argv=("true",), cwd="docs"))
    assert (verdict.reward, verdict.valid, verdict.reason) == (0.0, True, GradeReason.RUNNER_SILENCED), verdict
    verdict = await shop.grade(gone, runner=dsec.CommandRunner(argv=("true",), cwd="never"))
    assert (verdict.reward, verdict.valid, verdict.reason) == (None, False, GradeReason.HARNESS_BROKEN), verdict


async def test_there_is_no_network_and_no_label_of_the_agents(shop: Shop) -> None:
    code = "import socket, sys\ntry: socket.create_connection(('1.1.1.1', 53), 2)\nexcept OSError: sys.exit(0)\nsys.exit(1)"
    assert (await run(shop, code)).reward == 1.0


async def test_changes_cannot_write_the_tests(shop: Shop) -> None:
    """The hidden check stays what the tests' layer says, whatever is given."""
    given = changes(file("check.py", "import sys; sys.exit(0)\n"), file("src/shop/__init__.py", "total = None\n"))
    verdict = await shop.grade(given)
    assert (verdict.reward, verdict.reason) == (0.0, GradeReason.EXIT_CODE), verdict
    assert [drop.path for drop in verdict.evidence.dropped] == ["check.py"]


@pytest.mark.parametrize(
    "wrong",
    [
        {"include": ()},
        {"tests": "no-such-layer@1"},
        {"timeout": 0},
        {"workdir": "relative"},
        {"expect": dsec.TestSet(("a",))},
        {"runner": dsec.PytestRunner()},
        {"runner": dsec.CommandRunner(argv=())},
        {"expect": dsec.TestSet(("a", "a")), "runner": dsec.PytestRunner()},
    ],
    ids=lambda wrong: "+".join(wrong),
)
async def test_a_wrong_request_is_an_error_and_no_verdict(shop: Shop, wrong: dict[str, object]) -> None:
    with pytest.raises((dsec.InvalidRequest, dsec.NotFound)):
        await shop.grade(changes(file("src/shop/__init__.py", FIXED)), **wrong)
