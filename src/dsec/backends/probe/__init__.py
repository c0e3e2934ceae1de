"""What this machine can do, found out by doing it.

Each probe performs the thing itself (mounts, clones, makes a cgroup) in a process of its own, in namespaces of its own, and
leaves nothing behind. `probe_all` runs them in one child interpreter, because the caller may have threads and a
fork of a threaded process may only exec.

    model.py       a probe, its registry, and how it is called
    syscalls.py    the system calls that Python's library does not offer
    scratch.py     forked children and scratch mounts that disappear
    machine.py     root, kernel, limits, memory, disk, tools
    namespaces.py  namespaces, overlay in a user namespace, seccomp, pidfd
    cgroups.py     hierarchy layout, cgroup.kill, clone into a cgroup
    filesystems.py EROFS, id-mapped mounts, btrfs on a loop device
    virtual.py     KVM and the backends that are not built yet
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec

from dsec.protocol.specs import Capability

_DEADLINE_S = 60.0

# Good to have: containers run without these. Everything else is needed.
OPTIONAL = frozenset(
    {
        "cap_sys_resource",
        "swap",
        "mmdebstrap",
        "gcc",
        "cgroup_freeze",
        "uppers_btrfs",
        "mkfs.btrfs",
        "kvm",
        "qemu",
        "backend_microvm",
        "backend_fullvm",
        "backend_fncall",
    }
)


def probe_all(names: tuple[str, ...] = (), scratch: Path | None = None) -> tuple[Capability, ...]:
    """Run the named probes (all when empty), in the order of the registry.

    scratch is a directory on the disk that will hold layers and uppers (default /var/tmp): filesystems differ in what
    may be mounted from them. Blocks for about half a second; raises nothing but OSError on a machine without Python's own tools.
    """
    where = scratch or "/var/tmp"
    with tempfile.TemporaryDirectory(prefix="dsec-probe-", dir=where, ignore_cleanup_errors=True) as directory:
        command = [sys.executable, "-m", "dsec.backends.probe", directory, *names]
        try:
            child = subprocess.run(command, capture_output=True, timeout=_DEADLINE_S, check=False)
        except subprocess.TimeoutExpired:
            return (_broken(f"did not end within {_DEADLINE_S:.0f} s"),)
        if child.returncode != 0:
            last_line = child.stderr.decode(errors="replace").strip().rpartition("\n")[2]
            return (_broken(f"ended with code {child.returncode}: {last_line}"),)
        return msgspec.json.decode(child.stdout, type=tuple[Capability, ...])


def _broken(what: str) -> Capability:
    return Capability(
        "probes", False, f"the probe process {what}", "run `python -m dsec.backends.probe /var/tmp` by hand"
    )
