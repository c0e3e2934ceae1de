"""A burst: many creations over several edges, one stream of outcomes in order of completion."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

import msgspec

from dsec.placement.choice import Placement
from dsec.protocol.errors import ErrorBody, ErrorKind, Fault
from dsec.protocol.link import LinkStream, Note
from dsec.protocol.specs import CreateOutcome

from .bodies import ContainerArgs
from .exchange import encode, error_body
from .fleet import Fleet

_SLICE = 256 * 1024  # bytes of encoded arguments in one request; a link message takes 1 MiB


class Burst:
    """Cuts the list into requests, one or more an edge, and merges what they answer."""

    def __init__(
        self,
        fleet: Fleet,
        placement: Placement,
        request_id: str,
        args: Sequence[ContainerArgs],
        count: int,
        timeout: float,
        job: str = "",
    ) -> None:
        self._fleet = fleet
        self._placement = placement
        self._request_id = request_id
        self._args = args
        self._count = count
        self._timeout = timeout
        self._job = job
        self._ready: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._streams: list[LinkStream] = []
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self, home: str = "") -> None:
        """Places the whole burst and sends it to the edges; Fault when there is no edge at all. home: all of it goes there."""
        total = self._count * len(self._args)
        shares = {home: total} if home else self._placement.spread(await self._fleet.views(), total)
        first = 0
        for edge, share in shares.items():
            for start, args, count in self._slices(first, share):
                params = {"request_id": self._request_id, "args": args, "count": count, "timeout": self._timeout,
                          "job": self._job}  # fmt: skip
                stream = await self._fleet.link(edge).open("sandbox.create_many", params)
                self._streams.append(stream)
                indices = range(start, start + len(args) * count)
                self._tasks.append(asyncio.create_task(self._follow(edge, stream, indices)))
            first += share

    def _slices(self, first: int, share: int) -> list[tuple[int, list[ContainerArgs], int]]:
        """(first index, args, count of each) for the indices [first, first + share), each slice within a link message."""
        if len(self._args) == 1 and self._args[0].idempotency_key is None:
            return [(first, list(self._args), share)]
        slices: list[tuple[int, list[ContainerArgs], int]] = []
        size, batch, start = 0, list[ContainerArgs](), first
        for index in range(first, first + share):
            args = self._args[index // self._count]
            if self._count > 1:
                args = keyed(args, index)
            length = len(msgspec.msgpack.encode(args))
            if batch and size + length > _SLICE:
                slices.append((start, batch, 1))
                size, batch, start = 0, [], index
            batch.append(args)
            size += length
        if batch:
            slices.append((start, batch, 1))
        return slices

    async def _follow(self, edge: str, stream: LinkStream, indices: range) -> None:
        """Passes outcomes on with the burst's own numbering; what an edge never answered becomes an error of its own."""
        open_indices = set(indices)
        try:
            async for item in stream:
                if isinstance(item, Note):
                    outcome = item.decode(CreateOutcome)
                    index = indices[outcome.index]
                    open_indices.discard(index)
                    self._ready.put_nowait(encode(msgspec.structs.replace(outcome, index=index)) + b"\n")
            await stream.result()
            lost = ErrorBody(kind=ErrorKind.INTERNAL, message=f"edge {edge} did not say what became of this sandbox")
        except Fault as fault:
            lost = fault.body
        for index in sorted(open_indices):
            self._ready.put_nowait(self._failed(index, lost))
        self._ready.put_nowait(None)

    def _failed(self, index: int, body: ErrorBody) -> bytes:
        error = msgspec.to_builtins(error_body(body, self._request_id))
        return encode(CreateOutcome(index, error=error)) + b"\n"

    async def lines(self) -> AsyncIterator[bytes]:
        running = len(self._tasks)
        while running:
            line = await self._ready.get()
            if line is None:
                running -= 1
                continue
            batch = [line]
            while not self._ready.empty():
                more = self._ready.get_nowait()
                if more is None:
                    running -= 1
                else:
                    batch.append(more)
            yield b"".join(batch)

    def cancel(self) -> None:
        """What is not yet created will not be. Harmless at the end."""
        for stream in self._streams:
            stream.cancel()
        for task in self._tasks:
            task.cancel()


def keyed(args: ContainerArgs, index: int) -> ContainerArgs:
    """One idempotency key stands for a whole burst; each of its sandboxes needs its own."""
    if args.idempotency_key is None:
        return args
    return msgspec.structs.replace(args, idempotency_key=f"{args.idempotency_key}/{index}")
