"""`dsec rollout`: what it makes of what is recorded."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from pathlib import Path

import msgspec
import pytest

from dsec import Blob, Comparison, DSecContainerRunArgs, Exported, NotFound, RolloutInfo, RolloutState, StepRecord
from dsec.cli.trajectory import line_of, size, span
from dsec.protocol.compare import compare
from dsec.protocol.errors import ErrorBody, ErrorKind
from dsec.protocol.requests import canonical, digest_of
from dsec.protocol.specs import Reason

from .conftest import Invoke
from .fake import FakeClient

ID = "ro-e1-0123456789ab"


def step(number: int, kind: str, result: object = None, *, epoch: int = 1, **asked: object) -> StepRecord:
    request = canonical(kind, {name: value for name, value in asked.items() if name not in ("error", "outputs")})
    error, outputs = asked.get("error"), asked.get("outputs")
    known = result is not None or error is not None
    return StepRecord(
        step=number, kind=kind, digest=digest_of(request), request=msgspec.Raw(request), sandbox="sb-e1-a", incarnation=1,
        asked_at=1000.0 + number, done_at=1000.5 + number if known else None, epoch=epoch,
        result=msgspec.Raw(msgspec.json.encode(result)), error=error, outputs=outputs or {},  # type: ignore[arg-type]
    )  # fmt: skip


def done(exit_code: int, **other: object) -> dict[str, object]:
    return {"exec_id": "step:0", "exit_code": exit_code, **other}


def rollout(id: str = ID, name: str = "task-3/7", **other: object) -> RolloutInfo:
    fields: dict[str, object] = {
        "job": "", "state": RolloutState.OPEN, "epoch": 2, "sandbox": "sb-e1-a", "incarnation": 1, "layers": (),
        "args": DSecContainerRunArgs("debian@12"), "steps": 4, "created_at": 999.0, "bytes": 5000,
    }  # fmt: skip
    return RolloutInfo(id=id, name=name, **{**fields, **other})  # type: ignore[arg-type]


STEPS = [
    step(0, "exec", done(1, stdout_bytes=3000, stderr_bytes=2), line=b"pytest -q\necho\x1b[31m"),
    step(1, "fs.write", {"size": 5}, path=b"/src/\xff"),
    step(2, "fs.read", path=b"/none", error=ErrorBody(kind=ErrorKind.FILE_NOT_FOUND, message="/none: no such file")),
    step(3, "exec", epoch=2, argv=[b"sleep", b"a b"], detached=True),
]


class FakeRollouts:
    def __init__(self, *infos: RolloutInfo) -> None:
        self.infos = infos
        self.removed: list[str] = []

    async def list(self, *, job: str | None = None, states: Iterable[str] | None = None) -> AsyncIterator[RolloutInfo]:
        for info in self.infos:
            if job in (None, info.job) and (not states or info.state.value in states):
                yield info

    async def get(self, id: str) -> RolloutInfo:
        for info in self.infos:
            if info.id == id:
                return info
        raise NotFound(f"there is no rollout {id}")

    async def steps(self, id: str, *, start: int = 0, stop: int | None = None) -> AsyncIterator[StepRecord]:
        for record in STEPS[start:stop]:
            yield record

    async def export(self, id: str, path: Path) -> Exported:
        path.write_text(id)
        return Exported(4, 18)

    async def diff(self, a: str, b: str) -> Comparison:
        other = [*STEPS[:1], step(1, "fs.write", {"size": 6}, path=b"/src/other")]
        return compare(STEPS, STEPS if a == b else other)

    async def remove(self, id: str) -> None:
        self.removed.append(id)


@pytest.fixture
def rollouts(client: FakeClient) -> FakeRollouts:
    lost = rollout(
        "ro-e1-0000000000ab", "b", state=RolloutState.LOST, reason=Reason.NODE_LOST, job="jb-e1-1", damaged=3
    )
    fake = FakeRollouts(rollout(reward=0.5, unknown=(3,)), lost, rollout("ro-e1-0000000000ac", "b", valid=False))
    client.rollouts = fake  # type: ignore[attr-defined]
    return fake


def test_ls(dsec: Invoke, rollouts: FakeRollouts) -> None:
    lines = dsec("rollout", "ls").out.splitlines()
    assert lines[0].split() == ["ROLLOUT", "NAME", "JOB", "STATE", "STEPS", "REWARD", "SIZE", "AGE", "SANDBOX"]
    assert lines[1].split()[:8] == [ID, "task-3/7", "-", "open", "4", "(1", "open)", "0.5"]
    assert "lost (node_lost), damaged from step 3" in lines[2] and "invalid" in lines[3]
    assert len(dsec("rollout", "ls", "--state", "lost").out.splitlines()) == 2
    assert msgspec.json.decode(dsec("rollout", "ls", "--json").out, type=list[RolloutInfo])[0].id == ID


def test_show_is_a_line_for_each_step(dsec: Invoke, rollouts: FakeRollouts) -> None:
    shown = dsec("rollout", "show", "task-3/7")
    assert shown.code == 0
    head, columns, *lines = shown.out.splitlines()
    assert head.startswith(f"task-3/7: {ID}, open, reward 0.5, 4 steps, 1 without an outcome, opened 2 times")
    assert columns.split() == ["STEP", "AT", "TOOK", "KIND", "ASKED", "CAME"]
    assert lines[0].split() == [
        "0", "+1.0s", "500ms", "exec", "$", "pytest", "-q\N{SYMBOL FOR NEWLINE}echo\N{REPLACEMENT CHARACTER}[31m",
        "exit", "1,", "2.9", "KB", "out,", "2", "B", "err",
    ]  # fmt: skip
    assert lines[1].split()[3:] == ["fs.write", "/src/\\xff", "ok"]
    assert lines[2].endswith("file_not_found: /none: no such file")
    assert "opened again (epoch 2)" in lines[3]
    assert lines[4].split()[2:] == ["-", "exec", "sleep", "'a", "b'", "&", "outcome", "not", "known", "(yet)"]
    assert "\x1b" not in shown.out
    one = dsec("rollout", "show", ID, "--from", "1", "-n", "1", "--json").out.splitlines()
    assert [msgspec.json.decode(line, type=StepRecord).step for line in one] == [1]


def test_a_name_of_several_jobs_is_not_enough(dsec: Invoke, rollouts: FakeRollouts) -> None:
    assert dsec("rollout", "show", "b").code == 2
    assert "there is no rollout 'c'" in dsec("rollout", "show", "c").err


def test_diff_says_where_they_part(dsec: Invoke, rollouts: FakeRollouts) -> None:
    found = dsec("rollout", "diff", ID, "ro-e1-0000000000ab")
    assert found.code == 1
    lines = found.out.splitlines()
    assert (
        lines[0] == "step 1 (fs.write)"
        and '    + "/src/other"' in lines
        and not any("step 2" in line for line in lines)
    )
    assert lines[-1].startswith("3 steps differ of 4 steps")
    assert "step 2 (fs.read)" in dsec("rollout", "diff", "--all", ID, "ro-e1-0000000000ab").out
    same = dsec("rollout", "diff", ID, ID)
    assert (same.code, same.out) == (0, "the same 4 steps\n")


def test_export_and_rm(dsec: Invoke, rollouts: FakeRollouts, tmp_path: Path) -> None:
    exported = dsec("rollout", "export", "task-3/7", "-o", str(tmp_path / "x"))
    assert exported.out == f"{tmp_path / 'x'}\n" and (tmp_path / "x").read_text() == ID
    assert dsec("rollout", "rm", "task-3/7", ID).out == "removed 2\n" and rollouts.removed == [ID, ID]


def test_what_a_step_looks_like() -> None:
    def shown(kind: str, result: object = None, **asked: object) -> tuple[str, str, str]:
        line = line_of(step(0, kind, result, **asked), 1000.0)
        return line.what, line.came, line.mood

    long = Blob(digest="d", size=10, total=3 << 20)
    assert shown("exec", done(137, signal="KILL", timed_out="deadline"), line=b"x") == (
        "$ x",
        "timed out (deadline)",
        "bad",
    )
    assert shown("exec", done(0, stdout_bytes=1, stdout_truncated=True), line=b"x", session="s")[:2] == (
        "[s] $ x", "exit 0, 1 B out (cut)",
    )  # fmt: skip
    assert shown("exec", done(0), argv=[b"a" * 20_000])[0] == "'<19.5 KB>'"
    assert shown("exec.signal", {}, exec_id="step:3", signal=15) == ("step:3 SIGTERM", "ok", "plain")
    assert shown("exec.write", {}, exec_id="step:3", data=b"a\n" * 99)[0].startswith("step:3 < a\\na\\n")
    assert shown("fs.read", {"size": 9}, path=b"/f", offset=3, length=9, outputs={"data": long})[:2] == (
        "/f from 3, 9 B", "3.0 MB (10 B kept)",
    )  # fmt: skip
    assert shown("fs.move", {}, source=b"/a", target=b"/b")[0] == "/a -> /b"
    assert shown("grade", {"reward": 0.5, "reason": "tests_failed"}, tests="hidden@1")[:2] == (
        "hidden@1", "reward 0.5, tests_failed",
    )  # fmt: skip
    assert shown("fs.list", {"count": 3}, path=b"/")[1] == "3 entries"
    assert shown("sandbox.network", {}, rules={"pypi": True, "npm": False})[0] == "-npm +pypi"
    assert [span(s) for s in (0.0031, 1.25, 250, 7500)] == ["3ms", "1.2s", "4m10s", "2h05m"]
    assert [size(n) for n in (12, 3500, 5 << 20)] == ["12 B", "3.4 KB", "5.0 MB"]
