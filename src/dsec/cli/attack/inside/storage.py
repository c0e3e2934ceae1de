"""Filesystems: ioctls of the one under the sandbox, overlay's own attributes, the disk limit."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import struct
import tempfile

from .core import ABSENT, attempt

PREFIX = "storage"

_WRITABLE = ("/", "/tmp", "/var/tmp", "/dev/shm", "/run", "/dev")
_NOT_THERE = (errno.ENOTTY, errno.EOPNOTSUPP, errno.EINVAL, errno.ENOTSUP)
_SUBVOL_CREATE, _SUBVOL_CREATE_V2, _SNAP_CREATE = 0x5000940E, 0x50009418, 0x50009401
_QUOTA_CTL, _QGROUP_CREATE, _TREE_SEARCH, _DEFAULT_SUBVOL, _RESIZE = (
    0xC0109428,
    0x4010942A,
    0xD0009411,
    0x40089413,
    0x50009403,
)
_FIFREEZE, _FITHAW, _FITRIM, _SETFLAGS, _SWAPEXT = 0xC0045877, 0xC0045878, 0xC0185879, 0x40086602, 0xC0C0586D


def _on_each(request: int, argument: bytes) -> str | None:
    """The ioctl on every directory that may be another filesystem; the last error when all refuse."""
    last: OSError | None = None
    for path in _WRITABLE:
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        except OSError:
            continue
        try:
            fcntl.ioctl(descriptor, request, bytearray(argument))
            return f"the ioctl worked on {path}"
        except OSError as error:
            last = error
        finally:
            os.close(descriptor)
    if last is not None:
        raise last
    return None


def _name() -> bytes:
    return os.path.basename(tempfile.mktemp(prefix="attack-")).encode()


@attempt("storage.subvolume", "make a btrfs subvolume, which no limit covers", also=_NOT_THERE)
def subvolume() -> str | None:
    return _on_each(_SUBVOL_CREATE, struct.pack("=q4088s", 0, _name()))


@attempt("storage.subvolume_v2", "make a btrfs subvolume (second interface)", also=_NOT_THERE)
def subvolume_v2() -> str | None:
    return _on_each(_SUBVOL_CREATE_V2, struct.pack("=qQQ32s4040s", 0, 0, 0, b"", _name()))


@attempt("storage.snapshot", "snapshot the subvolume of the sandbox", also=(*_NOT_THERE, errno.EXDEV))
def snapshot() -> str | None:
    for path in _WRITABLE:
        with contextlib.suppress(FileNotFoundError):
            source = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
            gained = None
            with contextlib.suppress(OSError):
                fcntl.ioctl(source, _SNAP_CREATE, bytearray(struct.pack("=q4088s", source, _name())))
                gained = f"snapshot in {path}"
            os.close(source)
            if gained:
                return gained
    return None


@attempt("storage.quota", "turn quotas off", also=(errno.ENOTTY, errno.EOPNOTSUPP))
def quota() -> str | None:
    try:
        return _on_each(_QUOTA_CTL, struct.pack("=QQ", 99, 0))  # no such command: known only after the permission check
    except OSError as error:
        if error.errno == errno.EINVAL:
            return "passed the permission check for quotas"
        raise


@attempt("storage.qgroup", "make a quota group", also=_NOT_THERE)
def qgroup() -> str | None:
    return _on_each(_QGROUP_CREATE, struct.pack("=QQ", 1, 1 << 48 | 77))


@attempt("storage.tree_search", "search the trees of other sandboxes' files", also=_NOT_THERE)
def tree_search() -> str | None:
    return _on_each(_TREE_SEARCH, struct.pack("=QQQQQQQIIIIQQQQ", 1, 0, 2**64 - 1, 0, 2**64 - 1, 0, 2**64 - 1, 0, 2**32 - 1,
                                              16, 0, 0, 0, 0, 0) + bytes(3992))  # fmt: skip


@attempt("storage.resize", "resize the filesystem", also=_NOT_THERE)
def resize() -> str | None:
    return _on_each(_RESIZE, struct.pack("=q4088s", 0, b"1:max"))


@attempt("storage.freeze", "freeze the filesystem under everybody", also=_NOT_THERE)
def freeze() -> str | None:
    gained = _on_each(_FIFREEZE, bytes(4))
    _on_each(_FITHAW, bytes(4))
    return gained


@attempt("storage.trim", "trim the filesystem", also=_NOT_THERE)
def trim() -> str | None:
    return _on_each(_FITRIM, struct.pack("=QQQ", 0, 0, 0))


@attempt("storage.swap_extents", "swap extents between files (XFS)", also=(*_NOT_THERE, errno.EFAULT))
def swap_extents() -> str | None:
    return _on_each(_SWAPEXT, bytes(192))


@attempt("storage.immutable", "make a file that nobody can remove", also=_NOT_THERE)
def immutable() -> str | None:
    handle, path = tempfile.mkstemp(prefix="attack-")
    try:
        fcntl.ioctl(handle, _SETFLAGS, bytearray(struct.pack("=L4x", 0x10)[:8]))
    finally:
        os.close(handle)
        os.unlink(path)
    return "set the immutable flag"


@attempt("storage.trusted_xattr", "steer the overlay with trusted.overlay attributes", also=(errno.EOPNOTSUPP,))
def trusted_xattr() -> str | None:
    directory = tempfile.mkdtemp(prefix="attack-")
    os.setxattr(directory, "trusted.overlay.redirect", b"/etc")
    return "set trusted.overlay.redirect"


@attempt("storage.overlay_xattr", "steer the overlay with user.overlay attributes", also=(errno.EOPNOTSUPP,))
def overlay_xattr() -> str | None:
    """A redirect of the upper must not show a directory of a lower under another name, however it was set."""
    directory = tempfile.mkdtemp(prefix="attack-", dir="/var/tmp")
    os.setxattr(directory, "user.overlay.redirect", b"/root")
    os.setxattr(directory, "user.overlay.opaque", b"n")
    os.rename(directory, directory + "-moved")
    entries = os.listdir(directory + "-moved")
    return f"a redirected directory shows {entries[:3]}" if entries else None


@attempt("storage.disk_limit", "write past the disk limit in every writable place", also=(errno.ENOSPC, errno.EDQUOT))
def disk_limit() -> str | None:
    limit = int(os.environ.get("ATTACK_DISK_BYTES", "0"))
    if not limit:
        return None
    written, block, files = 0, os.urandom(1 << 20), []
    try:
        for path in _WRITABLE:
            name = tempfile.mktemp(prefix="attack-fill-", dir=path)
            with contextlib.suppress(OSError), open(name, "wb", buffering=0) as handle:
                files.append(name)
                # 128 MB past the limit is what a watched (not hard) limit may let through.
                while written < limit + (200 << 20):
                    written += handle.write(block)
                os.fsync(handle.fileno())
    finally:
        for name in files:
            with contextlib.suppress(OSError):
                os.unlink(name)
    return f"wrote {written >> 20} MB against a limit of {limit >> 20} MB" if written > limit + (128 << 20) else None


@attempt("storage.dev_write", "leave a file where other sandboxes would see it (/dev)", also=ABSENT)
def dev_write() -> str | None:
    path = "/dev/attack-left-behind"
    with open(path, "w", encoding="ascii") as handle:
        handle.write("x")
    os.unlink(path)
    return "wrote into /dev"
