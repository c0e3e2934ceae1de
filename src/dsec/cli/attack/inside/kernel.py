"""System calls that reach the whole machine, or that widen what can be attacked in the kernel."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import subprocess
import sys
import time

from .core import ABSENT, attempt, call, libc, permitted_but

PREFIX = "kernel"

_SYSLOG, _PERSONALITY, _IOPL, _IOPERM, _REBOOT = 103, 135, 172, 173, 169
_ACCT, _SETTIMEOFDAY, _SWAPON, _SWAPOFF, _SETHOSTNAME, _SETDOMAINNAME = 163, 164, 167, 168, 170, 171
_INIT_MODULE, _DELETE_MODULE, _QUOTACTL, _KEXEC, _KEXEC_FILE, _FINIT_MODULE = 175, 176, 179, 246, 320, 313
_ADD_KEY, _REQUEST_KEY, _KEYCTL, _CLOCK_SETTIME, _ADJTIMEX = 248, 249, 250, 227, 159
_PERF, _FANOTIFY, _BPF, _USERFAULTFD, _IO_URING, _PKEY_ALLOC, _LANDLOCK = 298, 300, 321, 323, 425, 330, 444
_IO_SETUP = 206
_MMAP_PAGE_ZERO = 0x0100000


@attempt("kernel.init_module", "load a kernel module from memory")
def init_module() -> str | None:
    return permitted_but(_INIT_MODULE, None, 0, b"", invalid=(errno.EFAULT, errno.EINVAL, errno.ENOEXEC))


@attempt("kernel.finit_module", "load a kernel module from a file")
def finit_module() -> str | None:
    return permitted_but(_FINIT_MODULE, -1, b"", 0, invalid=(errno.EBADF, errno.EINVAL))


@attempt("kernel.delete_module", "remove a kernel module")
def delete_module() -> str | None:
    return permitted_but(_DELETE_MODULE, b"no_such_module", 0, invalid=(errno.ENOENT,))


@attempt("kernel.kexec", "boot another kernel (kexec_load)")
def kexec() -> str | None:
    return permitted_but(_KEXEC, 0, 1 << 20, None, 0, invalid=(errno.EINVAL,))


@attempt("kernel.kexec_file", "boot another kernel (kexec_file_load)")
def kexec_file() -> str | None:
    return permitted_but(_KEXEC_FILE, -1, -1, 0, b"", 0, invalid=(errno.EBADF, errno.EINVAL))


@attempt("kernel.reboot", "reboot the machine")
def reboot() -> str | None:
    return permitted_but(_REBOOT, 0, 0, 0, None, invalid=(errno.EINVAL,))


@attempt("kernel.log", "read the kernel's log")
def log() -> str | None:
    size = call(_SYSLOG, 3, ctypes.create_string_buffer(256), 256)
    return f"read {size} bytes of the kernel's log"


@attempt("kernel.aio", "take of the machine's contexts for asynchronous input and output", also=ABSENT)
def aio() -> str | None:
    call(_IO_SETUP, 1, ctypes.create_string_buffer(8))
    return "made a context"


@attempt("kernel.swapon", "turn on swap")
def swapon() -> str | None:
    return permitted_but(_SWAPON, b"/no-such-file", 0, invalid=(errno.ENOENT,))


@attempt("kernel.swapoff", "turn off swap")
def swapoff() -> str | None:
    return permitted_but(_SWAPOFF, b"/no-such-file", invalid=(errno.ENOENT,))


@attempt("kernel.acct", "turn process accounting on")
def acct() -> str | None:
    return permitted_but(_ACCT, b"/no-such-file", invalid=(errno.ENOENT,))


@attempt("kernel.quotactl", "change disk quotas")
def quotactl() -> str | None:
    invalid = (errno.ESRCH, errno.ENOTBLK, errno.ENOENT)
    return permitted_but(_QUOTACTL, 0x800008 << 8, b"/dev/null", 0, bytes(128), invalid=invalid)


@attempt("kernel.settimeofday", "set the machine's clock")
def settimeofday() -> str | None:
    now = time.time()
    call(_SETTIMEOFDAY, int(now).to_bytes(8, "little") + int(now % 1 * 1e6).to_bytes(8, "little"), None)
    return "set the clock"


@attempt("kernel.clock_settime", "set the machine's clock (clock_settime)")
def clock_settime() -> str | None:
    now = time.time_ns()
    call(_CLOCK_SETTIME, 0, (now // 10**9).to_bytes(8, "little") + (now % 10**9).to_bytes(8, "little"))
    return "set the clock"


@attempt("kernel.adjtimex", "steer the machine's clock")
def adjtimex() -> str | None:
    request = bytearray(208)
    request[0:4] = (0x4000).to_bytes(4, "little")  # ADJ_TICK, with the usual value
    request[88:96] = (10_000).to_bytes(8, "little")
    call(_ADJTIMEX, bytes(request))
    return "steered the clock"


@attempt("kernel.sethostname", "change the host name")
def sethostname() -> str | None:
    name = os.uname().nodename.encode()
    call(_SETHOSTNAME, name, len(name))
    return "set the host name"


@attempt("kernel.setdomainname", "change the domain name")
def setdomainname() -> str | None:
    call(_SETDOMAINNAME, b"(none)", 6)
    return "set the domain name"


@attempt("kernel.iopl", "reach I/O ports (iopl)")
def iopl() -> str | None:
    call(_IOPL, 3)
    return "got all I/O ports"


@attempt("kernel.ioperm", "reach I/O ports (ioperm)")
def ioperm() -> str | None:
    call(_IOPERM, 0x80, 1, 1)
    return "got an I/O port"


@attempt("kernel.bpf_map", "create a BPF map")
def bpf_map() -> str | None:
    attributes = b"".join(value.to_bytes(4, "little") for value in (2, 4, 4, 1))
    call(_BPF, 0, attributes, len(attributes))
    return "made a BPF map"


@attempt("kernel.bpf_program", "load a BPF program")
def bpf_program() -> str | None:
    code = ctypes.create_string_buffer(b"\xb7\x00\x00\x00\x00\x00\x00\x00\x95" + bytes(7))
    licence = ctypes.create_string_buffer(b"GPL")
    attributes = (1).to_bytes(4, "little") + (2).to_bytes(4, "little")
    attributes += (
        ctypes.addressof(code).to_bytes(8, "little") + ctypes.addressof(licence).to_bytes(8, "little") + bytes(24)
    )
    call(_BPF, 5, attributes, len(attributes))
    return "loaded a BPF program"


@attempt("kernel.perf", "use performance counters")
def perf() -> str | None:
    attributes = bytearray(128)
    attributes[0:8] = (1).to_bytes(4, "little") + (128).to_bytes(4, "little")
    call(_PERF, bytes(attributes), 0, -1, -1, 0)
    return "opened a counter"


@attempt("kernel.userfaultfd", "handle page faults of the kernel (userfaultfd)")
def userfaultfd() -> str | None:
    call(_USERFAULTFD, 0)
    return "got a userfaultfd"


@attempt("kernel.io_uring", "set up io_uring")
def io_uring() -> str | None:
    call(_IO_URING, 1, ctypes.create_string_buffer(120))
    return "got an io_uring"


@attempt("kernel.fanotify", "watch the whole filesystem (fanotify)")
def fanotify() -> str | None:
    group = call(_FANOTIFY, 0x04, os.O_RDONLY)  # FAN_CLASS_CONTENT: permission events
    return f"got a fanotify group {group}"


@attempt("kernel.keyctl", "use the kernel's keyrings, which namespaces do not separate")
def keyctl() -> str | None:
    return f"got keyring {call(_KEYCTL, 0, -4, 1)}"


@attempt("kernel.add_key", "add a key")
def add_key() -> str | None:
    return f"added key {call(_ADD_KEY, b'user', b'attack', b'x', 1, -2)}"


@attempt("kernel.request_key", "make the kernel run its key helper on the host")
def request_key() -> str | None:
    return permitted_but(_REQUEST_KEY, b"user", b"attack", b"x", 0, invalid=(errno.ENOKEY, errno.ENOENT))


@attempt("kernel.page_zero", "map address zero", also=(errno.EINVAL,))
def page_zero() -> str | None:
    libc.mmap.restype = ctypes.c_void_p
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x10  # MAP_FIXED
    where = libc.mmap(ctypes.c_void_p(0), ctypes.c_size_t(4096), 3, flags, -1, ctypes.c_long(0))
    if where == ctypes.c_void_p(-1).value:
        raise OSError(ctypes.get_errno(), "mmap")
    return "mapped address zero"


@attempt("kernel.personality", "map address zero through personality(MMAP_PAGE_ZERO) and exec")
def personality() -> str | None:
    call(_PERSONALITY, _MMAP_PAGE_ZERO)
    script = "print(open('/proc/self/maps').read())"
    maps = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False).stdout
    return "address zero is mapped after exec" if maps.startswith("00000000-") else None


@attempt("kernel.mqueue", "reach message queues outside", also=ABSENT)
def mqueue() -> str | None:
    entries = os.listdir("/dev/mqueue")
    return f"queues {entries[:3]}" if entries else None
