"""What is recorded: finding rollouts, reading and comparing their steps, taking them elsewhere, removing them (report, 6)."""

from __future__ import annotations

import asyncio
import os
import secrets
from collections import deque
from collections.abc import AsyncIterator, Iterable, Iterator
from pathlib import Path

import msgspec

from dsec.protocol.compare import Comparison, compare
from dsec.protocol.export import exported
from dsec.protocol.rollouts import Blob, RolloutInfo, RolloutState, StepRecord

from .errors import InvalidRequest
from .files import LocalPath
from .replay import Replay
from .transport import NDJSON, Transport, decode, json_lines

_WRITTEN = 1024 * 1024  # bytes of lines that are written at once


class Exported(msgspec.Struct, frozen=True):
    """steps and bytes written."""

    steps: int
    bytes: int


class Rollouts:
    """`client.rollouts`: the trajectory logs of this installation."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    async def list(
        self, *, job: str | None = None, name: str | None = None, states: Iterable[RolloutState | str] | None = None
    ) -> AsyncIterator[RolloutInfo]:
        """Rollouts of a job ("": of none; None: all), of a name, in any of `states`. Oldest first."""
        pairs = [("job", job)] if job is not None else []
        pairs += [("name", name)] if name is not None else []
        pairs += [("state", _state(state)) for state in states or ()]
        async with self._transport.stream("GET", "/v1/rollouts", query=pairs, accept=NDJSON, again=True) as response:
            async for line in json_lines(response):
                if not line.startswith(b'{"end":'):
                    yield decode(line, RolloutInfo)

    async def get(self, rollout_id: str) -> RolloutInfo:
        """One of them by its id. NotFound when there is none."""
        return await self._transport.call("GET", f"/v1/rollouts/{_quoted(rollout_id)}", RolloutInfo)

    async def steps(self, rollout_id: str, *, start: int = 0, stop: int | None = None) -> AsyncIterator[StepRecord]:
        """Recorded steps in order, from `start` to before `stop`. Contents of more than some KiB are not in them: `content`."""
        if start < 0:
            raise InvalidRequest(f"start={start} is no number of a step")
        info = await self.get(rollout_id)
        end = info.steps if stop is None else min(stop, info.steps)
        replay = Replay(self._transport, info.id, end, start=start)
        try:
            for number in range(start, end):
                yield await replay.take(number)
        finally:
            replay.close()

    async def content(self, rollout_id: str, blob: Blob) -> bytes:
        """What is kept of a content of a step (`record.outputs["stdout"]`, say). NotFound when it is missing in the log."""
        return await Replay(self._transport, _quoted(rollout_id), 0).content(blob)

    async def export(self, rollout_id: str, path: LocalPath) -> Exported:
        """Writes all of it as JSON lines, contents included (`docs/trajectory.md`). The file appears when it is whole."""
        target = Path(os.fsdecode(path))
        part = target.with_name(f".{target.name}.{secrets.token_hex(4)}.part")
        info = await self.get(rollout_id)
        try:
            with part.open("xb") as file:
                size = 0
                async for lines in self._exported(info):
                    size += await asyncio.to_thread(file.write, lines)
            part.replace(target)
        finally:
            part.unlink(missing_ok=True)
        return Exported(info.steps, size)

    async def _exported(self, info: RolloutInfo) -> AsyncIterator[bytes]:
        """Lines, some at a time. What the writer of lines is given next lies here before it is asked for the line."""
        records: deque[StepRecord] = deque()
        contents: dict[str, bytes] = {}

        def given() -> Iterator[StepRecord]:
            while records:
                yield records.popleft()

        lines = exported(info, given(), lambda blob: contents[blob.digest])
        held = [next(lines)]
        async for record in self.steps(info.id, stop=info.steps):
            for blob in (*record.outputs.values(), *record.inputs.values()):
                if blob.data is None and blob.size:
                    contents[blob.digest] = await self.content(info.id, blob)
            records.append(record)
            held.append(next(lines))
            contents.clear()
            if sum(map(len, held)) > _WRITTEN:
                yield b"".join(held)
                held.clear()
        yield b"".join([*held, *lines])

    async def diff(self, a: str, b: str) -> Comparison:
        """How two rollouts differ, step by step and field by field; what differs between any two runs is left out."""
        left = [record async for record in self.steps(a)]
        right = [record async for record in self.steps(b)]
        return compare(left, right)

    async def remove(self, rollout_id: str) -> None:
        """Its log and contents, for good. Conflict while it is open and its sandbox lives."""
        await self._transport.request("DELETE", f"/v1/rollouts/{_quoted(rollout_id)}")


def _state(state: RolloutState | str) -> str:
    try:
        return RolloutState(state).value
    except ValueError:
        names = ", ".join(known.value for known in RolloutState)
        raise InvalidRequest(f"{state!r} is no state of a rollout", hint=f"states are {names}") from None


def _quoted(rollout_id: str) -> str:
    """Ids come from people, too, and are part of a path."""
    if not rollout_id or not all(part.isascii() and (part.isalnum() or part == "-") for part in rollout_id):
        raise InvalidRequest(f"{rollout_id[:64]!r} is no rollout's id", hint="`dsec rollout ls` lists them")
    return rollout_id
