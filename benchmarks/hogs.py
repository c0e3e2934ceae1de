"""What hostile and careless programs do to a node: each hog is a line that runs in a sandbox of its own until it is stopped."""

from __future__ import annotations

import msgspec


class Hog(msgspec.Struct, frozen=True):
    """name, what it takes, and the shell line; it does not end by itself, whatever limit it meets."""

    name: str
    takes: str
    line: str


def _perl(program: str) -> str:
    return "perl -e '" + " ".join(program.split()) + "'"


_SMALL_FILES = _perl('for (1..100000) { open F, ">", "/var/d/$_"; print F "x" x 1000; close F }')
_INODES = _perl('$n = 0; while (1) { if (open F, ">", "/var/f$n") { close F } else { sleep 1 } $n++ }')
_PIPES = _perl(
    """for (1..400) { if (!fork) { for (1..500) {
         pipe $r, $w or last; fcntl $w, 4, 2048; syswrite $w, "x" x 65536; push @k, $r, $w
       } sleep 1000 } } sleep 1000"""
)
_SOCKETS = _perl(
    """use Socket; use IO::Handle;
       for (1..100) { if (!fork) { for (1..500) {
         socketpair $a, $b, AF_UNIX, SOCK_STREAM, 0 or last;
         $a->blocking(0); syswrite $a, "x" x 200000; push @k, $a, $b; undef $a; undef $b
       } sleep 1000 } } sleep 1000"""
)
_INOTIFY = _perl(
    """for (1..300) {
         $f = syscall 294, 0; last if $f < 0; push @k, $f;
         for $d (glob "/usr/*/* /etc/*") { syscall 254, $f, $d, 0xfff }
       } while (1) { open F, ">/etc/x"; close F }"""
)
_SPARSE = (
    "truncate -s 50G /var/sparse; tail -c 300M /var/sparse > /dev/null; "
    "cp --sparse=always /var/sparse /var/copy & sleep 2; kill $!; rm -f /var/sparse /var/copy"
)
_TMPFS = "head -c 8G /dev/zero > /dev/shm/a; head -c 8G /dev/zero > /tmp/b; rm -f /dev/shm/a /tmp/b"


def _again(line: str) -> str:
    return f"while :; do {line}; done 2> /dev/null"


HOGS = (
    Hog("fork_storm", "processes", "bomb() { bomb | bomb & }; " + _again("bomb; sleep 0.2")),
    Hog("exit_storm", "whoever reaps", _again("(/bin/true & /bin/true & /bin/true &)")),
    Hog("memory", "memory", _again(_perl('push @a, "x" x (1 << 20) while 1'))),
    Hog("output", "whoever carries output", "yes 0123456789abcdef"),
    Hog("cpu", "every core", "for i in 1 2 3 4 5 6 7 8; do (while :; do :; done) & done; wait"),
    Hog("inodes", "inodes", _INODES),
    Hog("small_files", "metadata, 100,000 files at a time", _again(f"mkdir -p /var/d; {_SMALL_FILES}; rm -rf /var/d")),
    Hog("sparse_file", "whoever reads a 50 GB file of nothing", _again(_SPARSE)),
    Hog("disk", "the disk", _again("dd if=/dev/urandom of=/var/big bs=1M; sync; rm -f /var/big")),
    Hog("shared_memory", "/dev/shm and /tmp", _again(_TMPFS)),
    Hog("pipes", "kernel memory and descriptors, in pipes", _PIPES),
    Hog("sockets", "kernel memory and descriptors, in sockets", _SOCKETS),
    Hog("inotify", "inotify instances and watches", _INOTIFY),
)
