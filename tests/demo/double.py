"""A double of the platform for unit tests: trees overlaid on this machine's own root, in namespaces of each command.

It isolates nothing and takes root; it lets a whole rollout run with real trees, tools and tests where no platform is up.
The namespaces of a command end with it, so no mount and no process is left.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import shutil
import stat
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from fnmatch import fnmatchcase
from pathlib import Path

import msgspec

from dsec.protocol.specs import Change, ChangeKind, ChangeSet, DSecContainerRunArgs, FileInfo, FileKind
from dsec.sdk.errors import IsADirectory, NotADirectory

_ENTER = """
set -e
mount -t overlay overlay -o "$1" "$2"
mount -t proc proc "$2/proc"
mount --rbind /dev "$2/dev"
merged=$2 cwd=$3
shift 3
exec chroot "$merged" /usr/bin/env -C "$cwd" "$@"
"""


class Tree(msgspec.Struct, frozen=True):
    """A stand-in for a layer: a folder, and the variables its sandboxes get."""

    root: Path
    env: dict[str, str]


class Done(msgspec.Struct, frozen=True):
    exit_code: int
    stdout: bytes
    stderr: bytes
    signal: str | None = None
    timed_out: str | None = None


class LocalClient:
    """Layers by reference. `fail` makes the n-th creation raise what it holds."""

    def __init__(self, trees: dict[str, Tree], scratch: Path) -> None:
        self.trees = trees
        self.scratch = scratch
        self.created: list[DSecContainerRunArgs] = []
        self.alive = 0
        self.fail: dict[int, Exception] = {}

    def run_container(
        self, args: DSecContainerRunArgs, *, timeout: float = 120
    ) -> AbstractAsyncContextManager[LocalSandbox]:
        return self._run(args)

    @asynccontextmanager
    async def _run(self, args: DSecContainerRunArgs) -> AsyncIterator[LocalSandbox]:
        self.created.append(args)
        if error := self.fail.get(len(self.created) - 1):
            raise error
        name = f"sb-local-{secrets.token_hex(6)}"
        self.alive += 1
        try:
            yield LocalSandbox(name, [self.trees[ref] for ref in args.layers], self.scratch / name)
        finally:
            self.alive -= 1
            shutil.rmtree(self.scratch / name)


class LocalSandbox:
    def __init__(self, name: str, trees: Sequence[Tree], folder: Path) -> None:
        self.id = name
        self.upper, self.work, self.merged = (folder / part for part in ("upper", "work", "merged"))
        for path in (self.upper, self.work, self.merged):
            path.mkdir(parents=True)
        (self.upper / "tmp").mkdir(mode=0o1777)
        (self.upper / "tmp").chmod(0o1777)
        lowers = ":".join([*(str(tree.root) for tree in reversed(trees)), "/"])
        self.options = f"lowerdir={lowers},upperdir={self.upper},workdir={self.work},xino=off"
        self.env = {"HOME": "/root", "PATH": os.defpath}
        for tree in trees:
            self.env |= {key: value.replace("${PATH}", self.env["PATH"]) for key, value in tree.env.items()}
        self.files = LocalFiles(self)

    async def exec(
        self,
        argv: Sequence[str | bytes],
        *,
        cwd: str | None = None,
        stdin: bytes | str | None = None,
        timeout: float | None = 600,
        merge_stderr: bool = False,
    ) -> Done:
        command = (
            "unshare",
            "--mount",
            "--pid",
            "--fork",
            "sh",
            "-c",
            _ENTER,
            "sh",
            self.options,
            str(self.merged),
            cwd or "/",
            *map(os.fsdecode, argv),
        )
        merged = asyncio.subprocess.STDOUT if merge_stderr else asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            *command,
            env=self.env,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=merged,
        )
        data = stdin.encode() if isinstance(stdin, str) else stdin or b""
        stdout, stderr = await asyncio.wait_for(process.communicate(data), timeout)
        return Done(process.returncode or 0, stdout, stderr or b"")

    async def run_shell(self, line: str, *, cwd: str | None = None, timeout: float | None = 600) -> Done:
        return await self.exec(("bash", "-c", line), cwd=cwd, timeout=timeout)

    async def changes(self, *, include: Sequence[str] = (), max_bytes: int = 64 << 20) -> ChangeSet:
        found = []
        for folder, folders, names in os.walk(self.upper):
            for name in [*folders, *names]:
                change = self._change(Path(folder, name))
                if any(fnmatchcase(change.path.decode(), pattern.replace("**", "*")) for pattern in include):
                    found.append(change if max_bytes else msgspec.structs.replace(change, data=None))
        return ChangeSet(tuple(found))

    def _change(self, path: Path) -> Change:
        name = os.fsencode(path.relative_to(self.upper))
        info = path.lstat()
        if stat.S_ISDIR(info.st_mode):
            opaque = "trusted.overlay.opaque" in os.listxattr(path)
            return Change(path=name, kind=ChangeKind.MKDIR, mode=info.st_mode & 0o7777, opaque=opaque)
        if stat.S_ISLNK(info.st_mode):
            return Change(path=name, kind=ChangeKind.SYMLINK, target=os.fsencode(os.readlink(path)))
        if stat.S_ISREG(info.st_mode):
            return Change(
                path=name, kind=ChangeKind.WRITE, mode=info.st_mode & 0o7777, size=info.st_size, data=path.read_bytes()
            )
        return Change(path=name, kind=ChangeKind.DELETE if info.st_rdev == 0 else ChangeKind.SPECIAL)


class LocalFiles:
    def __init__(self, sandbox: LocalSandbox) -> None:
        self.sandbox = sandbox

    async def _run(self, *argv: str, stdin: bytes | None = None) -> Done:
        return await self.sandbox.exec(argv, stdin=stdin)

    async def write(self, path: str, data: bytes, *, mode: int | None = None) -> int:
        line = 'mkdir -p "$(dirname "$1")" && cat > "$1" && chmod "$2" "$1"'
        done = await self._run("sh", "-c", line, "sh", path, f"{0o644 if mode is None else mode:o}", stdin=data)
        if done.exit_code:
            clash = b"Is a directory" in done.stderr
            raise IsADirectory("is a directory") if clash else NotADirectory(done.stderr.decode())
        return len(data)

    async def remove(self, path: str, *, recursive: bool = False) -> None:
        await self._run("rm", "-r" if recursive else "--", path)

    async def exists(self, path: str) -> bool:
        return (await self._run("test", "-e", path)).exit_code == 0

    async def stat(self, path: str) -> FileInfo:
        return (await self._find(path, 0))[0]

    async def list(self, path: str, *, depth: int = 1) -> list[FileInfo]:
        return [*await self._find(path, depth)]

    async def _find(self, path: str, depth: int) -> Sequence[FileInfo]:
        least = "1" if depth else "0"
        form = "%p\\t%y\\t%s\\0"
        found = await self._run("find", path, "-mindepth", least, "-maxdepth", str(depth), "-printf", form)
        entries = [entry.split(b"\t") for entry in found.stdout.split(b"\0")[:-1]]
        kinds = {b"f": FileKind.FILE, b"d": FileKind.DIRECTORY, b"l": FileKind.SYMLINK}
        return [
            FileInfo(path=name, kind=kinds[kind], size=int(size), mode=0, uid=0, gid=0, mtime=0.0)
            for name, kind, size in entries
        ]

    async def upload(self, local: Path, remote: str) -> None:
        if local.is_file():
            await self.write(remote, local.read_bytes())
            return
        line = 'mkdir -p "$1" && tar -xf - --no-same-owner -C "$1"'
        packed = await asyncio.create_subprocess_exec(
            "tar", "-cf", "-", "-C", str(local), ".", stdout=asyncio.subprocess.PIPE
        )
        data, _ = await packed.communicate()
        await self._run("sh", "-c", line, "sh", remote, stdin=data)
