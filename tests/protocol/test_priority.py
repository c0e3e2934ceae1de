"""A preferred process has early turns, and its children do not."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

_PROGRAM = """
import os, subprocess, sys
from dsec.protocol.priority import prefer_this_process
assert prefer_this_process()
print(os.getpriority(os.PRIO_PROCESS, 0), flush=True)
subprocess.run([sys.executable, "-c", "import os; print(os.getpriority(os.PRIO_PROCESS, 0))"], check=True)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs CAP_SYS_NICE")
def test_it_is_for_this_process_alone() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", _PROGRAM], check=True, capture_output=True, text=True, start_new_session=True
    )
    assert ran.stdout.split() == ["-5", "0"]


def test_without_privilege_it_says_so() -> None:
    program = (
        "import os; os.geteuid() or os.setuid(65534); from dsec.protocol.priority import prefer_this_process as p; p()"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
