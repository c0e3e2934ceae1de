"""What an edge is told at its start."""

from __future__ import annotations

import argparse
import os
import ssl
from pathlib import Path

import msgspec

from dsec.protocol.errors import ErrorKind, Fault
from dsec.protocol.mirrors import PLATFORM, Mirror, MirrorKind, mirrors_of

DEFAULT_MAX_SANDBOXES = 4096
DEFAULT_LANES = 12
DEFAULT_POOL = 16
DEFAULT_KEEP_DAYS = 30.0
DEFAULT_KEEP_GB = 50.0
MAX_OUTPUT = 256 * 1024 * 1024
UPPERS_SHARE = 0.8


class EdgeConfig(msgspec.Struct, frozen=True, kw_only=True):
    """uppers is `btrfs` or `dir`; api: where this platform's API answers, "" if its sandboxes shall not reach it.

    keep_days, keep_gb: how long and how much of rollouts that ended is kept.
    End-of-file on the descriptor lifeline ends the edge; ready is told when it serves.
    """

    name: str
    state: Path
    run: Path
    store: Path
    max_sandboxes: int = DEFAULT_MAX_SANDBOXES
    lanes: int = DEFAULT_LANES
    pool: int = DEFAULT_POOL
    uppers: str = "btrfs"
    ephemeral: bool = False
    mirrors: Path | None = None
    api: str = ""
    keep_days: float = DEFAULT_KEEP_DAYS
    keep_gb: float = DEFAULT_KEEP_GB
    ready: int = -1
    lifeline: int = -1

    def configured_mirrors(self) -> tuple[Mirror, ...]:
        """Those of the file that was named, else of <state>/mirrors.toml, and the platform's own API, unless the operator says
        where that is; Fault for one that cannot be used."""
        default = self.state / "mirrors.toml"
        mirrors = mirrors_of(self.mirrors or default) if self.mirrors is not None or default.exists() else ()
        for mirror in mirrors:
            _check_authorities(mirror)
        return (*mirrors, *self._platform(mirrors))

    def _platform(self, others: tuple[Mirror, ...]) -> tuple[Mirror, ...]:
        """What comes this way is marked, so that the API takes only scoped keys from it (`iam/keys.py`)."""
        if not self.api or any(mirror.name == PLATFORM for mirror in others):
            return ()
        return mirrors_of((Mirror(name=PLATFORM, url=self.api, kind=MirrorKind.API, headers={"X-DSec-Inside": "1"}),))

    def uppers_argument(self) -> str:
        """The launcher's --uppers: an image of most of the free space (sparse), or a plain directory."""
        if self.uppers == "dir":
            return f"dir:{self.state / 'uppers'}"
        image = self.state / "uppers.btrfs"
        if image.exists():
            return f"btrfs:{image}:{image.stat().st_size}"
        stat = os.statvfs(self.state)
        size = int(stat.f_bavail * stat.f_frsize * UPPERS_SHARE)
        return f"btrfs:{image}:{size - size % (1 << 20)}"


def _check_authorities(mirror: Mirror) -> None:
    """The file can be read and holds certificates: said now, not when the first sandbox asks."""
    if mirror.ca:
        try:
            ssl.create_default_context(cafile=mirror.ca)
        except (OSError, ssl.SSLError) as error:
            raise Fault(ErrorKind.INVALID, f"mirror {mirror.name}: ca {mirror.ca}: {error}",
                        hint="give a PEM file with the authorities of the upstream's certificate") from error  # fmt: skip


def from_arguments(argv: list[str]) -> EdgeConfig:
    parser = argparse.ArgumentParser(prog="python -m dsec.edge", description="One edge; started by `dsec up`.")
    parser.add_argument("--name", required=True)
    parser.add_argument("--state", type=Path, required=True)
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--store", type=Path, required=True)
    parser.add_argument("--max-sandboxes", type=int, default=DEFAULT_MAX_SANDBOXES)
    parser.add_argument("--lanes", type=int, default=DEFAULT_LANES)
    parser.add_argument("--pool", type=int, default=DEFAULT_POOL)
    parser.add_argument("--uppers", choices=("btrfs", "dir"), default="btrfs")
    parser.add_argument("--ephemeral", action="store_true", help="remove the state directory at the end")
    parser.add_argument(
        "--mirrors", type=Path, default=None, help="file of mirrors; <state>/mirrors.toml when it is there"
    )
    parser.add_argument(
        "--api", default="", metavar="URL", help="where sandboxes reach this platform's API, by a rule for `dsec`"
    )
    parser.add_argument("--keep-days", type=float, default=DEFAULT_KEEP_DAYS, help="of a rollout after its end")
    parser.add_argument("--keep-gb", type=float, default=DEFAULT_KEEP_GB, help="of recorded rollouts in all")
    parser.add_argument("--ready", type=int, default=-1)
    parser.add_argument("--lifeline", type=int, default=-1)
    return EdgeConfig(**vars(parser.parse_args(argv)))
