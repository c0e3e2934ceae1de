"""How far a scope reaches."""

from __future__ import annotations

import pytest

from dsec.protocol.errors import ErrorKind, Fault
from dsec.protocol.scopes import Right, Scope, narrower

JOB = "jb-local-000000000000"


def test_it_covers_rollouts_of_its_job_by_name() -> None:
    some = Scope(key="ky-1", job=JOB, rollouts=("a/*", "b/1"))
    every = Scope(key="ky-1", job=JOB)
    for name, covered in {"a/1": True, "a/1/2": True, "b/1": True, "b/2": False, "A/1": False, "a": False}.items():
        assert some.covers(JOB, name) is covered
        assert every.covers(JOB, name)
        assert not some.covers("jb-local-111111111111", name) and not every.covers("jb-local-111111111111", name)
    assert not every.covers(JOB, ""), "what belongs to no rollout is not within reach"
    assert not every.covers("", "a/1")


def test_rights_and_networks() -> None:
    scope = Scope(key="ky-1", job=JOB, may=(Right.USE,), network=("pypi",))
    scope.require(Right.USE)
    scope.require_network({"pypi": True, "dsec": False})
    for asked in (lambda: scope.require(Right.CREATE), lambda: scope.require_network({"pypi": True, "dsec": True})):
        with pytest.raises(Fault) as caught:
            asked()
        assert caught.value.body.kind is ErrorKind.PERMISSION and "ky-1" in caught.value.body.message


def test_narrower() -> None:
    assert narrower(None, None) and narrower(None, ("*",)) and narrower(("*",), ("*",)) and narrower(("*",), ("a",))
    assert not narrower(("*",), None) and not narrower(("a*",), ("a?",)) and not narrower(("a*",), ("a*", "b"))
