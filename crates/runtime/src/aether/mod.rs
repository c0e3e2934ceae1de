//! Aether: PID 1 of every sandbox. One thread and one epoll, no signal handlers, no file of the image ever loaded.
//!
//! It takes connections of the edge on the one listener (`conn`), runs commands (`chronus`, `spawn`, `log`), serves files
//! (`files`, `tar`) and ports (`ports`), and reaps every orphan. Everything inside the sandbox is hostile to it: the files it reads, the
//! processes it runs, their output, their number.

mod chronus;
mod conn;
mod fault;
mod feed;
mod files;
#[cfg(any(test, fuzzing))]
pub mod fuzzing;
mod limits;
mod log;
mod ops;
mod os;
mod patch;
mod ports;
mod reasons;
mod spawn;
mod stage;
mod tar;
mod terminal;
mod untar;
mod users;
mod walk;
mod watch;

use crate::birth::Sandbox;
use chronus::Chronus;
use conn::{Conn, Context, Read};
use ops::Ops;
use os::{check, Epoll, Fd, Scratch};
use ports::Ports;
use watch::Watches;

/// What an epoll event is about: a kind and a number, in 64 bits.
mod token {
    pub const LISTENER: u32 = 1;
    pub const SIGNAL: u32 = 2;
    pub const CONN: u32 = 3;
    pub const PIPE: u32 = 4;
    pub const STATUS: u32 = 5;
    pub const STDIN: u32 = 6;
    pub const PORT: u32 = 7;
    pub const WATCH: u32 = 8;
    pub const REPORT: u32 = 9;
    pub const SCRIPT: u32 = 10;

    pub fn make(kind: u32, number: u32) -> u64 {
        u64::from(kind) << 32 | u64::from(number)
    }

    pub fn parts(token: u64) -> (u32, u32) {
        ((token >> 32) as u32, token as u32)
    }
}

/// Connections that have not sent their preamble yet; the oldest gives way.
const MAX_UNGREETED: usize = 4;
const EVENTS_A_TURN: usize = 64;

/// What requests work on, as they see it.
macro_rules! context {
    ($aether:expr) => {
        Context {
            chronus: &mut $aether.chronus,
            ports: &$aether.ports,
            watches: &$aether.watches,
            ops: &$aether.ops,
            epoll: &$aether.epoll,
        }
    };
}

struct Aether {
    epoll: Epoll,
    listener: Fd,
    signals: Fd,
    scratch: Scratch,
    chronus: Chronus,
    ports: Ports,
    watches: Watches,
    ops: Ops,
    conns: Vec<Conn>,
    epoch: u64,
    next_conn: u32,
    unreaped: bool,
    /// Processes ended since control groups were last looked at.
    ended: bool,
}

/// Serves a sandbox until the kernel ends the process.
pub fn serve(sandbox: Sandbox) -> ! {
    match Aether::new(sandbox) {
        Ok(mut aether) => loop {
            aether.turn();
        },
        Err(errno) => {
            let text = fault::describe(errno);
            let _ = os::write_all(2, format!("aether: cannot start: {text}\n").as_bytes());
            unsafe { libc::_exit(70) }
        }
    }
}

/// No signal reaches aether but the news of ended children, and those by descriptor.
fn prepare_signals() -> os::Result<Fd> {
    let (all, child) = (u64::MAX, 1u64 << (libc::SIGCHLD - 1));
    let default = [0u64; 4]; // struct sigaction of the kernel: SIG_DFL
    unsafe {
        check(libc::syscall(libc::SYS_rt_sigprocmask, libc::SIG_SETMASK, &all, 0, 8))?;
        for signal in 1..=64 {
            // what the one who started us ignored, commands would ignore too; KILL and STOP refuse, rightly
            libc::syscall(libc::SYS_rt_sigaction, signal, &default, 0, 8);
        }
        let flags = libc::SFD_CLOEXEC | libc::SFD_NONBLOCK;
        check(libc::syscall(libc::SYS_signalfd4, -1, &child, 8, flags)).map(|fd| Fd(fd as i32))
    }
}

/// Descriptors 0 to 3 are what a child builds its own on: what it needs before that must not be there.
fn occupy_low_descriptors() -> os::Result<()> {
    loop {
        let fd = os::open(libc::AT_FDCWD, c"/", libc::O_PATH, 0, 0)?;
        if fd.0 > 3 {
            return Ok(());
        }
        std::mem::forget(fd);
    }
}

impl Aether {
    fn new(sandbox: Sandbox) -> os::Result<Aether> {
        let Sandbox { birth, listener, epoll, oom_adj, spill, cgroup2, groups } = sandbox;
        unsafe {
            // freed memory goes back to the kernel, not to a pool of our own
            libc::mallopt(libc::M_MMAP_THRESHOLD, 64 * 1024);
            libc::mallopt(libc::M_TRIM_THRESHOLD, 64 * 1024);
            libc::mallopt(libc::M_TOP_PAD, 0);
            libc::umask(0o022);
        }
        let listener = Fd(listener);
        check(unsafe { libc::fcntl(listener.0, libc::F_SETFL, libc::O_NONBLOCK) })?;
        let signals = prepare_signals()?;
        occupy_low_descriptors()?;
        let epoll = Epoll::of(Fd(epoll));
        epoll.watch(listener.0, libc::EPOLLIN, token::make(token::LISTENER, 0))?;
        epoll.watch(signals.0, libc::EPOLLIN, token::make(token::SIGNAL, 0))?;
        let setting = spawn::Setting::new(oom_adj, cgroup2, groups);
        let chronus = Chronus::new(Box::leak(Box::new(birth)), setting, spill);
        let scratch = Scratch::new(log::MAX_RECORD + 8)?;
        let conns = Vec::new();
        Ok(Aether {
            epoll,
            listener,
            signals,
            scratch,
            chronus,
            ports: Ports::default(),
            watches: Watches::default(),
            ops: Ops::default(),
            conns,
            epoch: 0,
            next_conn: 0,
            unreaped: true,
            ended: false,
        })
    }

    fn turn(&mut self) {
        let mut more = false;
        let (mut context, scratch) = (context!(self), &mut self.scratch);
        self.conns.retain_mut(|conn| {
            let unfinished = conn.pump(scratch, &mut context);
            let alive = conn.flush(context.epoll);
            more |= unfinished && !conn.is_blocked();
            alive
        });
        if std::mem::take(&mut self.ended) {
            self.chronus.remove_groups(); // now that whoever waits has the result
        }
        let timeout = match more || self.unreaped {
            true => Some(0.0),
            false => {
                let ticks = [self.chronus.next_tick(), self.watches.next_tick()].into_iter().flatten();
                ticks.min_by(f64::total_cmp).map(|at| at - os::now())
            }
        };
        if timeout.is_none() && self.conns.iter().all(Conn::is_quiet) {
            self.scratch.release();
        }
        let mut buffer: [libc::epoll_event; EVENTS_A_TURN] = unsafe { std::mem::zeroed() };
        let count = self.epoll.wait(&mut buffer, timeout).len();
        for event in &buffer[..count] {
            self.event(event.u64, event.events as i32);
        }
        if std::mem::take(&mut self.unreaped) {
            self.ended = true;
            self.unreaped = self.chronus.reap(&mut self.scratch);
        }
        self.watches.tick(&self.epoll);
        if self.chronus.tick(&self.epoll) {
            let conns = &self.conns;
            self.chronus.forget(&|number| conns.iter().any(|conn| conn.follows(number)));
        }
    }

    fn event(&mut self, event: u64, events: i32) {
        let (kind, number) = token::parts(event);
        match kind {
            token::LISTENER => self.accept(),
            token::CONN => self.read(event),
            token::PIPE => self.chronus.on_pipe(number, &self.epoll, &mut self.scratch),
            token::STATUS => self.chronus.on_status(number),
            token::STDIN if events & (libc::EPOLLERR | libc::EPOLLHUP) != 0 => self.chronus.stdin_gone(number),
            token::STDIN => self.chronus.push_stdin(number, &self.epoll),
            token::REPORT => self.chronus.on_report(number, &mut self.scratch),
            token::SCRIPT if events & libc::EPOLLERR != 0 => self.chronus.script_gone(number),
            token::SCRIPT => self.chronus.push_script(number, &self.epoll),
            token::PORT => self.ports.on_event(number, events),
            token::WATCH => self.watches.on_event(&self.epoll),
            _ => {
                let _ = os::read(self.signals.0, &mut [0; 128]);
                self.unreaped = true;
            }
        }
    }

    fn accept(&mut self) {
        let flags = libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
        let null = std::ptr::null_mut();
        let accepted = check(unsafe { libc::accept4(self.listener.0, null, null.cast(), flags) });
        let Ok(fd) = accepted.map(|fd| Fd(fd as i32)) else { return };
        let token = token::make(token::CONN, self.next_conn);
        self.next_conn = self.next_conn.wrapping_add(1);
        if self.epoll.watch(fd.0, libc::EPOLLIN, token).is_err() {
            return;
        }
        if self.conns.iter().filter(|conn| !conn.greeted).count() >= MAX_UNGREETED {
            if let Some(oldest) = self.conns.iter().position(|conn| !conn.greeted) {
                self.conns.remove(oldest);
            }
        }
        self.conns.push(Conn::new(self.epoll.own(fd), token));
    }

    fn read(&mut self, token: u64) {
        let Some(at) = self.conns.iter().position(|conn| conn.token == token) else { return };
        let mut context = context!(self);
        match self.conns[at].read(&mut self.scratch, &mut context) {
            Read::Nothing => {}
            Read::Closed => drop(self.conns.remove(at)),
            Read::Greeting(preamble) => self.greet(at, preamble),
            Read::Successor(launcher) => {
                self.chronus.setting.groups.succeed(launcher);
                drop(self.conns.remove(at));
            }
        }
    }

    /// The newest epoch wins: an older client is told and closed, the connection that was there is replaced.
    fn greet(&mut self, at: usize, preamble: crate::link::Preamble) {
        let mut conn = self.conns.remove(at);
        if preamble.epoch >= self.epoch {
            self.epoch = preamble.epoch;
            self.conns.retain(|conn| !conn.greeted);
            let mut context = context!(self);
            if conn.greet(preamble, self.epoch, &mut context).is_ok() {
                self.conns.push(conn);
            }
        } else {
            conn.refuse(preamble, self.epoch, &self.epoll);
        }
    }
}

#[cfg(test)]
mod tests;
