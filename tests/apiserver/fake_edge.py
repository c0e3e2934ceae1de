# ruff: noqa: ASYNC230 - local files of a test
"""An edge for tests: the link's methods over real processes and files of this machine, without isolation.

It keeps the contract of ARCHITECTURE.md where the apiserver and the SDK depend on it: exec ids run once, output is read
from a byte cursor, files are written beside and renamed, stop is idempotent. Its switches make faults.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import shutil
import signal
import tarfile
import termios
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from dsec.protocol.errors import ErrorKind, Fault
from dsec.protocol.ids import new_sandbox_id
from dsec.protocol.link import Call, Handler, LinkServer, pack_record
from dsec.protocol.specs import (
    Capability,
    Change,
    ChangeKind,
    Created,
    CreateOutcome,
    DSecContainerRunArgs,
    EdgeStatus,
    ExecDone,
    ExecSpec,
    FileInfo,
    FileKind,
    LayerRef,
    Limits,
    Network,
    ProcessInfo,
    PtySize,
    Reason,
    SandboxInfo,
    State,
    Usage,
)
from dsec.rollout.jobs import Share

from .fake_jobs import FakeJobs


class Target(msgspec.Struct, frozen=True):
    sandbox: str
    incarnation: int | None = None
    request_id: str = ""


class ExecParams(ExecSpec, frozen=True, kw_only=True):
    sandbox: str
    incarnation: int | None = None
    request_id: str
    cursor: int = 0
    follow: bool = True
    staged: int | None = None


class Attach(Target, frozen=True, kw_only=True):
    exec_id: str
    cursor: int = 0
    data: bytes = b""
    signal: int = 0
    writer: str = ""
    offset: int | None = None


class Path1(Target, frozen=True, kw_only=True):
    path: bytes
    user: str | None = None
    follow: bool = True
    depth: int = 1
    offset: int = 0
    length: int | None = None
    mode: int | None = None
    owner: str | None = None
    parents: bool = True
    recursive: bool = False


class Move(Target, frozen=True, kw_only=True):
    source: bytes
    target: bytes


class Create(msgspec.Struct):
    args: DSecContainerRunArgs
    timeout: float
    job: str = ""


class CreateMany(msgspec.Struct):
    args: list[DSecContainerRunArgs]
    count: int
    timeout: float
    job: str = ""


class Resize(msgspec.Struct):
    cols: int
    rows: int


class Listing(msgspec.Struct):
    labels: dict[str, str] = {}
    states: list[State] | None = None
    job: str | None = None


class Command:
    """One process, its output in the order in which it was read, and who waits for more."""

    def __init__(self, spec: ExecSpec) -> None:
        self.spec = spec
        self.process: asyncio.subprocess.Process | None = None
        self.output: list[tuple[int, bytes]] = []
        self.done: ExecDone | None = None
        self.changed = asyncio.Condition()
        self.started_at = time.time()
        self.fed = {"": len(spec.stdin or b"")}
        self.terminal = Terminal(spec.pty) if spec.pty is not None else None

    async def run(self, incarnation: int, cwd: Path) -> None:
        spec, started = self.spec, time.monotonic()
        argv = list(spec.argv) or [b"/bin/sh", b"-c", spec.line or b""]
        pipe = asyncio.subprocess.PIPE
        if self.terminal is not None:
            await self._run_in_terminal(self.terminal, argv, incarnation, cwd)
            return
        try:
            self.process = await asyncio.create_subprocess_exec(
                *argv, stdin=pipe if spec.stdin_open or spec.stdin else asyncio.subprocess.DEVNULL, stdout=pipe,
                stderr=asyncio.subprocess.STDOUT if spec.merge_stderr else pipe, cwd=spec.cwd or cwd,
                env={**os.environ, **spec.env}, start_new_session=True,
            )  # fmt: skip
        except FileNotFoundError:
            self.done = ExecDone(exec_id=spec.exec_id, exit_code=127, incarnation=incarnation)
            async with self.changed:
                self.changed.notify_all()
            return
        readers = [self._read(1, self.process.stdout), self._read(2, self.process.stderr)]
        timed_out = None
        if spec.stdin:
            assert self.process.stdin is not None
            self.process.stdin.write(spec.stdin)
            if not spec.stdin_open:
                self.process.stdin.close()
        try:
            async with asyncio.timeout(spec.timeout):
                await asyncio.gather(*readers)
                code = await self.process.wait()
        except TimeoutError:
            timed_out = "deadline"
            os.killpg(self.process.pid, signal.SIGKILL)
            code = await self.process.wait()
        sizes = [sum(len(data) for channel, data in self.output if channel == wanted) for wanted in (1, 2)]
        self.done = ExecDone(
            exec_id=spec.exec_id, exit_code=code if code >= 0 else 128 - code,
            signal=None if code >= 0 else signal.Signals(-code).name.removeprefix("SIG"), stdout_bytes=sizes[0],
            stderr_bytes=sizes[1], timed_out=timed_out, duration_s=time.monotonic() - started, incarnation=incarnation,
        )  # fmt: skip
        async with self.changed:
            self.changed.notify_all()

    async def _run_in_terminal(self, terminal: Terminal, argv: list[bytes], incarnation: int, cwd: Path) -> None:
        spec, end = self.spec, terminal.slave
        self.process = await asyncio.create_subprocess_exec(
            *argv, stdin=end, stdout=end, stderr=end, cwd=spec.cwd or cwd, env={**os.environ, **spec.env},
            start_new_session=True, preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )  # fmt: skip
        os.close(end)
        while data := await terminal.read():
            self.output.append((1, data))
            async with self.changed:
                self.changed.notify_all()
        code = await self.process.wait()
        self.done = ExecDone(
            exec_id=spec.exec_id, exit_code=code if code >= 0 else 128 - code, incarnation=incarnation,
            signal=None if code >= 0 else signal.Signals(-code).name.removeprefix("SIG"),
            stdout_bytes=sum(len(data) for _, data in self.output),
        )  # fmt: skip
        async with self.changed:
            self.changed.notify_all()

    async def started(self) -> asyncio.subprocess.Process:
        while self.process is None:
            await asyncio.sleep(0.001)
        return self.process

    async def pump(self, call: Call) -> None:
        stdin = (await self.started()).stdin
        assert stdin is not None
        with contextlib.suppress(Fault, ConnectionError):
            async for data in call.data():
                stdin.write(data)
                await stdin.drain()
            stdin.close()

    async def _read(self, channel: int, stream: asyncio.StreamReader | None) -> None:
        while stream is not None and (data := await stream.read(65536)):
            self.output.append((channel, data))
            async with self.changed:
                self.changed.notify_all()

    async def follow(self, call: Call, cursor: int) -> ExecDone:
        position, index = 0, 0
        while True:
            while index < len(self.output):
                channel, data = self.output[index]
                index += 1
                skip = max(0, cursor - position)
                position += len(data)
                if skip < len(data):
                    await call.send(data[skip:], channel)
            if self.done is not None and index == len(self.output):
                return self.done
            async with self.changed:
                await self.changed.wait_for(lambda seen=index: self.done is not None or seen < len(self.output))


class Terminal:
    """A pseudo-terminal of this machine."""

    def __init__(self, size: PtySize) -> None:
        self.master, self.slave = os.openpty()
        os.set_blocking(self.master, False)
        self.sizes: list[PtySize] = []
        self.resize(size)

    def resize(self, size: PtySize) -> None:
        self.sizes.append(size)
        termios.tcsetwinsize(self.master, (size.rows, size.cols))

    async def read(self) -> bytes:
        """Empty when nobody holds the other end any more."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                return os.read(self.master, 65536)
            except BlockingIOError:
                await self._ready(loop.add_reader, loop.remove_reader)
            except OSError:
                return b""

    async def write(self, data: bytes) -> None:
        loop = asyncio.get_running_loop()
        while data:
            try:
                data = data[os.write(self.master, data) :]
            except BlockingIOError:
                await self._ready(loop.add_writer, loop.remove_writer)

    async def _ready(self, add: Callable[..., None], remove: Callable[[int], object]) -> None:
        ready = asyncio.Event()
        add(self.master, ready.set)
        try:
            await ready.wait()
        finally:
            remove(self.master)


class Box:
    def __init__(self, id: str, args: DSecContainerRunArgs, root: Path, job: str = "") -> None:
        self.id = id
        self.job = job
        self.args = args
        self.root = root
        self.incarnation = 1
        self.state = State.RUNNING
        self.paused = False
        self.reason: Reason | None = None
        self.created_at = time.time()
        self.commands: dict[str, Command] = {}
        self.tasks: set[asyncio.Task[None]] = set()
        self.ttl: dict[str, float | None] = {}
        self.lines = [(self.created_at, "created")]


class FakeEdge(FakeJobs):
    """`async with FakeEdge(directory) as edge`: listens on `edge.socket`."""

    def __init__(self, directory: Path, name: str = "fake", max_sandboxes: int = 1000) -> None:
        super().__init__()
        self.directory = directory
        self.name = name
        self.socket = directory / f"{name}.sock"
        self.max_sandboxes = max_sandboxes
        self.boxes: dict[str, Box] = {}
        self.by_key: dict[str, Box] = {}
        self.calls: list[str] = []
        self.runs = 0
        self.staged: dict[str, bytes] = {}
        self.hold_creation: asyncio.Event | None = None  # creations wait for it
        self.cancelled = 0
        self.lose_replies: set[str] = (
            set()
        )  # methods whose work is done but whose answer is lost with the connection, once each
        self._server: LinkServer | None = None

    async def __aenter__(self) -> FakeEdge:
        await self.listen()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.silence()
        for box in self.boxes.values():
            await self._end(box, Reason.USER)

    async def listen(self) -> None:
        self._server = LinkServer({name: self._counted(handler) for name, handler in self._handlers().items()})
        await self._server.listen_unix(self.socket)

    async def silence(self) -> None:
        """The edge's process dies; what it knows stays, as in a journal."""
        assert self._server is not None
        await self._server.close()

    def _counted(self, handler: Handler) -> Handler:
        async def counted(call: Call) -> object:
            self.calls.append(call.method)
            result = await handler(call)
            if call.method in self.lose_replies:
                self.lose_replies.discard(call.method)
                assert self._server is not None
                for connection in list(self._server.connections):
                    connection.close()
            return result

        return counted

    def _handlers(self) -> dict[str, Handler]:
        prefixes = ("sandbox_", "exec_", "fs_", "edge_", "layers_", "rollout_", "job_")
        names = [name for name in dir(self) if name.startswith(prefixes)]
        table: dict[str, Handler] = {name.replace("_", ".", 1): getattr(self, name) for name in names}
        return {**table, "exec": self.run}

    # -- sandboxes --

    def _box(self, target: Target, *, ended: bool = False) -> Box:
        box = self.boxes.get(target.sandbox)
        if box is None:
            raise Fault(ErrorKind.NOT_FOUND, f"no sandbox {target.sandbox}", sandbox_id=target.sandbox)
        if target.incarnation is not None and target.incarnation != box.incarnation:
            raise Fault(ErrorKind.UNAVAILABLE, "another incarnation", reason="replaced", sandbox_id=box.id)
        if box.state is not State.RUNNING and not ended:
            raise Fault(ErrorKind.UNAVAILABLE, f"{box.id} has ended", reason=box.reason.value if box.reason else "user")
        return box

    async def _create(self, args: DSecContainerRunArgs, job: str) -> Created:
        if args.container_image == "nope":
            raise Fault(ErrorKind.NOT_FOUND, "no layer nope", hint="`dsec layer ls` lists them")
        if args.container_image == "broken":
            raise Fault(ErrorKind.CREATE_FAILED, "it broke", stage="overlay")
        if args.container_image == "slow":
            raise Fault(ErrorKind.CREATE_FAILED, "took too long", stage="timeout.launch", retryable=True)
        box = self.by_key.get(args.idempotency_key or "")
        if box is None or box.state is not State.RUNNING:  # a key means the same sandbox while that lives
            live = [box for box in self.boxes.values() if box.state is State.RUNNING]
            if len(live) >= self.max_sandboxes:
                raise Fault(
                    ErrorKind.CAPACITY, "the edge is full", retryable=True, limit="max_sandboxes",
                    value=self.max_sandboxes, holders={"team=a": len(live)},
                )  # fmt: skip
            id = new_sandbox_id(self.name)
            root = self.directory / id
            if job:
                self._entered(job, id, Share.of(args))
            root.mkdir()
            box = self.boxes[id] = Box(id, args, root, job)
            if args.idempotency_key:
                self.by_key[args.idempotency_key] = box
            if self.hold_creation is not None:
                try:
                    await self.hold_creation.wait()
                except asyncio.CancelledError:
                    self.cancelled += 1
                    await self._end(box, Reason.CREATE_FAILED)
                    raise
        return Created(id=box.id, incarnation=box.incarnation, edge=self.name, create_ms=1.0)

    async def sandbox_create(self, call: Call) -> object:
        params = call.params(Create)
        return await self._create(params.args, params.job)

    async def sandbox_create_many(self, call: Call) -> object:
        params = call.params(CreateMany)

        async def one(index: int, args: DSecContainerRunArgs) -> None:
            try:
                call.note(CreateOutcome(index, created=await self._create(args, params.job)))
            except Fault as fault:
                call.note(CreateOutcome(index, error=msgspec.to_builtins(fault.body)))

        wanted = params.args * params.count if len(params.args) == 1 else params.args
        async with asyncio.TaskGroup() as group:
            for index, args in enumerate(wanted):
                group.create_task(one(index, args))
        return {}

    def _info(self, box: Box) -> SandboxInfo:
        args = box.args
        limits = Limits(args.cpu_cores_limit, args.memory_limit_mb, args.disk_limit_mb, args.pids_limit)
        refused = {name: "refused: no mirror is configured" for name, allowed in args.network_rules.items() if allowed}
        return SandboxInfo(
            id=box.id, backend="container", state=box.state, reason=box.reason, created_at=box.created_at,
            labels=args.labels, limits=limits, usage=Usage(memory_bytes=4096), layers=(args.container_image or "",),
            network=Network("none", args.network_rules, refused), edge=self.name, incarnation=box.incarnation, job=box.job,
        )  # fmt: skip

    async def sandbox_info(self, call: Call) -> object:
        return self._info(self._box(call.params(Target), ended=True))

    async def sandbox_list(self, call: Call) -> object:
        params = call.params(Listing)
        found = [
            box
            for box in self.boxes.values()
            if (params.states is None or box.state in params.states)
            and params.job in (None, box.job)
            and all(box.args.labels.get(name) == value for name, value in params.labels.items())
        ]
        for box in found:
            await call.send(pack_record(self._info(box)))
        return {"count": len(found)}

    async def _end(self, box: Box, reason: Reason) -> None:
        if box.state is not State.STOPPED:
            box.state, box.reason = State.STOPPED, reason
        for command in box.commands.values():
            if command.process is not None and command.done is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(command.process.pid, signal.SIGKILL)
        if box.tasks:
            await asyncio.wait(box.tasks)
        shutil.rmtree(box.root, ignore_errors=True)

    async def sandbox_stop(self, call: Call) -> object:
        box = self.boxes.get(call.params(Target).sandbox)
        if box is None:
            raise Fault(ErrorKind.NOT_FOUND, "no such sandbox")
        await self._end(box, Reason.USER)
        return {}

    async def sandbox_stop_many(self, call: Call) -> object:
        labels = call.params(Listing).labels
        chosen = [
            box
            for box in self.boxes.values()
            if box.state is State.RUNNING and all(box.args.labels.get(name) == value for name, value in labels.items())
        ]
        for box in chosen:
            await self._end(box, Reason.USER)
        return {"count": len(chosen)}

    async def sandbox_stop_burst(self, call: Call) -> object:
        class Params(msgspec.Struct):
            burst: str
            keep: list[str]

        params = call.params(Params)
        chosen = [
            box
            for key, box in self.by_key.items()
            if key.startswith(f"{params.burst}/") and box.id not in params.keep and box.state is State.RUNNING
        ]
        for box in chosen:
            await self._end(box, Reason.USER)
        return {"count": len(chosen)}

    async def sandbox_pause(self, call: Call) -> object:
        self._box(call.params(Target)).paused = True
        return {}

    async def sandbox_resume(self, call: Call) -> object:
        self._box(call.params(Target)).paused = False
        return {}

    async def sandbox_ttl(self, call: Call) -> object:
        box = self._box(call.params(Target))
        asked = call.params(dict[str, object])
        box.ttl = {name: asked[name] for name in ("running_stop", "total") if name in asked}  # type: ignore[misc]
        return {}

    async def sandbox_logs(self, call: Call) -> object:
        for t, line in self._box(call.params(Target), ended=True).lines:
            call.note({"t": t, "line": line})
        return {}

    async def sandbox_changes(self, call: Call) -> object:
        root = self._box(call.params(Target)).root
        count = 0
        for path in sorted(root.rglob("*")):
            if path.is_file():
                data = path.read_bytes()
                name = os.fsencode(path.relative_to(root))
                await call.send(pack_record(Change(path=name, kind=ChangeKind.WRITE, size=len(data), data=data)))
                count += 1
        return {"count": count, "truncated": False}

    # -- commands --

    async def run(self, call: Call) -> object:
        params = call.params(ExecParams)
        box = self._box(Target(params.sandbox, params.incarnation))
        command = box.commands.get(params.exec_id)
        if command is None:
            params = self._with_staged(params)
            if params.cwd == b"/nowhere":
                raise Fault(ErrorKind.FILE_NOT_FOUND, "cwd /nowhere does not exist")
            self.runs += 1
            command = box.commands[params.exec_id] = Command(params)
            task = asyncio.create_task(command.run(box.incarnation, box.root))
            box.tasks.add(task)
            task.add_done_callback(box.tasks.discard)
            if params.stdin_open and params.follow:
                pump = asyncio.create_task(command.pump(call))
                box.tasks.add(pump)
                pump.add_done_callback(box.tasks.discard)
        if params.detached and not params.follow:
            while command.process is None and command.done is None:
                await asyncio.sleep(0)
            return {"pid": command.process.pid if command.process else 0}
        return await command.follow(call, params.cursor)

    async def exec_stage(self, call: Call) -> object:
        params = call.params(Attach)
        self.staged[params.exec_id] = self.staged.get(params.exec_id, b"")[: params.offset or 0] + params.data
        return {}

    def _with_staged(self, params: ExecParams) -> ExecParams:
        if params.staged is None:
            return params
        blob = self.staged.pop(params.exec_id)
        assert len(blob) == params.staged
        ahead = msgspec.msgpack.decode(blob, type=dict[str, bytes])
        env = dict(variable.decode().split("=", 1) for variable in ahead.get("env", b"").split(b"\0")[:-1])
        argv = tuple(ahead.get("argv", b"").split(b"\0")[:-1])
        if "line" in ahead:
            raise Fault(ErrorKind.TOO_LARGE, "longer than the kernel takes")
        return msgspec.structs.replace(params, argv=argv or params.argv, env={**params.env, **env})

    def _command(self, call: Call) -> tuple[Command, Attach]:
        params = call.params(Attach)
        command = self._box(params).commands.get(params.exec_id)
        if command is None:
            raise Fault(ErrorKind.NOT_FOUND, f"no command {params.exec_id}")
        return command, params

    async def exec_attach(self, call: Call) -> object:
        command, params = self._command(call)
        return await command.follow(call, params.cursor)

    async def exec_write(self, call: Call) -> object:
        command, params = self._command(call)
        stdin: Terminal | asyncio.StreamWriter | None = command.terminal or (await command.started()).stdin
        taken = command.fed.get(params.writer, 0)
        if params.offset is not None and params.offset > taken:
            raise Fault(ErrorKind.CONFLICT, f"bytes from {taken} on are missing")
        rest = params.data[taken - params.offset :] if params.offset is not None else params.data
        if rest:
            if stdin is None or (stdin.is_closing() if isinstance(stdin, asyncio.StreamWriter) else command.done):
                raise Fault(ErrorKind.CONFLICT, "stdin is closed")
            command.fed[params.writer] = taken + len(rest)
            if isinstance(stdin, Terminal):
                await stdin.write(rest)
                return {"accepted": taken + len(rest), "open": True}
            with contextlib.suppress(ConnectionError):
                stdin.write(rest)
                await stdin.drain()
        return {"accepted": command.fed.get(params.writer, 0), "open": True}

    async def exec_close_stdin(self, call: Call) -> object:
        command, _ = self._command(call)
        if command.process is not None and command.process.stdin is not None:
            command.process.stdin.close()
        return {}

    async def exec_resize(self, call: Call) -> object:
        command, _ = self._command(call)
        if command.terminal is None or command.done is not None:
            raise Fault(ErrorKind.CONFLICT, f"command {command.spec.exec_id} has no terminal, or has ended")
        size = call.params(Resize)
        command.terminal.resize(PtySize(size.cols, size.rows))
        return {}

    async def exec_poll(self, call: Call) -> object:
        return self._command(call)[0].done

    async def exec_signal(self, call: Call) -> object:
        command, params = self._command(call)
        if command.process is not None and command.done is None:
            os.killpg(command.process.pid, params.signal)
        return {}

    async def exec_list(self, call: Call) -> object:
        return [
            ProcessInfo(
                exec_id=command.spec.exec_id, argv=command.spec.argv or (command.spec.line or b"",),
                running=command.done is None, started_at=command.started_at, detached=command.spec.detached,
                pid=command.process.pid if command.process else 0,
                exit_code=command.done.exit_code if command.done else None,
                stdout_bytes=sum(len(data) for channel, data in command.output if channel == 1),
            )
            for command in self._box(call.params(Target)).commands.values()
        ]  # fmt: skip

    # -- files --

    def _local(self, call: Call, path: bytes) -> bytes:
        return os.path.join(os.fsencode(self._box(call.params(Target)).root), path.lstrip(b"/"))

    def _file(self, path: bytes, shown: bytes, follow: bool = False) -> FileInfo:
        with _typed(shown):
            found = os.stat(path, follow_symlinks=follow)
            kind = FileKind.SYMLINK if os.path.islink(path) and not follow else FileKind.FILE
            kind = FileKind.DIRECTORY if os.path.isdir(path) and kind is not FileKind.SYMLINK else kind
            target = os.readlink(path) if kind is FileKind.SYMLINK else None
            return FileInfo(
                path=shown, kind=kind, size=found.st_size, mode=found.st_mode & 0o7777, uid=0, gid=0,
                mtime=found.st_mtime, target=target,
            )  # fmt: skip

    async def fs_stat(self, call: Call) -> object:
        params = call.params(Path1)
        return self._file(self._local(call, params.path), params.path, params.follow)

    async def fs_list(self, call: Call) -> object:
        params = call.params(Path1)
        top = self._local(call, params.path)
        count = 0
        with _typed(params.path):
            os.listdir(top)
        for folder, directories, names in os.walk(top):
            below = os.path.relpath(folder, top)
            if below != b"." and below.count(b"/") + 2 > params.depth:
                continue
            for name in sorted([*directories, *names]):
                shown = os.path.normpath(os.path.join(params.path, below, name))
                await call.send(pack_record(self._file(os.path.join(folder, name), shown)))
                count += 1
        return {"count": count}

    async def fs_read(self, call: Call) -> object:
        params = call.params(Path1)
        with _typed(params.path), open(self._local(call, params.path), "rb") as file:
            file.seek(params.offset)
            left = params.length if params.length is not None else 1 << 62
            size = 0
            while data := file.read(min(left, 65000)):
                await call.send(data)
                left -= len(data)
                size += len(data)
        return {"size": size}

    async def fs_write(self, call: Call) -> object:
        params = call.params(Path1)
        path = self._local(call, params.path)
        if params.path == b"/full":
            async for _ in call.data():
                raise Fault(ErrorKind.NO_SPACE, "disk_limit_mb=1 is used up", limit="disk_limit_mb", value=1)
        with _typed(params.path):
            os.makedirs(os.path.dirname(path), exist_ok=True)
            if os.path.isdir(path):
                raise IsADirectoryError(21, "Is a directory")
            part, size = path + b".part", 0
            try:
                with open(part, "wb") as file:
                    async for chunk in call.data():
                        size += file.write(chunk)
                os.chmod(part, 0o644 if params.mode is None else params.mode)
                os.rename(part, path)
            finally:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(part)
        return {"size": size}

    async def fs_mkdir(self, call: Call) -> object:
        params = call.params(Path1)
        with _typed(params.path):
            path = self._local(call, params.path)
            os.makedirs(path, params.mode or 0o755, exist_ok=params.parents)
        return {}

    async def fs_move(self, call: Call) -> object:
        params = call.params(Move)
        with _typed(params.source):
            os.rename(self._local(call, params.source), self._local(call, params.target))
        return {}

    async def fs_remove(self, call: Call) -> object:
        params = call.params(Path1)
        path = self._local(call, params.path)
        with _typed(params.path):
            if os.path.isdir(path) and not os.path.islink(path):
                if params.recursive:
                    shutil.rmtree(path)
                else:
                    os.rmdir(path)
            else:
                os.unlink(path)
        return {}

    async def fs_tar(self, call: Call) -> object:
        params = call.params(Path1)
        top = os.fsdecode(self._local(call, params.path))
        name = os.path.join(self.directory, "out.tar")
        with _typed(params.path):
            entries = sorted(os.listdir(top))
        with tarfile.open(name, "w", format=tarfile.PAX_FORMAT) as tar:
            for entry in entries:
                tar.add(os.path.join(top, entry), arcname=entry)
            for member in self.extra_members:
                tar.addfile(member)
            count = len(tar.getmembers())
        with open(name, "rb") as file:
            while data := file.read(65000):
                await call.send(data)
        return {"entries": count}

    extra_members: list[tarfile.TarInfo] = []

    async def fs_untar(self, call: Call) -> object:
        params = call.params(Path1)
        name = os.path.join(self.directory, "in.tar")
        with open(name, "wb") as file:
            async for chunk in call.data():
                file.write(chunk)
        top = self._local(call, params.path)
        with _typed(params.path):
            os.makedirs(top, exist_ok=True)
        with tarfile.open(name) as tar:
            tar.extractall(os.fsdecode(top))
            return {"entries": len(tar.getmembers())}

    # -- the rest --

    async def edge_status(self, call: Call) -> object:
        live = sum(box.state is State.RUNNING for box in self.boxes.values())
        return EdgeStatus(
            edge=self.name, epoch=1, version="0", started_at=0.0, sandboxes={"running": live},
            max_sandboxes=self.max_sandboxes, creating=0, queued=0, memory_available=1, memory_total=2, disk_free=3,
            features=(Capability("container", True, "yes"), Capability("kvm", False, "no", "get one")),
        )  # fmt: skip

    async def layers_list(self, call: Call) -> object:
        return [LayerRef("debian", "12", "sha256:0", "base", 7)]

    async def layers_inspect(self, call: Call) -> object:
        ref = call.params(dict[str, str])["ref"]
        if ref != "debian@12":
            raise Fault(ErrorKind.NOT_FOUND, f"no layer {ref}")
        return {"name": "debian", "version": "12", "kind": "base"}


@contextlib.contextmanager
def _typed(path: bytes):  # type: ignore[no-untyped-def]
    kinds = {
        FileNotFoundError: ErrorKind.FILE_NOT_FOUND, FileExistsError: ErrorKind.FILE_EXISTS,
        IsADirectoryError: ErrorKind.IS_A_DIRECTORY, NotADirectoryError: ErrorKind.NOT_A_DIRECTORY,
        PermissionError: ErrorKind.FILE_PERMISSION,
    }  # fmt: skip
    try:
        yield
    except OSError as error:
        kind = kinds.get(type(error), ErrorKind.FILE_IO)
        raise Fault(kind, f"{os.fsdecode(path)}: {error.strerror}") from error
