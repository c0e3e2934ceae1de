"""Downloads through pip, kept outside the checkout: the source distributions of tasks and the wheels of their dependencies."""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from dsec.demo.errors import DemoError
from dsec.demo.tasks import Sdist, Task
from dsec.layers import python

PARALLEL = 2
SANDBOX_PYTHON = python.VERSION
_BACKEND = Path(__file__).with_name("sdist_backend")

Progress = Callable[[str], None]


def cache_dir() -> Path:
    """Where downloads live: `DSEC_DEMO_CACHE`, else `$XDG_CACHE_HOME/dsec/demo`, else `/var/cache/dsec/demo`."""
    if own := os.environ.get("DSEC_DEMO_CACHE"):
        return Path(own)
    if xdg := os.environ.get("XDG_CACHE_HOME"):
        return Path(xdg) / "dsec" / "demo"
    return Path("/var/cache/dsec/demo")


def fetch(tasks: Sequence[Task], cache: Path, progress: Progress) -> None:
    """Download what is not there yet of both releases and all dependencies of the tasks. Checks every sdist's sha256."""
    sdists = {
        sdist.filename: (f"{task.package}=={version}", sdist)
        for task in tasks
        for version, sdist in ((task.base_version, task.sdist_base), (task.fixed_version, task.sdist_fixed))
        if not sdist_path(cache, sdist).is_file()
    }
    jobs: list[Callable[[], None]] = [
        partial(_fetch_sdist, cache, pin, sdist, progress) for pin, sdist in sdists.values()
    ]
    wheels = _rounds({r for task in tasks for r in task.requirements if wheel_path(cache, r) is None})
    jobs += [partial(_fetch_wheels, cache, pins, progress) for pins in wheels]
    (cache / "sdists").mkdir(parents=True, exist_ok=True)
    (cache / "wheels").mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(PARALLEL) as pool:
        for done in [pool.submit(job) for job in jobs]:
            done.result()


def sdist_path(cache: Path, sdist: Sdist) -> Path:
    return cache / "sdists" / sdist.filename


def wheel_path(cache: Path, requirement: str) -> Path | None:
    """The downloaded wheel of a pinned requirement, or None."""
    name, version = requirement.split("==")
    wanted = (_normal(name), version)
    for path in (cache / "wheels").glob("*.whl"):
        parts = path.name.split("-")
        if (_normal(parts[0]), parts[1]) == wanted:
            return path
    return None


def _normal(name: str) -> str:
    return name.lower().replace("-", "_").replace(".", "_")


def _rounds(requirements: Iterable[str]) -> list[list[str]]:
    """Lists without two versions of one package, since pip takes one version of each a call."""
    rounds: list[dict[str, str]] = []
    for requirement in sorted(requirements):
        name = requirement.split("==")[0]
        free = next((r for r in rounds if name not in r), None)
        if free is None:
            rounds.append(free := {})
        free[name] = requirement
    return [list(r.values()) for r in rounds]


def _fetch_sdist(cache: Path, pin: str, sdist: Sdist, progress: Progress) -> None:
    """One sdist. pip wants metadata before it hands one over: see `sdist_backend`, which reads it instead of building it."""
    folder = cache / "sdists"
    search = os.pathsep.join(filter(None, [str(_BACKEND), os.environ.get("PYTHONPATH", "")]))
    _pip(
        pin,
        ["--no-build-isolation", "--use-pep517", "--no-binary", ":all:", "--dest", str(folder), pin],
        {"PYTHONPATH": search},
    )
    path = sdist_path(cache, sdist)
    if not path.is_file():
        raise DemoError(
            f"{pin} came under another name than {sdist.filename}", hint="the release was changed on the index"
        )
    if hashlib.sha256(path.read_bytes()).hexdigest() != sdist.sha256:
        path.unlink()
        raise DemoError(
            f"{sdist.filename} has another sha256 than recorded", hint="check which package index pip is set to"
        )
    progress(sdist.filename)


def _fetch_wheels(cache: Path, pins: list[str], progress: Progress) -> None:
    machine = platform.machine()
    tags = [f"manylinux_2_{minor}_{machine}" for minor in (36, 34, 31, 28, 17, 12, 5)] + [
        f"manylinux2014_{machine}",
        f"linux_{machine}",
    ]
    platforms = [word for tag in tags for word in ("--platform", tag)]
    wanted = ["--implementation", "cp", "--python-version", SANDBOX_PYTHON]
    _pip(", ".join(pins), ["--only-binary", ":all:", *platforms, *wanted, "--dest", str(cache / "wheels"), *pins], {})
    progress(f"{len(pins)} wheels")


def _pip(what: str, arguments: list[str], env: dict[str, str]) -> None:
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--disable-pip-version-check",
        *arguments,
    ]
    done = subprocess.run(command, env={**os.environ, **env}, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode:
        why = (done.stderr or done.stdout).strip().splitlines()
        raise DemoError(
            f"pip could not download {what}: {why[-1] if why else f'exit status {done.returncode}'}",
            hint="check the network and `pip config list`; what was downloaded is kept, so run the same command again",
        )
