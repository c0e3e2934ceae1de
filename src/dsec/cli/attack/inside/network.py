"""Routes, names, raw sockets, and sockets that network namespaces do not separate."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import struct

from .core import ABSENT, attempt, each

PREFIX = "network"

_NO_WAY = (errno.ENETUNREACH, errno.EHOSTUNREACH, errno.ECONNREFUSED, errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT,
           errno.ESOCKTNOSUPPORT, errno.EPROTONOSUPPORT)  # fmt: skip
_SIOCSIFFLAGS, _SIOCSIFADDR = 0x8914, 0x8916
_ADDRESSES = ("1.1.1.1", "169.254.169.254", "10.0.0.1")


@each("network.connect", "connect to {} over TCP", {name: i for i, name in enumerate(_ADDRESSES)}, also=_NO_WAY)
def connect(which: int) -> str | None:
    with socket.create_connection((_ADDRESSES[which], 80), timeout=3):
        return "connected"


@attempt("network.connect6", "connect to the internet over IPv6", also=_NO_WAY)
def connect6() -> str | None:
    with socket.create_connection(("2606:4700:4700::1111", 80), timeout=3):
        return "connected"


@attempt("network.udp", "send a datagram to a name server", also=_NO_WAY)
def udp() -> str | None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        sender.sendto(b"x", ("8.8.8.8", 53))
    return "sent a datagram"


@attempt("network.names", "resolve a name", also=_NO_WAY)
def names() -> str | None:
    try:
        address = socket.getaddrinfo("example.com", 80)[0][4][0]
    except socket.gaierror:
        return None
    return f"example.com is {address}"


@attempt("network.host_loopback", "reach the platform's port through loopback", also=_NO_WAY)
def host_loopback() -> str | None:
    port = int(os.environ.get("ATTACK_PORT", "22"))
    with socket.create_connection(("127.0.0.1", port), timeout=3):
        return f"connected to the host's port {port}"


@attempt("network.interfaces", "find an interface besides loopback")
def interfaces() -> str | None:
    # Tunnel templates (tunl0, sit0, ...) that the kernel makes in every namespace are down and cannot be brought up.
    others = [name for _, name in socket.if_nameindex() if name != "lo" and _is_up(name)]
    return f"interfaces {others}" if others else None


def _is_up(name: str) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as query:
        flags = struct.unpack("16sH", fcntl.ioctl(query, 0x8913, struct.pack("16sH14x", name.encode(), 0))[:18])[1]
    return bool(flags & 1)


@attempt("network.routes", "find a route", also=ABSENT)
def routes() -> str | None:
    with open("/proc/net/route", encoding="ascii") as handle:
        lines = handle.read().splitlines()[1:]
    return f"{len(lines)} routes" if lines else None


@attempt("network.add_address", "give loopback another address")
def add_address() -> str | None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as query:
        address = struct.pack("16sH2s4s8x", b"lo", socket.AF_INET, b"", socket.inet_aton("10.1.2.3"))
        fcntl.ioctl(query, _SIOCSIFADDR, address)
    return "changed an address"


@attempt("network.add_link", "add a network interface by netlink")
def add_link() -> str | None:
    name = b"attack0\x00"
    kind = struct.pack("=HH5s3x", 9, 1, b"dummy")
    attributes = struct.pack("=HH", 4 + len(name), 3) + name + struct.pack("=HH", 4 + len(kind), 18) + kind
    body = struct.pack("=BxHiII", 0, 0, 0, 0, 0) + attributes
    message = struct.pack("=IHHII", 16 + len(body), 16, 0x605, 1, 0) + body
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0) as link:
        link.settimeout(3)
        link.send(message)
        answer = link.recv(4096)
    code = -struct.unpack_from("=i", answer, 16)[0]
    if code == errno.EOPNOTSUPP:  # no such kind of interface: known only after the permission check
        return "passed the permission check for interfaces"
    if code:
        raise OSError(code, "netlink")
    return "added an interface"


@attempt("network.raw", "open a raw socket")
def raw() -> str | None:
    socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP).close()
    return "opened a raw socket"


@attempt("network.packet", "open a packet socket", also=_NO_WAY)
def packet() -> str | None:
    socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0).close()
    return "opened a packet socket"


@attempt("network.vsock", "talk to the hypervisor or to other machines over vsock", also=(*_NO_WAY, errno.ENODEV))
def vsock() -> str | None:
    channel = socket.socket(socket.AF_VSOCK, socket.SOCK_STREAM)
    channel.settimeout(3)
    try:
        channel.connect((2, 1024))
    except TimeoutError:
        return "made a vsock socket and sent a connection request to the host"
    except ConnectionResetError:
        return "the hypervisor answered a vsock connection request"
    return "connected to the host over vsock"


@attempt("network.abstract", "see abstract or platform sockets of the host", also=ABSENT)
def abstract() -> str | None:
    with open("/proc/net/unix", encoding="utf-8", errors="replace") as handle:
        named = [line.split()[7] for line in handle.read().splitlines()[1:] if len(line.split()) > 7]
    return f"sockets {named[:3]}" if named else None


@attempt("network.sockets_in_files", "find a socket of the platform in the file system")
def sockets_in_files() -> str | None:
    import stat

    for top in ("/run", "/var/run", "/tmp", "/var/lib", "/dev"):
        for directory, _, names in os.walk(top):
            for name in names:
                path = os.path.join(directory, name)
                try:
                    if stat.S_ISSOCK(os.lstat(path).st_mode):
                        return f"{path} is a socket"
                except OSError:
                    continue
    return None
