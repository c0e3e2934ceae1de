"""What the process is: capabilities, filters, inherited descriptors, ways to more."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import tempfile

from .core import attempt, call

PREFIX = "identity"

# CHOWN, DAC_OVERRIDE, FOWNER, FSETID, KILL, SETGID, SETUID, NET_BIND_SERVICE, SYS_CHROOT
_ALLOWED = {0, 1, 3, 4, 5, 6, 7, 10, 18}
_CAPSET = 126
# Looked at before the battery opens anything.
_AT_START = sorted(int(name) for name in os.listdir("/proc/self/fd") if os.path.lexists(f"/proc/self/fd/{name}"))


def _status(name: str) -> str:
    with open("/proc/self/status", encoding="utf-8") as handle:
        for line in handle:
            if line.startswith(f"{name}:"):
                return line.split()[1]
    return ""


@attempt("identity.capabilities", "hold a capability that a command must not have")
def capabilities() -> str | None:
    for kind in ("CapEff", "CapPrm", "CapBnd", "CapAmb", "CapInh"):
        held = int(_status(kind), 16)
        extra = [bit for bit in range(64) if held >> bit & 1 and bit not in _ALLOWED]
        if extra:
            return f"{kind} has the bits {extra}"
    return None


@attempt("identity.capset", "give oneself CAP_SYS_ADMIN")
def capset() -> str | None:
    header = (0x20080522).to_bytes(4, "little") + bytes(4)
    everything = (0xFFFFFFFF).to_bytes(4, "little")
    call(_CAPSET, header, everything * 2 + bytes(4) + everything * 2 + bytes(4))
    return "has every capability"


@attempt("identity.no_new_privs", "run without no_new_privs or without a filter")
def no_new_privs() -> str | None:
    if _status("NoNewPrivs") != "1":
        return "no_new_privs is off"
    return None if _status("Seccomp") == "2" else "no system call filter"


@attempt("identity.setuid_program", "become root again through a setuid program", also=(errno.ENOENT,))
def setuid_program() -> str | None:
    path = tempfile.mktemp(prefix="attack-", dir="/tmp")
    shutil.copy(shutil.which("id") or "/usr/bin/id", path)
    os.chown(path, 0, 0)
    os.chmod(path, 0o4755)
    try:
        answer = subprocess.run([path, "-u"], user=65_534, group=65_534, capture_output=True, text=True, check=False)
    finally:
        os.unlink(path)
    return "a setuid program ran as root" if answer.stdout.strip() == "0" else None


@attempt("identity.file_capability", "give a program a file capability", also=(errno.EOPNOTSUPP,))
def file_capability() -> str | None:
    handle, path = tempfile.mkstemp(prefix="attack-")
    os.close(handle)
    try:
        os.setxattr(path, "security.capability", bytes.fromhex("0100000200002000" + "00" * 12))
    finally:
        os.unlink(path)
    return "set a file capability"


@attempt("identity.descriptors", "use an inherited descriptor")
def descriptors() -> str | None:
    inherited = [number for number in _AT_START if number > 2]
    return f"descriptors {inherited} are open" if inherited else None


@attempt("identity.standard_descriptors", "walk out through a standard descriptor", also=(errno.ENOTDIR, errno.EINVAL))
def standard_descriptors() -> str | None:
    for number in (0, 1, 2):
        os.fchdir(number)
        return f"descriptor {number} is a directory"
    return None


@attempt("identity.environment", "find a key or a path of the platform in the environment")
def environment() -> str | None:
    found = [
        name for name in os.environ if name.startswith("DSEC_") and name not in ("DSEC_SANDBOX", "DSEC_SANDBOX_ID")
    ]
    return f"found {', '.join(found)}" if found else None
