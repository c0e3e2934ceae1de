"""What a bench reports: the shape that is promised, and when a promise holds."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from .conftest import Invoke

CHECKOUT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.skipif(not (CHECKOUT / "benchmarks").is_dir(), reason="needs the checkout")

if str(CHECKOUT) not in sys.path:
    sys.path.insert(0, str(CHECKOUT))


def test_every_promise_is_in_the_specification() -> None:
    from benchmarks.report import PROMISES

    text = (CHECKOUT / "docs" / "specification.md").read_text(encoding="utf-8")
    assert [name for name in PROMISES if f"`{name}`" not in text] == []


def test_names_without_a_count_are_listed(dsec: Invoke) -> None:
    names = dsec("bench").out.split()
    assert {"create", "density", "exec", "files", "stream"} <= set(names) and names == sorted(names)


def test_outside_a_checkout_it_says_so(dsec: Invoke, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from dsec.cli import bench

    monkeypatch.setattr(bench, "__file__", str(tmp_path / "a" / "b" / "c" / "d.py"))
    ran = dsec("bench", "exec")
    assert ran.code == 1 and "not installed from one" in ran.err


@pytest.mark.parametrize(
    ("name", "value", "floor", "ratio", "holds"),
    [
        ("first_result_p50_ms", 4.0, 1.0, 4.0, True),
        ("first_result_p50_ms", 4.1, 1.0, 4.1, False),
        ("cycles_per_s", 449.0, 1000.0, 0.449, False),
        ("cycles_per_s", 450.0, 1000.0, 0.45, True),
        ("round_trip_p50_ms", 3.0, None, None, True),
        ("round_trip_p50_ms", 3.01, 0.2, 15.05, False),
        ("kb_per_sandbox_1000", 100.0, None, None, False),
        ("kb_per_sandbox_1000", 90.0, 100.0, 0.9, True),
        ("kb_per_sandbox_1000", -5.0, 100.0, -0.05, False),
    ],
)
def test_promises(name: str, value: float, floor: float | None, ratio: float | None, holds: bool) -> None:
    from benchmarks.report import result

    one = result(name, value, "ms", floor=floor)
    assert (one.ratio, one.holds) == (ratio, holds)


def test_json_has_the_promised_shape(capsys: pytest.CaptureFixture[str]) -> None:
    import json

    from benchmarks import machine
    from benchmarks.report import Report, result, show

    results = (result("round_trip_p50_ms", 1.2345, "ms", floor=0.5), result("extra", 2, "ms"))
    assert show(Report("exec", machine.describe(), results), json_output=True)
    document = json.loads(capsys.readouterr().out)
    assert document["bench"] == "exec" and document["machine"]["cpus"] >= 1
    assert document["results"] == [
        {"name": "round_trip_p50_ms", "value": 1.234, "unit": "ms", "floor": 0.5, "ratio": 2.469,
         "promise": "value <= 3", "holds": True},
        {"name": "extra", "value": 2, "unit": "ms"},
    ]  # fmt: skip


def test_percentiles_are_of_samples() -> None:
    from benchmarks.report import percentile

    samples = [float(n) for n in range(100, 0, -1)]
    assert [percentile(samples, p) for p in (0, 50, 99, 100)] == [1, 50, 99, 100]
    assert percentile([7.0], 99) == 7.0


def test_a_histogram_counts_every_sample() -> None:
    from benchmarks.report import histogram

    drawn = histogram("title", [1.0] * 90 + [10.0] * 9 + [100.0]).splitlines()
    assert drawn[0] == "title, ms (100 samples)"
    assert sum(int(line.split()[-1]) for line in drawn[1:] if "█" in line or "▏" in line) == 100


def test_every_environment_is_given_once() -> None:
    from benchmarks.stage import TOOLKITS, Environments

    given = Environments([f"t{n}" for n in range(6)])
    seen = [given.next().layers for _ in range(30)]
    assert len(set(seen)) == 30
    with pytest.raises(StopIteration):
        given.next()
    assert TOOLKITS * (TOOLKITS - 1) > 3200 + 1000


def test_the_pool_that_the_bench_assumes_is_the_edges() -> None:
    from benchmarks.stage import POOL

    from dsec.edge.config import DEFAULT_POOL

    assert POOL == DEFAULT_POOL


def test_modules_of_benches_load(dsec: Invoke) -> None:
    for name in dsec("bench").out.split():
        assert importlib.util.find_spec(f"benchmarks.{name}") is not None
