//! The launcher: the only process that creates sandboxes. Root, one thread, a mount table of its own.
//!
//! Everything it does is an answer to an event on one of its descriptors: a request of the edge, an answer of a PID 1, the
//! end of a PID 1. Slots are made ahead when there is nothing else to do.

mod ids;
mod memory;
mod poller;
mod pool;
mod removal;
mod root;
mod slot;
mod sweep;
mod teardown;
mod uppers;
mod verbs;
mod wire;
pub mod zygote;

use crate::cgroup::Cgroups;
use crate::sys::{self, now_us, process, At, Failure};
use poller::{Poller, Token};
use slot::{Promise, Slot, Tools};
use std::collections::{HashMap, VecDeque};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use wire::{Control, Incoming, Reply, Request};

/// A creation that is not done after this long is undone.
const CREATE_DEADLINE_US: u64 = 30_000_000;
/// Below this, descriptors are targets of the zygote's arrangement; the launcher keeps its own above.
const FIRST_FD: RawFd = 10;

struct Options {
    control: RawFd,
    run: String,
    name: String,
    uppers: String,
    pool: usize,
    ephemeral: bool,
}

const USAGE: &str = "usage: dsec-runtime launcher --control-fd N --run DIR --name EDGE \
                     --uppers btrfs:IMAGE:SIZE|dir:DIR [--pool N] [--ephemeral yes|no]";

fn parse(args: &[String]) -> Option<Options> {
    let mut options = Options {
        control: -1,
        run: String::new(),
        name: String::new(),
        uppers: String::new(),
        pool: 16,
        ephemeral: false,
    };
    for pair in args.chunks(2) {
        let [key, value] = pair else { return None };
        match key.as_str() {
            "--control-fd" => options.control = value.parse().ok()?,
            "--run" => options.run = value.clone(),
            "--name" => options.name = value.clone(),
            "--uppers" => options.uppers = value.clone(),
            "--pool" => options.pool = value.parse().ok()?,
            "--ephemeral" => options.ephemeral = value == "yes",
            _ => return None,
        }
    }
    let named = !options.name.is_empty() && options.name.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-');
    (options.control >= 0 && options.run.starts_with('/') && named).then_some(options)
}

/// Where a tenant of a slot is in its life.
enum Phase {
    /// PID 1 makes itself ready.
    Preparing,
    Pooled,
    /// PID 1 becomes a sandbox; the create request waits.
    Entering(Entering),
    Live,
    /// PID 1 ended by itself; groups and upper wait for `stop`.
    Ended,
    Dying(teardown::Dying),
}

struct Entering {
    request: i64,
    received_us: u64,
    sent_us: u64,
}

struct Tenant {
    slot: Slot,
    phase: Phase,
    /// Name and file name of the socket, once it is a sandbox (or about to be).
    sandbox: Option<(String, String)>,
    /// When it must have left its phase, where that has a deadline.
    deadline: u64,
    /// False for sandboxes of an earlier launcher: their end shows on the pidfd, but cannot be reaped.
    child: bool,
    /// The edge knows it: no sweep removes it.
    kept: bool,
    /// PID 1 was ended by the kernel for want of memory.
    agent_oom: bool,
}

struct Launcher {
    tools: Tools,
    control: Control,
    poller: Poller,
    run: String,
    layers: HashMap<String, OwnedFd>,
    ids: ids::Slots,
    tenants: HashMap<u32, Tenant>,
    names: HashMap<String, u32>,
    /// Slots ready for use.
    pool: VecDeque<u32>,
    pool_size: usize,
    /// No later edge will come for what this one leaves: it ends with the launcher.
    ephemeral: bool,
    /// Slots whose PID 1 is ordered from the zygote, in order; and how many of these and later ones are not ready yet.
    begun: VecDeque<slot::Begun>,
    preparing: usize,
    entering: usize,
    /// Creations that wait for a slot, with the time they came.
    queue: VecDeque<(Box<Request>, u64)>,
    /// When the last sandbox was asked for.
    last_create_us: u64,
    /// Set by a failure to make a slot; the next creation tries again.
    refill_failed: bool,
    /// What the last creation asked for: what the next probably will.
    usual: Option<Promise>,
    /// Deadlines in order, with their slots. One counts only if it is (still) its tenant's: numbers are used again.
    deadlines: VecDeque<(u64, u32)>,
    retries: VecDeque<(u64, u32)>,
    freezes: Vec<verbs::Freeze>,
    memory: memory::Memory,
    removals: removal::Removals,
    sweeps: Vec<sweep::Sweep>,
}

/// Entry point of `dsec-runtime launcher`; returns the exit status.
pub fn main(args: &[String]) -> i32 {
    let Some(options) = parse(args) else {
        sys::say(format_args!("{USAGE}"));
        return 2;
    };
    match Launcher::start(options) {
        Ok(mut launcher) => {
            launcher.run();
            0
        }
        Err(failure) => {
            sys::say(format_args!("launcher: {failure}"));
            1
        }
    }
}

fn log(failure: &Failure) {
    sys::say(format_args!("launcher: {failure}"));
}

/// Moves the control socket out of the way and fills what is below with /dev/null.
fn arrange_descriptors(control: RawFd) -> Result<(OwnedFd, OwnedFd), Failure> {
    let moved = unsafe { crate::sys!(SYS_fcntl, control, libc::F_DUPFD_CLOEXEC, FIRST_FD) };
    let moved = sys::own(moved.at("start", || format!("--control-fd {control}"))?);
    // SAFETY: the number was given to us to use, and is not used again.
    drop(unsafe { OwnedFd::from_raw_fd(control) });
    loop {
        let null =
            sys::openat(libc::AT_FDCWD, c"/dev/null", libc::O_RDWR, 0).at("start", || "open /dev/null".into())?;
        if null.as_raw_fd() > FIRST_FD {
            return Ok((moved, null));
        }
        std::mem::forget(null);
    }
}

impl Launcher {
    fn start(options: Options) -> Result<Self, Failure> {
        let (control, null) = arrange_descriptors(options.control)?;
        let _ = unsafe { crate::sys!(SYS_setsid) }; // a terminal's signals are for the edge, which closes our socket
        let _ = process::time_slice(100_000);
        raise_open_files();
        // SAFETY: sets this process's mask for new files.
        unsafe { libc::umask(0o022) };
        let sockets = root::open_sockets(&options.run)?;
        let cgroups = Cgroups::open(&options.name)?;
        // Nothing may be left of a start that fails.
        let made = Self::move_in(&options, &sockets, &null, &cgroups).inspect_err(|_| cgroups.leave());
        let (uppers, zygote) = made?;
        let memory = memory::Memory::new()?;
        let removals = removal::Removals::new(memory.bell())?;
        let mut launcher = Launcher {
            tools: Tools { cgroups, uppers, zygote, null, sockets },
            control: Control::new(control),
            poller: Poller::new().at("start", || "epoll_create".into())?,
            run: options.run,
            layers: HashMap::new(),
            ids: ids::Slots::new(),
            tenants: HashMap::new(),
            names: HashMap::new(),
            pool: VecDeque::new(),
            pool_size: options.pool,
            last_create_us: 0,
            ephemeral: options.ephemeral,
            begun: VecDeque::new(),
            preparing: 0,
            entering: 0,
            queue: VecDeque::new(),
            refill_failed: false,
            usual: None,
            deadlines: VecDeque::new(),
            retries: VecDeque::new(),
            freezes: Vec::new(),
            memory,
            removals,
            sweeps: Vec::new(),
        };
        launcher.poller.add(launcher.control.fd(), Token::Edge).at("start", || "watch the edge".into())?;
        launcher.poller.add(launcher.tools.zygote.fd(), Token::Zygote).at("start", || "watch the zygote".into())?;
        launcher.poller.add(launcher.memory.fd(), Token::Memory).at("start", || "watch the threads".into())?;
        launcher.adopt();
        Ok(launcher)
    }

    /// Uppers, private root, zygote.
    fn move_in(
        options: &Options,
        sockets: &OwnedFd,
        null: &OwnedFd,
        cgroups: &Cgroups,
    ) -> Result<(uppers::Uppers, zygote::Zygote), Failure> {
        let device = uppers::attach_device(&options.uppers)?;
        root::leave_host()?;
        let prepared = uppers::prepare(&device)?;
        root::build(&prepared.mount)?;
        unsafe { crate::sys!(SYS_fchdir, sockets.as_raw_fd()) }
            .at("start", || "enter the sockets' directory".into())?;
        let uppers = uppers::Uppers::open(prepared)?;
        let zygote = zygote::Zygote::start(null)?;
        cgroups.place_zygote(zygote.pid())?;
        // The mount holds the loop device now, and it goes with the last mount.
        drop(device);
        Ok((uppers, zygote))
    }

    /// Until the edge's end is closed.
    fn run(&mut self) {
        loop {
            let events = self.poller.wait(self.patience_us());
            let idle = events.is_empty();
            for token in events {
                match token {
                    Token::Edge => {
                        if !self.serve_edge() {
                            return self.leave();
                        }
                    }
                    Token::Zygote => {
                        if !self.zygote_answered() {
                            log(&Failure::new("clone", "the zygote has died", libc::ECHILD));
                            return self.leave();
                        }
                    }
                    Token::Memory => self.memory_moved(),
                    Token::Answer(slot) => self.pid1_answered(slot),
                    Token::End(slot) => self.pid1_ended(slot),
                }
            }
            self.control.flush();
            self.run_timers();
            self.refill(idle);
        }
    }

    /// How long there is nothing to do without an event.
    fn patience_us(&self) -> Option<u64> {
        let mut wait = None;
        if self.wants_slot() && !self.queue.is_empty() {
            return Some(0);
        }
        if self.entering == 0 && (self.wants_slot() || self.wants_spare()) {
            match self.leisure_in_us() {
                0 => return Some(0),
                us => wait = Some(us),
            }
        }
        if !self.freezes.is_empty() || self.control.waits() {
            return Some(1000);
        }
        let next = [self.deadlines.front(), self.retries.front()].into_iter().flatten().map(|(when, _)| *when).min();
        let next = next.map(|when| when.saturating_sub(now_us()));
        [wait, next].into_iter().flatten().min()
    }

    fn serve_edge(&mut self) -> bool {
        // A bounded number at a time, so that answers of newborns are not kept waiting by a burst of requests.
        for _ in 0..16 {
            match self.control.receive() {
                Incoming::Request(request, fds) => self.serve(request, fds),
                Incoming::Malformed(error) => {
                    self.control.send(&Reply::failed(-1, &Failure::new("request", error, libc::EPROTO)), None);
                }
                Incoming::Nothing => return true,
                Incoming::Closed => return false,
            }
        }
        true
    }

    fn run_timers(&mut self) {
        let now = now_us();
        while self.retries.front().is_some_and(|(when, _)| *when <= now) {
            if let Some((_, slot)) = self.retries.pop_front() {
                self.tear_down(slot);
            }
        }
        while self.deadlines.front().is_some_and(|(when, _)| *when <= now) {
            if let Some((when, slot)) = self.deadlines.pop_front() {
                if self.tenants.get(&slot).is_some_and(|tenant| tenant.deadline == when) {
                    self.expire(slot);
                }
            }
        }
        while self.queue.front().is_some_and(|(_, since)| since + CREATE_DEADLINE_US <= now) {
            if let Some((request, _)) = self.queue.pop_front() {
                let text = "no slot became free in 30 s; the machine is overloaded";
                self.control.send(&Reply::failed(request.id, &Failure::new("slot", text, libc::ETIMEDOUT)), None);
            }
        }
        self.check_freezes(now);
    }
}

/// As many descriptors as the hard limit allows.
fn raise_open_files() {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: reads and writes the structure given.
    unsafe {
        if libc::getrlimit(libc::RLIMIT_NOFILE, &mut limit) == 0 {
            limit.rlim_cur = limit.rlim_max;
            libc::setrlimit(libc::RLIMIT_NOFILE, &limit);
        }
    }
}
