"""Virtual machines and the backends that this version does not have."""

from __future__ import annotations

import fcntl
import os
import shutil
from pathlib import Path

from dsec.backends.probe.model import Finding, probe

_KVM_GET_API_VERSION = 0xAE00
_KVM_CREATE_VM = 0xAE01
_NOT_BUILT = "nothing to do: this version has containers only, so the backend is absent from capabilities().backends"


@probe("kvm", remedy="load kvm_intel or kvm_amd, or enable nested virtualisation; no backend of this version uses it")
def kvm(_: Path) -> Finding:
    if not Path("/dev/kvm").exists():
        return Finding(False, "no /dev/kvm")
    device = os.open("/dev/kvm", os.O_RDWR | os.O_CLOEXEC)
    try:
        version = fcntl.ioctl(device, _KVM_GET_API_VERSION)
        machine = fcntl.ioctl(device, _KVM_CREATE_VM, 0)
        os.close(machine)
    finally:
        os.close(device)
    return Finding(
        True, f"/dev/kvm makes virtual machines (interface {version}); whether a guest kernel boots is not tried yet"
    )


@probe("qemu", remedy="apt-get install qemu-system-x86; no backend of this version uses it")
def qemu(_: Path) -> Finding:
    path = shutil.which("qemu-system-x86_64")
    return Finding(path is not None, path or "not installed")


@probe("backend_microvm", remedy=_NOT_BUILT)
def microvm(_: Path) -> Finding:
    return Finding(False, "not built yet")


@probe("backend_fullvm", remedy=_NOT_BUILT)
def fullvm(_: Path) -> Finding:
    return Finding(False, "not built yet")


@probe("backend_fncall", remedy=_NOT_BUILT)
def fncall(_: Path) -> Finding:
    return Finding(False, "not built yet")
