"""Commands and sessions of a rollout: what is asked of them is a step each."""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Coroutine
from types import TracebackType
from typing import Any, TypeVar

import msgspec
from blake3 import blake3

from dsec.protocol.errors import Fault
from dsec.protocol.ids import step_exec_id
from dsec.protocol.rollouts import RolloutState, StepRecord
from dsec.protocol.signals import signal_number
from dsec.protocol.specs import ExecDone, ExecReply, PtySize

from .commands import WAIT_S, ExecBody, body_of, cells, run, source_of, text_or_bytes
from .errors import DSecError, InvalidRequest, NotFound, TooLarge, Unsupported, from_body
from .process import Process
from .replay import Contents
from .results import Event, ExecResult, Exit, Stderr, Stdout, exec_result
from .session import Session
from .spool import spool
from .stdin import Fed
from .steps import Asked, Steps, request_of, result_of
from .transport import Target

T = TypeVar("T")
_MIB = 1024 * 1024
PIECE = 256 * 1024  # bytes of stdin that one step writes
KEPT = 16 * _MIB  # of each stream, by the log
LONGEST = 4 * _MIB - 4096  # bytes of a command; twice what the kernel takes
_WRITER = "rollout"

StepStdin = bytes | bytearray | memoryview | str | AsyncIterable[bytes] | None


def command(
    steps: Steps, stdin: StepStdin, make: Callable[[bytes | None], ExecBody], *, check: bool
) -> Coroutine[Any, Any, ExecResult]:
    """The next step runs a command. make: what is asked, by the whole stdin."""
    source = source_of(stdin)
    if source is None or isinstance(source, bytes):
        return steps.step(lambda number: _command(steps, number, make(source), source, check))
    within(make(b""))  # what cannot be asked for is no step
    pieces = source

    async def read(number: int) -> Asked[ExecResult]:
        data = (await spool(pieces)).whole()
        return _command(steps, number, make(data), data, check)

    return steps.later(read)


def _command(steps: Steps, number: int, asked: ExecBody, stdin: bytes | None, check: bool) -> Asked[ExecResult]:
    body = within(named(asked, number, stdin))

    async def live(target: Target) -> ExecResult:
        result = msgspec.structs.replace(await run(steps.transport, target, body, stdin), step=number)
        return result.check() if check else result

    def recorded(record: StepRecord, contents: Contents) -> ExecResult:
        result = _replayed(record, contents, body.max_output_bytes)
        return result.check() if check else result

    return Asked(request_of("exec", msgspec.structs.asdict(body)), live, recorded)


def named(body: ExecBody, number: int, stdin: bytes | None) -> ExecBody:
    """With the id that its step gives the command, and the digest of all its stdin."""
    digest = "" if stdin is None else blake3(stdin).hexdigest()
    return msgspec.structs.replace(body, exec_id=step_exec_id(number), stdin_digest=digest)


def within(body: ExecBody) -> ExecBody:
    """InvalidRequest for more output than the log keeps, which could not be replayed; TooLarge for a command that no service
    takes: what is refused before it is recorded must be no step."""
    if body.max_output_bytes > KEPT:
        raise InvalidRequest(
            f"max_output_bytes={body.max_output_bytes}: the log keeps {KEPT} bytes of each stream of a step",
            hint="let the command write to a file, and read that",
        )
    words = (body.line or b"", *body.argv, *(f"{name}={value}".encode() for name, value in body.env.items()))
    if (size := sum(map(len, words)) + len(words)) > LONGEST:
        raise TooLarge(
            f"a command line, arguments and environment of {size} bytes are over the limit of {LONGEST}",
            hint="write the script or the data to a file with files.write, or pass it through stdin",
        )
    return body


def _replayed(record: StepRecord, contents: Contents, most: int = KEPT) -> ExecResult:
    done = result_of(record, ExecDone)
    for name, true_size in (("stdout", done.stdout_bytes), ("stderr", done.stderr_bytes)):
        if len(contents.get(name, b"")) < min(true_size, most):
            raise Unsupported(
                f"{name} of step {record.step} had {true_size} bytes, of which the log has {len(contents.get(name, b''))}: "
                "it cannot be replayed",
                hint="the service keeps less of each stream than this SDK takes",
            )
    result = exec_result(done, contents.get("stdout", b""), contents.get("stderr", b""))
    return msgspec.structs.replace(result, step=record.step, replayed=True)


def nothing(_: StepRecord, __: Contents) -> None:
    """Of a step that returns nothing."""


class RolloutProcess(Process):
    """A command that runs on its own in a rollout. wait, write, close_stdin, resize and signal are steps.

    `events` gives what is printed as it comes, and is one step, which records all of it at the end; on replay it is one piece of
    each stream. `poll` looks at the sandbox as it is now and is not recorded.
    """

    def __init__(self, steps: Steps, exec_id: str, pid: int) -> None:
        super().__init__(steps.transport, steps.target, exec_id, pid)
        self._steps = steps
        self._written = 0

    def wait(self, *, check: bool = False) -> Coroutine[Any, Any, ExecResult]:
        """Its end with all output kept of it. May be called again: another step."""
        return self._steps.step(lambda number: self._waiting(number, check))

    def events(self, *, cursor: int = 0) -> AsyncIterator[Event]:
        """Stdout and Stderr as they come, then Exit. A step from the moment it is called, whether it is read or not."""
        number, info = self._steps.count, self._steps.info
        live = info.state is RolloutState.OPEN and (number >= info.steps or number in info.unknown)
        return self._events(cursor, live, self._steps.step(self._waiting))

    async def _events(self, cursor: int, live: bool, ending: Coroutine[Any, Any, ExecResult]) -> AsyncIterator[Event]:
        if not live:
            result = await ending
            kept = len(result.stdout)
            if cursor < kept:
                yield Stdout(result.stdout[cursor:], cursor)
            behind = max(cursor - kept, 0)
            if behind < len(result.stderr):
                yield Stderr(result.stderr[behind:], kept + behind)
        else:
            try:
                async for event in super().events(cursor=cursor):
                    if not isinstance(event, Exit):
                        yield event
            except BaseException:
                ending.close()
                raise
            result = await ending
        yield Exit(msgspec.structs.replace(result, stdout=b"", stderr=b""))

    def _waiting(self, number: int, check: bool = False) -> Asked[ExecResult]:
        async def live(target: Target) -> ExecResult:
            result = msgspec.structs.replace(await self._ended(target), step=number)
            return result.check() if check else result

        def recorded(record: StepRecord, contents: Contents) -> ExecResult:
            result = _replayed(record, contents)
            return result.check() if check else result

        return Asked(request_of("exec.wait", {"exec_id": self.exec_id}), live, recorded)

    async def _ended(self, target: Target) -> ExecResult:
        """Asks until it has ended."""
        out: list[bytes] = []
        err: list[bytes] = []
        while True:
            cursor = sum(map(len, out)) + sum(map(len, err))
            query = {"cursor": str(cursor), "wait_s": str(WAIT_S)}
            path = f"{self._path}/wait"
            reply = await self._transport.call(
                "POST", path, ExecReply, query=query, body=b"", target=target, wait=WAIT_S
            )
            out.append(reply.stdout)
            err.append(reply.stderr)
            if reply.done is not None:
                return exec_result(reply.done, b"".join(out), b"".join(err))

    def write(self, data: bytes | str) -> Coroutine[Any, Any, None]:
        """Appends to stdin; returns when the sandbox holds the bytes. A step for each 256 KiB.

        Conflict when stdin is closed or nobody reads it.
        """
        whole = data.encode() if isinstance(data, str) else bytes(data)
        pieces = [whole[start : start + PIECE] for start in range(0, len(whole), PIECE)] or [b""]
        if len(pieces) == 1:
            return self._steps.step(lambda _: self._writing(whole))
        self._steps.check()
        return self._steps.series([self._writing(piece) for piece in pieces])

    def _writing(self, piece: bytes) -> Asked[None]:
        offset, self._written = self._written, self._written + len(piece)
        query = {"writer": _WRITER, "offset": str(offset)}

        async def live(target: Target) -> None:
            path = f"{self._path}/stdin"
            await self._transport.call("POST", path, Fed, query=query, body=piece, target=target, wait=WAIT_S)

        asked = {"exec_id": self.exec_id, "writer": _WRITER, "offset": offset, "data": piece}
        return Asked(request_of("exec.write", asked), live, nothing)

    def close_stdin(self) -> Coroutine[Any, Any, None]:
        """No more bytes: the command reads end-of-file."""
        asked: dict[str, object] = {"writer": _WRITER, "offset": self._written}
        query = {"writer": _WRITER, "offset": str(self._written), "close": "1"}
        return self._simple("exec.close_stdin", asked, "stdin", query=query)

    def resize(self, cols: int, rows: int) -> Coroutine[Any, Any, None]:
        """The size of its terminal from now on, each 1 to 4096."""
        cells(PtySize(cols, rows))
        size: dict[str, object] = {"cols": cols, "rows": rows}
        return self._simple("exec.resize", size, "resize", body=msgspec.json.encode(size))

    def signal(self, name: str | int) -> Coroutine[Any, Any, None]:
        """Signals the command's process group, by name ("TERM") or number; KILL ends its whole tree. It arrives once."""
        try:
            number = signal_number(name)
        except Fault as fault:
            raise from_body(fault.body, self._target.sandbox_id) from None
        return self._simple("exec.signal", {"signal": number}, "signal", body=msgspec.json.encode({"signal": number}))

    def kill(self) -> Coroutine[Any, Any, None]:
        """Ends the command's whole tree, whatever sessions and parents its processes made for themselves."""
        return self.signal("KILL")

    def _simple(
        self, kind: str, params: dict[str, object], what: str, *, query: dict[str, str] | None = None,
        body: bytes = b"",
    ) -> Coroutine[Any, Any, None]:  # fmt: skip
        async def live(target: Target) -> None:
            await self._transport.request("POST", f"{self._path}/{what}", query=query, body=body, target=target)

        request = request_of(kind, {"exec_id": self.exec_id, **params})
        return self._steps.step(lambda _: Asked(request, live, nothing))


class RolloutSession(Session):
    """A shell of a rollout that lives on between commands. run_shell, interrupt and close are steps.

    `async with session:` closes it at the end of the block, but not when that is left by an exception: a step that is made only
    because a program is being killed would not be there when the program replays.
    """

    def __init__(self, steps: Steps, name: str) -> None:
        super().__init__(steps.transport, steps.target, name)
        self._steps = steps

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            await self.close()

    def run_shell(
        self,
        line: str,
        *,
        stdin: bytes | bytearray | memoryview | str | AsyncIterable[bytes] | None = None,
        timeout: float | None = 600,
        idle_timeout: float | None = None,
        max_output_bytes: int = 16 * _MIB,
        exec_id: str | None = None,
        check: bool = False,
    ) -> Coroutine[Any, Any, ExecResult]:
        """Runs a line (or many) in the session's shell and waits for its end. As of `Session`; exec_id is the step's own."""
        no_exec_id(exec_id)

        def make(whole: bytes | None) -> ExecBody:
            return body_of(
                text_or_bytes(line), cwd=None, env=None, user=None, stdin=whole, timeout=timeout,
                idle_timeout=idle_timeout, max_output_bytes=max_output_bytes, merge_stderr=False, exec_id=None, limits=None,
                session=self.name,
            )  # fmt: skip

        return command(self._steps, stdin, make, check=check)

    def interrupt(self) -> Coroutine[Any, Any, bool]:
        """Ctrl-C for what runs; True when it has ended, False when it still runs after a second."""
        return self._asked("session.interrupt", Session.interrupt, lambda record, _: result_of(record, _Ended).ended)

    def close(self) -> Coroutine[Any, Any, None]:
        """Ends its shell and everything started in it; returns when that is gone. Idempotent."""
        return self._asked("session.close", Session.close, nothing, _gone_is_fine)

    def _asked(
        self,
        kind: str,
        ask: Callable[[Session], Awaitable[T]],
        recorded: Callable[[StepRecord, Contents], T],
        otherwise: Callable[[DSecError], T] | None = None,
    ) -> Coroutine[Any, Any, T]:
        request = request_of(kind, {"name": self.name})
        return self._steps.step(
            lambda _: Asked(
                request, lambda target: ask(Session(self._transport, target, self.name)), recorded, otherwise
            )
        )


class _Ended(msgspec.Struct):
    ended: bool = True


def no_exec_id(exec_id: str | None) -> None:
    """The ids of a rollout's commands are made of their steps, so that they replay the same."""
    if exec_id is not None:
        raise InvalidRequest(f"exec_id={exec_id!r}: a step of a rollout has an id of its own", hint="leave it out")


def _gone_is_fine(error: DSecError) -> None:
    if not isinstance(error, NotFound):
        raise error
