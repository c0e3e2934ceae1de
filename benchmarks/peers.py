"""What a user would run instead, in its best configuration: the same root filesystem, create, `true`, destroy.

crun runs a bundle (its fastest way) with namespaces and limits but without a seccomp filter; bubblewrap with every
namespace it has, and it knows no limits. Both get the layer read-only and a tmpfs for /tmp, which costs them less than the
writable overlay that a sandbox of ours has.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import msgspec

from benchmarks.floor_run import ROOT
from benchmarks.report import Peer, percentile
from dsec.cli.failure import CliFailure, usage
from dsec.cli.output import note

COUNT = 200
_KNOWN = {"crun": "crun", "bwrap": "bubblewrap"}
_HOW = {
    "crun": "crun run, all namespaces, cgroup limits, read-only root, no seccomp filter",
    "bwrap": "bwrap --unshare-all, read-only root, no limits, no seccomp filter",
}


class Measured(msgspec.Struct, frozen=True):
    one: list[float]
    cycles_per_s: float


def measure(
    names: tuple[str, ...], meta: Path, data: list[Path], our_p50: float, our_cycles: float
) -> tuple[Peer, ...]:
    for name in names:
        if name not in _KNOWN:
            raise usage(f"--against {name!r} is not known", hint=f"known: {', '.join(_KNOWN)}")
    return tuple(_peer(name, meta, data, our_p50, our_cycles) for name in names)


def _peer(name: str, meta: Path, data: list[Path], our_p50: float, our_cycles: float) -> Peer:
    if shutil.which(name) is None:
        _install(_KNOWN[name])
    with tempfile.TemporaryDirectory(prefix="dsec-peer-", dir="/var/tmp") as directory:
        command = [sys.executable, "-m", "benchmarks.peers", name, directory, str(meta), *map(str, data)]
        answer = subprocess.run(command, capture_output=True, cwd=ROOT, check=False)
    if answer.returncode != 0:
        words = " / ".join(answer.stderr.decode(errors="replace").strip().splitlines()[-2:])
        raise CliFailure(f"{name} could not be measured: {words}")
    measured = msgspec.json.decode(answer.stdout, type=Measured)
    p50 = percentile(measured.one, 50)
    version = (
        subprocess.run([name, "--version"], capture_output=True, text=True, check=False)
        .stdout.split("\n")[0]
        .split()[-1]
    )
    return Peer(
        name, version, _HOW[name], round(p50, 3), round(percentile(measured.one, 99), 3), round(measured.cycles_per_s, 1),
        round(p50 / our_p50, 3), round(our_cycles / measured.cycles_per_s, 3),
    )  # fmt: skip


def _install(package: str) -> None:
    note(f"apt-get install {package}")
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    command = ["apt-get", "install", "-y", "-qq", "--no-install-recommends", package]
    if subprocess.run(command, env=environment, stdout=sys.stderr, check=False).returncode != 0:
        raise CliFailure(f"{package} could not be installed", hint=f"apt-get update; apt-get install {package}")


def _inside(name: str, directory: Path, meta: str, data: list[str]) -> None:
    """In a mount namespace of its own: the layer's root mounted for nobody else, then the cycles."""
    from dsec.backends.probe import syscalls
    from dsec.backends.probe.scratch import private_mounts

    private_mounts()
    root = directory / "root"
    root.mkdir()
    syscalls.mount(meta, str(root), "erofs", syscalls.MS_RDONLY, ",".join(f"device={path}" for path in data))
    cycle = _Crun(directory, root) if name == "crun" else _Bubblewrap(directory, root)
    for number in range(20):
        cycle.run(f"warm{number}")
    one = [_timed(cycle, f"one{number}") for number in range(COUNT)]
    best = max(_together(cycle, workers) for workers in (2, 4, 8))
    sys.stdout.buffer.write(msgspec.json.encode(Measured(one, best)))


class _Bubblewrap:
    def __init__(self, directory: Path, root: Path) -> None:
        self._command = ["bwrap", "--ro-bind", str(root), "/", "--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp",
                         "--unshare-all", "--die-with-parent", "--cap-drop", "ALL", "true"]  # fmt: skip

    def run(self, identity: str) -> None:
        _spawn(self._command)


class _Crun:
    def __init__(self, directory: Path, root: Path) -> None:
        _without_hybrid()
        self._state = directory / "state"
        self._bundle = directory / "bundle"
        self._bundle.mkdir()
        (self._bundle / "config.json").write_text(json.dumps(_bundle(root)), encoding="utf-8")
        self._flags = ["--root", str(self._state), "--cgroup-manager", "cgroupfs"]

    def run(self, identity: str) -> None:
        name = f"dsec-peer-{os.getpid()}-{identity}"
        _spawn(["crun", *self._flags, "run", "--bundle", str(self._bundle), name])


def _without_hybrid() -> None:
    """crun refuses hybrid cgroups; in our own mount namespace they can look like plain v1."""
    from dsec.backends.probe import syscalls

    unified = Path("/sys/fs/cgroup/unified")
    if os.path.ismount(unified):
        syscalls.umount(str(unified), syscalls.MNT_DETACH)


def _bundle(root: Path) -> dict[str, object]:
    spaces = [{"type": kind} for kind in ("pid", "network", "ipc", "uts", "mount", "cgroup")]
    return {
        "ociVersion": "1.0.0",
        "process": {"args": ["true"], "cwd": "/", "env": ["PATH=/usr/bin:/bin"], "user": {"uid": 0, "gid": 0},
                    "noNewPrivileges": True},
        "root": {"path": str(root), "readonly": True},
        "hostname": "peer",
        "mounts": [
            {"destination": "/proc", "type": "proc", "source": "proc"},
            {"destination": "/dev", "type": "tmpfs", "source": "tmpfs"},
            {"destination": "/tmp", "type": "tmpfs", "source": "tmpfs"},
        ],
        "linux": {"namespaces": spaces, "resources": {"memory": {"limit": 1 << 30}, "pids": {"limit": 512},
                                                      "cpu": {"quota": 100_000, "period": 100_000}}},
    }  # fmt: skip


def _spawn(command: list[str]) -> None:
    """The cheapest way to start a program from here; its failure is ours."""
    path = shutil.which(command[0])
    assert path is not None
    pid = os.posix_spawn(path, command, os.environ)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if status != 0:
        raise SystemExit(f"{command[0]} ended with {status}")


def _timed(cycle: _Crun | _Bubblewrap, identity: str) -> float:
    started = time.perf_counter()
    cycle.run(identity)
    return (time.perf_counter() - started) * 1e3


def _together(cycle: _Crun | _Bubblewrap, workers: int) -> float:
    def worker(number: int) -> None:
        for turn in range(COUNT // workers):
            cycle.run(f"w{workers}x{number}x{turn}")

    threads = [threading.Thread(target=worker, args=(number,)) for number in range(workers)]
    started = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return COUNT // workers * workers / (time.perf_counter() - started)


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):
        _inside(sys.argv[1], Path(sys.argv[2]), sys.argv[3], sys.argv[4:])
