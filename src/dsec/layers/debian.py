"""The base layer `debian@12`: Debian 12 with Python and the tools agents expect, from the machine's own apt sources."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

from dsec.layers.apt_sources import debian_sources, reach_settings
from dsec.layers.build import publish_tree
from dsec.layers.manifest import Config, Provenance
from dsec.layers.scan import Bounds, survey
from dsec.layers.store import LayerStore
from dsec.protocol.errors import ErrorKind, Fault
from dsec.protocol.specs import LayerRef

NAME, VERSION, RELEASE = "debian", "12", "bookworm"
Progress = Callable[[str, float], None]  # stage, and how much of the whole is done (0 to 1)


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


PACKAGES = _words("""
    bash bzip2 ca-certificates curl diffutils file findutils gawk git grep iproute2 jq less make nano patch
    procps psmisc python3 python3-pip python3-venv ripgrep sed tree unzip vim-tiny xz-utils zip zstd
""")

# Left out while unpacking: manuals, documentation (but licences) and translations, a quarter of the size.
_DPKG = """\
path-exclude=/usr/share/man/*
path-exclude=/usr/share/info/*
path-exclude=/usr/share/doc/*
path-include=/usr/share/doc/*/copyright
path-exclude=/usr/share/locale/*
path-include=/usr/share/locale/locale.alias
path-exclude=/usr/share/bug/*
path-exclude=/usr/share/lintian/*
force-unsafe-io
"""

# Runs with the new root as $1. Compiled modules let every sandbox start Python without compiling its library anew.
_FINISH = """\
set -eu
chroot "$1" useradd --create-home --uid 1000 --user-group --shell /bin/bash agent
chroot "$1" python3 -m compileall -q -j 0 /usr/lib/python3.11 /usr/lib/python3 >/dev/null
"""

_HOSTS = "127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\n"
_SOURCES = """\
# No package sources: what a sandbox may reach is decided by its network_rules, and allowed mirrors are configured
# when it is created.
"""
_EMPTIED = _words("dev proc sys run tmp var/tmp var/lib/systemd root/.cache usr/share/doc-base")
_WITHOUT_FILES = _words("var/log var/cache var/lib/apt/lists")  # their directories stay: apt and others expect them
_REMOVED = _words("""
    etc/hostname etc/.pwd.lock etc/passwd- etc/group- etc/shadow- etc/gshadow- etc/subuid- etc/subgid-
    etc/apt/sources.list etc/apt/sources.list.d/0000main.sources etc/apt/apt.conf.d/99mmdebstrap
    etc/dpkg/dpkg.cfg.d/99mmdebstrap var/lib/dbus/machine-id var/lib/dpkg/status-old var/lib/dpkg/diversions-
    old var/lib/dpkg/statoverride-old
""")

CONFIG = Config(
    env={"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C.UTF-8"}, workdir="/"
)


def build_debian(store: LayerStore, *, force: bool = False, progress: Progress | None = None) -> LayerRef:
    """Build and publish `debian@12`; a whole one that is there already is returned as it is, unless `force`.

    Takes a minute or two, most of it dpkg. Installs mmdebstrap and erofs-utils when they are missing. Faults:
    PERMISSION (not root), UNSUPPORTED (no apt, no sources of the release), NO_SPACE, CREATE_FAILED with apt's own words.
    """
    report = progress or (lambda stage, done: None)
    if not force and (present := _present(store)) is not None:
        report("already there", 1.0)
        return present
    if os.geteuid() != 0:
        raise Fault(ErrorKind.PERMISSION, "building a Debian base needs root", hint="run it as root (sudo)")
    report("tools", 0.0)
    _install_tools()
    sources = debian_sources(RELEASE)
    started = time.time_ns()
    with store.staging() as stage:
        tree = stage / "root"
        _bootstrap(stage, tree, sources, report)
        report("clean", 0.85)
        _clean(tree)
        _forget_the_day(tree, started)
        report("image", 0.88)
        ref = publish_tree(
            store,
            stage,
            tree,
            survey(tree, Bounds()),
            name=NAME,
            version=VERSION,
            kind="base",
            config=CONFIG,
            labels={"os": f"debian-{RELEASE}", "packages": str(len(_installed(tree)))},
            provenance=Provenance(
                "debian", "sha256:" + hashlib.sha256("\n".join(_installed(tree)).encode()).hexdigest()
            ),
            force=True,
        )
    report("published", 1.0)
    return ref


def _present(store: LayerStore) -> LayerRef | None:
    """The layer if it is there and whole; a damaged one is built again."""
    try:
        manifest = store.resolve(f"{NAME}@{VERSION}")
        store.paths(manifest)
    except Fault as fault:
        if fault.body.kind in (ErrorKind.NOT_FOUND, ErrorKind.CREATE_FAILED):
            return None
        raise
    return manifest.ref()


def _install_tools() -> None:
    wanted = {"mmdebstrap": "mmdebstrap", "mkfs.erofs": "erofs-utils"}
    missing = [package for command, package in wanted.items() if shutil.which(command) is None]
    if not missing:
        return
    if shutil.which("apt-get") is None:
        raise Fault(
            ErrorKind.UNSUPPORTED,
            f"{' and '.join(missing)} missing, and no apt-get to install them",
            hint="a Debian base is built on Debian; elsewhere import it from an OCI image",
        )
    install = ["apt-get", "install", "-y", "-q", "--no-install-recommends", *missing]
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for command in (
        install,
        ["apt-get", "update", "-q"],
        install,
    ):  # the lists may be empty or old: once more after an update
        run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if run.returncode == 0 and command is install:
            return
    raise Fault(
        ErrorKind.CREATE_FAILED,
        f"apt-get could not install {' '.join(missing)}: {run.stderr.strip()[-300:]}",
        hint="install them by hand and try again",
        stage="tools",
    )


def _bootstrap(stage: Path, tree: Path, sources: str, report: Progress) -> None:
    """Run mmdebstrap in namespaces of its own, so that no mount and no process of it can be left on the machine."""
    files = {"sources.sources": sources, "apt.conf": reach_settings(), "dpkg.cfg": _DPKG, "finish.sh": _FINISH}
    for name, text in files.items():
        (stage / name).write_text(text)  # the staging directory is ours alone: credentials may be in there
    command = ["unshare", "--mount", "--propagation", "private", "--pid", "--fork", "--kill-child", "--mount-proc"]
    command += ["mmdebstrap", "--mode=root", "--variant=minbase", "--format=directory", "--verbose"]
    command += [
        f"--include={','.join(PACKAGES)}",
        '--aptopt=APT::Install-Recommends "false"',
        '--aptopt=Acquire::Languages "none"',
    ]
    command += [f"--aptopt={stage / 'apt.conf'}", f"--dpkgopt={stage / 'dpkg.cfg'}"]
    command += [f'--customize-hook=sh {stage / "finish.sh"} "$1"', RELEASE, str(tree), str(stage / "sources.sources")]
    environment = {**os.environ, "TMPDIR": str(stage), "LC_ALL": "C.UTF-8"}
    said: deque[str] = deque(maxlen=60)
    meter = _Meter(report)
    with subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    ) as run:
        assert run.stdout is not None
        for line in run.stdout:
            said.append(line.rstrip())
            meter.line(line)
    if run.returncode != 0:
        raise _failed(said)


class _Meter:
    """Turns what apt and dpkg print into a fraction: getting, unpacking and setting up the packages are the work."""

    _SPAN = {"Get": (0.02, 0.25), "Unpacking": (0.25, 0.55), "Setting": (0.55, 0.78)}
    _STAGE = {"Get": "download", "Unpacking": "unpack", "Setting": "configure"}
    _NEW = re.compile(r"(\d+) newly installed")
    _STEP = re.compile(r"(Get|Unpacking|Setting)(?::\d+| up | )")

    def __init__(self, report: Progress) -> None:
        self._report = report
        self._total = 160  # until apt says it
        self._seen = {"Get": 0, "Unpacking": 0, "Setting": 0}
        self._done = 0.0

    def line(self, line: str) -> None:
        if (new := self._NEW.search(line)) is not None:
            self._total = max(self._total, int(new[1]))
        if (step := self._STEP.match(line)) is None:
            return
        kind = step[1]
        self._seen[kind] += 1
        begin, end = self._SPAN[kind]
        done = begin + (end - begin) * min(1.0, self._seen[kind] / self._total)
        if done > self._done:
            self._done = done
            self._report(self._STAGE[kind], done)


def _failed(said: deque[str]) -> Fault:
    wrong = [line for line in said if line.startswith(("E:", "W:", "Err:", "dpkg: error"))] or list(said)
    text = "; ".join(wrong[-4:])
    if "No space left" in text:
        return Fault(
            ErrorKind.NO_SPACE,
            f"the disk is full: {text}",
            hint="about 1.5 GB are needed while it is built (DSEC_STORE)",
        )
    return Fault(
        ErrorKind.CREATE_FAILED,
        f"mmdebstrap failed: {text}",
        hint="`apt-get update` must work on this machine; its sources and proxy settings are the ones used",
        stage="bootstrap",
    )


def _clean(tree: Path) -> None:
    """Take out what belongs to the machine that built it, and what only takes space."""
    for name in _EMPTIED:
        directory = tree / name
        for entry in os.scandir(directory) if directory.is_dir() else ():
            if entry.is_dir(follow_symlinks=False):
                shutil.rmtree(entry.path)
            else:
                os.unlink(entry.path)
    for name in _WITHOUT_FILES:
        for where, _, files in os.walk(tree / name):
            for file in files:
                os.unlink(os.path.join(where, file))
    for name in _REMOVED:
        (tree / name).unlink(missing_ok=True)
    sources = tree / "etc/apt/sources.list.d"
    for path in sources.iterdir():
        path.unlink()
    (sources / "mirrors.sources").write_text(_SOURCES)
    for name, text in {"etc/hosts": _HOSTS, "etc/resolv.conf": "", "etc/machine-id": ""}.items():
        (tree / name).unlink(missing_ok=True)  # may be a link
        (tree / name).write_text(text)
    for name in ("etc/apt/trusted.gpg.d", "etc/apt/auth.conf.d"):
        if (tree / name).is_dir() and not any((tree / name).iterdir()):
            (tree / name).rmdir()
    _drop_empty_documentation(tree / "usr/share/doc")


def _forget_the_day(tree: Path, started: int) -> None:
    """Make the result depend on the packages only: the same ones give the same digest on every machine and day.

    What the build wrote gets the time of the newest thing that came out of a package; passwords were changed on no day.
    """
    shadow = tree / "etc/shadow"
    shadow.write_text(re.sub(r"(?m)^([^:]*:[^:]*):\d*:", r"\1:1:", shadow.read_text()))
    paths = [os.fsencode(tree)]
    paths += [os.path.join(where, name) for where, below, files in os.walk(paths[0]) for name in (*below, *files)]
    times = {path: os.lstat(path).st_mtime_ns for path in paths}
    newest = max(moment for moment in times.values() if moment < started)
    for path, moment in times.items():
        if moment >= started:
            os.utime(path, ns=(newest, newest), follow_symlinks=False)


def _drop_empty_documentation(doc: Path) -> None:
    for path in doc.iterdir():
        if path.is_dir() and not path.is_symlink() and not any(path.iterdir()):
            path.rmdir()


def _installed(tree: Path) -> list[str]:
    """`package version` of every installed package."""
    text = (tree / "var/lib/dpkg/status").read_text(errors="replace")
    fields = re.compile(r"^(Package|Version): (.+)$", re.MULTILINE)
    found = [dict(fields.findall(block)) for block in text.split("\n\n") if "install ok installed" in block]
    return sorted(f"{entry['Package']} {entry['Version']}" for entry in found)
