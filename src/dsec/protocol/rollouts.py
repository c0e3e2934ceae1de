"""Jobs, rollouts and their recorded steps, as they cross a process boundary (report, 6)."""

from __future__ import annotations

import re
from enum import Enum
from typing import Annotated, NamedTuple

import msgspec

from .errors import ErrorBody, ErrorKind, Fault
from .specs import DSecContainerRunArgs, Reason

STEP_HEADER = "x-dsec-step"
MAX_STEP = 2**53  # what JSON carries
_STEP = re.compile(
    r"(?P<rollout>ro-[a-z0-9]{1,16}-[0-9a-z]{12}):(?P<epoch>\d{1,15}):(?P<step>\d{1,15})(?::(?P<digest>[0-9a-f]{64}))?"
)


class StepRef(msgspec.Struct, frozen=True, omit_defaults=True):
    """Which step of which rollout a request is. In HTTP: `x-dsec-step: <rollout>:<epoch>:<step>[:<digest>]`.

    epoch: of the opening that asks; an older one than the rollout's is refused. digest: blake3 of the canonical request
    (`protocol.requests`) as the caller sees it; left out, the edge's own view of the request counts.
    """

    rollout: str
    epoch: int
    step: int
    digest: str = ""

    def __str__(self) -> str:
        return f"{self.rollout}:{self.epoch}:{self.step}" + (f":{self.digest}" if self.digest else "")


def step_ref(text: str) -> StepRef:
    """Of the header's text; Fault invalid_request."""
    match = _STEP.fullmatch(text)
    if match is None or int(match["step"]) > MAX_STEP:
        raise Fault(
            ErrorKind.INVALID,
            f"header {STEP_HEADER}: {text[:80]!r} is not <rollout>:<epoch>:<step>[:<digest>]",
        )
    return StepRef(match["rollout"], int(match["epoch"]), int(match["step"]), match["digest"] or "")


class Blob(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Bytes that a step gave or took, by content. digest: blake3 of what is kept; size: bytes kept; total: true size.

    A content of which nothing is kept has size 0 and the digest of the whole; of one that is kept in part, whole is the digest
    of all. data: the bytes, where they are short enough to travel with the record; the rest is asked for by digest.
    """

    digest: str
    size: int
    total: int
    whole: str = ""
    data: bytes | None = None


NOTHING = msgspec.Raw(b"null")


def _nothing() -> msgspec.Raw:
    return NOTHING


class StepRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One step: what was asked, and what came of it.

    kind is the link's method ("exec", "fs.write", "sandbox.network", ...); request its canonical form (JSON object), digest
    what identifies it. Times in Unix seconds. done_at None: the outcome is not known (yet). Exactly one of result (JSON of the
    method's reply, else null) and error (one that the sandbox's own state caused, such as a missing file) is there when it is.
    outputs: by name ("stdout", "stderr", "data"); inputs: contents that the step wrote into the sandbox.
    """

    step: int
    kind: str
    digest: str
    request: msgspec.Raw
    sandbox: str
    incarnation: int
    asked_at: float
    epoch: int = 0
    done_at: float | None = None
    result: msgspec.Raw = msgspec.field(default_factory=_nothing)  # msgspec reads no union with Raw
    error: ErrorBody | None = None
    outputs: dict[str, Blob] = {}
    inputs: dict[str, Blob] = {}


class RolloutState(str, Enum):
    """open: may go on; finished: its caller said so; lost: its sandbox is gone, and only what is recorded can be had."""

    OPEN = "open"
    FINISHED = "finished"
    LOST = "lost"


class RolloutInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A rollout. steps: how many are recorded (0 to steps - 1, without gaps), unknown: those of them without an outcome.

    sandbox is "" only while it is being made; reason says why it ended. reward and valid are what `finish` was told.
    bytes: size of its log and contents on disk. damaged: its log was changed on the disk; what came of this step and of those
    after it cannot be told, and nothing more is recorded.
    """

    id: str
    job: str
    name: str
    state: RolloutState
    epoch: int
    sandbox: str
    incarnation: int
    layers: tuple[str, ...]
    args: DSecContainerRunArgs
    steps: int
    unknown: tuple[int, ...] = ()
    created_at: float = 0.0
    changed_at: float = 0.0
    finished_at: float | None = None
    reason: Reason | None = None
    reward: float | None = None
    valid: bool | None = None
    bytes: int = 0
    damaged: int | None = None


class JobState(str, Enum):
    """paused: by its lease's end or by request; any request to one of its sandboxes resumes that one."""

    RUNNING = "running"
    PAUSED = "paused"
    STOPPING = "stopping"
    STOPPED = "stopped"


class JobWork(str, Enum):
    """What is being done to all sandboxes of a job; "": nothing."""

    NONE = ""
    PAUSE = "pause"
    RESUME = "resume"
    STOP = "stop"


JobName = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._@+-]{0,99}$")]


class JobLimits(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Of all its sandboxes that live, paused ones too: how many, and the sums of their own limits. None: what the node has."""

    max_sandboxes: Annotated[int, msgspec.Meta(ge=0, le=10**6)] | None = None
    cpu_cores: Annotated[float, msgspec.Meta(ge=0, le=1e6)] | None = None
    memory_mb: Annotated[int, msgspec.Meta(ge=0, le=10**9)] | None = None


class JobUsage(msgspec.Struct, frozen=True, kw_only=True):
    """sandboxes by state now; memory and cpu of them now; the rest since the job began.

    cpu_s: seconds of CPU time, ended sandboxes too. memory_mb_s: MiB times seconds, sampled. created, ended; invalid: ended
    for a reason that nothing inside a sandbox can cause, so that no reward may be computed from them.
    """

    sandboxes: dict[str, int] = {}
    memory_bytes: int = 0
    swap_bytes: int = 0
    cpu_s: float = 0.0
    memory_mb_s: float = 0.0
    created: int = 0
    ended: int = 0
    invalid: int = 0
    rollouts: int = 0
    steps: int = 0


class JobInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A job. lease in seconds: so long after its last client's last sign of life it is paused. epoch counts its openings.

    lease_until in Unix seconds. paused_by: "lease" or "request", "" while it is not paused. under_way: what is just being
    done to its sandboxes; its state says already what that leads to.
    """

    id: str
    name: str
    state: JobState
    lease: float
    lease_until: float
    limits: JobLimits
    labels: dict[str, str]
    created_at: float
    epoch: int = 0
    paused_by: str = ""
    under_way: JobWork = JobWork.NONE
    usage: JobUsage = JobUsage()


class Diverged(NamedTuple):
    """Where two requests of one step differ: name -> (recorded, asked), as JSON text; "" where one has it not."""

    fields: dict[str, tuple[str, str]]
