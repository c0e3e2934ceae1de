"""`dsec up`, `dsec down`, `dsec status`: the platform of this machine."""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dsec.cli import options
from dsec.cli.failure import ExitCode, not_running
from dsec.cli.output import megabytes, note, print_facts, print_json
from dsec.protocol.errors import ErrorKind, Fault

if TYPE_CHECKING:
    from dsec import DSecClient
    from dsec.cluster.embedded import LocalStatus
    from dsec.protocol.mirrors import Mirror

State = Annotated[
    Path | None,
    typer.Option("--state", metavar="DIR", help="State directory (default: DSEC_STATE, then /var/lib/dsec)."),
]


def register(app: typer.Typer) -> None:
    app.command()(up)
    app.command()(down)
    app.command()(status)


def up(
    port: Annotated[int, typer.Option(help="Port on loopback.", min=0, max=65535)] = 7707,
    state: State = None,
    max_sandboxes: Annotated[int | None, typer.Option(help="Limit of sandboxes at once.", min=1)] = None,
    keep_days: Annotated[
        float | None, typer.Option(help="Days that a rollout is kept after its end (default: 30).", min=0)
    ] = None,
    keep_gb: Annotated[
        float | None,
        typer.Option(help="GB of recorded rollouts; beyond it the oldest that ended go (default: 50).", min=0),
    ] = None,
    mirror: Annotated[
        list[str] | None,
        typer.Option("--mirror", metavar="NAME=URL", help="A mirror that network_rules can allow; repeatable."),
    ] = None,
    mirrors: Annotated[
        Path | None,
        typer.Option("--mirrors", metavar="FILE", help="Mirrors as TOML or JSON (default: DIR/mirrors.toml)."),
    ] = None,
    foreground: Annotated[bool, typer.Option("--foreground", help="Stay here; end the platform on Ctrl-C.")] = False,
    json: options.Json = False,
) -> int:
    """Start the platform on this machine.

    One API server and one edge; both outlive this command. Does nothing when they run already. When some of it has to be
    started again, options that are not given are those of before, until `dsec down`.

    \b
    dsec up
    dsec up --max-sandboxes 100 --port 8800
    dsec up --mirror pypi=https://pypi.example.org/simple/
    dsec up --foreground          under a supervisor
    """
    from dsec.cluster import embedded

    started = time.monotonic()
    ran_before = embedded.status(state).running
    try:
        endpoint = embedded.up(
            state, port=port, max_sandboxes=max_sandboxes, mirrors=_mirrors(mirrors, mirror or []), keep_days=keep_days,
            keep_gb=keep_gb,
        )  # fmt: skip
    except KeyboardInterrupt:
        embedded.down(state)  # of what had started already
        raise
    if foreground:  # only now: the platform's processes would inherit what is blocked
        signal.pthread_sigmask(signal.SIG_BLOCK, _ENDS)
    if json:
        print_json(endpoint)
    else:
        print(f"DSec answers at {endpoint.url}")
        if ran_before:
            note("it ran already; other options than before take effect after `dsec down`")
        note(
            f"key in {endpoint.key_file}; ready in {time.monotonic() - started:.2f} s; try: dsec run debian@12 -- python3 -V"
        )
    if not foreground:
        return 0
    number = signal.sigwait(_ENDS)
    note("stopping")
    embedded.down(state)
    return ExitCode.INTERRUPTED if number == signal.SIGINT else 0


def _mirrors(file: Path | None, given: list[str]) -> Sequence[Mirror] | None:
    """Those of the file and the single ones, which go before the file's of the same name; None to leave it to the state."""
    from dsec.protocol.mirrors import mirror_of, mirrors_of

    if file is None and not given:
        return None
    chosen = {mirror.name: mirror for mirror in mirrors_of(file)}
    for text in given:
        name, equals, url = text.partition("=")
        if not equals:
            raise Fault(ErrorKind.INVALID, f"--mirror {text!r} is not NAME=URL", hint="as in --mirror pypi=https://...")
        chosen[name] = mirror_of(name, url)
    return tuple(chosen.values())


_ENDS = frozenset({signal.SIGINT, signal.SIGTERM, signal.SIGHUP})


def down(state: State = None, json: options.Json = False) -> None:
    """Stop every sandbox, then the platform. No error when it does not run.

    \b
    dsec down
    """
    from dsec.cluster import embedded

    was_running = embedded.down(state)
    if json:
        print_json({"was_running": was_running})
    else:
        print("stopped" if was_running else "was not running")


def status(state: State = None, json: options.Json = False) -> int:
    """Show whether the platform runs and what it holds.

    Exit code 69 when it does not run.

    \b
    dsec status
    dsec status --json | jq .sandboxes
    """
    from dsec.cluster import embedded

    local = embedded.status(state)
    if not local.running or local.endpoint is None:
        if json:
            print_json({"running": False, "processes": local.processes, **_supervision(local)})
            return ExitCode.NOT_RUNNING
        raise not_running(_what_is_missing(local))
    from dsec.cli.connect import with_client

    document = with_client(_loads, endpoint=local.endpoint)
    if json:
        print_json(
            {
                "running": True,
                "endpoint": local.endpoint,
                "processes": local.processes,
                **_supervision(local),
                **document,
            }
        )
    else:
        print_facts(_facts(local, document))
    return 0


def _supervision(local: LocalStatus) -> dict[str, object]:
    return {"supervisor": local.supervisor, "given_up": local.given_up}


def _what_is_missing(local: LocalStatus) -> str:
    dead = [process.role for process in local.processes if process.pid is None]
    if not dead:
        return "no endpoint"
    missing = f"no {' and no '.join(dead)}"
    if local.given_up:
        return f"{missing}: {local.given_up}"
    return f"{missing} (being started again)" if local.supervisor is not None else missing


async def _loads(client: DSecClient) -> dict[str, object]:
    """What the platform says of itself and how many sandboxes there are, by state."""
    capabilities = await client.capabilities()
    counts: dict[str, int] = {}
    async for info in client.list():
        counts[info.state.value] = counts.get(info.state.value, 0) + 1
    return {
        "version": capabilities.version,
        "sandboxes": counts,
        "limits": capabilities.limits,
        "mirrors": capabilities.mirrors,
    }


def _facts(local: LocalStatus, document: dict[str, object]) -> list[tuple[str, str]]:
    counts, limits, mirrors = document["sandboxes"], document["limits"], document["mirrors"]
    assert isinstance(mirrors, dict)
    assert local.endpoint is not None and isinstance(counts, dict) and isinstance(limits, dict)
    held = ", ".join(f"{number} {state}" for state, number in sorted(counts.items())) or "none"
    return [
        ("answers at", local.endpoint.url),
        ("version", str(document["version"])),
        ("state", local.endpoint.state),
        ("processes", ", ".join(f"{process.role} {process.pid}" for process in local.processes)),
        (
            "supervisor",
            str(local.supervisor) if local.supervisor else "none: what dies stays dead until the next `dsec up`",
        ),
        ("sandboxes", held),
        ("mirrors", ", ".join(f"{name} ({kind})" for name, kind in sorted(mirrors.items())) or "none"),
        *(
            (name.replace("_", " "), megabytes(value) if "memory" in name else f"{value:,}")
            for name, value in limits.items()
        ),
    ]
