//! Connections into a sandbox and out of it, with servers and clients that behave and that do not.

use super::*;
use crate::aether::ports::{MAX_OPEN, MAX_WAITING};
use std::io::ErrorKind;
use std::net::{Shutdown, TcpListener, TcpStream};
use std::thread;

const PATIENCE: Duration = Duration::from_secs(20);

fn number(value: u64) -> Pack {
    Pack::default().uint(value)
}

fn at(port: u16) -> Fields {
    Fields::default().with("port", number(port.into()))
}

/// A server for one connection; its port.
fn serve_one<T: Send + 'static>(serve: impl FnOnce(TcpStream) -> T + Send + 'static) -> (u16, thread::JoinHandle<T>) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("listener");
    let port = listener.local_addr().expect("address").port();
    (port, thread::spawn(move || serve(patient(listener.accept().expect("connection").0))))
}

fn patient(socket: TcpStream) -> TcpStream {
    socket.set_read_timeout(Some(PATIENCE)).expect("timeout");
    socket.set_write_timeout(Some(PATIENCE)).expect("timeout");
    socket
}

/// Closing it sends a reset instead of an end.
fn abrupt(socket: &TcpStream) {
    let linger = libc::linger { l_onoff: 1, l_linger: 0 };
    let size = std::mem::size_of_val(&linger) as u32;
    let fd = socket.as_raw_fd();
    unsafe { libc::setsockopt(fd, libc::SOL_SOCKET, libc::SO_LINGER, (&raw const linger).cast(), size) };
}

fn pattern(size: usize) -> Vec<u8> {
    (0..size as u32).map(|at| (at.wrapping_mul(2_654_435_761) >> 24) as u8).collect()
}

impl Client {
    /// The next event of a stream; None when it ended instead.
    fn note(&mut self, stream: u32) -> Option<Vec<u8>> {
        loop {
            match self.frame().expect("connection is open") {
                (Kind::Note, of, payload) if of == stream => return Some(payload),
                (Kind::Reply | Kind::Error, of, _) if of == stream => return None,
                _ => {}
            }
        }
    }

    fn listen(&mut self) -> (u32, u16) {
        let stream = self.open("port.listen", at(0).into());
        let note = self.note(stream).expect("listening");
        let port = Value::check(&note).and_then(|note| note.get("port")?.u64()).expect("port");
        (stream, port as u16)
    }

    /// The same in the place of connections that are given up.
    fn listen_after(&mut self, given_up: &[(u32, TcpStream)]) -> (u32, u16) {
        given_up.iter().for_each(|(stream, _)| self.send(Kind::Cancel, *stream, b""));
        self.listen()
    }

    /// The number of the next connection to a listener.
    fn arrival(&mut self, stream: u32) -> u64 {
        let note = self.note(stream).expect("a connection");
        Value::check(&note).and_then(|note| note.get("connection")?.u64()).expect("its number")
    }

    fn take(&mut self, connection: u64) -> u32 {
        self.open("port.accept", Fields::default().with("connection", number(connection)).into())
    }

    /// The kinds of frames of a stream up to its end, credit left out.
    fn kinds(&mut self, stream: u32) -> Vec<Kind> {
        let mut kinds = Vec::new();
        loop {
            let (kind, of, _) = self.frame().expect("connection is open");
            if of == stream && kind != Kind::Credit {
                kinds.push(kind);
            }
            if of == stream && matches!(kind, Kind::Reply | Kind::Error) {
                return kinds;
            }
        }
    }
}

#[test]
fn both_directions_end_on_their_own() {
    let inside = Inside::start();
    let mut client = inside.connect(1);
    let (port, server) = serve_one(|mut socket| {
        let mut asked = Vec::new();
        socket.read_to_end(&mut asked).expect("all of it, up to the client's end");
        socket.write_all(b"answer to a question that was whole").expect("still open this way");
        asked
    });
    let stream = client.open("port.connect", at(port).into());
    client.data(stream, b"ques");
    client.data(stream, b"tion");
    client.send(Kind::End, stream, b"");
    assert_eq!(client.kinds(stream), [Kind::Note, Kind::Data, Kind::End, Kind::Reply]);
    assert_eq!(server.join().expect("server"), b"question");

    let (port, server) = serve_one(|mut socket| {
        socket.shutdown(Shutdown::Write).expect("end first");
        let mut rest = Vec::new();
        socket.read_to_end(&mut rest).expect("read");
        rest
    });
    let stream = client.open("port.connect", at(port).into());
    while client.frame().expect("open").0 != Kind::End {}
    client.data(stream, b"after its end");
    client.send(Kind::End, stream, b"");
    assert_eq!(client.kinds(stream), [Kind::Reply]);
    assert_eq!(server.join().expect("server"), b"after its end");
}

#[test]
fn bytes_are_exact_both_ways() {
    let inside = Inside::start();
    let mut client = inside.connect(1);
    let sent = pattern(6 << 20);
    let (port, server) = serve_one(|mut socket| {
        let mut all = Vec::new();
        socket.read_to_end(&mut all).expect("read");
        socket.write_all(&all).expect("write");
        all.len()
    });
    let answer = client.upload("port.connect", at(port), &sent);
    assert_eq!(server.join().expect("server"), sent.len());
    assert!(answer.streams[0] == sent, "{} bytes came back", answer.streams[0].len());
}

#[test]
fn refusals_come_at_once_and_are_typed() {
    let inside = Inside::start();
    let mut client = inside.connect(1);
    let free = TcpListener::bind("127.0.0.1:0").and_then(|listener| listener.local_addr()).expect("address").port();
    let started = os::now();
    let (kind, message) = client.call("port.connect", at(free).into()).fault();
    assert!(kind == "not_found" && message.contains(&free.to_string()), "{kind}: {message}");
    assert!(os::now() - started < 1.0);
    for (fields, needle) in [
        (at(0), "port"),
        (Fields::default().with("port", number(65536)), "port"),
        (Fields::default(), "port"),
        (at(80).with("host", text("10.0.0.1")), "loopback"),
        (at(80).with("host", text("localhost")), "loopback"),
        (at(80).with("host", text("::ffff:127.0.0.1")), "loopback"),
    ] {
        let (kind, message) = client.call("port.connect", fields.into()).fault();
        assert!(kind == "invalid_request" && message.contains(needle), "{kind}: {message}");
    }
    let everywhere = at(0).with("address", text("0.0.0.0"));
    assert_eq!(client.call("port.listen", everywhere.into()).fault().0, "invalid_request");
    let none = Fields::default().with("connection", number(12345));
    assert_eq!(client.call("port.accept", none.into()).fault().0, "not_found");
}

#[test]
fn a_server_on_v6_alone_is_found() {
    let inside = Inside::start();
    let mut client = inside.connect(1);
    let listener = TcpListener::bind("[::1]:0").expect("listener");
    let port = listener.local_addr().expect("address").port();
    let server = thread::spawn(move || {
        let mut said = [0; 5];
        patient(listener.accept().expect("connection").0).read_exact(&mut said).expect("read");
        said
    });
    let stream = client.open("port.connect", at(port).into());
    client.data(stream, b"hello");
    client.send(Kind::End, stream, b"");
    assert_eq!(client.kinds(stream), [Kind::Note, Kind::End, Kind::Reply]);
    assert_eq!(&server.join().expect("server"), b"hello");
}

#[test]
fn what_a_closing_server_said_arrives_before_the_reset() {
    let inside = Inside::start();
    let mut client = inside.connect(1);
    let (port, server) = serve_one(|mut socket| {
        let mut first = [0; 1];
        socket.read_exact(&mut first).expect("read"); // the rest stays unread, so that closing resets
        socket.write_all(b"too large").expect("write");
    });
    let stream = client.open("port.connect", at(port).into());
    client.data(stream, &[b'x'; 60_000]);
    let result = client.finish(stream);
    server.join().expect("server");
    assert_eq!((&result.streams[0][..], result.fault().0.as_str()), (&b"too large"[..], "connection_lost"));
}

#[test]
fn bytes_behind_urgent_ones_do_not_wait_for_more() {
    let inside = Inside::start();
    let mut client = inside.connect(1);
    let listener = TcpListener::bind("127.0.0.1:0").expect("listener");
    let stream = client.open("port.connect", at(listener.local_addr().expect("address").port()).into());
    let (mut server, _) = listener.accept().expect("connection");
    client.note(stream).expect("connected");
    inside.stopped(|| {
        server.write_all(b"before").expect("write");
        let urgent = unsafe { libc::send(server.as_raw_fd(), c"!".as_ptr().cast(), 1, libc::MSG_OOB) };
        assert_eq!(urgent, 1);
        server.write_all(b"behind").expect("write");
    });
    let mut heard = Vec::new();
    while !heard.ends_with(b"behind") {
        let (kind, _, payload) = client.frame().expect("connection is open");
        assert_eq!(kind, Kind::Data, "{heard:?}");
        heard.extend_from_slice(&payload[1..]);
    }
    assert_eq!(heard, b"beforebehind");
}

#[test]
fn a_server_that_resets_at_once_is_no_fault_of_ours() {
    let inside = Inside::start();
    let mut client = inside.connect(1);
    let listener = TcpListener::bind("127.0.0.1:0").expect("listener");
    assert_eq!(unsafe { libc::listen(listener.as_raw_fd(), 0) }, 0);
    let port = listener.local_addr().expect("address").port();
    let _first = TcpStream::connect(("127.0.0.1", port)).expect("the one that fills the queue");
    let stream = client.open("port.connect", at(port).into());
    assert!(client.call("hello", Pack::default().map(0)).reply.is_some(), "it is on its way, and finds no room");
    inside.stopped(|| {
        listener.accept().expect("the first");
        abrupt(&listener.accept().expect("aether's, when the kernel tries again").0);
    });
    let (kind, message) = client.finish(stream).fault();
    assert_eq!(kind, "connection_lost", "{message}");
}

#[test]
fn a_client_that_leaves_resets_the_connection() {
    let inside = Inside::start();
    let mut client = inside.connect(1);
    let (port, server) = serve_one(|mut socket| {
        let mut all = Vec::new();
        socket.read_to_end(&mut all).map_err(|error| error.kind())
    });
    let stream = client.open("port.connect", at(port).into());
    client.note(stream).expect("connected");
    client.data(stream, b"half a mess");
    client.send(Kind::Cancel, stream, b"");
    assert_eq!(
        server.join().expect("server"),
        Err(ErrorKind::ConnectionReset),
        "an end would look like a whole message"
    );

    let (port, server) = serve_one(|mut socket| socket.read(&mut [0; 8]).map_err(|error| error.kind()));
    let stream = client.open("port.connect", at(port).into());
    client.note(stream).expect("connected");
    drop(client);
    assert_eq!(server.join().expect("server"), Err(ErrorKind::ConnectionReset));
}

#[test]
fn a_reader_without_credit_holds_the_server() {
    let inside = Inside::start();
    let mut client = inside.connect(1);
    let (port, server) = serve_one(|mut socket| {
        socket.set_write_timeout(Some(Duration::from_millis(300))).expect("timeout");
        let (mut taken, bytes) = (0, [7; 65536]);
        while let Ok(size) = socket.write(&bytes) {
            taken += size;
        }
        taken
    });
    let stream = client.open("port.connect", at(port).into());
    let taken = server.join().expect("server");
    assert!((STREAM_CREDIT as usize..8 << 20).contains(&taken), "{taken} bytes were taken that nobody reads");
    client.send(Kind::Cancel, stream, b"");
    assert!(client.call("hello", Pack::default().map(0)).reply.is_some());
}

#[test]
fn listeners_hand_over_connections() {
    let inside = Inside::start();
    let mut client = inside.connect(1);
    let (listener, port) = client.listen();
    let (kind, message) = client.call("port.listen", at(port).into()).fault();
    assert!(kind == "conflict" && message.contains(&port.to_string()), "{kind}: {message}");
    let mut from_inside = patient(TcpStream::connect(("127.0.0.1", port)).expect("connect"));
    let connection = client.arrival(listener);
    let stream = client.take(connection);
    client.data(stream, b"hello");
    let mut heard = [0; 5];
    from_inside.read_exact(&mut heard).expect("read");
    assert_eq!(&heard, b"hello");
    assert_eq!(
        client.call("port.accept", Fields::default().with("connection", number(connection)).into()).fault().0,
        "not_found",
        "taken once"
    );

    let waiting = patient(TcpStream::connect(("127.0.0.1", port)).expect("connect"));
    client.arrival(listener);
    client.send(Kind::Cancel, listener, b"");
    assert!(client.call("hello", Pack::default().map(0)).reply.is_some());
    let refused = TcpStream::connect(("127.0.0.1", port)).map(drop).map_err(|error| error.kind());
    assert_eq!(refused, Err(ErrorKind::ConnectionRefused));
    assert!(!matches!((&waiting).read(&mut [0; 1]), Ok(1..)), "what nobody took is closed");
    from_inside.write_all(b"still here").expect("what was taken stays");
    from_inside.shutdown(Shutdown::Write).expect("shutdown");
    client.send(Kind::End, stream, b"");
    assert_eq!(client.kinds(stream), [Kind::Data, Kind::End, Kind::Reply]);
    client.listen();
}

#[test]
fn a_lost_connection_closes_the_listener() {
    let inside = Inside::start();
    let mut client = inside.connect(1);
    let (_, port) = client.listen();
    drop(client);
    let mut next = inside.connect(2);
    assert!(next.call("hello", Pack::default().map(0)).reply.is_some());
    assert!(TcpStream::connect(("127.0.0.1", port)).is_err());
    let again = next.open("port.listen", at(port).into());
    assert!(next.note(again).is_some(), "the port is free");
}

#[test]
fn floods_and_resets_from_inside_are_bounded() {
    let inside = Inside::start();
    let mut client = inside.connect(1);
    let (listener, port) = client.listen();
    let mut crowd: Vec<TcpStream> =
        (0..MAX_WAITING.0 + 20).map(|_| TcpStream::connect(("127.0.0.1", port)).expect("connect")).collect();
    let arrived: Vec<u64> = (0..MAX_WAITING.0).map(|_| client.arrival(listener)).collect();
    let ping = |client: &mut Client| {
        client.send(Kind::Ping, 0, b"more?");
        client.frame().expect("open").0
    };
    assert_eq!(ping(&mut client), Kind::Pong, "no more are told before one is taken");
    client.take(arrived[0]);
    client.arrival(listener);
    assert_eq!(ping(&mut client), Kind::Pong);

    crowd.iter().for_each(abrupt);
    crowd.clear();
    let gone = client.take(arrived[1]);
    let result = client.finish(gone);
    assert!(result.error.is_some() || result.reply.is_some(), "a reset is an end like another");
    client.send(Kind::Cancel, listener, b"");
    assert!(client.call("hello", Pack::default().map(0)).reply.is_some());
}

#[test]
fn a_storm_of_resets_passes() {
    const STORM: usize = 300;
    let inside = Inside::start();
    let mut client = inside.connect(1);
    let (listener, port) = client.listen();
    let storm = thread::spawn(move || {
        for _ in 0..STORM {
            abrupt(&TcpStream::connect(("127.0.0.1", port)).expect("connect"));
        }
    });
    for _ in 0..STORM {
        let connection = client.arrival(listener);
        client.take(connection);
    }
    storm.join().expect("storm");
    let mut last = patient(TcpStream::connect(("127.0.0.1", port)).expect("connect"));
    let connection = client.arrival(listener);
    let stream = client.take(connection);
    client.data(stream, b"calm");
    let mut heard = [0; 4];
    last.read_exact(&mut heard).expect("read");
    assert_eq!(&heard, b"calm");
}

#[test]
fn connections_are_counted() {
    let inside = Inside::start();
    let mut client = inside.connect(1);
    let server = TcpListener::bind("127.0.0.1:0").expect("listener");
    let port = server.local_addr().expect("address").port();
    let streams: Vec<(u32, TcpStream)> = (0..MAX_OPEN)
        .map(|_| (client.open("port.connect", at(port).into()), server.accept().expect("connection").0))
        .collect();
    let (kind, message) = client.call("port.connect", at(port).into()).fault();
    assert!(kind == "capacity" && message.contains(&MAX_OPEN.to_string()), "{kind}: {message}");
    client.send(Kind::Cancel, streams[0].0, b"");
    let stream = client.open("port.connect", at(port).into());
    assert!(client.note(stream).is_some(), "room again");

    let (listener, port) = client.listen_after(&streams[1..3]);
    client.open("port.connect", at(server.local_addr().expect("address").port()).into());
    let late = patient(TcpStream::connect(("127.0.0.1", port)).expect("connect"));
    let connection = client.arrival(listener);
    let refused = client.take(connection);
    assert_eq!(client.finish(refused).fault().0, "capacity");
    assert!(!matches!((&late).read(&mut [0; 1]), Ok(1..)), "what found no room is closed, and does not wait for ever");
}
