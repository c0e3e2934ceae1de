"""Names of hosts as requests spell them, and the addresses that names may not lead to."""

from __future__ import annotations

import re
import socket
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network

Address = IPv4Address | IPv6Address
MAX_NAME = 253
_LABEL = r"[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?"
_NAME = re.compile(rf"{_LABEL}(?:\.{_LABEL})*")
# What an address parser may take for a number: `127.1`, `0x7f000001`, `2130706433`, `0177.0.0.1` all end in one.
_NUMBER = re.compile(r"[0-9]+|0x[0-9a-f]*")
_PORT = re.compile(r"[1-9][0-9]{0,4}")

# Not public though some versions of `ipaddress` call a part of them global.
_CLOSED = tuple(
    ip_network(text)
    for text in (
        "0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16", "172.16.0.0/12", "192.0.0.0/24",
        "192.0.2.0/24", "192.88.99.0/24", "192.168.0.0/16", "198.18.0.0/15", "198.51.100.0/24", "203.0.113.0/24",
        "224.0.0.0/4", "240.0.0.0/4", "::/16", "64:ff9b:1::/48", "100::/64", "2001::/23", "2001:db8::/32", "2002::/16",
        "3fff::/20", "5f00::/16", "fc00::/7", "fe80::/10", "fec0::/10", "ff00::/8",
    )
)  # fmt: skip
_NAT64 = IPv6Network("64:ff9b::/96")


class BadName(ValueError):
    """A host that is no name; says why."""


def normal(host: str) -> str:
    """The one spelling of a name: lower case, no dot at the end. BadName for addresses in any notation and what is no name."""
    name = host.lower().removesuffix(".")
    if is_address(name):
        raise BadName(f"{host[:80]} is an address; only names can be allowed")
    if len(name) > MAX_NAME or _NAME.fullmatch(name) is None:
        raise BadName(f"{host[:80]!r} is not a host name")
    return name


def is_address(host: str) -> bool:
    """Would some resolver take it for an IP address: any notation of IPv4, anything with a colon or brackets."""
    last = host.removesuffix(".").rpartition(".")[2]
    return ":" in host or host.startswith("[") or _NUMBER.fullmatch(last.lower()) is not None


def split_authority(text: str) -> tuple[str, int | None]:
    """(name, port or None) of `name[:port]`. BadName when it is anything else, user information included."""
    host, colon, port = text.partition(":")
    if not text.isascii() or "@" in text:
        raise BadName(f"{text[:80]!r} is not a host and port")
    if ":" in port or text.startswith("["):
        raise BadName(f"{text[:80]} is an address; only names can be allowed")
    if not colon:
        return normal(host), None
    if _PORT.fullmatch(port) is None or int(port) > 65535:
        raise BadName(f"{text[:80]!r} has no valid port")
    return normal(host), int(port)


def is_public(address: Address) -> bool:
    """Outside every private, local, special and multicast range; an IPv4 address inside an IPv6 one counts as itself."""
    if isinstance(address, IPv6Address):
        if address.ipv4_mapped is not None:
            return is_public(address.ipv4_mapped)
        if address in _NAT64:
            return is_public(IPv4Address(int(address) & 0xFFFFFFFF))
    return address.is_global and not any(
        address in network
        for network in _CLOSED
        if isinstance(network, IPv4Network) == isinstance(address, IPv4Address)
    )


def is_of_this_machine(address: Address) -> bool:
    """Does this machine hold the address? Asks the routing table; nothing is sent."""
    family = socket.AF_INET if isinstance(address, IPv4Address) else socket.AF_INET6
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((str(address), 9))
        except OSError:
            return False  # no way there at all
        return ip_address(probe.getsockname()[0].partition("%")[0]) == address
