"""The OpenAPI document, made from the table of operations. `python -m dsec.apiserver.openapi` prints it."""

from __future__ import annotations

import re
import sys

import msgspec

from dsec.protocol.errors import STATUS, ErrorKind
from dsec.protocol.specs import ExecDone

from .bodies import ErrorReply
from .exchange import JSON, NDJSON
from .routes import OPERATIONS, SANDBOX, SOCKETS, STREAM_PARAMS, STREAM_PATH, Operation, Param, Socket

Json = dict[str, object]
_REF = "#/components/schemas/{name}"
_PLACEHOLDER = re.compile(r"{(\w+)(?::path)?}")
_PATH_TEXT = {
    "grade": "grade id, as it was given with the request",
    "id": "sandbox id",
    "exec_id": "id of a command",
    "ref": "name@version or name@sha256:...",
    "port": "port inside the sandbox",
    "name": "name of a session or a job, or host name inside the sandbox",
    "connection": "number that the listener told",
    "rollout": "rollout id",
    "digest": "blake3 of a content, hex",
}


def document(version: str) -> bytes:
    """OpenAPI 3.1 as JSON with sorted keys and a final newline."""
    types = [kind for op in OPERATIONS for kind in (op.request, op.response, op.lines) if _is_type(kind)]
    types += [ErrorReply, ExecDone]
    schemas, components = msgspec.json.schema_components(types, schema_hook=_anything, ref_template=_REF)
    by_type = dict(zip(map(repr, types), schemas, strict=True))
    paths: dict[str, Json] = {}
    for operation in OPERATIONS:
        path = _PLACEHOLDER.sub(r"{\1}", operation.path)
        paths.setdefault(path, {})[operation.method.lower()] = _operation(operation, by_type)
    paths[_PLACEHOLDER.sub(r"{\1}", STREAM_PATH)] = {"get": _stream_operation(by_type)}
    paths.update((one.path, {"get": _socket_operation(one)}) for one in SOCKETS)
    whole: Json = {
        "openapi": "3.1.0",
        "info": {"title": "DSec", "version": version, "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"}},
        "security": [{"key": []}],
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
            "responses": {name: _content(text, {JSON: by_type[repr(ErrorReply)]}) for name, text in _errors()},
        },
    }
    return msgspec.json.format(msgspec.json.encode(whole, order="sorted"), indent=1) + b"\n"


def _anything(kind: type) -> Json:
    """`object` in a struct: a value whose shape is another process's affair."""
    if kind is object:
        return {"description": "any JSON value"}
    raise NotImplementedError(kind)


def _is_type(kind: object) -> bool:
    return kind is not None and not isinstance(kind, str)


def _content(text: str, media: dict[str, object]) -> Json:
    return {"description": text, "content": {name: {"schema": schema} for name, schema in media.items()}}


def _operation(operation: Operation, by_type: dict[str, Json]) -> Json:
    found: Json = {
        "summary": operation.summary,
        "operationId": f"{operation.handler.__module__.rsplit('.', 1)[-1]}.{operation.handler.__name__}",
        "parameters": [*_path_params(operation.path), *(_query(param) for param in operation.params)],
        "responses": {
            str(operation.status): _content("Done", _answers(operation, by_type)),
            **_refusals(operation.path),
        },
    }
    if operation.request is not None:
        media, schema = _media(operation.request, by_type)
        found["requestBody"] = {"required": _needs_body(operation.request), "content": {media: {"schema": schema}}}
    if operation.public:
        found["security"] = []
    return found


_OF_HTTP = {  # what is answered before anybody looks at what was asked
    405: f"{ErrorKind.INVALID.value} (no such method here)",
    408: f"{ErrorKind.TIMEOUT.value} (the headers did not come)",
    431: f"{ErrorKind.TOO_LARGE.value} (the headers)",
}
_OF_SANDBOXES = frozenset((410, 507))  # what only a sandbox, its files and its end can answer


def _errors() -> list[tuple[str, str]]:
    """Name and text of every answer that says no: the statuses of the closed set of kinds."""
    by_status: dict[int, list[str]] = {status: [text] for status, text in _OF_HTTP.items()}
    for kind, status in STATUS.items():
        by_status.setdefault(status, []).append(kind.value)
    return [(f"error{status}", f"An error of kind {' or '.join(kinds)}") for status, kinds in sorted(by_status.items())]


def _refusals(path: str) -> dict[str, Json]:
    statuses = {*_OF_HTTP, *STATUS.values()}
    if not path.startswith((SANDBOX, "/v1/rollouts")):
        statuses -= _OF_SANDBOXES
    return {str(status): {"$ref": f"#/components/responses/error{status}"} for status in sorted(statuses)}


def _needs_body(kind: object) -> bool:
    """No body is an empty one: no bytes, or an object without fields where that is something to ask for."""
    if isinstance(kind, str):
        return False
    try:
        msgspec.json.decode(b"{}", type=kind)
    except msgspec.ValidationError:
        return True
    return False


def _answers(operation: Operation, by_type: dict[str, Json]) -> dict[str, object]:
    media, schema = _media(operation.response, by_type)
    answers = {media: schema}
    if operation.lines is not None:
        answers[NDJSON] = by_type[repr(operation.lines)]
    return answers


def _media(kind: object, by_type: dict[str, Json]) -> tuple[str, object]:
    if isinstance(kind, str):
        return kind, {} if kind in (JSON, NDJSON) else {"type": "string", "format": "binary"}
    return JSON, by_type[repr(kind)]


def _path_params(path: str) -> list[Json]:
    return [
        {"name": name, "in": "path", "required": True, "description": _PATH_TEXT[name], "schema": {"type": "string"}}
        for name in _PLACEHOLDER.findall(path)
    ]


def _query(param: Param) -> Json:
    schema: Json = {"type": param.kind}
    if param.repeated:
        schema = {"type": "array", "items": schema}
    return {"name": param.name, "in": "query", "required": param.required, "description": param.text, "schema": schema}


def _stream_operation(by_type: dict[str, Json]) -> Json:
    return {
        "summary": "Follow a command (WebSocket)",
        "operationId": "commands.follow",
        "description": "Binary messages: u8 channel (1 stdout, 2 stderr), u64 little-endian cursor of the first byte, bytes. "
        'One text message at the end: `{"exit": ExecDone}` or `{"error": ...}`.',
        "parameters": [
            *_path_params(STREAM_PATH),
            *map(_query, STREAM_PARAMS),
        ],
        "responses": {
            "101": {"description": "Switching to WebSocket"},
            "200": _content("The text message at the end", {JSON: {"properties": {"exit": by_type[repr(ExecDone)]}}}),
            **_refusals(STREAM_PATH),
        },
    }


def _socket_operation(route: Socket) -> Json:
    return {
        "summary": route.summary,
        "operationId": route.id,
        "description": route.description,
        "parameters": [*_path_params(route.path), *map(_query, route.params)],
        "responses": {
            "101": {"description": "Switching to WebSocket"},
            **_refusals(route.path),
        },
    }


def kinds() -> dict[str, int]:
    """Error kind -> HTTP status, for the guide."""
    return {kind.value: STATUS[kind] for kind in ErrorKind}


if __name__ == "__main__":
    from importlib.metadata import version

    sys.stdout.buffer.write(document(version("dsec")))
