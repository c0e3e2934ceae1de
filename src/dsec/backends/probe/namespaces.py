"""Namespaces, the overlay inside them, and the guards around them."""

from __future__ import annotations

import errno
import os
import select
import signal
from pathlib import Path

from dsec.backends.probe import syscalls
from dsec.backends.probe.model import Finding, probe
from dsec.backends.probe.scratch import mapped_user_namespace, private_mounts, write_id_maps

_KINDS = {
    "mnt": syscalls.CLONE_NEWNS,
    "pid": syscalls.CLONE_NEWPID,
    "net": syscalls.CLONE_NEWNET,
    "ipc": syscalls.CLONE_NEWIPC,
    "uts": syscalls.CLONE_NEWUTS,
    "cgroup": syscalls.CLONE_NEWCGROUP,
}


@probe(
    "namespaces",
    remedy="the kernel or a surrounding container refuses namespaces: "
    "see sysctl user.max_user_namespaces and the container's seccomp profile",
)
def namespaces(_: Path) -> Finding:
    every = 0
    for flag in _KINDS.values():
        every |= flag
    with mapped_user_namespace(every):
        return Finding(True, f"user, {', '.join(_KINDS)} together, ids mapped")


def _overlay_in_user_namespace(scratch: Path) -> None:
    """In a child: overlay with the options of a sandbox, mounted and written to as the root of a user namespace."""
    tree = scratch / "overlay"
    for name in ("lower", "upper", "work", "merged"):
        (tree / name).mkdir(parents=True)
        os.chown(tree / name, 100_000, 100_000)
    tree.chmod(0o711)
    (tree / "lower" / "file").write_text("lower")
    options = f"lowerdir={tree}/lower,upperdir={tree}/upper,workdir={tree}/work,userxattr,volatile"
    to_parent_r, to_parent_w = os.pipe()
    to_child_r, to_child_w = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 0
        try:
            syscalls.unshare(syscalls.CLONE_NEWUSER | syscalls.CLONE_NEWNS)
            os.write(to_parent_w, b"1")
            os.read(to_child_r, 1)
            os.setresgid(0, 0, 0)
            os.setresuid(0, 0, 0)
            syscalls.mount("overlay", f"{tree}/merged", "overlay", 0, options)
            (tree / "merged" / "file").unlink()
            (tree / "merged" / "new").write_text("upper")
        except OSError as error:
            code = error.errno or 255
        os._exit(code)
    os.close(to_parent_w)
    if os.read(to_parent_r, 1) == b"1":
        write_id_maps(pid)
    os.write(to_child_w, b"1")
    for descriptor in (to_parent_r, to_child_r, to_child_w):
        os.close(descriptor)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if code != 0:
        raise OSError(code, os.strerror(code))


@probe(
    "overlay_userns",
    forked=True,
    remedy="Linux 5.11 or later with CONFIG_OVERLAY_FS is needed; an upper cannot lie on an overlay itself",
)
def overlay_userns(scratch: Path) -> Finding:
    private_mounts()
    _overlay_in_user_namespace(scratch)
    upper = scratch / "overlay" / "upper"
    whiteout = (upper / "file").stat()
    if whiteout.st_rdev != 0 or not (upper / "new").exists():
        return Finding(False, "mounted, but a deletion did not become a whiteout")
    return Finding(True, "userxattr and volatile, whiteouts as 0/0 devices")


@probe("seccomp", remedy="the kernel needs CONFIG_SECCOMP_FILTER", forked=True)
def seccomp(_: Path) -> Finding:
    syscalls.prctl(38, 1)  # PR_SET_NO_NEW_PRIVS
    number = 172 if os.uname().machine == "aarch64" else 39  # getpid: harmless, and never refused otherwise
    syscalls.seccomp_refuse(number, errno.EXDEV)
    try:
        syscalls.raw(number)
    except OSError as error:
        return Finding(error.errno == errno.EXDEV, "a filter refuses a system call with the error of its choice")
    return Finding(False, "the filter was taken but does nothing")


@probe("pidfd", remedy="Linux 5.4 or later is needed")
def pidfd(_: Path) -> Finding:
    pid = os.fork()
    if pid == 0:
        signal.pause()
        os._exit(0)
    descriptor = os.pidfd_open(pid)
    try:
        syscalls.pidfd_send_signal(descriptor, signal.SIGKILL)
        ready = select.select([descriptor], [], [], 5.0)[0]
        return Finding(bool(ready), "signals and the end of a process through a descriptor")
    finally:
        os.close(descriptor)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
