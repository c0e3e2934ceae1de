"""DSec's sandboxes behind Inspect's interface.

What an agent brings about is told to its model, as Inspect's contract says: exit codes, time-outs, file errors, limits. What
the infrastructure brings about (a sandbox that was lost, a service that does not answer) raises what Inspect's tool loop does
not catch, so that the sample becomes an error and never a tool's result, or a score.
"""

from __future__ import annotations

import asyncio
import logging
import shlex
from typing import Any, Literal, overload

from inspect_ai.util import (
    ExecResult,
    OutputLimitExceededError,
    SandboxConnection,
    SandboxEnvironment,
    SandboxEnvironmentConfigType,
    SandboxEnvironmentLimits,
    sandboxenv,
)

import dsec
from dsec import DSecClient, DSecError, NotFound, Sandbox, SandboxUnavailable, State

from . import platform as platforms
from .commands import run
from .config import DSecSandbox, DSecSandboxConfig, load, parse
from .failures import told
from .platform import MADE_BY, Platform

log = logging.getLogger(__name__)
_CONFIG_FILES = ["dsec.yaml"]
_MAKE_WORKDIR = 'PATH=/usr/sbin:/usr/bin:/sbin:/bin; [ -d "$1" ] || { mkdir -p -- "$1" && chown -- "$2" "$1"; }'
_UNREADABLE, _UNWRITABLE = 0o444, 0o222


@sandboxenv(name="dsec")
class DSecSandboxEnvironment(SandboxEnvironment):
    """One sandbox of a sample."""

    def __init__(self, platform: Platform, sandbox: Sandbox, spec: DSecSandbox) -> None:
        super().__init__()
        self.sandbox = sandbox
        self.spec = spec
        self.platform = platform

    # -- commands and files --

    async def exec(
        self,
        cmd: list[str],
        input: str | bytes | None = None,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        user: str | None = None,
        timeout: int | None = None,
        timeout_retry: bool = True,
        concurrency: bool = True,
    ) -> ExecResult[str]:
        """Runs a command. Beyond the contract: undecodable output is replaced; past the output limit the command has run
        to its end, and OutputLimitExceededError carries what came first; a command that is cancelled is killed, its whole
        tree. timeout_retry does not run it again: a request that is lost on the way finds its first run by its id.
        concurrency is not used either, since the commands run under the service, which paces their starts.
        """
        with told(f"{cmd[:1]}"):
            return await run(
                self.platform, self.sandbox, cmd, input=input, cwd=cwd, env=env, user=user, timeout=timeout
            )

    async def write_file(self, file: str, contents: str | bytes) -> None:
        data = contents.encode() if isinstance(contents, str) else contents
        with told(file):
            await self._refuse_if_marked(file, _UNWRITABLE)
            await self.sandbox.files.write(file, data)

    @overload
    async def read_file(self, file: str, text: Literal[True] = True) -> str: ...
    @overload
    async def read_file(self, file: str, text: Literal[False]) -> bytes: ...
    async def read_file(self, file: str, text: bool = True) -> str | bytes:
        limit = SandboxEnvironmentLimits.MAX_READ_FILE_SIZE
        pieces: list[bytes] = []
        with told(file):
            size = await self._refuse_if_marked(file, _UNREADABLE)
            if size <= limit:
                async for piece in self.sandbox.files.stream(file, length=limit + 1):
                    pieces.append(piece)
                size = sum(map(len, pieces))
        if size > limit:
            raise OutputLimitExceededError(SandboxEnvironmentLimits.MAX_READ_FILE_SIZE_STR, None)
        data = b"".join(pieces)
        return data.decode() if text else data

    async def _refuse_if_marked(self, file: str, bits: int) -> int:
        """The size of a file. PermissionError when its mode denies this to everybody: root is refused by nothing else, and
        the contract does not make a difference between users."""
        try:
            found = await self.sandbox.files.stat(file)
        except FileNotFoundError:
            if bits == _UNREADABLE:
                raise
            return 0
        if found.kind is dsec.FileKind.FILE and not found.mode & bits:
            raise PermissionError(
                13, f"{file}: its mode {found.mode:o} lets nobody {'read' if bits == _UNREADABLE else 'write'} it", file
            )
        return found.size

    async def connection(self, *, user: str | None = None) -> SandboxConnection:
        """The command line that opens a shell in it."""
        try:
            info = await self.sandbox.info()
        except DSecError as error:
            raise ConnectionError(f"sandbox {self.sandbox.id}: {error}") from error
        if info.state not in (State.RUNNING, State.PAUSED):
            raise ConnectionError(f"sandbox {self.sandbox.id} is {info.state.value}")
        words = ["dsec", "exec", "-it", self.sandbox.id, "--workdir", self.spec.workdir]
        words += ["--user", user] if user is not None else []
        return SandboxConnection(
            type="dsec", command=shlex.join([*words, "--", "bash", "-l"]), container=self.sandbox.id
        )

    def default_polling_interval(self) -> float:
        return 0.2

    # -- life --

    @classmethod
    def config_files(cls) -> list[str]:
        return _CONFIG_FILES

    @classmethod
    def config_deserialize(cls, config: dict[str, Any]) -> DSecSandboxConfig:
        return parse(config)

    @classmethod
    def default_concurrency(cls) -> int | None:
        """No limit of Inspect's: the platform admits what it has room for, and the rest waits (`create_timeout`)."""
        return None

    @classmethod
    async def task_init(cls, task_name: str, config: SandboxEnvironmentConfigType | None) -> None:
        """Fails before any sample when the configuration is wrong, a layer is missing or no service answers."""
        wanted = load(config).by_name()
        platform = await platforms.for_task()
        try:
            refs = {ref for spec in wanted.values() for ref in (spec.container_image, *spec.layers)}
            for ref in sorted(refs):
                await platform.client.layers.inspect(ref)
        except BaseException:
            await platforms.task_done(platform)
            await platforms.end(platform)
            raise

    @classmethod
    async def sample_init(
        cls, task_name: str, config: SandboxEnvironmentConfigType | None, metadata: dict[str, str]
    ) -> dict[str, SandboxEnvironment]:
        wanted = load(config).by_name()
        platform = await platforms.for_sample()
        labels = {
            **platform.labels,
            "inspect_task": task_name[:200],
            "inspect_sample": str(metadata.get("__sample_id__", ""))[:200],
        }
        making = {name: asyncio.create_task(_make(platform, spec, labels)) for name, spec in wanted.items()}
        try:
            await asyncio.gather(*making.values())
        except BaseException:
            platform.in_background(_undo(list(making.values())))
            await platforms.sample_done(platform)
            raise
        return {name: cls(platform, task.result(), wanted[name]) for name, task in making.items()}

    @classmethod
    async def sample_cleanup(
        cls,
        task_name: str,
        config: SandboxEnvironmentConfigType | None,
        environments: dict[str, SandboxEnvironment],
        interrupted: bool,
    ) -> None:
        ours = [one.as_type(cls) for one in environments.values()]
        await asyncio.gather(*(_stop(one.sandbox) for one in ours))
        if ours:
            await platforms.sample_done(ours[0].platform)

    @classmethod
    async def task_cleanup(cls, task_name: str, config: SandboxEnvironmentConfigType | None, cleanup: bool) -> None:
        """After the last task: ends what samples left, or says what was left on purpose."""
        platform = platforms.of_task()
        if platform is None or not await platforms.task_done(platform):
            return
        try:
            if cleanup:
                await platform.client.stop_many(labels=platform.labels)
            else:
                await _say_what_is_left(platform)
        except DSecError as error:
            log.warning("sandboxes may be left until their time to live ends: %s", error)
        finally:
            await platforms.end(platform)

    @classmethod
    async def cli_cleanup(cls, id: str | None) -> None:
        """`inspect sandbox cleanup dsec [ID]`."""
        async with DSecClient() as client:
            if id is None:
                print(f"stopped {await client.stop_many(labels=MADE_BY)} sandboxes")
            else:
                await (await client.attach(id)).stop()
                print(f"stopped {id}")


async def _make(platform: Platform, spec: DSecSandbox, labels: dict[str, str]) -> Sandbox:
    sandbox = await platform.client.run_container(spec.run_args(labels), timeout=spec.create_timeout)
    try:
        argv = ["/bin/sh", "-c", _MAKE_WORKDIR, "sh", spec.workdir, spec.init_user]
        (await sandbox.exec(argv, user="root", cwd="/", timeout=60)).check()
    except BaseException:
        platform.in_background(_stop(sandbox))
        raise
    return sandbox


async def _undo(making: list[asyncio.Task[Sandbox]]) -> None:
    for task in making:
        task.cancel()
    for made in await asyncio.gather(*making, return_exceptions=True):
        if isinstance(made, Sandbox):
            await _stop(made)


async def _stop(sandbox: Sandbox) -> None:
    """What is gone already is fine; what cannot be reached ends at the task's end or by its time to live."""
    try:
        await sandbox.stop()
    except (NotFound, SandboxUnavailable):
        return
    except DSecError as error:
        log.warning("sandbox %s could not be stopped: %s", sandbox.id, error)


async def _say_what_is_left(platform: Platform) -> None:
    states = (State.CREATING, State.RUNNING, State.PAUSED)
    left = [info.id async for info in platform.client.list(labels=platform.labels, states=states)]
    if left:
        print("\ndsec: these sandboxes were left running (inspect sandbox cleanup dsec ID ends one):")
        for id in left:
            print(f"  dsec exec -it {id} -- bash -l")
