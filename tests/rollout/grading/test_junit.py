"""JUnit reports: what is in them, and what is no report, whoever wrote it."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from dsec.rollout.grading import junit
from dsec.rollout.grading.junit import Unreadable
from dsec.rollout.grading.observed import Outcome

HEAD = '<?xml version="1.0" encoding="utf-8"?>'


def suite(body: str) -> bytes:
    return f"{HEAD}<testsuites><testsuite>{body}</testsuite></testsuites>".encode()


def read(body: str) -> dict[str, str]:
    return {report.id: report.outcome.value for report in junit.read(suite(body))}


def test_outcomes() -> None:
    assert read(
        '<testcase classname="m.T" name="a"/>'
        '<testcase classname="m.T" name="b"><failure message="no">text</failure></testcase>'
        '<testcase name="c"><error/></testcase>'
        '<testcase name="d"><skipped/></testcase>'
        '<testcase name="e"><skipped/><failure/></testcase>'
        '<testcase name="f" status="notrun"/>'
        '<testcase name="g"><system-out><failure/></system-out></testcase>'
        '<testcase name="h"><properties/><system-out>&lt;failure&gt;</system-out></testcase>'
    ) == {
        "m.T::a": "passed", "m.T::b": "failed", "c": "error", "d": "skipped", "e": "failed", "f": "skipped", "g": "passed",
        "h": "passed",
    }  # fmt: skip


def test_the_same_test_twice_is_told_twice() -> None:
    found = junit.read(suite('<testcase name="a"/><testcase name="a"><failure/></testcase>'))
    assert [report.outcome for report in found] == [Outcome.PASSED, Outcome.FAILED]


BOMB = '<!DOCTYPE x [<!ENTITY a "aaaa"><!ENTITY b "&a;&a;&a;">]>'


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "no XML"),
        (b"PASSED", "no XML"),
        (suite("<testcase name='a'/>")[:-5], "no XML"),
        (b"<html/>", "no <testsuite>"),
        ((HEAD + BOMB + "<testsuite><testcase name='&b;'/></testsuite>").encode(), "document type or an entity"),
        ((HEAD + '<!DOCTYPE x SYSTEM "file:///etc/passwd"><testsuite/>').encode(), "document type or an entity"),
        (suite("<a>" * 100 + "</a>" * 100), "elements deep"),
        (suite(f"<testcase name='{'x' * 5000}'/>"), "characters"),
        (b'<?xml version="1.0" encoding="no-such"?><testsuite/>', "no "),
        (b" " * (junit.MAX_REPORT + 1), "over 32 MiB"),
        (suite("<testcase name='a'/>" * 50_001), "50,000 tests"),
    ],
    ids=range(11),
)
def test_what_is_no_report(data: bytes, why: str) -> None:
    with pytest.raises(Unreadable, match=why):
        junit.read(data)


@given(st.binary(max_size=300))
@example(b"<testsuite>\xff</testsuite>")
@example(b"<?xml version='1.0' encoding='utf-16'?><testsuite/>")
def test_any_bytes_are_a_report_or_none(data: bytes) -> None:
    with suppress(Unreadable):
        junit.read(data)


_PIECES = st.sampled_from(
    [
        "<testsuite>", "</testsuite>", "<testcase name='a'>", "</testcase>", "<failure/>", "<skipped>", "</skipped>", "&a;",
        "<!--", "-->", "<![CDATA[", "]]>", "<?x?>", "text", "<testcase/>",
    ]
)  # fmt: skip


@given(st.lists(_PIECES, max_size=12).map("".join))
def test_nor_do_pieces_of_reports_break_it(text: str) -> None:
    with suppress(Unreadable):
        assert all(isinstance(report.id, str) for report in junit.read(text.encode()))
