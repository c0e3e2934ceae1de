"""What the demo needs of the SDK, as protocols: `DSecClient` fits them, and so does the double in the unit tests."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Protocol

from dsec.protocol.specs import ChangeSet, DSecContainerRunArgs, FileInfo


class Result(Protocol):
    """How a command ended."""

    @property
    def exit_code(self) -> int: ...
    @property
    def signal(self) -> str | None: ...
    @property
    def stdout(self) -> bytes: ...
    @property
    def stderr(self) -> bytes: ...
    @property
    def timed_out(self) -> str | None: ...


class Files(Protocol):
    async def write(self, path: str, data: bytes, *, mode: int | None = None) -> int: ...
    async def remove(self, path: str, *, recursive: bool = False) -> None: ...
    async def exists(self, path: str) -> bool: ...
    async def stat(self, path: str) -> FileInfo: ...
    async def list(self, path: str, *, depth: int = 1) -> list[FileInfo]: ...
    async def upload(self, local: Path, remote: str) -> None: ...


class Sandbox(Protocol):
    @property
    def id(self) -> str: ...
    @property
    def files(self) -> Files: ...
    async def exec(
        self,
        argv: Sequence[str | bytes],
        *,
        cwd: str | None = None,
        stdin: bytes | str | None = None,
        timeout: float | None = 600,
        merge_stderr: bool = False,
    ) -> Result: ...
    async def run_shell(self, line: str, *, cwd: str | None = None, timeout: float | None = 600) -> Result: ...
    async def changes(self, *, include: Sequence[str] = (), max_bytes: int = 64 << 20) -> ChangeSet: ...


class Client(Protocol):
    def run_container(
        self, args: DSecContainerRunArgs, *, timeout: float = 120
    ) -> AbstractAsyncContextManager[Sandbox]: ...
