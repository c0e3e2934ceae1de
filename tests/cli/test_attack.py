"""The battery's own bookkeeping; that it finds holes where there are some is tested end to end."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from dsec.cli.attack.inside import agent, core, devices, identity, kernel, mounts, network, proc, spaces, storage

MODULES = (agent, devices, identity, kernel, mounts, network, proc, spaces, storage)


def test_there_are_many_attempts_with_names_of_their_own() -> None:
    names = [one.name for one in core.ALL]
    assert len(names) == len(set(names)) >= 200
    assert {name.partition(".")[0] for name in names} == {module.PREFIX for module in MODULES}


@pytest.mark.parametrize(
    ("raised", "verdict"),
    [(errno.EPERM, "blocked"), (errno.ENOSYS, "blocked"), (errno.EINVAL, "unclear"), (errno.EFAULT, "unclear")],
)
def test_only_a_rule_blocks(raised: int, verdict: str) -> None:
    def refused() -> str | None:
        raise OSError(raised, "no")

    assert core._isolated(core.Attempt("x", "y", core.RULES, refused))[0] == verdict


def test_a_gain_is_an_escape_and_a_crash_is_unclear() -> None:
    def dies() -> str | None:
        os.kill(os.getpid(), signal.SIGKILL)
        return None

    assert core._isolated(core.Attempt("x", "y", core.RULES, lambda: "all of it")) == ("ESCAPED", "all of it")
    assert core._isolated(core.Attempt("x", "y", core.RULES, lambda: None))[0] == "blocked"
    assert core._isolated(core.Attempt("x", "y", core.RULES, dies))[0] == "unclear"
    assert core._isolated(core.Attempt("x", "y", core.RULES, lambda: str(1 // 0)))[0] == "unclear"


def test_it_runs_as_a_package_of_its_own_with_the_standard_library_only(tmp_path: Path) -> None:
    """As in a sandbox: copied somewhere, no site packages, started by -m."""
    source = Path(core.__file__).parent
    target = tmp_path / "dsec_attack"
    target.mkdir()
    for module in source.glob("*.py"):
        (target / module.name).write_bytes(module.read_bytes())
    command = [sys.executable, "-S", "-m", "dsec_attack", "mount.dotdot", "identity.descriptors"]
    answer = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True)
    lines = [json.loads(line) for line in answer.stdout.splitlines()]
    assert [line["name"] for line in lines] == ["mount.dotdot", "identity.descriptors"]
    assert {line["verdict"] for line in lines} == {"blocked"}
    unknown = subprocess.run([*command[:-2], "nonesuch"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert unknown.returncode == 1 and "nonesuch" in unknown.stderr
