"""The canonical form of a request of a rollout: by it a replayed step is the recorded one, or is not.

It is a JSON object of sorted keys that has only what was asked and differs from the default, so that a later SDK with more
options sees an earlier one's requests as its own. What names an attempt and not the request (ids, cursors, waiting times) is
not part of it. Text is text; bytes that are no UTF-8 are `{"b64": ...}`; values longer than `LONG` bytes are
`{"blake3": ..., "size": ...}`.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping

import msgspec
from blake3 import blake3

from .errors import ErrorKind, Fault
from .rollouts import Diverged
from .specs import ExecSpec

LONG = 16 * 1024
_ATTEMPT = frozenset(
    (
        "request_id", "scope", "sandbox", "incarnation", "cursor", "follow", "wait_s", "staged", "wake", "op", "step_of", "step",
        "stdin", "stdin_open", "ahead", "ahead_digest",
    )
)  # fmt: skip
_OF_COMMANDS = _ATTEMPT | {"exec_id"}
_EMPTY: tuple[object, ...] = (None, "", [], {})


def canonical(kind: str, params: Mapping[str, object]) -> bytes:
    """JSON of a request by the link's method and its parameters. Absent, the default, and empty (where that is the default)
    are one."""
    command = kind == "exec"
    skipped = _OF_COMMANDS if command else _ATTEMPT
    defaults = _EXEC_DEFAULTS if command else {}
    usual = _USUAL if command else {}
    asked: dict[str, object] = {"kind": kind}
    if params.get("detached") and params.get("stdin_open"):  # else only the way in which a long stdin is sent
        asked["stdin_open"] = True
    for name, value in params.items():
        if name in skipped or (name in usual and value == usual[name]):
            continue
        plain, default = plain_of(value), defaults.get(name)
        if plain != default and not (default is None and plain in _EMPTY):
            asked[name] = plain
    if isinstance(ahead := params.get("ahead"), Mapping):  # what came before the request, being too long for it
        asked.update(ahead)
    return msgspec.json.encode(asked, order="sorted")


def digest_of(request: bytes) -> str:
    """What identifies a canonical request: blake3, hex."""
    return blake3(request).hexdigest()


def plain_of(value: object) -> object:
    """A value as the canonical form has it."""
    kind = type(value)
    if kind in _PLAIN:
        return value
    if isinstance(value, str):
        return value if len(value) <= LONG else _text(value.encode("utf-8", "surrogatepass"))
    if isinstance(value, bytes | bytearray | memoryview):
        return _text(bytes(value))
    if isinstance(value, float):
        return int(value) if value.is_integer() else value
    if isinstance(value, list | tuple):
        return [plain_of(item) for item in value]
    if isinstance(value, msgspec.Struct):
        return plain_of({name: getattr(value, name) for name in value.__struct_fields__})
    if isinstance(value, Mapping):
        return {str(name): plain_of(item) for name, item in value.items() if item is not None}
    return value


_PLAIN = frozenset((type(None), bool, int))


def _text(data: bytes) -> object:
    if len(data) > LONG:
        return {"blake3": blake3(data).hexdigest(), "size": len(data)}
    try:
        return data.decode()
    except UnicodeDecodeError:
        return {"b64": base64.b64encode(data).decode()}


def _default(field: msgspec.structs.FieldInfo) -> object:
    return None if field.default is msgspec.NODEFAULT else field.default


_USUAL = {field.name: _default(field) for field in msgspec.structs.fields(ExecSpec)}
"""What most commands say of most: it is looked at as it is, before anything is made of it."""
_EXEC_DEFAULTS: dict[str, object] = {
    field.name: None if (default := plain_of(_default(field))) in _EMPTY else default
    for field in msgspec.structs.fields(ExecSpec)
}
"""What a command is asked for when nothing is said; None where that is nothing."""


def difference(recorded: bytes, asked: bytes) -> Diverged:
    """Field by field."""
    old, new = (msgspec.json.decode(text, type=dict[str, msgspec.Raw]) for text in (recorded, asked))
    empty = msgspec.Raw(b"")
    return Diverged(
        {
            name: (bytes(old.get(name, empty)).decode(), bytes(new.get(name, empty)).decode())
            for name in sorted(old.keys() | new.keys())
            if bytes(old.get(name, empty)) != bytes(new.get(name, empty))
        }
    )


def told(diverged: Diverged) -> str:
    """For people: one line a field."""
    return "\n".join(
        f"  {name}: recorded {old or 'nothing'}, asked {new or 'nothing'}"
        for name, (old, new) in diverged.fields.items()
    )


def divergence(step: int, rollout: str, recorded: bytes, asked: bytes) -> Fault:
    """The step is another one than the recorded one."""
    lines = told(difference(recorded, asked))
    return Fault(
        ErrorKind.DIVERGED,
        f"step {step} of rollout {rollout} is not the recorded one:\n{lines or '  a content that is not shown differs'}",
        hint="replay the same steps in the same order, or open the rollout under another name",
        step=step,
        rollout=rollout,
        recorded=recorded.decode()[:2000],
        asked=asked.decode()[:2000],
    )
