"""`import dsec` is free, and the SDK brings no server along."""

from __future__ import annotations

import json
import subprocess
import sys

import dsec

SERVERS = ("dsec.apiserver", "dsec.edge", "dsec.layers", "dsec.backends", "dsec.iam", "dsec.placement", "dsec.watcher",
           "dsec.cluster", "dsec.cli", "starlette", "uvicorn", "apsw", "typer", "rich")  # fmt: skip


def modules_after(statement: str) -> set[str]:
    code = f"{statement}\nimport sys, json\nprint(json.dumps(list(sys.modules)))"
    return set(json.loads(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True).stdout))


def test_import_is_lazy() -> None:
    loaded = modules_after("import dsec")
    assert "aiohttp" not in loaded and "msgspec" not in loaded
    assert [name for name in loaded if name.startswith("dsec")] == ["dsec"]


def test_the_sdk_alone() -> None:
    loaded = modules_after("from dsec import *")
    assert "dsec.sdk.client" in loaded
    assert not [name for name in loaded for server in SERVERS if name == server or name.startswith(server + ".")]


def test_every_public_name_resolves() -> None:
    for name in dsec.__all__:
        assert getattr(dsec, name) is not None
    assert set(dsec.__all__) <= set(dir(dsec))
