"""The real `dsec` in a process of its own, pointed at the tests' platform."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from dsec.cluster.embedded import Endpoint


class Ran(NamedTuple):
    code: int
    out: bytes
    err: str

    @property
    def json(self) -> dict[str, object]:
        document = json.loads(self.out)
        assert isinstance(document, dict)
        return document


class CommandLine:
    """`cli("ps", "--json")` runs `dsec ps --json`."""

    def __init__(self, state: Path | str) -> None:
        self.environment = {name: value for name, value in os.environ.items() if not name.startswith("DSEC_")}
        for kept in ("DSEC_STORE", "DSEC_RUNTIME"):
            if kept in os.environ:
                self.environment[kept] = os.environ[kept]
        self.environment["DSEC_STATE"] = str(state)

    def __call__(self, *arguments: str, stdin: bytes = b"", timeout: float = 100, **environment: str) -> Ran:
        answer = subprocess.run(
            self.argv(*arguments), input=stdin, capture_output=True, timeout=timeout, check=False,
            env={**self.environment, **environment},
        )  # fmt: skip
        error = answer.stderr.decode(errors="replace")
        assert "Traceback" not in error, error
        return Ran(answer.returncode, answer.stdout, error)

    def argv(self, *arguments: str) -> list[str]:
        return [str(Path(sys.executable).with_name("dsec")), *arguments]

    def start(self, *arguments: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            self.argv(*arguments), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            env=self.environment, start_new_session=True,
        )  # fmt: skip


def command_line(platform: Endpoint) -> CommandLine:
    return CommandLine(platform.state)
