//! Link, the server's side of it: preamble, frames, and the rules of streams and credit (docs/link.md).
//!
//! Nothing here does input or output: bytes come in as slices and go out into a `Vec`, so that the shared vectors
//! (`tests/vectors/link.json`) and random bytes can drive all of it.

use crate::msgpack::Value;
use std::collections::BTreeMap;

pub const MAX_PAYLOAD: usize = 1 << 20;
pub const STREAM_CREDIT: u32 = 1 << 20;
pub const CONNECTION_CREDIT: u32 = 1 << 24;
/// Senders cut DATA into frames whose payload is no longer than this: a channel, and whole pages of bytes.
pub const DATA_CHUNK: usize = (1 << 18) + 1;
pub const MAX_NOTE: usize = 1 << 16;
pub const MAX_PING: usize = 64;
/// A reader of preambles gives up after so many bytes that belong to none.
pub const MAX_DROPPED: usize = 1 << 20;

pub const MAGIC: [u8; 8] = *b"\xd5ECLK\x01\r\n";
pub const PREAMBLE: usize = 32;
const LENGTH: usize = 4;
pub const HEADER: usize = LENGTH + 5;

/// The peer broke the protocol: what it did. The connection is closed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ProtocolError(pub &'static str);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Preamble {
    pub nonce: [u8; 16],
    pub epoch: u64,
}

impl Preamble {
    pub fn bytes(&self) -> [u8; PREAMBLE] {
        let mut bytes = [0; PREAMBLE];
        bytes[..8].copy_from_slice(&MAGIC);
        bytes[8..24].copy_from_slice(&self.nonce);
        bytes[24..].copy_from_slice(&self.epoch.to_le_bytes());
        bytes
    }

    /// Looks for a preamble in `bytes`: how many bytes are of no more use, and the preamble if it is whole.
    pub fn find(bytes: &[u8]) -> (usize, Option<Preamble>) {
        let start = (0..bytes.len()).find(|at| {
            let rest = &bytes[*at..];
            MAGIC.starts_with(&rest[..rest.len().min(MAGIC.len())])
        });
        let Some(start) = start else { return (bytes.len(), None) };
        let Some(whole) = bytes.get(start..start + PREAMBLE) else { return (start, None) };
        let (mut nonce, mut epoch) = ([0; 16], [0; 8]);
        nonce.copy_from_slice(&whole[8..24]);
        epoch.copy_from_slice(&whole[24..]);
        (start + PREAMBLE, Some(Preamble { nonce, epoch: u64::from_le_bytes(epoch) }))
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Kind {
    Open = 1,
    Data,
    End,
    Reply,
    Error,
    Credit,
    Cancel,
    Ping,
    Pong,
    Note,
}

impl Kind {
    fn of(code: u8) -> Option<Kind> {
        use Kind::*;
        [Open, Data, End, Reply, Error, Credit, Cancel, Ping, Pong, Note]
            .get(usize::from(code).wrapping_sub(1))
            .copied()
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Frame<'a> {
    pub kind: Kind,
    pub stream: u32,
    pub payload: &'a [u8],
}

fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    bytes.get(at..at + 4)?.try_into().ok().map(u32::from_le_bytes)
}

impl<'a> Frame<'a> {
    /// The first frame of `bytes` and its size; None when more bytes are needed.
    pub fn parse(bytes: &'a [u8]) -> Result<Option<(Frame<'a>, usize)>, ProtocolError> {
        let Some(length) = u32_at(bytes, 0) else { return Ok(None) };
        let length = length as usize;
        if !(HEADER - LENGTH..=HEADER - LENGTH + MAX_PAYLOAD).contains(&length) {
            return Err(ProtocolError("frame length out of bounds"));
        }
        let Some(code) = bytes.get(LENGTH) else { return Ok(None) };
        let kind = Kind::of(*code).ok_or(ProtocolError("unknown frame type"))?;
        let (Some(payload), Some(stream)) = (bytes.get(HEADER..LENGTH + length), u32_at(bytes, 5)) else {
            return Ok(None);
        };
        let frame = Frame { kind, stream, payload };
        frame.check()?;
        Ok(Some((frame, LENGTH + length)))
    }

    /// How many bytes the frame at the start of `bytes` has in all, once its length is there. Not checked.
    pub fn size(bytes: &[u8]) -> Option<usize> {
        u32_at(bytes, 0).map(|length| LENGTH + (length as usize).min(HEADER - LENGTH + MAX_PAYLOAD))
    }

    /// What can be wrong with a frame by itself, whoever sent it.
    fn check(&self) -> Result<(), ProtocolError> {
        let of_connection = match self.kind {
            Kind::Ping | Kind::Pong => self.stream == 0,
            Kind::Credit | Kind::Note => true,
            Kind::Open => self.stream % 2 == 1,
            _ => self.stream != 0,
        };
        let value = || Value::check(self.payload);
        let shape = match self.kind {
            Kind::Open => value().is_some_and(|v| open_parts(v).is_some()),
            Kind::Data => matches!(self.payload.first(), Some(0..=2)),
            Kind::End | Kind::Cancel => self.payload.is_empty(),
            Kind::Reply => value().is_some(),
            Kind::Error => value().is_some_and(Value::is_map),
            Kind::Credit => self.payload.len() == 4,
            Kind::Ping | Kind::Pong => self.payload.len() <= MAX_PING,
            Kind::Note => self.payload.len() <= MAX_NOTE && value().is_some(),
        };
        match (of_connection, shape) {
            (false, _) => Err(ProtocolError("frame on a stream it cannot be on")),
            (_, false) => Err(ProtocolError("malformed payload")),
            _ => Ok(()),
        }
    }

    pub fn put(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(&((HEADER - LENGTH + self.payload.len()) as u32).to_le_bytes());
        out.push(self.kind as u8);
        out.extend_from_slice(&self.stream.to_le_bytes());
        out.extend_from_slice(self.payload);
    }
}

fn open_parts(value: Value<'_>) -> Option<(&str, Value<'_>)> {
    Some((value.get("m")?.str()?, value.get("p").filter(|p| p.is_map())?))
}

/// What an accepted frame means to the server.
pub enum Event<'a> {
    Open {
        stream: u32,
        method: &'a str,
        params: Value<'a>,
    },
    /// The bytes stay charged against the client's credit until `Ledger::consumed`.
    Data {
        stream: u32,
        bytes: &'a [u8],
    },
    End {
        stream: u32,
    },
    Cancel {
        stream: u32,
    },
    Ping {
        bytes: &'a [u8],
    },
    Nothing,
}

/// Credit of one stream, both ways.
struct Flow {
    send: u64,
    held: u32,
    unreturned: u32,
    ended: bool,
}

/// The server's book of one connection: which streams are open, and who may still send how much.
pub struct Ledger {
    highest: u32,
    send: u64,
    held: u32,
    unreturned: u32,
    flows: BTreeMap<u32, Flow>,
}

impl Ledger {
    pub fn new() -> Ledger {
        Ledger { highest: 0, send: CONNECTION_CREDIT.into(), held: 0, unreturned: 0, flows: BTreeMap::new() }
    }

    /// Books a frame from the client. `out` takes the credit that goes back at once.
    pub fn admit<'a>(&mut self, frame: Frame<'a>, out: &mut Vec<u8>) -> Result<Event<'a>, ProtocolError> {
        let stream = frame.stream;
        match frame.kind {
            Kind::Ping => return Ok(Event::Ping { bytes: frame.payload }),
            Kind::Pong => return Ok(Event::Nothing),
            Kind::Open => return self.open(frame),
            Kind::Reply | Kind::Error | Kind::Note => return Err(ProtocolError("frame that only a server sends")),
            Kind::Credit if stream == 0 => {
                self.send = self.send.saturating_add(u32_at(frame.payload, 0).unwrap_or(0).into());
                return Ok(Event::Nothing);
            }
            _ if stream > self.highest || stream.is_multiple_of(2) => {
                return Err(ProtocolError("stream was never opened"))
            }
            Kind::Data => return self.data(frame, out),
            Kind::Credit | Kind::End | Kind::Cancel => {}
        }
        let Some(flow) = self.flows.get_mut(&stream) else { return Ok(Event::Nothing) };
        match frame.kind {
            Kind::Credit => flow.send = flow.send.saturating_add(u32_at(frame.payload, 0).unwrap_or(0).into()),
            Kind::End if flow.ended => return Err(ProtocolError("END twice")),
            Kind::End => {
                flow.ended = true;
                return Ok(Event::End { stream });
            }
            _ => {
                self.close(stream, out);
                return Ok(Event::Cancel { stream });
            }
        }
        Ok(Event::Nothing)
    }

    fn open<'a>(&mut self, frame: Frame<'a>) -> Result<Event<'a>, ProtocolError> {
        if frame.stream <= self.highest {
            return Err(ProtocolError("stream ids must grow"));
        }
        let parts = Value::check(frame.payload).and_then(open_parts);
        let (method, params) = parts.ok_or(ProtocolError("malformed payload"))?;
        self.highest = frame.stream;
        self.flows.insert(frame.stream, Flow { send: STREAM_CREDIT.into(), held: 0, unreturned: 0, ended: false });
        Ok(Event::Open { stream: frame.stream, method, params })
    }

    fn data<'a>(&mut self, frame: Frame<'a>, out: &mut Vec<u8>) -> Result<Event<'a>, ProtocolError> {
        let size = frame.payload.len() as u32;
        self.held += size; // both far below 2^32: payloads are bounded and the sum was checked before
        if self.held > CONNECTION_CREDIT {
            return Err(ProtocolError("more than the connection's credit"));
        }
        let Some(flow) = self.flows.get_mut(&frame.stream) else {
            self.give_back(size, out);
            return Ok(Event::Nothing);
        };
        flow.held += size;
        if flow.ended {
            return Err(ProtocolError("DATA after END"));
        }
        if flow.held > STREAM_CREDIT {
            return Err(ProtocolError("more than the stream's credit"));
        }
        let (_, bytes) = frame.payload.split_first().ok_or(ProtocolError("malformed payload"))?;
        Ok(Event::Data { stream: frame.stream, bytes })
    }

    /// The server is done with `size` bytes of payload (channel byte included) of a stream.
    pub fn consumed(&mut self, stream: u32, size: u32, out: &mut Vec<u8>) {
        self.consumed_by(stream, size, STREAM_CREDIT / 4, out);
    }

    /// The same for a sender that keeps less under way than it might: credit goes back in smaller steps.
    pub fn consumed_by(&mut self, stream: u32, size: u32, step: u32, out: &mut Vec<u8>) {
        let Some(flow) = self.flows.get_mut(&stream) else { return };
        let size = size.min(flow.held - flow.unreturned);
        flow.unreturned += size;
        if flow.unreturned >= step {
            put_credit(stream, flow.unreturned, out);
            flow.held -= flow.unreturned;
            flow.unreturned = 0;
        }
        self.give_back(size, out);
    }

    fn give_back(&mut self, size: u32, out: &mut Vec<u8>) {
        self.unreturned += size;
        if self.unreturned >= CONNECTION_CREDIT / 4 {
            put_credit(0, self.unreturned, out);
            self.held -= self.unreturned;
            self.unreturned = 0;
        }
    }

    /// The stream is over: what it held goes back to the connection, late frames are ignored.
    pub fn close(&mut self, stream: u32, out: &mut Vec<u8>) {
        if let Some(flow) = self.flows.remove(&stream) {
            self.give_back(flow.held - flow.unreturned, out);
        }
    }

    /// How many bytes of DATA payload may be sent on a stream now.
    pub fn room(&self, stream: u32) -> usize {
        let flow = self.flows.get(&stream).map_or(0, |flow| flow.send);
        flow.min(self.send).min(DATA_CHUNK as u64) as usize
    }

    /// How many bytes of DATA payload of a stream the client has not said to have read.
    pub fn under_way(&self, stream: u32) -> u64 {
        self.flows.get(&stream).map_or(0, |flow| u64::from(STREAM_CREDIT).saturating_sub(flow.send))
    }

    fn spend(&mut self, stream: u32, size: usize) {
        self.send = self.send.saturating_sub(size as u64);
        if let Some(flow) = self.flows.get_mut(&stream) {
            flow.send = flow.send.saturating_sub(size as u64);
        }
    }

    /// Puts one DATA frame of at most `most` bytes, filled in place by `fill` and charged to the stream.
    /// Nothing is sent when there is no credit or `fill` has nothing.
    pub fn put_data(
        &mut self,
        stream: u32,
        channel: u8,
        out: &mut Vec<u8>,
        most: usize,
        fill: impl FnOnce(&mut [u8]) -> usize,
    ) -> usize {
        let room = self.room(stream).saturating_sub(1).min(most);
        if room == 0 {
            return 0;
        }
        let start = out.len();
        out.resize(start + HEADER + 1 + room, 0);
        let filled = fill(&mut out[start + HEADER + 1..]).min(room);
        if filled == 0 {
            out.truncate(start);
            return 0;
        }
        out.truncate(start + HEADER + 1 + filled);
        let head = &mut out[start..];
        head[..4].copy_from_slice(&((HEADER - LENGTH + 1 + filled) as u32).to_le_bytes());
        head[4] = Kind::Data as u8;
        head[5..9].copy_from_slice(&stream.to_le_bytes());
        head[9] = channel;
        self.spend(stream, 1 + filled);
        filled
    }
}

fn put_credit(stream: u32, size: u32, out: &mut Vec<u8>) {
    Frame { kind: Kind::Credit, stream, payload: &size.to_le_bytes() }.put(out);
}

#[cfg(test)]
#[path = "link_tests.rs"]
mod tests;
