"""`dsec job` and `dsec top`: what they ask for and what they print."""

from __future__ import annotations

import time

import msgspec
import pytest
from rich.console import Console

from dsec import JobInfo, JobLimits, JobState, JobUsage, SandboxInfo, State, Usage
from dsec.cli import top
from dsec.protocol.rollouts import JobWork

from .conftest import Invoke
from .fake import FakeClient, info


def job(name: str, state: JobState = JobState.RUNNING, **other: object) -> JobInfo:
    fields: dict[str, object] = {
        "lease": 60.0, "lease_until": time.time() + 30, "limits": JobLimits(max_sandboxes=512), "labels": {"team": "x"},
        "created_at": time.time() - 7300, "epoch": 2,
    }  # fmt: skip
    return JobInfo(id="jb-e1-0123456789ab", name=name, state=state, **{**fields, **other})  # type: ignore[arg-type]


def used(name: str, of: str, at: float, cpu_s: float, memory: int = 0, state: State = State.RUNNING) -> SandboxInfo:
    usage = Usage(cpu_s=cpu_s, memory_bytes=memory, swap_bytes=1 << 20, pids=3, sampled_at=at)
    return msgspec.structs.replace(info(name, state), usage=usage, job=of)


def test_ls_shows_who_lives(dsec: Invoke, client: FakeClient) -> None:
    usage = JobUsage(sandboxes={"running": 2, "paused": 3}, memory_bytes=5 << 20, cpu_s=1.25, rollouts=7)
    client.all_jobs = [
        job("grpo-17", usage=usage), job("old", JobState.PAUSED, paused_by="lease"), job("over", JobState.STOPPED)
    ]  # fmt: skip
    ran = dsec("job", "ls")
    heading, first, second = ran.out.splitlines()
    assert heading.split() == [
        "JOB",
        "STATE",
        "SANDBOXES",
        "MEMORY",
        "SWAP",
        "CPU",
        "ROLLOUTS",
        "LEASE",
        "AGE",
        "LABELS",
    ]
    assert first.split()[:6] == ["grpo-17", "running", "3", "paused,", "2", "running"]
    assert "5.0 MB" in first and "1.2s" in first and "team=x" in first and "2h" in first
    assert "paused (by lease)" in second
    assert "over" in dsec("job", "ls", "--all").out
    listed = dsec("job", "ls", "--json").json
    assert isinstance(listed, list) and [one["name"] for one in listed] == ["grpo-17", "old"]


def test_no_jobs_are_said_so(dsec: Invoke, client: FakeClient) -> None:
    ran = dsec("job", "ls")
    assert (ran.code, ran.out, ran.err) == (0, "", "no jobs that live\n")


def test_show_has_limits_and_account(dsec: Invoke, client: FakeClient) -> None:
    usage = JobUsage(
        sandboxes={"running": 2}, memory_mb_s=3686.4 * 1024, created=9, ended=7, invalid=1, rollouts=4, steps=80
    )
    client.all_jobs = [job("j", JobState.PAUSED, usage=usage, paused_by="request", under_way=JobWork.PAUSE)]
    out = dsec("job", "show", "j").out
    for words in ("paused (pause under way)", "512 sandboxes", "9 created, 7 ended, 1 invalid", "9.5 s of CPU", "1.024 GB hours",
                  "4, 80 steps", "opened 2 times"):  # fmt: skip
        assert words in out, (words, out)
    shown = dsec("job", "show", "j", "--json").json
    assert isinstance(shown, dict) and shown["usage"]["cpu_s"] == 9.5 and shown["state"] == "paused"


@pytest.mark.parametrize("verb, done", [("pause", "paused"), ("resume", "resumed"), ("stop", "stopped")])
def test_each_is_asked_though_one_fails(dsec: Invoke, client: FakeClient, verb: str, done: str) -> None:
    client.all_jobs = [job("a"), job("b")]
    assert dsec("job", verb, "a", "b").out == f"{done} 2\n"
    assert client.did[:2] == [f"{verb} a", f"{verb} b"]
    ran = dsec("job", verb, "a", "none", "b", "--json")
    assert ran.code == 1 and "none" in ran.err
    assert ran.json == {done: 2, "failed": ["none: there is no job 'none'"]}


def test_ps_of_a_job(dsec: Invoke, client: FakeClient) -> None:
    client.sandboxes = [used("sb-e1-a", "j", 0, 0), used("sb-e1-b", "other", 0, 0)]
    assert "sb-e1-b" not in (out := dsec("ps", "--job", "j").out) and "sb-e1-a" in out


def looks(client: FakeClient) -> None:
    """Two looks, two seconds apart: `a` used 1.5 s in between, `b` 0.1 s, `new` was not there before."""
    client.all_jobs = [job("idle"), job("busy")]
    first = [used("a", "busy", 100, 1.0, 3 << 20), used("b", "idle", 100, 5.0, 9 << 20)]
    client.sandboxes = first
    client.used = [*first, used("a", "busy", 102, 2.5, 4 << 20), used("b", "idle", 102, 5.1, 9 << 20, State.PAUSED)]


def test_top_is_the_difference_of_two_looks(dsec: Invoke, client: FakeClient) -> None:
    looks(client)
    frame = dsec("top", "--once", "--interval", "0.2", "--json").json
    assert isinstance(frame, dict)
    assert [(one["id"], one["cpu_percent"]) for one in frame["sandboxes"]] == [("a", 75.0), ("b", 5.0)]
    assert [(one["name"], one["cpu_percent"], one["memory_bytes"]) for one in frame["jobs"]] == [
        ("busy", 75.0, 4 << 20), ("idle", 5.0, 9 << 20)
    ]  # fmt: skip
    assert frame["jobs"][1]["sandboxes"] == {"paused": 1}


def test_top_in_a_pipe_looks_once(dsec: Invoke, client: FakeClient) -> None:
    looks(client)
    lines = dsec("top", "--interval", "0.2").out.splitlines()
    assert lines[0].startswith("2 jobs; sandboxes: 1 paused, 1 running; CPU 80.0 %, memory 13.0 MB")
    assert lines[1].split()[0] == "JOB" and lines[2].split()[:2] == ["busy", "running"]
    assert lines[4].split()[0] == "SANDBOX" and lines[5].split()[:4] == ["a", "busy", "running", "75.0"]


def test_one_that_was_not_there_before_has_no_share_yet() -> None:
    new = {"n": used("n", "", 102, 50.0)}
    assert top.frame_of([], new, {}, 0.0).sandboxes[0].cpu_percent == 0.0
    same = {"n": used("n", "", 102, 50.0)}
    assert top.frame_of([], new, same, 0.0).sandboxes[0].cpu_percent == 0.0, "the same sample twice"


@pytest.mark.parametrize("height", [5, 24, 100])
def test_it_fits_on_the_screen(height: int) -> None:
    jobs = [job(f"job-{number}") for number in range(200)]
    sandboxes = {f"sb-{n}": used(f"sb-{n}", f"job-{n % 200}", 102, n / 10) for n in range(3000)}
    frame = top.frame_of(jobs, sandboxes, {}, time.time())
    console = Console(width=100, height=height, force_terminal=False, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(top._drawn(frame, height))
    text = console.export_text()
    assert len(text.splitlines()) <= max(height, 10) and "more sandboxes" in text and "200 jobs" in text
