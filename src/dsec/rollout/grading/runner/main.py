"""The parent: root of a fresh sandbox. It reads the job, starts the tests, watches them from outside, and says what it saw."""

from __future__ import annotations

import ast
import builtins
import gc
import json
import os
import random
import re
import select
import signal
import stat
import sys
import time
import types
from collections.abc import Callable, Iterable, Sequence
from hashlib import blake2s
from typing import Any, NamedTuple, NoReturn

from .child import UNABLE, Ground, run
from .guard import TAMPERED, Guard, Terrain, make_guard
from .imports import installed
from .marks import Canary, mark, mark_helper
from .start import NAME

VERDICT_FD = 3
MAX_LINE = 7 * 1024 * 1024
MAX_EVENTS = 64 << 20
MAX_EVENT = 64 << 10
MAX_OUTPUT = 256 << 20
MAX_SIGNALS = 100
MAX_REPORTS = 50_000
MAX_CANARIES = 2
_MOCKED = frozenset(
    (
        "open",
        "print",
        "input",
        "exit",
        "quit",
        "help",
        "copyright",
        "credits",
        "license",
        "breakpoint",
        "compile",
        "exec",
        "eval",
    )
)
EXACT = tuple(name for name in vars(builtins) if name not in _MOCKED and not name.startswith("_"))
"""What no test has a reason to replace, however it mocks."""
PUBLIC = (
    "math",
    "json",
    "operator",
    "re",
    "copy",
    "time",
    "pytest",
    "unittest.mock",
    "collections",
    "itertools",
    "functools",
)


Thing = Any  # whatever pytest and tests hand around


class Plan(NamedTuple):
    """What the parent knows of the tests: their trees, and the secrets by which their ends are known."""

    trees: dict[str, Any]  # by absolute path
    ends: dict[int, tuple[bytes, str]]  # by index: the secret of its end, its id's path
    paths: frozenset[str]  # of the ids whose ends are marked
    canaries: dict[str, Canary]
    hidden: dict[Thing, Thing]  # by path, texts of test files that only root can read now; by (path,), what `trees` has


class Unable(Exception):
    """The tests could not even be started."""


# before the tests -----------------------------------------------------------------------------------------------------


def prepare(job: dict[str, Any], secrets: dict[int, bytes]) -> Plan:
    """Mark the files of the expected tests. `secrets` is filled by index."""
    dice = random.Random(os.urandom(16))
    trees: dict[str, Any] = {}
    ends: dict[int, tuple[bytes, str]] = {}
    paths: set[str] = set()
    canaries: dict[str, Canary] = {}
    hidden: dict[Thing, Thing] = {}
    files = sorted({one.partition("::")[0] for one in job["expected"]})
    for file in files:
        path = os.path.join(job["workdir"], file)
        if not os.path.lexists(path):
            raise Unable(f"there is no file {file} below {job['workdir']}, of which tests are expected")
        if not file.endswith(".py") or ".." in file.split("/"):
            continue
        try:
            source = _own(path)
            marked = mark(source, file, len(secrets), dice, _share(len(files), len(trees)))
        except (OSError, SyntaxError, ValueError):  # pytest will say what is wrong with it
            continue
        trees[path] = hidden[path,] = (marked.tree, source)
        if "tests" not in job.get("allow", ()) and not _reads_itself(source):
            os.chmod(path, 0o600)
            hidden[path] = source
        for index, one in marked.paths.items():
            secrets[index] = os.urandom(16)
            ends[index] = (secrets[index], one)
            paths.add(one)
        canaries.update((canary.path, canary) for canary in marked.canaries)
    return Plan(trees, ends, frozenset(paths), canaries, hidden)


_OTHERS_READ = re.compile(rb"spawn|forkserver|getsource|findsource")
_OWN_PLACE = re.compile(rb"(?:Path|dirname|abspath|realpath)\(__file__\)(?!\s*\.\s*(?:read|open))")


def _reads_itself(source: bytes) -> bool:
    """Whether tests may have to read their own file while they run, or start a process that does."""
    return bool(_OTHERS_READ.search(source)) or source.count(b"__file__") > len(_OWN_PLACE.findall(source))


def _share(files: int, done: int) -> int:
    """How many canaries this file gets."""
    return int(done < MAX_CANARIES)


def _own(path: str) -> bytes:
    """Contents of a test file that is the root's alone: no link, and nobody else may write it."""
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb") as file:
        info = os.fstat(file.fileno())
        if not stat.S_ISREG(info.st_mode):
            raise OSError(f"{path} is not a regular file")
        if info.st_uid != 0 or info.st_mode & 0o022:
            os.fchown(file.fileno(), 0, 0)
            os.fchmod(file.fileno(), 0o644)
        return file.read()


def import_pytest(site: Sequence[str]) -> list[tuple[str, types.ModuleType]]:
    """Import pytest whole, and the plugins that the image installed. Nothing of the agent's can be imported yet."""
    sys.path.extend(site)
    try:
        import _pytest.config
        import pytest  # noqa: F401
    except ImportError as error:
        where = ", ".join(site) or "the image"
        raise Unable(
            f"no pytest in {where} ({error}): install it there, or name the interpreter that has it"
        ) from error
    for name in _pytest.config.default_plugins:
        if name not in ("pytester", "legacypath"):
            __import__(f"_pytest.{name}")
    return _plugins(site)


def _plugins(site: Sequence[str]) -> list[tuple[str, types.ModuleType]]:
    """Entry points of installed distributions, read as files: plugins are imported from there and from nowhere else."""
    found = []
    for folder in site:
        for entry in sorted(os.listdir(folder)):
            if not entry.endswith((".dist-info", ".egg-info")):
                continue
            for name, module in _entry_points(os.path.join(folder, entry, "entry_points.txt")):
                try:
                    __import__(module)
                except Exception as error:  # noqa: BLE001 what an import raises is the plugin's affair
                    print(f"plugin {name}: {error}", file=sys.stderr)
                    continue
                found.append((name, sys.modules[module]))
    return found


def _entry_points(path: str) -> Iterable[tuple[str, str]]:
    try:
        with open(path, encoding="utf-8") as file:
            lines = file.read().splitlines()
    except OSError:
        return
    inside = False
    for line in map(str.strip, lines):
        if line.startswith("["):
            inside = line == "[pytest11]"
        elif inside and "=" in line:
            name, _, module = line.partition("=")
            yield name.strip(), module.strip().partition(":")[0]


def wire(guard: Guard, plan: Plan) -> None:
    """Make pytest take marked tests, and note what it and the comparison consist of."""
    import linecache
    import warnings

    import _pytest.assertion.rewrite as rewrite

    plain: Callable[..., Any] = rewrite._rewrite_test
    load, text, look_up = guard.load, guard.text, linecache.updatecache
    done = set[str]()

    def lines(filename: str, module_globals: Thing = None) -> Thing:
        """Of a hidden file, for a traceback: never kept."""
        found = text(filename)
        if found is None:
            return look_up(filename, module_globals)
        return found.decode("utf-8", "replace").splitlines(keepends=True)

    linecache.updatecache = lines

    def rewritten(path: Thing, config: Thing) -> Thing:
        name = str(path)
        found = text((name,)) if name not in done else None
        done.add(name)
        if found is None and (source := text(name)) is not None:  # once more, under another name
            tree = ast.parse(source, filename=name)
            rewrite.rewrite_asserts(tree, source, name, config)
            return b"", compile(tree, name, "exec", dont_inherit=True)
        if found is None:
            return plain(path, config)
        tree, source = found
        rewrite.rewrite_asserts(tree, source, name, config)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)  # a mark is a call of a string until it is compiled
            return b"", load(name, tree)

    rewrite._rewrite_test = rewritten  # type: ignore[assignment]
    rewrite._read_pyc = lambda *_, **__: None
    if any(b"unittest" in source for _, source in plan.trees.values()):
        _wire_unittest(guard)
    _watch_all(guard)


def sealer(guard: Guard) -> Callable[[str], types.CodeType | None]:
    """Code of a module that lies among the tests."""
    import warnings

    load = guard.load

    def seal(path: str) -> types.CodeType | None:
        with open(path, "rb") as file:
            source = file.read()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)
            return load(path, mark_helper(source, path), helper=True)

    return seal


def _climbs(path: str) -> bool:
    """Whether a file has words by which frames lead to other frames and to values."""
    try:
        with open(path, "rb") as file:
            text = file.read()
    except OSError:
        return False
    return any(word in text for word in (b"f_back", b"f_locals", b"f_globals"))


def helper_folders(tests: Iterable[str], files: Iterable[str]) -> list[str]:
    """Directories of tests: those that are collected, and around test files those that are called so."""
    found = {f"{path}/" for path in tests if os.path.isdir(path)}
    for path in files:
        parts = path.split("/")
        for at, part in enumerate(parts[:-1]):
            if part in ("test", "tests", "testing"):
                found.add("/".join(parts[: at + 1]) + "/")
    return sorted(found)


def _wire_unittest(guard: Guard) -> None:
    import unittest.case

    check, weigh = guard.check, guard.weigh
    case = unittest.case.TestCase
    plain_equal, plain_true = case.assertEqual, case.assertTrue

    def assert_equal(self: Thing, first: Thing, second: Thing, msg: Thing = None) -> None:
        check()
        weigh("==", first, second)
        plain_equal(self, first, second, msg)

    def assert_true(self: Thing, expr: Thing, msg: Thing = None) -> None:
        check()
        plain_true(self, expr, msg)

    case.assertEqual, case.assertTrue = assert_equal, assert_true  # type: ignore[method-assign]


def _watch_all(guard: Guard) -> None:
    kinds = (types.FunctionType, types.BuiltinFunctionType, type)
    wrapped = (*kinds, classmethod, staticmethod, property)
    guard.watch("builtins", builtins, EXACT, True, False)
    others = [name for name in vars(builtins) if name not in EXACT and name not in ("_", "__doc__", "__debug__")]
    guard.watch("builtins", builtins, others, False, False)
    for name in PUBLIC:
        if name in sys.modules:
            space = sys.modules[name]
            objects = [
                key for key, value in vars(space).items() if callable(value) or type(value).__module__ != "builtins"
            ]
            guard.watch(name, space, [key for key in objects if key[:2] != "__"], False, False)
    _watch_marks(guard)
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] in ("_pytest", "pluggy", "unittest", "posixpath", "linecache") and module is not None:
            slow = [key for key, value in vars(module).items() if isinstance(value, kinds)]
            guard.watch(name, module, slow, False, True)
            for key in slow:
                value = vars(module)[key]
                if isinstance(value, type) and value.__module__ == name:
                    parts = [part for part, thing in vars(value).items() if isinstance(thing, wrapped)]
                    guard.watch(f"{name}.{key}", value, parts, False, True)
                    if "__exit__" in vars(value):  # it decides what becomes of an exception in a test
                        guard.watch(f"{name}.{key}", value, ("__enter__", "__exit__"), False, False)


def _watch_marks(guard: Guard) -> None:
    """What decorates tests, which runs between the code under test and them."""
    import _pytest.mark.structures as structures
    import pytest

    names = ("parametrize", "skip", "skipif", "xfail", "usefixtures", "filterwarnings")
    guard.watch("pytest.mark", pytest.mark, names, True, False)
    for kind in (structures.MarkGenerator, structures.MarkDecorator, structures.ParameterSet, structures.Mark):
        guard.watch(f"pytest.{kind.__name__}", kind, [key for key in vars(kind) if key != "__dict__"], False, False)


def settle(job: dict[str, Any]) -> str:
    """Owners and modes of where tests run, and a home for them. Nothing that is here can be moved or changed by them."""
    workdir = job["workdir"]
    if not os.path.isdir(workdir):
        raise Unable(f"there is no directory {workdir} to work in")
    os.chown(workdir, 0, 0)
    os.chmod(workdir, 0o1777)  # tests may leave files where they run
    home = f"/tmp/home-{os.urandom(4).hex()}"
    os.mkdir(home, 0o700)
    os.chown(home, job["uid"], job["gid"])
    return home


# while they run -------------------------------------------------------------------------------------------------------


class Seen:
    """What has come from the child so far."""

    def __init__(self, job: dict[str, Any], plan: Plan) -> None:
        self.job = job
        self.plan = plan
        self.expected = frozenset(job["expected"])
        self.reports: list[dict[str, Any]] = []
        self.signals: dict[tuple[str, str], None] = {}
        self.void = ""
        self._counts: dict[str, int] = {}
        self.code: int | None = None
        self.failure = ""
        self.uncollected = 0
        self.output = bytearray()
        self.output_bytes = 0
        self.event_bytes = 0
        self.others_failed = False
        self._pending = b""
        self._count = 0
        self._test: str | None = None
        self._began = 0.0
        self._ends: set[str] = set()

    def signal(self, name: str, detail: str, forged: bool = False) -> None:
        """Of each name the first few; forged: no result can be believed any more."""
        count = self._counts[name] = self._counts.get(name, 0) + 1
        if forged and not self.void:
            self.void = f"{name}: {detail[:800]}"
        if count <= 3 and len(self.signals) < MAX_SIGNALS:
            self.signals.setdefault((name, detail[:1000]))

    def printed(self, data: bytes) -> None:
        self.output_bytes += len(data)
        self.output += data
        keep = 4 * self.job["tail_bytes"] + 65536
        if len(self.output) > 2 * keep:
            del self.output[:-keep]

    def events(self, data: bytes, now: float) -> None:
        self.event_bytes += len(data)
        *lines, self._pending = (self._pending + data).split(b"\n")
        if len(self._pending) > MAX_EVENT:
            self.signal("malformed", f"{self._pending[:100]!r}... is nothing that the runner says", forged=True)
        for line in lines:
            if self.void:
                break
            try:
                self._event(line[:1], line[1:].decode(), now)
            except (ValueError, KeyError, TypeError, IndexError):
                self.signal("malformed", f"{line[:200]!r} is nothing that the runner says", forged=True)

    def _event(self, kind: bytes, rest: str, now: float) -> None:
        if kind == b"S":
            if self._test is not None:
                self.signal("disorder", f"a test began inside another: {self._test}", forged=True)
            (self._test,) = json.loads(rest)
            self._began, self._ends = now, set()
        elif kind == b"T":
            index, count, signature = rest.split(" ")
            key, path = self.plan.ends[int(index)]
            genuine = blake2s(count.encode(), key=key, digest_size=8).hexdigest()
            if signature != genuine or int(count) <= self._count:
                raise ValueError(rest)
            self._count = int(count)
            self._ends.add(path)
            if path in self.plan.canaries:
                self.signal("canary", "a test that must fail reached its end", forged=True)
        elif kind == b"E":
            test, outcome = json.loads(rest)
            if test != self._test or not isinstance(outcome, str):
                self.signal("disorder", f"{test!r} ended, but did not begin", forged=True)
            self._test = None
            self._report(test, outcome, now - self._began)
        elif kind == b"C":
            (_,) = json.loads(rest)
            self.uncollected += 1
        elif kind == b"D":
            self.code = int(rest)
        elif kind == b"X":
            name, _, detail = rest.partition("\t")
            self.signal(name, detail, forged=True)
        elif kind == b"N":
            name, _, detail = rest.partition("\t")
            self.signal(name, detail)
        elif kind == b"U":
            self.failure = rest
        else:
            raise ValueError(kind)

    def _report(self, test: str, outcome: str, seconds: float) -> None:
        path = test.partition("[")[0]
        if path in self.plan.canaries:
            if outcome in ("passed", "xpassed"):
                self.signal("canary", "a test that must fail was reported as passed", forged=True)
            return
        if test not in self.expected:
            self.others_failed |= outcome in ("failed", "error")
            return
        if outcome == "passed" and path in self.plan.paths and path not in self._ends:
            self.signal("unproven", f"reported as passed, but never reached its end: {test}", forged=True)
            outcome = "failed"
        if outcome == "passed" and path not in self.plan.paths:
            self.signal("unmarked", f"{test}: not written as a function of its file; pytest's word counts alone")
        if len(self.reports) < MAX_REPORTS:
            self.reports.append({"id": test, "outcome": outcome or "error", "seconds": round(seconds, 6)})

    def tail(self) -> str:
        text = self.output.decode("utf-8", "replace")
        return without(text, [canary.name for canary in self.plan.canaries.values()])[-self.job["tail_bytes"] :]


def without(text: str, names: Iterable[str]) -> str:
    """pytest's output less what it says of canaries: nobody shall wonder about tests that are in no file."""
    hidden = frozenset(names)
    totals = re.compile(r"[.FEsxX]+ +\[ *\d+%\]|(=+ )?\d+ \w+.* in [\d.]+s.*")  # canaries are in the sums, too
    kept, skipping = [], False
    for line in text.splitlines():
        title = line.strip("_= ")
        if line.startswith(("____", "====")):
            skipping = title in hidden
        if skipping or (hidden and totals.fullmatch(line)) or any(f"::{name}" in line for name in hidden):
            continue
        kept.append(line)
    return "\n".join(kept)


class Killer:
    """Ends every process of the tests' user at once. Forked beforehand: later there may be no process left to have."""

    def __init__(self, uid: int) -> None:
        self._uid = uid
        reader, self._writer = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            try:
                os.close(self._writer)
                os.closerange(4, reader)
                os.closerange(reader + 1, 4096)
                if os.read(reader, 1):
                    os.setresuid(self._uid, self._uid, self._uid)
                    os.kill(-1, signal.SIGKILL)
            finally:
                os._exit(0)
        os.close(reader)

    def strike(self) -> int:
        """Kill all; return how many there were. Bounded: what cannot be killed in 10 s is in the kernel's hands."""
        left = len(self._alive())
        if self._writer >= 0:
            os.write(self._writer, b"k")
            os.close(self._writer)
            self._writer = -1
            os.waitpid(self._pid, 0)
        deadline = time.monotonic() + 10
        while (alive := self._alive()) and time.monotonic() < deadline:
            for pid in alive:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            time.sleep(0.001)
        return left

    def _alive(self) -> list[int]:
        found = []
        for name in os.listdir("/proc"):
            if not name.isdigit():
                continue
            try:
                with open(f"/proc/{name}/status", "rb") as file:
                    text = file.read(1024)
            except OSError:
                continue
            if b"\nUid:\t%d\t" % self._uid in text and b"\nState:\tZ" not in text and b"\nState:\tX" not in text:
                found.append(int(name))
        return found


def follow(seen: Seen, child: int, events: int, output: int, deadline: float, killer: Killer) -> tuple[int, bool, int]:
    """Read both pipes until the child has ended; then end what it left and read the rest. Wait status, timed out, left."""
    ended = os.pidfd_open(child)
    poll = select.poll()
    for descriptor in (events, output, ended):
        poll.register(descriptor, select.POLLIN)
    open_pipes = {events, output}
    timed_out = False
    left: int | None = None
    while open_pipes or left is None:
        wait = max(deadline - time.monotonic(), 0) if left is None else 1.0
        ready = poll.poll(wait * 1000 + 1)
        if left is None:
            timed_out = time.monotonic() >= deadline
            flood = seen.output_bytes > MAX_OUTPUT or seen.event_bytes > MAX_EVENTS
            if flood:
                seen.signal("flood", f"{seen.output_bytes} bytes printed, {seen.event_bytes} of events: stopped")
            ended_itself = any(descriptor == ended for descriptor, _ in ready)
            if timed_out or flood or seen.void or ended_itself:
                left = killer.strike() - int(not ended_itself)
                poll.unregister(ended)
        elif not ready:
            break
        for descriptor, _ in ready:
            if descriptor not in open_pipes:
                continue
            data = os.read(descriptor, 1 << 20)
            if not data:
                open_pipes.discard(descriptor)
                poll.unregister(descriptor)
            elif descriptor == output:
                seen.printed(data)
            else:
                seen.events(data, time.monotonic())
    return os.waitpid(child, 0)[1], timed_out, max(left or 0, 0)


# the whole ------------------------------------------------------------------------------------------------------------


def observe(job: dict[str, Any]) -> dict[str, Any]:
    """Run the job and return the observation."""
    gc.disable()  # until the child: what is imported here stays
    stdlib = [path for path in sys.path if path and os.path.isdir(path) and path != os.path.dirname(__file__)]
    python = which(job["python"])
    prefix, site = installed(python)
    plugins = import_pytest(site)
    home = settle(job)
    secrets: dict[int, bytes] = {}
    plan = prepare(job, secrets)
    sources = [os.path.normpath(os.path.join(job["workdir"], path)) for path in job["pythonpath"]]
    changed = job.get("changed")
    events, child_events = os.pipe()
    output, child_output = os.pipe()
    tests = [os.path.normpath(os.path.join(job["workdir"], path)) for path in job["tests"]]
    folders = helper_folders(tests, plan.trees)
    own = frozenset(os.path.join(job["workdir"], path) for path in changed) if changed is not None else None
    terrain = Terrain(
        workdir=job["workdir"],
        trusted=(
            *(f"{path}/" for path in (*stdlib, *site, *tests)),
            *folders,
            *tests,
            os.path.abspath(__file__),
            NAME,
            "<frozen ",
        ),
        stdlib=os.path.dirname(os.__file__),
        tests=frozenset(plan.trees),
        changed=own,
        allow=frozenset(job.get("allow", ())),
        program=os.path.abspath(__file__),
        uid=job["uid"],
        climbs=own is None or any(map(_climbs, own)),
    )
    guard = make_guard(child_events, terrain, secrets, plan.hidden)
    wire(guard, plan)
    plan.trees.clear()
    ground = Ground(
        workdir=job["workdir"],
        home=home,
        uid=job["uid"],
        gid=job["gid"],
        python=python,
        prefix=prefix,
        sources=sources,
        site=site,
        stdlib=stdlib,
        changed=own,
        env=job["env"],
        limits=job["limits"],
        helpers=folders,
        seal=sealer(guard),
        arguments=arguments(job),
        plugins=plugins,
    )
    killer = Killer(job["uid"])
    seen = Seen(job, plan)
    began = time.monotonic()
    sys.stdout.flush()
    sys.stderr.flush()
    gc.freeze()  # or the child's collector would copy all of it, page by page
    child = os.fork()
    if child == 0:
        plan.ends.clear()
        job.clear()
        del seen, killer
        run(ground, guard, child_events, child_output)
    os.close(child_events)
    os.close(child_output)
    status, timed_out, left = follow(seen, child, events, output, began + job["timeout"], killer)
    return verdict(job, seen, status, timed_out, left, time.monotonic() - began)


def arguments(job: dict[str, Any]) -> list[str]:
    """The command line: what the job says, then what nothing may override."""
    fixed = [f"--rootdir={job['workdir']}", f"--confcutdir={job['workdir']}", "-p", "no:cacheprovider", "--color=no"]
    return [*job["arguments"], *fixed, *job["tests"]]


def verdict(job: dict[str, Any], seen: Seen, status: int, timed_out: bool, left: int, seconds: float) -> dict[str, Any]:
    code = os.waitstatus_to_exitcode(status)
    code = 128 - code if code < 0 else code
    if code == TAMPERED:
        if not seen.void:
            seen.signal("tampered", "the process of the tests stopped itself", forged=True)
    elif code != UNABLE and seen.code is None and not timed_out and not seen.void:
        seen.signal("early_exit", f"the tests' process ended before its tests had, with status {code}")
    if left:
        seen.signal("left_processes", f"{left} processes outlived the tests")
    if seen.code is not None and code == 0:
        failed = seen.others_failed or any(report["outcome"] in ("failed", "error") for report in seen.reports)
        code = seen.code if seen.code != 1 else int(failed)
    return {
        "nonce": job["nonce"],
        "reports": seen.reports,
        "status": code,
        "failure": seen.failure if code == UNABLE else "",
        "void": seen.void,
        "timed_out": timed_out,
        "signals": [{"name": name, "detail": detail} for name, detail in seen.signals],
        "tail": seen.tail(),
        "output_bytes": seen.output_bytes,
        "seconds": round(seconds, 6),
        "left": left,
        "uncollected": seen.uncollected,
    }


def which(python: str) -> str:
    if "/" in python:
        return python
    for folder in ("/usr/local/bin", "/usr/bin", "/bin"):
        if os.access(os.path.join(folder, python), os.X_OK):
            return os.path.join(folder, python)
    raise Unable(f"no interpreter {python} in the image")


def again(data: bytes, python: str) -> NoReturn:
    """Start anew with the interpreter that has pytest."""
    spool = os.memfd_create("job")
    os.write(spool, data)
    os.lseek(spool, 0, os.SEEK_SET)
    os.dup2(spool, 0)
    os.set_inheritable(VERDICT_FD, True)
    os.execve(python, [python, "-I", "-S", os.path.abspath(__file__)], {"LANG": "C.UTF-8"})


def main() -> None:
    with open(0, "rb", closefd=False) as stdin:
        data = stdin.read()
    job = json.loads(data)
    os.set_inheritable(VERDICT_FD, False)
    nonce = job["nonce"]
    try:
        python = which(job["python"])
        if os.path.realpath(python) != os.path.realpath(sys.executable):
            again(data, python)
        answer = observe(job)
    except (Unable, OSError) as error:
        answer = {"nonce": nonce, "failure": f"{error}"}
    line = json.dumps(answer).encode()
    if len(line) > MAX_LINE:
        answer.update(tail="", reports=answer["reports"][: MAX_REPORTS // 10])
        line = json.dumps(answer).encode()
    line += b"\n"
    while line:
        line = line[os.write(VERDICT_FD, line) :]


if __name__ == "__main__":
    main()
