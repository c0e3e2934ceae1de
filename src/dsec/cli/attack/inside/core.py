"""An attempt: a function that tries one way out. Returning a string means that it worked, and says how."""

from __future__ import annotations

import ctypes
import errno
import json
import os
import select
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long

DEADLINE_S = 15.0
# What the kernel says when a rule refuses: no permission, or a filter that hides the call.
RULES = (errno.EPERM, errno.EACCES, errno.ENOSYS, errno.EROFS)
# Where the way in is not there at all.
ABSENT = (errno.ENOENT, errno.ENOTDIR, errno.ENXIO, errno.ENODEV)

Function = Callable[[], str | None]


class Attempt(NamedTuple):
    """refusals: error numbers that count as blocked; any other error makes the attempt `unclear`, which is a failure."""

    name: str
    what: str
    refusals: tuple[int, ...]
    run: Function


ALL: list[Attempt] = []


def attempt(name: str, what: str, *, also: tuple[int, ...] = ()) -> Callable[[Function], Function]:
    """Register a function. It returns None (nothing gained), a string (what was gained), or raises OSError (refused)."""

    def register(function: Function) -> Function:
        ALL.append(Attempt(name, what, RULES + also, function))
        return function

    return register


def each(
    name: str, what: str, values: dict[str, int], *, also: tuple[int, ...] = ()
) -> Callable[[Callable[[int], str | None]], None]:
    """Register one function once per value: `name.key`, with `{}` in `what` filled in."""

    def register(function: Callable[[int], str | None]) -> None:
        for key, value in values.items():
            ALL.append(Attempt(f"{name}.{key}", what.format(key), RULES + also, partial(function, value)))

    return register


def call(number: int, *arguments: int | bytes | ctypes.Array[ctypes.c_char] | ctypes.Structure | None) -> int:
    """A raw system call; raises OSError with its error."""
    converted: list[object] = []
    for one in arguments:
        if isinstance(one, int):
            converted.append(ctypes.c_long(one))
        elif isinstance(one, ctypes.Structure):
            converted.append(ctypes.byref(one))
        else:
            converted.append(one)
    ctypes.set_errno(0)
    result = int(libc.syscall(ctypes.c_long(number), *converted))
    if result == -1:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result


def permitted_but(number: int, *arguments: int | bytes | None, invalid: tuple[int, ...]) -> str | None:
    """A call with arguments that are refused as invalid only after the permission was checked: such an error is a success."""
    try:
        call(number, *arguments)
    except OSError as error:
        if error.errno in invalid:
            return f"passed the permission check (then {errno.errorcode.get(error.errno or 0)})"
        raise
    return "the call succeeded"


def is_null_device(descriptor: int) -> bool:
    """Masked files are bound to /dev/null: opening them gains nothing."""
    status = os.fstat(descriptor)
    return status.st_rdev == os.makedev(1, 3)


def opened(path: str, flags: int) -> str | None:
    """Open without reading or writing; None when what opened is a mask."""
    descriptor = os.open(path, flags)
    try:
        return None if is_null_device(descriptor) else f"opened {path}"
    finally:
        os.close(descriptor)


def readable(path: str) -> str | None:
    """Read a little; empty is a mask."""
    with open(path, "rb", buffering=0) as handle:
        data = handle.read(64)
    return f"read {len(data)} bytes of {path}" if data else None


def run_all(chosen: list[str]) -> None:
    """Each attempt in a child of its own; one JSON line each: name, what, verdict (blocked, ESCAPED, unclear), detail."""
    for one in ALL:
        if chosen and one.name not in chosen:
            continue
        verdict, detail = _isolated(one)
        print(json.dumps({"name": one.name, "what": one.what, "verdict": verdict, "detail": detail}), flush=True)


def _isolated(one: Attempt) -> tuple[str, str]:
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reader)
        os.write(writer, json.dumps(_verdict(one)).encode())
        os._exit(0)
    os.close(writer)
    answer = _read_all(reader, time.monotonic() + DEADLINE_S)
    os.close(reader)
    if answer is None:
        os.kill(pid, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if answer is None:
        return "unclear", f"no end within {DEADLINE_S:.0f} s"
    if answer:
        verdict, detail = json.loads(answer)
        return verdict, detail
    if code == -signal.SIGSYS:
        return "blocked", "killed by the system call filter"
    return "unclear", f"the attempt's process ended with {code}"


def _verdict(one: Attempt) -> tuple[str, str]:
    try:
        gained = one.run()
    except OSError as error:
        name = errno.errorcode.get(error.errno or 0, str(error.errno))
        return ("blocked" if error.errno in one.refusals else "unclear"), name
    except Exception as error:  # noqa: BLE001 - the outermost frame of this process
        return "unclear", f"the attempt is wrong: {type(error).__name__}: {error}"
    return ("ESCAPED", gained) if gained else ("blocked", "nothing gained")


def _read_all(reader: int, deadline: float) -> bytes | None:
    parts: list[bytes] = []
    while True:
        ready, _, _ = select.select([reader], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            return None
        part = os.read(reader, 65_536)
        if not part:
            return b"".join(parts)
        parts.append(part)


def fail(message: str) -> None:
    sys.exit(f"battery: {message}")
