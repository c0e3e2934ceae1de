"""Scoped keys: what they say, who may make which, and that nothing but their maker's key makes them."""

from __future__ import annotations

import msgspec
import pytest

from dsec.iam import scoped
from dsec.iam.keys import KeyRing, Principal
from dsec.iam.scoped import MAX_TTL_S, PREFIX, Claims, Signer, Wanted, claims_of, signing_key
from dsec.protocol.errors import ErrorKind, Fault
from dsec.protocol.scopes import Right
from dsec.protocol.specs import DSecContainerRunArgs

KEY = "k" * 32
JOB = "jb-local-000000000000"
OWNER = Principal("owner", "default")


def bearer(key: str) -> bytes:
    return f"Bearer {key}".encode()


def refused(kind: ErrorKind) -> pytest.RaisesExc[Fault]:
    return pytest.RaisesExc(Fault, check=lambda fault: fault.body.kind is kind)


def test_every_replica_knows_a_key_and_nobody_else_does() -> None:
    key, claims = KeyRing({"owner": KEY}).issue(OWNER, Wanted(job=JOB, rollouts=("a/*",), ttl_s=60, note="one worker"))
    replica = KeyRing({"owner": KEY})
    found = replica.check(bearer(key), inside=True)
    assert found == Principal("owner", "default", claims)
    assert claims.job == JOB and claims.rollouts == ("a/*",) and claims.may == (Right.USE,)
    assert KEY not in key and KEY not in repr(vars(replica)) and signing_key(KEY.encode()).hex() not in key
    with refused(ErrorKind.AUTHENTICATION):
        KeyRing({"owner": "other" * 8}).check(bearer(key))


def test_a_changed_key_is_no_key() -> None:
    ring = KeyRing({"owner": KEY})
    key, _ = ring.issue(OWNER, Wanted(job=JOB))
    for index in range(len(PREFIX), len(key)):
        for other in ("A", "B", ""):
            changed = key[:index] + other + key[index + 1 :]
            if changed != key:
                with refused(ErrorKind.AUTHENTICATION):
                    ring.check(bearer(changed))
    for bad in (PREFIX, PREFIX + ".", PREFIX + "..", key + ".", key + "=", key.replace(".", ""), PREFIX + "\u00e9.x"):
        with refused(ErrorKind.AUTHENTICATION):
            ring.check(bad.encode("latin-1") if bad.startswith("Bearer") else b"Bearer " + bad.encode("latin-1"))


def test_a_key_ends() -> None:
    signer = Signer(KEY.encode())
    key = signer.sign(Claims(key="ky-1", job=JOB, until=100.0))
    assert signer.claims(key, 99.9) is not None
    with refused(ErrorKind.AUTHENTICATION):
        signer.claims(key, 100.0)


def test_claims_of_another_version_are_no_key() -> None:
    signer = Signer(KEY.encode())
    payload = signer.sign(Claims(key="ky-1", job=JOB, until=1e12))
    assert signer.claims(payload, 0) is not None
    text = scoped._text(msgspec.json.encode({"key": "ky-1", "until": "never"}))
    assert signer.claims(f"{PREFIX}{text}.{scoped._text(signer._mac(text))}", 0) is None


HELD = Claims(
    key="ky-1", job=JOB, rollouts=("a/*", "b/1"), may=(Right.USE, Right.GRADE), network=("pypi",), until=1000.0
)
MAKER = Claims(key="ky-1", job=JOB, may=(Right.CREATE,), layers=("debian@12", "task-*"), until=1000.0)


@pytest.mark.parametrize(
    "wanted",
    [
        Wanted(job="jb-local-111111111111", rollouts=("b/1",)),
        Wanted(job=JOB),
        Wanted(job=JOB, rollouts=("*",)),
        Wanted(job=JOB, rollouts=("a/[1]*",)),
        Wanted(job=JOB, rollouts=("b/2",)),
        Wanted(job=JOB, rollouts=("b/1", "c")),
        Wanted(job=JOB, rollouts=("b/1",), may=(Right.USE, Right.CREATE)),
        Wanted(job=JOB, rollouts=("b/1",), network=("pypi", "dsec")),
        Wanted(job=JOB, rollouts=("b/1",), ttl_s=501),
    ],
    ids=range(9),
)
def test_nobody_grants_what_they_do_not_hold(wanted: Wanted) -> None:
    with refused(ErrorKind.PERMISSION):
        claims_of(wanted, HELD, now=500.0)


def test_less_can_be_given_on() -> None:
    for globs in (("a/*",), ("a/7",), ("a/7/8", "b/1")):
        given = claims_of(Wanted(job=JOB, rollouts=globs, may=(Right.GRADE,), network=("pypi",)), HELD, now=500.0)
        assert given.rollouts == globs and given.may == (Right.GRADE,) and given.until == 1000.0


@pytest.mark.parametrize(
    "wanted",
    [
        Wanted(job=JOB, ttl_s=0),
        Wanted(job=JOB, ttl_s=-1),
        Wanted(job=JOB, ttl_s=MAX_TTL_S + 1),
        Wanted(job=JOB, ttl_s=float("nan")),
        Wanted(job=JOB, may=()),
        Wanted(job=JOB, rollouts=()),
        Wanted(job=JOB, rollouts=("",)),
        Wanted(job=JOB, rollouts=("x" * 201,)),
        Wanted(job=JOB, rollouts=("a\n",)),
        Wanted(job=JOB, rollouts=("a",) * 33),
        Wanted(job=JOB, note="x" * 201),
        Wanted(job=JOB, note="two\nlines"),
        Wanted(job=JOB, network=("x" * 257,)),
    ],
    ids=range(13),
)
def test_what_is_no_key_is_refused(wanted: Wanted) -> None:
    with refused(ErrorKind.INVALID):
        claims_of(wanted, None, now=500.0)


def test_the_owner_is_not_let_in_from_a_sandbox() -> None:
    ring = KeyRing({"owner": KEY})
    assert ring.check(bearer(KEY)).claims is None
    with refused(ErrorKind.PERMISSION):
        ring.check(bearer(KEY), inside=True)
    with refused(ErrorKind.AUTHENTICATION):  # and is not told whether it has found the key
        ring.check(bearer("x" * 32), inside=True)


def test_layers_are_narrowed_too() -> None:
    given = claims_of(Wanted(job=JOB, may=(Right.CREATE,), layers=("task-3",)), MAKER, now=500.0)
    given.scope().require_creation(DSecContainerRunArgs("task-3"))
    for layers in (None, ("*",), ("tests-3",)):
        with refused(ErrorKind.PERMISSION):
            claims_of(Wanted(job=JOB, may=(Right.CREATE,), layers=layers), MAKER, now=500.0)
    scope = MAKER.scope()
    scope.require_creation(DSecContainerRunArgs("debian@12", layers=("task-7@1",)))
    for args in (
        DSecContainerRunArgs(),
        DSecContainerRunArgs("debian@12", layers=("tests-7@1",)),
        DSecContainerRunArgs("debian@12", network_rules={"pypi": True}),
    ):
        with refused(ErrorKind.PERMISSION):
            scope.require_creation(args)
    with refused(ErrorKind.PERMISSION):
        HELD.scope().require_creation(DSecContainerRunArgs("debian@12"))
