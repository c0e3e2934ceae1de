"""A restarted edge takes over what an earlier one left: sandboxes go on, with their clocks, names, places and counters.

What is in the journal and lives is adopted by pid and start time. What is in the journal and does not live ends by name; what
was being removed is removed; what lives and is not in the journal was never answered for, and goes.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from dsec.layers import Environment, LayerStore, Manifest
from dsec.protocol.errors import Fault
from dsec.protocol.specs import Reason, State

from .journal import Record
from .sandbox import Sandbox

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def boot_id() -> str:
    """Another after each start of the machine."""
    return _BOOT_ID.read_text().strip()


def record_of(sandbox: Sandbox, boot: str) -> Record:
    """What another edge needs to know to take this sandbox over."""
    return Record(
        id=sandbox.id,
        state=State.RUNNING,
        created_at=sandbox.created_at,
        incarnation=sandbox.incarnation,
        args=sandbox.args,
        layers=sandbox.layers,
        pid=sandbox.pid,
        start=sandbox.start,
        boot=boot,
        born=sandbox.born_at,
        idle_limit=sandbox.idle_limit,
        total_limit=sandbox.total_limit,
        oom_kills=sandbox.oom_kills,
        hosts=sandbox.hosts,
        job=sandbox.job,
        sealed=sandbox.sealed,
    )


def ended_with_the_node(record: Record, boot: str) -> tuple[Reason, str] | None:
    """Why a sandbox that the journal calls alive cannot be, whatever runs now under its number; None: it may."""
    if record.boot == boot:
        return None
    if not record.boot:
        return Reason.EDGE_RESTART, "the edge was restarted"
    return Reason.NODE_LOST, "the machine was restarted"


def open_process(pid: int, start: int) -> int:
    """A pidfd of the process that started then; -1 when it has ended. start: clock ticks since boot."""
    try:
        pidfd = os.pidfd_open(pid)
    except OSError:
        return -1
    if _start_time(pid) == start:  # read after the pidfd is there: so it is of this one
        return pidfd
    os.close(pidfd)
    return -1


def _start_time(pid: int) -> int | None:
    try:
        with open(f"/proc/{pid}/stat", encoding="latin-1") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in ("Z", "X") else int(fields[19])


class Revival:
    """Makes sandboxes of records; each layer is looked up once."""

    def __init__(self, store: LayerStore, epoch: int) -> None:
        self._store = store
        self._epoch = epoch
        self._manifests: dict[str, Manifest | None] = {}

    def sandbox(self, record: Record, holder: str, socket: Path) -> Sandbox:
        """As the earlier edge had it. pidfd is -1 when PID 1 has ended meanwhile. Idleness is counted from now."""
        sandbox = Sandbox(
            record.id, record.args, self._environment(record), record.incarnation, holder, self._epoch, record.job
        )
        sandbox.layers = record.layers
        sandbox.created_at, sandbox.born_at = record.created_at, record.born
        sandbox.idle_limit, sandbox.total_limit = record.idle_limit, record.total_limit
        sandbox.oom_kills, sandbox.hosts = record.oom_kills, record.hosts
        sandbox.sealed = record.sealed
        sandbox.state = State.PAUSED if record.state is State.PAUSED else State.RUNNING
        sandbox.born(record.pid, record.start, open_process(record.pid, record.start), socket)
        sandbox.settled.set()
        sandbox.log(
            f"taken over by the edge's start {self._epoch}, {time.time() - record.created_at:.0f} s after creation"
        )
        return sandbox

    def _environment(self, record: Record) -> Environment:
        """Its layers, as far as the store still has them: a mount outlives its files, so the sandbox lives either way."""
        found = [manifest for ref in record.layers if (manifest := self._manifest(ref)) is not None]
        return Environment(layers=tuple(found), env={}, workdir=None, user=None)

    def _manifest(self, ref: str) -> Manifest | None:
        if ref not in self._manifests:
            try:
                self._manifests[ref] = self._store.resolve(ref)
            except Fault:
                self._manifests[ref] = None
        return self._manifests[ref]
