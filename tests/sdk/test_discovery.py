"""Where the service and its key are found, and what is said when they are not."""

from __future__ import annotations

from pathlib import Path

import pytest

from dsec import AuthenticationError, ConnectionLost
from dsec.sdk.discovery import Endpoint, discover


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("DSEC_URL", "DSEC_API_KEY", "DSEC_PROJECT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("DSEC_STATE", str(tmp_path))
    return tmp_path


def leave(state: Path) -> None:
    (state / "api.key").write_text("local-key\n")
    (state / "endpoint.json").write_text(f'{{"url": "http://127.0.0.1:1", "key_file": "{state}/api.key", "more": 1}}')


def test_order(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    leave(state)
    assert discover() == Endpoint("http://127.0.0.1:1", "local-key")
    assert discover("http://127.0.0.1:1/") == Endpoint("http://127.0.0.1:1", "local-key")
    monkeypatch.setenv("DSEC_URL", "http://there/")
    monkeypatch.setenv("DSEC_API_KEY", "env-key")
    monkeypatch.setenv("DSEC_PROJECT", "p")
    assert discover() == Endpoint("http://there", "env-key", "p")
    assert discover("http://here", "arg-key", "q") == Endpoint("http://here", "arg-key", "q")
    assert "arg-key" not in repr(discover("http://here", "arg-key"))


def test_nothing_found(state: Path) -> None:
    with pytest.raises(ConnectionLost, match="dsec up"):
        discover()
    with pytest.raises(AuthenticationError, match="DSEC_API_KEY"):
        discover("http://there")


def test_a_local_key_is_not_sent_elsewhere(state: Path) -> None:
    leave(state)
    with pytest.raises(AuthenticationError, match="no API key for http://there"):
        discover("http://there")


def test_damage_is_said(state: Path) -> None:
    leave(state)
    (state / "api.key").unlink()
    with pytest.raises(AuthenticationError, match=r"api\.key"):
        discover()
    (state / "endpoint.json").write_text("{")
    with pytest.raises(ConnectionLost, match="damaged"):
        discover()
