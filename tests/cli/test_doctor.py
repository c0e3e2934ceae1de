"""`dsec doctor`: the verdict, the remedies, and what --fix does."""

from __future__ import annotations

import subprocess

import pytest

from dsec.backends import probe
from dsec.protocol.specs import Capability

from .conftest import Invoke

GOOD = Capability("kernel", True, "Linux 6.18")
OPTIONAL_NO = Capability("kvm", False, "no /dev/kvm", "load kvm_intel")
NO = Capability("mkfs.erofs", False, "not installed", "apt-get install erofs-utils")


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> list[Capability]:
    found = [GOOD, OPTIONAL_NO]
    monkeypatch.setattr(probe, "probe_all", lambda: tuple(found))
    return found


def test_an_optional_no_is_no_failure(dsec: Invoke, machine: list[Capability]) -> None:
    ran = dsec("doctor")
    assert ran.code == 0
    assert "no (optional)" in ran.out and "load kvm_intel" in ran.out
    assert "Containers can run on this machine" in ran.out and "not built yet" in ran.out


def test_a_needed_no_fails_and_is_named(dsec: Invoke, machine: list[Capability]) -> None:
    machine.append(NO)
    ran = dsec("doctor")
    assert ran.code == 1
    assert "Containers cannot run on this machine: mkfs.erofs." in ran.out and "apt-get install erofs-utils" in ran.out


def test_json_is_one_document(dsec: Invoke, machine: list[Capability]) -> None:
    machine.append(NO)
    ran = dsec("doctor", "--json")
    assert ran.code == 1 and isinstance(ran.json, dict)
    assert ran.json["ok"] is False and ran.json["missing"] == ["mkfs.erofs"]
    assert ran.json["capabilities"][0] == {"name": "kernel", "ok": True, "detail": "Linux 6.18", "remedy": ""}


def test_fix_installs_only_what_is_missing_and_looks_again(
    dsec: Invoke, machine: list[Capability], monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.append(NO)
    asked: list[list[str]] = []

    def install(command: list[str], **_: object) -> subprocess.CompletedProcess[bytes]:
        asked.append(command)
        machine.remove(NO)
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr("os.geteuid", lambda: 0)
    monkeypatch.setattr("subprocess.run", install)
    assert dsec("doctor", "--fix").code == 0
    assert asked == [["apt-get", "install", "-y", "--no-install-recommends", "erofs-utils"]]
    assert "nothing that a system package would fix" in dsec("doctor", "--fix").err
    assert len(asked) == 1


def test_fix_without_root_says_what_to_run(
    dsec: Invoke, machine: list[Capability], monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.append(NO)
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    ran = dsec("doctor", "--fix")
    assert ran.code == 1 and "sudo apt-get install erofs-utils" in ran.err
