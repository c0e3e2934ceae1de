"""Run one command line in this process, on a fake client, and see what it printed."""

from __future__ import annotations

import json as json_module
from collections.abc import Callable
from typing import NamedTuple

import pytest

from dsec.cli import connect
from dsec.cli.main import invoke

from .fake import FakeClient


class Ran(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def json(self) -> object:
        """stdout as exactly one JSON document."""
        return json_module.loads(self.out)


Invoke = Callable[..., Ran]


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> FakeClient:
    fake = FakeClient()
    monkeypatch.setattr(connect, "make_client", lambda endpoint=None: fake)
    return fake


@pytest.fixture
def dsec(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Invoke:
    monkeypatch.delenv("DSEC_DEBUG", raising=False)

    def run(*arguments: str) -> Ran:
        capfd.readouterr()
        code = invoke(list(arguments))
        captured = capfd.readouterr()
        assert "Traceback" not in captured.err
        return Ran(int(code), captured.out, captured.err)

    return run
