"""Jobs: the sandboxes of one run, that live and are paused together (report, 6)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Self
from urllib.parse import quote

import msgspec

from dsec.protocol.rollouts import JobInfo, JobLimits, JobState, JobUsage, JobWork
from dsec.protocol.specs import DSecContainerRunArgs, SandboxInfo, State

from .bursts import Burst
from .creation import Opening
from .errors import Conflict, DSecError, InvalidRequest, NotFound
from .rollout import RolloutOpening, opening
from .transport import Transport, encode

if TYPE_CHECKING:
    from .client import DSecClient

RENEWALS = 3  # in each lease, so that a lost one does no harm
_WAIT_S = 25
_log = logging.getLogger("dsec.jobs")


class JobList(msgspec.Struct):
    """What `GET /v1/jobs` answers."""

    jobs: list[JobInfo]


class Job:
    """`async with client.job("grpo-17") as job:` - opens the job of that name, or joins it when it is there already.

    Within the block its lease is renewed in the background, whatever dies in between. At the end of the block only that
    stops: the job goes on until the lease ends, then it is paused, and only times to live end its sandboxes; who opens it
    again goes on with it. `stop()` ends it. Several programs may hold one job; the last one counts.
    """

    def __init__(
        self, client: DSecClient, transport: Transport, name: str, lease: float, limits: JobLimits,
        labels: Mapping[str, str] | None, create: Callable[[DSecContainerRunArgs, float, str], Opening],
    ) -> None:  # fmt: skip
        self.name = name
        self.id = ""  # known once it is open
        self._client = client
        self._transport = transport
        self._lease = lease
        self._limits = limits
        self._labels = labels
        self._create = create
        self._path = f"/v1/jobs/{quote(name, safe='')}"
        self._renewing: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return f"Job({self.name!r})"

    # -- lease --

    async def __aenter__(self) -> Self:
        asked = {"name": self.name, "lease": self._lease, "limits": self._limits, "labels": self._labels}
        info = await self._transport.call("POST", "/v1/jobs", JobInfo, body=encode(asked))
        self.id = info.id
        self._renewing = asyncio.create_task(self._renew())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        renewing, self._renewing = self._renewing, None
        if renewing is not None:
            renewing.cancel()
            with suppress(asyncio.CancelledError):
                await renewing

    async def _renew(self) -> None:
        """Until the block ends, or the job does. A service that is away is asked again until it is there."""
        body = encode({"lease": self._lease, "id": self.id})
        while True:
            await asyncio.sleep(self._lease / RENEWALS)
            try:
                await self._transport.call("POST", f"{self._path}/renew", JobInfo, body=body)
            except (Conflict, NotFound) as over:
                _log.info("%r is over: %s", self, over)
                return
            except DSecError as error:
                _log.warning("the lease of %r was not renewed: %s", self, error)

    # -- sandboxes --

    def run(self, args: DSecContainerRunArgs, *, timeout: float = 120) -> Opening:
        """A sandbox in this job, of the backend that the type of `args` names. See `run_container`."""
        if not isinstance(args, DSecContainerRunArgs):
            raise InvalidRequest(f"{type(args).__name__} is no DSec...RunArgs", hint="pass DSecContainerRunArgs(...)")
        return self.run_container(args, timeout=timeout)

    def run_container(self, args: DSecContainerRunArgs, *, timeout: float = 120) -> Opening:
        """As `client.run_container`, in this job. CapacityError names a limit of the job too; a stopped job is a Conflict.

        A paused job runs again by it (the sandboxes that it has stay paused until they are used).
        """
        return self._create(args, timeout, self.name)

    def run_many(
        self, args: DSecContainerRunArgs | Iterable[DSecContainerRunArgs], *, count: int = 1, timeout: float = 120
    ) -> Burst:
        """As `client.run_many`, in this job. What is over its limits fails, each with its own CapacityError."""
        items = [args] if isinstance(args, DSecContainerRunArgs) else list(args)
        return Burst(self._transport, items, count, timeout, self.name)

    def rollout(
        self, name: str, args: DSecContainerRunArgs, *, timeout: float = 120, restart: bool = False
    ) -> RolloutOpening:
        """As `client.rollout`, in this job: its sandbox is one of the job's, and its name one among the job's rollouts.

        The job need not be held (`async with`) here, only open: a worker drives rollouts of a job that its trainer holds.
        """
        return opening(self._transport, self.name, name, args, timeout=timeout, restart=restart)

    async def sandboxes(
        self, *, states: Iterable[State | str] | None = None, usage: bool = False
    ) -> AsyncIterator[SandboxInfo]:
        """Its sandboxes, as `client.list` gives them."""
        async for info in self._client.list(states=states, job=self.name, usage=usage):
            yield info

    # -- all of it --

    async def info(self) -> JobInfo:
        """State, lease, limits, and what was last seen of its usage."""
        return await self._transport.call("GET", self._path, JobInfo)

    async def usage(self) -> JobUsage:
        """What its sandboxes use now, and what all of them have used since it began."""
        return await self._transport.call("GET", f"{self._path}/usage", JobUsage)

    async def pause(self) -> None:
        """Pauses all its sandboxes, those that are just being made too; idempotent. See `sandbox.pause`.

        It stays paused, whoever renews its lease, until `resume`, a new sandbox in it, or somebody who opens it again.
        """
        await self._all("POST", f"{self._path}/pause")

    async def resume(self) -> None:
        """Resumes all its sandboxes, some at a time; idempotent. Nobody needs to ask: each resumes when it is used."""
        await self._all("POST", f"{self._path}/resume")

    async def stop(self) -> None:
        """Ends it: every sandbox with the reason `job_end`, also those that are just being made; idempotent.

        Its name then begins a new job when it is opened again.
        """
        await self._all("DELETE", self._path)

    async def _all(self, method: str, path: str) -> JobInfo:
        """Asks, and asks again as long as it is under way."""
        kind = ""
        while True:
            info = await self._transport.call(method, path, JobInfo, query={"wait_s": str(_WAIT_S)}, wait=_WAIT_S)
            if info.under_way is JobWork.NONE or (kind and info.under_way is not kind):
                return info
            kind = info.under_way


def limits_of(max_sandboxes: int | None, cpu_cores: float | None, memory_mb: int | None) -> JobLimits:
    """InvalidRequest for what is no limit."""
    for name, value in (("max_sandboxes", max_sandboxes), ("cpu_cores", cpu_cores), ("memory_mb", memory_mb)):
        if value is not None and not 0 <= value <= 1e9:
            raise InvalidRequest(f"{name}={value} is negative or no number")
    return JobLimits(max_sandboxes=max_sandboxes, cpu_cores=cpu_cores, memory_mb=memory_mb)


def chosen(infos: Iterable[JobInfo], states: Iterable[JobState | str] | None) -> list[JobInfo]:
    """Those in any of the states; all of them when None are given."""
    if states is None:
        return list(infos)
    try:
        wanted = {JobState(state) for state in states}
    except ValueError as error:
        names = ", ".join(state.value for state in JobState)
        raise InvalidRequest(f"{error} of a job", hint=f"states are {names}") from None
    return [info for info in infos if info.state in wanted]
