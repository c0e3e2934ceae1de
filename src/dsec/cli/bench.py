"""`dsec bench`: the modules of `benchmarks/` in the checkout, one per promise of docs/specification.md."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dsec.cli import options
from dsec.cli.failure import CliFailure, ExitCode, usage

if TYPE_CHECKING:
    from types import ModuleType


def register(app: typer.Typer) -> None:
    app.command()(bench)


def bench(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="NAME...", help="None: those there are.", show_default=False)
    ] = None,
    count: Annotated[int | None, typer.Option(help="Iterations, or sandboxes for density.", min=1)] = None,
    against: Annotated[str | None, typer.Option(metavar="crun,bwrap", help="Put peers beside it (create).")] = None,
    sandboxes: Annotated[
        int | None, typer.Option(help="Run commands in so many sandboxes at once (exec).", min=1, max=1000)
    ] = None,
    json: options.Json = False,
) -> int:
    """Measure the promises of docs/specification.md.

    Each is put beside the floor, what the kernel alone charges for the same work, measured in the same run.

    Starts a platform of its own and ends it. Exit code 1 when a promise does not hold. With --json, one document a bench.

    \b
    dsec bench create exec
    dsec bench exec --sandboxes 64
    dsec bench density --count 3200
    dsec bench create --against crun,bwrap --json
    """
    root = _checkout()
    known = sorted(path.stem for path in (root / "benchmarks").glob("*.py") if _is_bench(path))
    if not names:
        print("\n".join(known))
        return 0
    for name in names:
        if name not in known:
            raise usage(f"there is no bench {name!r}", hint=f"there are: {', '.join(known)}")
        if sandboxes is not None and name != "exec":
            raise usage(f"--sandboxes is an option of exec, not of {name}")
    kept = True
    for name in names:
        module = _load(root, name)
        more = {} if sandboxes is None else {"sandboxes": sandboxes}
        kept &= module.main(
            count=count, against=tuple((against or "").split(",")) if against else (), json=json, **more
        )
    return 0 if kept else ExitCode.FAILURE


def _is_bench(path: Path) -> bool:
    """Modules of benchmarks/ that define `main` are benches, the others are their parts."""
    return "\ndef main(" in path.read_text(encoding="utf-8")


def _checkout() -> Path:
    """The checkout that this package is installed from."""
    root = Path(__file__).resolve().parents[3]
    if not (root / "benchmarks" / "floor" / "sandbox_floor.c").exists():
        raise CliFailure(
            "benchmarks are part of the source checkout, and this dsec is not installed from one",
            hint="git clone the project, then: make bench",
        )
    return root


def _load(root: Path, name: str) -> ModuleType:
    if str(root) not in sys.path:
        sys.path.insert(0, str(root))
    return importlib.import_module(f"benchmarks.{name}")
