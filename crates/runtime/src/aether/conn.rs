//! One connection of the edge: bytes in, bytes out, and what is at work on its streams.

use super::chronus::{self, Chronus, State};
use super::fault::Fault;
use super::feed::From;
use super::files;
use super::log::Place;
use super::ops::{self, Known, Ops, Rest, Running};
use super::os::{self, Epoll, Scratch, Watched};
use super::ports::Ports;
use super::watch::Watches;
use crate::birth::SUCCESSOR;
use crate::link::{Event, Frame, Kind, Ledger, Preamble, ProtocolError, HEADER, MAX_DROPPED, MAX_PAYLOAD};
use crate::msgpack::{Pack, Value};
use crate::sys::{socket, Errno};
use std::os::fd::OwnedFd;

/// No work is done for a connection that has so much to send.
const OUT_HIGH: usize = 512 * 1024;
/// What the kernel is asked to hold of a connection's bytes, so that a frame goes in one call.
const SOCKET_BUFFER: i32 = 1 << 20;
/// Steps of long work a turn; each moves at most one frame of data, or takes about a millisecond.
const STEPS_A_TURN: usize = 4;
const MAX_STREAMS: usize = 4096;
/// Requests with data for stdins that are full; more are refused, since each holds its data.
const MAX_WAITING_WRITES: usize = 16;

/// What a request of files is to its stream: it takes the client's data, and is stepped until it is done.
pub trait Job {
    fn data(&mut self, _bytes: &[u8]) -> Result<(), Fault> {
        Ok(())
    }

    fn end(&mut self) -> Result<(), Fault> {
        Ok(())
    }

    /// Whether the client's data stays charged until the job gives it back (`Sink::consumed`).
    fn holds_credit(&self) -> bool {
        false
    }

    /// A bounded piece of work.
    fn step(&mut self, sink: &mut Sink) -> Result<Step, Fault>;
}

pub enum Step {
    /// There is more to do at once.
    More,
    /// Nothing to do before credit or data comes.
    Wait,
    Done(Vec<u8>),
}

/// Where a job puts its data.
pub struct Sink<'a> {
    ledger: &'a mut Ledger,
    out: &'a mut Vec<u8>,
    stream: u32,
}

impl Sink<'_> {
    /// Sends at most `most` bytes that `fill` writes in place; how many. 0 without credit, or when `fill` had nothing.
    pub fn data(&mut self, channel: u8, most: usize, fill: impl FnOnce(&mut [u8]) -> usize) -> usize {
        self.ledger.put_data(self.stream, channel, self.out, most, fill)
    }

    /// Sends what there is room for of what was not sent yet, and counts it.
    pub fn drain(&mut self, pending: &[u8], sent: &mut usize) -> Step {
        let rest = &pending[*sent..];
        let size = self.data(0, rest.len(), |room| {
            room.copy_from_slice(&rest[..room.len()]);
            room.len()
        });
        *sent += size;
        match size {
            0 => Step::Wait,
            _ => Step::More,
        }
    }

    pub fn has_room(&self) -> bool {
        self.ledger.room(self.stream) > 1
    }

    /// An event; jobs bound how many of them nobody has answered.
    pub fn note(&mut self, payload: &[u8]) {
        Frame { kind: Kind::Note, stream: self.stream, payload }.put(self.out);
    }

    /// No more data from this side.
    pub fn end(&mut self) {
        Frame { kind: Kind::End, stream: self.stream, payload: &[] }.put(self.out);
    }

    /// Gives credit back for payload that a job held, in steps.
    pub fn consumed(&mut self, size: u32, step: u32) {
        self.ledger.consumed_by(self.stream, size, step, self.out);
    }

    pub fn under_way(&self) -> u64 {
        self.ledger.under_way(self.stream)
    }
}

enum Work {
    /// Output of a command from a place on, then its result. `feeds`: the stream's data is the command's stdin.
    Follow {
        command: u32,
        place: Option<Place>,
        cursor: u64,
        feeds: bool,
    },
    /// The reply comes when the command has started.
    Started {
        command: u32,
    },
    /// The reply comes when the shell of a session is ready or gone, or an interrupted command has ended, or does not.
    Rest(Rest),
    /// The reply comes when the operation is done. `told`: it is told of, else it is the operation's own.
    Await {
        op: String,
        told: bool,
    },
    /// Data for a command's stdin that waits for room in its queue.
    Write {
        command: u32,
        from: From,
        data: Vec<u8>,
    },
    Job(Box<dyn Job>),
}

enum Outcome {
    Reply(Vec<u8>),
    Work(Work),
}

/// What requests work on.
pub struct Context<'a> {
    pub chronus: &'a mut Chronus,
    pub ports: &'a Ports,
    pub watches: &'a Watches,
    pub ops: &'a Ops,
    pub epoll: &'a Epoll,
}

pub struct Conn {
    fd: Watched,
    pub token: u64,
    /// None until the preamble came.
    pub greeted: bool,
    dropped: usize,
    input: Vec<u8>,
    out: Vec<u8>,
    sent: usize,
    /// Waiting for the socket to take more.
    blocked: bool,
    ledger: Ledger,
    works: Vec<(u32, Work)>,
    /// The operations among them. What is lost with a connection did not happen, unless it goes on by itself.
    running: Vec<(u32, Running)>,
    next: usize,
}

/// What a turn of reading brought.
pub enum Read {
    Nothing,
    Greeting(Preamble),
    /// It was a launcher, with a socket to be asked by.
    Successor(OwnedFd),
    Closed,
}

impl Conn {
    pub fn new(fd: Watched, token: u64) -> Conn {
        os::buffer_to_send(fd.raw(), SOCKET_BUFFER);
        Conn {
            fd,
            token,
            greeted: false,
            dropped: 0,
            input: Vec::new(),
            out: Vec::new(),
            sent: 0,
            blocked: false,
            ledger: Ledger::new(),
            works: Vec::new(),
            running: Vec::new(),
            next: 0,
        }
    }

    pub fn follows(&self, number: u32) -> bool {
        self.works.iter().any(|(_, work)| match work {
            Work::Follow { command, .. } | Work::Started { command } => *command == number,
            _ => false,
        })
    }

    pub fn is_blocked(&self) -> bool {
        self.blocked
    }

    pub fn is_quiet(&self) -> bool {
        self.works.is_empty() && self.out.is_empty() && self.input.is_empty()
    }

    // -- input --

    /// Reads what is there, at most one scratch of it, or the rest of a frame that has begun.
    pub fn read(&mut self, scratch: &mut Scratch, context: &mut Context) -> Read {
        if !self.greeted {
            return self.read_greeting();
        }
        if let Some(size) = Frame::size(&self.input) {
            return self.read_rest(size, context);
        }
        let bytes = match scratch.read(self.fd.raw()) {
            Err(libc::EAGAIN | libc::EINTR) => return Read::Nothing,
            Ok(bytes) if !bytes.is_empty() => bytes,
            _ => return Read::Closed,
        };
        let result = if self.input.is_empty() {
            self.frames(bytes, context).map(|used| self.input.extend_from_slice(&bytes[used..]))
        } else {
            self.input.extend_from_slice(bytes);
            self.buffered_frames(context)
        };
        if result.is_err() {
            return Read::Closed;
        }
        Read::Nothing
    }

    /// Reads straight to where the frame is put together, and the header of the one behind it.
    fn read_rest(&mut self, size: usize, context: &mut Context) -> Read {
        let most = (size + HEADER).saturating_sub(self.input.len());
        match os::read_onto(self.fd.raw(), &mut self.input, most) {
            Err(libc::EAGAIN | libc::EINTR) => Read::Nothing,
            Ok(count) if count > 0 => match self.input.len() < size || self.buffered_frames(context).is_ok() {
                true => Read::Nothing,
                false => Read::Closed,
            },
            _ => Read::Closed,
        }
    }

    /// Before its greeting a connection is read in small pieces, and descriptors are taken from it.
    fn read_greeting(&mut self) -> Read {
        let mut buffer = [0; 4096];
        let (length, mut fds) = match socket::receive(self.fd.raw(), &mut buffer, libc::MSG_DONTWAIT) {
            Err(Errno(libc::EAGAIN | libc::EINTR)) => return Read::Nothing,
            Ok((length, fds)) if length > 0 => (length, fds),
            _ => return Read::Closed,
        };
        match fds.pop() {
            Some(launcher) if buffer[..length] == *SUCCESSOR => return Read::Successor(launcher),
            Some(_) => return Read::Closed,
            None => {}
        }
        self.input.extend_from_slice(&buffer[..length]);
        self.look_for_greeting()
    }

    fn look_for_greeting(&mut self) -> Read {
        let (used, found) = Preamble::find(&self.input);
        self.input.drain(..used);
        self.dropped += used;
        match found {
            Some(preamble) => Read::Greeting(preamble),
            None if self.dropped > MAX_DROPPED => Read::Closed,
            None => Read::Nothing,
        }
    }

    /// Answers the preamble; then what was sent behind it is taken.
    pub fn greet(&mut self, preamble: Preamble, epoch: u64, context: &mut Context) -> Result<(), ProtocolError> {
        self.greeted = true;
        self.out.extend_from_slice(&Preamble { epoch, ..preamble }.bytes());
        self.buffered_frames(context)
    }

    /// Tells a client of an older epoch which one is held now; it is then dropped.
    pub fn refuse(&mut self, preamble: Preamble, epoch: u64, epoll: &Epoll) {
        self.out.extend_from_slice(&Preamble { epoch, ..preamble }.bytes());
        self.flush(epoll);
    }

    fn buffered_frames(&mut self, context: &mut Context) -> Result<(), ProtocolError> {
        let mut input = std::mem::take(&mut self.input);
        let used = self.frames(&input, context)?;
        input.drain(..used);
        if !input.is_empty() || !self.works.is_empty() {
            self.input = input; // empty too: who sends much sends more
        }
        Ok(())
    }

    /// Acts on every whole frame of `bytes`; how many bytes they were.
    fn frames(&mut self, bytes: &[u8], context: &mut Context) -> Result<usize, ProtocolError> {
        let mut used = 0;
        while let Some((frame, size)) = Frame::parse(&bytes[used..])? {
            self.frame(frame, context)?;
            used += size;
        }
        Ok(used)
    }

    fn frame(&mut self, frame: Frame, context: &mut Context) -> Result<(), ProtocolError> {
        match self.ledger.admit(frame, &mut self.out)? {
            Event::Open { stream, method, params } => {
                let writes = self.works.iter().filter(|(_, work)| matches!(work, Work::Write { .. })).count();
                let outcome = match self.works.len() < MAX_STREAMS && writes < MAX_WAITING_WRITES {
                    true => self.begin(stream, method, params, context),
                    false => Err(Fault::new("capacity", "too many requests at once on one connection").retryable()),
                };
                match outcome {
                    Ok(Outcome::Work(work)) => self.works.push((stream, work)),
                    Ok(Outcome::Reply(payload)) => self.finish(stream, Ok(payload)),
                    Err(fault) => self.finish(stream, Err(fault)),
                }
            }
            Event::Data { stream, bytes } => self.data(stream, Some(bytes), context),
            Event::End { stream } => self.data(stream, None, context),
            Event::Cancel { stream } => {
                self.works.retain(|(id, _)| *id != stream);
                self.running.retain(|(id, _)| *id != stream);
            }
            Event::Ping { bytes } => Frame { kind: Kind::Pong, stream: 0, payload: bytes }.put(&mut self.out),
            Event::Nothing => {}
        }
        Ok(())
    }

    /// Begins a request. One that is a known operation waits for what comes, or came, of that.
    fn begin(&mut self, stream: u32, method: &str, params: Value, context: &mut Context) -> Result<Outcome, Fault> {
        let Some(op) = ops::name(method, params)? else { return request(method, params, context) };
        match context.ops.known(op) {
            Known::Forgotten => return Err(ops::forgotten()),
            Known::Nothing => {}
            _ => return Ok(Outcome::Work(Work::Await { op: op.to_owned(), told: false })),
        }
        let mut running = context.ops.begin(op);
        let outcome = request(method, params, context);
        if let Ok(Outcome::Work(Work::Rest(rest))) = outcome {
            running.rest = Some(rest);
        }
        self.running.push((stream, running)); // until `finish`, which also those come to that are done already
        outcome
    }

    /// Data of the client, or its end.
    fn data(&mut self, stream: u32, bytes: Option<&[u8]>, context: &mut Context) {
        let mut size = bytes.map_or(0, |bytes| 1 + bytes.len() as u32);
        let work = self.works.iter_mut().find(|(id, _)| *id == stream);
        let result = match (work.map(|(_, work)| work), bytes) {
            (Some(Work::Follow { command, feeds: true, .. }), Some(bytes)) => {
                // credit goes back as the command reads, see `step`
                return context.chronus.stdin_write(*command, bytes, true, context.epoll);
            }
            (Some(Work::Follow { command, feeds: true, .. }), None) => {
                return context.chronus.stdin_close(*command, context.epoll);
            }
            (Some(Work::Job(job)), Some(bytes)) => {
                if job.holds_credit() {
                    size = 0;
                }
                job.data(bytes)
            }
            (Some(Work::Job(job)), None) => job.end(),
            _ => Ok(()),
        };
        self.ledger.consumed(stream, size, &mut self.out);
        match result {
            Err(fault) => {
                self.works.retain(|(id, _)| *id != stream);
                self.finish(stream, Err(fault));
            }
            Ok(()) if bytes.is_none() => self.complete(stream),
            Ok(()) => {}
        }
    }

    /// An operation whose data has come to its end is done now or never: another connection may take this one's place before
    /// the next turn.
    fn complete(&mut self, stream: u32) {
        let Conn { works, running, ledger, out, .. } = self;
        let Some(at) = works.iter().position(|(id, _)| *id == stream) else { return };
        let Work::Job(job) = &mut works[at].1 else { return };
        if !running.iter().any(|(id, _)| *id == stream) {
            return;
        }
        let result = match job.step(&mut Sink { ledger, out, stream }) {
            Ok(Step::Done(payload)) => Ok(payload),
            Ok(_) => return,
            Err(fault) => Err(fault),
        };
        works.remove(at);
        self.finish(stream, result);
    }

    // -- work --

    fn finish(&mut self, stream: u32, result: Result<Vec<u8>, Fault>) {
        if let Some(at) = self.running.iter().position(|(id, _)| *id == stream) {
            self.running.remove(at).1.ended(&result);
        }
        let (kind, payload) = match result {
            Ok(payload) if payload.len() > MAX_PAYLOAD => {
                (Kind::Error, Fault::new("too_large", "the answer is longer than a frame").pack())
            }
            Ok(payload) => (Kind::Reply, payload),
            Err(fault) => (Kind::Error, fault.pack()),
        };
        Frame { kind, stream, payload: &payload }.put(&mut self.out);
        self.ledger.close(stream, &mut self.out);
    }

    /// Does a bounded amount of the work at hand, each stream in its turn. True: there is more at once.
    pub fn pump(&mut self, scratch: &mut Scratch, context: &mut Context) -> bool {
        let mut idle = 0;
        for _ in 0..STEPS_A_TURN.max(self.works.len()) {
            if idle >= self.works.len() || self.out.len() - self.sent >= OUT_HIGH {
                break;
            }
            self.next %= self.works.len();
            let stream = self.works[self.next].0;
            match self.step(scratch, context) {
                Ok(Step::More) => (self.next, idle) = (self.next + 1, 0),
                Ok(Step::Wait) => (self.next, idle) = (self.next + 1, idle + 1),
                Ok(Step::Done(payload)) => {
                    self.works.remove(self.next);
                    self.finish(stream, Ok(payload));
                    idle = 0; // somebody may have waited for it
                }
                Err(fault) => {
                    self.works.remove(self.next);
                    self.finish(stream, Err(fault));
                }
            }
        }
        idle < self.works.len()
    }

    fn step(&mut self, scratch: &mut Scratch, context: &mut Context) -> Result<Step, Fault> {
        let Conn { works, ledger, out, next, .. } = self;
        let (stream, work) = &mut works[*next];
        let mut sink = Sink { ledger, out, stream: *stream };
        let chronus = &mut *context.chronus;
        match work {
            Work::Job(job) => job.step(&mut sink),
            Work::Started { command } => match chronus.get(*command).map(|c| (&c.state, c.pid())) {
                Some((State::Starting(_), _)) => Ok(Step::Wait),
                Some((State::Failed(fault), _)) => Err(fault.clone()),
                Some((_, pid)) => Ok(Step::Done(Pack::default().map(1).str("pid").uint(pid as u64).0)),
                None => Err(gone()),
            },
            Work::Rest(rest) => rest.result(chronus).map_or(Ok(Step::Wait), |result| result.map(Step::Done)),
            Work::Await { op, told } => {
                let result = match context.ops.known(op) {
                    Known::Running => return Ok(Step::Wait),
                    Known::Done(result) => result,
                    Known::Left(rest) => match rest.result(chronus) {
                        None => return Ok(Step::Wait),
                        Some(result) => {
                            context.ops.ended(op, &result);
                            result
                        }
                    },
                    known if *told => {
                        let state = if matches!(known, Known::Forgotten) { "forgotten" } else { "unknown" };
                        return Ok(Step::Done(ops::told(state, None)));
                    }
                    Known::Forgotten => Err(ops::forgotten()),
                    Known::Nothing => Err(Fault::new("connection_lost", "it broke off before it was done").retryable()),
                };
                if *told {
                    Ok(Step::Done(ops::told("done", Some(&result))))
                } else {
                    result.map(Step::Done)
                }
            }
            Work::Write { command, from, data } => {
                let taken = chronus.feed(*command, from, data, context.epoll)?;
                Ok(taken.map_or(Step::Wait, Step::Done))
            }
            Work::Follow { command, place, cursor, feeds } => {
                if *feeds {
                    let taken = chronus.stdin_taken(*command);
                    sink.ledger.consumed(*stream, taken, sink.out);
                }
                let incarnation = chronus.birth.incarnation;
                let command = chronus.get(*command).ok_or_else(gone)?;
                follow(command, place, *cursor, incarnation, &mut sink, scratch)
            }
        }
    }

    // -- output --

    /// Sends what the socket takes. False: the connection is lost.
    pub fn flush(&mut self, epoll: &Epoll) -> bool {
        while self.sent < self.out.len() {
            let rest = &self.out[self.sent..];
            let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
            match os::check(unsafe { libc::send(self.fd.raw(), rest.as_ptr().cast(), rest.len(), flags) } as i64) {
                Ok(size) => self.sent += size as usize,
                Err(libc::EINTR) => {}
                Err(libc::EAGAIN) => {
                    if self.sent >= OUT_HIGH {
                        self.out.drain(..self.sent); // a peer that is always a little behind must not make it grow
                        self.sent = 0;
                    }
                    return self.wait_to_send(true, epoll);
                }
                Err(_) => return false,
            }
        }
        self.sent = 0;
        self.out.clear();
        if self.works.is_empty() && self.out.capacity() > 8 * HEADER {
            self.out = Vec::new();
        }
        if self.works.is_empty() && self.input.is_empty() && self.input.capacity() > 0 {
            self.input = Vec::new();
        }
        self.wait_to_send(false, epoll)
    }

    fn wait_to_send(&mut self, blocked: bool, epoll: &Epoll) -> bool {
        if self.blocked == blocked {
            return true;
        }
        self.blocked = blocked;
        let events = libc::EPOLLIN | if blocked { libc::EPOLLOUT } else { 0 };
        epoll.watch(self.fd.raw(), events, self.token).is_ok()
    }
}

fn gone() -> Fault {
    Fault::new("not_found", "the command ended long ago and was dropped")
}

/// One frame of a command's output, or its result once everything was sent.
fn follow(
    command: &chronus::Command,
    place: &mut Option<Place>,
    cursor: u64,
    incarnation: u64,
    sink: &mut Sink,
    scratch: &mut Scratch,
) -> Result<Step, Fault> {
    let unreadable = |errno| Fault::internal("cannot read the command's output back", errno);
    let mut at = match *place {
        Some(place) => place,
        None => command.log.locate(cursor, scratch).map_err(unreadable)?,
    };
    let behind = command.log.behind(&at) as usize;
    let step = if behind > 0 && sink.has_room() {
        let channel = 1 + command.log.next_stream(&mut at, scratch).map_err(unreadable)?;
        let mut failure = None;
        sink.data(channel, behind, |room| {
            command.log.read(&mut at, room, scratch).unwrap_or_else(|errno| {
                failure = Some(errno);
                0
            })
        });
        match failure {
            Some(errno) => Err(unreadable(errno)),
            None => Ok(Step::More),
        }
    } else {
        match &command.state {
            _ if behind > 0 => Ok(Step::Wait),
            State::Done => Ok(Step::Done(command.pack_done(incarnation))),
            State::Failed(fault) => Err(fault.clone()),
            _ => Ok(Step::Wait),
        }
    };
    *place = Some(at);
    step
}

/// Begins what a client asks for.
fn request(method: &str, params: Value, context: &mut Context) -> Result<Outcome, Fault> {
    let Context { chronus, ports, watches, epoll, .. } = context;
    let nothing = || Ok(Outcome::Reply(Pack::default().map(0).0));
    let number = || chronus::exec_id(params);
    match method {
        "hello" => {
            let birth = chronus.birth;
            let pack =
                Pack::default().map(3).str("sandbox").str(&birth.sandbox).str("incarnation").uint(birth.incarnation);
            Ok(Outcome::Reply(pack.str("version").str(env!("CARGO_PKG_VERSION")).0))
        }
        "clock.stop" => {
            os::stop_clock();
            nothing()
        }
        "clock.start" => {
            os::start_clock();
            nothing()
        }
        "exec" => {
            let spec = params.get("spec").and_then(Value::u64);
            let (command, feeds) = match chronus.started(number()?, spec)? {
                Some(command) => (command, false),
                None => match params.get("session").map(chronus::session::name) {
                    Some(name) => (chronus.session_exec(name?, params, epoll)?, true),
                    None => (chronus.start(params, epoll)?, true),
                },
            };
            let follow = params.get("follow").and_then(Value::bool).unwrap_or(true);
            match follow || !chronus.get(command).is_some_and(chronus::Command::detached) {
                true => Ok(Outcome::Work(Work::Follow { command, place: None, cursor: cursor(params)?, feeds })),
                false => {
                    chronus.watch_start(command, epoll);
                    Ok(Outcome::Work(Work::Started { command }))
                }
            }
        }
        "op.wait" => {
            let op = params.get("op").and_then(Value::str).ok_or_else(|| Fault::invalid("which op? there is none"))?;
            Ok(Outcome::Work(Work::Await { op: op.to_owned(), told: true }))
        }
        "exec.attach" => {
            let command = chronus.find(number()?)?;
            Ok(Outcome::Work(Work::Follow { command, place: None, cursor: cursor(params)?, feeds: false }))
        }
        "exec.write" => {
            let command = chronus.find(number()?)?;
            let data = params.get("data").and_then(Value::bytes).ok_or_else(|| Fault::invalid("data must be bytes"))?;
            Ok(Outcome::Work(Work::Write { command, from: From::new(params)?, data: data.to_vec() }))
        }
        "exec.close_stdin" => {
            chronus.finish_stdin(params, epoll)?;
            nothing()
        }
        "exec.stage" => {
            chronus.stage.put(number()?, params)?;
            nothing()
        }
        "exec.poll" => {
            let command = chronus.find(number()?)?;
            let done = |c: &chronus::Command| c.pack_done(chronus.birth.incarnation);
            let ended = chronus.get(command).filter(|command| matches!(command.state, State::Done));
            Ok(Outcome::Reply(ended.map_or_else(|| Pack::default().nil().0, done)))
        }
        "exec.signal" => chronus.signal(params).and_then(|()| nothing()),
        "exec.resize" => chronus.resize(params).and_then(|()| nothing()),
        "exec.list" => Ok(Outcome::Reply(chronus.list())),
        "session.open" => Ok(Outcome::Work(Work::Rest(Rest::Opened(chronus.session_open(params, epoll)?)))),
        "session.close" => Ok(Outcome::Work(Work::Rest(Rest::Closed(chronus.session_close(params)?)))),
        "session.interrupt" => Ok(Outcome::Work(Work::Rest(Rest::Interrupted(chronus.session_interrupt(params)?)))),
        "session.list" => Ok(Outcome::Reply(chronus.session_list())),
        "port.connect" | "port.listen" | "port.accept" => {
            Ok(Outcome::Work(Work::Job(ports.request(method, params, epoll)?)))
        }
        "fs.watch" => Ok(Outcome::Work(Work::Job(watches.request(params, chronus.birth, epoll)?))),
        _ => match files::request(method, params, chronus.birth)? {
            files::Answer::Reply(payload) => Ok(Outcome::Reply(payload)),
            files::Answer::Job(job) => Ok(Outcome::Work(Work::Job(job))),
        },
    }
}

fn cursor(params: Value) -> Result<u64, Fault> {
    match params.get("cursor") {
        None => Ok(0),
        Some(cursor) => cursor.u64().ok_or_else(|| Fault::invalid("cursor must be a byte count")),
    }
}
