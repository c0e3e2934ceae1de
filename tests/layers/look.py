"""Run as a program in a mount namespace of its own: mount layers (one alone, or several as an overlay) and tell what is seen.

Standard input: a `Task` in JSON (place: a directory to mount in; layers: lists of a metadata blob and its data blobs, base
first). Standard output: an `Answer` in msgpack. No mount is left behind, because the namespace goes with the process.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import stat
import subprocess
import sys

import msgspec

_CLONE_NEWNS = 0x20000
_MS_REC, _MS_PRIVATE = 0x4000, 0x40000
_FSOPEN, _FSCONFIG, _FSMOUNT, _MOVE_MOUNT = 430, 431, 432, 429
_SET_FLAG, _SET_STRING, _CREATE = 0, 1, 6
_libc = ctypes.CDLL(None, use_errno=True)


class Seen(msgspec.Struct, frozen=True, array_like=True, order=True):
    path: bytes
    kind: int
    mode: int
    uid: int
    gid: int
    size: int
    mtime_ns: int
    device: int
    links: int
    target: bytes
    digest: str
    attributes: dict[str, bytes]


class Task(msgspec.Struct, frozen=True):
    place: str
    layers: list[list[str]]
    script: str = ""


class Answer(msgspec.Struct, frozen=True):
    entries: list[Seen]
    output: str


def private_namespace() -> None:
    """Leave the machine's mount namespace; what is mounted from now on ends with this process."""
    _check(_libc.unshare(_CLONE_NEWNS))
    _check(_libc.mount(None, b"/", None, _MS_REC | _MS_PRIVATE, None))


def mount(kind: str, options: list[tuple[str, str]], target: str) -> None:
    """The new mount calls; an option with an empty value is a flag."""
    context = _syscall(_FSOPEN, kind.encode(), 1)
    for key, value in options:
        command, text = (_SET_STRING, value.encode()) if value else (_SET_FLAG, None)
        _syscall(_FSCONFIG, context, command, key.encode(), text, 0)
    _syscall(_FSCONFIG, context, _CREATE, None, None, 0)
    descriptor = _syscall(_FSMOUNT, context, 1, 0)
    _syscall(_MOVE_MOUNT, descriptor, b"", -100, target.encode(), 4)
    os.close(descriptor)
    os.close(context)


def entries(root: bytes) -> list[Seen]:
    """Everything below `root`, sorted by path; the root itself is `.`."""
    found = [_seen(root, b".")]
    for where, directories, files in os.walk(root):
        for name in directories + files:
            path = os.path.join(where, name)
            found.append(_seen(path, os.path.relpath(path, root)))
    return sorted(found)


def _seen(path: bytes, name: bytes) -> Seen:
    status = os.lstat(path)
    regular, link = stat.S_ISREG(status.st_mode), stat.S_ISLNK(status.st_mode)
    with open(path if regular else os.devnull, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest() if regular else ""
    directory = stat.S_ISDIR(status.st_mode)
    return Seen(
        path=name,
        kind=stat.S_IFMT(status.st_mode),
        mode=stat.S_IMODE(status.st_mode),
        uid=status.st_uid,
        gid=status.st_gid,
        size=status.st_size if regular or link else 0,
        mtime_ns=status.st_mtime_ns,
        device=status.st_rdev,
        links=0 if directory else status.st_nlink,
        target=os.readlink(path) if link else b"",
        digest=digest,
        attributes={
            key: os.getxattr(path, key, follow_symlinks=False) for key in os.listxattr(path, follow_symlinks=False)
        },
    )


def _syscall(number: int, *arguments: object) -> int:
    return _check(_libc.syscall(number, *arguments))


def _check(result: int) -> int:
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    return result


def main() -> None:
    task = msgspec.json.decode(sys.stdin.buffer.read(), type=Task)
    private_namespace()
    mount("tmpfs", [("mode", "755")], task.place)
    lowers = []
    for number, (meta, *data) in enumerate(task.layers):
        lowers.append(f"{task.place}/{number}")
        os.mkdir(lowers[-1])
        mount("erofs", [("source", meta), *(("device", path) for path in data)], lowers[-1])
    root = lowers[0] if len(lowers) == 1 and not task.script else _overlay(task.place, lowers)
    output = ""
    if task.script:
        run = subprocess.run(["/bin/sh", "-c", task.script], cwd=root, capture_output=True, text=True, check=False)
        output = run.stdout + run.stderr
    sys.stdout.buffer.write(msgspec.msgpack.encode(Answer(entries(os.fsencode(root)), output)))


def _overlay(place: str, lowers: list[str]) -> str:
    for name in ("upper", "work", "root"):
        os.mkdir(f"{place}/{name}")
    options = [("lowerdir", ":".join(reversed(lowers))), ("upperdir", f"{place}/upper"), ("workdir", f"{place}/work")]
    mount("overlay", [("source", "test"), *options, ("userxattr", "")], f"{place}/root")
    return f"{place}/root"


if __name__ == "__main__":
    main()
