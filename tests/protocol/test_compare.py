"""Two trajectories differ in what their steps did, and in nothing else."""

from __future__ import annotations

import msgspec
from blake3 import blake3

from dsec.protocol.compare import compare, told
from dsec.protocol.errors import ErrorBody, ErrorKind
from dsec.protocol.rollouts import Blob, StepRecord


def blob(data: bytes) -> Blob:
    return Blob(digest=blake3(data).hexdigest(), size=len(data), total=len(data), data=data)


def step(number: int, **changed: object) -> StepRecord:
    record = StepRecord(
        step=number,
        kind="exec",
        digest="d",
        request=msgspec.Raw(b'{"kind":"exec","argv":["make","test"],"env":{"A":"1"}}'),
        sandbox="sb-e1-1",
        incarnation=1,
        asked_at=1.0,
        done_at=2.0,
        result=msgspec.Raw(b'{"exec_id":"ex-1","exit_code":0,"duration_s":0.5,"files":[{"path":"a","mtime":1}]}'),
        outputs={"stdout": blob(b"one\ntwo\n")},
    )
    return msgspec.structs.replace(record, **changed)


def test_times_and_ids_are_no_difference() -> None:
    again = msgspec.Raw(b'{"files":[{"mtime":2,"path":"a"}],"exit_code":0,"duration_s":0.7,"exec_id":"ex-2","step":4}')
    other = step(0, sandbox="sb-e2-9", incarnation=3, asked_at=9.0, done_at=9.5, epoch=4, result=again)
    comparison = compare([step(0), step(1)], [other, step(1)])
    assert comparison.same and str(comparison) == "the same 2 steps"


def test_each_difference_is_named_by_step_and_field() -> None:
    first = [step(0), step(1), step(2), step(3), step(4)]
    second = [
        step(0, request=msgspec.Raw(b'{"kind":"exec","argv":["make","all"],"env":{"A":"1"}}')),
        step(1, result=msgspec.Raw(b'{"exec_id":"ex-1","exit_code":2,"files":[{"path":"b"}]}')),
        step(2, outputs={"stdout": blob(b"one\n2\n"), "stderr": blob(b"oh\n")}),
        step(3, result=None, error=ErrorBody(kind=ErrorKind.FILE_NOT_FOUND, message="no")),
    ]
    found = {(d.step, d.field): (d.first, d.second) for d in compare(first, second).differences}
    assert found[0, "request.argv"] == ('["make","test"]', '["make","all"]')
    assert found[1, "result.exit_code"] == ("0", "2") and found[1, "result.files[0].path"] == ('"a"', '"b"')
    assert found[2, "stdout line 2"] == ("'two\\n'", "'2\\n'")
    assert found[2, "stderr"][0] == "" and found[2, "stderr"][1].startswith("3 bytes, ")
    assert found[3, "result"][1] == "" and '"file_not_found"' in found[3, "error"][1]
    assert found[4, "step"][1] == ""
    assert {number for number, _ in found} == {0, 1, 2, 3, 4} and len(found) == 8


def test_an_unknown_outcome_and_long_contents_differ() -> None:
    long = [Blob(digest=digit * 64, size=5, total=70_000) for digit in "ab"]
    found = compare(
        [step(0), step(1, outputs={"stdout": long[0]})],
        [step(0, done_at=None, result=None, outputs={}), step(1, outputs={"stdout": long[1]})],
    ).differences
    fields = [difference.field for difference in found]
    assert fields == ["result", "outcome", "stdout", "stdout"]
    assert found[3].first == "70000 bytes, " + "a" * 16


def test_people_read_it() -> None:
    text = "x" * 5000
    request = [msgspec.Raw(msgspec.json.encode({"kind": "exec", "line": text + end})) for end in ("left", "right")]
    comparison = compare([step(7, request=request[0])], [step(7, request=request[1])])
    lines = told(comparison, "a", "b").splitlines()
    assert lines[:2] == ["step 7 (exec)", "  request.line"]
    assert lines[2].startswith("    - ...") and lines[2].endswith('xleft"') and lines[3].endswith('xright"')
    assert lines[4] == "1 steps differ of 1 steps (-, a), 1 steps (+, b)" and len(lines[2]) < 120
