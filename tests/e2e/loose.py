"""`python -m tests.e2e.loose DIRECTORY NAME...`: run attempts of the battery as the host's real root, unconfined.

In throw-away namespaces over the base layer, but with every capability, no filter and no user namespace: what confines a
sandbox is missing, so attempts must succeed. An attempt that is `blocked` here proves nothing elsewhere.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

from dsec.backends.probe import syscalls
from dsec.backends.probe.scratch import private_mounts
from dsec.cli.attack import inside
from dsec.layers import LayerStore

_SPACES = (
    syscalls.CLONE_NEWPID
    | syscalls.CLONE_NEWNET
    | syscalls.CLONE_NEWIPC
    | syscalls.CLONE_NEWUTS
    | syscalls.CLONE_NEWCGROUP
)


def main(directory: Path, names: list[str]) -> int:
    store = LayerStore()
    meta, data = store.paths(store.resolve("debian@12"))
    private_mounts()
    syscalls.unshare(_SPACES)
    syscalls.mount("none", str(directory), "tmpfs")
    for name in ("lower", "upper", "work", "root"):
        (directory / name).mkdir()
    syscalls.mount(
        str(meta), f"{directory}/lower", "erofs", syscalls.MS_RDONLY, ",".join(f"device={path}" for path in data)
    )
    options = f"lowerdir={directory}/lower,upperdir={directory}/upper,workdir={directory}/work,userxattr"
    syscalls.mount("overlay", f"{directory}/root", "overlay", 0, options)
    pid = os.fork()
    if pid == 0:
        _enter(directory / "root", names)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _enter(root: Path, names: list[str]) -> None:
    """PID 1 of the namespace is a shell, because attempts aim at PID 1."""
    syscalls.mount("proc", f"{root}/proc", "proc")
    syscalls.mount("none", f"{root}/dev", "tmpfs")
    (root / "dev" / "shm").mkdir()
    for name, minor in (("null", 3), ("zero", 5), ("full", 7), ("random", 8), ("urandom", 9)):
        os.mknod(root / "dev" / name, 0o20666, os.makedev(1, minor))
    shutil.copytree(Path(inside.__file__).parent, root / "var" / "tmp" / "dsec_attack")
    os.chroot(root)
    os.chdir("/var/tmp")
    script = 'python3 -m dsec_attack "$@"; code=$?; exit $code'
    os.execve("/bin/sh", ["sh", "-c", script, "sh", *names], {"PATH": "/usr/bin:/bin:/usr/sbin:/sbin"})


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
