"""What commands print. A terminal gets a drawn table, a pipe gets plain columns, `--json` gets JSON and nothing else."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Sequence

import msgspec


def print_json(document: object) -> None:
    """One JSON document, indented: structs, enums and bytes (base64) as on the wire."""
    encoded = msgspec.json.format(msgspec.json.encode(document), indent=2)
    sys.stdout.write(encoded.decode() + "\n")


def print_json_line(document: object) -> None:
    sys.stdout.write(msgspec.json.encode(document).decode() + "\n")
    sys.stdout.flush()


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]], *, empty: str = "") -> None:
    """Rows under headings. Numbers are the caller's business; nothing is cut in a pipe."""
    listed = [tuple(row) for row in rows]
    if not listed and empty:
        note(empty)
        return
    if sys.stdout.isatty():
        _draw(columns, listed)
    else:
        _plain(columns, listed)


def _draw(columns: Sequence[str], rows: list[tuple[str, ...]]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=0, header_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold", no_wrap=column == columns[0])  # names are there to be copied
    for row in rows:
        table.add_row(*(_escaped(cell) for cell in row))
    Console().print(table)


def _escaped(cell: str) -> str:
    """Cells carry names from sandboxes: neither markup nor control characters reach the terminal."""
    from rich.markup import escape

    return escape(printable(cell))


def printable(text: str) -> str:
    return "".join(
        character if character.isprintable() or character == "\n" else "\N{REPLACEMENT CHARACTER}" for character in text
    )


def _plain(columns: Sequence[str], rows: list[tuple[str, ...]]) -> None:
    upper = tuple(column.upper() for column in columns)
    flat = [upper, *(tuple(" ".join(printable(cell).split()) or "-" for cell in row) for row in rows)]
    widths = [max(len(row[i]) for row in flat) for i in range(len(columns))]
    for row in flat:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def print_facts(facts: Iterable[tuple[str, str]]) -> None:
    """Name and value, one pair a line, aligned."""
    listed = list(facts)
    width = max((len(name) for name, _ in listed), default=0)
    for name, value in listed:
        print(f"{name.ljust(width)}  {printable(value)}")


def note(text: str) -> None:
    """A remark for a person: stderr, so that stdout stays what was asked for."""
    print(text, file=sys.stderr)


def megabytes(count: int) -> str:
    return "-" if count < 0 else f"{count / (1 << 20):,.1f} MB"


def age(since: float, now: float | None = None) -> str:
    """Seconds since a Unix time, in the largest unit that says enough."""
    seconds = max(0.0, (time.time() if now is None else now) - since)
    for unit, length in (("d", 86_400), ("h", 3_600), ("m", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f}{unit}"
    return f"{seconds:.0f}s"
