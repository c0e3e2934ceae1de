"""What passes between a step and its caller: written down as it comes, and sent again from the log."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import msgspec
from blake3 import blake3

from dsec.protocol.errors import ErrorKind, Fault
from dsec.protocol.link import Call
from dsec.protocol.requests import divergence
from dsec.protocol.rollouts import Blob, StepRecord
from dsec.rollout.trajectory import Output, Trajectory

from .kinds import KEPT

_CHANNELS = {0: "data", 1: "stdout", 2: "stderr"}
_CHUNK = 256 * 1024
_encode = msgspec.msgpack.Encoder().encode


class Tape(Call):
    """Stands in the caller's place: what is sent to it are the step's outputs, what it takes from the caller its inputs."""

    def __init__(
        self,
        method: str,
        params: Mapping[str, object],
        trajectory: Trajectory,
        *,
        caller: Call | None = None,
        listener: Call | None = None,
    ) -> None:
        """caller: whose bytes an upload takes; without one nothing ever comes. listener: who is sent what comes."""
        self.method = method
        self.raw = msgspec.Raw(_encode(params))
        self.outputs: dict[str, Output] = {}
        self.inputs: dict[str, Output] = {}
        self.broken = False
        """The caller went away in the middle of what it had to send."""
        self._trajectory = trajectory
        self._caller = caller
        self._listener = listener

    async def send(self, data: bytes, channel: int = 0) -> None:
        name = _CHANNELS[channel]
        output = self.outputs.get(name)
        if output is None:
            output = self.outputs[name] = self._trajectory.output(KEPT.get(self.method))
        output.write(data)
        if self._listener is not None:
            try:
                await self._listener.send(data, channel)
            except Fault:  # it is gone; the step goes on
                self._listener = None

    def note(self, event: object) -> None:
        if self._listener is not None:
            self._listener.note(event)

    def note_raw(self, payload: bytes) -> None:
        if self._listener is not None:
            self._listener.note_raw(payload)

    def end(self) -> None:
        """Nothing: the end of what is sent is the step's."""

    async def data(self) -> AsyncIterator[bytes]:
        if self._caller is None:
            await asyncio.get_running_loop().create_future()  # until cancelled: an end would be one of the stdin
            return
        taken = self.inputs["data"] = self._trajectory.output()
        try:
            async for chunk in self._caller.data():
                taken.write(chunk)
                yield chunk
        except Fault:
            self.broken = True
            raise

    def take(self, name: str, data: bytes) -> None:
        """An input that came with the request itself."""
        self.inputs[name] = self._trajectory.output()
        self.inputs[name].write(data)

    def discard(self) -> None:
        """What is not recorded is not kept."""
        for one in (*self.outputs.values(), *self.inputs.values()):
            one.discard()


async def play(call: Call, trajectory: Trajectory, record: StepRecord, cursor: int) -> None:
    """Sends a caller what the step gave, from a place on: what it gave as data, else all of stdout and then all of stderr."""
    if record.kind == "fs.read" and (data := record.outputs.get("data")) is not None:
        call.note({"size": data.total})
    skip = cursor
    for channel, name in _CHANNELS.items():
        if (blob := record.outputs.get(name)) is None:
            continue
        if name == "data" and blob.size < blob.total:
            raise _not_kept(trajectory, record, blob)
        await _send(call, trajectory, blob, channel, skip)
        skip = max(0, skip - blob.size)


async def _send(call: Call, trajectory: Trajectory, blob: Blob, channel: int, skip: int) -> None:
    if blob.data is None:
        await send_content(call, trajectory, blob.digest, channel, skip)
    elif skip < len(blob.data):
        await call.send(blob.data[skip:], channel)


async def send_content(
    call: Call, trajectory: Trajectory, digest: str, channel: int = 0, skip: int = 0, *, announce: bool = False
) -> int:
    """A content from `skip` on, a piece at a time, and its size. announce: says that first.

    Fault, before anything is sent, when it is not there or not what was written.
    """
    path = trajectory.blob_path(digest)
    if await asyncio.to_thread(_digest_of, path) != digest:
        await asyncio.to_thread(trajectory.blob, digest)  # it says what is wrong, and which step it belongs to
    with path.open("rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        if announce:
            call.note({"size": size})
        file.seek(skip)
        while chunk := file.read(_CHUNK):
            await call.send(chunk, channel)
    return size


def _digest_of(path: Path) -> str:
    digest = blake3()
    with path.open("rb", buffering=0) as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


async def same_upload(call: Call, record: StepRecord, rollout: str, keep: int) -> None:
    """Takes what the caller has to send, which is not needed; Fault replay_divergence when it is not what was sent then."""
    digest, total = blake3(), 0
    async for chunk in call.data():
        digest.update(memoryview(chunk)[: max(0, keep - total)])
        total += len(chunk)
    sent = record.inputs.get("data")
    if sent is not None and (sent.total, sent.digest) != (total, digest.hexdigest()):
        recorded, asked = (
            msgspec.json.encode({"data": {"blake3": one, "size": size}})
            for one, size in ((sent.digest, sent.total), (digest.hexdigest(), total))
        )
        raise divergence(record.step, rollout, recorded, asked)


def _not_kept(trajectory: Trajectory, record: StepRecord, blob: Blob) -> Fault:
    return Fault(
        ErrorKind.TOO_LARGE,
        f"step {record.step} of rollout {trajectory.id} gave {blob.total} bytes, of which {blob.size} are kept: "
        "it cannot be replayed",
        hint="read large files in parts, or outside of the rollout where nothing depends on them",
        limit=blob.size,
        value=blob.total,
        step=record.step,
    )
