"""PID 1: tracing, reading, signalling, limiting and starving the process that serves the sandbox."""

from __future__ import annotations

import ctypes
import errno
import os
import signal
from functools import partial

from .core import attempt, call, each, libc, permitted_but

PREFIX = "agent"

_PTRACE, _PRLIMIT, _SETPRIORITY, _IOPRIO_SET = 101, 302, 141, 251
_SCHED_SETPARAM, _SCHED_SETSCHEDULER, _SCHED_SETAFFINITY, _SCHED_SETATTR = 142, 144, 203, 314
_VM_READ, _VM_WRITE, _KCMP, _MIGRATE_PAGES, _MOVE_PAGES, _ROBUST_LIST = 310, 311, 312, 256, 279, 274
_PERF, _PIDFD_OPEN, _PIDFD_GETFD, _PROCESS_MADVISE, _MRELEASE, _PIDFD_SIGNAL = 298, 434, 438, 440, 448, 424
_TGKILL, _SIGQUEUE = 234, 129


@each("agent.ptrace", "trace PID 1 ({})", {"attach": 16, "seize": 0x4206})
def ptrace(request: int) -> str | None:
    call(_PTRACE, request, 1, 0, 0)
    return "traces PID 1"


def _read_link(name: str) -> str | None:
    return f"-> {os.readlink(f'/proc/1/{name}')}"


def _list(name: str) -> str | None:
    return f"lists {len(os.listdir(f'/proc/1/{name}'))} entries"


def _read(name: str) -> str | None:
    with open(f"/proc/1/{name}", "rb", buffering=0) as handle:
        data = handle.read(64)
    return f"read {len(data)} bytes" if data else None


for _name in ("mem", "maps", "environ", "auxv", "stack", "syscall", "io", "smaps", "pagemap", "personality", "timers"):
    attempt(f"agent.read_{_name}", f"read /proc/1/{_name}", also=(errno.ENOENT, errno.EIO))(partial(_read, _name))
for _name in ("exe", "root", "cwd"):
    attempt(f"agent.link_{_name}", f"follow /proc/1/{_name}", also=(errno.ENOENT,))(partial(_read_link, _name))
for _name in ("fd", "fdinfo", "map_files", "root", "cwd", "task/1/fd"):
    attempt(f"agent.list_{_name.replace('/', '_')}", f"list /proc/1/{_name}", also=(errno.ENOENT,))(
        partial(_list, _name)
    )


@attempt("agent.write_mem", "write the memory of PID 1")
def write_mem() -> str | None:
    os.open("/proc/1/mem", os.O_RDWR)
    return "opened the memory of PID 1 for writing"


@attempt(
    "agent.overwrite_binary", "overwrite the platform's binary through /proc/1/exe", also=(errno.ETXTBSY, errno.ENOENT)
)
def overwrite_binary() -> str | None:
    os.open("/proc/1/exe", os.O_WRONLY)
    return "opened the platform's binary for writing"


@each("agent.proc_write", "write /proc/1/{}", {"oom_score_adj": 0, "coredump_filter": 1, "clear_refs": 2, "autogroup": 3,
                                               "comm": 4, "setgroups": 5}, also=(errno.ENOENT,))  # fmt: skip
def proc_write(which: int) -> str | None:
    name = ("oom_score_adj", "coredump_filter", "clear_refs", "autogroup", "comm", "setgroups")[which]
    os.open(f"/proc/1/{name}", os.O_WRONLY)
    return f"opened /proc/1/{name} for writing"


@each("agent.prlimit", "limit PID 1's {} with prlimit", {"cpu": 0, "fsize": 1, "nofile": 7, "as": 9, "core": 4})
def prlimit(resource: int) -> str | None:
    old = ctypes.create_string_buffer(16)
    call(_PRLIMIT, 1, resource, None, old)
    call(_PRLIMIT, 1, resource, old, None)
    return "set a limit of PID 1"


@each("agent.prlimit_read", "read PID 1's {} limit with prlimit", {"nofile": 7})
def prlimit_read(resource: int) -> str | None:
    call(_PRLIMIT, 1, resource, None, ctypes.create_string_buffer(16))
    return "read a limit of PID 1"


_TARGETS = {"process": 0, "group": 1, "user": 2}


def _who(which: int) -> int:
    return {0: 1, 1: _group_of_agent(), 2: 0}[which]


def _group_of_agent() -> int:
    try:
        return os.getpgid(1) or 1
    except OSError:
        return 1


def _nice_of_agent() -> int:
    """From /proc, so that the attempt sets what is there already."""
    with open("/proc/1/stat", encoding="utf-8", errors="replace") as handle:
        return int(handle.read().rpartition(")")[2].split()[16])


@each("agent.setpriority", "change PID 1's nice value, addressed by {}", _TARGETS, also=(errno.ESRCH,))
def setpriority(which: int) -> str | None:
    before = _nice_of_agent()
    call(_SETPRIORITY, which, _who(which), 19 if which == 2 else before)
    if which == 2 and _nice_of_agent() == before:
        return None  # a user's processes were changed, but PID 1 was not
    return "set PID 1's nice value"


# Class 2 (best effort) level 4 is what a process has that never asked.
@each(
    "agent.ioprio",
    "change PID 1's I/O priority, addressed by {}",
    {"process": 1, "group": 2, "user": 3},
    also=(errno.ESRCH,),
)
def ioprio(which: int) -> str | None:
    call(_IOPRIO_SET, which, _who(which - 1), 2 << 13 | 4)
    return "set PID 1's I/O priority"


@attempt("agent.affinity", "pin PID 1 to one processor")
def affinity() -> str | None:
    call(_SCHED_SETAFFINITY, 1, 8, (0xFFFFFFFF).to_bytes(8, "little"))
    return "set PID 1's affinity"


@attempt("agent.scheduler", "make PID 1 idle class with sched_setscheduler")
def scheduler() -> str | None:
    call(_SCHED_SETSCHEDULER, 1, 0, (0).to_bytes(4, "little"))
    return "set PID 1's scheduler"


@attempt("agent.sched_param", "set PID 1's scheduling parameters")
def sched_param() -> str | None:
    call(_SCHED_SETPARAM, 1, (0).to_bytes(4, "little"))
    return "set PID 1's parameters"


@attempt("agent.sched_attr", "set PID 1's scheduling attributes with sched_setattr")
def sched_attr() -> str | None:
    attributes = bytearray(48)
    attributes[0:4] = (48).to_bytes(4, "little")
    call(_SCHED_SETATTR, 1, bytes(attributes), 0)
    return "set PID 1's attributes"


@attempt("agent.realtime", "become a real-time process and starve PID 1")
def realtime() -> str | None:
    call(_SCHED_SETSCHEDULER, 0, 1, (1).to_bytes(4, "little"))
    return "runs as SCHED_FIFO"


@attempt("agent.nice", "raise one's own priority above PID 1's")
def nice() -> str | None:
    os.setpriority(os.PRIO_PROCESS, 0, -20)
    return "runs at nice -20"


def _vectors() -> tuple[bytes, ctypes.Array[ctypes.c_char]]:
    """(iovec of ours, the buffer it points to): eight bytes."""
    buffer = ctypes.create_string_buffer(8)
    return ctypes.addressof(buffer).to_bytes(8, "little") + (8).to_bytes(8, "little"), buffer


@each("agent.vm", "process_vm_{} on PID 1", {"readv": _VM_READ, "writev": _VM_WRITE})
def vm(number: int) -> str | None:
    local, _buffer = _vectors()
    remote = (0x400000).to_bytes(8, "little") + (8).to_bytes(8, "little")
    return permitted_but(number, 1, local, 1, remote, 1, 0, invalid=(errno.EFAULT,))


def _pidfd() -> int:
    return call(_PIDFD_OPEN, 1, 0)


@attempt("agent.pidfd_getfd", "take a descriptor of PID 1")
def pidfd_getfd() -> str | None:
    handle = _pidfd()
    return permitted_but(_PIDFD_GETFD, handle, 3, 0, invalid=(errno.EBADF,))


@attempt("agent.process_madvise", "push PID 1's memory out with process_madvise")
def process_madvise() -> str | None:
    vector = (0).to_bytes(8, "little") + (4096).to_bytes(8, "little")
    return permitted_but(_PROCESS_MADVISE, _pidfd(), vector, 1, 21, 0, invalid=(errno.ENOMEM, errno.EINVAL))


@attempt("agent.mrelease", "reap PID 1's memory with process_mrelease", also=(errno.EINVAL,))
def mrelease() -> str | None:
    call(_MRELEASE, _pidfd(), 0)
    return "released PID 1's memory"


@attempt("agent.kcmp", "compare kernel objects with PID 1 (kcmp)")
def kcmp() -> str | None:
    call(_KCMP, os.getpid(), 1, 1, 0, 0)
    return "compared address spaces"


@attempt("agent.migrate_pages", "migrate PID 1's pages")
def migrate_pages() -> str | None:
    call(_MIGRATE_PAGES, 1, 64, (1).to_bytes(8, "little"), (1).to_bytes(8, "little"))
    return "migrated pages of PID 1"


@attempt("agent.move_pages", "query and move PID 1's pages")
def move_pages() -> str | None:
    call(_MOVE_PAGES, 1, 0, None, None, None, 0)
    return "moved pages of PID 1"


@attempt("agent.robust_list", "read PID 1's robust futex list")
def robust_list() -> str | None:
    call(_ROBUST_LIST, 1, ctypes.create_string_buffer(8), ctypes.create_string_buffer(8))
    return "read an address of PID 1"


@attempt("agent.perf", "sample PID 1 with perf_event_open")
def perf() -> str | None:
    attributes = bytearray(128)
    attributes[0:8] = (1).to_bytes(4, "little") + (128).to_bytes(4, "little")
    call(_PERF, bytes(attributes), 1, -1, -1, 0)
    return "samples PID 1"


def _harmed() -> str | None:
    with open("/proc/1/stat", encoding="utf-8", errors="replace") as handle:
        state = handle.read().rpartition(")")[2].split()[0]
    return f"PID 1 is in state {state}" if state in ("T", "t", "Z", "X") else None


@attempt("agent.kill", "kill -9 1", also=(errno.ESRCH,))
def kill() -> str | None:
    os.kill(1, signal.SIGKILL)
    return _harmed()


@attempt("agent.stop", "kill -STOP 1", also=(errno.ESRCH,))
def stop() -> str | None:
    os.kill(1, signal.SIGSTOP)
    return _harmed()


@attempt("agent.every_signal", "send PID 1 every signal there is, real-time ones too", also=(errno.ESRCH,))
def every_signal() -> str | None:
    for number in range(1, 65):
        if libc.kill(1, number) != 0 and ctypes.get_errno() not in (errno.EPERM, errno.EINVAL):
            raise OSError(ctypes.get_errno(), "kill")
    return _harmed()


@attempt("agent.tgkill", "SIGSEGV to PID 1's thread", also=(errno.ESRCH,))
def tgkill() -> str | None:
    call(_TGKILL, 1, 1, signal.SIGSEGV)
    return _harmed()


@attempt("agent.forged_signal", "a signal with a forged sender (rt_sigqueueinfo, SI_KERNEL)", also=(errno.ESRCH,))
def forged_signal() -> str | None:
    information = bytearray(128)
    information[0:4] = int(signal.SIGTERM).to_bytes(4, "little")
    information[8:12] = (0x80).to_bytes(4, "little")
    call(_SIGQUEUE, 1, signal.SIGTERM, bytes(information))
    return "queued a signal that claims to come from the kernel"


@attempt("agent.pidfd_signal", "kill PID 1 through a pidfd", also=(errno.ESRCH,))
def pidfd_signal() -> str | None:
    call(_PIDFD_SIGNAL, _pidfd(), signal.SIGKILL, None, 0)
    return _harmed()
