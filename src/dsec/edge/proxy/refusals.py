"""Answers of the proxy itself. A refusal says what, why, what is allowed instead and what to do: its reader is a model."""

from __future__ import annotations

from http import HTTPStatus

from .http1 import write_head
from .rules import Denial, Policy

_REASON = 240  # of a status line: what pip and others print of a refusal


def reply(status: int, reason: str, body: str, *, keep: bool, head_only: bool = False) -> bytes:
    """A whole answer in plain text."""
    content = body.encode("ascii", "replace")
    line = reason.encode("ascii", "replace")[:_REASON]
    head = write_head(
        b"HTTP/1.1 %d %s" % (status, line),
        [
            (b"Content-Type", b"text/plain; charset=utf-8"),
            (b"Content-Length", b"%d" % len(content)),
            (b"Cache-Control", b"no-store"),
            (b"X-DSec-Proxy", b"refused" if status == 403 else b"failed"),
            (b"Connection", b"keep-alive" if keep else b"close"),
        ],
    )
    return head if head_only else head + content


def denied(denial: Denial, policy: Policy, *, keep: bool, head_only: bool = False) -> bytes:
    body = (
        f"DSec: {denial.target} is not reachable from this sandbox: {denial.why}.\n"
        f"Reachable by network_rules:\n{policy.in_full()}\n"
        "Use one of these, or do without the network. Trying again or another way gives the same answer.\n"
    )
    reason = (
        f"Denied: {denial.target} is not reachable from this sandbox: {denial.why} (reachable: {policy.in_short()})"
    )
    return reply(403, reason, body, keep=keep, head_only=head_only)


def failed(status: int, why: str, *, keep: bool = False, head_only: bool = False) -> bytes:
    """A request that is malformed, or whose server cannot be had."""
    phrase = HTTPStatus(status).phrase
    return reply(status, f"{phrase}: {why}", f"DSec proxy: {why}.\n", keep=keep, head_only=head_only)
