"""What the HTTP interface takes and gives beyond the shared specs, and strict decoding of it."""

from __future__ import annotations

import json
import re
from typing import Literal, TypeVar

import msgspec
from blake3 import blake3
from msgspec import UNSET, UnsetType

from dsec.protocol.errors import ErrorBody, ErrorKind, Fault
from dsec.protocol.grading import GradeSpec
from dsec.protocol.ids import new_exec_id, step_exec_id, valid_exec_id
from dsec.protocol.rollouts import JobInfo, JobLimits, JobName, RolloutInfo, StepRef
from dsec.protocol.scopes import Right
from dsec.protocol.specs import Cells, DSecContainerRunArgs, EdgeStatus, ExecSpec, SandboxInfo, SessionSpec, Whole

T = TypeVar("T")
MAX_BURST = 100_000
MAX_WAIT_S = 300.0


class ContainerArgs(DSecContainerRunArgs, frozen=True, forbid_unknown_fields=True):
    """`DSecContainerRunArgs`, strictly."""


class CreateRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One sandbox, or a burst when `count` is there or `args` is a list. timeout in seconds, from request to ready.

    A burst makes `count` of each args; `index` of an outcome counts through the list, all of one before the next. job: the
    name of an open job that they belong to.
    """

    args: ContainerArgs | list[ContainerArgs] = ContainerArgs()
    count: Whole | UnsetType = UNSET
    timeout: float = 120
    job: JobName | Literal[""] = ""
    backend: Literal["container"] = "container"


class ExecRequest(ExecSpec, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`ExecSpec` for HTTP. `command` is argv (list) or line (string) as text, for callers without base64.

    The answer comes when the command ends or after `wait_s` seconds (or some MiB of output) with `done` null: ask again
    with the same exec_id and `cursor` advanced by the bytes received of both streams. An exec_id is made when none is
    given, so only a caller that sends one may safely repeat a request. A step of a rollout (header x-dsec-step) has one of its
    own, and may be repeated as it is; its output comes with its end, stdout before stderr.
    """

    exec_id: str = ""
    command: str | list[str] | None = None
    wait_s: float = 25
    cursor: Whole = 0

    def params(self, step: StepRef | None = None) -> dict[str, object]:
        """The link's parameters of `exec`; Fault invalid_request for what no edge need see. step: of a rollout, that it is."""
        params = msgspec.structs.asdict(self)
        for name in ("command", "wait_s", "cursor"):
            del params[name]
        given = [name for name in ("argv", "line", "command") if getattr(self, name)]
        if len(given) != 1:
            raise Fault(
                ErrorKind.INVALID,
                f"exactly one of argv, line and command is needed, not {' and '.join(given) or 'none'}",
            )
        if not 0 <= self.wait_s <= MAX_WAIT_S or self.cursor < 0:
            raise Fault(ErrorKind.INVALID, f"wait_s is not between 0 and {MAX_WAIT_S:g}, or cursor is negative")
        if self.max_output_bytes < 0:
            raise Fault(
                ErrorKind.INVALID, f"max_output_bytes={self.max_output_bytes} is negative", hint="0 keeps nothing"
            )
        if self.pty is not None and self.session is not None:
            raise Fault(
                ErrorKind.INVALID, "pty and session exclude each other", hint="run the command outside a session"
            )
        if isinstance(self.command, str):
            params["line"] = self.command.encode()
        elif self.command:
            params["argv"] = [word.encode() for word in self.command]
        params["exec_id"] = self._named(step)
        if step is not None and self.stdin is not None and not self.stdin_digest:
            params["stdin_digest"] = blake3(self.stdin).hexdigest()
        return params

    def _named(self, step: StepRef | None) -> str:
        if step is None:
            return checked_exec_id(self.exec_id or new_exec_id())
        name = step_exec_id(step.step)
        if self.exec_id not in ("", name):
            raise Fault(
                ErrorKind.INVALID,
                f"exec_id {self.exec_id[:80]!r}: the command of step {step.step} is {name!r}",
                hint="leave it out",
            )
        return name


def checked_exec_id(exec_id: str) -> str:
    if not valid_exec_id(exec_id):
        raise Fault(
            ErrorKind.INVALID,
            f"exec_id {exec_id[:80]!r} is not 1 to 64 of letters, digits, '.', '_', ':' and '-'",
        )
    return exec_id


class Started(msgspec.Struct, frozen=True):
    """A detached command: pid as seen inside the sandbox."""

    exec_id: str
    pid: int = 0


class JobRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A job to open, or to join when there is one of that name: what is left out then stays as it is.

    lease in seconds: so long after the last `renew` (or `open`, creation, `resume`) of the last client it is paused.
    """

    name: JobName
    lease: float = 60
    limits: JobLimits = JobLimits()
    labels: dict[str, str] | None = None


class KeyRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A scoped key to make, good for some rollouts of a job: for those whose names match `rollouts` (globs; null: all).

    may: use them and their sandboxes, create new ones, grade their changes. network: names that rules of their sandboxes may
    allow. layers: globs of what new ones may be made from (null: any). ttl_s: seconds that it lasts, an hour when left out.
    """

    job: JobName
    rollouts: list[str] | None = None
    may: tuple[Right, ...] = (Right.USE,)
    network: list[str] = []
    layers: list[str] | None = None
    ttl_s: float | None = None
    note: str = ""


class RenewRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """lease: seconds from now on, the job's own when it is left out; id: conflict when the job is another one by now."""

    lease: float | None = None
    id: str = ""


class JobList(msgspec.Struct, frozen=True):
    jobs: list[JobInfo]


class TtlRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Seconds, null for never; what is absent stays as it is."""

    running_stop: float | UnsetType | None = UNSET
    total: float | UnsetType | None = UNSET


class NetworkRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The rules from now on: mirror or domain name -> allowed; empty for no network at all."""

    rules: dict[str, bool]


class ChangesRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """include: globs of paths relative to `/`; empty for everything. max_bytes: of contents carried."""

    include: list[str] = []
    max_bytes: Whole = 16 * 1024 * 1024


class MoveRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Paths are base64."""

    source: bytes
    target: bytes
    user: str | None = None


class MkdirRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """path is base64; mode is permission bits."""

    path: bytes
    mode: Whole = 0o755
    parents: bool = True
    user: str | None = None


class SessionRequest(SessionSpec, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`SessionSpec`, strictly."""


class Interrupted(msgspec.Struct, frozen=True):
    """ended: nothing runs in the session any more."""

    ended: bool


class SignalRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A signal by name (`TERM` or `SIGTERM`) or number, to the command's process group; KILL ends its whole tree."""

    signal: str | Whole


class ResizeRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The terminal's size from now on, in characters, each 1 to 4096."""

    cols: Cells  # required, both: half a size is a mistake
    rows: Cells


class StopManyRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Every sandbox that carries all of these labels; empty labels would be all of them, so `all` must then be true.

    Or, with `burst` (its idempotency_key), every sandbox of a burst but those in `keep`.
    """

    labels: dict[str, str] = {}
    all: bool = False
    burst: str = ""
    keep: list[str] = []


class Count(msgspec.Struct, frozen=True):
    count: int


class Size(msgspec.Struct, frozen=True):
    """Bytes written."""

    size: int


class Entries(msgspec.Struct, frozen=True):
    """Members of an archive unpacked."""

    entries: int


class Done(msgspec.Struct, frozen=True):
    """Nothing to say: it is done."""


class RolloutRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which rollout of which job ("": of none), and what its sandbox is made from when there is none yet; another opening of
    it must ask for the same. timeout in seconds, for that creation."""

    name: str
    job: str = ""
    args: ContainerArgs = ContainerArgs()
    timeout: float = 120


class FinishRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """epoch: of the opening that finishes it. valid false: nothing may be learned from it. stop: its sandbox, too."""

    epoch: Whole
    reward: float | None = None
    valid: bool | None = None
    stop: bool = True


class GradeRequest(GradeSpec, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`GradeSpec`, strictly. grade_id: the same is the same grade; one is made when none is given, so only a caller that sends
    one may safely repeat a request. The answer comes with the verdict or after `wait_s` seconds with `done` null."""

    args: ContainerArgs = ContainerArgs()
    grade_id: str = ""
    wait_s: float = 25

    def spec(self) -> GradeSpec:
        return GradeSpec(**{name: getattr(self, name) for name in GradeSpec.__struct_fields__})


class RolloutList(msgspec.Struct, frozen=True):
    rollouts: list[RolloutInfo]


class SandboxList(msgspec.Struct, frozen=True):
    sandboxes: list[SandboxInfo]


class EdgeHealth(msgspec.Struct, frozen=True):
    status: EdgeStatus
    connected: bool
    suspect: bool


class PlatformStatus(msgspec.Struct, frozen=True):
    """Every edge's last beat."""

    version: str
    edges: list[EdgeHealth]


class Health(msgspec.Struct, frozen=True):
    """The apiserver answers; `edges` of them are connected."""

    ok: bool
    version: str
    edges: int


class ErrorReply(msgspec.Struct, frozen=True):
    error: ErrorBody


_decoders: dict[object, msgspec.json.Decoder[object]] = {}


_STRING = re.compile(rb'"([^"\\]*(?:\\.[^"\\]*)*)"\s*(:?)', re.DOTALL)
_CHECKED = 1024 * 1024  # bytes; a longer body is all data, or a list of many


def _no_key_twice(body: bytes) -> None:
    """Fault when an object of the body, which is JSON, has a key twice: which of them counts is a matter of the reader."""
    keys = [name for name, colon in _STRING.findall(body) if colon]
    if len(set(keys)) == len(keys) and b"\\" not in b"".join(keys):
        return
    json.loads(body, object_pairs_hook=_unique)


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise Fault(ErrorKind.INVALID, f"the body has {twice[:80]!r} twice in one object")
    return found


def decode_json(body: bytes, kind: type[T]) -> T:
    """JSON to a request type; what is wrong is a Fault that names the field."""
    decoder = _decoders.get(kind)
    if decoder is None:
        decoder = _decoders[kind] = msgspec.json.Decoder(kind)
    try:
        found = decoder.decode(body or b"{}")
    except msgspec.ValidationError as error:
        raise Fault(ErrorKind.INVALID, str(error), hint="GET /openapi.json describes every request") from error
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise Fault(ErrorKind.INVALID, f"the body is not JSON: {error}") from error
    if len(body) <= _CHECKED:
        _no_key_twice(body)
    return found  # type: ignore[return-value]
