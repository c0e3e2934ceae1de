"""Two requests are the same step exactly when what was asked is the same."""

from __future__ import annotations

import itertools

import msgspec

from dsec.protocol.requests import LONG, canonical, difference, digest_of, divergence
from dsec.protocol.specs import ExecLimits, ExecSpec, PtySize

LINE: dict[str, object] = {"exec_id": "x", "line": b"make"}


def spec(**asked: object) -> bytes:
    return canonical("exec", msgspec.structs.asdict(ExecSpec(**{**LINE, **asked})))  # type: ignore[arg-type]


def test_what_is_left_out_is_the_default() -> None:
    assert spec() == canonical("exec", LINE) == b'{"kind":"exec","line":"make"}'
    assert spec(timeout=600.0, max_output_bytes=16 << 20, env={}, cwd=None) == spec()
    assert canonical("exec", {**LINE, "cwd": b"", "argv": [], "limits": None}) == spec()


def test_what_names_an_attempt_does_not_count() -> None:
    attempt = {"cursor": 7, "wait_s": 3, "request_id": "r", "sandbox": "s", "incarnation": 2, "op": "o", "stdin": b"x"}
    assert canonical("exec", {**LINE, **attempt, "stdin_open": True, "exec_id": "other"}) == spec()
    assert canonical("exec.signal", {"exec_id": "a"}) != canonical("exec.signal", {"exec_id": "b"})


def test_each_of_these_is_another_step() -> None:
    asked = [
        spec(), spec(line=b"make "), spec(timeout=None), spec(timeout=5), spec(timeout=5.5), spec(env={"A": "1"}),
        spec(env={"A": "2"}), spec(env={"B": "1"}), spec(cwd=b"/x"), spec(user="games"), spec(merge_stderr=True),
        spec(max_output_bytes=0), spec(idle_timeout=5), spec(session="s"), spec(stdin_digest="d"), spec(pty=PtySize(80, 24)),
        spec(pty=PtySize(81, 24)), spec(limits=ExecLimits(cpu_s=1)), spec(limits=ExecLimits(open_files=1)),
        spec(detached=True), spec(detached=True, stdin_open=True), spec(line=b"\xff"), spec(line=b"\xfe"),
        spec(line=b"a" * LONG), spec(line=b"a" * (LONG + 1)), spec(line=b"a" * LONG + b"b"),
        spec(line=None, argv=(b"make",)), spec(line=None, argv=(b"make", b"")), spec(line=None, argv=(b"ma", b"ke")),
        canonical("fs.read", {"path": b"/a"}), canonical("fs.stat", {"path": b"/a"}),
        canonical("fs.read", {"path": b"/a", "offset": 1}), canonical("fs.read", {"path": b"/a", "length": 0}),
    ]  # fmt: skip
    for one, other in itertools.combinations(asked, 2):
        assert digest_of(one) != digest_of(other), (one, other)


def test_a_difference_is_told_field_by_field() -> None:
    found = difference(spec(env={"A": "1"}, timeout=5), spec(env={"A": "2"}, user="games"))
    assert found.fields == {
        "env": ('{"A":"1"}', '{"A":"2"}'), "timeout": ("5", ""), "user": ("", '"games"'),
    }  # fmt: skip
    told = divergence(3, "ro-e1-0", spec(), spec(timeout=None)).body
    assert "timeout: recorded nothing, asked null" in told.message and told.details["step"] == 3
