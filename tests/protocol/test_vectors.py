"""The Python side of the link against the vectors that the Rust side is tested with too."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import TypedDict

import pytest

from dsec.protocol import frames, msgpack
from dsec.protocol.frames import FrameReader, FrameType, PreambleReader, ProtocolError, pack_frame, pack_preamble
from dsec.protocol.link import Call, LinkServer, _ClientConnection, _Connection, _ServerConnection

VECTORS = json.loads((Path(__file__).parents[1] / "vectors" / "link.json").read_text())
Long = list[tuple[str, int]]


class Sequence(TypedDict):
    name: str
    to: str
    error: bool
    opened: list[int]
    frames: list[Long]


def expand(pieces: Long) -> bytes:
    return b"".join(bytes.fromhex(piece) * times for piece, times in pieces)


def by_name(section: str) -> list[object]:
    return [pytest.param(vector, id=vector["name"]) for vector in VECTORS[section]]


def test_constants_agree() -> None:
    for name in (
        "MAX_PAYLOAD",
        "STREAM_CREDIT",
        "CONNECTION_CREDIT",
        "MAX_NOTE",
        "MAX_PING",
        "MAX_DEPTH",
        "MAX_ELEMENTS",
    ):
        assert getattr(frames, name) == VECTORS["constants"][name], name


@pytest.mark.parametrize("vector", by_name("preambles"))
def test_preambles(vector: dict[str, str]) -> None:
    nonce, epoch = bytes.fromhex(vector["nonce"]), int(vector["epoch"])
    assert pack_preamble(nonce, epoch).hex() == vector["bytes"]
    assert PreambleReader().feed(bytes.fromhex(vector["bytes"])) == (nonce, epoch)


@pytest.mark.parametrize("step", [1, 7, 4096])
@pytest.mark.parametrize("vector", by_name("resync"))
def test_resync(vector: dict[str, str], step: int) -> None:
    reader, data = PreambleReader(), bytes.fromhex(vector["input"])
    found = None
    for start in range(0, len(data), step):
        found = reader.feed(data[start : start + step])
        if found is not None:
            break
    assert found == (bytes.fromhex(vector["nonce"]), int(vector["epoch"]))
    assert reader.rest() + data[start + step :] == bytes.fromhex(vector["rest"])


def test_frames_one_by_one_and_joined() -> None:
    reader, wire, wanted = FrameReader(), b"", []
    for vector in VECTORS["frames"]:
        frame = (vector["type"], vector["stream"], bytes.fromhex(vector["payload"]))
        assert pack_frame(FrameType(frame[0]), frame[1], frame[2]).hex() == vector["bytes"]
        assert FrameReader().feed(bytes.fromhex(vector["bytes"])) == [frame]
        wanted.append(frame)
        wire += bytes.fromhex(vector["bytes"])
    got = [frame for byte in wire for frame in reader.feed(bytes([byte]))]
    assert got == wanted


@pytest.mark.parametrize("vector", by_name("msgpack"))
def test_msgpack(vector: dict[str, object]) -> None:
    payload = expand(vector["bytes"])  # type: ignore[arg-type]
    if vector["ok"]:
        msgpack.check(payload)
        msgpack._walk(payload)
    else:
        with pytest.raises(ProtocolError):
            msgpack.check(payload)


class Wire(asyncio.Transport):
    """A transport that goes nowhere."""

    def write(self, data: object) -> None:
        pass

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    def close(self) -> None:
        pass


async def hold(call: Call) -> object:
    await asyncio.Event().wait()
    return None


def connection(to: str, opened: list[int]) -> _Connection:
    """A connection whose preamble is through, with the streams `opened` by a client."""
    end: _Connection
    if to == "server":
        end = _ServerConnection(LinkServer({"hold": hold}))
    else:
        end = _ClientConnection(0)
        for stream in opened:
            end._next = stream
            end.open("hold", {})
        end.ready.add_done_callback(lambda future: future.exception())
    end.connection_made(Wire())
    end._preamble = None
    return end


def receive(end: _Connection, data: bytes) -> None:
    """As an event loop hands bytes over: at most as many at a time as there is room."""
    while data and end.closed is None:
        room = end.get_buffer(-1)
        size = min(len(room), len(data))
        room[:size] = data[:size]
        end.buffer_updated(size)
        data = data[size:]


@pytest.mark.parametrize("to", ["server", "client"])
@pytest.mark.parametrize("vector", by_name("malformed"))
async def test_malformed(vector: dict[str, object], to: str) -> None:
    end = connection(to, [1])
    receive(end, expand(vector["bytes"]))  # type: ignore[arg-type]
    assert end.closed is not None and "protocol error" in end.closed.body.message


@pytest.mark.parametrize("vector", by_name("sequences"))
async def test_sequences(vector: Sequence) -> None:
    end = connection(vector["to"], vector.get("opened", []))
    for frame in vector["frames"]:
        assert end.closed is None, "closed too early"
        receive(end, expand(frame))
    assert (end.closed is not None) == vector["error"]
    end.close()
