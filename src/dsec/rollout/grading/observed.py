"""What the runner inside a grading sandbox is told, and what it tells: the contract between `service.py` and `runner/`.

The runner is one self-contained file that the sandbox's root runs as `python3 -I -S <file>`. It reads one `Job` (JSON) from
stdin to its end, starts the tests as another user without privilege, and writes exactly one line to descriptor 3: an
`Observation` as JSON, with the job's nonce, at most `MAX_LINE` bytes long. Whatever else it prints goes to stderr. What has
the nonce wrong, comes twice or is no such line is as good as nothing: then the runner has been tampered with.
"""

from __future__ import annotations

from enum import Enum

import msgspec

from dsec.protocol.grading import Signal as Signal

MAX_LINE = 8 * 1024 * 1024
MAX_REPORTS = 50_000
MAX_ID = 4096
"""Characters of a test's id."""
MAX_SIGNALS = 100
MAX_DETAIL = 1000
"""Characters of a signal's detail."""


class Outcome(str, Enum):
    """Of one test: the worst of setup, call and teardown. error: not the test itself, but its setup or teardown failed."""

    PASSED = "passed"
    FAILED = "failed"
    ERROR = "error"
    SKIPPED = "skipped"
    XFAILED = "xfailed"
    XPASSED = "xpassed"


class RunLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Of the tests, below those of the sandbox (setrlimit(2), each process alone). None: the sandbox's own.

    memory_mb: address space, MiB; file_mb: size of a file that is written, MiB.
    """

    memory_mb: int | None = None
    file_mb: int | None = 1024
    open_files: int | None = 1024
    processes: int | None = 256
    cpu_s: int | None = None


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """What to run.

    nonce: hex; known to nobody else in the sandbox. workdir: absolute; the tests run there. tests: what is collected, relative
    to workdir (or absolute). expected: the ids that count, as pytest prints them relative to workdir; every collected test is
    run, others are not reported. pythonpath: directories for sys.path, in order, relative to workdir (or absolute).
    python: the interpreter that has pytest. arguments: more for pytest, `-k` and the like. env: more for the tests' environment.
    timeout: wall-clock seconds for the tests. uid, gid: whom they run as. tail_bytes: how much of the end of their output
    is told. changed: the files of the agent, relative to workdir; None: not known, then what only the agent's code must not do
    is told by signals and voids nothing. allow: what this task's own source must do nevertheless (docs/security.md).
    """

    nonce: str
    workdir: str
    tests: tuple[str, ...]
    expected: tuple[str, ...]
    pythonpath: tuple[str, ...] = ()
    python: str = "python3"
    arguments: tuple[str, ...] = ()
    env: dict[str, str] = {}
    timeout: float = 600.0
    uid: int = 65534
    gid: int = 65534
    limits: RunLimits = RunLimits()
    tail_bytes: int = 8192
    changed: tuple[str, ...] | None = None
    allow: tuple[str, ...] = ()


class Report(msgspec.Struct, frozen=True):
    """One test that was expected and has been run. The same id again is another report: an honest run has each once."""

    id: str
    outcome: Outcome
    seconds: float = 0.0


class Observation(msgspec.Struct, frozen=True, kw_only=True):
    """What the runner saw.

    reports: in the order in which they came. void: why none of them can be believed (one is forged, say), "" else. status: of
    the tests' main process, 128 + n when signal n ended it, None when it was never started. failure: why the tests could not
    even be started (no such interpreter, no pytest, no such directory), "" else. Failures of the code under test (it cannot
    be imported, say) are none of these: they are reports, or missing ones. output_bytes: all that the tests printed; tail:
    its end. seconds: wall clock. left: processes that still lived when the main process had ended; they are dead now.
    uncollected: files and the like that pytest could not collect.
    """

    nonce: str
    reports: tuple[Report, ...] = ()
    status: int | None = None
    failure: str = ""
    void: str = ""
    timed_out: bool = False
    signals: tuple[Signal, ...] = ()
    tail: str = ""
    output_bytes: int = 0
    seconds: float = 0.0
    left: int = 0
    uncollected: int = 0
