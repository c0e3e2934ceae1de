"""What is asked of an answer, and how generated requests are led to what is there."""

from __future__ import annotations

from collections.abc import Iterator

import schemathesis
from schemathesis import CheckContext
from schemathesis.checks import CheckFunction
from schemathesis.core.failures import Failure
from schemathesis.core.transport import Response
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from .inert_edge import COMMAND, JOB, LIVE, ROLLOUT


@schemathesis.serializer("application/x-tar")
def _tar(ctx: schemathesis.SerializationContext, value: object) -> bytes:
    return value if isinstance(value, bytes) else str(value).encode()


DEFECTS = (500, 502)  # internal, or a connection that something broke


def no_defect(ctx: CheckContext, response: Response, case: schemathesis.Case) -> bool | None:
    if response.status_code in DEFECTS:
        raise Failure(operation=case.operation.label, title="a defect", message=response.text[:2000])
    return None


def refuses_what_is_wrong(ctx: CheckContext, response: Response, case: schemathesis.Case) -> bool | None:
    """Bodies of bytes have no shape that could be wrong."""
    if case.media_type in (None, "application/json"):
        return negative_data_rejection(ctx, response, case)
    return None


CHECKS: list[CheckFunction] = [
    no_defect,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    refuses_what_is_wrong,
]


def aimed(case: schemathesis.Case, sandbox: str = LIVE, command: str = COMMAND) -> Iterator[schemathesis.Case]:
    """The case as it was made, and again where it names a sandbox that is there: what it asks of it is then looked at too."""
    yield case
    if "id" in case.path_parameters:
        case.path_parameters["id"] = sandbox
        if "exec_id" in case.path_parameters:
            case.path_parameters["exec_id"] = command
        yield case
    if "rollout" in case.path_parameters:
        case.path_parameters["rollout"] = ROLLOUT
        yield case
    if case.operation.path.startswith("/v1/jobs/"):
        case.path_parameters["name"] = JOB
        yield case
