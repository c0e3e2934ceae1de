"""Two ends of the Python link against each other, and against peers that break the rules."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from dsec.protocol.errors import ErrorKind, Fault
from dsec.protocol.frames import (
    CONNECTION_CREDIT,
    MAGIC,
    MAX_PAYLOAD,
    STREAM_CREDIT,
    FrameReader,
    FrameType,
    ProtocolError,
    pack_frame,
    pack_preamble,
)
from dsec.protocol.link import Call, Data, LinkClient, LinkServer, Note, RecordReader, pack_record


class Echo(msgspec.Struct):
    text: str = ""
    size: int = 0


async def echo(call: Call) -> object:
    return {"text": call.params(Echo).text}


async def fail(call: Call) -> object:
    raise Fault(ErrorKind.CAPACITY, "full", hint="wait", limit="max_sandboxes", value=100)


async def crash(call: Call) -> object:
    raise ZeroDivisionError("boom")


async def pour(call: Call) -> object:
    size = call.params(Echo).size
    for _ in range(size // 100_000):
        await call.send(b"x" * 100_000, channel=1)
    call.note({"text": "done"})
    return {"size": size}


async def drink(call: Call) -> object:
    return {"size": sum([len(chunk) async for chunk in call.data()])}


async def half(call: Call) -> object:
    """Ends its own direction first and goes on listening."""
    await call.send(b"all I say")
    call.end()
    return {"size": sum([len(chunk) async for chunk in call.data()])}


async def hang(call: Call) -> object:
    await asyncio.Event().wait()
    return None


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Path]:
    handlers = {"echo": echo, "fail": fail, "crash": crash, "pour": pour, "drink": drink, "half": half, "hang": hang}
    link = LinkServer(handlers, epoch=7)
    path = tmp_path / "s"
    await link.listen_unix(path)
    yield path
    await link.close()


async def test_call_and_errors(server: Path) -> None:
    client = await LinkClient.connect_unix(server)
    assert (await client.call("echo", {"text": "hé"}, Echo)).text == "hé"
    with pytest.raises(Fault) as caught:
        await client.call("fail", {})
    assert caught.value.body.kind is ErrorKind.CAPACITY and caught.value.body.details["value"] == 100
    with pytest.raises(Fault, match="ZeroDivisionError"):
        await client.call("crash", {})
    with pytest.raises(Fault, match="no method"):
        await client.call("nothing", {})
    with pytest.raises(Fault) as caught:
        await client.call("echo", {"text": 5})
    assert caught.value.body.kind is ErrorKind.INVALID
    with pytest.raises(Fault) as caught:
        await client.call("echo", {"text": "x" * (MAX_PAYLOAD + 1)})
    assert caught.value.body.kind is ErrorKind.TOO_LARGE
    assert (await client.call("echo", {"text": "still here"}, Echo)).text == "still here"
    await client.close()


async def test_streams_far_beyond_credit_both_ways(server: Path) -> None:
    client = await LinkClient.connect_unix(server)
    stream = await client.open("pour", {"size": 20_000_000})
    got, notes = 0, []
    async for item in stream:
        if isinstance(item, Data):
            assert item.channel == 1
            got += len(item.data)
        elif isinstance(item, Note):
            notes.append(item.decode(Echo).text)
    assert got == 20_000_000 and notes == ["done"]
    up = await client.open("drink", {})
    for _ in range(100):
        await up.send(b"y" * 100_000)
    await up.end()
    assert (await up.result(Echo)).size == 10_000_000
    unread = await client.open("pour", {"size": 20_000_000})
    assert (await unread.result(Echo)).size == 20_000_000, "result() drops what nobody reads"
    await client.close()


async def test_a_slow_reader_holds_the_sender_not_the_memory(server: Path) -> None:
    client = await LinkClient.connect_unix(server)
    slow = await client.open("pour", {"size": 50_000_000})
    assert (await client.call("echo", {"text": "others go on"}, Echo)).text == "others go on"
    assert sum(len(i.data) for i in slow._flow.items if isinstance(i, Data)) <= STREAM_CREDIT
    slow.cancel()
    assert (await client.call("echo", {"text": "after"}, Echo)).text == "after"
    await client.close()


async def test_readers_that_stopped_hold_up_nobody_on_a_shared_connection(server: Path) -> None:
    client = await LinkClient.connect_unix(server, shared=True)
    stopped = [await client.open("pour", {"size": 5_000_000}) for _ in range(2 * CONNECTION_CREDIT // STREAM_CREDIT)]
    async with asyncio.timeout(20):
        while any(len(stream._flow.items) < 10 for stream in stopped):
            await client.call("echo", {"text": "let them come"})
        going = await client.open("pour", {"size": 5_000_000})
        assert sum([len(item.data) async for item in going if isinstance(item, Data)]) == 5_000_000
        for stream in stopped:  # and nothing of theirs is lost
            assert sum([len(item.data) async for item in stream if isinstance(item, Data)]) == 5_000_000
    await client.close()


async def test_lost_connection_ends_every_stream(server: Path) -> None:
    client = await LinkClient.connect_unix(server)
    stream = await client.open("hang", {})
    await client.close()
    with pytest.raises(Fault) as caught:
        await stream.result()
    assert caught.value.body.kind is ErrorKind.CONNECTION_LOST and caught.value.body.retryable
    with pytest.raises(Fault):
        await client.call("echo", {"text": ""})
    with pytest.raises(Fault):
        await LinkClient.connect_unix(server.parent / "nobody")


NONCE = b"n" * 16
BAD = {
    "too long": (MAX_PAYLOAD + 6).to_bytes(4, "little") + b"\x02" + bytes(4),
    "too short": (4).to_bytes(4, "little") + b"\x02" + bytes(4),
    "unknown type": pack_frame(99, 1, b""),  # type: ignore[arg-type]
    "even stream": pack_frame(FrameType.OPEN, 2, msgspec.msgpack.encode({"m": "echo", "p": {}})),
    "malformed open": pack_frame(FrameType.OPEN, 1, b"\xc1"),
    "data on unknown stream": pack_frame(FrameType.DATA, 9, b"\0x"),
    "reply from a client": pack_frame(FrameType.REPLY, 1, b"\xc0"),
    "deep nesting": pack_frame(FrameType.OPEN, 1, b"\x91" * 5000 + b"\xc0"),
}


@pytest.mark.parametrize("name", BAD)
async def test_protocol_errors_close_only_that_connection(server: Path, name: str) -> None:
    reader, writer = await asyncio.open_unix_connection(server)
    writer.write(b"garbage from a dead stream" + pack_preamble(NONCE, 1) + BAD[name])
    answer = await reader.read()  # until closed
    assert answer[:8] == MAGIC and answer[8:24] == NONCE
    assert int.from_bytes(answer[24:32], "little") == 7
    writer.close()
    client = await LinkClient.connect_unix(server)
    assert (await client.call("echo", {"text": "alive"}, Echo)).text == "alive"
    await client.close()


def test_frame_reader_survives_any_split_and_random_bytes() -> None:
    import random

    rng = random.Random(1)
    frames = [(FrameType.DATA, 1 + 2 * i, b"\0" + os.urandom(rng.randrange(300))) for i in range(50)]
    wire = b"".join(pack_frame(*f) for f in frames)
    reader, got, position = FrameReader(), [], 0
    while position < len(wire):
        step = rng.randrange(1, 40)
        got += reader.feed(wire[position : position + step])
        position += step
    assert got == frames


async def test_a_cancelled_stream_is_forgotten(server: Path) -> None:
    client = await LinkClient.connect_unix(server)
    for _ in range(50):
        (await client.open("hang", {})).cancel()
    assert (await client.call("echo", {"text": "a"}, Echo)).text == "a"
    assert not client._connection.streams and not client._connection.flows
    await client.close()


async def test_a_cancelled_stream_releases_who_sends_on_it(server: Path) -> None:
    client = await LinkClient.connect_unix(server)
    stream = await client.open("hang", {})
    sending = asyncio.create_task(stream.send(b"x" * (8 << 20)))  # more than its credit
    await asyncio.sleep(0)
    stream.cancel()
    with pytest.raises(Fault):
        await asyncio.wait_for(sending, 5)
    await client.close()


async def test_a_number_that_no_message_carries_is_refused(server: Path) -> None:
    client = await LinkClient.connect_unix(server)
    with pytest.raises(Fault) as caught:
        await client.call("echo", {"size": 10**30})
    assert caught.value.body.kind is ErrorKind.INVALID
    assert (await client.call("echo", {"text": "a"}, Echo)).text == "a"
    await client.close()


async def test_a_stream_read_as_it_comes(server: Path) -> None:
    link = await LinkClient.connect_unix(server)
    stream = await link.open("pour", {"size": 1_000_000})
    size, notes = 0, 0
    async with asyncio.timeout(10):
        while True:
            for item in stream.take():
                if isinstance(item, Data):
                    size += len(item.data)
                else:
                    notes += 1
            if stream.ended:
                break
            await stream.change()
    assert (size, notes) == (1_000_000, 1) and stream.take() == []
    assert (await stream.result(Echo)).size == 1_000_000
    hanging = await link.open("hang", {})
    asyncio.get_running_loop().call_soon(hanging.wake)
    await hanging.change()
    assert not hanging.ended
    asyncio.get_running_loop().call_soon(hanging.cancel, Fault(ErrorKind.TIMEOUT, "long enough"))
    with pytest.raises(Fault, match="long enough"):
        await hanging.result()
    await link.close()


async def test_a_server_cannot_fill_the_memory_with_notes(tmp_path: Path) -> None:
    async def flood(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        preamble = await reader.readexactly(32)
        writer.write(preamble)
        await reader.readexactly(9)  # of the OPEN
        note = pack_frame(FrameType.NOTE, 1, msgspec.msgpack.encode("x" * 60_000))
        sent = 0
        try:
            while sent < 64 << 20:
                writer.write(note)
                await writer.drain()
                sent += len(note)
        except ConnectionError:
            pass
        finally:
            writer.close()

    hostile = await asyncio.start_unix_server(flood, tmp_path / "s")
    client = await LinkClient.connect_unix(tmp_path / "s")
    stream = await client.open("hang", {})
    while not stream.ended:
        await stream.change()
    notes = stream.take()
    assert 0 < sum(len(item.payload) for item in notes if isinstance(item, Note)) <= 16 << 20
    with pytest.raises(Fault, match="NOTE"):
        await stream.result()
    await client.close()
    hostile.close()
    await hostile.wait_closed()


async def test_each_direction_of_a_stream_ends_on_its_own(server: Path) -> None:
    client = await LinkClient.connect_unix(server)
    stream = await client.open("half", {})
    assert await stream.receive() == Data(0, b"all I say")
    assert await stream.receive() is None and not stream.ended
    await stream.send(b"x" * 1_000_000)
    await stream.end()
    assert (await stream.result(Echo)).size == 1_000_000
    assert await stream.receive() is None and stream.ended
    await client.close()


@pytest.mark.parametrize(
    "error", [Fault(ErrorKind.NOT_FOUND, "no \udcff", hint="\udcff", name="\udcff"), OSError(2, "no", "\udcff")]
)
async def test_an_error_about_an_undecodable_name_is_told(tmp_path: Path, error: Exception) -> None:
    """Such a text cannot be encoded as it is; the request would never be answered."""

    async def fails(call: Call) -> object:
        raise error

    server = LinkServer({"fails": fails}, on_error=lambda method, error: None)
    await server.listen_unix(tmp_path / "s")
    client = await LinkClient.connect_unix(tmp_path / "s")
    with pytest.raises(Fault, match=r"\\udcff") as told:
        async with asyncio.timeout(5):
            await client.call("fails", {})
    assert told.value.body.kind in (ErrorKind.NOT_FOUND, ErrorKind.INTERNAL)
    await client.close()
    await server.close()


def test_a_record_is_bounded_by_its_length_alone() -> None:
    """A peer that announces gigabytes is not waited for with a growing buffer."""
    reader = RecordReader(dict, 1000)
    assert list(reader.feed(pack_record({"a": 1}) + (999).to_bytes(4, "little"))) == [{"a": 1}]
    with pytest.raises(Fault, match="1001 bytes is over 1000"):
        list(RecordReader(dict, 1000).feed((1001).to_bytes(4, "little")))
    with pytest.raises(Fault):
        list(RecordReader(dict).feed(b"\xff" * 4))


def test_an_impossible_length_is_known_before_the_rest_of_its_head() -> None:
    for cut in range(1, 5):
        reader = FrameReader()
        begun = pack_frame(FrameType.PING, 0, b"x") + bytes(cut)
        with pytest.raises(ProtocolError):
            for byte in begun + bytes(4 - cut):
                reader.feed(bytes([byte]))


async def test_streams_apart_hold_up_nobody_else(server: Path) -> None:
    """Forty readers who stopped, on both sides: what else the connection carries goes on."""
    client = await LinkClient.connect_unix(server)
    poured = [await client.open("pour", {"size": 10_000_000}, apart=True) for _ in range(40)]
    stuck = [await client.open("hang", {}, apart=True) for _ in range(40)]
    sending = [asyncio.create_task(stream.send(b"x" * 10_000_000)) for stream in stuck]
    async with asyncio.timeout(20):
        drunk = await client.open("drink", {})
        await drunk.send(b"x" * 5_000_000)
        await drunk.end()
        assert (await drunk.result(Echo)).size == 5_000_000
        again = await client.open("pour", {"size": 5_000_000})
        assert sum([len(item.data) async for item in again if isinstance(item, Data)]) == 5_000_000
    assert not any(task.done() for task in sending)
    for stream in (*poured, *stuck):
        stream.cancel()
    await asyncio.gather(*sending, return_exceptions=True)
    last = await client.open("drink", {}, apart=True)
    await last.send(b"x" * 9_000_000)
    await last.end()
    assert (await last.result(Echo)).size == 9_000_000, "what the others had under way is free again"
    await client.close()
