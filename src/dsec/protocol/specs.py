"""Requests and results as frozen structs: the same types in the SDK, the apiserver and the edge.

JSON (HTTP) and msgpack (link) encodings are msgspec's own for these types; `bytes` is base64 in JSON and bin in msgpack.
"""

from __future__ import annotations

from enum import Enum
from typing import Annotated, Literal

import msgspec

Whole = Annotated[
    int, msgspec.Meta(ge=-(2**53), le=2**53)
]  # what every JSON reader holds exactly; ranges proper are checked later
Cells = Annotated[int, msgspec.Meta(ge=1, le=4096)]  # columns or rows of a terminal


class State(str, Enum):
    """Lifecycle: creating -> running <-> paused -> stopping -> stopped(reason), and failed(reason)."""

    CREATING = "creating"
    RUNNING = "running"
    PAUSED = "paused"
    STOPPING = "stopping"
    STOPPED = "stopped"
    FAILED = "failed"


class Reason(str, Enum):
    """Why a sandbox ended: a closed set."""

    USER = "user"
    TTL_IDLE = "ttl_idle"
    TTL_TOTAL = "ttl_total"
    JOB_END = "job_end"
    OOM = "oom"
    DISK_FULL = "disk_full"
    PIDS = "pids"
    AGENT_LOST = "agent_lost"
    EDGE_RESTART = "edge_restart"
    NODE_LOST = "node_lost"
    EVICTED = "evicted"
    CREATE_FAILED = "create_failed"


class _ContainerOptions(msgspec.Struct, frozen=True, kw_only=True):
    layers: tuple[str, ...] = ()
    cpu_cores_limit: float = 1
    memory_limit_mb: Whole = 1024
    disk_limit_mb: Whole = 4096
    pids_limit: Whole = 512
    ttl_running_stop: float | None = 1800
    ttl_total: float | None = None
    network_rules: dict[str, bool] = {}
    init_user: str = "root"
    env: dict[str, str] = {}
    workdir: str | None = None
    labels: dict[str, str] = {}
    qos: Literal["best_effort", "latency_sensitive"] = "best_effort"
    idempotency_key: str | None = None


class DSecContainerRunArgs(_ContainerOptions, frozen=True):
    """What a container sandbox is made from. Every field has a default; all but the first are given by name.

    container_image: the base layer, `name@version` or `name@sha256:...`; layers: workspaces, then toolkits, on top of it.
    cpu_cores_limit in cores, *_limit_mb in MiB, ttl_* in seconds (None: never). ttl_running_stop counts idle seconds: a
    foreground command is activity, a detached one is not. network_rules: mirror or domain name -> allowed; nothing else is
    reachable. qos is the CPU class (report, 5); it is recorded, and both classes are still scheduled alike.
    """

    container_image: str | None = None


class Limits(msgspec.Struct, frozen=True):
    cpu_cores: float
    memory_mb: int
    disk_mb: int
    pids: int


class Usage(msgspec.Struct, frozen=True):
    """What a sandbox uses now. Bytes, seconds of CPU time, counts; swap_bytes, disk_bytes and peaks are -1 where the kernel
    cannot tell. sampled_at: when that was, Unix seconds; 0 for what was not asked."""

    memory_bytes: int = 0
    memory_peak_bytes: int = -1
    cpu_s: float = 0.0
    pids: int = 0
    disk_bytes: int = -1
    oom_kills: int = 0
    pids_hits: int = 0
    swap_bytes: int = -1
    sampled_at: float = 0.0


class Network(msgspec.Struct, frozen=True):
    """rules as asked; enforced: name -> "allowed" | "refused: why"; mode names the mechanism.

    none: no route, no names, nothing to ask. proxy: the same, and a proxy on loopback that decides by name.
    """

    mode: str
    rules: dict[str, bool]
    enforced: dict[str, str]


class SandboxInfo(msgspec.Struct, frozen=True):
    """created_at is Unix seconds. layers are the resolved `name@sha256:...` references, base first. job: the name of the job
    that it belongs to, "" for none."""

    id: str
    backend: str
    state: State
    reason: Reason | None
    created_at: float
    labels: dict[str, str]
    limits: Limits
    usage: Usage
    layers: tuple[str, ...]
    network: Network
    edge: str
    incarnation: int
    detail: str = ""
    job: str = ""


class Created(msgspec.Struct, frozen=True):
    """Answer to a creation: enough to use the sandbox without asking again."""

    id: str
    incarnation: int
    edge: str
    create_ms: float


class CreateOutcome(msgspec.Struct, frozen=True):
    """One line of the NDJSON answer to a burst: which of the asked ones, and what became of it."""

    index: int
    created: Created | None = None
    error: dict[str, object] | None = None


class ExecLimits(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Limits of one command below the sandbox's own, as setrlimit(2) has them: of each of its processes alone, inherited.

    cpu_s: seconds of CPU time; SIGXCPU, a second later SIGKILL. memory_mb: address space, MiB; allocations fail (ENOMEM).
    file_mb: size of a file that is written, MiB; SIGXFSZ (EFBIG where it is ignored). open_files: EMFILE beyond it.
    processes: of the same user in the whole sandbox; fork fails with EAGAIN beyond it. core_mb: core files (none unless
    asked). stack_mb: SIGSEGV beyond it; a quarter of it bounds arguments and environment. None: the sandbox's own.
    """

    cpu_s: int | None = None
    memory_mb: int | None = None
    file_mb: int | None = None
    open_files: int | None = None
    processes: int | None = None
    core_mb: int | None = None
    stack_mb: int | None = None


class PtySize(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A terminal's size in characters, each 1 to 4096."""

    cols: Cells = 80
    rows: Cells = 24


class ExecSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One command. argv, or line (run by the image's bash, else sh, as `-c line`), never both.

    timeout and idle_timeout in seconds; max_output_bytes per stream; the same exec_id again attaches to the first run.
    detached: the reply comes at once and the command is no activity. stdin None means /dev/null;
    stdin_open keeps a pipe open for later writes. stdin_digest is blake3 of all of a step's stdin, also of what comes later.
    session: the name of an open session whose shell runs the line.
    pty: the command gets a terminal of this size as its stdin, stdout and stderr; all its output is stdout.
    """

    exec_id: str
    argv: tuple[bytes, ...] = ()
    line: bytes | None = None
    cwd: bytes | None = None
    env: dict[str, str] = {}
    user: str | None = None
    stdin: bytes | None = None
    stdin_open: bool = False
    timeout: float | None = 600
    idle_timeout: float | None = None
    max_output_bytes: Whole = 16 * 1024 * 1024
    merge_stderr: bool = False
    detached: bool = False
    limits: ExecLimits | None = None
    stdin_digest: str = ""
    session: str | None = None
    pty: PtySize | None = None


class ExecDone(msgspec.Struct, frozen=True, kw_only=True):
    """How a command ended; the output travels beside it.

    reason names a limit of the sandbox that a failed command met: "oom" (one of its processes was killed for want of memory),
    "disk_full" (nothing more could be written when it ended), "pids" (forks were refused while it ran); `detail` has the
    limit and the use.
    replayed: the answer to a step that had been answered before.
    """

    exec_id: str
    exit_code: int
    signal: str | None = None
    stdout_bytes: int = 0
    stderr_bytes: int = 0
    stdout_truncated: bool = False
    stderr_truncated: bool = False
    timed_out: Literal["deadline", "idle"] | None = None
    duration_s: float = 0.0
    incarnation: int = 0
    reason: Literal["oom", "disk_full", "pids"] | None = None
    detail: str = ""
    step: int | None = None
    replayed: bool = False


class ExecReply(msgspec.Struct, frozen=True, kw_only=True):
    """HTTP answer of `POST .../exec`: done is None when `wait_s` ran out first (ask again with the same exec_id)."""

    done: ExecDone | None
    stdout: bytes = b""
    stderr: bytes = b""


class ProcessInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A command. stdout_bytes and stderr_bytes: written so far; stdin_bytes: taken from its callers so far."""

    exec_id: str
    argv: tuple[bytes, ...]
    running: bool
    started_at: float
    detached: bool = False
    pid: int = 0
    exit_code: int | None = None
    signal: str | None = None
    stdout_bytes: int = 0
    stderr_bytes: int = 0
    stdin_bytes: int = 0


class SessionSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A session to open, or to join when one of that name is open (the other fields then do not count)."""

    name: str
    cwd: bytes | None = None
    env: dict[str, str] = {}
    user: str | None = None


class SessionInfo(msgspec.Struct, frozen=True, kw_only=True):
    """pid of its shell inside the sandbox; exec_id of the command that runs; ended: how its shell ended, None while it lives."""

    name: str
    pid: int
    shell: str
    started_at: float
    exec_id: str | None = None
    ended: str | None = None


class Listening(msgspec.Struct, frozen=True):
    """The first word of a listener inside: where it listens."""

    address: str
    port: int


class Arrival(msgspec.Struct, frozen=True):
    """A connection from inside that waits to be taken; peer is `address:port` inside."""

    connection: int
    peer: str


class FileKind(str, Enum):
    FILE = "file"
    DIRECTORY = "directory"
    SYMLINK = "symlink"
    FIFO = "fifo"
    SOCKET = "socket"
    CHAR_DEVICE = "char_device"
    BLOCK_DEVICE = "block_device"


class FileInfo(msgspec.Struct, frozen=True, kw_only=True):
    """path is bytes as the kernel has it; mode is the permission bits; mtime Unix seconds."""

    path: bytes
    kind: FileKind
    size: int
    mode: int
    uid: int
    gid: int
    mtime: float
    target: bytes | None = None


class FileChangeKind(str, Enum):
    """ready: the watch is in place, everything from here on is told. attributes: mode, owner or times. moved: from `source`
    to `path`, both watched; into or out of what is watched is created or deleted. lost: more happened than could be told."""

    READY = "ready"
    CREATED = "created"
    MODIFIED = "modified"
    ATTRIBUTES = "attributes"
    DELETED = "deleted"
    MOVED = "moved"
    LOST = "lost"


class FileChange(msgspec.Struct, frozen=True):
    """One event of a watch. path and source are bytes as the kernel has them, below the path that was asked for."""

    path: bytes
    kind: FileChangeKind
    is_dir: bool
    source: bytes | None = None


class ChangeKind(str, Enum):
    """write: a regular file, new or changed; delete: the path is gone; the others appeared or changed kind."""

    WRITE = "write"
    DELETE = "delete"
    MKDIR = "mkdir"
    SYMLINK = "symlink"
    SPECIAL = "special"


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """One difference from the layers. path is relative to /, bytes. digest is blake3 hex of data; data None when over the cap.

    links: names that the file has in the sandbox; xattrs: whether it has extended attributes (they are not carried).
    """

    path: bytes
    kind: ChangeKind
    mode: int = 0
    uid: int = 0
    gid: int = 0
    size: int = 0
    digest: str = ""
    data: bytes | None = None
    target: bytes | None = None
    opaque: bool = False
    links: int = 1
    xattrs: bool = False


class ChangeSet(msgspec.Struct, frozen=True):
    """truncated: more changed than the caps allow to carry; the list of paths is complete, the data is not."""

    changes: tuple[Change, ...]
    truncated: bool = False


class LayerRef(msgspec.Struct, frozen=True):
    """A published layer. str(ref) is `name@version`; digest is `sha256:...` of its manifest."""

    name: str
    version: str
    digest: str
    kind: Literal["base", "workspace", "toolkit"] = "base"
    size: int = 0

    def __str__(self) -> str:
        return f"{self.name}@{self.version}"


class Capability(msgspec.Struct, frozen=True):
    """One thing this installation can or cannot do, and what to do about it."""

    name: str
    ok: bool
    detail: str
    remedy: str = ""


class Capabilities(msgspec.Struct, frozen=True):
    """mirrors: name -> kind of those that `network_rules` can name."""

    version: str
    backends: dict[str, bool]
    features: tuple[Capability, ...]
    limits: dict[str, int]
    mirrors: dict[str, str] = {}


class EdgeStatus(msgspec.Struct, frozen=True):
    """One edge's beat: load by state, limits of admission, memory of the node in bytes, mirrors (name -> kind)."""

    edge: str
    epoch: int
    version: str
    started_at: float
    sandboxes: dict[str, int]
    max_sandboxes: int
    creating: int
    queued: int
    memory_available: int
    memory_total: int
    disk_free: int
    created_total: int = 0
    failed_total: int = 0
    features: tuple[Capability, ...] = ()
    mirrors: dict[str, str] = {}
