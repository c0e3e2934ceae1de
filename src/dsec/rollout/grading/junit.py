"""JUnit XML from a sandbox: hostile bytes, read with no entity, no document type and bounds on everything."""

from __future__ import annotations

from xml.parsers import expat

from .observed import MAX_ID, MAX_REPORTS, Outcome, Report

MAX_REPORT = 32 * 1024 * 1024
"""Bytes of a report."""
_MAX_DEPTH = 64
_WORST = {"skipped": Outcome.SKIPPED, "error": Outcome.ERROR, "failure": Outcome.FAILED}
_ORDER = (Outcome.PASSED, Outcome.SKIPPED, Outcome.ERROR, Outcome.FAILED)


class Unreadable(Exception):
    """The report is none that can be believed; str() says why."""


def read(data: bytes) -> tuple[Report, ...]:
    """Every test case, in order; the same id may come again. Raises Unreadable."""
    if len(data) > MAX_REPORT:
        raise Unreadable(f"the report is over {MAX_REPORT >> 20} MiB")
    reader = _Reader()
    parser = expat.ParserCreate()
    parser.StartElementHandler = reader.start
    parser.EndElementHandler = reader.end
    parser.StartDoctypeDeclHandler = _refuse
    parser.EntityDeclHandler = _refuse
    try:
        parser.Parse(data, True)
    except expat.ExpatError as error:
        raise Unreadable(f"the report is no XML: {error}") from None
    except (ValueError, LookupError) as error:  # of an encoding, which may be one that there is not
        raise Unreadable(f"the report is no text: {error}") from None
    if not reader.is_junit:
        raise Unreadable("the report has no <testsuite>")
    return tuple(reader.reports)


def _refuse(*declared: object) -> None:
    raise Unreadable("the report declares a document type or an entity")


class _Reader:
    def __init__(self) -> None:
        self.reports: list[Report] = []
        self.is_junit = False
        self._depth = 0
        self._case_at = 0  # depth of the open test case
        self._name = ""
        self._outcome = Outcome.PASSED

    def start(self, name: str, attributes: dict[str, str]) -> None:
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise Unreadable(f"the report is over {_MAX_DEPTH} elements deep")
        if name in ("testsuite", "testsuites"):
            self.is_junit = True
        elif name == "testcase" and not self._case_at:
            self._case_at, self._outcome = self._depth, Outcome.PASSED
            of, own = attributes.get("classname", ""), attributes.get("name", "")
            self._name = f"{of}::{own}" if of else own
            if len(self._name) > MAX_ID:
                raise Unreadable(f"a test's name is over {MAX_ID} characters")
            if attributes.get("status") == "notrun" or attributes.get("result") in ("skipped", "suppressed"):
                self._outcome = Outcome.SKIPPED
        elif self._case_at and self._depth == self._case_at + 1 and name in _WORST:
            self._outcome = max(self._outcome, _WORST[name], key=_ORDER.index)

    def end(self, name: str) -> None:
        if self._depth == self._case_at:
            self._case_at = 0
            if len(self.reports) >= MAX_REPORTS:
                raise Unreadable(f"the report has over {MAX_REPORTS:,} tests")
            self.reports.append(Report(self._name, self._outcome))
        self._depth -= 1
