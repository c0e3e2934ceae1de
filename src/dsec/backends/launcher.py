"""Client of the launcher: requests with descriptors over one SOCK_SEQPACKET connection (ARCHITECTURE.md, edge to launcher)."""

from __future__ import annotations

import array
import asyncio
import os
import socket
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from dsec.protocol.errors import ErrorKind, Fault

T = TypeVar("T")
MAX_MESSAGE = 64 * 1024
_MAX_FDS = 8
_ANCILLARY = socket.CMSG_SPACE(_MAX_FDS * 4)
_encode = msgspec.msgpack.Encoder().encode


class LauncherUsage(msgspec.Struct, frozen=True):
    """Counters of one sandbox as the kernel has them; -1 where unknown. Bytes, nanoseconds, counts."""

    memory: int = -1
    memory_peak: int = -1
    swap: int = -1
    cpu_ns: int = 0
    pids: int = 0
    disk: int = -1
    oom_kills: int = 0
    pids_hits: int = 0
    agent_oom: bool = False
    """PID 1 itself was ended by the kernel for want of memory."""


class CreateReply(msgspec.Struct, frozen=True):
    pid: int
    start: int = 0
    create_us: dict[str, int] = {}


class StopReply(msgspec.Struct, frozen=True):
    usage: LauncherUsage = LauncherUsage()


class Reclaimed(msgspec.Struct, frozen=True):
    """Bytes of a sandbox in memory before and after, in swap now, and asked to be brought in; -1 where unknown."""

    before: int = 0
    after: int = 0
    swap: int = 0
    prefetched: int = 0


class ReclaimReply(msgspec.Struct, frozen=True):
    reclaimed: Reclaimed = Reclaimed()


class UppersStatus(msgspec.Struct, frozen=True):
    kind: str = ""
    total: int = 0
    free: int = 0


class LauncherStatus(msgspec.Struct, frozen=True):
    pool: int = 0
    live: int = 0
    uppers: UppersStatus = UppersStatus()
    cgroup: str = ""


class KeepReply(msgspec.Struct, frozen=True):
    kept: tuple[str, ...] = ()


class SweepReply(msgspec.Struct, frozen=True):
    removed: dict[str, int] = {}


class Empty(msgspec.Struct, frozen=True):
    pass


class _Head(msgspec.Struct, frozen=True):
    id: int = 0
    ok: bool = False
    stage: str = ""
    error: str = ""
    event: str = ""


_head = msgspec.msgpack.Decoder(_Head)
_decoders: dict[object, msgspec.msgpack.Decoder[object]] = {}


class LauncherFailed(Exception):
    """The launcher did what it could and says where it failed."""

    def __init__(self, stage: str, error: str) -> None:
        super().__init__(f"{stage}: {error}")
        self.stage = stage
        self.error = error


class LauncherGone(LauncherFailed):
    """It died, before or over the request. What it made lives on; another one is being started."""


class LauncherClient:
    """One launcher process, started by us; it exits when this end closes."""

    def __init__(
        self, sock: socket.socket, process: asyncio.subprocess.Process, on_lost: Callable[[str], None]
    ) -> None:
        self._sock = sock
        self._process = process
        self._on_lost = on_lost
        self._loop = asyncio.get_running_loop()
        self._next = 1
        self._waiting: dict[int, asyncio.Future[tuple[bytes, list[int]]]] = {}
        self._out: deque[tuple[bytes, Sequence[int]]] = deque()
        self._room = memoryview(bytearray(MAX_MESSAGE))
        self._full = False  # the launcher reads slower than we ask
        self._closed = False
        self._loop.add_reader(sock.fileno(), self._readable)

    @classmethod
    async def start(
        cls,
        runtime: Path,
        *,
        name: str,
        run: Path,
        uppers: str,
        pool: int,
        ephemeral: bool,
        log: int,
        on_lost: Callable[[str], None],
    ) -> LauncherClient:
        """Starts `dsec-runtime launcher`; uppers is `btrfs:IMAGE:SIZE` or `dir:DIR`; log a descriptor for its stderr."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for end in (ours, theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 * 1024 * 1024)
        ours.setblocking(False)
        try:
            with theirs:
                process = await asyncio.create_subprocess_exec(
                    runtime, "launcher", "--control-fd", str(theirs.fileno()), "--run", run, "--name", name,
                    "--uppers", uppers, "--pool", str(pool), "--ephemeral", "yes" if ephemeral else "no",
                    pass_fds=(theirs.fileno(),), stdin=asyncio.subprocess.DEVNULL, stdout=log, stderr=log,
                    start_new_session=True,
                )  # fmt: skip
        except BaseException:
            ours.close()
            raise
        return cls(ours, process, on_lost)

    @property
    def pid(self) -> int:
        return self._process.pid

    async def call(
        self,
        verb: str,
        fields: msgspec.Struct | None = None,
        kind: type[T] = Empty,  # type: ignore[assignment]
        *,
        fds: Sequence[int] = (),
    ) -> T:
        """One request; descriptors of the reply are closed."""
        payload, received = await self._request(verb, fields, fds)
        for fd in received:
            os.close(fd)
        return self._decode(payload, kind)

    async def call_for_fd(self, verb: str, fields: msgspec.Struct, kind: type[T]) -> tuple[T, int]:
        """One request whose reply carries one descriptor, which is the caller's from then on."""
        payload, received = await self._request(verb, fields, ())
        for extra in received[1:]:
            os.close(extra)
        if not received:
            raise LauncherFailed("protocol", f"{verb} was answered without a descriptor")
        return self._decode(payload, kind), received[0]

    def _decode(self, payload: bytes, kind: type[T]) -> T:
        decoder = _decoders.get(kind)
        if decoder is None:
            decoder = _decoders[kind] = msgspec.msgpack.Decoder(kind)
        return decoder.decode(payload)  # type: ignore[return-value]

    async def _request(self, verb: str, fields: msgspec.Struct | None, fds: Sequence[int]) -> tuple[bytes, list[int]]:
        if self._closed:
            raise LauncherGone("launcher", "the launcher is gone")
        number = self._next
        self._next += 1
        message: dict[str, object] = {"id": number, "v": verb}
        if fields is not None:
            message.update(msgspec.structs.asdict(fields))
        payload = _encode(message)
        if len(payload) > MAX_MESSAGE:
            raise Fault(ErrorKind.TOO_LARGE, f"{verb}: a message of {len(payload)} bytes is over {MAX_MESSAGE}",
                        hint="shorten env and labels")  # fmt: skip
        future = self._waiting[number] = self._loop.create_future()
        self._send(payload, fds)
        try:
            reply: tuple[bytes, list[int]] = await future
            return reply
        except asyncio.CancelledError:
            if future.done() and not future.cancelled() and future.exception() is None:
                for fd in future.result()[1]:  # it came in the same turn of the loop as the cancellation
                    os.close(fd)
            raise
        finally:
            self._waiting.pop(number, None)

    def _send(self, payload: bytes, fds: Sequence[int]) -> None:
        self._out.append((payload, fds))
        if len(self._out) == 1:
            self._writable()

    def _writable(self) -> None:
        while self._out:
            payload, fds = self._out[0]
            try:
                socket.send_fds(self._sock, [payload], list(fds)) if fds else self._sock.send(payload)
            except BlockingIOError:
                if not self._full:
                    self._full = True
                    self._loop.add_writer(self._sock.fileno(), self._writable)
                return
            except OSError as error:
                self._lost(str(error))
                return
            self._out.popleft()
        if self._full:
            self._full = False
            self._loop.remove_writer(self._sock.fileno())

    def _readable(self) -> None:
        for _ in range(64):
            try:
                size, ancillary, flags, _ = self._sock.recvmsg_into((self._room,), _ANCILLARY)
            except BlockingIOError:
                return
            except OSError as error:
                self._lost(str(error))
                return
            if not size:
                self._lost("it closed the connection")
                return
            self._take(bytes(self._room[:size]), _received_fds(ancillary) if ancillary else [], flags)
            if not self._waiting:
                return  # nothing else is expected; should there be, we are called again

    def _take(self, payload: bytes, fds: list[int], flags: int) -> None:
        head = _head.decode(payload)
        future = self._waiting.pop(head.id, None)
        if head.event or future is None or future.done():
            for fd in fds:  # an event, or nobody waits any more
                os.close(fd)
        elif flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
            future.set_exception(LauncherFailed("protocol", "a truncated reply"))
        elif head.ok:
            future.set_result((payload, fds))
        else:
            future.set_exception(LauncherFailed(head.stage or "launcher", head.error))

    def _lost(self, why: str) -> None:
        if self._closed:
            return
        self._shut()
        self._on_lost(why)

    def _shut(self) -> None:
        self._closed = True
        self._loop.remove_reader(self._sock.fileno())
        self._loop.remove_writer(self._sock.fileno())
        self._sock.close()
        for future in list(self._waiting.values()):
            if not future.done():
                future.set_exception(LauncherGone("launcher", "the launcher is gone"))

    async def close(self) -> None:
        """Ends the launcher and waits for it."""
        if not self._closed:
            self._shut()
        try:
            await asyncio.wait_for(self._process.wait(), 20)
        except TimeoutError:
            self._process.kill()
            await self._process.wait()


def _received_fds(ancillary: list[tuple[int, int, bytes]]) -> list[int]:
    fds = array.array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    for fd in fds:
        os.set_inheritable(fd, False)
    return list(fds)
