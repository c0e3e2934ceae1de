"""System calls that Python's library does not offer, through libc's `syscall` and `mount`. x86-64 and arm64 numbers."""

from __future__ import annotations

import ctypes
import os
import platform

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long

CLONE_NEWNS = 0x00020000
CLONE_NEWCGROUP = 0x02000000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000
CLONE_INTO_CGROUP = 0x200000000

MS_RDONLY = 1
MS_NOSUID = 2
MS_NODEV = 4
MS_REC = 0x4000
MS_PRIVATE = 1 << 18
MNT_DETACH = 2

# These came after the tables of the architectures were unified: one number everywhere.
_PIDFD_SEND_SIGNAL = 424
_OPEN_TREE = 428
_MOVE_MOUNT = 429
_CLONE3 = 435
_MOUNT_SETATTR = 442
_SECCOMP = 277 if platform.machine() == "aarch64" else 317

OPEN_TREE_CLONE = 1
OPEN_TREE_CLOEXEC = os.O_CLOEXEC
AT_EMPTY_PATH = 0x1000
AT_RECURSIVE = 0x8000
MOVE_MOUNT_F_EMPTY_PATH = 4
MOUNT_ATTR_IDMAP = 0x00100000


def _checked(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def _call(what: str, number: int, *arguments: int | bytes | ctypes.Structure | None) -> int:
    converted = [ctypes.c_long(a) if isinstance(a, int) else (ctypes.byref(a) if isinstance(a, ctypes.Structure) else a)
                 for a in arguments]  # fmt: skip
    return _checked(_libc.syscall(ctypes.c_long(number), *converted), what)


def raw(number: int) -> int:
    """A system call by its number, without arguments."""
    return _call(f"system call {number}", number)


def unshare(flags: int) -> None:
    _checked(_libc.unshare(ctypes.c_int(flags)), "unshare")


def mount(source: str, target: str, kind: str | None, flags: int = 0, data: str = "") -> None:
    encoded = (source.encode(), target.encode(), kind.encode() if kind else None, ctypes.c_ulong(flags), data.encode())
    _checked(_libc.mount(*encoded), f"mount {kind or 'flags'} on {target}")


def umount(target: str, flags: int = 0) -> None:
    _checked(_libc.umount2(target.encode(), ctypes.c_int(flags)), f"umount {target}")


def open_tree(path: str, flags: int) -> int:
    return _call("open_tree", _OPEN_TREE, -100, path.encode(), flags)


def move_mount(descriptor: int, target: str) -> None:
    _call("move_mount", _MOVE_MOUNT, descriptor, b"", -100, target.encode(), MOVE_MOUNT_F_EMPTY_PATH)


class _MountAttr(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in ("attr_set", "attr_clr", "propagation", "userns_fd")]


def set_idmap(mount_descriptor: int, user_namespace: int) -> None:
    attributes = _MountAttr(MOUNT_ATTR_IDMAP, 0, 0, user_namespace)
    _call("mount_setattr", _MOUNT_SETATTR, mount_descriptor, b"", AT_EMPTY_PATH, attributes, ctypes.sizeof(attributes))


class _CloneArgs(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_uint64)
        for name in ("flags", "pidfd", "child_tid", "parent_tid", "exit_signal", "stack", "stack_size", "tls", "set_tid",
                     "set_tid_size", "cgroup")
    ]  # fmt: skip


def clone3(flags: int, *, cgroup: int = 0) -> int:
    """As fork: 0 in the child. Only for a process with one thread; the child must leave by os._exit."""
    arguments = _CloneArgs(flags=flags, exit_signal=17, cgroup=cgroup)
    return _call("clone3", _CLONE3, arguments, ctypes.sizeof(arguments))


def pidfd_send_signal(pidfd: int, signal: int) -> None:
    _call("pidfd_send_signal", _PIDFD_SEND_SIGNAL, pidfd, signal, None, 0)


def prctl(option: int, *arguments: int) -> int:
    padded = [ctypes.c_ulong(a) for a in (*arguments, 0, 0, 0, 0)[:4]]
    return _checked(_libc.prctl(ctypes.c_int(option), *padded), f"prctl {option}")


class _Filter(ctypes.Structure):
    _fields_ = [("code", ctypes.c_uint16), ("jt", ctypes.c_uint8), ("jf", ctypes.c_uint8), ("k", ctypes.c_uint32)]


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_uint16), ("filter", ctypes.POINTER(_Filter))]


def seccomp_refuse(syscall_number: int, error: int) -> None:
    """Make one system call fail with `error` in this process for good (no_new_privs must be set)."""
    code = [(0x20, 0, 0, 0), (0x15, 0, 1, syscall_number), (0x06, 0, 0, 0x00050000 | error), (0x06, 0, 0, 0x7FFF0000)]
    filters = (_Filter * len(code))(*(_Filter(*one) for one in code))
    program = _Program(len(code), ctypes.cast(filters, ctypes.POINTER(_Filter)))
    _call("seccomp", _SECCOMP, 1, 0, program)
