//! Ports: connections to servers inside, and listeners inside whose connections the edge takes. Loopback only.
//!
//! The socket does the buffering of one direction and the stream's credit that of the other, so a connection costs a bounded
//! amount of memory however fast or slow its ends are. What comes from inside is hostile: connections are counted, those
//! that nobody took yet too, and beyond the bounds they stay in the kernel's queue of the listener, which is bounded as well.

use super::conn::{Job, Sink, Step};
use super::fault::{describe, Fault};
use super::os::{self, check, Epoll, Errno, Fd, Watched};
use super::token;
use crate::msgpack::{Pack, Value};
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::rc::Rc;

/// Connections that are at work, both kinds together.
pub const MAX_OPEN: usize = 512;
/// Connections that nobody has taken yet: of one listener, and of all.
pub const MAX_WAITING: (usize, usize) = (64, 128);
pub const MAX_LISTENERS: usize = 16;
const MAX_BACKLOG: u64 = 128;
/// Bytes of a socket's buffer each way, of which the kernel makes twice as much. Its memory is not the sandbox's.
const BUFFER: i32 = 64 * 1024;
const CHUNK: usize = 64 * 1024;
/// Bytes sent that a reader who stopped has not taken; the edge keeps them. It gives credit in steps of half as much.
const WINDOW: u64 = 512 * 1024;
/// The edge keeps little under way to a server that may have stopped, so it must learn early what was taken.
const CREDIT_STEP: u32 = 32 * 1024;
/// Attempts to connect before the kernel gives up: 7 seconds, when a listener's queue is full.
const SYN_RETRIES: i32 = 2;

const READABLE: i32 = libc::EPOLLIN | libc::EPOLLPRI | libc::EPOLLRDHUP | libc::EPOLLHUP | libc::EPOLLERR;
const WRITABLE: i32 = libc::EPOLLOUT | libc::EPOLLHUP | libc::EPOLLERR;
/// A short read does not mean that there is no more: an end is behind it, or urgent bytes, before which the kernel stops.
const BEHIND: i32 = libc::EPOLLPRI | libc::EPOLLRDHUP | libc::EPOLLHUP | libc::EPOLLERR;

/// A connection from inside that was accepted and waits to be taken.
struct Waiting {
    fd: Fd,
    listener: u32,
}

#[derive(Default)]
struct Table {
    next: u32,
    /// What happened to each socket at work and was not looked at yet, in bits of epoll.
    events: BTreeMap<u32, Rc<Cell<i32>>>,
    waiting: BTreeMap<u32, Waiting>,
    listeners: usize,
}

impl Table {
    fn number(&mut self) -> u32 {
        self.next = self.next.wrapping_add(1);
        self.next
    }
}

/// Every socket of ours; a handle, shared with the jobs.
#[derive(Clone, Default)]
pub struct Ports(Rc<RefCell<Table>>);

impl Ports {
    pub fn on_event(&self, number: u32, events: i32) {
        if let Some(seen) = self.0.borrow().events.get(&number) {
            seen.set(seen.get() | events);
        }
    }

    /// Begins `port.connect`, `port.listen` or `port.accept`.
    pub fn request(&self, method: &str, params: Value, epoll: &Epoll) -> Result<Box<dyn Job>, Fault> {
        Ok(match method {
            "port.connect" => Box::new(self.connect(params, epoll)?),
            "port.listen" => Box::new(self.listen(params, epoll)?),
            _ => Box::new(self.accept(params, epoll)?),
        })
    }

    fn connect(&self, params: Value, epoll: &Epoll) -> Result<Duplex, Fault> {
        let port = port(params, 1)?;
        let (host, or_v6) = match host(params, "host")? {
            Some(host) => (host, false),
            None => (Ipv4Addr::LOCALHOST.into(), true),
        };
        self.room_for_one()?;
        let target = SocketAddr::new(host, port);
        let fd = begin_connecting(&target).map_err(|errno| unconnected(errno, port))?;
        let socket = self.watched(epoll.own(fd)).map_err(|errno| unconnected(errno, port))?;
        Ok(Duplex::new(socket, Some(Connecting { target, or_v6 })))
    }

    fn listen(&self, params: Value, epoll: &Epoll) -> Result<Listen, Fault> {
        let address = SocketAddr::new(host(params, "address")?.unwrap_or(Ipv4Addr::LOCALHOST.into()), port(params, 0)?);
        let backlog = params.get("backlog").and_then(Value::u64).unwrap_or(MAX_BACKLOG).clamp(1, MAX_BACKLOG);
        if self.0.borrow().listeners >= MAX_LISTENERS {
            return Err(full(format!("{MAX_LISTENERS} ports are listened on for the outside already")));
        }
        let failed = |errno| match errno {
            libc::EADDRINUSE => Fault::new("conflict", format!("{address} inside the sandbox is in use already"))
                .hint("choose another port, or end the server that has it"),
            _ => Fault::new("internal", format!("cannot listen on {address} inside: {}", describe(errno))),
        };
        let fd = begin_listening(&address, backlog as i32).map_err(failed)?;
        let port = local_port(&fd).map_err(failed)?;
        let socket = self.watched(epoll.own(fd)).map_err(failed)?;
        self.0.borrow_mut().listeners += 1;
        Ok(Listen { socket, address: SocketAddr::new(address.ip(), port), told: false })
    }

    fn accept(&self, params: Value, epoll: &Epoll) -> Result<Duplex, Fault> {
        let number = params.get("connection").and_then(Value::u64).and_then(|n| u32::try_from(n).ok());
        let number = number.ok_or_else(|| Fault::invalid("connection must be a number that port.listen gave"))?;
        let waiting = self.0.borrow_mut().waiting.remove(&number);
        let waiting = waiting.ok_or_else(|| Fault::new("not_found", format!("no connection {number} waits")))?;
        self.room_for_one()?; // else it is closed: nobody asks twice
        let socket = self.watched(epoll.own(waiting.fd)).map_err(|errno| Fault::internal("cannot watch", errno))?;
        socket.events.set(libc::EPOLLIN | libc::EPOLLOUT);
        Ok(Duplex::new(socket, None))
    }

    fn room_for_one(&self) -> Result<(), Fault> {
        match self.0.borrow().events.len() < MAX_OPEN {
            true => Ok(()),
            false => Err(full(format!("{MAX_OPEN} connections through the platform are open in this sandbox"))),
        }
    }

    fn watched(&self, fd: Watched) -> os::Result<Socket> {
        let (mut table, events) = (self.0.borrow_mut(), Rc::new(Cell::new(0)));
        let number = table.number();
        fd.watch(READABLE | WRITABLE | libc::EPOLLET, token::make(token::PORT, number))?;
        table.events.insert(number, events.clone());
        Ok(Socket { fd, number, events, ports: self.clone() })
    }
}

fn full(what: String) -> Fault {
    Fault::new("capacity", what).retryable().hint("close some of them first")
}

fn port(params: Value, least: u16) -> Result<u16, Fault> {
    let port = params.get("port").and_then(Value::u64).and_then(|port| u16::try_from(port).ok());
    port.filter(|port| *port >= least).ok_or_else(|| Fault::invalid(format!("port must be {least} to 65535")))
}

/// A loopback address, if one is given.
fn host(params: Value, name: &str) -> Result<Option<IpAddr>, Fault> {
    let Some(value) = params.get(name) else { return Ok(None) };
    let host = value.str().and_then(|text| text.parse::<IpAddr>().ok()).filter(IpAddr::is_loopback);
    host.map(Some).ok_or_else(|| Fault::invalid(format!("{name} must be a loopback address of the sandbox")))
}

fn unconnected(errno: Errno, port: u16) -> Fault {
    match errno {
        libc::ECONNREFUSED => {
            Fault::new("not_found", format!("port {port} inside the sandbox refused the connection: nothing listens"))
                .retryable()
                .hint("start the server, or wait until it listens")
        }
        libc::ETIMEDOUT => Fault::new("timeout", format!("port {port} inside the sandbox did not answer"))
            .retryable()
            .hint("its server does not accept connections"),
        libc::ECONNRESET | libc::EPIPE => reset(),
        libc::EMFILE | libc::ENFILE | libc::ENOBUFS | libc::ENOMEM | libc::EADDRNOTAVAIL | libc::EAGAIN => {
            full(format!("cannot connect to port {port}: {}", describe(errno)))
        }
        _ => Fault::new("internal", format!("cannot connect to port {port}: {}", describe(errno))),
    }
}

fn reset() -> Fault {
    Fault::new("connection_lost", "the connection was reset inside the sandbox")
}

// -- sockets --

/// A socket in the epoll set and in the table, out of both when it is dropped.
struct Socket {
    fd: Watched,
    number: u32,
    events: Rc<Cell<i32>>,
    ports: Ports,
}

impl Socket {
    fn is(&self, events: i32) -> bool {
        self.events.get() & events != 0
    }

    /// The kernel said EAGAIN: these come again as events.
    fn waits_for(&self, events: i32) {
        self.events.set(self.events.get() & !events);
    }
}

impl Drop for Socket {
    fn drop(&mut self) {
        self.ports.0.borrow_mut().events.remove(&self.number);
    }
}

fn option(fd: i32, level: i32, name: i32, value: i32) -> os::Result<()> {
    let size = std::mem::size_of::<i32>() as u32;
    check(unsafe { libc::setsockopt(fd, level, name, (&raw const value).cast(), size) }).map(drop)
}

fn new_socket(address: &SocketAddr) -> os::Result<Fd> {
    let family = if address.is_ipv4() { libc::AF_INET } else { libc::AF_INET6 };
    let kind = libc::SOCK_STREAM | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
    let fd = Fd(check(unsafe { libc::socket(family, kind, 0) })? as i32);
    option(fd.0, libc::SOL_SOCKET, libc::SO_RCVBUF, BUFFER)?;
    option(fd.0, libc::SOL_SOCKET, libc::SO_SNDBUF, BUFFER)?;
    option(fd.0, libc::IPPROTO_TCP, libc::TCP_NODELAY, 1)?;
    Ok(fd)
}

/// Room for an address of either family.
#[repr(C)]
union Address {
    v4: libc::sockaddr_in,
    v6: libc::sockaddr_in6,
}

impl Address {
    fn of(address: &SocketAddr) -> (Address, u32) {
        let mut made: Address = unsafe { std::mem::zeroed() };
        match address {
            SocketAddr::V4(v4) => {
                made.v4 = libc::sockaddr_in {
                    sin_family: libc::AF_INET as u16,
                    sin_port: v4.port().to_be(),
                    sin_addr: libc::in_addr { s_addr: u32::from_ne_bytes(v4.ip().octets()) },
                    sin_zero: [0; 8],
                };
                (made, std::mem::size_of::<libc::sockaddr_in>() as u32)
            }
            SocketAddr::V6(v6) => {
                made.v6 = libc::sockaddr_in6 {
                    sin6_family: libc::AF_INET6 as u16,
                    sin6_port: v6.port().to_be(),
                    sin6_flowinfo: 0,
                    sin6_addr: libc::in6_addr { s6_addr: v6.ip().octets() },
                    sin6_scope_id: 0,
                };
                (made, std::mem::size_of::<libc::sockaddr_in6>() as u32)
            }
        }
    }

    /// SAFETY of the reads: all of it was zeroed or filled by the kernel, and every bit pattern is a valid address.
    fn value(&self) -> SocketAddr {
        let (v4, v6) = unsafe { (self.v4, self.v6) };
        match i32::from(v4.sin_family) {
            libc::AF_INET => {
                SocketAddr::new(Ipv4Addr::from(u32::from_be(v4.sin_addr.s_addr)).into(), u16::from_be(v4.sin_port))
            }
            _ => SocketAddr::new(Ipv6Addr::from(v6.sin6_addr.s6_addr).into(), u16::from_be(v6.sin6_port)),
        }
    }
}

/// A socket on its way to `target`; connected or refused, its first event tells.
fn begin_connecting(target: &SocketAddr) -> os::Result<Fd> {
    let fd = new_socket(target)?;
    option(fd.0, libc::IPPROTO_TCP, libc::TCP_SYNCNT, SYN_RETRIES)?;
    let (address, size) = Address::of(target);
    match check(unsafe { libc::connect(fd.0, (&raw const address).cast(), size) }) {
        Ok(_) | Err(libc::EINPROGRESS) => Ok(fd),
        Err(errno) => Err(errno),
    }
}

fn begin_listening(at: &SocketAddr, backlog: i32) -> os::Result<Fd> {
    let fd = new_socket(at)?;
    option(fd.0, libc::SOL_SOCKET, libc::SO_REUSEADDR, 1)?;
    if at.is_ipv6() {
        option(fd.0, libc::IPPROTO_IPV6, libc::IPV6_V6ONLY, 1)?;
    }
    let (address, size) = Address::of(at);
    check(unsafe { libc::bind(fd.0, (&raw const address).cast(), size) })?;
    check(unsafe { libc::listen(fd.0, backlog) })?;
    Ok(fd)
}

fn accept(listener: i32) -> os::Result<(Fd, SocketAddr)> {
    let mut address: Address = unsafe { std::mem::zeroed() };
    let flags = libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
    loop {
        let mut size = std::mem::size_of::<Address>() as u32;
        match check(unsafe { libc::accept4(listener, (&raw mut address).cast(), &mut size, flags) }) {
            Ok(fd) => return Ok((Fd(fd as i32), address.value())),
            Err(libc::ECONNABORTED | libc::EINTR) => {} // reset while it was queued
            Err(errno) => return Err(errno),
        }
    }
}

fn local_port(fd: &Fd) -> os::Result<u16> {
    let mut address: Address = unsafe { std::mem::zeroed() };
    let mut size = std::mem::size_of::<Address>() as u32;
    check(unsafe { libc::getsockname(fd.0, (&raw mut address).cast(), &mut size) })?;
    Ok(address.value().port())
}

/// What went wrong with a socket since it was asked last; 0 for nothing.
fn pending_error(fd: i32) -> Errno {
    let (mut error, mut size) = (0i32, std::mem::size_of::<i32>() as u32);
    let asked = unsafe { libc::getsockopt(fd, libc::SOL_SOCKET, libc::SO_ERROR, (&raw mut error).cast(), &mut size) };
    check(asked).map_or_else(|errno| errno, |_| error)
}

// -- one connection --

struct Connecting {
    target: SocketAddr,
    /// No host was asked for: a server may listen on ::1 alone.
    or_v6: bool,
}

/// A connection and its stream: what the client sends goes in, what comes out goes to the client.
struct Duplex {
    socket: Socket,
    connecting: Option<Connecting>,
    /// The client was told that it is connected.
    told: bool,
    /// The client's bytes that the socket did not take yet; the stream's credit bounds them.
    queue: Vec<u8>,
    sent: usize,
    /// Payload to give credit back for.
    owed: u32,
    /// The client's END came; it was passed on.
    ended: bool,
    shut: bool,
    /// The other side's end came.
    eof: bool,
    /// The other side takes no more: what else the client sends is dropped.
    broken: bool,
}

impl Duplex {
    fn new(socket: Socket, connecting: Option<Connecting>) -> Duplex {
        Duplex {
            socket,
            connecting,
            told: false,
            queue: Vec::new(),
            sent: 0,
            owed: 0,
            ended: false,
            shut: false,
            eof: false,
            broken: false,
        }
    }

    /// True when it is connected.
    fn proceed(&mut self) -> Result<bool, Fault> {
        let Some(Connecting { target, or_v6 }) = &mut self.connecting else { return Ok(true) };
        if !self.socket.is(WRITABLE) {
            return Ok(false);
        }
        match pending_error(self.socket.fd.raw()) {
            0 if is_connected(self.socket.fd.raw()) => {
                self.connecting = None;
                Ok(true)
            }
            0 => {
                self.socket.waits_for(WRITABLE);
                Ok(false)
            }
            libc::ECONNREFUSED if *or_v6 => {
                let port = target.port();
                *target = SocketAddr::new(Ipv6Addr::LOCALHOST.into(), port);
                *or_v6 = false;
                // Without IPv6 in the namespace the first refusal is the news.
                let fd = begin_connecting(target).map_err(|_| unconnected(libc::ECONNREFUSED, port))?;
                let ports = self.socket.ports.clone();
                let socket = ports.watched(self.socket.fd.beside(fd));
                self.socket = socket.map_err(|errno| unconnected(errno, port))?;
                Ok(false)
            }
            errno => Err(unconnected(errno, target.port())),
        }
    }

    /// Sends what the socket takes; how much. An error shows again when reading, behind what is there to read.
    fn send(&mut self, bytes: &[u8]) -> usize {
        let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
        let mut sent = 0;
        while sent < bytes.len() && !self.broken && self.socket.is(WRITABLE) {
            let rest = &bytes[sent..];
            let fd = self.socket.fd.raw();
            match check(unsafe { libc::send(fd, rest.as_ptr().cast(), rest.len(), flags) } as i64) {
                Ok(size) => sent += size as usize,
                Err(libc::EINTR) => {}
                Err(libc::EAGAIN) => self.socket.waits_for(libc::EPOLLOUT),
                Err(_) => self.broken = true,
            }
        }
        sent
    }

    /// The queue goes on its way; behind it the client's end.
    fn push(&mut self) {
        let queue = std::mem::take(&mut self.queue);
        self.sent += self.send(&queue[self.sent..]);
        if self.broken || self.sent == queue.len() {
            self.sent = 0;
        } else {
            self.queue = queue;
        }
        if self.queue.is_empty() && self.ended && !self.shut && !self.broken {
            self.broken = check(unsafe { libc::shutdown(self.socket.fd.raw(), libc::SHUT_WR) }).is_err();
            self.shut = true;
        }
    }

    /// Payload that the client may send anew: all but what waits.
    fn returned(&mut self) -> u32 {
        let waits = (self.queue.len() - self.sent) as u32;
        let returned = self.owed.saturating_sub(waits);
        self.owed -= returned;
        returned
    }

    fn pull(&mut self, sink: &mut Sink) -> Result<Step, Fault> {
        if self.eof {
            return match (self.broken || self.socket.is(libc::EPOLLERR), self.shut) {
                (true, _) => Err(reset()),
                (false, true) => Ok(Step::Done(Pack::default().map(0).0)),
                (false, false) => Ok(Step::Wait),
            };
        }
        if !self.socket.is(READABLE) || !sink.has_room() || sink.under_way() >= WINDOW {
            return Ok(Step::Wait);
        }
        let fd = self.socket.fd.raw();
        let (mut result, mut room) = (Ok(0), 0);
        sink.data(0, CHUNK, |bytes| {
            room = bytes.len();
            result = check(unsafe { libc::recv(fd, bytes.as_mut_ptr().cast(), room, libc::MSG_DONTWAIT) } as i64);
            result.unwrap_or(0) as usize
        });
        match result {
            Ok(0) if room > 0 => {
                self.eof = true;
                sink.end();
            }
            Ok(size) if (size as usize) < room && !self.socket.is(BEHIND) => {
                // A short read emptied the socket, and an end that came meanwhile is another event. Servers that write an
                // answer in two parts wait for an acknowledgement in between, which the kernel would put off for 40 ms.
                let _ = option(fd, libc::IPPROTO_TCP, libc::TCP_QUICKACK, 1);
                self.socket.waits_for(libc::EPOLLIN);
            }
            Ok(_) | Err(libc::EINTR) => {}
            Err(libc::EAGAIN) => {
                self.socket.waits_for(READABLE);
                return Ok(Step::Wait);
            }
            Err(_) => return Err(reset()),
        }
        Ok(Step::More)
    }
}

fn is_connected(fd: i32) -> bool {
    let mut address: Address = unsafe { std::mem::zeroed() };
    let mut size = std::mem::size_of::<Address>() as u32;
    check(unsafe { libc::getpeername(fd, (&raw mut address).cast(), &mut size) }).is_ok()
}

impl Job for Duplex {
    fn holds_credit(&self) -> bool {
        true
    }

    fn data(&mut self, bytes: &[u8]) -> Result<(), Fault> {
        self.owed += 1 + bytes.len() as u32;
        let sent = match self.queue.is_empty() && self.connecting.is_none() {
            true => self.send(bytes),
            false => 0,
        };
        if !self.broken {
            self.queue.drain(..std::mem::take(&mut self.sent));
            self.queue.extend_from_slice(&bytes[sent..]);
        }
        Ok(())
    }

    fn end(&mut self) -> Result<(), Fault> {
        self.ended = true;
        Ok(())
    }

    fn step(&mut self, sink: &mut Sink) -> Result<Step, Fault> {
        if !self.proceed()? {
            return Ok(Step::Wait);
        }
        if !std::mem::replace(&mut self.told, true) {
            sink.note(&Pack::default().map(1).str("connected").bool(true).0);
        }
        self.push();
        sink.consumed(self.returned(), CREDIT_STEP);
        self.pull(sink)
    }
}

impl Drop for Duplex {
    /// A connection that did not come to its end is reset, so that nobody takes half of a message for a whole one.
    fn drop(&mut self) {
        if self.eof && self.shut {
            return;
        }
        let linger = libc::linger { l_onoff: 1, l_linger: 0 };
        let size = std::mem::size_of_val(&linger) as u32;
        let fd = self.socket.fd.raw();
        unsafe { libc::setsockopt(fd, libc::SOL_SOCKET, libc::SO_LINGER, (&raw const linger).cast(), size) };
    }
}

// -- one listener --

/// A port inside that the outside listens on. It is closed, with what waits, when its stream ends.
struct Listen {
    socket: Socket,
    address: SocketAddr,
    told: bool,
}

impl Listen {
    /// The next connection, if there is one and room for it.
    fn next(&self) -> Option<(u32, SocketAddr)> {
        let number = self.socket.number;
        let mut table = self.socket.ports.0.borrow_mut();
        let own = table.waiting.values().filter(|waiting| waiting.listener == number).count();
        if own >= MAX_WAITING.0 || table.waiting.len() >= MAX_WAITING.1 || !self.socket.is(READABLE) {
            return None;
        }
        match accept(self.socket.fd.raw()) {
            Ok((fd, peer)) => {
                let connection = table.number();
                table.waiting.insert(connection, Waiting { fd, listener: number });
                Some((connection, peer))
            }
            Err(libc::EAGAIN) => {
                self.socket.waits_for(READABLE);
                None
            }
            Err(_) => None, // no descriptor is left: another turn tries again
        }
    }
}

impl Job for Listen {
    fn step(&mut self, sink: &mut Sink) -> Result<Step, Fault> {
        if !std::mem::replace(&mut self.told, true) {
            let pack = Pack::default().map(2).str("address").str(&self.address.ip().to_string());
            sink.note(&pack.str("port").uint(self.address.port().into()).0);
        }
        match self.next() {
            Some((connection, peer)) => {
                let pack = Pack::default().map(2).str("connection").uint(connection.into());
                sink.note(&pack.str("peer").str(&peer.to_string()).0);
                Ok(Step::More)
            }
            None => Ok(Step::Wait),
        }
    }
}

impl Drop for Listen {
    fn drop(&mut self) {
        let mut table = self.socket.ports.0.borrow_mut();
        table.listeners -= 1;
        let number = self.socket.number;
        table.waiting.retain(|_, waiting| waiting.listener != number);
    }
}
