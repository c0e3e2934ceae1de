"""Running the tests of a grade in its sandbox, and what is seen of it. One coroutine for each contract of `protocol.grading`."""

from __future__ import annotations

import json
import os
import secrets

import msgspec

from dsec.protocol.errors import ErrorKind, Fault
from dsec.protocol.grading import (
    CommandRunner,
    ExitCode,
    GradeReason,
    GradeSpec,
    JUnit,
    PytestRunner,
    Score,
    Signal,
    TestSet,
)
from dsec.protocol.ids import new_exec_id
from dsec.protocol.link import Data
from dsec.protocol.specs import ExecDone, SandboxInfo, Usage

from . import junit, verdict
from .ground import Link
from .observed import MAX_LINE, Job, Observation, RunLimits
from .verdict import Judged, Run

RUNNER = "run/dsec-grading/runner.py"
"""Where the supervisor of pytest lies in a grading sandbox, seen from its root."""
TAIL = 8192
_KEPT = 1024 * 1024
_GRACE_S = 20.0
_ROOT = "0:0"
_TO_STDOUT = ("/bin/sh", "-c", 'exec 3>&1 1>&2; exec "$@"', "sh")
"""Descriptor 3 is what nothing else is printed to."""
_ALONE = "PYTHONHASHSEED=0 LANG=C.UTF-8 PATH=/usr/local/bin:/usr/bin:/bin"
_SUPERVISE = (
    "/bin/sh",
    "-c",
    f'exec 3>&1 1>&2; [ -x /usr/bin/env ] && exec /usr/bin/env -i {_ALONE} "$1" -s -S "$2"; exec "$1" -I -S "$2"',
    "sh",
)
"""With nothing of the environment, and with fixed hashes, which an isolated interpreter has only when it starts once more."""
FILE_KINDS = frozenset(kind for kind in ErrorKind if kind.value.startswith("file_")) | {
    ErrorKind.IS_A_DIRECTORY,
    ErrorKind.NOT_A_DIRECTORY,
}


class Ran(msgspec.Struct, frozen=True, kw_only=True):
    """judged None: nothing can be said of the code, since the run itself did not come about; `broken` says why.

    (That may still be the code's doing: it is, when the run comes about without it.)
    """

    judged: Judged | None
    broken: str = ""
    signals: tuple[Signal, ...] = ()
    status: int | None = None
    uncollected: int = 0
    output: str = ""
    output_bytes: int = 0


class Bench:
    """A grading sandbox with everything in place. workdir is absolute; changed: files of the agent's below it."""

    def __init__(
        self, link: Link, sandbox: str, workdir: str, request_id: str, changed: tuple[bytes, ...] = ()
    ) -> None:
        self._link = link
        self.changed = changed
        self._target = {"sandbox": sandbox, "request_id": request_id}
        self.workdir = workdir

    async def usage(self) -> Usage:
        return (await self._link.call("sandbox.info", self._target, SandboxInfo)).usage

    async def seal(self) -> None:
        await self._link.call("sandbox.seal", self._target, dict)

    async def remove(self, path: str) -> None:
        """A file or directory, if it is there."""
        params = {**self._target, "path": path.encode(), "recursive": True, "user": _ROOT}
        try:
            await self._link.call("fs.remove", params, dict)
        except Fault as fault:
            if fault.body.kind not in (ErrorKind.FILE_NOT_FOUND, ErrorKind.NOT_A_DIRECTORY):
                raise

    async def read(self, path: str, most: int) -> bytes:
        params = {**self._target, "path": path.encode(), "offset": 0, "length": most, "user": _ROOT}
        stream = await self._link.open("fs.read", params)
        try:
            found = b"".join([item.data async for item in stream if isinstance(item, Data)])
            await stream.result()
            return found
        finally:
            stream.cancel()

    async def run(self, argv: tuple[str, ...], stdin: bytes, **options: object) -> tuple[ExecDone, bytes, bytes]:
        """How it ended, what came on its stdout, and the end of what came on its stderr."""
        params = {
            **self._target,
            "exec_id": new_exec_id(),
            "argv": [word.encode() for word in argv],
            "stdin_open": bool(stdin),
            **options,
        }
        stream = await self._link.open("exec", params)
        out, err = bytearray(), bytearray()
        try:
            if stdin:
                await stream.send(stdin)
                await stream.end()
            async for item in stream:
                if isinstance(item, Data) and item.channel == 2:
                    err += item.data
                    del err[:-_KEPT]
                elif isinstance(item, Data):
                    out += item.data
            return await stream.result(ExecDone), bytes(out), bytes(err)
        finally:
            stream.cancel()

    def at(self, path: str) -> str:
        return path if path.startswith("/") else f"{self.workdir}/{path}" if path else self.workdir


async def run_tests(bench: Bench, spec: GradeSpec) -> Ran:
    """By the runner that the grade asks for. A command that cannot even be started (its directory is gone, or closed to its
    user) is broken, by the changes or by whoever asked."""
    try:
        return await _run(bench, spec)
    except Fault as fault:
        if fault.body.kind not in FILE_KINDS:
            raise
        return Ran(judged=None, broken=f"the command cannot be started: {fault}")


async def _run(bench: Bench, spec: GradeSpec) -> Ran:
    if isinstance(spec.runner, PytestRunner):
        return await _pytest(bench, spec, spec.runner)
    match spec.runner.verdict:
        case ExitCode() as wanted:
            return await _exit_code(bench, spec, spec.runner, wanted)
        case JUnit() as wanted:
            return await _junit(bench, spec, spec.runner, wanted)
        case Score() as wanted:
            return await _score(bench, spec, spec.runner, wanted)


# -- pytest ------------------------------------------------------------------------------------------------------------


def test_files(expect: TestSet) -> tuple[str, ...]:
    """The files that ids of pytest name, in the order in which they come first."""
    return tuple(dict.fromkeys(name.partition("::")[0] for name in expect.ids))


async def _pytest(bench: Bench, spec: GradeSpec, runner: PytestRunner) -> Ran:
    job = Job(
        nonce=secrets.token_hex(16),
        workdir=bench.workdir,
        tests=runner.paths or test_files(spec.expect),
        expected=spec.expect.ids,
        pythonpath=runner.pythonpath,
        python=runner.python,
        arguments=runner.arguments,
        env=runner.env,
        timeout=spec.timeout,
        limits=_limits(runner),
        tail_bytes=TAIL,
        changed=tuple(map(os.fsdecode, bench.changed)),
        allow=runner.allow,
    )
    told = json.dumps(msgspec.to_builtins(job)).encode()  # names that are no UTF-8 come through as lone surrogates
    argv = (*_SUPERVISE, runner.python, f"/{RUNNER}")
    done, out, err = await bench.run(
        argv,
        told,
        user=_ROOT,
        cwd=b"/",
        timeout=spec.timeout + _GRACE_S,
        max_output_bytes=2 * MAX_LINE,
    )
    usage = await bench.usage()
    seen, why = _observation(out, job.nonce)
    if not out and done.exit_code in (126, 127):
        why = f"the image has no interpreter {runner.python!r} that can be started (PytestRunner.python)"
    if seen is None or seen.failure:
        limit = run_of_supervisor(done, spec, usage)
        return Ran(
            judged=limit,
            broken=""
            if limit
            else f"{seen.failure if seen else why}; the supervisor ended with exit code {done.exit_code}",
            status=done.exit_code,
            output=_text(err),
            output_bytes=done.stderr_bytes,
        )
    run = Run(status=seen.status, timed_out=seen.timed_out, timeout=spec.timeout, usage=usage, met=done.reason or "")
    return Ran(
        judged=verdict.of_observation(spec.expect, seen, run),
        signals=verdict.signals_of(seen),
        status=seen.status,
        uncollected=seen.uncollected,
        output=seen.tail[-TAIL:],
        output_bytes=seen.output_bytes,
    )


def _limits(runner: PytestRunner) -> RunLimits:
    asked, usual = runner.limits, RunLimits()
    if asked is None:
        return usual
    named = {name: getattr(asked, name) for name in RunLimits.__struct_fields__ if getattr(asked, name) is not None}
    return msgspec.structs.replace(usual, **named)


def run_of_supervisor(done: ExecDone, spec: GradeSpec, usage: Usage) -> Judged | None:
    """When the supervisor told nothing because a limit ended it: the tests' doing, and a zero with its name."""
    run = verdict.run_of(done, spec.timeout, usage)
    if run.timed_out or run.met or usage.oom_kills or usage.pids_hits:
        return verdict.of_reports(spec.expect, (), run, regular=False)
    return None


def _observation(line: bytes, nonce: str) -> tuple[Observation | None, str]:
    """The one line that the supervisor tells, or why there is none."""
    if not line:
        return None, "nothing was told"
    if len(line) > MAX_LINE or line.count(b"\n") != 1 or not line.endswith(b"\n"):
        return None, f"{len(line)} bytes were told instead of one line"
    try:
        seen = msgspec.json.decode(line, type=Observation)
    except msgspec.MsgspecError as error:
        return None, f"what was told cannot be read: {error}"
    return (seen, "") if secrets.compare_digest(seen.nonce, nonce) else (None, "what was told has another nonce")


# -- commands ----------------------------------------------------------------------------------------------------------


async def _command(
    bench: Bench,
    spec: GradeSpec,
    runner: CommandRunner,
    argv: tuple[str, ...],
    stdin: bytes = b"",
    *,
    merge: bool = True,
) -> tuple[ExecDone, bytes, bytes]:
    return await bench.run(
        argv,
        stdin,
        user=runner.user,
        cwd=bench.at(runner.cwd).encode(),
        env=runner.env,
        timeout=spec.timeout,
        limits=runner.limits,
        merge_stderr=merge,
        max_output_bytes=_KEPT,
    )


async def _exit_code(bench: Bench, spec: GradeSpec, runner: CommandRunner, wanted: ExitCode) -> Ran:
    done, out, _ = await _command(bench, spec, runner, runner.argv)
    told = verdict.run_of(done, spec.timeout, await bench.usage())
    return _ran(verdict.of_exit_code(wanted, told), done, out)


async def _junit(bench: Bench, spec: GradeSpec, runner: CommandRunner, wanted: JUnit) -> Ran:
    """The report is read when nothing runs any more that could write it."""
    path = bench.at(wanted.path)
    await bench.remove(path)
    done, out, _ = await _command(bench, spec, runner, runner.argv)
    told = verdict.run_of(done, spec.timeout, await bench.usage())
    await bench.seal()
    regular = not told.timed_out and done.signal is None and done.exit_code < 126
    try:
        reports = junit.read(await bench.read(path, junit.MAX_REPORT + 1))
    except junit.Unreadable as why:
        return _ran(_no_report(spec, told, GradeReason.REPORT_UNREADABLE, str(why)), done, out)
    except Fault as fault:
        if fault.body.kind not in FILE_KINDS:
            raise
        is_missing = fault.body.kind in (ErrorKind.FILE_NOT_FOUND, ErrorKind.NOT_A_DIRECTORY)
        reason = GradeReason.REPORT_MISSING if is_missing else GradeReason.REPORT_UNREADABLE
        return _ran(_no_report(spec, told, reason, f"no report at {path}: {fault}"), done, out)
    return _ran(verdict.of_reports(spec.expect, reports, told, regular=regular), done, out)


def _no_report(spec: GradeSpec, run: Run, reason: GradeReason, detail: str) -> Judged:
    """A limit that was met says more than the report that it left unwritten."""
    met = verdict.of_reports(spec.expect, (), run, regular=True)
    if met.reason is not GradeReason.TESTS_MISSING:
        return met
    return msgspec.structs.replace(met, reason=reason, detail=detail)


class _Told(msgspec.Struct, frozen=True):
    """What a command that scores reads from its stdin."""

    nonce: str
    workdir: str


async def _score(bench: Bench, spec: GradeSpec, runner: CommandRunner, wanted: Score) -> Ran:
    nonce = secrets.token_hex(16)
    stdin = msgspec.json.encode(_Told(nonce, bench.workdir)) + b"\n"
    done, out, err = await _command(bench, spec, runner, (*_TO_STDOUT, *runner.argv), stdin, merge=False)
    told = verdict.run_of(done, spec.timeout, await bench.usage())
    return msgspec.structs.replace(
        _ran(verdict.of_score(wanted, out, nonce, told), done, err), output_bytes=done.stderr_bytes
    )


def _ran(judged: Judged, done: ExecDone, output: bytes) -> Ran:
    return Ran(judged=judged, status=done.exit_code, output=_text(output), output_bytes=done.stdout_bytes)


def _text(output: bytes) -> str:
    return output[-TAIL:].decode("utf-8", "replace")
