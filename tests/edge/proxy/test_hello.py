"""ClientHellos: real ones, cut ones, forged ones."""

from __future__ import annotations

import ssl

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsec.edge.proxy.hello import MAX_HELLO, BadHello, server_name


def real(name: str | None) -> bytes:
    """What OpenSSL says first."""
    context = ssl.create_default_context()
    context.check_hostname = name is not None
    if name is None:
        context.verify_mode = ssl.CERT_NONE
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    with pytest.raises(ssl.SSLWantReadError):
        context.wrap_bio(incoming, outgoing, server_hostname=name).do_handshake()
    return outgoing.read()


def extension(kind: int, body: bytes) -> bytes:
    return kind.to_bytes(2, "big") + len(body).to_bytes(2, "big") + body


def sni(name: bytes, kind: int = 0) -> bytes:
    entry = bytes((kind,)) + len(name).to_bytes(2, "big") + name
    return extension(0, len(entry).to_bytes(2, "big") + entry)


def forged(*extensions: bytes, behind: bytes = b"") -> bytes:
    block = b"".join(extensions)
    body = (
        b"\x03\x03"
        + bytes(32)
        + b"\x00"
        + b"\x00\x02\x13\x01"
        + b"\x01\x00"
        + len(block).to_bytes(2, "big")
        + block
        + behind
    )
    return records(b"\x01" + len(body).to_bytes(3, "big") + body)


def records(message: bytes, size: int = 16384) -> bytes:
    pieces = [message[at : at + size] for at in range(0, len(message), size)]
    return b"".join(b"\x16\x03\x01" + len(piece).to_bytes(2, "big") + piece for piece in pieces)


def test_the_name_of_a_real_client() -> None:
    assert server_name(real("example.com")) == b"example.com"


def test_every_cut_waits_for_more() -> None:
    whole = real("example.com")
    assert all(server_name(whole[:length]) is None for length in range(len(whole)))


def test_a_hello_in_several_records() -> None:
    message = forged(sni(b"example.com"))[5:]
    assert server_name(records(message, 10)) == b"example.com"
    with pytest.raises(BadHello, match="too many records"):
        server_name(records(message, 2))


@pytest.mark.parametrize(
    ("hello", "why"),
    [
        (real(None), "names no server"),
        (forged(), "names no server"),
        (forged(sni(b"a.com"), sni(b"b.com")), "twice"),
        (forged(sni(b"a.com"), extension(0xFE0D, b"x")), "ECH"),
        (forged(sni(b"a.com"), extension(0xFFCE, b"x")), "ECH"),
        (forged(sni(b"a.com", kind=1)), "unknown way"),
        (forged(extension(0, b"\x00\x0e" + b"\x00\x00\x04a.co" + b"\x00\x00\x04b.co")), "after its end"),
        (forged(extension(0, b"\x00\x30\x00\x00\x04a.co")), "cut off"),
        (forged(sni(b"a.com"), behind=b"x"), "after its end"),
        (b"GET / HTTP/1.1\r\n\r\n", "not TLS"),
        (b"SSH-2.0-OpenSSH\r\n", "not TLS"),
        (b"\x80\x2e\x01\x03\x01", "not TLS"),
        (b"\x15\x03\x01\x00\x02\x02\x28", "not TLS"),
        (b"\x16\x02\x01\x00\x05", "version"),
        (b"\x16\x03\x01\x00\x00", "length"),
        (b"\x16\x03\x01\xff\xff", "length"),
        (b"\x16\x03\x01\x00\x04\x02\x00\x00\x00", "no ClientHello"),
        (b"\x16\x03\x01\x00\x04\x01\xff\xff\xff", "too large"),
    ],
)
def test_what_hides_a_name_is_refused(hello: bytes, why: str) -> None:
    with pytest.raises(BadHello, match=why):
        server_name(hello)


def test_something_behind_the_hello_in_its_record() -> None:
    whole = forged(sni(b"a.com"))
    message = whole[5:] + b"\x01\x00\x00\x00"
    with pytest.raises(BadHello, match="follows"):
        server_name(records(message))


def outcome(data: bytes) -> bytes | str | None:
    try:
        return server_name(data)
    except BadHello as error:
        return str(error)


@given(st.binary(max_size=400))
def test_any_bytes(data: bytes) -> None:
    outcome(b"\x16\x03\x01" + data)
    outcome(data)


@settings(max_examples=300)
@given(st.data())
def test_damaged_hellos(data: st.DataObject) -> None:
    """A flipped byte gives the name, another name, a wait or a refusal; never anything else, and never a late change of mind."""
    hello = bytearray(forged(sni(b"example.com"), extension(43, b"\x02\x03\x04"), extension(10, b"\x00\x02\x00\x1d")))
    for _ in range(data.draw(st.integers(1, 4))):
        hello[data.draw(st.integers(0, len(hello) - 1))] = data.draw(st.integers(0, 255))
    final = outcome(bytes(hello))
    for length in range(0, len(hello), 7):
        early = outcome(bytes(hello[:length]))
        assert early is None or isinstance(early, str) or early == final


def test_memory_is_bounded() -> None:
    with pytest.raises(BadHello):
        server_name(records(b"\x01" + (MAX_HELLO + 1).to_bytes(3, "big") + bytes(MAX_HELLO + 1)))
