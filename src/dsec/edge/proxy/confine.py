"""Giving up what the proxy never needs: another user's id without capabilities, no file to write, no program to start.

What it keeps: its memory, its sockets, outgoing connections, and reading what everybody may read.
"""

from __future__ import annotations

import ctypes
import os
import resource
import struct

from dsec.protocol.privilege import keep_capabilities

NOBODY = 65534
_MEMORY = 4 << 30
_CAP_SETGID, _CAP_SETUID = 6, 7
_PR_SET_DUMPABLE, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS, _SECCOMP_MODE_FILTER = 4, 22, 38, 2
_ARCH_X86_64 = 0xC000003E
_LD_WORD, _JEQ, _JGE, _RET = 0x20, 0x15, 0x35, 0x06
_ALLOW, _EPERM, _KILL = 0x7FFF0000, 0x00050000 | 1, 0x80000000

# execve, ptrace, kernel doors, other processes' memory and descriptors, changes of the file system: x86-64 numbers.
_REFUSED = (
    59, 322,  # execve, execveat
    101, 310, 311, 312, 438,  # ptrace, process_vm_readv, process_vm_writev, kcmp, pidfd_getfd
    62, 200, 234, 129, 297, 424,  # kill, tkill, tgkill, rt_sigqueueinfo, rt_tgsigqueueinfo, pidfd_send_signal
    165, 166, 155, 161, 272, 308, 428, 429, 430, 431, 432, 442,  # mount, umount2, pivot_root, chroot, unshare, setns, new mounts
    175, 313, 176, 246, 320, 169,  # modules, kexec, reboot
    321, 298, 323, 425, 426, 427,  # bpf, perf_event_open, userfaultfd, io_uring
    248, 249, 250, 304, 303,  # keys, open_by_handle_at, name_to_handle_at
    82, 264, 316, 83, 258, 84, 87, 263, 86, 265, 88, 266, 133, 259,  # rename, mkdir, rmdir, unlink, link, symlink, mknod
    90, 91, 268, 92, 93, 94, 260, 76, 77, 188, 189, 190,  # chmod, chown, truncate, setxattr
)  # fmt: skip


def confine() -> None:
    """For good, for this process. OSError when the kernel refuses a part: then it must not serve."""
    if len(os.listdir("/proc/self/task")) != 1:
        raise OSError("a thread was started before privilege was given up: it would keep it")
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_DATA, (_MEMORY, _MEMORY))
    if os.geteuid() == 0:
        keep_capabilities((_CAP_SETGID, _CAP_SETUID))
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)  # the two go with it
    _check(_libc().prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
    _check(_libc().prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0))
    _filter()


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _check(result: int) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_char_p)]


def _filter() -> None:
    """A seccomp filter: the refused calls answer EPERM; another ABI, whose numbers differ, ends the process."""
    code = program()
    raw = ctypes.create_string_buffer(code, len(code))
    filter_ = _Program(len(code) // 8, ctypes.cast(raw, ctypes.c_char_p))
    _check(_libc().prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(filter_), 0, 0))


def program() -> bytes:
    """BPF: struct sock_filter {u16 code; u8 jt; u8 jf; u32 k} each."""
    one = struct.Struct("=HBBI").pack
    steps = [one(_LD_WORD, 0, 0, 4), one(_JEQ, 1, 0, _ARCH_X86_64), one(_RET, 0, 0, _KILL), one(_LD_WORD, 0, 0, 0)]
    steps += [one(_JGE, 0, 1, 0x40000000), one(_RET, 0, 0, _KILL)]  # the x32 numbers
    for number in sorted(_REFUSED):
        steps += [one(_JEQ, 0, 1, number), one(_RET, 0, 0, _EPERM)]
    return b"".join([*steps, one(_RET, 0, 0, _ALLOW)])
