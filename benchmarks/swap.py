"""Swap for the time of a measurement: a file on a disk, or compressed memory (zram). Gone at the end, however that comes."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

MIB = 1024 * 1024
_CONTROL = Path("/sys/class/zram-control")


class NoSwap(Exception):
    """This machine or this user cannot have it; the text says why."""


@contextmanager
def swap_file(megabytes: int, directory: Path | None = None) -> Iterator[Path]:
    """A swap file of its own under `directory` (default: /var/tmp, which is a disk)."""
    _can_swap()
    place = Path(tempfile.mkdtemp(prefix="dsec-swap-", dir=directory or "/var/tmp"))
    file = place / "swap"
    with _guarded(f'swapoff "{file}" 2>/dev/null; rm -rf "{place}"'):
        fd = os.open(file, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            os.posix_fallocate(fd, 0, megabytes * MIB)
        except OSError as error:
            raise NoSwap(f"no {megabytes} MiB in {place}: {error.strerror}") from error
        finally:
            os.close(fd)
        _swap_on(file)
        yield file


@contextmanager
def zram(megabytes: int) -> Iterator[Path]:
    """A compressed block device in memory, used for swap."""
    _can_swap()
    try:
        number = int((_CONTROL / "hot_add").read_text())
    except OSError as error:
        raise NoSwap(f"no zram: {error.strerror} ({_CONTROL})") from error
    device = Path(f"/dev/zram{number}")
    made_node = False
    remove = f"swapoff {device} 2>/dev/null; echo {number} > {_CONTROL}/hot_remove"
    with _guarded(remove):
        Path(f"/sys/block/zram{number}/disksize").write_text(f"{megabytes * MIB}")
        if not device.exists():
            major, minor = Path(f"/sys/block/zram{number}/dev").read_text().strip().split(":")
            os.mknod(device, 0o600 | 0o060000, os.makedev(int(major), int(minor)))
            made_node = True
        try:
            _swap_on(device)
            yield device
        finally:
            if made_node:
                subprocess.run(["swapoff", str(device)], check=False, capture_output=True)
                device.unlink()


def _can_swap() -> None:
    if os.geteuid() != 0:
        raise NoSwap("only root can set up swap")
    for tool in ("mkswap", "swapon", "swapoff"):
        if shutil.which(tool) is None:
            raise NoSwap(f"{tool} is missing (apt-get install mount util-linux)")


def _swap_on(what: Path) -> None:
    for command in (["mkswap", what], ["swapon", "--priority", "100", what]):
        done = subprocess.run(command, check=False, capture_output=True, text=True)
        if done.returncode:
            raise NoSwap(f"{command[0]}: {done.stderr.strip() or done.stdout.strip()}")


@contextmanager
def _guarded(clean_up: str) -> Iterator[None]:
    """Runs a shell line at the end, even when this process is killed: by a process that waits for our end of a pipe."""
    keeper = subprocess.Popen(
        ["sh", "-c", f"cat >/dev/null; {clean_up}"],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    assert keeper.stdin is not None
    try:
        yield
    finally:
        with suppress(BrokenPipeError):
            keeper.stdin.close()
        keeper.wait()
