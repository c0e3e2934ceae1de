"""Many sandboxes by one request, each as soon as it is ready."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from types import TracebackType
from typing import Self

import msgspec

from dsec.protocol.errors import ErrorBody
from dsec.protocol.specs import CreateOutcome, DSecContainerRunArgs

from .errors import ConnectionLost, DSecError, InvalidRequest, from_body
from .sandbox import Sandbox
from .transport import NDJSON, Transport, decode, encode, json_lines

_RETRY_S = 0.2


class Outcome:
    """What became of one sandbox of a burst."""

    def __init__(
        self, index: int, args: DSecContainerRunArgs, sandbox: Sandbox | None, error: DSecError | None
    ) -> None:
        self.index = index
        self.args = args
        self.error = error
        self._sandbox = sandbox
        self.claimed = False

    @property
    def sandbox(self) -> Sandbox:
        """The sandbox, claimed by reading this: it then outlives the burst. Raises `.error` when there is none."""
        if self._sandbox is None:
            assert self.error is not None
            raise self.error
        self.claimed = True
        return self._sandbox

    @property
    def ok(self) -> bool:
        return self.error is None

    def __repr__(self) -> str:
        return f"Outcome(index={self.index}, {self._sandbox or self.error!r})"


class Burst:
    """See `DSecClient.run_many`."""

    def __init__(
        self, transport: Transport, args: Sequence[DSecContainerRunArgs], count: int, timeout: float, job: str = ""
    ) -> None:
        if count < 1:
            raise InvalidRequest(f"count={count} is not 1 or more")
        self._transport = transport
        self._args = args
        self._count = count
        self._timeout = timeout
        self._job = {"job": job} if job else {}
        self._outcomes: dict[int, Outcome] = {}
        self._ready: asyncio.Queue[Outcome | DSecError | None] = asyncio.Queue()
        self._receiver: asyncio.Task[None] | None = None
        self._key, self._body = self._request()

    @property
    def total(self) -> int:
        """How many outcomes there will be."""
        return self._count * len(self._args)

    def _request(self) -> tuple[str, bytes]:
        """(the burst's key, the body). Each sandbox gets `<key>/<index>`, so the request is safe to repeat."""
        own = self._args[0].idempotency_key if len(self._args) == 1 else None
        key = own or f"bu-{secrets.token_hex(10)}"
        request: dict[str, object] = {"timeout": self._timeout, **self._job}
        if len(self._args) == 1 and self._count > 1:
            request |= {"args": msgspec.structs.replace(self._args[0], idempotency_key=key), "count": self._count}
        else:
            request["args"] = [self._keyed(index, key) for index in range(self.total)]
        return key, encode(request)

    def _missing(self) -> tuple[Sequence[int], bytes]:
        """(indices still without an outcome, the request for them). What came may have been used and ended since, and a key
        means the same sandbox only while that lives; so it is not asked for again."""
        missing = [index for index in range(self.total) if index not in self._outcomes]
        args = [self._keyed(index, self._key) for index in missing]
        return missing, encode({"timeout": self._timeout, "args": args, **self._job})

    def _keyed(self, index: int, key: str) -> DSecContainerRunArgs:
        args = self._args[index // self._count]
        if args.idempotency_key is None or len(self._args) == 1:
            return msgspec.structs.replace(args, idempotency_key=f"{key}/{index}")
        if self._count > 1:
            return msgspec.structs.replace(args, idempotency_key=f"{args.idempotency_key}/{index}")
        return args

    async def __aenter__(self) -> Self:
        self._receiver = asyncio.create_task(self._receive())
        return self

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Outcome:
        if self._receiver is None:
            raise InvalidRequest("a burst is used with `async with client.run_many(...) as burst`")
        outcome = await self._ready.get()
        if isinstance(outcome, Outcome):
            return outcome
        self._ready.put_nowait(outcome)  # the end is the end for everybody who iterates
        if outcome is None:
            raise StopAsyncIteration
        raise outcome

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        receiver, self._receiver = self._receiver, None
        if receiver is not None:
            receiver.cancel()
            await asyncio.gather(receiver, return_exceptions=True)
        await self._stop_unclaimed()

    async def _receive(self) -> None:
        try:
            async for outcome in self._outcomes_of_all_connections():
                self._ready.put_nowait(outcome)
            self._ready.put_nowait(None)
        except DSecError as error:
            self._ready.put_nowait(error)

    async def _outcomes_of_all_connections(self) -> AsyncIterator[Outcome]:
        """Outcomes as they come; a lost connection is made anew and what was seen already is skipped."""
        patience = self._transport.request_timeout + self._timeout  # a busy node may rightly be silent for `timeout`
        deadline = time.monotonic() + patience
        asked: Sequence[int] = range(self.total)
        body = self._body
        while len(self._outcomes) < self.total:
            if self._outcomes:
                asked, body = self._missing()
            try:
                async with self._transport.stream(
                    "POST", "/v1/sandboxes", body=body, wait=self._timeout, accept=NDJSON
                ) as response:
                    async for line in json_lines(response):
                        deadline = time.monotonic() + patience
                        outcome = self._outcome(decode(line, CreateOutcome), asked)
                        if outcome is not None:
                            yield outcome
                if len(self._outcomes) < self.total:
                    raise ConnectionLost("the burst ended early", retryable=True)
            except ConnectionLost:
                if not self._transport.reached or time.monotonic() > deadline:
                    raise
                await asyncio.sleep(_RETRY_S)

    def _outcome(self, line: CreateOutcome, asked: Sequence[int]) -> Outcome | None:
        index = asked[line.index]
        if index in self._outcomes:
            return None
        sandbox, error = None, None
        if line.created is not None:
            sandbox = Sandbox(self._transport, line.created.id, line.created.incarnation, owned=True)
        else:
            error = from_body(msgspec.convert(line.error, ErrorBody))
        outcome = Outcome(index, self._args[index // self._count], sandbox, error)
        self._outcomes[index] = outcome
        return outcome

    async def _stop_unclaimed(self) -> None:
        """Stops what nobody took: of what was received, each; of what was still to come, by the burst's key."""
        unclaimed = [o._sandbox for o in self._outcomes.values() if o._sandbox is not None and not o.claimed]
        if len(self._outcomes) < self.total:
            keep = [o._sandbox.id for o in self._outcomes.values() if o._sandbox is not None and o.claimed]
            body = encode({"burst": self._key, "keep": keep})
            with contextlib.suppress(ConnectionLost):  # their TTL ends them
                await self._transport.request("POST", "/v1/sandboxes/stop", body=body)
        else:
            await asyncio.gather(*(sandbox._end(None) for sandbox in unclaimed))
