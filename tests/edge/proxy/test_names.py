"""Which spellings are names, and which addresses no name may lead to."""

from __future__ import annotations

from ipaddress import ip_address

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsec.edge.proxy.names import BadName, is_of_this_machine, is_public, normal, split_authority


@pytest.mark.parametrize(
    "host",
    ["127.0.0.1", "127.1", "2130706433", "0x7f000001", "0x7f.1", "0177.0.0.1", "127.0.0.1.", "1.2.3.4.5", "0", "0x",
     "[::1]", "::1", "::ffff:127.0.0.1", "[::ffff:7f00:1]", "fe80::1%25lo", "example.0x7f", "example.1"],
)  # fmt: skip
def test_no_notation_of_an_address_is_a_name(host: str) -> None:
    with pytest.raises(BadName):
        normal(host)
    with pytest.raises(BadName):
        split_authority(f"{host}:80")


@pytest.mark.parametrize(
    "text",
    ["", ".", "a..b", "-a.com", "a-.com", "a b", "a\x00b", "a/b", "a\\b", "a%2eb", "user@host", "host:", "host:0", "host:080",
     "host:65536", "host:80:80", "host:-1", "host:+1", "host: 80", "ho st:80", "exämple.com", "\uff11.com", "a" * 64 + ".com",
     ".".join(["a" * 60] * 5), "host\r\n", "１２７.0.0.1"],
)  # fmt: skip
def test_what_is_no_host(text: str) -> None:
    with pytest.raises(BadName):
        split_authority(text)


def test_one_spelling() -> None:
    assert normal("Example.COM.") == "example.com"
    assert split_authority("PyPI:8080") == ("pypi", 8080)
    assert split_authority("a_b.example") == ("a_b.example", None)


@given(st.integers(0, 2**32 - 1))
def test_a_number_is_never_a_name(number: int) -> None:
    a, b, c, d = number.to_bytes(4, "big")
    for text in (str(number), hex(number), oct(number).replace("o", ""), f"{a}.{b}.{c}.{d}", f"{a}.{b * 65536 + c * 256 + d}",
                 f"0x{a:x}.0x{b:x}.{c}.{d}", f"{a:03o}.{b:o}.{c}.{d}"):  # fmt: skip
        with pytest.raises(BadName):
            normal(text)


@pytest.mark.parametrize(
    "address",
    ["0.0.0.0", "0.1.2.3", "10.1.2.3", "100.64.0.1", "127.0.0.1", "127.255.0.1", "169.254.169.254", "172.16.0.1", "172.31.9.9",
     "192.0.0.8", "192.168.1.1", "198.18.0.1", "224.0.0.1", "239.1.1.1", "240.0.0.1", "255.255.255.255", "::", "::1",
     "::127.0.0.1", "::ffff:10.0.0.1", "::ffff:127.0.0.1", "64:ff9b::7f00:1", "64:ff9b::a9fe:a9fe", "64:ff9b:1::1", "fe80::1",
     "fec0::1", "fc00::1", "fd00:ec2::254", "ff02::1", "2001:db8::1", "2002:7f00:1::", "2001:0:1::1", "100::1"],
)  # fmt: skip
def test_addresses_that_are_not_public(address: str) -> None:
    assert not is_public(ip_address(address))


@pytest.mark.parametrize(
    "address", ["1.1.1.1", "8.8.8.8", "172.32.0.1", "2606:4700:4700::1111", "64:ff9b::808:808", "::ffff:8.8.8.8"]
)
def test_public_addresses(address: str) -> None:
    assert is_public(ip_address(address))


def test_addresses_of_this_machine() -> None:
    assert is_of_this_machine(ip_address("127.0.0.1"))
    assert not is_of_this_machine(ip_address("203.0.113.7"))
