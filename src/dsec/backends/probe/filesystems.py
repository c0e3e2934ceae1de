"""EROFS straight from files, mounts with mapped ids, and btrfs in an image file with hard limits."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import struct
import subprocess
from pathlib import Path

from dsec.backends.probe import syscalls
from dsec.backends.probe.model import Finding, probe
from dsec.backends.probe.scratch import ID_BASE, mapped_user_namespace, private_mounts

_NEWER_KERNEL = "Linux 6.12 or later with CONFIG_EROFS_FS_BACKED_BY_FILE is needed"


def _run(*command: str | Path) -> None:
    answer = subprocess.run([str(part) for part in command], capture_output=True, timeout=15, check=False)
    if answer.returncode != 0:
        last = answer.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        raise OSError(errno.EIO, f"{command[0]} failed: {last}")


def _erofs_image(scratch: Path, *, split: bool) -> tuple[Path, str]:
    """A small image (its metadata and data apart when split) and the mount options it needs."""
    tree = scratch / ("split-tree" if split else "tree")
    tree.mkdir()
    (tree / "file").write_bytes(b"dsec" * 4096)
    image = scratch / ("split.erofs" if split else "whole.erofs")
    if not split:
        _run("mkfs.erofs", image, tree)
        return image, ""
    blob = scratch / "split.blob"
    _run("mkfs.erofs", "--chunksize=4096", f"--blobdev={blob}", image, tree)
    return image, f"device={blob}"


def _mounted_erofs(scratch: Path, *, split: bool) -> Path:
    image, options = _erofs_image(scratch, split=split)
    target = scratch / f"{image.stem}-mount"
    target.mkdir()
    syscalls.mount(str(image), str(target), "erofs", syscalls.MS_RDONLY, options)
    return target


def _no_mkfs() -> Finding:
    return Finding(False, "not tried: mkfs.erofs is missing", "apt-get install erofs-utils")


@probe(
    "erofs_file", remedy=f"{_NEWER_KERNEL}; layers must lie on ext4, xfs or btrfs, not on tmpfs or overlay", forked=True
)
def erofs_file(scratch: Path) -> Finding:
    if shutil.which("mkfs.erofs") is None:
        return _no_mkfs()
    private_mounts()
    target = _mounted_erofs(scratch, split=False)
    same = (target / "file").read_bytes() == b"dsec" * 4096
    return Finding(same, "an image file mounts without a loop device")


@probe("erofs_device", remedy=_NEWER_KERNEL, forked=True)
def erofs_device(scratch: Path) -> Finding:
    if shutil.which("mkfs.erofs") is None:
        return _no_mkfs()
    private_mounts()
    target = _mounted_erofs(scratch, split=True)
    same = (target / "file").read_bytes() == b"dsec" * 4096
    return Finding(same, "metadata and data in two files (device=)")


@probe("idmapped_mounts", remedy="Linux 5.19 or later is needed for id-mapped EROFS", forked=True)
def idmapped_mounts(scratch: Path) -> Finding:
    if shutil.which("mkfs.erofs") is None:
        return _no_mkfs()
    private_mounts()
    (scratch / "ids").mkdir()
    target = _mounted_erofs(scratch / "ids", split=False)
    with mapped_user_namespace() as (_, namespace):
        clone = syscalls.open_tree(str(target), syscalls.OPEN_TREE_CLONE | syscalls.OPEN_TREE_CLOEXEC)
        syscalls.set_idmap(clone, namespace)
        owner = os.stat("file", dir_fd=clone).st_uid
        os.close(clone)
    return Finding(owner == ID_BASE, f"root's files of a layer belong to {owner} through the clone")


_LOOP_CTL_GET_FREE = 0x4C82
_LOOP_CONFIGURE = 0x4C0A
_LO_FLAGS_AUTOCLEAR = 4
_QUOTA_CTL = 0xC0109428  # _IOWR(0x94, 40, struct btrfs_ioctl_quota_ctl_args)
_QUOTA_ENABLE_SIMPLE = 4
_SUBVOLUME_CREATE = 0x5000940E  # _IOW(0x94, 14, struct btrfs_ioctl_vol_args)
_QGROUP_LIMIT = 0x8030942B  # _IOR(0x94, 43, struct btrfs_ioctl_qgroup_limit_args)
_LIMIT_REFERENCED = 1
_MIB = 1 << 20


def loop_device(backing: Path) -> int:
    """Attach a free loop device that lets go of the file with its last user; a descriptor of it."""
    control = os.open("/dev/loop-control", os.O_RDWR | os.O_CLOEXEC)
    file = os.open(backing, os.O_RDWR | os.O_CLOEXEC)
    try:
        for _ in range(16):
            device = os.open(f"/dev/loop{fcntl.ioctl(control, _LOOP_CTL_GET_FREE)}", os.O_RDWR | os.O_CLOEXEC)
            # struct loop_config: fd, block_size, then loop_info64 of 232 bytes with lo_flags at 52, then 64 reserved.
            information = bytearray(232)
            struct.pack_into("=I", information, 52, _LO_FLAGS_AUTOCLEAR)
            try:
                fcntl.ioctl(device, _LOOP_CONFIGURE, struct.pack("=II", file, 0) + bytes(information) + bytes(64))
            except OSError as error:
                os.close(device)
                if error.errno != errno.EBUSY:  # another process took it between the two calls
                    raise
                continue
            return device
    finally:
        os.close(control)
        os.close(file)
    raise OSError(errno.EBUSY, "every free loop device was taken by somebody else")


def enable_simple_quotas(filesystem: int) -> None:
    """Count and limit what each subvolume of the filesystem (a descriptor of any directory on it) was given."""
    fcntl.ioctl(filesystem, _QUOTA_CTL, bytearray(struct.pack("=QQ", _QUOTA_ENABLE_SIMPLE, 0)))


def _limited_write(subvolume: Path, amount: int) -> int | None:
    """Write until refused or `amount`; the error number that stopped it."""
    descriptor = os.open(subvolume / "filler", os.O_WRONLY | os.O_CREAT, 0o600)
    block = os.urandom(_MIB)
    try:
        for _ in range(amount // _MIB):
            os.write(descriptor, block)
        os.fsync(descriptor)
    except OSError as error:
        return error.errno
    finally:
        os.close(descriptor)
    return None


@probe(
    "uppers_btrfs",
    remedy="needs CONFIG_BTRFS_FS, /dev/loop-control and btrfs-progs; without it uppers are watched instead of limited",
    forked=True,
)
def uppers_btrfs(scratch: Path) -> Finding:
    if shutil.which("mkfs.btrfs") is None:
        return Finding(False, "not tried: mkfs.btrfs is missing", "apt-get install btrfs-progs")
    private_mounts()
    image, target = scratch / "uppers.btrfs", scratch / "uppers"
    with open(image, "wb") as handle:
        handle.truncate(256 * _MIB)
    _run("mkfs.btrfs", "-q", "--mixed", image)
    target.mkdir()
    device = loop_device(image)
    syscalls.mount(os.readlink(f"/proc/self/fd/{device}"), str(target), "btrfs", 0, "")
    os.close(device)
    top = os.open(target, os.O_RDONLY | os.O_DIRECTORY)
    enable_simple_quotas(top)
    fcntl.ioctl(top, _SUBVOLUME_CREATE, bytearray(struct.pack("=q4088s", 0, b"one")))
    one = os.open(target / "one", os.O_RDONLY | os.O_DIRECTORY)
    fcntl.ioctl(one, _QGROUP_LIMIT, bytearray(struct.pack("=QQQQQQ", 0, _LIMIT_REFERENCED, 8 * _MIB, 0, 0, 0)))
    stopped_by = _limited_write(target / "one", 64 * _MIB)
    os.close(one)
    os.close(top)
    syscalls.umount(str(target))
    if stopped_by != errno.EDQUOT:
        return Finding(False, f"a limit of 8 MB did not stop a writer of 64 MB (error {stopped_by})")
    return Finding(True, "btrfs in an image file: a subvolume a sandbox, hard limits (simple quotas)")
