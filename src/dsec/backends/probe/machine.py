"""The plain facts: who we are, which kernel, how much of everything, which programs are there."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import subprocess
from pathlib import Path

from dsec.backends.probe.model import Finding, ProbeFunction, probe

_MIB = 1 << 20
_CAP_SYS_RESOURCE = 24
# What the launcher cannot do without: CHOWN, KILL, SETGID, SETUID, NET_ADMIN, SYS_CHROOT, SYS_ADMIN.
_NEEDED_CAPABILITIES = {"CAP_CHOWN": 0, "CAP_KILL": 5, "CAP_SETGID": 6, "CAP_SETUID": 7, "CAP_NET_ADMIN": 12,
                        "CAP_SYS_CHROOT": 18, "CAP_SYS_ADMIN": 21}  # fmt: skip


def _effective_capabilities() -> int:
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("CapEff:"):
            return int(line.split()[1], 16)
    return 0


@probe("root", remedy="run as root: the launcher makes cgroups, network namespaces and mounts")
def root(_: Path) -> Finding:
    if os.geteuid() != 0:
        return Finding(False, f"running as user {os.geteuid()}")
    held = _effective_capabilities()
    missing = [name for name, bit in _NEEDED_CAPABILITIES.items() if not held >> bit & 1]
    if missing:
        return Finding(False, f"root without {', '.join(missing)}", "give the outer container these capabilities")
    return Finding(True, "root with the capabilities the launcher needs")


@probe(
    "kernel",
    remedy="Linux 6.12 or later is needed (file-backed EROFS mounts): "
    "on Debian 12, apt-get install -t bookworm-backports linux-image-amd64",
)
def kernel(_: Path) -> Finding:
    release = platform.release()
    numbers = release.split("-")[0].split(".")
    version = (int(numbers[0]), int(numbers[1])) if len(numbers) >= 2 and numbers[1].isdigit() else (0, 0)
    return Finding(version >= (6, 12), f"Linux {release} on {platform.machine()}")


@probe(
    "cap_sys_resource",
    remedy="optional: with it the limits on open files and processes could be raised past their hard values, "
    "and aether's out-of-memory score lowered; without it commands get a raised score instead",
)
def cap_sys_resource(_: Path) -> Finding:
    held = bool(_effective_capabilities() >> _CAP_SYS_RESOURCE & 1)
    return Finding(held, "held" if held else "not held; DSec works without it")


@probe("open_files", remedy="raise the hard limit of open files to 20,000 or more (ulimit -Hn, LimitNOFILE=)")
def open_files(_: Path) -> Finding:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    text = "unlimited" if hard == resource.RLIM_INFINITY else f"{hard:,}"
    enough = hard == resource.RLIM_INFINITY or hard >= 16_384
    return Finding(enough, f"hard limit {text}, about four a sandbox in the launcher")


@probe(
    "pid_max", remedy="sysctl -w kernel.pid_max=4194304: every process in every sandbox has a number on the host too"
)
def pid_max(_: Path) -> Finding:
    value = int(Path("/proc/sys/kernel/pid_max").read_text(encoding="ascii"))
    return Finding(value >= 32_768, f"{value:,} process numbers on this machine")


@probe(
    "memory", remedy="free some memory: the platform itself needs about 140 MB, an idle sandbox about half a megabyte"
)
def memory(_: Path) -> Finding:
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    fields = {line.split(":")[0]: int(line.split()[1]) // 1024 for line in lines if ":" in line}
    available, total = fields.get("MemAvailable", 0), fields.get("MemTotal", 0)
    return Finding(available >= 1024, f"{available:,} of {total:,} MB available")


@probe(
    "swap",
    remedy="optional: a swap file on a disk (fallocate, mkswap, swapon), or zram for what compresses; "
    "without it a pause gives back the pages of files only",
)
def swap(_: Path) -> Finding:
    lines = Path("/proc/swaps").read_text(encoding="ascii").splitlines()[1:]
    if not lines:
        return Finding(False, "none: a pause gives back pages of files, and nothing of what programs hold")
    devices = [line.split() for line in lines]
    total = sum(int(size) for _, _, size, *_ in devices) // 1024
    free = total - sum(int(used) for _, _, _, used, *_ in devices) // 1024
    where = ", ".join(f"{name} ({kind})" for name, kind, *_ in devices)
    return Finding(True, f"{free:,} of {total:,} MB free on {where}: a pause gives back all memory of a sandbox")


@probe("disk", remedy="free some disk space, or put state and layers elsewhere (DSEC_STATE, DSEC_STORE)")
def disk(scratch: Path) -> Finding:
    usage = shutil.disk_usage(scratch)
    return Finding(
        usage.free >= 8 * 1024 * _MIB, f"{usage.free // _MIB:,} of {usage.total // _MIB:,} MB free at {scratch.parent}"
    )


def _tool(name: str, version_flag: str, *, package: str, need: str) -> None:
    """Register a probe for one program: it must start and say its version."""

    def run(_: Path) -> Finding:
        path = shutil.which(name)
        if path is None:
            return Finding(False, f"not installed; {need}")
        answer = subprocess.run([path, version_flag], capture_output=True, timeout=10, check=False)
        lines = (answer.stdout or answer.stderr).decode(errors="replace").strip().splitlines()
        return Finding(True, f"{path}: {lines[0] if lines else 'present'}")

    function: ProbeFunction = run
    probe(name, remedy=f"apt-get install {package}")(function)


_tool("mkfs.erofs", "--version", package="erofs-utils", need="it writes layer images")
_tool("mkfs.btrfs", "--version", package="btrfs-progs", need="it makes the filesystem of the uppers")
_tool("mmdebstrap", "--version", package="mmdebstrap", need="it builds debian@12")
_tool("gcc", "--version", package="gcc libc6-dev", need="it compiles the floor program of `dsec bench`")
