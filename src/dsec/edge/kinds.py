"""Which requests to a sandbox are steps of its rollout, and what each kind of them is to the recorder."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from dsec.protocol.errors import ErrorKind
from dsec.protocol.ids import step_exec_id
from dsec.protocol.specs import ExecDone, FileInfo
from dsec.rollout.trajectory import Output

OPERATIONS = frozenset(
    (
        "fs.write", "fs.mkdir", "fs.move", "fs.remove", "fs.untar", "exec.signal", "session.open", "session.close",
        "session.interrupt",
    )
)  # fmt: skip
"""What must not happen twice, and is known to the sandbox by an op id."""
HARMLESS = frozenset(
    (
        "fs.stat", "fs.list", "fs.read", "fs.tar", "sandbox.changes", "sandbox.network", "exec.wait", "exec.write",
        "exec.close_stdin", "exec.resize",
    )
)  # fmt: skip
"""What may be done again when nothing is known of it: it only looks, or sets what it set, or says where its bytes belong."""
STEPS = frozenset(("exec",)) | OPERATIONS | HARMLESS
UPLOADS = frozenset(("fs.write", "fs.untar"))
FOLLOWED = frozenset(("fs.read", "fs.list", "fs.tar", "sandbox.changes"))
"""What the first caller is sent while it comes; all else is sent from the log when it is there."""
NEVER_OUTCOMES = frozenset(
    (
        ErrorKind.UNAVAILABLE, ErrorKind.CONNECTION_LOST, ErrorKind.TIMEOUT, ErrorKind.CAPACITY, ErrorKind.INTERNAL,
        ErrorKind.CREATE_FAILED, ErrorKind.AUTHENTICATION, ErrorKind.PERMISSION, ErrorKind.QUOTA, ErrorKind.FENCED,
        ErrorKind.OUTCOME_UNKNOWN, ErrorKind.DIVERGED,
    )
)  # fmt: skip
"""What the platform lacks says nothing of the sandbox, and is never recorded as what a step came to."""
KEPT = {"sandbox.changes": 96 * 1024 * 1024}
"""Bytes of what these give that are kept, instead of the store's: as many as are asked for unless told otherwise, and paths."""
_REPLIES: dict[str, type] = {"fs.stat": FileInfo}  # those that hold bytes, which JSON has as text
_OF_THE_EDGE = frozenset(("step_of", "scope"))


class _Limit(msgspec.Struct, frozen=True):
    max_output_bytes: int = 16 * 1024 * 1024


def as_step(kind: str, params: Mapping[str, object], number: int, keep: int) -> dict[str, object]:
    """The request as its handler is to see it: with the names by which the sandbox knows it again. keep: bytes of each stream
    that the log keeps, so that a command never has more output than can be replayed."""
    found = {name: value for name, value in params.items() if name not in _OF_THE_EDGE}
    if kind == "exec":
        found["exec_id"] = step_exec_id(number)
        found["cursor"] = 0
        found["max_output_bytes"] = min(msgspec.convert(params, _Limit).max_output_bytes, keep)
    elif kind == "exec.wait":
        found["cursor"] = 0
    elif kind in OPERATIONS:
        found["op"] = step_exec_id(number)
    elif kind == "exec.write" and found.get("offset") is None:
        found |= {"writer": step_exec_id(number), "offset": 0}
    return found


def written(kind: str, params: Mapping[str, object]) -> tuple[str, bytes] | None:
    """What a request itself, not a stream behind it, brings into the sandbox: name and bytes."""
    name = {"exec": "stdin", "exec.write": "data"}.get(kind)
    data = params.get(name) if name is not None else None
    return (name, data) if name is not None and isinstance(data, bytes) else None


def to_json(kind: str, reply: object, outputs: Mapping[str, Output]) -> bytes:
    """A reply for the log. outputs: of the step; what of them is not kept counts as truncated."""
    if isinstance(reply, msgspec.Raw):
        reply = msgspec.msgpack.decode(reply, type=_REPLIES.get(kind, object))
    if isinstance(reply, ExecDone):
        cut = {f"{name}_truncated": True for name in ("stdout", "stderr") if _is_cut(outputs.get(name))}
        reply = msgspec.structs.replace(reply, **cut) if cut else reply
    return msgspec.json.encode(reply)


def _is_cut(output: Output | None) -> bool:
    return output is not None and output.size < output.total


def from_json(kind: str, result: msgspec.Raw, step: int, *, replayed: bool) -> object:
    """The reply that was recorded."""
    if kind in ("exec", "exec.wait") and b'"exit_code"' in bytes(result):
        return msgspec.structs.replace(msgspec.json.decode(result, type=ExecDone), step=step, replayed=replayed)
    return msgspec.json.decode(result, type=_REPLIES.get(kind, object))
