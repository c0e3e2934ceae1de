"""New namespaces, and joining those of others."""

from __future__ import annotations

import errno
import fcntl
import os
from functools import partial

from .core import ABSENT, attempt, call, each, libc

PREFIX = "namespace"

_KINDS = {
    "mnt": 0x00020000, "cgroup": 0x02000000, "uts": 0x04000000, "ipc": 0x08000000,
    "user": 0x10000000, "pid": 0x20000000, "net": 0x40000000, "time": 0x80,
}  # fmt: skip
_CLONE, _UNSHARE, _SETNS, _PIDFD_OPEN, _CLONE3 = 56, 272, 308, 434, 435
_SIGCHLD = 17
_NS_GET_USERNS, _NS_GET_PARENT = 0xB701, 0xB702


@each("namespace.unshare", "unshare a {} namespace", _KINDS)
def unshare(flag: int) -> str | None:
    call(_UNSHARE, flag)
    return "got a namespace of its own"


@each(
    "namespace.clone", "clone into a new {} namespace", {name: flag for name, flag in _KINDS.items() if name != "time"}
)
def clone(flag: int) -> str | None:
    pid = call(_CLONE, flag | _SIGCHLD, 0, 0, 0, 0)
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    return "a child lives in a namespace of its own"


@attempt("namespace.clone3", "clone3 with CLONE_NEWUSER (a filter cannot see its flags)")
def clone3() -> str | None:
    arguments = bytearray(88)
    arguments[0:8] = (0x10000000).to_bytes(8, "little")
    arguments[32:40] = _SIGCHLD.to_bytes(8, "little")
    pid = call(_CLONE3, bytes(arguments), 88)
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    return "a child lives in a user namespace"


def _join(path: str) -> str | None:
    descriptor = os.open(path, os.O_RDONLY)
    own = path.replace("/proc/1/", "/proc/self/")
    if os.fstat(descriptor).st_ino == os.stat(own).st_ino:
        return None  # PID 1's namespace is the sandbox's own: nothing to gain
    call(_SETNS, descriptor, 0)
    return f"joined {path}"


for _kind in ("mnt", "cgroup", "uts", "ipc", "user", "pid", "net"):
    attempt(f"namespace.setns_{_kind}", f"join /proc/1/ns/{_kind}", also=(*ABSENT, errno.EINVAL))(
        partial(_join, f"/proc/1/ns/{_kind}")
    )


@attempt("namespace.setns_pidfd", "join every namespace of PID 1 through a pidfd")
def setns_pidfd() -> str | None:
    descriptor = call(_PIDFD_OPEN, 1, 0)
    call(_SETNS, descriptor, _KINDS["mnt"] | _KINDS["net"] | _KINDS["pid"])
    return "joined the namespaces of PID 1"


@attempt("namespace.parent_user", "get the parent user namespace through NS_GET_PARENT", also=(errno.ENOTTY,))
def parent_user() -> str | None:
    parent = fcntl.ioctl(os.open("/proc/self/ns/user", os.O_RDONLY), _NS_GET_PARENT)
    call(_SETNS, parent, 0)
    return "joined the parent user namespace"


@attempt("namespace.owner_of_net", "get the user namespace that owns the network", also=(errno.ENOTTY, errno.EINVAL))
def owner_of_net() -> str | None:
    owner = fcntl.ioctl(os.open("/proc/self/ns/net", os.O_RDONLY), _NS_GET_USERNS)
    call(_SETNS, owner, 0)
    return "joined the owner of the network namespace"


@attempt("namespace.uid_map", "map more ids into the sandbox", also=(errno.EINVAL,))
def uid_map() -> str | None:
    with open("/proc/self/uid_map", "w", encoding="ascii") as handle:
        handle.write("0 0 1\n")
    return "wrote a new id map"


@attempt("namespace.unmapped_uid", "become a user id of the host", also=(errno.EINVAL,))
def unmapped_uid() -> str | None:
    if libc.setresuid(200_000, 200_000, 200_000) != 0:
        import ctypes

        raise OSError(ctypes.get_errno(), "setresuid")
    return "became uid 200000"
