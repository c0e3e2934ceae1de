"""The battery finds holes where there are holes: without confinement its attempts succeed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from dsec.cli.attack.inside import agent, core, devices, identity, kernel, mounts, network, proc, spaces, storage
from dsec.layers import LayerStore

pytestmark = pytest.mark.e2e

MODULES = (agent, devices, identity, kernel, mounts, network, proc, spaces, storage)
# These would change the machine itself, if only to what it is already.
UNKIND = {
    "kernel.settimeofday",
    "kernel.clock_settime",
    "kernel.adjtimex",
    "kernel.acct",
    "kernel.swapoff",
    "kernel.swapon",
}
# A kernel may lack what these need, or a namespace of its own may already withhold it.
MUST_ESCAPE = {
    "mount.tmpfs", "mount.proc", "mount.sysfs", "mount.bind", "mount.overlay", "mount.chroot", "mount.fsopen",
    "mount.open_tree", "mount.open_by_handle", "mount.pivot_root", "namespace.unshare.mnt", "namespace.unshare.net",
    "namespace.clone.pid", "namespace.setns_pidfd", "namespace.unmapped_uid", "agent.ptrace.attach", "agent.ptrace.seize",
    "agent.read_maps", "agent.read_environ", "agent.link_exe", "agent.list_fd", "agent.write_mem", "agent.prlimit.nofile",
    "agent.setpriority.process", "agent.setpriority.user", "agent.ioprio.process", "agent.affinity", "agent.scheduler",
    "agent.vm.readv", "agent.pidfd_getfd", "agent.process_madvise", "agent.realtime", "agent.nice",
    "proc.kpagecount", "proc.timer_list", "proc.kallsyms", "proc.sys_kernel_core_pattern", "proc.sys_vm_drop_caches",
    "device.mknod.mem", "device.mknod.kmsg", "kernel.reboot", "kernel.log", "kernel.sethostname", "kernel.bpf_map",
    "kernel.userfaultfd", "kernel.io_uring", "kernel.aio", "kernel.keyctl", "identity.capabilities", "identity.no_new_privs",
    "identity.setuid_program", "identity.file_capability", "storage.trusted_xattr", "network.raw", "network.packet",
    "network.add_link", "network.add_address",
}  # fmt: skip


def test_unconfined_root_escapes(store: LayerStore, tmp_path: Path) -> None:
    # Unmounting and replacing comes last: it spoils what later attempts look at.
    spoilers = [
        one.name for one in core.ALL if one.name.startswith("mount.umount") or one.name == "mount.bind_over_proc"
    ]
    names = [one.name for one in core.ALL if one.name not in UNKIND and one.name not in spoilers]
    tmp_path.chmod(0o755)
    command = [sys.executable, "-m", "tests.e2e.loose", str(tmp_path), *names]
    root = Path(__file__).resolve().parents[2]
    # The exit code is that of a shell as PID 1, which was sent every signal there is.
    answer = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=100, check=False)
    results = [json.loads(line) for line in answer.stdout.splitlines()]
    assert len(results) == len(names)
    escaped = {one["name"] for one in results if one["verdict"] == "ESCAPED"}
    assert set() == MUST_ESCAPE - escaped
    assert len(escaped) >= 120
