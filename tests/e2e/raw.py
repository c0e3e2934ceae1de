# ruff: noqa: ANN401 - what JSON and the HTTP client take is anything
"""Rollouts over plain HTTP, as a client without the SDK's replay would use them."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from dsec.cluster import embedded

from .conftest import BASE

Json = dict[str, Any]


class Refused(Exception):
    """An error of the interface; `kind` and all that came with it."""

    def __init__(self, error: Json) -> None:
        super().__init__(error["message"])
        self.kind: str = error["kind"]
        self.details: Json = error["details"]
        self.retryable: bool = error["retryable"]


class Raw:
    """A client of one platform."""

    def __init__(self, endpoint: embedded.Endpoint, key: str = "") -> None:
        """key: the owner's unless another is given."""
        key = key or Path(endpoint.key_file).read_text().strip()
        self.http = httpx.AsyncClient(
            base_url=endpoint.url, headers={"Authorization": f"Bearer {key}"}, timeout=60, trust_env=False
        )

    async def __aenter__(self) -> Raw:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.http.aclose()

    async def bytes(self, method: str, path: str, **asked: Any) -> bytes:
        answer = await self.http.request(method, path, **asked)
        if answer.is_error:
            raise Refused(answer.json()["error"])
        return answer.content

    async def json(self, method: str, path: str, **asked: Any) -> Any:
        return json.loads(await self.bytes(method, path, **asked))

    async def open(self, name: str, *, job: str = "", opens_job: bool = True, **args: object) -> Opened:
        """Opens a rollout, in a job of that name; args as of DSecContainerRunArgs."""
        if job and opens_job:
            await self.json("POST", "/v1/jobs", json={"name": job})
        body = {"job": job, "name": name, "args": {"container_image": BASE, **args}}
        return Opened(self, await self.json("POST", "/v1/rollouts", json=body))


class Opened(NamedTuple):
    """A rollout as one opening of it sees it."""

    raw: Raw
    info: Json

    @property
    def id(self) -> str:
        return str(self.info["id"])

    def header(self, step: int, digest: str = "") -> dict[str, str]:
        return {"x-dsec-step": f"{self.id}:{self.info['epoch']}:{step}" + (f":{digest}" if digest else "")}

    async def bytes(self, step: int, method: str, path: str, **asked: Any) -> bytes:
        """A request to its sandbox, as that step."""
        asked["headers"] = {**self.header(step), **asked.get("headers", {})}
        return await self.raw.bytes(method, f"/v1/sandboxes/{self.info['sandbox']}{path}", **asked)

    async def json(self, step: int, method: str, path: str, **asked: Any) -> Any:
        return json.loads(await self.bytes(step, method, path, **asked))

    async def shell(self, step: int, line: str, **body: Any) -> Json:
        """A line of shell as that step, to its end: `done`, and both streams as bytes."""
        out, err = bytearray(), bytearray()
        while True:
            asked = {"command": line, "cursor": len(out) + len(err), **body}
            reply = await self.json(step, "POST", "/exec", json=asked)
            out += base64.b64decode(reply["stdout"])
            err += base64.b64decode(reply["stderr"])
            if reply["done"] is not None:
                return {"done": reply["done"], "stdout": bytes(out), "stderr": bytes(err)}

    async def now(self) -> Json:
        return dict(await self.raw.json("GET", f"/v1/rollouts/{self.id}"))

    async def steps(self, start: int = 0, limit: int = 1000) -> list[Json]:
        path = f"/v1/rollouts/{self.id}/steps?from={start}&limit={limit}"
        *records, end = [json.loads(line) for line in (await self.raw.bytes("GET", path)).splitlines()]
        assert end["end"]["count"] == len(records)
        return records

    async def finish(self, **body: Any) -> Json:
        body = {"epoch": self.info["epoch"], **body}
        return dict(await self.raw.json("POST", f"/v1/rollouts/{self.id}/finish", json=body))
