"""The kept inputs of the fuzzers, once more: what broke a decoder before, or led it somewhere new, breaks it no more."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent / "fuzz"
sys.path.insert(0, str(ROOT / "python"))

import targets  # noqa: E402

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="the unpackers' scratch root needs root")


@pytest.mark.parametrize("name", targets.TARGETS)
def test_kept_inputs(name: str) -> None:
    run, corpus = targets.TARGETS[name]
    inputs = sorted((ROOT / "corpus" / corpus).iterdir())
    assert len(inputs) > 100
    for path in inputs:
        try:
            run(path.read_bytes())
        except BaseException as error:
            error.add_note(f"input {path}")
            raise


@pytest.mark.parametrize("path", ["/outside/file", "/outside/new", "/link/../outside/file"])
def test_what_leaves_the_target_is_seen(path: str) -> None:
    def escape(target: Path) -> None:
        Path(path).write_bytes(os.urandom(8))

    with pytest.raises(AssertionError, match="outside the target"):
        targets._cell().run(escape)
