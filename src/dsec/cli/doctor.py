"""`dsec doctor`: what this machine can do, tried and not guessed, with the remedy for each no."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from dsec.cli import options
from dsec.cli.failure import CliFailure, ExitCode
from dsec.cli.output import note, print_json, print_table

if TYPE_CHECKING:
    from dsec.protocol.specs import Capability

# The probes that one package of the distribution turns into a yes.
_PACKAGES = {
    "mkfs.erofs": ("erofs-utils",),
    "mkfs.btrfs": ("btrfs-progs",),
    "mmdebstrap": ("mmdebstrap",),
    "gcc": ("gcc", "libc6-dev"),
}


class Report(msgspec.Struct, frozen=True):
    """What `dsec doctor --json` prints. ok: containers can run here."""

    ok: bool
    missing: tuple[str, ...]
    capabilities: tuple[Capability, ...]


def register(app: typer.Typer) -> None:
    app.command()(doctor)


def doctor(
    attack: Annotated[
        bool, typer.Option("--attack", help="Try to break out of a live sandbox instead; one line per attempt.")
    ] = False,
    fix: Annotated[bool, typer.Option("--fix", help="Install the missing system packages with apt-get first.")] = False,
    image: Annotated[str, typer.Option(help="Base layer for --attack; it needs python3.")] = "debian@12",
    json: options.Json = False,
) -> int:
    """Say what this machine can do.

    Each no comes with what to do about it; exit code 1 when containers cannot run here.

    Every answer comes from trying it in a process with namespaces of its own; nothing is left behind.

    \b
    dsec doctor
    dsec doctor --fix
    dsec doctor --attack        exit code 1 when any attempt got through
    """
    if attack:
        from dsec.cli.attack.command import attack_command

        return attack_command(image, json=json)
    from dsec.backends.probe import probe_all

    found = probe_all()
    if fix and _install(found):
        found = probe_all()
    return _show(found, json=json)


def _show(found: tuple[Capability, ...], *, json: bool) -> int:
    from dsec.backends.probe import OPTIONAL

    missing = tuple(one.name for one in found if not one.ok and one.name not in OPTIONAL)
    if json:
        print_json(Report(not missing, missing, found))
        return ExitCode.FAILURE if missing else 0
    words = {(True, True): "yes", (True, False): "yes", (False, True): "no (optional)", (False, False): "NO"}
    rows = [(one.name, words[one.ok, one.name in OPTIONAL], one.detail) for one in found]
    print_table(("what", "here", "found"), rows)
    refused = [(one.name, one.remedy) for one in found if not one.ok and one.remedy]
    if refused:
        print()
        print_table(("to change a no", "do this"), refused)
    print()
    if missing:
        print(f"Containers cannot run on this machine: {', '.join(missing)}.")
        return ExitCode.FAILURE
    print("Containers can run on this machine. Virtual machines and function calls are not built yet.")
    _say_of_platform()
    return 0


def _say_of_platform() -> None:
    """What is wrong with the platform that should run here, if there is one."""
    from dsec.cluster import embedded

    local = embedded.status()
    if local.given_up:
        note(f"the platform is broken: {local.given_up}; `dsec up` tries again")
    elif local.running and local.supervisor is None:
        note("the platform runs without its supervisor: what dies stays dead; `dsec up` starts one")


def _install(found: tuple[Capability, ...]) -> bool:
    """Install the packages that would help; whether there were any."""
    packages = [package for one in found if not one.ok for package in _PACKAGES.get(one.name, ())]
    if not packages:
        note("nothing that a system package would fix")
        return False
    if os.geteuid() != 0:
        raise CliFailure("installing packages needs root", hint=f"sudo apt-get install {' '.join(packages)}")
    note(f"apt-get install {' '.join(packages)}")
    command = ["apt-get", "install", "-y", "--no-install-recommends", *packages]
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    answer = subprocess.run(command, env=environment, stdout=sys.stderr, check=False)
    if answer.returncode != 0:
        raise CliFailure(f"apt-get ended with {answer.returncode}", hint="apt-get update, then try again")
    return True
