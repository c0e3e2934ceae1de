"""/proc and /sys: what must be masked, what must not be writable, and whose processes are visible."""

from __future__ import annotations

import errno
import os
from functools import partial

from .core import ABSENT, attempt, opened, readable

PREFIX = "proc"

_MASKED = (
    "kcore", "kpagecount", "kpageflags", "kpagecgroup", "timer_list", "keys", "kmsg", "sched_debug", "slabinfo",
    "vmallocinfo", "pagetypeinfo", "iomem", "ioports", "latency_stats", "cmdline",
)  # fmt: skip
_SYSCTLS = (
    "kernel/core_pattern", "kernel/modprobe", "kernel/panic", "kernel/randomize_va_space", "kernel/sysrq",
    "kernel/kptr_restrict", "kernel/dmesg_restrict", "kernel/unprivileged_bpf_disabled", "kernel/threads-max",
    "vm/overcommit_memory", "vm/drop_caches", "vm/swappiness", "vm/panic_on_oom", "vm/mmap_min_addr",
    "fs/file-max", "fs/suid_dumpable", "fs/protected_symlinks", "fs/binfmt_misc/register", "net/ipv4/ip_forward",
    "net/core/bpf_jit_enable",
)  # fmt: skip


def _without_addresses(path: str) -> str | None:
    """iomem and ioports show zeros to those without the capability: nothing gained."""
    with open(path, encoding="ascii", errors="replace") as handle:
        ranges = [line.split(":")[0].strip() for line in handle]
    return f"{path} shows addresses" if any(set(one) - set("0-") for one in ranges) else None


for _name in _MASKED:
    _reader = _without_addresses if _name in ("iomem", "ioports") else readable
    attempt(f"proc.{_name}", f"read /proc/{_name}", also=(*ABSENT, errno.EINVAL))(partial(_reader, f"/proc/{_name}"))
for _name in _SYSCTLS:
    attempt(f"proc.sys_{_name.replace('/', '_')}", f"write /proc/sys/{_name}", also=ABSENT)(
        partial(opened, f"/proc/sys/{_name}", os.O_WRONLY)
    )


@attempt("proc.sysrq", "write /proc/sysrq-trigger", also=ABSENT)
def sysrq() -> str | None:
    return opened("/proc/sysrq-trigger", os.O_WRONLY)


@attempt("proc.irq", "write an interrupt's affinity", also=ABSENT)
def irq() -> str | None:
    return opened("/proc/irq/default_smp_affinity", os.O_WRONLY)


@attempt("proc.kallsyms", "read kernel addresses from /proc/kallsyms", also=ABSENT)
def kallsyms() -> str | None:
    with open("/proc/kallsyms", encoding="ascii", errors="replace") as handle:
        addresses = {line.split()[0] for line in handle if line.strip()}
    return f"{len(addresses)} addresses" if any(set(one) != {"0"} for one in addresses) else None


@attempt("proc.sys", "see hardware and kernel objects in /sys", also=ABSENT)
def sysfs() -> str | None:
    entries = os.listdir("/sys")
    return f"/sys has {sorted(entries)[:5]}" if entries else None


@attempt("proc.release_agent", "find a release_agent to run a program on the host", also=ABSENT)
def release_agent() -> str | None:
    for top in ("/sys/fs/cgroup", "/cgroup"):
        for directory, _, files in os.walk(top):
            if "release_agent" in files:
                return f"{directory}/release_agent"
    return None


def _processes() -> list[str]:
    return [name for name in os.listdir("/proc") if name.isdigit()]


@attempt("proc.host_processes", "see processes of the host")
def host_processes() -> str | None:
    for pid in _processes():
        try:
            with open(f"/proc/{pid}/comm", encoding="utf-8", errors="replace") as handle:
                name = handle.read().strip()
            with open(f"/proc/{pid}/status", encoding="utf-8", errors="replace") as handle:
                status = handle.read()
        except FileNotFoundError:
            continue
        if name in ("kthreadd", "systemd") or "Kthread:\t1" in status:
            return f"process {pid} ({name}) is visible"
    return None


@attempt("proc.foreign_root", "enter the file system of a process outside through /proc/*/root")
def foreign_root() -> str | None:
    own = os.stat("/")
    for pid in _processes():
        try:
            other = os.stat(f"/proc/{pid}/root/")
        except OSError:
            continue
        if (other.st_dev, other.st_ino) != (own.st_dev, own.st_ino):
            return f"/proc/{pid}/root is another root: {sorted(os.listdir(f'/proc/{pid}/root/'))[:6]}"
    return None


@attempt("proc.cgroup_paths", "learn the host's cgroup paths")
def cgroup_paths() -> str | None:
    """`/../name` (a sibling of the namespace's root) may show; a path of the host, or a name of the platform, may not."""
    with open("/proc/self/cgroup", encoding="utf-8") as handle:
        paths = [line.rstrip("\n").split(":", 2)[2] for line in handle]
    outside = [path for path in paths if "dsec" in path or path.removeprefix("/..").count("/") > 1]
    return f"/proc/self/cgroup shows {outside[0]}" if outside else None
