"""Steps of a rollout over plain HTTP: recorded before they run, answered from the log ever after, and never done twice."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3

from dsec.cluster import embedded

from .raw import Opened, Raw, Refused

pytestmark = pytest.mark.e2e


@pytest.fixture
async def raw(platform: embedded.Endpoint) -> AsyncIterator[Raw]:
    async with Raw(platform) as raw:
        yield raw


@pytest.fixture
async def rollout(raw: Raw, request: pytest.FixtureRequest) -> AsyncIterator[Opened]:
    """One of the test's own, finished after it by whoever has it then."""
    name = request.node.name
    opened = await raw.open(name)
    yield opened
    await (await raw.open(name)).finish()


async def reopened(rollout: Opened) -> Opened:
    return await rollout.raw.open(rollout.info["name"])


async def refused(asking: object) -> Refused:
    with pytest.raises(Refused) as caught:
        await asking  # type: ignore[misc]
    return caught.value


def text(reply: dict[str, Any], stream: str = "stdout") -> bytes:
    found = reply[stream]
    return found if isinstance(found, bytes) else base64.b64decode(found)


# -- commands --


async def test_a_step_runs_once_and_is_answered_from_the_log(rollout: Opened) -> None:
    line = "echo x >> /n; cat /n; echo e >&2; exit 3"
    first, again = await rollout.shell(0, line), await rollout.shell(0, line)
    assert (text(first), text(first, "stderr"), first["done"]["exit_code"]) == (b"x\n", b"e\n", 3)
    assert first["done"]["step"] == 0 and not first["done"]["replayed"]
    assert again == first
    later = await reopened(rollout)
    replayed = await later.shell(0, line)
    assert replayed["done"].pop("replayed") is True and again["done"].pop("replayed") is False
    assert replayed == again
    assert text(await later.shell(1, "cat /n")) == b"x\n"
    assert (await later.now())["steps"] == 2


async def test_what_is_recorded(rollout: Opened) -> None:
    await rollout.shell(0, "printf out; printf err >&2", env={"A": "b"}, timeout=600)
    [record] = await rollout.steps()
    assert record["request"] == {"kind": "exec", "line": "printf out; printf err >&2", "env": {"A": "b"}}
    assert (
        record["digest"]
        == blake3(json.dumps(record["request"], sort_keys=True, separators=(",", ":")).encode()).hexdigest()
    )
    assert record["asked_at"] <= record["done_at"] and record["sandbox"] == rollout.info["sandbox"]
    assert record["outputs"]["stdout"] == {"digest": blake3(b"out").hexdigest(), "size": 3, "total": 3, "data": "b3V0"}
    assert record["result"]["exit_code"] == 0 and record["outputs"]["stderr"]["total"] == 3


@pytest.mark.parametrize(
    "other", [{"line": "ZWNobyAy"}, {"command": "echo 1", "env": {"A": "b"}}, {"command": "echo 1", "stdin": "eA=="}]
)
async def test_another_request_diverges(rollout: Opened, other: dict[str, object]) -> None:
    await rollout.shell(0, "echo 1")
    error = await refused(rollout.json(0, "POST", "/exec", json=other))
    assert error.kind == "replay_divergence" and error.details["step"] == 0
    assert "recorded" in str(error) and "asked" in str(error)


async def test_a_digest_of_the_caller_counts(rollout: Opened) -> None:
    path = f"/v1/sandboxes/{rollout.info['sandbox']}/exec"
    for digest, fits in (("a" * 64, True), ("a" * 64, True), ("b" * 64, False)):
        asking = rollout.raw.json("POST", path, json={"command": "echo 1"}, headers=rollout.header(0, digest))
        if fits:
            await asking
        else:
            assert (await refused(asking)).kind == "replay_divergence"


async def test_steps_at_once_keep_their_order(rollout: Opened) -> None:
    """A step that comes too early waits for those before it; and the same one at once is one."""
    numbers = [5, 3, 4, 1, 2, 0, 3, 0]
    await asyncio.gather(*(rollout.shell(number, f"echo {number} >> /order{number}") for number in numbers))
    assert text(await rollout.shell(6, "cat /order*")) == b"0\n1\n2\n3\n4\n5\n"
    asked = [record["asked_at"] for record in await rollout.steps()]
    assert asked == sorted(asked)


async def test_a_step_goes_on_without_its_caller(rollout: Opened) -> None:
    line = "echo x >> /n; until [ -e /go ]; do sleep 0.02; done; cat /n; exit 4"
    asking = (rollout.json(0, "POST", "/exec", json={"command": line, "wait_s": 0}) for _ in range(40))
    async with asyncio.timeout(20):  # whatever the clock's grain is, each is answered when its time is up
        assert {reply["done"] for reply in await asyncio.gather(*asking)} == {None}
    info = await rollout.now()
    assert (info["steps"], info["unknown"]) == (1, [0])
    await rollout.shell(1, "touch /go")
    async with asyncio.timeout(20):
        while (await rollout.now())["unknown"]:
            await asyncio.sleep(0.01)
    [record] = await rollout.steps(0, 1)
    assert record["result"]["exit_code"] == 4
    assert text(await rollout.shell(0, line)) == b"x\n"


async def test_a_later_opening_fences_an_earlier_one_but_not_what_it_has_under_way(rollout: Opened) -> None:
    line = "until [ -e /go ]; do sleep 0.02; done; echo end"
    await rollout.json(0, "POST", "/exec", json={"command": line, "wait_s": 0})
    later = await reopened(rollout)
    for number in (0, 1):
        error = await refused(rollout.shell(number, "touch /go"))
        assert error.kind == "rollout_fenced"
    await later.shell(1, "touch /go")
    assert text(await later.shell(0, line)) == b"end\n"


async def test_an_error_of_the_sandbox_is_an_outcome(rollout: Opened) -> None:
    first = await refused(rollout.shell(0, "true", user="nobody-of-that-name"))
    again = await refused((await reopened(rollout)).shell(0, "true", user="nobody-of-that-name"))
    assert (str(first), first.kind) == (str(again), again.kind)
    assert (await rollout.steps())[0]["error"]["message"] == str(first)


async def test_a_step_has_an_exec_id_of_its_own(rollout: Opened) -> None:
    for body in ({"exec_id": "mine"}, {"exec_id": "step:1"}):
        assert (await refused(rollout.shell(0, "true", **body))).kind == "invalid_request"
    path = f"/v1/sandboxes/{rollout.info['sandbox']}/exec"
    error = await refused(rollout.raw.json("POST", path, json={"command": "true", "exec_id": "step:0"}))
    assert error.kind == "invalid_request" and "steps" in str(error)
    assert (await rollout.shell(0, "true"))["done"]["exec_id"] == "step:0"


async def test_an_exec_id_is_that_of_one_command(rollout: Opened) -> None:
    """Of commands that are no steps, too."""
    path = f"/v1/sandboxes/{rollout.info['sandbox']}/exec"
    for line in ("echo 1", "echo 1"):
        assert text(await rollout.raw.json("POST", path, json={"command": line, "exec_id": "mine"})) == b"1\n"
    for other in ({"command": "echo 2"}, {"command": "echo 1", "env": {"A": "b"}}, {"command": ["echo", "1"]}):
        assert (await refused(rollout.raw.json("POST", path, json={**other, "exec_id": "mine"}))).kind == "conflict"


async def test_only_the_rollouts_own_sandbox_takes_its_steps(rollout: Opened, raw: Raw) -> None:
    other = await raw.open("another sandbox")
    path = f"/v1/sandboxes/{other.info['sandbox']}/exec"
    error = await refused(raw.json("POST", path, json={"command": "true"}, headers=rollout.header(0)))
    assert error.kind == "conflict"
    for header in ("", "x", f"{rollout.id}:1", f"{rollout.id}:1:-1", f"{rollout.id}:1:{2**53 + 1}"):
        error = await refused(raw.json("POST", path, json={"command": "true"}, headers={"x-dsec-step": header}))
        assert error.kind == "invalid_request"
    await other.finish()


async def test_what_is_recorded_outlives_the_sandbox(rollout: Opened) -> None:
    await rollout.shell(0, "echo kept")
    await rollout.bytes(1, "PUT", "/files", params={"path": "/f"}, content=b"data")
    await rollout.raw.json("DELETE", f"/v1/sandboxes/{rollout.info['sandbox']}")
    later = await reopened(rollout)
    assert text(await later.shell(0, "echo kept")) == b"kept\n"
    assert await later.json(1, "PUT", "/files", params={"path": "/f"}, content=b"data") == {"size": 4}
    error = await refused(later.shell(2, "echo lost"))
    assert (error.kind, error.details["step"], error.details["steps"]) == ("sandbox_unavailable", 2, 2)
    assert error.details["reason"] == "user" and "2 steps are recorded" in str(error)
    assert (await later.now())["steps"] == 2, "a step that cannot run is not begun"


async def test_a_finished_rollout_replays_and_takes_no_more(raw: Raw) -> None:
    rollout = await raw.open("finished")
    await rollout.shell(0, "echo kept")
    await rollout.finish()
    later = await raw.open("finished")
    assert text(await later.shell(0, "echo kept")) == b"kept\n"
    assert (await refused(later.shell(1, "echo more"))).kind == "conflict"


async def test_long_lines_and_long_stdin(rollout: Opened) -> None:
    words = ["sh", "-c", "echo x >> /n; wc -l < /n", *["a" * 100_000] * 8]
    for _ in range(2):
        reply = await rollout.json(0, "POST", "/exec", json={"command": words})
        assert text(reply) == b"1\n"
    changed = await refused(rollout.json(0, "POST", "/exec", json={"command": [*words[:-1], "a" * 99_999 + "b"]}))
    assert changed.kind == "replay_divergence"
    stdin = base64.b64encode(b"a" * 700_000).decode()
    for _ in range(2):
        assert text(await rollout.shell(1, "wc -c; echo x >> /m; wc -l < /m", stdin=stdin)) == b"700000\n1\n"
    other = base64.b64encode(b"a" * 699_999 + b"b").decode()
    error = await refused(rollout.shell(1, "wc -c; echo x >> /m; wc -l < /m", stdin=other))
    assert error.kind == "replay_divergence"


async def test_long_output_comes_in_parts(rollout: Opened) -> None:
    out = b"".join(b"%d\n" % n for n in range(1, 1_500_001))
    for _ in range(2):
        reply = await rollout.shell(0, "seq 1 1500000; echo end >&2")
        assert (reply["stdout"], reply["stderr"]) == (out, b"end\n")
        assert (reply["done"]["stdout_bytes"], reply["done"]["stdout_truncated"]) == (len(out), False)
    blob = (await rollout.steps())[0]["outputs"]["stdout"]
    assert "data" not in blob and blob["digest"] == blake3(out).hexdigest()
    assert await rollout.raw.bytes("GET", f"/v1/rollouts/{rollout.id}/blobs/{blob['digest']}") == out


async def test_a_detached_command_and_what_is_asked_of_it(rollout: Opened) -> None:
    line = "read a; echo got $a; trap 'echo term; exit 9' TERM; while :; do sleep 0.02; done"
    started = await rollout.json(0, "POST", "/processes", json={"command": line, "stdin_open": True})
    assert started["exec_id"] == "step:0" and started["pid"] > 1
    for _ in range(2):
        assert (await rollout.json(1, "POST", "/processes/step:0/stdin", content=b"one\n"))["accepted"] == 4
    waiting = asyncio.create_task(rollout.json(3, "POST", "/processes/step:0/wait", params={"wait_s": 20}))
    until = f"/v1/sandboxes/{rollout.info['sandbox']}/processes/step:0"
    async with asyncio.timeout(20):
        while text(await rollout.raw.json("GET", until)) != b"got one\n":
            await asyncio.sleep(0.02)
    for _ in range(2):
        await rollout.json(2, "POST", "/processes/step:0/signal", json={"signal": "TERM"})
    reply = await waiting
    assert (text(reply), reply["done"]["exit_code"]) == (b"got one\nterm\n", 9)
    later = await reopened(rollout)
    assert await later.json(0, "POST", "/processes", json={"command": line, "stdin_open": True}) == started
    assert text(await later.json(3, "POST", "/processes/step:0/wait")) == b"got one\nterm\n"
    kinds = [record["kind"] for record in await later.steps()]
    assert kinds == ["exec", "exec.write", "exec.signal", "exec.wait"]


async def test_sessions(rollout: Opened) -> None:
    for _ in range(2):
        assert (await rollout.json(0, "POST", "/sessions", json={"name": "s"}))["name"] == "s"
        assert (await rollout.shell(1, "cd /tmp; X=1", session="s"))["done"]["exit_code"] == 0
        assert text(await rollout.shell(2, "pwd; echo $X", session="s")) == b"/tmp\n1\n"
        await rollout.json(3, "DELETE", "/sessions/s")
        assert (await refused(rollout.shell(4, "pwd", session="s"))).kind == "not_found"
        rollout = await reopened(rollout)


# -- files --


async def test_files(rollout: Opened) -> None:
    for _ in range(2):
        where = {"path": "/d/f"}
        assert await rollout.json(0, "PUT", "/files", params=where, content=b"one") == {"size": 3}
        assert await rollout.bytes(1, "GET", "/files", params=where) == b"one"
        assert await rollout.json(2, "PUT", "/files", params=where, content=b"two!") == {"size": 4}
        assert await rollout.bytes(3, "GET", "/files", params=where) == b"two!"
        stat = await rollout.json(4, "GET", "/files/stat", params=where)
        assert (stat["size"], stat["path"]) == (4, "L2QvZg==")
        listed = await rollout.json(5, "GET", "/files/list", params={"path": "/d"})
        assert [entry["path"] for entry in listed] == ["L2QvZg=="]
        await rollout.json(6, "POST", "/files/mkdir", json={"path": "L2QvZQ==", "parents": False})
        await rollout.json(7, "POST", "/files/move", json={"source": "L2QvZg==", "target": "L2QvZS9n"})
        assert (await refused(rollout.bytes(8, "GET", "/files", params=where))).kind == "file_not_found"
        tar = await rollout.bytes(9, "GET", "/files/archive", params={"path": "/d/e"})
        unpacked = await rollout.json(10, "PUT", "/files/archive", params={"path": "/u"}, content=tar)
        assert unpacked["entries"] >= 1
        await rollout.json(11, "DELETE", "/files", params={"path": "/d", "recursive": "1"})
        assert text(await rollout.shell(12, "ls /d /u 2>&1")).endswith(b"/u:\ng\n")
        rollout = await reopened(rollout)
    inputs = [record.get("inputs", {}) for record in await rollout.steps()]
    assert inputs[0]["data"]["digest"] == blake3(b"one").hexdigest() and inputs[10]["data"]["total"] == len(tar)


async def test_another_content_diverges(rollout: Opened) -> None:
    where = {"path": "/f"}
    await rollout.json(0, "PUT", "/files", params=where, content=b"one" * 100_000)
    error = await refused(rollout.json(0, "PUT", "/files", params=where, content=b"One" * 100_000))
    assert error.kind == "replay_divergence" and "data" in str(error)
    assert (
        await refused(rollout.json(0, "PUT", "/files", params={"path": "/g"}, content=b"one"))
    ).kind == "replay_divergence"


async def test_network_and_changes(rollout: Opened) -> None:
    for _ in range(2):
        told = await rollout.json(0, "POST", "/network", json={"rules": {"nowhere.example": False}})
        assert told["rules"] == {"nowhere.example": False}
        await rollout.shell(1, "echo new > /root/new")
        found = await rollout.json(2, "POST", "/changes", json={"include": ["root/**"]})
        assert [change["data"] for change in found["changes"] if change["kind"] == "write"] == ["bmV3Cg=="]
        rollout = await reopened(rollout)


async def test_more_than_is_kept_comes_whole_once(rollout: Opened) -> None:
    size = 40 << 20
    await rollout.shell(0, f"head -c {size} /dev/zero > /big")
    assert len(await rollout.bytes(1, "GET", "/files", params={"path": "/big"})) == size
    [record] = await rollout.steps(1)
    assert (record["outputs"]["data"]["total"], record["outputs"]["data"]["size"]) == (size, 16 << 20)
    error = await refused(rollout.bytes(1, "GET", "/files", params={"path": "/big"}))
    assert error.kind == "too_large" and error.details["step"] == 1
    reply = await rollout.shell(2, f"head -c {size} /dev/zero", max_output_bytes=size)
    assert reply["done"]["stdout_truncated"] and reply["done"]["stdout_bytes"] == size


async def test_a_gigabyte_passes_in_constant_memory(rollout: Opened, platform: embedded.Endpoint) -> None:
    size = 1 << 30
    processes = [p.pid for p in embedded.status(Path(platform.state)).processes if p.role in ("edge", "apiserver")]
    await rollout.shell(0, f"truncate -s {size} /big")
    before = [_peak(pid) for pid in processes]
    seen = 0
    path = f"/v1/sandboxes/{rollout.info['sandbox']}/files"
    async with rollout.raw.http.stream("GET", path, params={"path": "/big"}, headers=rollout.header(1)) as answer:
        async for chunk in answer.aiter_raw():
            seen += len(chunk)
    assert seen == size

    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(size >> 20):
            yield bytes(1 << 20)

    assert await rollout.json(2, "PUT", "/files", params={"path": "/copy"}, content=pieces()) == {"size": size}
    grown = [_peak(pid) - old for pid, old in zip(processes, before, strict=True)]
    assert max(grown) < 64 << 20, grown
    [read, written] = await rollout.steps(1)
    assert read["outputs"]["data"]["total"] == written["inputs"]["data"]["total"] == size


def _peak(pid: object) -> int:
    """Bytes that a process has had in memory at most."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024
