"""Turns at the processor: the platform's processes get theirs before programs that compute for hours."""

from __future__ import annotations

import ctypes
import os
import struct
from contextlib import suppress
from pathlib import Path

_SYS_SCHED_SETATTR = 314  # x86-64
_RESET_ON_FORK = 1
SLICE_NS = 100_000
NICE = -5


def prefer_this_process() -> bool:
    """Short time slices, and so early turns (Linux 6.12), and a better nice value, for this thread and none of its children.

    A request passes four processes; beside a program that computes, each of them would wait milliseconds for its turn.
    Call it before privileges are dropped; False when they did not suffice, which only costs latency.
    """
    attributes = struct.pack("=IIQiIQQQ", 48, 0, _RESET_ON_FORK, NICE, 0, SLICE_NS, 0, 0)
    buffer = ctypes.create_string_buffer(attributes, len(attributes))
    done: int = ctypes.CDLL(None, use_errno=True).syscall(_SYS_SCHED_SETATTR, 0, buffer, 0)
    if os.getsid(0) == os.getpid():  # where the kernel groups sessions, it is the group that has a turn
        with suppress(OSError):
            Path("/proc/self/autogroup").write_text(str(NICE), encoding="ascii")
    return done == 0
