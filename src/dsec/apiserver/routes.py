"""Every operation of the HTTP interface, once: the router and the OpenAPI document are both made from this table."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import NamedTuple

from starlette.responses import Response
from starlette.websockets import WebSocket

from dsec.protocol.grading import GradeReply
from dsec.protocol.rollouts import JobInfo, JobUsage, RolloutInfo, StepRecord
from dsec.protocol.scopes import Right, ScopedKey
from dsec.protocol.specs import (
    Capabilities,
    ChangeSet,
    Created,
    CreateOutcome,
    ExecReply,
    FileChange,
    FileInfo,
    LayerRef,
    Network,
    ProcessInfo,
    SandboxInfo,
    SessionInfo,
)

from . import bodies, commands, files, grade, jobs, keys, platform, ports, rollouts, sandboxes, sessions
from .exchange import BYTES, JSON, NDJSON, Exchange
from .feeding import Fed

Handler = Callable[[Exchange], Awaitable[Response]]
SocketHandler = Callable[[Exchange, WebSocket], Awaitable[None]]
SANDBOX = "/v1/sandboxes/{id}"
ROLLOUT = "/v1/rollouts/{rollout}"
JOB = "/v1/jobs/{name}"


class Param(NamedTuple):
    """A query parameter; kind is its JSON type."""

    name: str
    kind: str
    text: str
    required: bool = False
    repeated: bool = False


class Operation(NamedTuple):
    """request and response are msgspec types for JSON, or a media type for bytes; lines is the type of an NDJSON line."""

    method: str
    path: str
    handler: Handler
    summary: str
    request: object = None
    response: object = None
    lines: object = None
    params: tuple[Param, ...] = ()
    status: int = 200
    public: bool = False


class Socket(NamedTuple):
    """A WebSocket of the interface."""

    path: str
    handler: SocketHandler
    summary: str
    id: str
    description: str
    params: tuple[Param, ...] = ()


_PATH = (
    Param("path", "string", "path in UTF-8; this or path_b64"),
    Param("path_b64", "string", "path as base64 or base64url, any bytes"),
)
_USER = Param("user", "string", "act as this user (name or id); default is the sandbox's init_user")
_FILE = (*_PATH, _USER)
_WAIT = (
    Param("wait_s", "integer", "answer after so many seconds in any case (default 25); `under_way` says what is left"),
)
_CURSOR = Param("cursor", "integer", "bytes of both streams already received")

OPERATIONS: tuple[Operation, ...] = (
    # the busiest first: the router looks from the top
    Operation("POST", f"{SANDBOX}/exec", commands.run, "Run a command, or attach to the one with this exec_id",
              bodies.ExecRequest, ExecReply),
    Operation("POST", "/v1/sandboxes", sandboxes.create, "Create a sandbox, or a burst of them",
              bodies.CreateRequest, Created, CreateOutcome, status=201),
    Operation("GET", "/v1/sandboxes", sandboxes.listing, "List sandboxes", response=bodies.SandboxList, lines=SandboxInfo,
              params=(Param("label", "string", "name=value; all must hold", repeated=True),
                      Param("state", "string", "any of these states", repeated=True),
                      Param("job", "string", "those of this job"),
                      Param("usage", "boolean", "with what each uses now (default false: all zero)"))),
    Operation("POST", "/v1/sandboxes/stop", sandboxes.stop_many, "Stop every sandbox with these labels",
              bodies.StopManyRequest, bodies.Count),
    Operation("GET", f"{SANDBOX}/files", files.read, "Read a file", response=BYTES,
              params=(*_FILE, Param("offset", "integer", "first byte"), Param("length", "integer", "at most so many bytes"))),
    Operation("PUT", f"{SANDBOX}/files", files.write, "Write a file atomically; parents are made", BYTES, bodies.Size,
              params=(*_FILE, Param("mode", "string", "octal permission bits"), Param("owner", "string", "user or user:group")),
              status=201),
    Operation("DELETE", f"{SANDBOX}/files", files.remove, "Remove a file or directory", response=bodies.Done,
              params=(*_FILE, Param("recursive", "boolean", "directories with what is in them"))),
    Operation("GET", f"{SANDBOX}/files/stat", files.stat, "One file's attributes", response=FileInfo,
              params=(*_FILE, Param("follow", "boolean", "follow a symlink at the end (default true)"))),
    Operation("GET", f"{SANDBOX}/files/list", files.listing, "Entries of a directory", response=list[FileInfo], lines=FileInfo,
              params=(*_FILE, Param("depth", "integer", "levels to go down, 1 for the directory alone"))),
    Operation("GET", f"{SANDBOX}/files/watch", files.watch, "Changes of files as they happen, as NDJSON", response=NDJSON,
              lines=FileChange, params=(*_FILE, Param("recursive", "boolean", "directories below too"))),
    Operation("POST", f"{SANDBOX}/files/move", files.move, "Move a file or directory", bodies.MoveRequest, bodies.Done),
    Operation("POST", f"{SANDBOX}/files/mkdir", files.mkdir, "Make a directory", bodies.MkdirRequest, bodies.Done),
    Operation("GET", f"{SANDBOX}/files/archive", files.archive_read, "A directory as a tar stream", response=files.TAR,
              params=_FILE),
    Operation("PUT", f"{SANDBOX}/files/archive", files.archive_write, "Unpack a tar stream into a directory", files.TAR,
              bodies.Entries, params=_FILE),
    Operation("POST", f"{SANDBOX}/processes", commands.start, "Start a detached command", bodies.ExecRequest, bodies.Started,
              status=201),
    Operation("GET", f"{SANDBOX}/processes", commands.processes, "List commands", response=list[ProcessInfo]),
    Operation("GET", f"{SANDBOX}/processes/{{exec_id}}", commands.poll, "Output and end of a command", response=ExecReply,
              params=(_CURSOR, Param("wait_s", "integer", "wait for its end at most so many seconds"),
                      Param("wake", "boolean", "resume a paused sandbox (default true); false: wait until somebody does"),
                      Param("output", "boolean", "false: only whether it has ended, at once"))),
    Operation("POST", f"{SANDBOX}/processes/{{exec_id}}/wait", commands.wait, "Wait for a command's end, as a step of a rollout",
              response=ExecReply, params=(_CURSOR, Param("wait_s", "integer", "answer after so many seconds in any case"))),
    Operation("POST", f"{SANDBOX}/processes/{{exec_id}}/signal", commands.send_signal, "Signal a command",
              bodies.SignalRequest, bodies.Done),
    Operation("POST", f"{SANDBOX}/processes/{{exec_id}}/resize", commands.resize, "Change the size of a command's terminal",
              bodies.ResizeRequest, bodies.Done),
    Operation("POST", f"{SANDBOX}/processes/{{exec_id}}/stdin", commands.stdin, "Append to a command's stdin", BYTES, Fed,
              params=(Param("close", "boolean", "close it after these bytes"),
                      Param("offset", "integer", "bytes of this writer before these; what was taken before is not taken again"),
                      Param("writer", "string", "who writes (default: whoever started it); each has offsets of its own"),
                      Param("wait_s", "integer", "with offset: answer after so many seconds, whatever was taken"))),
    Operation("POST", f"{SANDBOX}/sessions", sessions.open_, "Open a session, or join the one of that name",
              bodies.SessionRequest, SessionInfo, status=201),
    Operation("GET", f"{SANDBOX}/sessions", sessions.listing, "List sessions", response=list[SessionInfo]),
    Operation("DELETE", f"{SANDBOX}/sessions/{{name}}", sessions.close, "End a session and what it started",
              response=bodies.Done),
    Operation("POST", f"{SANDBOX}/sessions/{{name}}/interrupt", sessions.interrupt, "Interrupt the command of a session",
              response=bodies.Interrupted),
    Operation("GET", SANDBOX, sandboxes.info, "One sandbox", response=SandboxInfo),
    Operation("DELETE", SANDBOX, sandboxes.stop, "Stop a sandbox; idempotent", response=bodies.Done,
              params=(Param("wait", "boolean", "answer when it is gone (default true)"),)),
    Operation("POST", f"{SANDBOX}/pause", sandboxes.pause, "Freeze its processes and give its memory back; idempotent",
              response=bodies.Done),
    Operation("POST", f"{SANDBOX}/resume", sandboxes.resume, "Let a paused sandbox run on; idempotent", response=bodies.Done),
    Operation("POST", f"{SANDBOX}/ttl", sandboxes.ttl, "Change its times to live", bodies.TtlRequest, bodies.Done),
    Operation("POST", f"{SANDBOX}/network", sandboxes.network, "Change its network rules", bodies.NetworkRequest, Network),
    Operation("POST", f"{SANDBOX}/changes", sandboxes.changes, "What differs from its layers", bodies.ChangesRequest, ChangeSet),
    Operation("GET", f"{SANDBOX}/logs", sandboxes.logs, "Lifecycle lines as NDJSON", response=NDJSON),
    Operation("POST", "/v1/rollouts", rollouts.open_, "Open a rollout by name: make it, or take it over by a new epoch",
              bodies.RolloutRequest, RolloutInfo),
    Operation("GET", "/v1/rollouts", rollouts.listing, "List rollouts", response=bodies.RolloutList, lines=RolloutInfo,
              params=(Param("job", "string", "of this job; empty: of none"), Param("name", "string", "of this name, of `job`"),
                      Param("state", "string", "any of these states", repeated=True))),
    Operation("GET", ROLLOUT, rollouts.info, "One rollout", response=RolloutInfo),
    Operation("DELETE", ROLLOUT, rollouts.remove, "Remove a rollout's log and contents; not of one that may still go on",
              response=bodies.Done),
    Operation("GET", f"{ROLLOUT}/steps", rollouts.steps, "Recorded steps in order, as NDJSON", response=NDJSON, lines=StepRecord,
              params=(Param("from", "integer", "first step (default 0)"), Param("limit", "integer", "at most so many"))),
    Operation("GET", f"{ROLLOUT}/blobs/{{digest}}", rollouts.blob, "A content too long for its step's record", response=BYTES),
    Operation("POST", f"{ROLLOUT}/finish", rollouts.finish, "Finish a rollout, and stop its sandbox", bodies.FinishRequest,
              RolloutInfo),
    Operation("POST", "/v1/jobs", jobs.open_, "Open a job, or join the one of that name", bodies.JobRequest, JobInfo, status=201),
    Operation("GET", "/v1/jobs", jobs.listing, "List jobs", response=bodies.JobList),
    Operation("GET", JOB, jobs.info, "One job", response=JobInfo),
    Operation("DELETE", JOB, jobs.stop, "End a job and its sandboxes; idempotent", response=JobInfo, params=_WAIT),
    Operation("POST", f"{JOB}/renew", jobs.renew, "Say that a client of it lives", bodies.RenewRequest, JobInfo),
    Operation("POST", f"{JOB}/pause", jobs.pause, "Pause all its sandboxes; idempotent", response=JobInfo, params=_WAIT),
    Operation("POST", f"{JOB}/resume", jobs.resume, "Resume all its sandboxes; idempotent", response=JobInfo, params=_WAIT),
    Operation("GET", f"{JOB}/usage", jobs.usage, "What its sandboxes use and have used", response=JobUsage),
    Operation("POST", "/v1/keys", keys.create, "Make a scoped key for rollouts of a job; it is told once", bodies.KeyRequest,
              ScopedKey, status=201),
    Operation("POST", "/v1/grade", grade.grade, "Grade an agent's changes in a fresh sandbox", bodies.GradeRequest, GradeReply),
    Operation("GET", "/v1/grade/{grade}", grade.found, "The verdict of a grade that was asked for", response=GradeReply,
              params=(Param("wait_s", "integer", "wait for it at most so many seconds"),)),
    Operation("POST", f"{SANDBOX}/seal", sandboxes.seal, "End every process but the first, refuse all change; idempotent",
              response=bodies.Done),
    Operation("GET", "/v1/layers", platform.layers, "Layers in the store", response=list[LayerRef]),
    Operation("GET", "/v1/layers/{ref:path}", platform.layer, "One layer's manifest", response=JSON),
    Operation("GET", "/v1/capabilities", platform.capabilities, "What this installation can do", response=Capabilities),
    Operation("GET", "/v1/status", platform.status, "Every edge's last beat", response=bodies.PlatformStatus),
    Operation("GET", "/healthz", platform.health, "Whether the service answers", response=bodies.Health, public=True),
    Operation("GET", "/openapi.json", platform.openapi, "This document", response=JSON, public=True),
)  # fmt: skip

STREAM_PATH = f"{SANDBOX}/processes/{{exec_id}}/stream"
SOCKETS: tuple[Socket, ...] = (
    Socket(f"{SANDBOX}/forward/{{port}}", ports.forward, "One connection to a port inside (WebSocket)", "port.forward",
           'Binary messages are the bytes. Text messages: `{"end": true}` ends one direction, from either side; '
           '`{"error": ...}` says why the connection broke; others are to be ignored. Closing without an end is a reset. '
           "Refused with 404 when nothing listens."),
    Socket(f"{SANDBOX}/expose/{{name}}", ports.expose, "A name inside for a service of the caller (WebSocket)", "port.expose",
           'Text messages to the client: first `{"address", "port"}`, then `{"connection", "peer"}` for each connection that '
           'code inside makes. The client ends it with `{"end": true}`; the name is gone when the WebSocket closes.',
           (Param("port", "integer", "port inside, default 80"),
            Param("wake", "boolean", "resume a paused sandbox (default true); false: wait until somebody does"))),
    Socket(f"{SANDBOX}/expose/{{name}}/{{connection}}", ports.exposed_connection,
           "One connection to an exposed service (WebSocket)", "port.accept", "Messages as those of `forward`."),
)  # fmt: skip
PUBLIC_PATHS = frozenset(operation.path for operation in OPERATIONS if operation.public)
PUBLIC = frozenset(operation.handler for operation in OPERATIONS if operation.public)
STREAM_PARAMS = (
    _CURSOR,
    Param("wake", "boolean", "resume a paused sandbox (default true); false: wait until somebody does"),
)
PARAMETERS: dict[Handler | SocketHandler, dict[str, bool]] = {
    **{op.handler: {param.name: param.repeated for param in op.params} for op in OPERATIONS},
    **{one.handler: {param.name: param.repeated for param in one.params} for one in SOCKETS},
    commands.follow: {param.name: param.repeated for param in STREAM_PARAMS},
}

# What a scoped key is good for, with the right that it takes (None: any key). What is not here, only the owner's key may.
# Not the times to live: what bounds a sandbox is for who answers for it to say.
SCOPED: dict[Handler | SocketHandler, Right | None] = {
    **dict.fromkeys(
        (
            commands.run, commands.start, commands.processes, commands.poll, commands.send_signal, commands.resize,
            commands.wait, commands.stdin, commands.follow, files.read,
            files.write, files.remove, files.stat, files.listing, files.watch,
            files.move, files.mkdir, files.archive_read, files.archive_write, sessions.open_, sessions.listing,
            sessions.close, sessions.interrupt, sandboxes.info, sandboxes.stop, sandboxes.pause, sandboxes.resume,
            sandboxes.network, sandboxes.changes, sandboxes.logs, ports.forward, ports.expose, ports.exposed_connection,
            rollouts.info, rollouts.steps, rollouts.blob, rollouts.finish,
        ),
        Right.USE,
    ),
    grade.grade: Right.GRADE,
    grade.found: Right.GRADE,
    rollouts.open_: None,  # `use` for one that is there, `create` for a new one: the edge knows which
    keys.create: None,
    platform.capabilities: None,
    **dict.fromkeys(PUBLIC),
}  # fmt: skip
