"""/etc/hosts of a sandbox: which lines are ours, and what is left of the file without them."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from blake3 import blake3

from dsec.edge import hosts
from dsec.edge.journal import Before, Looks
from dsec.protocol.specs import Change, ChangeKind

THEIRS = b"127.0.0.1\tlocalhost\n10.0.0.1 x # dsec expose\n127.77.1.1\tx\t# mine\n\xff no text"
ONE, TWO = {"one": "127.77.1.1"}, {"two": "127.77.1.2"}


def test_lines_of_the_sandbox_stay_byte_for_byte() -> None:
    assert hosts.without_own(THEIRS) == THEIRS
    for text in (THEIRS, b"", b"\n", b"a\r\n"):
        written = hosts.with_services(text, ONE | TWO)
        assert hosts.without_own(written) == text
        assert hosts.with_services(written, {}) == text


def test_only_the_names_of_now_are_there_and_the_newest_is_first() -> None:
    written = hosts.with_services(THEIRS, ONE)
    both = hosts.with_services(written, ONE | TWO)
    assert both.split(b"\n")[:2] == [b"127.77.1.2\ttwo\t# dsec expose", b"127.77.1.1\tone\t# dsec expose"]
    assert hosts.with_services(both, ONE | TWO) == both
    assert hosts.with_services(both, TWO) == hosts.with_services(THEIRS, TWO), "what another edge left goes too"


def change(text: bytes, *, data: bool = True, mode: int = 0o644) -> Change:
    digest = blake3(text).hexdigest() if data else ""
    return Change(path=b"etc/hosts", kind=ChangeKind.WRITE, mode=mode, size=len(text), digest=digest,
                  data=text if data else None)  # fmt: skip


BEFORE = Before(file=Looks(0o644), size=len(THEIRS), digest=blake3(THEIRS).hexdigest())
OURS = hosts.with_services(THEIRS, ONE)


@pytest.mark.parametrize(
    ("told", "before", "left"),
    [
        (change(OURS), BEFORE, None),
        (change(THEIRS), BEFORE, None),
        (change(OURS, data=False), BEFORE, None),
        (change(THEIRS, data=False), BEFORE, change(THEIRS, data=False)),
        (change(OURS, mode=0o600), BEFORE, change(THEIRS, mode=0o600)),
        (change(OURS + b"\nmine"), BEFORE, change(THEIRS + b"\nmine")),
        (change(OURS), Before(), change(THEIRS)),
        (change(OURS), None, change(OURS)),
    ],
)
async def test_what_is_told_of_the_file(told: Change, before: Before | None, left: Change | None) -> None:
    async def changes() -> AsyncIterator[Change | bool]:
        yield told
        yield True

    found = [item async for item in hosts.without(changes(), before, ONE)]
    assert found == [*([] if left is None else [left]), True]
