"""Link over asyncio: requests, byte streams and events, multiplexed over one connection (docs/link.md).

The client side opens streams (`LinkClient`), the server side answers them (`LinkServer`, one `Call` each). A failure that
has a kind is a `Fault` on both sides; a lost connection is a `Fault` of kind `connection_lost` at every open stream.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Generic, NamedTuple, TypeVar, cast, overload

import msgspec

from . import msgpack
from .errors import ErrorBody, ErrorKind, Fault
from .frames import (
    CONNECTION_CREDIT,
    DATA_CHUNK,
    MAX_CHANNEL,
    MAX_PAYLOAD,
    STREAM_CREDIT,
    FrameReader,
    FrameType,
    PreambleReader,
    ProtocolError,
    pack_frame,
    pack_head,
    pack_preamble,
)

T = TypeVar("T")
CONNECT_TIMEOUT = 5.0
BACKLOG_RETRY = 0.005
MAX_FRAME = DATA_CHUNK - 1  # bytes in one frame of DATA

# As plain numbers: comparing members of an enumeration takes longer than all else that is done for a small frame.
_OPEN, _DATA, _END, _REPLY, _ERROR, _CREDIT, _CANCEL, _PING, _, _NOTE = map(int, FrameType)

_encoder = msgspec.msgpack.Encoder()
_decoders: dict[object, msgspec.msgpack.Decoder[object]] = {}
_U32 = 4


class _Open(msgspec.Struct):
    m: str
    p: msgspec.Raw


_open_decoder = msgspec.msgpack.Decoder(_Open)
_error_decoder = msgspec.msgpack.Decoder(ErrorBody)


def decode(payload: bytes | msgspec.Raw, kind: type[T]) -> T:
    """msgpack to a type; malformed or mistyped input is a `Fault` that names the field."""
    decoder = _decoders.get(kind)
    if decoder is None:
        decoder = _decoders[kind] = msgspec.msgpack.Decoder(kind)
    try:
        return decoder.decode(payload)  # type: ignore[return-value]
    except (msgspec.DecodeError, RecursionError) as error:
        raise Fault(ErrorKind.INVALID, f"malformed message: {error}") from error


def pack_record(value: object) -> bytes:
    """One record of a byte stream: u32 length, then msgpack."""
    payload = _encoder.encode(value)
    return len(payload).to_bytes(_U32, "little") + payload


MAX_RECORD = 1024 * 1024


class RecordReader(Generic[T]):
    """Cuts a byte stream into records of one type, however it was split. Fault invalid_request for one of more than `limit`
    bytes as soon as its length is there: what is kept of a stream is at most one record."""

    def __init__(self, kind: type[T], limit: int = MAX_RECORD) -> None:
        self._kind = kind
        self._limit = limit
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[T]:
        self._buffer += data
        position = 0
        while len(self._buffer) - position >= _U32:
            size = int.from_bytes(self._buffer[position : position + _U32], "little")
            if size > self._limit:
                raise Fault(ErrorKind.INVALID, f"malformed stream: a record of {size} bytes is over {self._limit}")
            end = position + _U32 + size
            if end > len(self._buffer):
                break
            yield decode(bytes(self._buffer[position + _U32 : end]), self._kind)
            position = end
        del self._buffer[:position]


class Data(NamedTuple):
    channel: int
    data: bytes


class Note(NamedTuple):
    payload: bytes

    def decode(self, kind: type[T]) -> T:
        return decode(self.payload, kind)


def _lost(message: str) -> Fault:
    return Fault(ErrorKind.CONNECTION_LOST, message, retryable=True, hint="the peer is gone; try again")


_CHANNELS = tuple(bytes((channel,)) for channel in range(MAX_CHANNEL + 1))
_JOINED = 64 * 1024  # less than this is cheaper copied together than handed over in pieces
_SOCKET_BUFFER = 1024 * 1024
_WRITE_HIGH, _WRITE_LOW = 512 * 1024, 256 * 1024  # bytes that wait in the transport
_CREDIT_STEP = STREAM_CREDIT // 32
APART_WINDOW = 128 * 1024  # bytes under way on one stream that is apart, and on all of them
_APART_ALL = CONNECTION_CREDIT // 2
_APART_FRAME = 64 * 1024 - 1
_MAX_NOTED = 16 << 20  # NOTE needs no credit, and the peer may be hostile


class _Flow:
    """One end of one stream: credit both ways and the queue of what arrived."""

    __slots__ = (
        "_unacked",
        "_wake",
        "apart",
        "connection",
        "ended",
        "failure",
        "id",
        "items",
        "noted",
        "peer_ended",
        "receive_credit",
        "send_credit",
    )

    def __init__(self, connection: _Connection, stream_id: int) -> None:
        self.connection = connection
        self.id = stream_id
        self.apart = (
            False  # the peer's readers and ours may stop for as long as they like, and must hold up nobody else
        )
        self.send_credit = STREAM_CREDIT
        self.receive_credit = STREAM_CREDIT
        self.peer_ended = False
        self._unacked = 0
        self.items: deque[Data | Note] = deque()
        self.noted = 0  # bytes of NOTE since nothing was queued
        self.ended = False  # no more items will come
        self.failure: Fault | None = None
        self._wake: asyncio.Future[None] | None = None

    def push(self, item: Data | Note) -> None:
        self.items.append(item)
        self.notify()

    def finish(self, failure: Fault | None = None) -> None:
        self.ended = True
        self.failure = self.failure or failure
        self.notify()

    def notify(self) -> None:
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)

    async def wait(self) -> None:
        """Until something changes on this stream (an item, its end, or credit)."""
        self._wake = self.connection.new_future()
        try:
            await self._wake
        finally:
            self._wake = None

    def consumed(self, data: Data) -> None:
        """Gives credit back for an item that left the queue."""
        size = 1 + len(data.data)
        if not self.apart:
            self.connection.give_back(size)
        self._unacked += size
        if self._unacked >= _CREDIT_STEP and not self.ended:
            self.connection.write(FrameType.CREDIT, self.id, self._unacked.to_bytes(_U32, "little"))
            self.receive_credit += self._unacked
            self._unacked = 0

    def drop(self) -> None:
        """Forgets what is queued; its bytes still give connection credit back."""
        while self.items:
            item = self.items.popleft()
            if isinstance(item, Data) and not self.apart:
                self.connection.give_back(1 + len(item.data))


class _Connection(asyncio.BufferedProtocol):
    """Frames on one transport; the two sides differ in who opens streams.

    shared: between callers that have nothing to do with each other. What arrives then counts against the credit of its stream
    alone, so that readers who have stopped hold up nobody else.
    """

    def __init__(self, *, shared: bool = False) -> None:
        self._shared = shared
        self.flows: dict[int, _Flow] = {}
        self.transport: asyncio.Transport | None = None
        self.closed: Fault | None = None
        self.send_credit = CONNECTION_CREDIT
        self._apart = 0  # bytes under way on streams that are apart
        self.receive_credit = CONNECTION_CREDIT
        self._unacked = 0
        self._reader = FrameReader()
        self._preamble: PreambleReader | None = PreambleReader()
        self._out: list[bytes | memoryview] = []
        self._out_size = 0
        self._flush_scheduled = False
        self._paused = False
        self._waiters: deque[asyncio.Future[None]] = deque()
        self._loop = asyncio.get_running_loop()

    def new_future(self) -> asyncio.Future[None]:
        return self._loop.create_future()

    # -- transport callbacks --

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's own class is none of asyncio's
        self.transport.set_write_buffer_limits(high=_WRITE_HIGH, low=_WRITE_LOW)
        sock = transport.get_extra_info("socket")
        if sock is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BUFFER)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._reader.room()

    def buffer_updated(self, size: int) -> None:
        try:
            if self._preamble is not None:
                self._greeted(bytes(self._reader.room()[:size]))
                return
            for kind, stream, payload in self._reader.filled(size):
                self.on_frame(kind, stream, payload)
        except ProtocolError as error:
            self.close(_lost(f"protocol error: {error}"))

    def _greeted(self, data: bytes) -> None:
        assert self._preamble is not None
        found = self._preamble.feed(data)
        while found is not None and not self.accept(*found):
            found = self._preamble.feed(b"")
        if found is None:
            return
        data, self._preamble = self._preamble.rest(), None
        for kind, stream, payload in self._reader.feed(data):
            self.on_frame(kind, stream, memoryview(payload))

    def connection_lost(self, error: Exception | None) -> None:
        self.close(_lost(str(error) if error else "connection closed by the peer"))

    def pause_writing(self) -> None:
        self._paused = True

    def resume_writing(self) -> None:
        self._paused = False
        self._wake_senders()

    # -- for subclasses --

    def accept(self, nonce: bytes, epoch: int) -> bool:
        raise NotImplementedError

    def on_open(self, stream: int, payload: bytes) -> None:
        raise ProtocolError("OPEN from the server side")

    def on_final(self, kind: int, stream: int, payload: bytes) -> None:
        raise ProtocolError("REPLY from the client side")

    def on_cancel(self, stream: int) -> None:
        raise ProtocolError("CANCEL from the server side")

    def on_note(self, flow: _Flow | None, payload: bytes) -> None:
        raise ProtocolError("NOTE from the client side")

    def on_end(self, flow: _Flow) -> None:
        flow.finish()

    def known(self, stream: int) -> bool:
        raise NotImplementedError

    # -- frames --

    def on_frame(self, kind: int, stream: int, view: memoryview) -> None:
        flow = self.flows.get(stream)
        if kind == _DATA:
            if flow is None and not self.known(stream):
                raise ProtocolError(f"DATA on unknown stream {stream}")
            self._on_data(flow, view)
            return
        payload = bytes(view)
        if kind == _OPEN:
            self.on_open(stream, payload)
            return
        if flow is None and stream != 0 and not self.known(stream):
            raise ProtocolError(f"frame of type {kind} on unknown stream {stream}")
        if kind in (_REPLY, _ERROR):
            self.on_final(kind, stream, payload)
        elif kind == _CREDIT:
            amount = int.from_bytes(payload, "little")
            if stream == 0:
                self.send_credit += amount
            elif flow is not None:
                flow.send_credit += amount
                if flow.apart:
                    self._apart -= amount
            self._wake_senders()
        elif kind == _NOTE:
            self.on_note(flow, payload)
        elif kind == _END:
            if flow is not None:
                if flow.peer_ended:
                    raise ProtocolError(f"END twice on stream {stream}")
                flow.peer_ended = True
                self.on_end(flow)
        elif kind == _CANCEL:
            self.on_cancel(stream)
        elif kind == _PING and not self._paused:  # one who does not read does not miss it
            self.write(FrameType.PONG, 0, payload)

    def _on_data(self, flow: _Flow | None, payload: memoryview) -> None:
        size = len(payload)
        self.receive_credit -= size
        if flow is not None:
            flow.receive_credit -= size
            if flow.peer_ended:
                raise ProtocolError(f"DATA after END on stream {flow.id}")
        if self.receive_credit < 0 or (flow is not None and flow.receive_credit < 0):
            raise ProtocolError("DATA beyond the credit")
        held = flow is not None and not flow.ended
        if held and flow is not None:
            flow.push(Data(payload[0], bytes(payload[1:])))
        if self._shared or not held or (flow is not None and flow.apart):
            self._returned(size)

    def write(self, kind: FrameType, stream: int, payload: bytes = b"") -> None:
        if self.closed is None:
            self.write_raw(pack_frame(kind, stream, payload))

    def write_raw(self, *parts: bytes | memoryview) -> None:
        """Queues bytes; everything of one turn of the loop leaves in one system call."""
        for part in parts:
            self._out.append(part)
            self._out_size += len(part)
        if not self._flush_scheduled:
            self._flush_scheduled = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._flush_scheduled = False
        if self._out and self.transport is not None and self.closed is None:
            if self._out_size < _JOINED:
                self.transport.write(b"".join(self._out))
            else:  # as they are, where the loop can
                self.transport.writelines(self._out)
        self._out, self._out_size = [], 0

    def give_back(self, size: int) -> None:
        """Bytes of DATA that left the queue of their stream."""
        if not self._shared:
            self._returned(size)

    def _returned(self, size: int) -> None:
        self._unacked += size
        if self._unacked >= CONNECTION_CREDIT // 4:
            self.write(FrameType.CREDIT, 0, self._unacked.to_bytes(_U32, "little"))
            self.receive_credit += self._unacked
            self._unacked = 0

    def _wake_senders(self) -> None:
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_result(None)

    async def send_data(self, flow: _Flow, data: bytes, channel: int) -> None:
        """DATA in frames of at most 256 KiB. The bytes are not copied: they must not change."""
        view = memoryview(data)
        most = _APART_FRAME if flow.apart else MAX_FRAME
        for start in range(0, len(view), most):
            await self.send_frame(flow, (view[start : start + most],), channel)

    def _may_send(self, flow: _Flow, size: int) -> bool:
        if flow.send_credit < size or self.send_credit < size:
            return False
        under_way = STREAM_CREDIT - flow.send_credit
        return not flow.apart or (under_way + size <= APART_WINDOW and self._apart + size <= _APART_ALL)

    def _gone(self, flow: _Flow | None) -> None:
        """What was under way on a stream that is over."""
        if flow is not None and flow.apart:
            self._apart -= STREAM_CREDIT - flow.send_credit

    async def send_frame(self, flow: _Flow, pieces: Sequence[memoryview], channel: int) -> None:
        """One frame of DATA, when stream, connection and transport have room."""
        size = 1 + sum(map(len, pieces))
        while self.closed is None and (self._paused or not self._may_send(flow, size)):
            if self.flows.get(flow.id) is not flow:
                raise _lost("the stream was closed by the peer")
            waiter = self._loop.create_future()
            self._waiters.append(waiter)
            await waiter
        if self.closed is not None:
            raise self.closed
        if self.flows.get(flow.id) is not flow:
            raise _lost("the stream was closed by the peer")
        flow.send_credit -= size
        self.send_credit -= size
        if flow.apart:
            self._apart += size
        self.write_raw(pack_head(FrameType.DATA, flow.id, size) + _CHANNELS[channel], *pieces)

    def close(self, why: Fault | None = None) -> None:
        if self.closed is not None:
            return
        self._flush()
        self.closed = why or _lost("connection closed")
        if self.transport is not None:
            self.transport.close()
        flows, self.flows = self.flows, {}
        for flow in flows.values():
            self.on_flow_lost(flow, self.closed)
        self._wake_senders()
        self.on_closed()

    def on_flow_lost(self, flow: _Flow, why: Fault) -> None:
        flow.finish(why)

    def on_closed(self) -> None:
        pass


class LinkStream:
    """A request of ours: what it sends back, what we send it, and its result."""

    def __init__(self, connection: _ClientConnection, flow: _Flow) -> None:
        self._connection = connection
        self._flow = flow
        self._result: bytes | None = None

    def _final(self, kind: int, payload: bytes) -> None:
        if kind == FrameType.REPLY:
            self._result = payload
            self._flow.finish()
        else:
            try:
                body = _error_decoder.decode(payload)
            except (msgspec.DecodeError, RecursionError) as error:
                body = ErrorBody(kind=ErrorKind.INTERNAL, message=f"unreadable error from the peer: {error}")
            self._flow.finish(Fault.from_body(body))

    @property
    def ended(self) -> bool:
        """Whether the result, or the failure, is there: nothing more will arrive."""
        return self._flow.ended

    @property
    def has_arrived(self) -> bool:
        """Whether there is something to take."""
        return bool(self._flow.items)

    def first_note(self) -> Note | None:
        """Takes the event that came before everything else, if one did."""
        items = self._flow.items
        if items and isinstance(first := items[0], Note):
            items.popleft()
            return first
        return None

    def take(self) -> list[Data | Note]:
        """What has arrived and was not yet read."""
        flow = self._flow
        if not flow.items:
            return []
        taken = list(flow.items)
        flow.items.clear()
        for item in taken:
            if isinstance(item, Data):
                flow.consumed(item)
        return taken

    async def change(self) -> None:
        """Until something arrives, the stream ends, or `wake` is called."""
        await self._flow.wait()

    def wake(self) -> None:
        self._flow.notify()

    async def send(self, data: bytes, channel: int = 0) -> None:
        await self._connection.send_data(self._flow, data, channel)

    async def send_frame(self, pieces: Sequence[memoryview], channel: int = 0) -> None:
        """Pieces of at most MAX_FRAME bytes in all, as one frame."""
        await self._connection.send_frame(self._flow, pieces, channel)

    async def end(self) -> None:
        """No more data from this side."""
        self._connection.write(FrameType.END, self._flow.id)

    async def receive(self) -> Data | Note | None:
        """The next of what arrives; None when no more will: the peer sent its END, or there is a result."""
        flow = self._flow
        while not flow.items:
            if flow.ended or flow.peer_ended:
                return None
            await flow.wait()
        item = flow.items.popleft()
        if isinstance(item, Data):
            flow.consumed(item)
        return item

    async def __aiter__(self) -> AsyncIterator[Data | Note]:
        """What arrives, until the result; a failure is raised by `result`."""
        flow = self._flow
        while True:
            while flow.items:
                item = flow.items.popleft()
                if isinstance(item, Data):
                    flow.consumed(item)
                yield item
            if flow.ended:
                return
            await flow.wait()

    @overload
    async def result(self) -> bytes: ...
    @overload
    async def result(self, kind: type[T]) -> T: ...
    async def result(self, kind: type[T] | None = None) -> T | bytes:
        """The reply, decoded when a type is given; what arrived before it and was not read is dropped."""
        flow = self._flow
        while not flow.ended:
            await flow.wait()
            if not flow.ended:
                flow_items = len(flow.items)
                for _ in range(flow_items):
                    item = flow.items.popleft()
                    if isinstance(item, Data):
                        flow.consumed(item)
        flow.drop()
        if flow.failure is not None:
            raise flow.failure
        assert self._result is not None
        return self._result if kind is None else decode(self._result, kind)

    def cancel(self, why: Fault | None = None) -> None:
        """We no longer listen, and who waits for the result gets `why`. Harmless when the result is there already."""
        if not self._flow.ended:
            self._connection.write(FrameType.CANCEL, self._flow.id)
            self._connection.forget(self._flow.id)
            self._flow.finish(why or Fault(ErrorKind.CONNECTION_LOST, "cancelled"))
        self._flow.drop()


def _is_map(payload: bytes) -> bool:
    return payload[0] & 0xF0 == 0x80 or payload[0] in (0xDE, 0xDF)


def _retrieved(future: asyncio.Future[int]) -> None:
    """A refusal that nobody waits for is told by the requests that fail with it."""
    if not future.cancelled():
        future.exception()


class _ClientConnection(_Connection):
    def __init__(self, epoch: int, *, shared: bool = False) -> None:
        super().__init__(shared=shared)
        self._nonce = secrets.token_bytes(16)
        self._epoch = epoch
        self._next = 1
        self.streams: dict[int, LinkStream] = {}
        self.ready: asyncio.Future[int] = self._loop.create_future()
        self.ready.add_done_callback(_retrieved)
        self.lost: asyncio.Future[Fault] = self._loop.create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.write_raw(pack_preamble(self._nonce, self._epoch))

    def accept(self, nonce: bytes, epoch: int) -> bool:
        if nonce != self._nonce:
            return False
        if not self.ready.done():
            self.ready.set_result(epoch)
        return True

    def known(self, stream: int) -> bool:
        return 0 < stream < self._next and stream % 2 == 1

    def on_final(self, kind: int, stream: int, payload: bytes) -> None:
        if kind == FrameType.ERROR and not _is_map(payload):
            raise ProtocolError("ERROR without a map")
        msgpack.check(payload)
        self._gone(self.flows.pop(stream, None))
        final = self.streams.pop(stream, None)
        if final is not None:
            final._final(kind, payload)
            self._wake_senders()

    def on_note(self, flow: _Flow | None, payload: bytes) -> None:
        msgpack.check(payload)
        if flow is not None:
            flow.noted = len(payload) + (flow.noted if flow.items else 0)
            if flow.noted > _MAX_NOTED:
                raise ProtocolError(f"more than {_MAX_NOTED} bytes of NOTE that nobody had time to read")
            flow.push(Note(payload))

    def on_end(self, flow: _Flow) -> None:
        flow.notify()  # the stream goes on until the reply

    def open(self, method: str, params: object, *, apart: bool = False) -> LinkStream:
        if self.closed is not None:
            raise self.closed
        try:
            payload = _bounded(_encoder.encode({"m": method, "p": params}), method)
        except (OverflowError, UnicodeEncodeError) as error:
            raise Fault(
                ErrorKind.INVALID, f"{method}: a value that no message can carry: {error}", hint="numbers have 64 bits"
            ) from error
        stream_id = self._next
        self._next += 2
        flow = _Flow(self, stream_id)
        flow.apart = apart
        self.flows[stream_id] = flow
        stream = self.streams[stream_id] = LinkStream(self, flow)
        self.write(FrameType.OPEN, stream_id, payload)
        return stream

    def forget(self, stream: int) -> None:
        """A stream that we cancelled: nothing comes on it any more, not even a result, and who still sends on it stops."""
        self._gone(self.flows.pop(stream, None))
        self.streams.pop(stream, None)
        self._wake_senders()

    def on_flow_lost(self, flow: _Flow, why: Fault) -> None:
        self.streams.pop(flow.id, None)
        super().on_flow_lost(flow, why)

    def on_closed(self) -> None:
        assert self.closed is not None
        if not self.ready.done():
            self.ready.set_exception(self.closed)
        if not self.lost.done():
            self.lost.set_result(self.closed)


def _bounded(payload: bytes, what: str) -> bytes:
    if len(payload) > MAX_PAYLOAD:
        raise Fault(
            ErrorKind.TOO_LARGE,
            f"{what}: a message of {len(payload)} bytes is over the link's {MAX_PAYLOAD}",
            hint="send large contents as a file or through stdin",
        )
    return payload


def _at_once(path: str) -> socket.socket | None:
    """A connected Unix socket; None while the listener's backlog is full."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        sock.connect(path)
    except BlockingIOError:
        sock.close()
        return None
    except BaseException:
        sock.close()
        raise
    return sock


async def _connected(path: str) -> socket.socket:
    while (sock := _at_once(path)) is None:
        await asyncio.sleep(BACKLOG_RETRY)
    return sock


async def _talking(sock: socket.socket, epoch: int, shared: bool) -> _ClientConnection:
    loop = asyncio.get_running_loop()
    _, connection = await loop.create_unix_connection(lambda: _ClientConnection(epoch, shared=shared), sock=sock)
    return connection


class LinkClient:
    """The connecting side. Cheap to call; safe for any number of concurrent streams."""

    def __init__(self, connection: _ClientConnection) -> None:
        self._connection = connection

    @classmethod
    async def connect_unix(
        cls, path: str | os.PathLike[str], epoch: int = 0, *, greet: bool = True, shared: bool = False
    ) -> LinkClient:
        """Connects and exchanges preambles; Fault connection_lost when nobody answers within 5 s.

        Without `greet` the first requests travel behind our preamble, and a refusal shows at them. shared: by callers that must
        not hold each other up; what they do not read may then take a stream's credit of memory each.
        """
        try:
            sock = _at_once(os.fspath(path))
            if sock is not None and not greet:  # nothing to wait for, so no clock is set
                return cls(await _talking(sock, epoch, shared))
            async with asyncio.timeout(CONNECT_TIMEOUT):
                connection = await _talking(sock or await _connected(os.fspath(path)), epoch, shared)
                try:
                    if greet:
                        await connection.ready
                except BaseException:
                    connection.close()
                    raise
        except (OSError, TimeoutError) as error:
            raise _lost(f"cannot reach {os.fspath(path)}: {error or 'no answer'}") from error
        return cls(connection)

    @property
    def closed(self) -> bool:
        return self._connection.closed is not None

    @property
    def lost(self) -> asyncio.Future[Fault]:
        """Done when the connection is gone, with the reason."""
        return self._connection.lost

    async def open(self, method: str, params: object, *, apart: bool = False) -> LinkStream:
        """A request. apart: its ends may stop reading for as long as they like, and nothing else of the connection waits for
        them: what arrives counts against the stream's credit alone, what is sent is a small part of the connection's."""
        return self._connection.open(method, params, apart=apart)

    @overload
    async def call(self, method: str, params: object) -> bytes: ...
    @overload
    async def call(self, method: str, params: object, kind: type[T]) -> T: ...
    async def call(self, method: str, params: object, kind: type[T] | None = None) -> T | bytes:
        """One request, one reply; Fault on failure. A cancelled caller cancels the stream."""
        stream = self._connection.open(method, params)
        try:
            return await (stream.result() if kind is None else stream.result(kind))
        except asyncio.CancelledError:
            stream.cancel()
            raise

    async def close(self) -> None:
        self._connection.close()


class Call:
    """A request of the peer, in the hands of a handler."""

    def __init__(self, connection: _ServerConnection, flow: _Flow, method: str, params: msgspec.Raw) -> None:
        self._connection = connection
        self._flow = flow
        self.method = method
        self.raw = params

    def params(self, kind: type[T]) -> T:
        return decode(self.raw, kind)

    async def send(self, data: bytes, channel: int = 0) -> None:
        """Stream bytes to the caller, as its credit allows; raises when the caller is gone."""
        await self._connection.send_data(self._flow, data, channel)

    def note(self, event: object) -> None:
        self._connection.write(FrameType.NOTE, self._flow.id, _encoder.encode(event))

    def note_raw(self, payload: bytes) -> None:
        self._connection.write(FrameType.NOTE, self._flow.id, payload)

    def end(self) -> None:
        """No more data from this side, while the caller may still send; the reply is still to come."""
        self._connection.write(FrameType.END, self._flow.id)

    async def data(self) -> AsyncIterator[bytes]:
        """Bytes from the caller until its END; raises Fault connection_lost when it went away before."""
        flow = self._flow
        while True:
            while flow.items:
                item = flow.items.popleft()
                if isinstance(item, Data):
                    flow.consumed(item)
                    yield item.data
            if flow.failure is not None:
                raise flow.failure
            if flow.ended:
                return
            await flow.wait()


Handler = Callable[[Call], Awaitable[object]]
RAW_REPLY = msgspec.Raw


class _ServerConnection(_Connection):
    def __init__(self, server: LinkServer) -> None:
        super().__init__(shared=server.shared)
        self._server = server
        self._last = 0
        self._tasks: dict[int, asyncio.Task[None]] = {}
        server.connections.add(self)

    def accept(self, nonce: bytes, epoch: int) -> bool:
        self.write_raw(pack_preamble(nonce, self._server.epoch))
        return True

    def known(self, stream: int) -> bool:
        return 0 < stream <= self._last and stream % 2 == 1

    def on_open(self, stream: int, payload: bytes) -> None:
        if stream <= self._last or stream % 2 == 0:
            raise ProtocolError(f"stream id {stream} after {self._last}")
        self._last = stream
        try:
            # Clients are the platform's own: the decoder's bounds are enough, and handlers decode params to a type.
            message = _open_decoder.decode(payload)
        except (msgspec.DecodeError, RecursionError) as error:
            raise ProtocolError(f"malformed OPEN: {error}") from error
        if not _is_map(bytes(message.p)):
            raise ProtocolError("params are not a map")
        flow = self.flows[stream] = _Flow(self, stream)
        call = Call(self, flow, message.m, message.p)
        task = self._loop.create_task(self._serve(call, flow))
        self._tasks[stream] = task

    async def _serve(self, call: Call, flow: _Flow) -> None:
        try:
            payload = await self._server.handle(call)
            kind = FrameType.REPLY
        except Fault as fault:
            kind, payload = FrameType.ERROR, _encoder.encode(fault.body)
        except asyncio.CancelledError:
            return
        except Exception as error:  # noqa: BLE001 - the outermost loop of a request: the peer gets an answer, the log the cause
            self._server.on_error(call.method, error)
            defect = Fault(ErrorKind.INTERNAL, f"{call.method}: {type(error).__name__}: {error}"[:4096])
            kind, payload = FrameType.ERROR, _encoder.encode(defect.body)
        finally:
            self._tasks.pop(flow.id, None)
        if self.flows.pop(flow.id, None) is not None:
            flow.ended = True
            flow.drop()
            self.write(kind, flow.id, payload)

    def on_cancel(self, stream: int) -> None:
        flow = self.flows.pop(stream, None)
        if flow is not None:
            self.on_flow_lost(flow, Fault(ErrorKind.CONNECTION_LOST, "cancelled by the caller"))
            flow.drop()
            self._wake_senders()

    def on_flow_lost(self, flow: _Flow, why: Fault) -> None:
        flow.finish(why)
        task = self._tasks.pop(flow.id, None)
        if task is not None:
            task.cancel()

    def on_closed(self) -> None:
        self._server.connections.discard(self)


class LinkServer:
    """The answering side: a table of methods. Handlers return the reply (anything msgspec encodes, or msgspec.Raw)."""

    def __init__(
        self,
        handlers: Mapping[str, Handler],
        *,
        epoch: int = 0,
        shared: bool = False,
        on_error: Callable[[str, Exception], None] = lambda method, error: None,
    ) -> None:
        self._handlers = handlers
        self.epoch = epoch
        self.shared = shared
        self.on_error = on_error
        self.connections: set[_ServerConnection] = set()
        self._server: asyncio.Server | None = None

    async def listen_unix(self, path: str | os.PathLike[str]) -> None:
        """Binds path with mode 0600; a stale socket file there is replaced."""
        loop = asyncio.get_running_loop()
        before = os.umask(0o177)
        try:
            self._server = await loop.create_unix_server(lambda: _ServerConnection(self), os.fspath(path), backlog=1024)
        finally:
            os.umask(before)

    async def handle(self, call: Call) -> bytes:
        handler = self._handlers.get(call.method)
        if handler is None:
            raise Fault(ErrorKind.UNSUPPORTED, f"no method {call.method[:64]!r} here")
        result = await handler(call)
        payload = bytes(result) if isinstance(result, msgspec.Raw) else _encoder.encode(result)
        return _bounded(payload, call.method)

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for connection in list(self.connections):
            connection.close()
