"""Giving privilege away for good: what a process does not need cannot be taken from it."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Collection

_PR_CAPBSET_DROP = 24
_PR_SET_NO_NEW_PRIVS = 38
_PR_CAP_AMBIENT = 47
_PR_CAP_AMBIENT_CLEAR_ALL = 4
_CAPABILITY_VERSION_3 = 0x20080522


class _Header(ctypes.Structure):
    _fields_ = [("version", ctypes.c_uint32), ("pid", ctypes.c_int)]


class _Sets(ctypes.Structure):
    _fields_ = [("effective", ctypes.c_uint32), ("permitted", ctypes.c_uint32), ("inheritable", ctypes.c_uint32)]


def keep_capabilities(kept: Collection[int] = ()) -> None:
    """Drops every capability but `kept` (numbers of linux/capability.h) from all sets of the calling thread, for good.

    Call it before other threads exist: each thread has sets of its own. OSError when the kernel refuses.
    """
    libc = ctypes.CDLL(None, use_errno=True)

    def check(result: int) -> None:
        if result != 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))

    with open("/proc/sys/kernel/cap_last_cap", encoding="ascii") as file:
        last = int(file.read())
    bounding = _bounding_set()
    for capability in range(last + 1):
        if capability not in kept and bounding >> capability & 1:
            check(libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0))
    check(libc.prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0))
    mask = sum(1 << capability for capability in kept)
    sets = (_Sets * 2)(
        _Sets(mask & 0xFFFFFFFF, mask & 0xFFFFFFFF, 0),
        _Sets(mask >> 32, mask >> 32, 0),
    )
    check(libc.capset(ctypes.byref(_Header(_CAPABILITY_VERSION_3, 0)), sets))
    check(libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))


def _bounding_set() -> int:
    with open("/proc/thread-self/status", encoding="ascii") as status:
        return next(int(line.split()[1], 16) for line in status if line.startswith("CapBnd:"))
