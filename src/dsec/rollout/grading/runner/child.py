"""The process that tests run in: privilege dropped for good, then pytest on modules that the parent had imported."""

from __future__ import annotations

import gc
import json
import os
import resource
import sys
import time
import traceback
from collections.abc import Callable, Generator, Sequence
from types import CodeType, ModuleType
from typing import Any, NamedTuple

from .guard import Guard
from .imports import Finder, forget

UNABLE = 98
"""Exit status of a child that could not take its place; why is on the pipe."""


HOOKS = (
    "pytest_runtest_protocol",
    "pytest_runtest_setup",
    "pytest_runtest_call",
    "pytest_runtest_teardown",
    "pytest_runtest_makereport",
    "pytest_runtest_logreport",
    "pytest_pyfunc_call",
    "pytest_fixture_setup",
)
"""What a report depends on."""

Thing = Any  # of pytest, whose version is the image's


class Ground(NamedTuple):
    """What a child stands on. sources, site, stdlib: absolute directories for sys.path."""

    workdir: str
    home: str
    uid: int
    gid: int
    python: str
    prefix: str
    sources: Sequence[str]
    site: Sequence[str]
    stdlib: Sequence[str]
    changed: frozenset[str] | None
    env: dict[str, str]
    limits: dict[str, int | None]
    helpers: Sequence[str]
    seal: Callable[[str], CodeType | None]
    arguments: Sequence[str]
    plugins: Sequence[tuple[str, ModuleType]]


class Reporter:
    """A pytest plugin that says on a pipe which test begins, and what has become of it."""

    def __init__(self, descriptor: int, guard: Guard) -> None:
        self._descriptor = descriptor
        self._guard = guard
        self._write = os.write
        self._encode = json.JSONEncoder(ensure_ascii=True).encode
        self._worst = ""

    def pytest_runtest_protocol(self, item: Thing) -> Generator[None, Any, None]:
        self._worst = ""
        self._guard.begin(item)
        self._say("S", item.nodeid)
        yield
        self._guard.settled(self._hooks(item.config.pluginmanager.hook))
        self._say("E", item.nodeid, self._worst)

    def pytest_collectreport(self, report: Thing) -> None:
        if report.failed:
            self._say("C", report.nodeid)

    def pytest_collection_finish(self, session: Thing) -> None:
        self._guard.collected(session.items)

    def _hooks(self, relay: Thing) -> list[Thing]:
        return [getattr(relay, name).get_hookimpls() for name in HOOKS]

    def pytest_runtest_logreport(self, report: Thing) -> None:
        """The worst of the phases; a phase that is expected to fail is neither passed nor failed."""
        outcome = report.outcome
        if hasattr(report, "wasxfail"):
            outcome = "xpassed" if outcome == "passed" else "xfailed"
        elif outcome == "failed" and report.when != "call":
            outcome = "error"
        order = ("", "passed", "xpassed", "skipped", "xfailed", "failed", "error")
        if outcome == "passed" and report.when != "call":
            return
        if order.index(outcome) > order.index(self._worst):
            self._worst = outcome

    def _say(self, kind: str, *what: str) -> None:
        self._write(self._descriptor, f"{kind}{self._encode(what)}\n".encode())


def run(ground: Ground, guard: Guard, descriptor: int, output: int) -> None:
    """Never returns. descriptor: where events go; output: the child's stdout and stderr."""
    status = UNABLE
    try:
        _take_place(ground, descriptor, output)
        _become_python(ground)
        guard.install()
        gc.enable()
        code = _pytest(ground, guard, descriptor)
        guard.settled(last=True)
        os.write(descriptor, b"D%d\n" % code)
        status = 0
    except SystemExit as end:  # of the code under test: ends the run early
        status = end.code if isinstance(end.code, int) else 1
    except BaseException as error:
        if status == UNABLE:
            os.write(descriptor, f"U{type(error).__name__}: {error}\n".replace("\n", " ", 1).encode()[:2000] + b"\n")
        raise
    finally:
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except (OSError, ValueError):
                continue
        os._exit(status & 0xFF)


def _take_place(ground: Ground, descriptor: int, output: int) -> None:
    """Session, descriptors, limits, user: in this order, since each takes what the next one gives up."""
    os.setsid()
    null = os.open("/dev/null", os.O_RDWR)
    for number, source in ((0, null), (1, output), (2, output)):
        os.dup2(source, number)
    os.closerange(3, descriptor)
    os.closerange(descriptor + 1, 65536)
    with open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")
    os.umask(0o022)
    _limit(ground.limits)
    os.setgroups([])
    os.setresgid(ground.gid, ground.gid, ground.gid)
    os.setresuid(ground.uid, ground.uid, ground.uid)
    with open("/proc/self/status") as file:
        status = dict(line.rstrip("\n").split(":\t", 1) for line in file if ":\t" in line)
    if int(status["CapEff"], 16) or int(status["CapPrm"], 16) or int(status["CapAmb"], 16):
        raise PermissionError(f"capabilities left: {status['CapEff']}")
    if status["NoNewPrivs"].strip() != "1":
        raise PermissionError("programs could gain privilege here (no_new_privs is not set)")
    os.chdir(ground.workdir)


def _limit(limits: dict[str, int | None]) -> None:
    kinds = {
        "memory_mb": (resource.RLIMIT_AS, 1 << 20),
        "file_mb": (resource.RLIMIT_FSIZE, 1 << 20),
        "open_files": (resource.RLIMIT_NOFILE, 1),
        "processes": (resource.RLIMIT_NPROC, 1),
        "cpu_s": (resource.RLIMIT_CPU, 1),
    }
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for name, (kind, unit) in kinds.items():
        value = limits.get(name)
        if value is not None:
            hard = resource.getrlimit(kind)[1]
            wanted = value * unit if hard == resource.RLIM_INFINITY else min(value * unit, hard)
            resource.setrlimit(kind, (wanted, wanted))


def _become_python(ground: Ground) -> None:
    """Environment, paths and modules as `python -m pytest` would have them, less what users and files can add."""
    os.environ.clear()
    os.environ.update(
        {
            "PATH": f"{ground.prefix}/bin:/usr/local/bin:/usr/bin:/bin",
            "HOME": ground.home,
            "USER": "nobody",
            "LOGNAME": "nobody",
            "LANG": "C.UTF-8",
            "TZ": "UTC",
            "PYTHONPATH": ":".join(ground.sources),
            "PYTHONHASHSEED": "0",
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTHONNOUSERSITE": "1",
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
            **ground.env,
        }
    )
    time.tzset()
    sys.dont_write_bytecode = True
    sys.executable = ground.python
    sys.prefix = sys.exec_prefix = ground.prefix
    sys.argv = ["pytest", *ground.arguments]
    sys.modules["__main__"] = ModuleType("__main__")
    sys.path[:] = [*ground.sources, *ground.stdlib]
    forget(ground.sources)
    sys.meta_path.insert(
        0, Finder(ground.stdlib, ground.site, ground.sources, ground.changed, ground.helpers, ground.seal)
    )
    import site

    known = set(sys.path)
    for folder in ground.site:  # the image's own .pth files, which may name the workspace
        site.addsitedir(folder, known)
    site.setquit()
    site.sethelper()


def _pytest(ground: Ground, guard: Guard, descriptor: int) -> int:
    import _pytest.config
    import pytest

    reporter = Reporter(descriptor, guard)
    pytest.hookimpl(hookwrapper=True, tryfirst=True)(Reporter.pytest_runtest_protocol)
    config = _pytest.config.get_config(list(ground.arguments), None)
    for name, plugin in ground.plugins:
        config.pluginmanager.register(plugin, name)
    config.pluginmanager.register(reporter)
    try:
        config = config.pluginmanager.hook.pytest_cmdline_parse(
            pluginmanager=config.pluginmanager, args=list(ground.arguments)
        )
        return int(config.hook.pytest_cmdline_main(config=config))
    except _pytest.config.ConftestImportFailure as error:  # of the tests' own, which imports the code under test
        traceback.print_exception(error.cause)
        return 4
    finally:
        config._ensure_unconfigure()
