"""The probes, for real: they answer, they leave nothing, and they can say no."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from dsec.backends.probe import OPTIONAL, probe_all
from dsec.protocol.specs import Capability

root_only = pytest.mark.skipif(os.geteuid() != 0, reason="probes mount and clone, which needs root")


@pytest.fixture(scope="module")
def found() -> dict[str, Capability]:
    return {one.name: one for one in probe_all()}


def test_every_answer_is_whole(found: dict[str, Capability]) -> None:
    assert {
        "root",
        "kernel",
        "namespaces",
        "overlay_userns",
        "erofs_file",
        "uppers_btrfs",
        "cgroups",
        "kvm",
    } <= found.keys()
    assert found.keys() >= OPTIONAL
    for one in found.values():
        assert one.detail
        assert one.ok == (one.remedy == ""), one


def test_what_is_not_built_is_said_plainly(found: dict[str, Capability]) -> None:
    for name in ("microvm", "fullvm", "fncall"):
        one = found[f"backend_{name}"]
        assert not one.ok and one.detail == "not built yet"


@root_only
def test_a_machine_that_runs_containers_misses_nothing_needed(found: dict[str, Capability]) -> None:
    assert [one for one in found.values() if not one.ok and one.name not in OPTIONAL] == []


@root_only
def test_nothing_is_left_behind() -> None:
    def traces() -> dict[str, list[str]]:
        return {
            "mounts": Path("/proc/self/mountinfo").read_text().splitlines(),
            "groups": [str(path) for path in Path("/sys/fs/cgroup").glob("**/dsec-probe-*")],
            "scratch": [str(path) for path in Path("/var/tmp").glob("dsec-probe-*")],
            "loops": [
                path.read_text()
                for path in Path("/sys/block").glob("loop*/loop/backing_file")
                if "dsec-probe" in path.read_text()
            ],
        }

    before = traces()
    assert len(probe_all()) > 20
    assert traces() == before


def test_a_missing_tool_is_a_no_with_its_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    answers = probe_all(("mkfs.erofs", "erofs_file", "uppers_btrfs", "gcc"))
    assert [one.ok for one in answers] == [False] * 4
    assert all(one.remedy.startswith("apt-get install ") for one in answers)


def test_a_scratch_place_without_support_is_a_no(tmp_path: Path) -> None:
    """EROFS needs the page cache of its backing file, which a tmpfs has not."""
    shm = Path("/dev/shm")
    if os.geteuid() != 0 or not re.search(r" /dev/shm .*- tmpfs ", Path("/proc/self/mountinfo").read_text()):
        pytest.skip("needs root and a tmpfs at /dev/shm")
    (answer,) = probe_all(("erofs_file",), scratch=shm)
    assert not answer.ok and answer.remedy


def test_an_unknown_name_is_an_answer_not_a_crash() -> None:
    (answer,) = probe_all(("no_such_probe",))
    assert answer.name == "probes" and not answer.ok and "no_such_probe" in answer.detail
