"""The edge process: starts the launcher, serves the link, ends everything it started."""

from __future__ import annotations

import asyncio
import gc
import os
import resource
import shutil
import signal
import sys
import time
from collections.abc import Coroutine
from contextlib import suppress

import structlog
import uvloop

from dsec.backends.container import ContainerBackend
from dsec.backends.launcher import LauncherClient, LauncherFailed
from dsec.backends.probe import probe_all
from dsec.backends.runtime import runtime_path
from dsec.layers import LayerStore
from dsec.protocol.errors import Fault
from dsec.protocol.link import LinkServer
from dsec.protocol.priority import prefer_this_process
from dsec.protocol.specs import Reason
from dsec.rollout.trajectory import TrajectoryStore

from .admission import Admission
from .config import MAX_OUTPUT, EdgeConfig, from_arguments
from .journal import Journal
from .lifecycle import Lifecycle
from .limits import DiskWatch
from .network import Networks
from .recording import Recorder
from .retention import Retention
from .rollouts import Rollouts
from .scopes import Guard, Known
from .service import Service, socket_directory

VERSION = "0.1.0"
GC_THRESHOLD = (20_000, 20, 50)  # requests make few cycles and many objects; the default looks for cycles every 700
_RESTARTS = (0.1, 0.5, 2.0)  # seconds of patience after each failed start of a launcher
_log = structlog.get_logger("edge")


def _prepare(config: EdgeConfig) -> None:
    config.state.mkdir(mode=0o700, parents=True, exist_ok=True)
    config.run.mkdir(mode=0o700, parents=True, exist_ok=True)
    socket_directory(config.run)
    for fd in (config.ready, config.lifeline):
        if fd >= 0:
            os.set_inheritable(fd, False)  # uvloop's child processes keep whatever is inheritable
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


class Edge:
    def __init__(self, config: EdgeConfig) -> None:
        self._config = config
        self._stopping = asyncio.Event()
        self._failed = False
        self._restarting = False
        self._runtime = runtime_path()
        self._store = LayerStore(config.store)
        self._journal = Journal(config.state / "journal")
        self._backend = ContainerBackend(self._runtime, self._store, config.run, MAX_OUTPUT)
        admission = Admission(config.max_sandboxes, config.lanes)
        epoch = self._journal.next_epoch()
        self._lifecycle = Lifecycle(config.name, self._store, self._backend, self._journal, admission, epoch)
        self._networks = Networks(config.run, config.configured_mirrors())
        self._trajectories = TrajectoryStore(config.state / "rollouts")
        self._rollouts = Rollouts(self._lifecycle, self._trajectories)
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> int:
        """Until it is told to end: every sandbox ends with it. 1 when it cannot go on, and leaves them to the next edge."""
        self._listen_for_the_end()
        began = time.monotonic()
        await self._start_launcher()
        launched = time.monotonic()
        await self._lifecycle.recover()
        self._trajectories.load()
        await self._rollouts.recover()
        _log.info(
            "took over", sandboxes=len(self._lifecycle.live()), launcher_s=round(launched - began, 3),
            recover_s=round(time.monotonic() - launched, 3), python_s=round(began - _process_start(), 3),
        )  # fmt: skip
        recorder = Recorder(self._lifecycle, self._trajectories)
        service = Service(
            lifecycle=self._lifecycle,
            networks=self._networks,
            rollouts=self._rollouts,
            recorder=recorder,
            store=self._store,
            runtime=self._runtime,
            version=VERSION,
        )
        guard = Guard(Known(self._lifecycle, self._rollouts))
        handlers = guard.over(service.handlers())
        recorder.settle()
        server = LinkServer(handlers, epoch=self._lifecycle.epoch, shared=True, on_error=self._on_error)
        await server.listen_unix(self._config.run / "edge.sock")
        self._in_background(self._lifecycle.watch_ttls(), vital=True)
        await service.jobs.go_on()
        self._in_background(service.jobs.run(), vital=True)
        self._in_background(service.accounts.run(), vital=True)
        retention = Retention(self._trajectories, keep_days=self._config.keep_days, keep_gb=self._config.keep_gb)
        self._in_background(retention.run(), vital=True)
        self._in_background(self._networks.begin(self._lifecycle.live()))
        self._in_background(service.forward.names.begin(self._lifecycle.live()))
        if self._config.uppers == "dir":
            watch = DiskWatch(self._lifecycle, self._runtime, self._config.state)
            self._in_background(watch.run(), vital=True)
        _say_ready(self._config.ready, "ok")
        self._in_background(self._probe(service))
        gc.freeze()
        gc.set_threshold(*GC_THRESHOLD)
        await self._stopping.wait()
        _log.info("stopping")
        for task in self._tasks:
            task.cancel()
        if not self._failed:
            await self._lifecycle.close(Reason.EDGE_RESTART)
        await self._networks.close()
        await server.close()
        await self._rollouts.close()
        if self._backend.launcher is not None:
            await self._backend.launcher.close()
        self._backend.mounts.close()
        self._journal.close()
        self._trajectories.close()
        return 1 if self._failed else 0

    def _listen_for_the_end(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stopping.set)
        if self._config.lifeline >= 0:
            os.set_blocking(self._config.lifeline, False)
            loop.add_reader(self._config.lifeline, self._lifeline_readable)

    def _lifeline_readable(self) -> None:
        with suppress(BlockingIOError):
            if not os.read(self._config.lifeline, 64):
                asyncio.get_running_loop().remove_reader(self._config.lifeline)
                self._stopping.set()

    async def _start_launcher(self) -> None:
        self._backend.launcher = await LauncherClient.start(
            self._runtime, name=self._config.name, run=self._config.run, uppers=self._config.uppers_argument(),
            pool=self._config.pool, ephemeral=self._config.ephemeral, log=sys.stderr.fileno(), on_lost=self._launcher_lost,
        )  # fmt: skip
        await self._backend.launcher.call("status")

    def _launcher_lost(self, why: str) -> None:
        self._backend.lost()
        if not self._stopping.is_set() and not self._restarting:
            _log.error("launcher lost", why=why)
            self._restarting = True
            self._in_background(self._restart_launcher(), vital=True)

    def _in_background(self, work: Coroutine[None, None, None], *, vital: bool = False) -> None:
        """vital: an edge without it would go on with half of its duties."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(lambda task: self._background_ended(task, vital))

    def _background_ended(self, task: asyncio.Task[None], vital: bool) -> None:
        self._tasks.discard(task)
        if task.cancelled() or (error := task.exception()) is None:
            return
        _log.error("a part of the edge failed", exc_info=error)
        if vital:
            _log.critical("the edge gives up, and leaves its sandboxes to the next one")
            self._failed = True
            self._stopping.set()

    async def _probe(self, service: Service) -> None:
        """What this machine can do takes half a second to find out; nobody waits for it to start."""
        try:
            service.features = await asyncio.to_thread(probe_all, (), self._config.state)
        except OSError as error:  # a full disk, say
            _log.error("the probes could not run", error=str(error))

    async def _restart_launcher(self) -> None:
        """A new launcher takes over what the dead one made: sandboxes go on."""
        for pause in _RESTARTS:
            try:
                await self._start_launcher()
                await self._lifecycle.restore_launcher()
                self._restarting = False
                return
            except (LauncherFailed, OSError) as failed:
                _log.error("the launcher did not come back", error=str(failed))
                await asyncio.sleep(pause)
        _log.critical("no launcher; the edge gives up, and leaves its sandboxes to the next one")
        self._failed = True
        self._stopping.set()

    def _on_error(self, method: str, error: Exception) -> None:
        _log.error("request failed", method=method, exc_info=error)

    def remove_traces(self) -> None:
        """When it has ended for good, its threads too."""
        with suppress(FileNotFoundError):
            (self._config.run / "edge.sock").unlink()
        if self._config.ephemeral:
            shutil.rmtree(self._config.state, ignore_errors=True)
            shutil.rmtree(self._config.run, ignore_errors=True)


def _process_start() -> float:
    """When this process began, on the monotonic clock: ticks since boot, of which there are a hundred a second."""
    with open("/proc/self/stat", encoding="latin-1") as file:
        ticks = int(file.read().rpartition(")")[2].split()[19])
    return ticks / os.sysconf("SC_CLK_TCK") - (time.clock_gettime(time.CLOCK_BOOTTIME) - time.monotonic())


def _say_ready(fd: int, text: str) -> None:
    if fd >= 0:
        with suppress(OSError):
            os.write(fd, text.encode())
            os.close(fd)


def main() -> int:
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso"),
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(),
        ],
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
    config = from_arguments(sys.argv[1:])
    try:
        _prepare(config)
        prefer_this_process()
        edge = Edge(config)
        status = uvloop.run(edge.run())
        if status == 0:
            edge.remove_traces()
        return status
    except (Fault, LauncherFailed, OSError) as error:
        hint = error.body.hint if isinstance(error, Fault) else ""
        _say_ready(config.ready, f"{error}\n{hint}")
        _log.critical("the edge could not run", error=str(error))
        return 1


if __name__ == "__main__":
    sys.exit(main())
