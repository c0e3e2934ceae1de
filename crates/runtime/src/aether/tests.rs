//! A real aether, PID 1 of a PID namespace of its own, driven over its socket. Needs root.

mod operations;
mod ports;
mod sessions;
mod terminals;
mod watches;

use super::*;
use crate::birth::Birth;
use crate::link::{Frame, Kind, Preamble, CONNECTION_CREDIT, PREAMBLE, STREAM_CREDIT};
use crate::msgpack::{Pack, Value};
use std::io::{Read as _, Write as _};
use std::os::fd::AsRawFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

static NUMBER: AtomicU32 = AtomicU32::new(0);

/// A process tree with an aether at its root, and a directory for what it touches. Both are gone when it is dropped.
struct Inside {
    keeper: i32,
    aether: i32,
    dir: PathBuf,
    cgroup: Option<PathBuf>,
}

fn directory(path: &Path) -> i32 {
    let path = os::cstring(path.as_os_str().as_encoded_bytes()).expect("path");
    let fd = os::open(libc::AT_FDCWD, &path, libc::O_RDONLY | libc::O_DIRECTORY, 0, 0).expect("directory");
    let number = fd.0;
    std::mem::forget(fd);
    number
}

/// The keeper's part: only the given descriptors, then a new PID namespace with aether in it, whose pid it tells.
fn keep_aether(tell: i32, listener: i32, spill: i32, cgroup2: i32, birth: Birth) -> ! {
    let mut keep = [2, tell, listener, spill, cgroup2.max(2)];
    keep.sort_unstable();
    let mut first = 3;
    for fd in keep.into_iter().chain([i32::MAX]) {
        if fd > first {
            unsafe { libc::syscall(libc::SYS_close_range, first, fd - 1, 0) };
        }
        first = first.max(fd.saturating_add(1));
    }
    unsafe {
        libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
        libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); // as `inside` does
        assert_eq!(libc::unshare(libc::CLONE_NEWPID), 0, "needs root");
        match libc::fork() {
            0 => {
                libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
                libc::close(tell);
                mount_own();
                serve(Sandbox {
                    birth,
                    listener,
                    epoll: libc::epoll_create1(libc::EPOLL_CLOEXEC),
                    oom_adj: -1,
                    spill,
                    cgroup2,
                    groups: crate::inside::groups::Groups::new(None),
                })
            }
            child => {
                os::write_all(tell, &child.to_le_bytes()).expect("tell");
                libc::waitpid(child, std::ptr::null_mut(), 0);
                libc::_exit(0)
            }
        }
    }
}

/// In a mount namespace of its own: pids are looked up there, and must be those of the namespace; and terminals.
fn mount_own() {
    let (proc, flags) = (c"proc".as_ptr(), libc::MS_REC | libc::MS_PRIVATE);
    unsafe {
        assert_eq!(libc::unshare(libc::CLONE_NEWNS), 0);
        assert_eq!(libc::mount(proc, c"/".as_ptr(), std::ptr::null(), flags, std::ptr::null()), 0);
        assert_eq!(libc::mount(proc, c"/proc".as_ptr(), proc, 0, std::ptr::null()), 0);
        let (devpts, options) = (c"devpts".as_ptr(), c"gid=5,mode=0620,ptmxmode=0666,max=3".as_ptr());
        assert_eq!(libc::mount(devpts, c"/dev/pts".as_ptr(), devpts, 0, options.cast()), 0);
    }
}

impl Inside {
    fn start() -> Inside {
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let name = format!("dsec-aether-{}-{number}", std::process::id());
        let dir = std::env::temp_dir().join(&name);
        std::fs::create_dir_all(dir.join("spill")).expect("directory");
        let listener = UnixListener::bind(dir.join("sock")).expect("listener");
        let group = Path::new("/sys/fs/cgroup/unified").join(name);
        let cgroup = std::fs::create_dir(&group).is_ok().then_some(group);
        let birth = Birth {
            sandbox: "sb-test-0".into(),
            hostname: "test".into(),
            incarnation: 7,
            layers: 0,
            has_cgroup2: cgroup.is_some(),
            init_user: "root".into(),
            env: vec![("FROM_BIRTH".into(), "yes".into())],
            workdir: dir.to_str().expect("UTF-8").into(),
            max_output: 16 << 20,
        };
        let spill = directory(&dir.join("spill"));
        let cgroup2 = cgroup.as_deref().map_or(-1, directory);
        let (told, tell) = os::pipe(false, false).expect("pipe");
        let keeper = match unsafe { libc::fork() } {
            0 => keep_aether(tell.0, listener.as_raw_fd(), spill, cgroup2, birth),
            keeper => keeper,
        };
        let mut pid = [0; 4];
        assert_eq!(os::read(told.0, &mut pid), Ok(4));
        unsafe { libc::close(spill) };
        if cgroup2 >= 0 {
            unsafe { libc::close(cgroup2) };
        }
        Inside { keeper, aether: i32::from_le_bytes(pid), dir, cgroup }
    }

    fn connect(&self, epoch: u64) -> Client {
        let mut socket = UnixStream::connect(self.dir.join("sock")).expect("connect");
        socket.set_read_timeout(Some(Duration::from_secs(20))).expect("timeout");
        let ours = Preamble { nonce: *b"0123456789abcdef", epoch };
        socket.write_all(&ours.bytes()).expect("preamble");
        let mut answer = [0; PREAMBLE];
        socket.read_exact(&mut answer).expect("answer");
        let (_, theirs) = Preamble::find(&answer);
        let theirs = theirs.expect("preamble");
        assert_eq!(theirs.nonce, ours.nonce);
        Client { socket, input: Vec::new(), next: 1, epoch: theirs.epoch, returns_credit: true }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.join(name)
    }

    /// Returns when a command has made the file.
    fn await_file(&self, name: &str) {
        let until = std::time::Instant::now() + Duration::from_secs(20);
        while !self.path(name).exists() {
            assert!(std::time::Instant::now() < until, "no {name} in time");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Does something while aether stands still, so that it finds all of it at once.
    fn stopped<T>(&self, act: impl FnOnce() -> T) -> T {
        unsafe { libc::kill(self.aether, libc::SIGSTOP) };
        while !std::fs::read_to_string(format!("/proc/{}/stat", self.aether)).expect("stat").contains(") T ") {
            std::thread::yield_now();
        }
        let done = act();
        unsafe { libc::kill(self.aether, libc::SIGCONT) };
        done
    }
}

impl Drop for Inside {
    fn drop(&mut self) {
        unsafe {
            libc::kill(self.aether, libc::SIGKILL); // the keeper ends when it has reaped it
            libc::waitpid(self.keeper, std::ptr::null_mut(), 0);
        }
        if let Some(cgroup) = &self.cgroup {
            let _ = std::fs::write(cgroup.join("cgroup.kill"), "1");
            for _ in 0..2000 {
                let inner = std::fs::read_dir(cgroup).into_iter().flatten().flatten();
                inner.for_each(|entry| drop(std::fs::remove_dir(entry.path())));
                if std::fs::remove_dir(cgroup).is_ok() {
                    break;
                }
                std::thread::sleep(Duration::from_millis(1));
            }
            assert!(!cgroup.exists(), "a process outlived its sandbox");
        }
        let _ = std::fs::remove_dir_all(&self.dir);
    }
}

/// A frame as it came: kind, stream, payload.
type Owned = (Kind, u32, Vec<u8>);

struct Client {
    socket: UnixStream,
    input: Vec<u8>,
    next: u32,
    epoch: u64,
    returns_credit: bool,
}

#[derive(Debug, Default)]
struct Result {
    streams: [Vec<u8>; 3],
    reply: Option<Vec<u8>>,
    error: Option<Vec<u8>>,
}

impl Result {
    fn value(&self) -> Value<'_> {
        let reply = self.reply.as_deref().unwrap_or_else(|| panic!("error instead of a reply: {:?}", self.fault()));
        Value::check(reply).expect("msgpack")
    }

    fn fault(&self) -> (String, String) {
        let error = Value::check(self.error.as_deref().expect("an error")).expect("msgpack");
        let text = |key| error.get(key).and_then(Value::str).unwrap_or_default().to_owned();
        (text("kind"), text("message"))
    }

    fn number(&self, key: &str) -> u64 {
        self.value().get(key).and_then(Value::u64).unwrap_or_else(|| panic!("no {key}"))
    }

    fn text(&self, key: &str) -> Option<&str> {
        self.value().get(key).and_then(Value::str)
    }

    fn code(&self) -> u64 {
        self.number("exit_code")
    }
}

impl Client {
    fn send(&mut self, kind: Kind, stream: u32, payload: &[u8]) {
        let mut out = Vec::new();
        Frame { kind, stream, payload }.put(&mut out);
        self.socket.write_all(&out).expect("send");
    }

    fn open(&mut self, method: &str, params: Pack) -> u32 {
        let stream = self.next;
        self.next += 2;
        let mut payload = Pack::default().map(2).str("m").str(method).str("p").0;
        payload.extend_from_slice(&params.0);
        self.send(Kind::Open, stream, &payload);
        stream
    }

    fn data(&mut self, stream: u32, bytes: &[u8]) {
        self.send(Kind::Data, stream, &[&[0], bytes].concat());
    }

    /// The next frame; None when aether closed the connection.
    fn frame(&mut self) -> Option<Owned> {
        loop {
            if let Some((frame, size)) = Frame::parse(&self.input).expect("well-formed frame") {
                let owned = (frame.kind, frame.stream, frame.payload.to_vec());
                self.input.drain(..size);
                return Some(owned);
            }
            let mut buffer = [0; 65536];
            match self.socket.read(&mut buffer) {
                Ok(0) | Err(_) if self.input.is_empty() => return None,
                Ok(0) => panic!("closed inside a frame"),
                Ok(size) => self.input.extend_from_slice(&buffer[..size]),
                Err(error) => panic!("no frame in time: {error}"),
            }
        }
    }

    fn credit(&mut self, stream: u32, size: usize) {
        for stream in [stream, 0] {
            self.send(Kind::Credit, stream, &(size as u32).to_le_bytes());
        }
    }

    /// Everything of one stream until its end; frames of others are dropped.
    fn finish(&mut self, stream: u32) -> Result {
        let mut result = Result::default();
        loop {
            let (kind, of, payload) = self.frame().expect("connection is open");
            if of != stream {
                continue;
            }
            match kind {
                Kind::Data => {
                    result.streams[usize::from(payload[0])].extend_from_slice(&payload[1..]);
                    if self.returns_credit {
                        self.credit(stream, payload.len());
                    }
                }
                Kind::Reply => result.reply = Some(payload),
                Kind::Error => result.error = Some(payload),
                _ => continue,
            }
            if kind != Kind::Data {
                return result;
            }
        }
    }

    fn call(&mut self, method: &str, params: Pack) -> Result {
        let stream = self.open(method, params);
        self.finish(stream)
    }

    /// A call that takes data, sent within credit.
    fn upload(&mut self, method: &str, params: Fields, bytes: &[u8]) -> Result {
        let stream = self.open(method, params.into());
        let mut credit = STREAM_CREDIT as usize;
        for chunk in bytes.chunks(60_000) {
            while credit <= chunk.len() {
                match self.frame().expect("credit") {
                    (Kind::Credit, of, size) if of == stream => {
                        credit += u32::from_le_bytes(size.try_into().expect("u32")) as usize;
                    }
                    (Kind::Error, of, error) if of == stream => {
                        return Result { error: Some(error), ..Result::default() };
                    }
                    _ => {}
                }
            }
            self.data(stream, chunk);
            credit -= chunk.len() + 1;
        }
        self.send(Kind::End, stream, b"");
        self.finish(stream)
    }

    fn exec(&mut self, command: Exec) -> Result {
        self.call("exec", command.0.into())
    }

    fn shell(&mut self, line: &str) -> Result {
        self.exec(Exec::line(line.as_bytes()))
    }
}

/// Parameters of `exec`, key by key.
struct Exec(Fields);

#[derive(Default)]
struct Fields(usize, Vec<u8>);

impl Fields {
    fn with(mut self, key: &str, value: Pack) -> Fields {
        self.0 += 1;
        self.1.extend(Pack::default().str(key).0);
        self.1.extend(value.0);
        self
    }
}

impl From<Fields> for Pack {
    fn from(fields: Fields) -> Pack {
        let mut pack = Pack::default().map(fields.0);
        pack.0.extend(fields.1);
        pack
    }
}

fn text(text: &str) -> Pack {
    Pack::default().str(text)
}

fn bytes(bytes: &[u8]) -> Pack {
    Pack::default().bin(bytes)
}

fn yes() -> Pack {
    Pack::default().bool(true)
}

impl Exec {
    fn new(id: &str) -> Exec {
        Exec(Fields::default()).with("exec_id", text(id))
    }

    fn numbered() -> Exec {
        Exec::new(&format!("ex-{}", NUMBER.fetch_add(1, Ordering::Relaxed)))
    }

    fn line(line: &[u8]) -> Exec {
        Exec::numbered().with("line", bytes(line))
    }

    fn argv(argv: &[&[u8]]) -> Exec {
        let list = argv.iter().fold(Pack::default().array(argv.len()), |pack, argument| pack.bin(argument));
        Exec::numbered().with("argv", list)
    }

    fn with(self, key: &str, value: Pack) -> Exec {
        Exec(self.0.with(key, value))
    }
}

fn path(path: &Path) -> Fields {
    Fields::default().with("path", bytes(path.as_os_str().as_encoded_bytes()))
}

#[test]
fn hello_and_unknown_methods() {
    let inside = Inside::start();
    let mut client = inside.connect(1);
    let hello = client.call("hello", Pack::default().map(0));
    assert_eq!((hello.text("sandbox"), hello.number("incarnation")), (Some("sb-test-0"), 7));
    assert_eq!(client.call("exce", Pack::default().map(0)).fault().0, "unsupported");
    client.send(Kind::Ping, 0, b"still there");
    assert_eq!(client.frame(), Some((Kind::Pong, 0, b"still there".to_vec())));
}

#[test]
fn exit_codes_are_a_shells() {
    let inside = Inside::start();
    let mut client = inside.connect(1);
    let result = client.shell("echo out; echo err >&2; exit 3");
    assert_eq!((result.code(), &result.streams[1][..], &result.streams[2][..]), (3, &b"out\n"[..], &b"err\n"[..]));
    assert_eq!((result.number("stdout_bytes"), result.number("stderr_bytes"), result.number("incarnation")), (4, 4, 7));
    let result = client.shell("kill -SEGV $$");
    assert_eq!((result.code(), result.text("signal")), (139, Some("SEGV")));
    std::fs::write(inside.path("plain"), "x").expect("file");
    std::fs::write(inside.path("text"), "echo no interpreter named\n").expect("file");
    let executable = std::os::unix::fs::PermissionsExt::from_mode(0o755);
    std::fs::set_permissions(inside.path("text"), executable).expect("mode");
    for (program, code, message) in [
        (&b"nosuch"[..], 127, "dsec: nosuch: command not found\n"),
        (b"/no/such", 127, "dsec: /no/such: No such file or directory\n"),
        (b"", 127, "dsec: : command not found\n"),
        (b"./plain", 126, "dsec: ./plain: Permission denied\n"),
        (b"/tmp", 126, "dsec: /tmp: Permission denied\n"),
        (b"./text", 126, "dsec: ./text: Exec format error\n"),
    ] {
        let result = client.exec(Exec::argv(&[program]));
        assert_eq!((result.code(), std::str::from_utf8(&result.streams[2])), (code, Ok(message)));
    }
    assert_eq!(client.exec(Exec::argv(&[b"true"])).code(), 0);
}

#[test]
fn bad_requests_are_typed_errors() {
    let inside = Inside::start();
    let mut client = inside.connect(1);
    std::fs::write(inside.path("file"), "x").expect("file");
    let long = vec![b'x'; 200_000];
    for (command, kind, needle) in [
        (Exec::argv(&[]), "invalid_request", "argv is empty"),
        (Exec::argv(&[b"echo", b"a\0b"]), "invalid_request", "argument 1 has a NUL"),
        (Exec::line(b"echo a\0b"), "invalid_request", "NUL"),
        (Exec::argv(&[b"true"]).with("user", text("nobody-at-all")), "invalid_request", "nobody-at-all"),
        (Exec::argv(&[b"true"]).with("cwd", bytes(b"/no/such")), "file_not_found", "/no/such"),
        (Exec::argv(&[b"true"]).with("cwd", bytes(b"file")), "not_a_directory", "file"),
        (Exec::argv(&[b"echo", &long]), "too_large", "longer than the kernel takes"),
        (Exec::argv(&[b"true"]).with("timeout", Pack::default().float(-1.0)), "invalid_request", "timeout"),
        (Exec::argv(&[b"true"]).with("env", Pack::default().map(1).str("A=B").str("x")), "invalid_request", "A=B"),
        (Exec(Fields::default()).with("argv", Pack::default().array(1).bin(b"true")), "invalid_request", "exec_id"),
    ] {
        let (found, message) = client.exec(command).fault();
        assert!(found == kind && message.contains(needle), "{found}: {message}");
    }
    assert_eq!(
        client.call("exec.attach", Fields::default().with("exec_id", text("ex-none")).into()).fault().0,
        "not_found"
    );
}

#[test]
fn environment_user_and_directory() {
    let inside = Inside::start();
    let mut client = inside.connect(1);
    let env = Pack::default().map(1).str("MINE").str("a b");
    let result = client.exec(Exec::argv(&[b"env"]).with("env", env));
    let expected = "FROM_BIRTH=yes\nHOME=/root\nLOGNAME=root\nMINE=a b\nPATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin\nSHELL=/bin/bash\nUSER=root\n";
    assert_eq!(std::str::from_utf8(&result.streams[1]), Ok(expected));
    assert_eq!(
        std::str::from_utf8(&client.shell("pwd").streams[1]).map(str::trim_end),
        Ok(inside.dir.to_str().expect("UTF-8"))
    );
    let as_user = client.exec(
        Exec::line(b"id -u; id -g; id -G; grep -i capeff /proc/self/status | cut -f2")
            .with("user", text("4321"))
            .with("cwd", bytes(b"/")),
    );
    assert_eq!(std::str::from_utf8(&as_user.streams[1]), Ok("4321\n4321\n4321\n0000000000000000\n"));
    let clean = client.shell("ls /proc/self/fd | wc -l; grep -E 'Sig(Blk|Ign)' /proc/self/status | cut -f2");
    assert_eq!(
        std::str::from_utf8(&clean.streams[1]),
        Ok("4\n0000000000000000\n0000000000000000\n"),
        "0, 1, 2 and ls's own"
    );
}

#[test]
fn stdin_from_the_request_and_from_the_stream() {
    let inside = Inside::start();
    let mut client = inside.connect(1);
    assert_eq!(client.exec(Exec::argv(&[b"cat"])).streams[1], b"", "no stdin is /dev/null");
    let result = client.exec(Exec::argv(&[b"cat"]).with("stdin", bytes(b"given\n")));
    assert_eq!(result.streams[1], b"given\n");
    let big: Vec<u8> = (0..900_000u32).map(|i| (i % 251) as u8).collect();
    let result = client.exec(Exec::argv(&[b"cat"]).with("stdin", bytes(&big)));
    assert!(result.streams[1] == big, "more than a pipe holds");
    let early = client.exec(Exec::argv(&[b"true"]).with("stdin", bytes(&big)));
    assert_eq!(early.code(), 0, "a reader that leaves early");
    let stream = client.open("exec", Exec::argv(&[b"cat"]).with("stdin_open", yes()).0.into());
    client.data(stream, b"one ");
    client.data(stream, b"two");
    client.send(Kind::End, stream, b"");
    assert_eq!(client.finish(stream).streams[1], b"one two");
}

#[test]
fn commands_outlive_connections_and_come_back_by_cursor() {
    let inside = Inside::start();
    let mut client = inside.connect(1);
    let stream = client.open(
        "exec",
        Exec::new("ex-held").with("line", bytes(b"echo first; read x <gate; echo second >&2; exit 5")).0.into(),
    );
    let fifo = os::cstring(inside.path("gate").as_os_str().as_encoded_bytes()).expect("path");
    assert_eq!(unsafe { libc::mkfifo(fifo.as_ptr(), 0o600) }, 0);
    assert_eq!(client.frame(), Some((Kind::Data, stream, b"\x01first\n".to_vec())));
    drop(client);
    let mut client = inside.connect(2);
    let again = client.open("exec", Exec::new("ex-held").with("line", bytes(b"echo another")).0.into());
    let late = client.open(
        "exec.attach",
        Fields::default().with("exec_id", text("ex-held")).with("cursor", Pack::default().uint(3)).into(),
    );
    std::fs::write(inside.path("gate"), "go\n").expect("gate");
    let (first, second) = (client.finish(again), ());
    assert_eq!(
        (first.code(), &first.streams[1][..], &first.streams[2][..], second),
        (5, &b"first\n"[..], &b"second\n"[..], ())
    );
    let params = || Fields::default().with("exec_id", text("ex-held"));
    let tail = client.call("exec.attach", params().with("cursor", Pack::default().uint(9)).into());
    assert_eq!((&tail.streams[1][..], &tail.streams[2][..], late), (&b""[..], &b"ond\n"[..], again + 2));
    let list = client.call("exec.list", Pack::default().map(0));
    let entry = list.value().array().expect("list").next().expect("entry");
    assert_eq!(entry.get("running").and_then(Value::bool), Some(false));
    assert_eq!(entry.get("exit_code").and_then(Value::u64), Some(5));
}

#[test]
fn a_newer_epoch_replaces_an_older_is_refused() {
    let inside = Inside::start();
    let mut first = inside.connect(5);
    let mut older = inside.connect(4);
    assert_eq!((older.epoch, older.frame()), (5, None));
    assert_eq!(first.call("hello", Pack::default().map(0)).number("incarnation"), 7);
    let mut newer = inside.connect(6);
    assert_eq!((newer.epoch, first.frame()), (6, None));
    assert_eq!(newer.call("hello", Pack::default().map(0)).number("incarnation"), 7);
}

#[test]
fn a_protocol_error_costs_the_connection_only() {
    let inside = Inside::start();
    let mut client = inside.connect(1);
    client.send(Kind::Reply, 1, b"\xc0");
    assert_eq!(client.frame(), None);
    assert_eq!(inside.connect(1).shell("echo alive").streams[1], b"alive\n");
}

#[test]
fn output_is_bounded_by_limit_and_by_credit() {
    let inside = Inside::start();
    let mut client = inside.connect(1);
    let limited = Exec::line(b"head -c 300000 /dev/zero; head -c 10 /dev/zero >&2");
    let result = client.exec(limited.with("max_output_bytes", Pack::default().uint(100_000)));
    assert_eq!((result.streams[1].len(), result.streams[2].len()), (100_000, 10));
    assert_eq!((result.number("stdout_bytes"), result.number("stderr_bytes")), (300_000, 10));
    let truncated = |key| result.value().get(key).and_then(Value::bool);
    assert_eq!((truncated("stdout_truncated"), truncated("stderr_truncated")), (Some(true), Some(false)));
    let merged = client.exec(Exec::line(b"echo a; echo b >&2; echo c").with("merge_stderr", yes()));
    assert_eq!(merged.streams[1], b"a\nb\nc\n");
    client.returns_credit = false;
    let stream = client.open("exec", Exec::line(b"seq 1 1000000").0.into());
    let (mut received, mut frames) = (0, 0);
    while received < STREAM_CREDIT as usize {
        let (kind, _, payload) = client.frame().expect("open");
        assert_eq!(kind, Kind::Data);
        received += payload.len();
        frames += 1;
    }
    assert_eq!(received, STREAM_CREDIT as usize);
    let other = client.open("hello", Pack::default().map(0));
    assert_eq!(
        client.frame().map(|f| (f.0, f.1)),
        Some((Kind::Reply, other)),
        "nothing without credit, but others go on"
    );
    client.returns_credit = true;
    client.credit(stream, CONNECTION_CREDIT as usize);
    let rest = client.finish(stream);
    assert_eq!(received - frames + rest.streams[1].len(), 6_888_896);
}

#[test]
fn deadlines_kill_the_whole_tree() {
    let inside = Inside::start();
    let mut client = inside.connect(1);
    let seconds = |s| Pack::default().float(s);
    let tree =
        Exec::line(b"echo begun; (setsid sleep 1000 &) ; trap '' TERM; sleep 1000").with("timeout", seconds(0.3));
    let result = client.exec(tree);
    assert_eq!((result.code(), result.text("signal"), result.text("timed_out")), (137, Some("KILL"), Some("deadline")));
    assert_eq!(result.streams[1], b"begun\n");
    let idle = Exec::line(b"while :; do echo x; sleep 0.05; [ $((n=n+1)) = 10 ] && sleep 100; done")
        .with("idle_timeout", seconds(0.5));
    let result = client.exec(idle);
    assert_eq!((result.code(), result.text("timed_out"), result.streams[1].len()), (137, Some("idle"), 20));
    if inside.cgroup.is_some() {
        // in the tests' PID namespace /proc is the host's: look from outside, by the control groups
        let populated = || {
            let groups = std::fs::read_dir(inside.cgroup.as_deref().expect("cgroup")).expect("cgroup").flatten();
            groups
                .filter(|g| std::fs::read_to_string(g.path().join("cgroup.procs")).is_ok_and(|p| !p.is_empty()))
                .count()
        };
        let limit = std::time::Instant::now() + Duration::from_secs(10);
        while populated() > 0 {
            assert!(std::time::Instant::now() < limit, "processes outlived their deadline");
            std::thread::yield_now();
        }
    }
}

#[test]
fn a_stopped_clock_ends_nothing() {
    let inside = Inside::start();
    let mut client = inside.connect(1);
    let nothing = || Pack::default().map(0);
    let line = b"echo begun; until [ -e go ]; do sleep 0.02; done; echo end";
    let exec = Exec::new("ex-slow").with("line", bytes(line)).with("timeout", Pack::default().float(1.0));
    let stream = client.open("exec", exec.0.into());
    assert_eq!(client.frame(), Some((Kind::Data, stream, b"\x01begun\n".to_vec())));
    client.call("clock.stop", nothing());
    client.call("clock.stop", nothing());
    std::thread::sleep(Duration::from_millis(1500)); // the pause: longer than the command may take
    let mut client = inside.connect(2);
    std::fs::write(inside.path("go"), "").expect("go");
    client.call("clock.start", nothing());
    client.call("clock.start", nothing());
    let result = client.call("exec.attach", Fields::default().with("exec_id", text("ex-slow")).into());
    assert_eq!((result.code(), result.text("timed_out"), &result.streams[1][..]), (0, None, &b"begun\nend\n"[..]));
    let late = Exec::line(b"sleep 100").with("timeout", Pack::default().float(0.2));
    assert_eq!(client.exec(late).text("timed_out"), Some("deadline"), "it goes again");
}

#[test]
fn background_children_hold_nothing_up_and_see_no_sigpipe() {
    let inside = Inside::start();
    let mut client = inside.connect(1);
    let started = std::time::Instant::now();
    let line = b"(read x <gate; i=0; while [ $i -lt 3000 ]; do echo 0123456789012345678901234567890123456789 || exit; i=$((i+1)); done; echo ok >done) & echo main";
    let fifo = os::cstring(inside.path("gate").as_os_str().as_encoded_bytes()).expect("path");
    assert_eq!(unsafe { libc::mkfifo(fifo.as_ptr(), 0o600) }, 0);
    let result = client.exec(Exec::line(line));
    assert_eq!((result.code(), &result.streams[1][..]), (0, &b"main\n"[..]));
    assert!(started.elapsed() < Duration::from_secs(2));
    std::fs::write(inside.path("gate"), "go\n").expect("gate");
    let limit = std::time::Instant::now() + Duration::from_secs(20);
    while !inside.path("done").exists() {
        assert!(std::time::Instant::now() < limit, "the child could not write on");
        std::thread::yield_now();
    }
}

#[test]
fn orphans_are_reaped_by_the_thousand() {
    let inside = Inside::start();
    let mut client = inside.connect(1);
    let result = client.shell("for i in $(seq 1 2000); do (:) & done; exit 9");
    assert_eq!(result.code(), 9);
    let aether = inside.aether;
    let limit = std::time::Instant::now() + Duration::from_secs(20);
    let children = || std::fs::read_to_string(format!("/proc/{aether}/task/{aether}/children")).expect("aether lives");
    while !children().trim().is_empty() {
        assert!(std::time::Instant::now() < limit, "zombies left: {}", children());
        std::thread::yield_now();
    }
    assert_eq!(client.shell("exit 4").code(), 4);
}

#[test]
fn detached_written_to_and_signalled() {
    let inside = Inside::start();
    let mut client = inside.connect(1);
    let follow = Pack::default().bool(false);
    let command = Exec::new("ex-d")
        .with("line", bytes(b"trap 'echo caught; exit 6' USR1; while read x; do echo \"$x\"; done; sleep 1000 & wait"));
    let started = client.exec(command.with("detached", yes()).with("follow", follow).with("stdin_open", yes()));
    assert!(started.number("pid") > 1);
    let id = || Fields::default().with("exec_id", text("ex-d"));
    client.call("exec.write", id().with("data", bytes(b"hello\n")).into()).value();
    let stream = client.open("exec.attach", id().into());
    assert_eq!(client.frame(), Some((Kind::Data, stream, b"\x01hello\n".to_vec())));
    client.call("exec.close_stdin", id().into()).value();
    assert_eq!(client.call("exec.write", id().with("data", bytes(b"x")).into()).fault().0, "conflict");
    client.call("exec.signal", id().with("signal", Pack::default().uint(10)).into()).value();
    let end = client.call("exec.attach", id().into());
    assert_eq!((end.code(), &end.streams[1][..]), (6, &b"hello\ncaught\n"[..]));
    client.call("exec.signal", id().with("signal", Pack::default().uint(15)).into()).value();
    client.call("exec.signal", id().with("signal", Pack::default().uint(9)).into()).value();
    assert_eq!(
        client.call("exec.signal", id().with("signal", Pack::default().uint(65)).into()).fault().0,
        "invalid_request"
    );
}

#[test]
fn files_are_written_whole_and_read_in_parts() {
    let inside = Inside::start();
    let mut client = inside.connect(1);
    let file = inside.path("a/b/c \u{e9}\n.txt");
    let big: Vec<u8> = (0..3_000_000u32).map(|i| (i % 253) as u8).collect();
    let stream = client.open("fs.write", path(&file).into());
    client.data(stream, &big[..60_000]);
    client.call("hello", Pack::default().map(0)).value();
    assert!(!file.exists(), "not there before it is whole");
    client.send(Kind::Cancel, stream, b"");
    assert_eq!(client.upload("fs.write", path(&file), &big).number("size"), 3_000_000);
    let stat = client.call("fs.stat", path(&file).into());
    assert_eq!((stat.text("kind"), stat.number("size"), stat.number("mode")), (Some("file"), 3_000_000, 0o644));
    let whole = client.call("fs.read", path(&file).into());
    assert!(whole.streams[0] == big && whole.number("size") == 3_000_000);
    let (offset, length) = (Pack::default().uint(2_999_990), Pack::default().uint(100));
    let part = client.call("fs.read", path(&file).with("offset", offset).with("length", length).into());
    assert_eq!(part.streams[0], big[2_999_990..]);
}

#[test]
fn an_aborted_upload_leaves_nothing_and_replacing_keeps_the_mode() {
    let inside = Inside::start();
    let mut client = inside.connect(1);
    std::fs::create_dir(inside.path("d")).expect("directory");
    std::fs::write(inside.path("d/f"), "old").expect("file");
    std::fs::set_permissions(inside.path("d/f"), std::os::unix::fs::PermissionsExt::from_mode(0o751)).expect("mode");
    let stream = client.open("fs.write", path(&inside.path("d/f")).into());
    client.data(stream, b"half");
    client.send(Kind::Cancel, stream, b"");
    client.call("hello", Pack::default().map(0)).value();
    let names = || std::fs::read_dir(inside.path("d")).expect("directory").count();
    assert_eq!((names(), std::fs::read(inside.path("d/f")).expect("file")), (1, b"old".to_vec()));
    let stream = client.open("fs.write", path(&inside.path("d/f")).into());
    client.data(stream, b"new");
    client.send(Kind::End, stream, b"");
    client.finish(stream).value();
    let stat = client.call("fs.stat", path(&inside.path("d/f")).into());
    assert_eq!((names(), stat.number("mode"), stat.number("size")), (1, 0o751, 3));
}

#[test]
fn moves_go_across_mounts() {
    let inside = Inside::start();
    let mut client = inside.connect(1);
    let far = tempfile_on("/dev/shm");
    let move_to = |source: &Path, target: &Path| {
        let bytes_of = |path: &Path| bytes(path.as_os_str().as_encoded_bytes());
        Fields::default().with("source", bytes_of(source)).with("target", bytes_of(target))
    };
    std::fs::write(inside.path("file"), vec![9; 2_500_000]).expect("file");
    std::fs::set_permissions(inside.path("file"), std::os::unix::fs::PermissionsExt::from_mode(0o640)).expect("mode");
    client.call("fs.move", move_to(&inside.path("file"), &inside.path("near")).into()).value();
    client.call("fs.move", move_to(&inside.path("near"), &far).into()).value();
    assert!(!inside.path("near").exists() && std::fs::read(&far).expect("file") == vec![9; 2_500_000]);
    assert_eq!(client.call("fs.stat", path(&far).into()).number("mode"), 0o640);
    client.call("fs.move", move_to(&far, &inside.path("back")).into()).value();
    assert!(!far.exists() && inside.path("back").exists());
    assert_eq!(client.call("fs.move", move_to(&far, &inside.path("x")).into()).fault().0, "file_not_found");
}

fn tempfile_on(dir: &str) -> PathBuf {
    Path::new(dir).join(format!("dsec-aether-{}-{}", std::process::id(), NUMBER.fetch_add(1, Ordering::Relaxed)))
}

/// Requests whose parameters are noise: errors, closed connections, but never an aether that is gone.
#[test]
fn no_request_ends_aether() {
    let inside = Inside::start();
    let mut state = 0x9e37_79b9_7f4a_7c15u64;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state as usize
    };
    let methods = [
        "hello",
        "exec",
        "exec.attach",
        "exec.write",
        "exec.close_stdin",
        "exec.signal",
        "exec.list",
        "fs.stat",
        "fs.list",
        "fs.read",
        "fs.write",
        "fs.mkdir",
        "fs.move",
        "fs.tar",
        "fs.untar",
        "fs.remove",
    ];
    let names = [
        "path",
        "exec_id",
        "argv",
        "line",
        "cwd",
        "env",
        "user",
        "stdin",
        "timeout",
        "cursor",
        "signal",
        "data",
        "depth",
        "offset",
        "length",
        "mode",
        "owner",
        "source",
        "target",
        "recursive",
        "max_output_bytes",
        "stdin_open",
        "follow",
    ];
    for _ in 0..60 {
        let mut client = inside.connect(1);
        for _ in 0..10 {
            let mut params = Fields::default();
            for _ in 0..next() % 8 {
                let value = match next() % 8 {
                    0 => Pack::default().uint(next() as u64),
                    1 => Pack::default().float(f64::from_bits(next() as u64)),
                    2 => Pack::default().nil(),
                    3 => text("ex-noise"),
                    4 => bytes(b"noise/\xff"),
                    5 => Pack::default().array(2).bin(b"true").uint(3),
                    6 => Pack::default().map(1).str("PATH").str(""),
                    _ => yes(),
                };
                params = params.with(names[next() % names.len()], value);
            }
            let stream = client.open(methods[next() % methods.len()], params.into());
            client.data(stream, &next().to_le_bytes());
            if next() % 2 == 0 {
                client.send(if next() % 2 == 0 { Kind::End } else { Kind::Cancel }, stream, b"");
            }
        }
        client.call("hello", Pack::default().map(0)).value();
        let _ = client.socket.write_all(&(0..64).map(|_| next() as u8).collect::<Vec<u8>>());
    }
    assert_eq!(inside.connect(1).shell("echo alive").streams[1], b"alive\n");
}

#[test]
fn file_errors_have_kinds() {
    let inside = Inside::start();
    let mut client = inside.connect(1);
    std::fs::write(inside.path("file"), "x").expect("file");
    std::os::unix::fs::symlink("loop", inside.path("loop")).expect("link");
    std::os::unix::fs::symlink("/proc/self/fd/5/x", inside.path("magic")).expect("link");
    let fifo = os::cstring(inside.path("fifo").as_os_str().as_encoded_bytes()).expect("path");
    assert_eq!(unsafe { libc::mkfifo(fifo.as_ptr(), 0o600) }, 0);
    for (method, name, kind) in [
        ("fs.read", "none", "file_not_found"),
        ("fs.read", "", "is_a_directory"),
        ("fs.read", "file/x", "not_a_directory"),
        ("fs.read", "loop", "file_invalid"),
        ("fs.read", "fifo", "file_invalid"),
        ("fs.write", "fifo", "file_invalid"),
        ("fs.write", "file/x", "not_a_directory"),
        ("fs.write", "magic", "file_invalid"),
        ("fs.stat", "magic", "file_invalid"),
        ("fs.mkdir", "file", "file_exists"),
        ("fs.mkdir", "a/b", "file_not_found"),
    ] {
        let (found, message) = client.call(method, path(&inside.path(name)).into()).fault();
        assert!(found == kind && message.contains(name), "{method} {name}: {found}: {message}");
    }
    std::fs::set_permissions(inside.path("file"), std::os::unix::fs::PermissionsExt::from_mode(0o600)).expect("mode");
    let stranger = || path(&inside.path("file")).with("user", text("4321"));
    assert_eq!(client.call("fs.read", stranger().into()).fault().0, "file_permission");
    assert_eq!(client.call("fs.write", stranger().into()).fault().0, "file_permission");
    assert_eq!(client.call("fs.read", path(&inside.path("file")).into()).streams[0], b"x", "and root again");
}

/// Path, kind and target of each record of a list.
fn infos(mut bytes: &[u8]) -> Vec<(Vec<u8>, String, Option<Vec<u8>>)> {
    let mut found = Vec::new();
    while let Some((size, rest)) = bytes.split_first_chunk() {
        let (record, rest) = rest.split_at(u32::from_le_bytes(*size) as usize);
        let value = Value::check(record).expect("a map");
        let field = |key| value.get(key).and_then(Value::bytes);
        let kind = value.get("kind").and_then(Value::str).expect("kind").to_owned();
        found.push((field("path").expect("path").to_vec(), kind, field("target").map(<[u8]>::to_vec)));
        bytes = rest;
    }
    found
}

fn make_tree(dir: &Path) {
    use std::os::unix::ffi::OsStrExt;
    let name = |bytes: &[u8]| dir.join(std::ffi::OsStr::from_bytes(bytes));
    std::fs::create_dir_all(name(b"b/deep/er")).expect("directories");
    std::fs::write(name(b"a"), vec![b'a'; 513]).expect("file");
    std::fs::write(name(b"empty"), b"").expect("file");
    std::fs::write(name(b"b/x \xff\n"), b"name of any bytes").expect("file");
    std::fs::write(name(&[&[b'n'; 150][..], b"\xfe"].concat()), vec![7; 200_000]).expect("long name");
    std::fs::hard_link(name(b"a"), name(b"b/hard")).expect("link");
    std::os::unix::fs::symlink("../a", name(b"b/link")).expect("link");
    std::os::unix::fs::symlink("/etc/passwd", name(b"out")).expect("link");
    std::os::unix::fs::symlink("t".repeat(180), name(b"far")).expect("link");
    std::fs::set_permissions(name(b"empty"), std::os::unix::fs::PermissionsExt::from_mode(0o4751)).expect("mode");
    std::fs::set_permissions(name(b"b/deep"), std::os::unix::fs::PermissionsExt::from_mode(0o710)).expect("mode");
    let fifo = os::cstring(name(b"fifo").as_os_str().as_encoded_bytes()).expect("path");
    assert_eq!(unsafe { libc::mkfifo(fifo.as_ptr(), 0o600) }, 0);
}

#[test]
fn lists_are_sorted_and_as_deep_as_asked() {
    let inside = Inside::start();
    let mut client = inside.connect(1);
    let tree = inside.path("tree");
    make_tree(&tree);
    let flat = client.call("fs.list", path(&tree).into());
    let found = infos(&flat.streams[0]);
    assert_eq!((flat.number("count"), found.len()), (7, 7));
    assert!(found.is_sorted() && found.iter().all(|(path, ..)| path.starts_with(tree.as_os_str().as_encoded_bytes())));
    let kinds: Vec<&str> = found.iter().map(|(_, kind, _)| kind.as_str()).collect();
    assert_eq!(kinds, ["file", "directory", "file", "symlink", "fifo", "file", "symlink"]);
    assert_eq!(found[6].2.as_deref(), Some(&b"/etc/passwd"[..]));
    let deep = client.call("fs.list", path(&tree).with("depth", Pack::default().uint(2)).into());
    assert_eq!(deep.number("count"), 11, "b has four entries, er is one deeper");
    assert_eq!(client.call("fs.list", path(&tree.join("a")).into()).fault().0, "not_a_directory");
    assert_eq!(client.call("fs.list", path(&tree.join("none")).into()).fault().0, "file_not_found");
}

#[test]
fn removing_follows_no_link() {
    let inside = Inside::start();
    let mut client = inside.connect(1);
    let tree = inside.path("tree");
    make_tree(&tree);
    std::fs::create_dir(inside.path("kept")).expect("directory");
    std::fs::write(inside.path("kept/file"), "x").expect("file");
    std::os::unix::fs::symlink("../kept", tree.join("to-kept")).expect("link");
    (0..3000).for_each(|i| std::fs::write(tree.join(format!("b/deep/many-{i}")), "").expect("file"));
    assert_eq!(client.call("fs.remove", path(&tree).into()).fault().0, "file_exists");
    client.call("fs.remove", path(&tree).with("recursive", yes()).into()).value();
    assert!(!tree.exists() && inside.path("kept/file").exists());
    assert_eq!(client.call("fs.remove", path(&tree).into()).fault().0, "file_not_found");
    client.call("fs.remove", path(&inside.path("kept/file")).into()).value();
    client.call("fs.remove", path(&inside.path("kept")).into()).value();
}

#[test]
fn a_tree_goes_out_as_tar_and_in_again() {
    let inside = Inside::start();
    let mut client = inside.connect(1);
    let (tree, copy) = (inside.path("tree"), inside.path("some/copy"));
    make_tree(&tree);
    let out = client.call("fs.tar", path(&tree).into());
    assert_eq!(out.number("entries"), 11, "all but the FIFO");
    std::fs::write(inside.path("tree.tar"), &out.streams[0]).expect("file");
    let listed = client.shell("tar -tf tree.tar | wc -l; tar --compare -f tree.tar -C tree && echo same");
    assert_eq!(std::str::from_utf8(&listed.streams[1]), Ok("11\nsame\n"), "as GNU tar sees it");
    assert_eq!(client.upload("fs.untar", path(&copy), &out.streams[0]).number("entries"), 11);
    let same = client.shell("rm tree/fifo; diff -r --no-dereference tree some/copy && tar --compare -f tree.tar -C some/copy && stat -c %h some/copy/a");
    assert_eq!(std::str::from_utf8(&same.streams[1]), Ok("2\n"), "{same:?}");
    let gnu = client.exec(Exec::line(b"tar -C tree --format=gnu -cf - ."));
    assert_eq!(client.upload("fs.untar", path(&inside.path("gnu")), &gnu.streams[1]).number("entries"), 11);
    assert_eq!(client.shell("diff -r --no-dereference tree gnu").code(), 0);
    let single = client.call("fs.tar", path(&tree.join("a")).into());
    assert_eq!((single.number("entries"), single.streams[0].len()), (1, 512 + 1024 + 1024));
}

/// One entry with its body, as a tar stream would have it.
fn entry(name: &[u8], flag: u8, link: &[u8], body: &[u8]) -> Vec<u8> {
    let mut out = Vec::new();
    tar::put_block(&mut out, name, flag, 0o644, (0, 0), body.len() as u64, 0, link);
    out.extend_from_slice(body);
    out.resize(out.len().next_multiple_of(tar::BLOCK), 0);
    out
}

#[test]
fn no_archive_writes_outside_its_target() {
    let inside = Inside::start();
    let mut client = inside.connect(1);
    let (target, outside) = (inside.path("target"), inside.path("outside"));
    std::fs::create_dir_all(&target).expect("directory");
    std::fs::create_dir_all(&outside).expect("directory");
    std::fs::write(outside.join("file"), "untouched").expect("file");
    let to_outside = outside.as_os_str().as_encoded_bytes();
    let file = [to_outside, b"/file"].concat();
    for (archive, kind) in [
        (entry(b"../outside/file", b'0', b"", b"evil"), Some("file_invalid")),
        (entry(b"a/../../outside/file", b'0', b"", b"evil"), Some("file_invalid")),
        (entry(&file, b'0', b"", b"lands below the target"), None),
        ([entry(b"l", b'2', to_outside, b""), entry(b"l/file", b'0', b"", b"evil")].concat(), Some("not_a_directory")),
        ([entry(b"d", b'2', b"../outside", b""), entry(b"d", b'5', b"", b"")].concat(), Some("not_a_directory")),
        ([entry(b"f", b'2', &file, b""), entry(b"f", b'0', b"", b"replaces the link")].concat(), None),
        (entry(b"h", b'1', b"../outside/file", b""), Some("file_invalid")),
        ([entry(b"m", b'2', to_outside, b""), entry(b"h", b'1', b"m/file", b"")].concat(), Some("not_a_directory")),
        (entry(b"dev", b'3', b"", b""), None),
        (entry(b"sparse", b'S', b"", b""), Some("file_invalid")),
        (entry(b"cut", b'0', b"", b"body")[..514].to_vec(), Some("file_invalid")),
        (entry(b"sum", b'0', b"", b"").iter().map(|b| b ^ 1).collect(), Some("file_invalid")),
        ([entry(b"x", b'x', b"", b"9999999 path=x\n"), entry(b"y", b'0', b"", b"")].concat(), Some("file_invalid")),
    ] {
        let result = client.upload("fs.untar", path(&target), &archive);
        assert_eq!(
            result.error.is_some().then(|| result.fault().0).as_deref(),
            kind,
            "{:?}",
            String::from_utf8_lossy(&archive[..20])
        );
    }
    let left: Vec<_> = std::fs::read_dir(&outside).expect("directory").flatten().map(|e| e.file_name()).collect();
    assert_eq!((left.len(), std::fs::read(outside.join("file")).expect("file")), (1, b"untouched".to_vec()));
    assert_eq!(std::fs::read(target.join("f")).expect("file"), b"replaces the link");
    assert!(!target.join("cut").exists() && !target.join("dev").exists());
}

/// `fs.untar` of a difference.
fn patch(client: &mut Client, target: &Path, keep: &[&str], archive: &[u8]) -> Result {
    let record = |path: &&str| {
        let rest = format!(" DSEC.keep={path}\n");
        format!("{}{rest}", rest.len() + 2)
    };
    let kept: String = keep.iter().map(record).collect();
    let archive = [entry(b"kept", b'g', b"", kept.as_bytes()), archive.to_vec()].concat();
    client.upload("fs.untar", path(target).with("whiteouts", yes()), &archive)
}

#[test]
fn a_difference_removes_replaces_and_keeps() {
    let inside = Inside::start();
    let mut client = inside.connect(1);
    let tree = inside.path("tree");
    let file = |name: &str, text: &str| {
        std::fs::create_dir_all(tree.join(name).parent().expect("parent")).expect("directory");
        std::fs::write(tree.join(name), text).expect("file");
    };
    for name in ["gone", "gone-tree/a/b", "opaque/old", "opaque/kept/x", "opaque/sub/kept", "was-tree/x", "kept-file"] {
        file(name, "old");
    }
    file("was-file", "old");
    std::os::unix::fs::symlink("opaque", tree.join("was-link")).expect("link");
    let archive = [
        entry(b".wh.gone", b'0', b"", b""),
        entry(b".wh.never-there", b'0', b"", b""),
        entry(b"no/such/.wh.directory", b'0', b"", b""),
        entry(b".wh.gone-tree", b'0', b"", b""),
        entry(b"opaque/.wh..wh..opq", b'0', b"", b""),
        entry(b"opaque/new", b'0', b"", b"new"),
        entry(b"was-tree", b'0', b"", b"a file now"),
        entry(b"was-file", b'5', b"", b""),
        entry(b"was-file/x", b'0', b"", b"a directory now"),
        entry(b"was-link/.wh..wh..opq", b'0', b"", b""),
        entry(b"was-link", b'5', b"", b""),
        entry(b"was-link/x", b'0', b"", b"below no link"),
        entry(b".wh.kept-file", b'0', b"", b""),
        vec![0; 1024],
    ]
    .concat();
    let keep = ["opaque/kept", "opaque/sub/kept", "kept-file"];
    patch(&mut client, &tree, &keep, &archive).value();
    let left = client.shell("cd tree; find . -type f | sort | xargs grep -H .").streams[1].clone();
    assert_eq!(
        String::from_utf8_lossy(&left),
        "./kept-file:old\n./opaque/kept/x:old\n./opaque/new:new\n./opaque/sub/kept:old\n\
         ./was-file/x:a directory now\n./was-link/x:below no link\n./was-tree:a file now\n"
    );
    for (archive, kind) in [
        (entry(b"kept-file", b'0', b"", b"evil"), "file_exists"),
        (entry(b"opaque/kept/x", b'0', b"", b"evil"), "file_exists"),
        (entry(b".wh.", b'0', b"", b""), "file_invalid"),
        (entry(b".wh...", b'0', b"", b""), "file_invalid"),
        (entry(b"../.wh.tree", b'0', b"", b""), "file_invalid"),
    ] {
        assert_eq!(patch(&mut client, &tree, &keep, &archive).fault().0, kind);
    }
    let plain = entry(b".wh.kept-file", b'0', b"", b"an ordinary name");
    client.upload("fs.untar", path(&tree), &plain).value();
    assert!(tree.join("kept-file").exists() && tree.join(".wh.kept-file").exists());
}

#[test]
fn large_trees_and_many_names_are_removed() {
    let inside = Inside::start();
    let mut client = inside.connect(1);
    let tree = inside.path("tree");
    std::fs::create_dir_all(tree.join("many")).expect("directory");
    (0..20_000).for_each(|i| std::fs::write(tree.join(format!("many/{i}")), "").expect("file"));
    let archive = [entry(b".wh.many", b'0', b"", b""), entry(b"after", b'0', b"", b"x"), vec![0; 1024]].concat();
    assert_eq!(patch(&mut client, &tree, &[], &archive).number("entries"), 1);
    assert!(!tree.join("many").exists() && tree.join("after").exists());
    let whiteouts: Vec<u8> = (0..3000).flat_map(|i| entry(format!("d/.wh.{i}").as_bytes(), b'0', b"", b"")).collect();
    std::fs::create_dir(tree.join("d")).expect("directory");
    (0..3001).for_each(|i| std::fs::write(tree.join(format!("d/{i}")), "").expect("file"));
    patch(&mut client, &tree, &[], &whiteouts).value();
    assert_eq!(std::fs::read_dir(tree.join("d")).expect("directory").count(), 1);
}

#[test]
fn mutated_archives_end_in_errors_at_worst() {
    let inside = Inside::start();
    let mut client = inside.connect(1);
    make_tree(&inside.path("tree"));
    std::fs::remove_file(inside.path("tree/a")).expect("file");
    let whole = client.call("fs.tar", path(&inside.path("tree")).into()).streams[0].clone();
    let mut state = 88_172_645_463_325_252u64;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state as usize
    };
    for round in 0..200 {
        let mut bytes = whole.clone();
        for _ in 0..1 + next() % 3 {
            let block = next() % (bytes.len() / 512) * 512;
            bytes[block + next() % 512] = next() as u8;
            if bytes[block + 257..block + 262] == *b"ustar" {
                bytes[block + 148..block + 156].fill(b' '); // a checksum that fits, so that it gets further
                let sum: u32 = bytes[block..block + 512].iter().map(|b| u32::from(*b)).sum();
                bytes[block + 148..block + 156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
            }
        }
        let result = client.upload("fs.untar", path(&inside.path("fuzz")), &bytes);
        assert!(result.reply.is_some() || result.error.is_some(), "round {round}");
    }
    assert_eq!(client.shell("rm -rf fuzz; echo alive").streams[1], b"alive\n");
}

#[test]
fn a_command_that_was_forgotten_is_not_run_again() {
    let inside = Inside::start();
    let mut client = inside.connect(1);
    let marks = inside.path("marks");
    let line = format!("printf x >> {}", marks.display());
    let once = |client: &mut Client| {
        let fields = Fields::default().with("exec_id", Pack::default().str("once"));
        client.call("exec", fields.with("line", Pack::default().bin(line.as_bytes())).into())
    };
    assert_eq!(once(&mut client).number("exit_code"), 0);
    for _ in 0..300 {
        assert_eq!(client.shell("").number("exit_code"), 0);
    }
    assert_eq!(once(&mut client).fault().0, "outcome_unknown");
    assert_eq!(std::fs::read(marks).expect("marks"), b"x");
}
