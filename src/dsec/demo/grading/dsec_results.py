"""pytest plugin of the grading sandbox: reports each expected test on a descriptor of its own.

Every test runs, since tests may lean on the ones before them; the others say nothing about the change. The descriptor is a
pipe to the supervisor (`grade.py`), which runs as root outside this process; stdout is no channel here.
"""

import json
import os
from collections.abc import Callable
from typing import cast

import pytest


def pytest_configure(config: pytest.Config) -> None:
    with open("/grading/task.json", encoding="utf-8") as file:
        expected = frozenset(json.load(file)["expected"])
    descriptor = int(os.environ.pop("DSEC_RESULTS_FD"))
    os.set_inheritable(descriptor, False)  # not for processes that tests start
    config.pluginmanager.register(Reporter(config, expected, descriptor), "dsec-reporter")


class Reporter:
    """Collects the phases of each test and writes one line when it is over."""

    def __init__(self, config: pytest.Config, expected: frozenset[str], descriptor: int) -> None:
        self.name_of = cast("Callable[[str], str]", config.cwd_relative_nodeid)
        self.expected = expected
        self.descriptor = descriptor
        self.worst: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """One line a test, when its teardown is over: passed only if setup, call and teardown all passed."""
        name = self.name_of(report.nodeid)
        if name not in self.expected:
            return
        outcome = report.outcome if not hasattr(report, "wasxfail") else "xfail"
        before = self.worst.get(name, "passed")
        self.worst[name] = outcome if before == "passed" else before
        if report.when == "teardown":
            line = json.dumps({"id": name, "outcome": self.worst.pop(name)})
            os.write(self.descriptor, line.encode() + b"\n")
