"""The HTTP interface as a caller without the SDK sees it."""

from __future__ import annotations

import base64
import struct
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest

from dsec.apiserver.openapi import document
from dsec.apiserver.routes import OPERATIONS
from dsec.protocol.errors import STATUS, ErrorKind

from .fake_edge import FakeEdge
from .serving import KEY

ROOT = Path(__file__).parent.parent.parent
Json = dict[str, object]


@pytest.fixture
async def http(url: str) -> AsyncIterator[aiohttp.ClientSession]:
    headers = {"Authorization": f"Bearer {KEY}"}
    async with aiohttp.ClientSession(url, headers=headers, timeout=aiohttp.ClientTimeout(20)) as session:
        yield session


@pytest.fixture
async def sandbox(http: aiohttp.ClientSession) -> str:
    async with http.post("/v1/sandboxes", json={"args": {"container_image": "debian@12"}}) as response:
        assert response.status == 201 and response.headers["X-DSec-Incarnation"] == "1"
        return f"/v1/sandboxes/{(await response.json())['id']}"


async def refused(response: aiohttp.ClientResponse, kind: ErrorKind, status: int | None = None) -> Json:
    """The error's body, which must have the promised shape."""
    body = await response.json()
    assert response.status == (status or STATUS[kind]), body
    error: Json = body["error"]
    assert error.keys() == {"kind", "message", "hint", "retryable", "details"} and error["kind"] == kind.value
    details = error["details"]
    assert isinstance(details, dict) and details["request_id"] == response.headers["X-Request-Id"]
    return error


async def test_only_two_paths_are_open(url: str) -> None:
    async with aiohttp.ClientSession(url) as anonymous:
        for path in ("/healthz", "/openapi.json"):
            assert (await anonymous.get(path)).status == 200
        for path in ("/v1/sandboxes", "/v1/status", "/nothing", "/healthz/"):
            error = await refused(await anonymous.get(path), ErrorKind.AUTHENTICATION)
            assert "DSEC_API_KEY" in str(error["hint"])
        wrong = {"Authorization": "Bearer " + "x" * 30}
        await refused(await anonymous.post("/v1/sandboxes", headers=wrong, json={}), ErrorKind.AUTHENTICATION)
        with pytest.raises(aiohttp.WSServerHandshakeError) as denied:
            await anonymous.ws_connect("/v1/sandboxes/sb-fake-000000000000/processes/x/stream")
        assert denied.value.status == 401


async def test_unknown_paths_and_methods(http: aiohttp.ClientSession) -> None:
    await refused(await http.get("/v2/sandboxes"), ErrorKind.NOT_FOUND)
    response = await http.put("/v1/sandboxes")
    await refused(response, ErrorKind.INVALID, 405)
    assert response.headers["Allow"] == "GET, POST"
    await refused(await http.get("/v1/sandboxes/nonsense"), ErrorKind.NOT_FOUND)


async def test_wrong_fields_are_named(http: aiohttp.ClientSession, sandbox: str) -> None:
    for path, body, named in (
        ("/v1/sandboxes", {"args": {"container_imag": "x"}}, "container_imag"),
        ("/v1/sandboxes", {"arg": {}}, "arg"),
        ("/v1/sandboxes", {"args": {"memory_limit_mb": "many"}}, "memory_limit_mb"),
        ("/v1/sandboxes", {"args": {}, "count": 0}, "burst"),
        ("/v1/sandboxes", {"args": {}, "timeout": 1e9}, "timeout"),
        ("/v1/sandboxes", {"args": {}, "backend": "gpu"}, "backend"),
        (f"{sandbox}/exec", {"command": "true", "shell": True}, "shell"),
        (f"{sandbox}/exec", {}, "argv"),
        (f"{sandbox}/exec", {"command": "true", "argv": ["dHJ1ZQ=="]}, "argv and command"),
        (f"{sandbox}/exec", {"argv": ["not base64!"]}, "argv"),
        (f"{sandbox}/exec", {"command": "true", "exec_id": "a b"}, "exec_id"),
        (f"{sandbox}/ttl", {"running_stop": 0}, "running_stop"),
        (f"{sandbox}/files/mkdir", {}, "path"),
    ):
        error = await refused(await http.post(path, json=body), ErrorKind.INVALID)
        assert named in str(error["message"]), error
    await refused(await http.post(f"{sandbox}/exec", data=b"{"), ErrorKind.INVALID)
    await refused(await http.post(f"{sandbox}/exec", data=b"[" * 100_000), ErrorKind.INVALID)
    await refused(await http.get(f"{sandbox}/files"), ErrorKind.INVALID)
    await refused(await http.get(f"{sandbox}/files?path_b64=%21"), ErrorKind.INVALID)
    await refused(await http.get(f"{sandbox}/files?path=/a&offset=-1"), ErrorKind.INVALID)
    await refused(await http.put(f"{sandbox}/files?path=/a&mode=9", data=b""), ErrorKind.INVALID)
    await refused(await http.get("/v1/sandboxes?state=happy"), ErrorKind.INVALID)
    await refused(await http.get(f"{sandbox}/files?path=%00"), ErrorKind.FILE_INVALID)


async def test_bodies_are_bounded(http: aiohttp.ClientSession, sandbox: str) -> None:
    async def chunked() -> AsyncIterator[bytes]:
        for _ in range(40):
            yield b" " * 100_000

    await refused(await http.post(f"{sandbox}/ttl", data=b" " * 2_000_000), ErrorKind.TOO_LARGE)
    await refused(await http.post(f"{sandbox}/ttl", data=chunked()), ErrorKind.TOO_LARGE)


async def test_exec_without_base64(http: aiohttp.ClientSession, sandbox: str) -> None:
    async with http.post(f"{sandbox}/exec", json={"command": ["echo", "hé"]}) as response:
        reply = await response.json()
        assert response.headers["X-DSec-Incarnation"] == "1"
    assert base64.b64decode(reply["stdout"]) == "hé\n".encode()
    assert reply["done"]["exit_code"] == 0 and reply["done"]["exec_id"].startswith("ex-")
    async with http.post(f"{sandbox}/exec", json={"command": "echo $0 a", "wait_s": 0.0}) as response:
        assert response.status == 200


async def test_incarnation_is_checked_when_asked(http: aiohttp.ClientSession, sandbox: str) -> None:
    for path in ("", "/processes", "/files/stat?path=/", "/logs"):
        assert (await http.get(sandbox + path)).headers["X-DSec-Incarnation"] == "1"
        other = await http.get(sandbox + path, headers={"X-DSec-Incarnation": "2"})
        if path not in ("", "/logs"):  # an ended or replaced sandbox still says what became of it
            await refused(other, ErrorKind.UNAVAILABLE)
    await refused(await http.get(sandbox + "/processes", headers={"X-DSec-Incarnation": "x"}), ErrorKind.INVALID)


async def test_lists_as_json_and_ndjson(http: aiohttp.ClientSession, sandbox: str) -> None:
    id = sandbox.rsplit("/", 1)[1]
    async with http.get("/v1/sandboxes?state=running") as response:
        assert id in [info["id"] for info in (await response.json())["sandboxes"]]
    async with http.get("/v1/sandboxes", headers={"Accept": "application/x-ndjson"}) as response:
        assert response.content_type == "application/x-ndjson" and id.encode() in await response.read()
    await http.put(f"{sandbox}/files?path=/a/b", data=b"x")
    async with http.get(f"{sandbox}/files/list?path=/a") as response:
        (entry,) = await response.json()
        assert base64.b64decode(entry["path"]) == b"/a/b" and entry["size"] == 1
    async with http.post(f"{sandbox}/changes", json={}) as response:
        assert [base64.b64decode(c["data"]) for c in (await response.json())["changes"]] == [b"x"]


async def test_burst_is_ndjson(http: aiohttp.ClientSession, edge: FakeEdge) -> None:
    args = {"container_image": "debian@12", "idempotency_key": "burst-1"}
    ids: list[set[str]] = []
    for _ in range(2):
        async with http.post("/v1/sandboxes", json={"args": args, "count": 3}) as response:
            assert response.content_type == "application/x-ndjson"
            lines = [line async for line in response.content]
        assert len(lines) == 3
        ids.append({box.id for key, box in edge.by_key.items() if key.startswith("burst-1/")})
    assert ids[0] == ids[1] and len(ids[0]) == 3, "the same key is the same burst"
    async with http.post("/v1/sandboxes/stop", json={"burst": "burst-1", "keep": [min(ids[0])]}) as response:
        assert await response.json() == {"count": 2}


async def test_stream_of_a_command(http: aiohttp.ClientSession, sandbox: str) -> None:
    async with http.post(
        f"{sandbox}/processes", json={"command": "printf abc; sleep 0.1; printf de >&2", "exec_id": "s"}
    ) as response:
        assert response.status == 201 and (await response.json())["exec_id"] == "s"
    async with http.ws_connect(f"{sandbox}/processes/s/stream?cursor=1") as socket:
        messages = [message async for message in socket]
    events = [(*struct.unpack_from("<BQ", m.data), m.data[9:]) for m in messages[:-1]]
    assert events == [(1, 1, b"bc"), (2, 3, b"de")]
    assert messages[-1].json()["exit"]["exit_code"] == 0
    async with http.get(f"{sandbox}/processes/s?cursor=3&wait_s=5") as response:
        reply = await response.json()
        assert (reply["stdout"], base64.b64decode(reply["stderr"])) == ("", b"de")
    await refused(await http.get(f"{sandbox}/processes/none"), ErrorKind.NOT_FOUND)


async def test_status_and_health(http: aiohttp.ClientSession) -> None:
    async with http.get("/v1/status") as response:
        (edge,) = (await response.json())["edges"]
        assert edge["connected"] and edge["status"]["edge"] == "fake"
    async with http.get("/healthz") as response:
        assert (await response.json())["ok"] is True


def test_openapi_document_is_current() -> None:
    text = (ROOT / "docs" / "openapi.json").read_bytes()
    assert text == document("0.1.0"), "run: python -m dsec.apiserver.openapi > docs/openapi.json"


async def test_openapi_document_is_served_and_whole(http: aiohttp.ClientSession) -> None:
    async with http.get("/openapi.json") as response:
        served = await response.json()
    assert served["openapi"].startswith("3.1")
    described = {(m.upper(), path) for path, methods in served["paths"].items() for m in methods}
    assert described >= {(op.method, op.path.replace(":path", "")) for op in OPERATIONS}
    assert ("GET", "/v1/sandboxes/{id}/processes/{exec_id}/stream") in described
    ids = [op["operationId"] for methods in served["paths"].values() for op in methods.values()]
    assert len(set(ids)) == len(ids)
    missing = [ref for ref in references(served) if not found(served, ref)]
    assert missing == []


def references(value: object) -> list[str]:
    if isinstance(value, dict):
        own = [value["$ref"]] if isinstance(value.get("$ref"), str) else []
        return own + [ref for child in value.values() for ref in references(child)]
    return [ref for child in value for ref in references(child)] if isinstance(value, list) else []


def found(document: Json, ref: str) -> bool:
    at: object = document
    for part in ref.removeprefix("#/").split("/"):
        if not isinstance(at, dict) or part not in at:
            return False
        at = at[part]
    return True
