"""Forked children that report one line, and user namespaces with a mapping, for probes that change their process."""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import msgspec

from dsec.backends.probe import syscalls
from dsec.backends.probe.model import Finding

ID_BASE = 100_000
ID_COUNT = 65_536
_CHILD_DEADLINE_S = 20.0


def in_child(work: Callable[[], Finding]) -> Finding:
    """Run `work` in a forked child; its finding, or what it died of. The child's namespaces die with it."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reader)
        _report(work, writer)
    os.close(writer)
    try:
        text = _read_until_end(reader)
    finally:
        os.close(reader)
    if text is None:
        os.kill(pid, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if text is None:
        return Finding(False, f"no answer within {_CHILD_DEADLINE_S:.0f} s")
    if not text:
        return Finding(False, f"the probe's process ended with {status}")
    return msgspec.json.decode(text, type=Finding)


def _report(work: Callable[[], Finding], writer: int) -> None:
    try:
        finding = work()
    except OSError as error:
        finding = Finding(False, error.strerror or str(error))
    except Exception as error:  # noqa: BLE001 - the outermost frame of this process: nothing may run on as a second parent
        finding = Finding(False, f"the probe is wrong: {type(error).__name__}: {error}")
    os.write(writer, msgspec.json.encode(finding))
    os._exit(0)


def _read_until_end(reader: int) -> bytes | None:
    """What was written until the last writer closed; None when that takes too long."""
    parts: list[bytes] = []
    deadline = time.monotonic() + _CHILD_DEADLINE_S
    while True:
        ready, _, _ = select.select([reader], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            return None
        part = os.read(reader, 4096)
        if not part:
            return b"".join(parts)
        parts.append(part)


def private_mounts() -> None:
    """A mount namespace of our own: whatever is mounted from here on is gone with this process."""
    syscalls.unshare(syscalls.CLONE_NEWNS)
    syscalls.mount("none", "/", None, syscalls.MS_REC | syscalls.MS_PRIVATE)


@contextmanager
def mapped_user_namespace(extra_flags: int = 0) -> Iterator[tuple[int, int]]:
    """A waiting child in a user namespace 0 -> ID_BASE; yields (its pid, a descriptor of the namespace)."""
    ready_r, ready_w = os.pipe()
    hold_r, hold_w = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(hold_w)
        try:
            syscalls.unshare(syscalls.CLONE_NEWUSER | extra_flags)
            os.write(ready_w, b"1")
            os.read(hold_r, 1)
        except OSError as error:
            os.write(ready_w, b"0" + str(error).encode())
        os._exit(0)
    os.close(ready_w)
    os.close(hold_r)
    try:
        answer = os.read(ready_r, 4096)
        if answer[:1] != b"1":
            raise OSError(0, answer[1:].decode() or "no user namespace")
        write_id_maps(pid)
        namespace = os.open(f"/proc/{pid}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
        try:
            yield pid, namespace
        finally:
            os.close(namespace)
    finally:
        os.close(ready_r)
        os.close(hold_w)
        os.waitpid(pid, 0)


def write_id_maps(pid: int) -> None:
    for name in ("uid_map", "gid_map"):
        with open(f"/proc/{pid}/{name}", "w", encoding="ascii") as handle:
            handle.write(f"0 {ID_BASE} {ID_COUNT}\n")
