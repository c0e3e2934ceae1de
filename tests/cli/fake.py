"""A client that answers from memory: what the commands make of the SDK's answers, without a platform."""

from __future__ import annotations

from collections.abc import AsyncIterator, Generator, Iterable, Mapping, Sequence
from types import TracebackType

import msgspec

import dsec
from dsec import (
    DSecContainerRunArgs,
    Event,
    ExecResult,
    Exit,
    JobInfo,
    JobUsage,
    Limits,
    LogLine,
    Network,
    SandboxInfo,
    State,
    Stdout,
    Usage,
)
from dsec.protocol.specs import Capabilities, FileInfo, FileKind, Reason


def result(exit_code: int = 0, stdout: bytes = b"", stderr: bytes = b"", **other: object) -> ExecResult:
    fields: dict[str, object] = {
        "signal": None, "stdout_bytes": len(stdout), "stderr_bytes": len(stderr), "stdout_truncated": False,
        "stderr_truncated": False, "timed_out": None, "duration_s": 0.25, "exec_id": "ex-1", "incarnation": 1,
    }  # fmt: skip
    return ExecResult(exit_code=exit_code, stdout=stdout, stderr=stderr, **{**fields, **other})  # type: ignore[arg-type]


def info(name: str, state: State = State.RUNNING, reason: Reason | None = None, **labels: str) -> SandboxInfo:
    return SandboxInfo(
        id=name, backend="container", state=state, reason=reason, created_at=1_700_000_000.0, labels=labels,
        limits=Limits(1, 1024, 4096, 512), usage=Usage(),
        layers=("debian@sha256:" + "a" * 64,), network=Network("none", {}, {}), edge="e1", incarnation=1,
    )  # fmt: skip


class FakeProcess:
    def __init__(self, sandbox: FakeSandbox) -> None:
        self._sandbox = sandbox
        self.signals: list[str] = []

    async def events(self, *, cursor: int = 0) -> AsyncIterator[Event]:
        for event in self._sandbox.client.events:
            if isinstance(event, BaseException):
                raise event
            yield event

    async def wait(self) -> ExecResult:
        return self._sandbox.client.result

    async def signal(self, name: str) -> None:
        self.signals.append(name)
        self._sandbox.client.did.append(f"signal {name}")

    async def write(self, data: bytes) -> None:
        self._sandbox.client.stdin += data

    async def close_stdin(self) -> None:
        self._sandbox.client.did.append("close stdin")


class FakeFiles:
    def __init__(self, client: FakeClient) -> None:
        self._client = client

    async def exists(self, path: str) -> bool:
        return path in self._client.directories

    async def stat(self, path: str) -> FileInfo:
        return FileInfo(path=path.encode(), kind=FileKind.DIRECTORY, size=0, mode=0o755, uid=0, gid=0, mtime=0.0)

    async def upload(self, local: str, remote: str) -> None:
        self._client.did.append(f"upload {local} {remote}")

    async def download(self, remote: str, local: str) -> None:
        self._client.did.append(f"download {remote} {local}")


class FakeSandbox:
    def __init__(self, client: FakeClient, name: str) -> None:
        self.client = client
        self.id = name
        self.files = FakeFiles(client)

    async def start(self, argv: Sequence[bytes], **options: object) -> FakeProcess:
        self.client.started.append((list(argv), options))
        return FakeProcess(self)

    async def info(self) -> SandboxInfo:
        found = next(one for one in self.client.sandboxes if one.id == self.id)
        return msgspec.structs.replace(found, usage=Usage(memory_bytes=3 << 20, cpu_s=1.5, pids=4))

    async def set_network(self, rules: Mapping[str, bool]) -> Network:
        self.client.did.append(f"network {dict(rules)}")
        return Network("proxy", dict(rules), dict.fromkeys(rules, "allowed"))

    async def stop(self) -> None:
        self.client.did.append(f"stop {self.id}")

    async def logs(self) -> AsyncIterator[LogLine]:
        yield LogLine("created", 1_700_000_000.0)
        yield LogLine("ended: user", 1_700_000_001.5)


class FakeJob:
    def __init__(self, client: FakeClient, name: str) -> None:
        self._client, self._name = client, name

    async def info(self) -> JobInfo:
        for one in self._client.all_jobs:
            if one.name == self._name:
                return one
        raise dsec.NotFound(f"there is no job {self._name!r}")

    async def usage(self) -> JobUsage:
        return msgspec.structs.replace((await self.info()).usage, cpu_s=9.5)

    async def _done(self, what: str) -> None:
        await self.info()
        self._client.did.append(f"{what} {self._name}")

    async def pause(self) -> None:
        await self._done("pause")

    async def resume(self) -> None:
        await self._done("resume")

    async def stop(self) -> None:
        await self._done("stop")


class Soon:
    """As the SDK's `Opening`: awaitable."""

    def __init__(self, sandbox: FakeSandbox | Exception) -> None:
        self._sandbox = sandbox

    def __await__(self) -> Generator[None, None, FakeSandbox]:
        if isinstance(self._sandbox, Exception):
            raise self._sandbox
        return self._sandbox
        yield


class FakeClient:
    def __init__(self) -> None:
        self.did: list[str] = []
        self.started: list[tuple[list[bytes], dict[str, object]]] = []
        self.asked: list[DSecContainerRunArgs] = []
        self.listed: list[tuple[dict[str, str], list[str]]] = []
        self.sandboxes: list[SandboxInfo] = []
        self.used: list[SandboxInfo] = []
        """What lists with usage give instead, one after the other."""
        self.all_jobs: list[JobInfo] = []
        self.events: list[Event | BaseException] = [Stdout(b"hello\n", 0), Exit(result())]
        self.result = result()
        self.refusal: Exception | None = None
        self.directories: set[str] = set()
        self.stdin = b""

    async def __aenter__(self) -> FakeClient:
        if isinstance(self.refusal, dsec.ConnectionLost):
            raise self.refusal
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.did.append("close")

    def run_container(self, args: DSecContainerRunArgs, *, timeout: float = 120) -> Soon:
        self.asked.append(args)
        return Soon(self.refusal or FakeSandbox(self, "sb-e1-new"))

    def attach(self, name: str) -> Soon:
        return Soon(self.refusal or FakeSandbox(self, name))

    async def list(
        self,
        *,
        labels: Mapping[str, str] | None = None,
        states: Iterable[State | str] | None = None,
        job: str | None = None,
        usage: bool = False,
    ) -> AsyncIterator[SandboxInfo]:
        self.listed.append((dict(labels or {}), [State(state).value for state in states or ()]))
        for one in self.sandboxes:
            if job in (None, one.job):
                yield self.used.pop(0) if usage and self.used else one

    async def jobs(self, *, states: Iterable[str] | None = None) -> list[JobInfo]:
        return [one for one in self.all_jobs if states is None or one.state.value in states]

    def job(self, name: str) -> FakeJob:
        return FakeJob(self, name)

    async def stop_many(self, *, labels: Mapping[str, str]) -> int:
        self.did.append(f"stop labels {dict(labels)}")
        return 3

    async def capabilities(self) -> Capabilities:
        return Capabilities("0.1.0", {"container": True}, (), {"max_sandboxes": 100})
