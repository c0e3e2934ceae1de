"""Device nodes: making them, opening them, changing the ones that are shared; terminals."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import tempfile

from .core import ABSENT, attempt, each

PREFIX = "device"

_ALLOWED = {"null", "zero", "full", "random", "urandom", "tty", "ptmx", "console"}
_TIOCSTI, _TIOCLINUX = 0x5412, 0x541C


@each("device.mknod", "make and open a device node for {}", {
    "mem": os.makedev(1, 1), "kmsg": os.makedev(1, 11), "kvm": os.makedev(10, 232), "fuse": os.makedev(10, 229),
    "tun": os.makedev(10, 200), "loop_control": os.makedev(10, 237),
}, also=(errno.EINVAL,))  # fmt: skip
def mknod_character(device: int) -> str | None:
    return _make_and_open(stat.S_IFCHR, device)


@each("device.mknod_block", "make and open a block device node ({})", {
    "sda": os.makedev(8, 0), "vda": os.makedev(254, 0), "loop0": os.makedev(7, 0),
})  # fmt: skip
def mknod_block(device: int) -> str | None:
    return _make_and_open(stat.S_IFBLK, device)


def _make_and_open(kind: int, device: int) -> str | None:
    for directory in ("/", "/tmp", "/dev/shm"):
        path = tempfile.mktemp(prefix="attack-", dir=directory)
        try:
            os.mknod(path, kind | 0o600, device)
        except OSError as error:
            if error.errno == errno.ENOENT:
                continue
            raise
        try:
            os.close(os.open(path, os.O_RDONLY | os.O_NONBLOCK))
            return f"opened device {os.major(device)}:{os.minor(device)}"
        except OSError as error:
            if error.errno in ABSENT:
                return f"made a node for {os.major(device)}:{os.minor(device)}, no driver behind it"
            raise
        finally:
            os.unlink(path)
    return None


@attempt("device.listing", "find a device node that does not belong in a sandbox")
def listing() -> str | None:
    found: list[str] = []
    for directory, _, names in os.walk("/dev"):
        for name in names:
            path = os.path.join(directory, name)
            mode = os.lstat(path).st_mode
            foreign = stat.S_ISCHR(mode) and name not in _ALLOWED and not directory.startswith("/dev/pts")
            if stat.S_ISBLK(mode) or foreign:
                found.append(path)
    return f"found {', '.join(found[:5])}" if found else None


@attempt("device.mem", "open /dev/mem, /dev/kmem or /dev/port", also=ABSENT)
def mem() -> str | None:
    for name in ("mem", "kmem", "port"):
        if os.path.exists(f"/dev/{name}"):
            os.open(f"/dev/{name}", os.O_RDONLY)
            return f"opened /dev/{name}"
    return None


@attempt("device.chmod", "change the mode of the shared /dev/null")
def chmod() -> str | None:
    os.chmod("/dev/null", stat.S_IMODE(os.stat("/dev/null").st_mode))
    return "changed /dev/null"


@attempt("device.chown", "own the shared /dev/zero")
def chown() -> str | None:
    status = os.stat("/dev/zero")
    os.chown("/dev/zero", 0, 0)
    return None if status.st_uid == 0 and os.stat("/dev/zero").st_uid == 0 else "owns /dev/zero"


@attempt("device.rename", "replace the shared /dev/null by a file", also=(errno.EBUSY, errno.EXDEV))
def rename() -> str | None:
    os.rename("/dev/null", "/dev/attack-null")
    os.rename("/dev/attack-null", "/dev/null")
    return "moved /dev/null away"


@attempt("device.terminal", "reach a terminal of the host", also=ABSENT)
def terminal() -> str | None:
    if any(os.isatty(descriptor) for descriptor in (0, 1, 2)):
        return "a standard descriptor is a terminal"
    os.open("/dev/tty", os.O_RDWR)
    return "opened a controlling terminal"


@each("device.inject", "type into the caller's terminal ({})", {"TIOCSTI": _TIOCSTI, "TIOCLINUX": _TIOCLINUX},
      also=(errno.ENOTTY, errno.EIO, errno.EINVAL))  # fmt: skip
def inject(request: int) -> str | None:
    fcntl.ioctl(0, request, b"\x00")
    return "injected a character"
