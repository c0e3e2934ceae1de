"""Keys: where they may come from, what is refused, and that nothing tells them."""

from __future__ import annotations

from pathlib import Path

import pytest

from dsec.iam.keys import KeyRing
from dsec.protocol.errors import ErrorKind, Fault

KEY = "k" * 32


def test_check() -> None:
    ring = KeyRing({"owner": KEY, "second": "s" * 32})
    assert ring.check(f"Bearer {KEY}".encode()).name == "owner"
    assert ring.check(b"bearer " + b"s" * 32, "default").name == "second"
    for header in (
        None,
        b"",
        b"Bearer",
        b"Bearer ",
        b"Bearer " + b"x" * 32,
        f"Basic {KEY}".encode(),
        KEY.encode(),
        b"Bearer \xff",
    ):
        with pytest.raises(Fault) as caught:
            ring.check(header)
        assert caught.value.body.kind is ErrorKind.AUTHENTICATION and "DSEC_API_KEY" in caught.value.body.hint
        assert KEY not in caught.value.body.message
    with pytest.raises(Fault) as caught:
        ring.check(f"Bearer {KEY}".encode(), "elsewhere")
    assert caught.value.body.kind is ErrorKind.PERMISSION
    assert KEY not in repr(vars(ring))


def test_file(tmp_path: Path) -> None:
    path = tmp_path / "api.key"
    path.touch(0o600)
    path.write_text(KEY + "\n")
    assert KeyRing.from_file(path).check(f"Bearer {KEY}".encode())
    path.chmod(0o640)
    with pytest.raises(Fault, match="0640"):
        KeyRing.from_file(path)
    path.chmod(0o600)
    path.write_text("\n")
    with pytest.raises(Fault, match="holds no key"):
        KeyRing.from_file(path)
    with pytest.raises(Fault, match="No such file"):
        KeyRing.from_file(tmp_path / "none")
