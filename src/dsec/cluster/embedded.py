"""DSec on one machine: `dsec up` starts one edge and one apiserver here, `dsec down` ends them; `embedded()` does both privately.

Processes are known by pid *and* start time (a pid alone may be somebody else's by now) and signalled through pidfds.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import secrets
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from dsec.backends.runtime import runtime_path
from dsec.protocol.errors import ErrorKind, Fault
from dsec.protocol.mirrors import Mirror, Mirrors, dump, mirrors_of

DEFAULT_STATE = Path("/var/lib/dsec")
DEFAULT_RUN = Path("/run/dsec")
DEFAULT_STORE = Path("/var/cache/dsec/layers")
DEFAULT_PORT = 7707
START_DEADLINE_S = 60.0
STOP_DEADLINE_S = 120.0
_SOCKET_PATH = 107  # bytes
_ROLES = ("apiserver", "edge")  # in the order of their end
_SUPERVISOR = "supervisor"


class Endpoint(msgspec.Struct, frozen=True):
    """Where a platform on this machine answers; the key is in key_file (0600)."""

    url: str
    key_file: str
    state: str
    run: str


class _Flags(msgspec.Struct, frozen=True):
    """What `up` starts an edge with."""

    store: str
    uppers: str = "btrfs"
    max_sandboxes: int | None = None
    keep_days: float | None = None
    keep_gb: float | None = None

    def options(self) -> list[str]:
        """As the edge takes them."""
        given = {"max-sandboxes": self.max_sandboxes, "keep-days": self.keep_days, "keep-gb": self.keep_gb}
        return [word for name, value in given.items() if value is not None for word in (f"--{name}", str(value))]


class _Pid(msgspec.Struct, frozen=True):
    pid: int
    start: int


class ProcessStatus(msgspec.Struct, frozen=True):
    role: str
    pid: int | None


class LocalStatus(msgspec.Struct, frozen=True):
    """supervisor: the process that starts the others again, None when there is none. given_up: why it no longer tries."""

    endpoint: Endpoint | None
    processes: tuple[ProcessStatus, ...]
    supervisor: int | None = None
    given_up: str = ""

    @property
    def running(self) -> bool:
        return all(process.pid is not None for process in self.processes)


def state_dir(explicit: Path | str | None = None) -> Path:
    """The argument, else DSEC_STATE, else /var/lib/dsec."""
    return Path(explicit or os.environ.get("DSEC_STATE") or DEFAULT_STATE).absolute()


def store_dir() -> Path:
    return Path(os.environ.get("DSEC_STORE") or DEFAULT_STORE).absolute()


def run_dir(state: Path) -> Path:
    """`<state>/run` unless the sockets in it would have longer paths than a socket can have."""
    if state == DEFAULT_STATE:
        return DEFAULT_RUN
    name = _edge_name(state)
    longest = state / "run" / "sb" / f"sb-{name}-{'x' * 12}.sock"
    return state / "run" if len(os.fsencode(longest)) <= _SOCKET_PATH else DEFAULT_RUN.with_name(f"dsec-{name}")


def _start_time(pid: int) -> int | None:
    """Field 22 of /proc/PID/stat; None when there is no such process or it is a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] in ("Z", "X") else int(fields[19])


def _read_pid(run: Path, role: str) -> _Pid | None:
    """The recorded process when it is still the same one."""
    try:
        known = msgspec.json.decode((run / "pids" / role).read_bytes(), type=_Pid)
    except (OSError, msgspec.DecodeError):
        return None
    return known if _start_time(known.pid) == known.start else None


def status(state: Path | str | None = None) -> LocalStatus:
    """What of the platform of this state directory runs now."""
    directory = state_dir(state)
    run = run_dir(directory)
    endpoint = None
    with contextlib.suppress(OSError, msgspec.DecodeError):
        endpoint = msgspec.json.decode((directory / "endpoint.json").read_bytes(), type=Endpoint)
    processes = []
    for role in _ROLES:
        known = _read_pid(run, role)
        processes.append(ProcessStatus(role, known.pid if known else None))
    supervisor = _read_pid(run, _SUPERVISOR)
    given_up = ""
    with contextlib.suppress(OSError):
        given_up = (run / "pids" / "given-up").read_text()
    return LocalStatus(endpoint, tuple(processes), supervisor.pid if supervisor else None, given_up)


def up(
    state: Path | str | None = None, *, port: int = DEFAULT_PORT, host: str = "127.0.0.1", max_sandboxes: int | None = None,
    store: Path | None = None, uppers: str | None = None, mirrors: Mirrors | None = None, keep_days: float | None = None,
    keep_gb: float | None = None,
) -> Endpoint:  # fmt: skip
    """Starts what of edge and apiserver does not run yet; both outlive the caller, and are started again when
    they die. Fault says what is missing.

    What is not given is as the platform was started with, until `down`; then and at first: no limit of sandboxes but the
    machine's, the store of DSEC_STORE or the usual one, uppers "btrfs".

    keep_days, keep_gb: rollouts that ended are removed so many days later, and the oldest of them when all that is recorded
    takes more than so many GB (30 and 50 unless given).

    mirrors (name -> URL, a file, or `Mirror`s) are what sandboxes may be allowed to reach; by default those of
    `<state>/mirrors.toml`, or none.
    """
    directory = state_dir(state)
    _require_root()
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    with _locked(directory):
        run = run_dir(directory)
        if store is None and "DSEC_STORE" in os.environ:
            store = store_dir()
        flags = _flags(directory, run)
        flags = _Flags(
            store=str(store.absolute()) if store is not None else flags.store,
            uppers=uppers or flags.uppers,
            max_sandboxes=max_sandboxes if max_sandboxes is not None else flags.max_sandboxes,
            keep_days=keep_days if keep_days is not None else flags.keep_days,
            keep_gb=keep_gb if keep_gb is not None else flags.keep_gb,
        )
        return _start(directory, run, flags, host=host, port=port, lifeline=None, mirrors=mirrors, kept=True)


def down(state: Path | str | None = None) -> bool:
    """Stops every sandbox, then the processes. False when nothing ran."""
    directory = state_dir(state)
    run = run_dir(directory)
    if not directory.exists():
        return False
    with _locked(directory):
        running = [known for role in (_SUPERVISOR, *_ROLES) if (known := _read_pid(run, role)) is not None]
        _stop(directory, run, uppers=None)
        (directory / "endpoint.json").unlink(missing_ok=True)
        return bool(running)


def _stop(directory: Path, run: Path, *, uppers: str | None, store: Path | None = None) -> None:
    """Ends the processes. An edge that crashed left sandboxes that nobody has any more: another one removes them first."""
    if (supervisor := _read_pid(run, _SUPERVISOR)) is not None:
        _end(supervisor, patience_s=2 * STOP_DEADLINE_S)  # it ends the others in their order
    crashed = (run / "pids" / "edge").exists() and _read_pid(run, "edge") is None
    for role in _ROLES:
        if (known := _read_pid(run, role)) is not None:
            _end(known)
    if crashed:
        kind = uppers or ("btrfs" if (directory / "uppers.btrfs").exists() else "dir")
        _spawn(
            "edge", _edge_arguments(directory, run, store or Path(_flags(directory, run).store), kind), directory, run
        )
        if (sweeper := _read_pid(run, "edge")) is not None:
            _end(sweeper)
    for name in (*_ROLES, _SUPERVISOR, "given-up"):
        (run / "pids" / name).unlink(missing_ok=True)
    (run / "mirrors.json").unlink(missing_ok=True)
    (directory / "flags.json").unlink(missing_ok=True)
    if run != DEFAULT_RUN and run.parent == DEFAULT_RUN.parent:
        shutil.rmtree(run, ignore_errors=True)


@contextlib.contextmanager
def private(
    state: Path | str | None = None,
    *,
    max_sandboxes: int | None = None,
    store: Path | None = None,
    uppers: str = "btrfs",
    mirrors: Mirrors | None = None,
) -> Iterator[Endpoint]:
    """A platform of one's own that ends with the context, and with this process however that ends. mirrors as in `up`.

    Without `state` everything lies in a temporary directory that is removed at the end.
    """
    _require_root()
    ephemeral = state is None
    directory = Path(tempfile.mkdtemp(prefix="dsec-", dir="/var/tmp")) if state is None else state_dir(state)
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    run = run_dir(directory)
    read_end, write_end = os.pipe()  # the lifeline: only we hold the end for writing
    try:
        with _locked(directory):
            _require_idle(directory)
            flags = _Flags(store=str(store or store_dir()), uppers=uppers, max_sandboxes=max_sandboxes)
            endpoint = _start(
                directory, run, flags, host="127.0.0.1", port=0, lifeline=read_end, ephemeral=ephemeral, mirrors=mirrors
            )
        try:
            yield endpoint
        finally:
            _stop(directory, run, uppers=uppers, store=store)
    finally:
        os.close(write_end)
        os.close(read_end)
        if ephemeral:
            _remove(directory)


# -- parts -------------------------------------------------------------------------------------------------------------


def _remove(directory: Path) -> None:
    """What a process that was killed had started may still be about to end."""
    deadline = time.monotonic() + 5.0
    shutil.rmtree(directory, ignore_errors=True)
    while directory.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
        shutil.rmtree(directory, ignore_errors=True)


def _require_root() -> None:
    if os.geteuid() != 0:
        raise Fault(ErrorKind.PERMISSION, "DSec makes namespaces, mounts and cgroups: it has to be started as root",
                    hint="run it with sudo")  # fmt: skip


def _require_idle(directory: Path) -> None:
    """A private platform ends with its owner, so it must not be one that somebody else started."""
    running = [process.role for process in status(directory).processes if process.pid is not None]
    if running:
        raise Fault(
            ErrorKind.CONFLICT,
            f"a platform runs on {directory} already ({' and '.join(running)})",
            hint="use it through DSecClient, end it with `dsec down`, or choose another state directory",
        )


def _edge_name(directory: Path) -> str:
    """Names the edge's groups on this machine, so it is another for each state directory, and the same at each start there."""
    if directory == DEFAULT_STATE:
        return "local"
    return "e" + hashlib.blake2s(os.fsencode(directory.resolve()), digest_size=4).hexdigest()


def _edge_arguments(directory: Path, run: Path, store: Path, uppers: str) -> list[str]:
    where = {"name": _edge_name(directory), "state": directory, "run": run, "store": store, "uppers": uppers}
    return [word for option, value in where.items() for word in (f"--{option}", str(value))]


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """One `up` or `down` at a time."""
    fd = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _key_file(directory: Path) -> Path:
    """The API key, made at the first start; 0600 from its first byte."""
    path = directory / "api.key"
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        return path
    with os.fdopen(fd, "w") as file:
        file.write(f"dsec_{secrets.token_urlsafe(32)}\n")
    return path


def _start(
    directory: Path, run: Path, flags: _Flags, *, host: str, port: int, lifeline: int | None, ephemeral: bool = False,
    mirrors: Mirrors | None = None, kept: bool = False,
) -> Endpoint:  # fmt: skip
    """kept: the flags are written down for the next `up`."""
    chosen = mirrors_of(mirrors)  # what is wrong with them is said before anything starts
    for path in (run, run / "pids", directory / "logs"):
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    key_file = _key_file(directory)
    known = status(directory)
    if known.endpoint is not None and known.supervisor is not None and _heals(directory):
        return known.endpoint
    host, port = _take_over(run, known, host, port)
    fresh = _read_pid(run, "edge") is None
    store = Path(flags.store)
    edge = [
        *_edge_arguments(directory, run, store, flags.uppers),
        *(["--ephemeral"] if ephemeral else []),
        *flags.options(),
    ]
    if (file := _mirrors_file(run, chosen if mirrors is not None else None)) is not None:
        edge += ["--mirrors", str(file)]
    with _bind(host, port) as listener:  # first, since it is what fails most often
        url = f"http://{host}:{listener.getsockname()[1]}"
        edge += ["--api", _near(host, listener.getsockname()[1])]
        fd = listener.fileno()
        apiserver = ["--fd", str(fd), "--edge-socket", str(run / "edge.sock"), "--key-file", str(key_file)]
        try:
            _supervise({"edge": edge, f"apiserver:{fd}": apiserver}, directory, run, lifeline=lifeline, keep=(fd,))
        except BaseException:
            if fresh:
                _stop(directory, run, uppers=flags.uppers, store=store)
            raise
    endpoint = Endpoint(url=url, key_file=str(key_file), state=str(directory), run=str(run))
    if kept:
        _write(directory / "flags.json", flags)
    _write(directory / "endpoint.json", endpoint)
    return endpoint


def _near(host: str, port: int) -> str:
    """Where the API answers on this machine."""
    if host in ("0.0.0.0", "::"):
        host = "127.0.0.1" if host == "0.0.0.0" else "::1"
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def _write(path: Path, contents: msgspec.Struct) -> None:
    """Whole, or not at all."""
    temporary = path.with_name(f"{path.name}.tmp")
    temporary.write_bytes(msgspec.json.encode(contents))
    temporary.rename(path)


def _flags(directory: Path, run: Path) -> _Flags:
    """What the platform was started with, as long as there is one or `down` has not cleared away what it left."""
    if any((run / "pids" / role).exists() for role in (_SUPERVISOR, *_ROLES)):
        with contextlib.suppress(OSError, msgspec.DecodeError):
            return msgspec.json.decode((directory / "flags.json").read_bytes(), type=_Flags)
    return _Flags(store=str(store_dir()))


def _mirrors_file(run: Path, mirrors: Sequence[Mirror] | None) -> Path | None:
    """Mirrors may have credentials, so they travel in a file for root only; kept until `down`, for the edge's next start."""
    path = run / "mirrors.json"
    if mirrors is None:
        return path if path.exists() else None
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "wb") as file:
        file.write(dump(mirrors))
    return path


def _heals(directory: Path) -> bool:
    """Whether everything runs, or is being started again by a supervisor that has not given up; waits for that."""
    deadline = time.monotonic() + START_DEADLINE_S
    while True:
        now = status(directory)
        if now.supervisor is None or now.given_up:
            return False
        if now.running:
            return True
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)


def _take_over(run: Path, known: LocalStatus, host: str, port: int) -> tuple[str, int]:
    """Ends what the next supervisor starts anew, so that only an edge goes on. Where the API shall answer: as before, if
    there was something, since clients know the address."""
    if (supervisor := _read_pid(run, _SUPERVISOR)) is not None:
        _end(supervisor, first=signal.SIGKILL)  # its end by TERM is everybody's
    if (apiserver := _read_pid(run, "apiserver")) is not None:
        _end(apiserver)
    (run / "pids" / "given-up").unlink(missing_ok=True)
    if known.endpoint is None or not any(process.pid for process in known.processes):
        return host, port
    address = urlsplit(known.endpoint.url)
    return address.hostname or host, address.port or port


def _supervise(
    roles: dict[str, list[str]], directory: Path, run: Path, *, lifeline: int | None, keep: tuple[int, ...]
) -> None:
    """Starts a supervisor of `python -m dsec.<role>` apart from us and waits until all serve; else Fault, in their words."""
    ready_read, ready_write = os.pipe()
    command = [str(runtime_path()), "supervise", "--pids", str(run / "pids"), "--logs", str(directory / "logs"),
               "--ready", str(ready_write)]  # fmt: skip
    pass_fds = [ready_write, *keep]
    if lifeline is not None:
        command += ["--lifeline", str(lifeline)]
        pass_fds.append(lifeline)
    for role, arguments in roles.items():
        command += ["--role", role, sys.executable, "-m", f"dsec.{role.partition(':')[0]}", *arguments]
    try:
        with open(directory / "logs" / "supervisor.log", "ab") as log:
            process = subprocess.Popen(
                command, pass_fds=pass_fds, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
                cwd="/", env=_environment(),
            )  # fmt: skip
    finally:
        os.close(ready_write)
    said = _wait_ready(ready_read)
    os.close(ready_read)
    if said != "ok":
        process.terminate()
        process.wait()
        role, _, words = said.partition("\n")
        raise _unstarted(role if words or role in _ROLES else _SUPERVISOR, words, directory)


def _unstarted(role: str, said: str, directory: Path) -> Fault:
    log_path = directory / "logs" / f"{role}.log"
    message, _, hint = said.partition("\n")
    message = message or _last_words(log_path)
    return Fault(ErrorKind.INTERNAL, f"the {role} did not start: {message or 'it ended without a word'}",
                 hint=hint or f"see {log_path}")  # fmt: skip


def _bind(host: str, port: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(4096)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise Fault(ErrorKind.CONFLICT, f"{host}:{port} is taken by another process",
                        hint="stop it, or choose another with --port") from error  # fmt: skip
        raise
    return listener


def _spawn(role: str, arguments: list[str], directory: Path, run: Path) -> None:
    """Starts `python -m dsec.<role>` without a supervisor and waits until it serves; its own words when it cannot."""
    ready_read, ready_write = os.pipe()
    arguments = [*arguments, "--ready", str(ready_write)]
    try:
        with open(directory / "logs" / f"{role}.log", "ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", f"dsec.{role}", *arguments], pass_fds=[ready_write], stdin=subprocess.DEVNULL,
                stdout=log, stderr=log, start_new_session=True, cwd="/", env=_environment(),
            )  # fmt: skip
    finally:
        os.close(ready_write)
    start = _start_time(process.pid)
    (run / "pids" / role).write_bytes(msgspec.json.encode(_Pid(process.pid, start or 0)))
    said = _wait_ready(ready_read)
    os.close(ready_read)
    if said != "ok":
        process.kill()
        process.wait()
        (run / "pids" / role).unlink(missing_ok=True)
        raise _unstarted(role, said, directory)


def _last_words(log: Path) -> str:
    """The last line of a log, which may be gone with its directory by the time somebody looks."""
    try:
        lines = log.read_text(errors="replace").strip().splitlines()
    except OSError:
        return ""
    return lines[-1][:500] if lines else ""


def _environment() -> dict[str, str]:
    """Only what a server needs; nothing of the caller's secrets."""
    kept = ("PATH", "HOME", "LANG", "DSEC_RUNTIME", "DSEC_STORE", "DSEC_STEPS", "PYTHONDONTWRITEBYTECODE")
    environment = {name: os.environ[name] for name in kept if name in os.environ}
    # glibc's default of eight arenas a core keeps tens of MB that a mostly idle server never uses again.
    return environment | {"PYTHONUNBUFFERED": "1", "MALLOC_ARENA_MAX": "2"}


def _wait_ready(fd: int) -> str:
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    deadline = time.monotonic() + START_DEADLINE_S
    said = b""
    while (left := deadline - time.monotonic()) > 0:
        if poll.poll(left * 1000):
            piece = os.read(fd, 4096)
            if not piece:
                return said.decode(errors="replace")
            said += piece
    return f"not ready within {START_DEADLINE_S:g} s"


def _end(known: _Pid, *, first: signal.Signals = signal.SIGTERM, patience_s: float = STOP_DEADLINE_S) -> None:
    """SIGTERM, time to clean up, then SIGKILL; returns when the process is gone."""
    try:
        pidfd = os.pidfd_open(known.pid)
    except ProcessLookupError:
        return
    try:
        if _start_time(known.pid) != known.start:
            return
        for number, patience in ((first, patience_s), (signal.SIGKILL, 10.0)):
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, number)
            poll = select.poll()
            poll.register(pidfd, select.POLLIN)
            if poll.poll(patience * 1000):
                break
    finally:
        os.close(pidfd)
    with contextlib.suppress(ChildProcessError):
        os.waitpid(known.pid, os.WNOHANG)
