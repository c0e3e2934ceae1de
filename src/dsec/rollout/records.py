"""What a trajectory log consists of, and its bytes.

    log     = magic, record*          record: `protocol.checked`
    payload = msgpack [link, body]    link: 32 bytes, blake3 of the payload before (of the magic, for the first)

So each record vouches for all before it: who knows the last link of a log knows whether anything of it was changed.
"""

from __future__ import annotations

import msgspec
from blake3 import blake3

from dsec.protocol.checked import pack
from dsec.protocol.errors import ErrorBody
from dsec.protocol.rollouts import NOTHING, Blob, RolloutState, StepRecord
from dsec.protocol.specs import DSecContainerRunArgs, Reason

MAGIC = b"DSECROL\x01"
LINK = 32
PREFIX = b"\x92\xc4\x20"
"""How each payload begins, in msgpack: an array of two, of which the first is 32 bytes."""
BODY = len(PREFIX) + LINK


class Head(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="t", tag="head"):
    """The first record. follows: last link of the log that this one is a compaction of."""

    id: str
    job: str
    name: str
    args: DSecContainerRunArgs
    at: float
    follows: bytes = b""


class Opened(msgspec.Struct, frozen=True, omit_defaults=True, tag_field="t", tag="epoch"):
    """An opening; a higher epoch fences the clients of lower ones."""

    epoch: int
    at: float
    note: str = ""


class Made(msgspec.Struct, frozen=True, tag_field="t", tag="made"):
    """The sandbox that the steps from here on run in."""

    sandbox: str
    incarnation: int
    layers: tuple[str, ...]
    at: float


class Intent(msgspec.Struct, frozen=True, tag_field="t", tag="intent"):
    """A step is about to run. request: JSON."""

    step: int
    kind: str
    digest: str
    request: bytes
    sandbox: str
    incarnation: int
    asked_at: float
    epoch: int


class Outcome(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="t", tag="outcome"):
    """What came of a step. result: JSON. Of two for one step the first counts."""

    step: int
    done_at: float
    result: bytes | None = None
    error: ErrorBody | None = None
    outputs: dict[str, Blob] = {}
    inputs: dict[str, Blob] = {}


class Ended(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="t", tag="ended"):
    """It is finished, or its sandbox lost. The last one counts."""

    state: RolloutState
    at: float
    reason: Reason | None = None
    reward: float | None = None
    valid: bool | None = None


Body = Head | Opened | Made | Intent | Outcome | Ended
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Body).decode
FIRST_LINK = blake3(MAGIC).digest()


def packed(link: bytes, body: Body) -> tuple[bytes, bytes]:
    """The record that holds this, and the link for the next one."""
    payload = PREFIX + link + _encode(body)
    return pack(payload), blake3(payload).digest()


def body_of(payload: memoryview) -> Body:
    """msgspec.MsgspecError when it is none of ours."""
    return _decode(payload[BODY:])


def intent_of(record: StepRecord) -> Intent:
    return Intent(
        record.step, record.kind, record.digest, bytes(record.request),
        record.sandbox, record.incarnation, record.asked_at, record.epoch,
    )  # fmt: skip


def step_of(intent: Intent, outcome: Outcome | None) -> StepRecord:
    if outcome is None:
        outcome = _UNKNOWN
    return StepRecord(
        step=intent.step,
        kind=intent.kind,
        digest=intent.digest,
        request=msgspec.Raw(intent.request),
        sandbox=intent.sandbox,
        incarnation=intent.incarnation,
        asked_at=intent.asked_at,
        epoch=intent.epoch,
        done_at=None if outcome is _UNKNOWN else outcome.done_at,
        result=NOTHING if outcome.result is None else msgspec.Raw(outcome.result),
        error=outcome.error,
        outputs=outcome.outputs,
        inputs=outcome.inputs,
    )


_UNKNOWN = Outcome(step=-1, done_at=0.0)
