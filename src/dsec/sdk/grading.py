"""Grading: what an agent changed, judged by tests that it never saw (report, 6)."""

from __future__ import annotations

import secrets

from dsec.protocol.grading import GradeReply, GradeSpec, Verdict
from dsec.protocol.specs import LayerRef

from .errors import NotFound
from .transport import Target, Transport, encode

_WAIT_S = 20


class _Asked(GradeSpec, frozen=True, kw_only=True):
    grade_id: str
    wait_s: float


def layer(ref: LayerRef | str) -> str:
    """Exactly that layer, where its digest is known."""
    if isinstance(ref, str):
        return ref
    return f"{ref.name}@{ref.digest}" if ref.digest else str(ref)


async def grade(transport: Transport, spec: GradeSpec, grade_id: str | None = None) -> Verdict:
    """The verdict, however long it takes. A service that was started again meanwhile is asked anew, for the same grade."""
    grade_id = grade_id or f"gr-{secrets.token_hex(10)}"
    fields = {name: getattr(spec, name) for name in GradeSpec.__struct_fields__}
    body = encode(_Asked(**fields, grade_id=grade_id, wait_s=_WAIT_S))
    reply = await _ask(transport, body)
    while reply.done is None:
        try:
            query = {"wait_s": str(_WAIT_S)}
            reply = await transport.call("GET", f"/v1/grade/{grade_id}", GradeReply, query=query, wait=_WAIT_S)
        except NotFound:
            reply = await _ask(transport, body)
    return reply.done


async def grade_step(transport: Transport, spec: GradeSpec, target: Target) -> Verdict:
    """The same as a step of a rollout, which the same request asks for again."""
    fields = {name: getattr(spec, name) for name in GradeSpec.__struct_fields__}
    body = encode(_Asked(**fields, grade_id="", wait_s=_WAIT_S))
    while True:
        reply = await transport.call("POST", "/v1/grade", GradeReply, body=body, target=target, wait=_WAIT_S)
        if reply.done is not None:
            return reply.done


async def _ask(transport: Transport, body: bytes) -> GradeReply:
    return await transport.call("POST", "/v1/grade", GradeReply, body=body, wait=_WAIT_S)
