"""Scoped keys: `dsec_s1.<claims>.<mac>`, signed with what follows from the owner's key and kept nowhere.

Every replica that has the owner's key can check them, before and after any restart; a new owner's key ends them all. That the
job of a key still runs is the edge's to say (`edge/scopes.py`).
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import time

import msgspec

from dsec.protocol.errors import ErrorKind, Fault
from dsec.protocol.ids import new_key_id
from dsec.protocol.scopes import Right, Scope, check_globs, narrower

PREFIX = "dsec_s1."
MAX_TTL_S = 30 * 86_400.0
MAX_KEY = 8192  # characters
MAX_NOTE = 200
_HINT = "ask who made it for a new one (`dsec key create`)"


class Claims(Scope, frozen=True, kw_only=True, omit_defaults=True):
    """What a scoped key says of itself. name: of the job, for who asks by it; until: Unix seconds."""

    until: float
    name: str = ""
    note: str = ""

    def scope(self) -> Scope:
        return Scope(**{field: getattr(self, field) for field in Scope.__struct_fields__})


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """A key to make, as it was asked for. job: its id, name: its name. ttl_s: None for an hour, or as long as the asker's own."""

    job: str
    name: str = ""
    rollouts: tuple[str, ...] | None = None
    may: tuple[Right, ...] = (Right.USE,)
    network: tuple[str, ...] = ()
    layers: tuple[str, ...] | None = None
    ttl_s: float | None = None
    note: str = ""


def signing_key(owner: bytes) -> bytes:
    """Of an owner's key; tells nothing about it."""
    return hashlib.blake2b(hashlib.sha256(owner).digest(), digest_size=32, person=b"dsec scoped key").digest()


class Signer:
    """Makes and checks the scoped keys of one owner."""

    def __init__(self, owner: bytes) -> None:
        self._key = signing_key(owner)

    def sign(self, claims: Claims) -> str:
        payload = _text(msgspec.json.encode(claims))
        return f"{PREFIX}{payload}.{_text(self._mac(payload))}"

    def claims(self, key: str, now: float) -> Claims | None:
        """None for a key that this owner did not sign; Fault authentication for one that is over."""
        payload, _, mac = key.removeprefix(PREFIX).partition(".")
        if len(key) > MAX_KEY or not hmac.compare_digest(self._mac(payload), _bytes(mac)):
            return None
        try:
            claims = msgspec.json.decode(_bytes(payload), type=Claims)
        except msgspec.MsgspecError:  # of a version that said other things
            return None
        if now >= claims.until:
            raise Fault(ErrorKind.AUTHENTICATION, f"key {claims.key} has expired", hint=_HINT)
        return claims

    def _mac(self, payload: str) -> bytes:
        return hmac.digest(self._key, payload.encode("utf-8", "surrogateescape"), "sha256")


def _text(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def _bytes(text: str) -> bytes:
    """Of the one spelling that `_text` gives; nothing of any other."""
    try:
        data = base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
    except (binascii.Error, ValueError):
        return b""
    return data if _text(data) == text else b""


def claims_of(wanted: Wanted, held: Claims | None, now: float | None = None) -> Claims:
    """A new key's claims. held: of the asker, None for the owner. Fault permission for more than is held: nobody grants what
    they do not hold; invalid_request for what is no key."""
    now = time.time() if now is None else now
    longest = MAX_TTL_S if held is None else held.until - now
    ttl = wanted.ttl_s if wanted.ttl_s is not None else min(3600.0, longest)
    if not 0 < ttl <= MAX_TTL_S:
        raise Fault(ErrorKind.INVALID, f"ttl_s={ttl} is not between 0 and {MAX_TTL_S:g} seconds")
    if len(wanted.note) > MAX_NOTE or (wanted.note and not wanted.note.isprintable()):
        raise Fault(ErrorKind.INVALID, f"note is not one line of at most {MAX_NOTE} characters")
    if len(wanted.network) > 64 or any(len(name) > 256 for name in wanted.network):
        raise Fault(ErrorKind.INVALID, "network: more than 64 names, or one of more than 256 characters")
    if not wanted.may:
        raise Fault(ErrorKind.INVALID, "may is empty", hint="use, create and grade are rights")
    globs = None if wanted.rollouts is None else check_globs("rollouts", wanted.rollouts)
    layers = None if wanted.layers is None else check_globs("layers", wanted.layers)
    if held is not None:
        _within(wanted, held, ttl - longest)
    may = tuple(sorted(set(wanted.may), key=list(Right).index))
    return Claims(
        key=new_key_id(), job=wanted.job, rollouts=globs, may=may, network=tuple(sorted(set(wanted.network))),
        layers=layers, until=now + ttl, name=wanted.name, note=wanted.note,
    )  # fmt: skip


def _within(wanted: Wanted, held: Claims, longer: float) -> None:
    if wanted.job != held.job:
        raise held.refusal("keys for another job")
    if more := sorted(right.value for right in set(wanted.may) - set(held.may)):
        raise held.refusal(f"keys with the right {more[0]!r}, which it does not have")
    if not narrower(held.rollouts, wanted.rollouts):
        raise held.refusal("keys for more rollouts than its own: name some of them, or repeat its globs")
    if Right.CREATE in wanted.may and not narrower(held.layers, wanted.layers):
        raise held.refusal("keys for more layers than its own: name some of them, or repeat its globs")
    if more := sorted(set(wanted.network) - set(held.network)):
        raise held.refusal(f"keys whose sandboxes may reach {more[0]!r}, which its own may not")
    if longer > 0:
        raise held.refusal("keys that last longer than itself")
