"""From root inside, by bare system calls: what the kernel and the filter refuse. (The escape battery has many more.)"""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from tests.runtime.driver import Launcher, attack, run

IOVEC = "x:00002000000000000800000000000000"  # 8 bytes at an address that is somebody's

# name, number, arguments
CALLS = [
    ("ptrace attach to PID 1", 101, (16, 1, 0, 0)),
    ("ptrace seize PID 1", 101, (0x4206, 1, 0, 0)),
    ("process_vm_readv of PID 1", 310, (1, IOVEC, 1, IOVEC, 1, 0)),
    ("prlimit64 of PID 1", 302, (1, 7, 0, 0)),
    ("prlimit64 of PID 1, high bits set", 302, (1 + (1 << 32), 7, 0, 0)),
    ("sched_setaffinity of PID 1", 203, (1, 8, "x:0100000000000000")),
    ("setpriority of PID 1", 141, (0, 1, 19)),
    ("setpriority of its group", 141, (1, 1, 19)),
    ("setpriority of all of a user", 141, (2, 0, 19)),
    ("ioprio_set of PID 1", 251, (1, 1, 0x6000)),
    ("kcmp with PID 1", 312, (1, 1, 0, 0, 0)),
    ("mount", 165, ("s:none", "s:/tmp", "s:tmpfs", 0, 0)),
    ("umount2", 166, ("s:/proc", 2)),
    ("pivot_root", 155, ("s:/", "s:/tmp")),
    ("open_tree", 428, (-100, "s:/", 1)),
    ("fsopen", 430, ("s:tmpfs", 0)),
    ("setns", 308, (0, 0)),
    ("unshare of a user namespace", 272, (0x10000000,)),
    ("unshare of a mount namespace", 272, (0x20000,)),
    ("unshare of a time namespace", 272, (0x80,)),
    ("clone of a user namespace", 56, (0x10000000 | 17, 0, 0, 0, 0)),
    ("bpf", 321, (0, 0, 0)),
    ("perf_event_open", 298, (0, 0, 0, 0, 0)),
    ("userfaultfd", 323, (0,)),
    ("io_uring_setup", 425, (8, 0)),
    ("keyctl", 250, (0, -3, 0)),
    ("init_module", 175, (0, 0, "s:")),
    ("kexec_load", 246, (0, 0, 0, 0)),
    ("reboot", 169, (0, 0, 0)),
    ("swapon", 167, ("s:/x", 0)),
    ("syslog", 103, (3, 0, 0)),
    ("open_by_handle_at", 304, (-100, 0, 0)),
    ("settimeofday", 164, (0, 0)),
    ("personality", 135, (8,)),
    ("mknod of a disk", 133, ("s:/tmp/disk", 0o60600, 0x0700)),
    ("sethostname", 170, ("s:other", 5)),
    ("TIOCSTI", 16, (0, 0x5412, "s:x")),
    ("chmod of a device", 90, ("s:/dev/null", 0)),
    ("write of a sysctl", 2, ("s:/proc/sys/net/ipv4/ip_forward", 1)),
    ("write of another", 2, ("s:/proc/sys/kernel/hostname", 1)),
]


@pytest.mark.parametrize(("name", "number", "arguments"), CALLS, ids=[name for name, _, _ in CALLS])
async def test_refused(launcher: Launcher, name: str, number: int, arguments: tuple[object, ...]) -> None:
    launcher.create("sb-a")
    said = await attack(launcher, "sb-a", "call", number, *arguments)
    assert said in {f"errno {e}" for e in (errno.EPERM, errno.EACCES, errno.EROFS)}, name


@pytest.mark.parametrize("family", [0, 4, 17, 31, 38, 40], ids=["unspec", "ipx", "packet", "bluetooth", "alg", "vsock"])
async def test_socket_families_are_refused(launcher: Launcher, family: int) -> None:
    launcher.create("sb-a")
    assert (await attack(launcher, "sb-a", "call", 41, family, 2, 0)) == f"errno {errno.EAFNOSUPPORT}"


@pytest.mark.parametrize("request_number", [0x5000940E, 0x40049409, 0x8004587D], ids=["subvolume", "clone", "shutdown"])
async def test_ioctls_of_filesystems_are_not_there(launcher: Launcher, request_number: int) -> None:
    launcher.create("sb-a")
    said = await attack(launcher, "sb-a", "call", 16, 0, request_number, 0)
    assert said == f"errno {errno.ENOTTY}"


async def test_what_a_sandbox_needs_works(launcher: Launcher) -> None:
    launcher.create("sb-a")
    for number, arguments in [
        (41, (2, 1, 0)),  # socket: TCP
        (41, (16, 3, 0)),  # socket: routes
        (102, ()),  # getuid
        (272, (0x400,)),  # unshare of descriptors
        (90, ("s:/etc/passwd", 0o600)),  # chmod
        (92, ("s:/etc/passwd", 1000, 1000)),  # chown
        (133, ("s:/tmp/fifo", 0o10600, 0)),  # mknod of a FIFO
        (302, (0, 7, 0, 0)),  # prlimit64 of oneself
        (135, (0x40000,)),  # personality: no randomised addresses
    ]:
        assert (await attack(launcher, "sb-a", "call", number, *arguments)).startswith("ok"), number


@pytest.mark.parametrize("file", ["mem", "environ", "maps", "auxv", "stack", "syscall", "fd/4", "root/etc/passwd"])
async def test_pid_1_shows_nothing(launcher: Launcher, file: str) -> None:
    launcher.create("sb-a")
    assert (await attack(launcher, "sb-a", "cat", f"/proc/1/{file}")) in ("errno 13", "errno 1")


async def test_commands_inherit_no_descriptors(launcher: Launcher) -> None:
    launcher.create("sb-a")
    assert (await attack(launcher, "sb-a", "fds")).split() == ["0", "1", "2"]


async def test_no_directory_that_pid_1_holds_leads_up(launcher: Launcher) -> None:
    """Should aether ever be taken over: what it was given must not be a way to the uppers of others."""
    descriptors = Path(f"/proc/{launcher.create('sb-a')['pid']}/fd")
    await attack(launcher, "sb-a", "fds")
    held = [d for d in descriptors.iterdir() if d.is_dir() and not (d / "cgroup.procs").exists()]
    assert held
    for directory in held:
        assert os.path.samefile(directory, directory / ".."), os.readlink(directory)


async def test_the_program_of_pid_1_has_no_place_on_the_host_and_is_not_readable(launcher: Launcher) -> None:
    """A link to /proc/self/exe in the place of a program makes a command execute it."""
    program = Path(f"/proc/{launcher.create('sb-a')['pid']}/exe")
    assert os.readlink(program) == "/aether"
    assert (program.stat().st_mode & 0o7777, program.stat().st_uid) == (0o711, 0)
    assert (await attack(launcher, "sb-a", "call", 88, "s:/proc/self/exe", "s:/tmp/link")).startswith("ok")
    ran = await run(launcher, "sb-a", "/tmp/link", "version")
    assert ran.done.exit_code == 0 and ran.out.strip()


async def test_the_mount_table_tells_nothing_of_the_host(launcher: Launcher, place: Path, uppers: str) -> None:
    launcher.create("sb-a", ("base", "top"))
    table = await attack(launcher, "sb-a", "cat", "/proc/self/mountinfo")
    points = [line.split()[4] for line in table.splitlines()]
    assert {p for p in points if not p.startswith("/proc")} == {"/", "/dev", "/dev/shm"}
    # An upper in a plain directory shows its place on the host's filesystem; one in an image has a filesystem of its own.
    hidden = [str(place)] if uppers.startswith("btrfs:") else []
    for word in (*hidden, "sb-a", "sysfs", "cgroup2", "devpts", "mqueue"):
        assert word not in table


async def test_groups_show_relative_to_the_sandbox(launcher: Launcher) -> None:
    launcher.create("sb-a")
    groups = await attack(launcher, "sb-a", "cat", "/proc/self/cgroup")
    assert "dsec" not in groups


async def test_only_the_sandbox_is_in_proc(launcher: Launcher) -> None:
    pid = launcher.create("sb-a")["pid"]
    assert (await attack(launcher, "sb-a", "cat", f"/proc/{pid}/status")) == "errno 2"


async def test_no_user_namespace_even_past_the_filter(launcher: Launcher) -> None:
    """The kernel's own limit in the sandbox's namespace, should a new call slip through."""
    launcher.create("sb-a")
    assert (await attack(launcher, "sb-a", "cat", "/proc/sys/user/max_user_namespaces")) == "0"


async def test_a_closed_sandbox_answers_on_low_ports(launcher: Launcher) -> None:
    launcher.create("sb-a")
    assert (await attack(launcher, "sb-a", "cat", "/proc/sys/net/ipv4/ip_unprivileged_port_start")) == "0"
    routes = await attack(launcher, "sb-a", "cat", "/proc/net/dev")
    assert "lo:" in routes and "eth" not in routes
