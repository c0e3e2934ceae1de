"""A bench's results: numbers beside the floor, whether a promise holds, and how they are printed."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from typing import Literal

import msgspec

from benchmarks.machine import Machine

BAR = 44


class Promise(msgspec.Struct, frozen=True):
    """What docs/specification.md promises: a bound of the value itself, or of its ratio to the floor."""

    of: Literal["value", "ratio"]
    at: Literal["most", "least"]
    bound: float

    def __str__(self) -> str:
        sign = "<=" if self.at == "most" else ">="
        return f"{self.of} {sign} {self.bound:g}"

    def holds(self, value: float, ratio: float | None) -> bool:
        number = value if self.of == "value" else ratio
        if self.bound == 0:
            return number == 0
        if (
            number is None or value <= 0
        ):  # the floor did not run, or something else on the machine freed more than we took
            return False
        return number <= self.bound if self.at == "most" else number >= self.bound


PROMISES = {
    "first_result_p50_ms": Promise("ratio", "most", 4),
    "first_result_p99_ms": Promise("value", "most", 40),
    "cycles_per_s": Promise("ratio", "least", 0.45),
    "round_trip_p50_ms": Promise("value", "most", 3),
    "execs_per_s": Promise("value", "least", 600),
    "kb_per_sandbox_1000": Promise("ratio", "most", 0.9),
    "exec_p99_ms": Promise("value", "most", 200),
    "platform_pss_mb": Promise("value", "most", 140),
    "upload_mb_per_s": Promise("value", "least", 250),
    "download_mb_per_s": Promise("value", "least", 250),
    "rss_growth_mb": Promise("value", "most", 32),
    "request_p50_ms": Promise("value", "most", 4),
    "first_byte_p50_ms": Promise("value", "most", 3),
    "worst_ratio": Promise("value", "most", 3),
    "adopt_s": Promise("value", "most", 3),
    "lost": Promise("value", "most", 0),
    "pause_ms": Promise("value", "most", 150),
    "resume_first_result_ms": Promise("value", "most", 60),
    "returned_share": Promise("value", "least", 0.75),
    "pause_s_500": Promise("value", "most", 6),
    "resume_s_500": Promise("value", "most", 6),
    "mb_returned_share": Promise("value", "least", 0.7),
    "steps_per_s": Promise("value", "least", 5000),
    "reruns": Promise("value", "most", 0),
}


class Result(msgspec.Struct, frozen=True, omit_defaults=True):
    """floor and ratio (value / floor) are there when the floor program ran in the same run."""

    name: str
    value: float
    unit: str
    floor: float | None = None
    ratio: float | None = None
    promise: str | None = None
    holds: bool | None = None


def result(name: str, value: float, unit: str, *, floor: float | None = None, promise: Promise | None = None) -> Result:
    """With the promise of that name, unless one is given."""
    promised = promise or PROMISES.get(name)
    ratio = value / floor if floor else None
    return Result(
        name,
        round(value, 3),
        unit,
        None if floor is None else round(floor, 3),
        None if ratio is None else round(ratio, 3),
        None if promised is None else str(promised),
        None if promised is None else promised.holds(value, ratio),
    )


class Peer(msgspec.Struct, frozen=True):
    """The same work done by another runtime on the same root filesystem. factor: its p50 divided by ours."""

    name: str
    version: str
    how: str
    p50_ms: float
    p99_ms: float
    cycles_per_s: float
    factor_p50: float
    factor_cycles: float


class Report(msgspec.Struct, frozen=True, omit_defaults=True):
    """What `dsec bench NAME --json` prints."""

    bench: str
    machine: Machine
    results: tuple[Result, ...]
    notes: tuple[str, ...] = ()
    peers: tuple[Peer, ...] = ()

    @property
    def kept(self) -> bool:
        return all(one.holds is not False for one in self.results)


def show(report: Report, *, json_output: bool, pictures: Sequence[tuple[str, Sequence[float]]] = ()) -> bool:
    """Print a report; whether every promise holds. pictures: (title, samples in ms) drawn as histograms."""
    if json_output:
        sys.stdout.write(json.dumps(msgspec.to_builtins(report), indent=2) + "\n")
        return report.kept
    from dsec.cli.output import print_table

    print(f"bench {report.bench}: {report.machine}")
    rows = [
        (
            one.name,
            f"{one.value:,.2f} {one.unit}",
            _number(one.floor),
            _number(one.ratio),
            one.promise or "",
            _word(one.holds),
        )
        for one in report.results
    ]
    print_table(("metric", "value", "floor", "ratio", "promise", "holds"), rows)
    for title, samples in pictures:
        print(histogram(title, samples))
    if report.peers:
        _show_peers(report.peers)
    for line in report.notes:
        print(f"note: {line}")
    print()
    return report.kept


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:,.2f}"


def _word(holds: bool | None) -> str:
    return "" if holds is None else ("yes" if holds else "NO")


def _show_peers(peers: Sequence[Peer]) -> None:
    from dsec.cli.output import print_table

    rows = [
        (f"{peer.name} {peer.version}", f"{peer.p50_ms:.2f}", f"{peer.p99_ms:.2f}", f"{peer.cycles_per_s:.0f}",
         _against(peer.factor_p50), _against(peer.factor_cycles))
        for peer in peers
    ]  # fmt: skip
    columns = ("peer", "cycle p50 ms", "p99 ms", "cycles/s", "DSec's p50", "DSec's cycles/s")
    print_table(columns, rows)
    for peer in peers:
        print(f"note: {peer.name}: {peer.how}")


def _against(factor: float) -> str:
    return f"{factor:.1f}x better" if factor >= 1 else f"{1 / factor:.1f}x WORSE"


def percentile(samples: Sequence[float], percent: float) -> float:
    """The value that `percent` of the samples do not exceed (nearest rank)."""
    ordered = sorted(samples)
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]


def histogram(title: str, samples: Sequence[float], bins: int = 12) -> str:
    """Counts over logarithmic bins, in text: a distribution with a long tail at a glance."""
    low, high = max(min(samples), 1e-3), max(samples)
    step = math.log(max(high / low, 1.0001)) / bins
    counts = [0] * bins
    for sample in samples:
        counts[min(bins - 1, int(math.log(max(sample, low) / low) / step))] += 1
    most = max(counts)
    lines = [f"{title}, ms ({len(samples):,} samples)"]
    for index, count in enumerate(counts):
        start = low * math.exp(step * index)
        bar = "█" * round(BAR * count / most) or ("▏" if count else "")
        lines.append(f"  {start:9.2f} {bar} {count or ''}".rstrip())
    return "\n".join(lines)
