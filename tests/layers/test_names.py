"""References: what parses, what does not, and that nothing that parses can leave a directory."""

from __future__ import annotations

import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsec.layers.names import Ref, parse_ref
from dsec.protocol.errors import ErrorKind, Fault

_FIRST = string.ascii_lowercase + string.digits
_names = st.builds(lambda first, rest: first + rest, st.sampled_from(_FIRST), st.text(_FIRST + "._-", max_size=127))
_versions = st.builds(lambda first, rest: first + rest, st.sampled_from(_FIRST), st.text(_FIRST + "._-+", max_size=127))
_digests = st.text("0123456789abcdef", min_size=64, max_size=64).map(lambda digits: f"sha256:{digits}")


@given(_names, st.none() | _versions, st.none() | _digests)
def test_references_round_trip(name: str, version: str | None, digest: str | None) -> None:
    ref = Ref(name, version=None if digest else version, digest=digest)
    assert parse_ref(str(ref)) == ref


@given(st.text(max_size=300))
def test_whatever_parses_is_one_plain_component(text: str) -> None:
    try:
        ref = parse_ref(text)
    except Fault as fault:
        assert fault.body.kind is ErrorKind.INVALID
        return
    for part in (ref.name, ref.version or "x"):
        assert "/" not in part and "\0" not in part and "\n" not in part
        assert not part.startswith(".") and 0 < len(part) <= 128
    assert str(ref) == text


@pytest.mark.parametrize(
    "text",
    [
        *(
            "",
            "@",
            "a@",
            "@1",
            "../a",
            "a/b",
            "a/b@1",
            "a@../../etc",
            "a@1/2",
            "A@1",
            ".a",
            "-a",
            "a@.1",
            "a@1@2",
            "a b",
        ),
        *("a@sha256:12", "a\n", "a@1\n", "a" * 129, "a@sha256:" + "g" * 64, "a@sha256:" + "A" * 64, "ä@1"),
        "a@sha512:" + "0" * 128,
    ],
)
def test_no_reference(text: str) -> None:
    with pytest.raises(Fault) as caught:
        parse_ref(text)
    assert caught.value.body.kind is ErrorKind.INVALID
    assert "name@version" in caught.value.body.hint
