//! The supervisor: starts the processes of a platform, and starts again those that die.
//!
//! It does nothing else, so that it is the last to die: it holds no sandbox and answers no request. It keeps the listening
//! socket of the API open, so that clients wait in its queue while an apiserver is being started, instead of being refused.
//! Its own death ends nothing; the next `dsec up` starts another one, which watches what it finds alive.

use crate::sys::{self, now_us, process, At, Errno, Failure};
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Command, Stdio};

const USAGE: &str = "usage: dsec-runtime supervise --pids DIR --logs DIR [--ready FD] [--lifeline FD] \
                     (--role NAME[:FD] PROGRAM ARGUMENT...)...";
/// Who dies younger than this, or before it serves, has died at once.
const YOUNG_US: u64 = 2_000_000;
/// So many deaths at once in a row, and it is not tried again.
const GIVE_UP: u32 = 10;
const FIRST_PAUSE_US: u64 = 100_000;
const LAST_PAUSE_US: u64 = 5_000_000;
/// From SIGTERM to SIGKILL: an edge removes thousands of sandboxes meanwhile.
const PATIENCE_US: u64 = 120_000_000;
/// For a process that is started once more only to clean up.
const START_US: u64 = 60_000_000;

struct Options {
    pids: PathBuf,
    logs: PathBuf,
    ready: RawFd,
    lifeline: RawFd,
    roles: Vec<Role>,
}

/// One process of the platform, and what became of those before it.
struct Role {
    name: String,
    words: Vec<String>,
    /// A descriptor that it inherits besides the lifeline, -1: none.
    keeps: RawFd,
    running: Option<Running>,
    /// When to start it (again).
    due: Option<u64>,
    /// Deaths at once in a row.
    quick: u32,
    served: bool,
    /// The last one did not end of its own will: it may have left something behind.
    crashed: bool,
}

struct Running {
    pidfd: OwnedFd,
    started_us: u64,
    /// Where it says that it serves, until it has said so or closed it.
    ready: Option<OwnedFd>,
    said: Vec<u8>,
}

fn parse(args: &[String]) -> Option<Options> {
    let mut parts = args.split(|word| word == "--role");
    let mut options =
        Options { pids: PathBuf::new(), logs: PathBuf::new(), ready: -1, lifeline: -1, roles: Vec::new() };
    for pair in parts.next()?.chunks(2) {
        let [key, value] = pair else { return None };
        match key.as_str() {
            "--pids" => options.pids = value.into(),
            "--logs" => options.logs = value.into(),
            "--ready" => options.ready = value.parse().ok()?,
            "--lifeline" => options.lifeline = value.parse().ok()?,
            _ => return None,
        }
    }
    for part in parts {
        let (first, words) = part.split_first()?;
        let (name, keeps) = first.split_once(':').unwrap_or((first, "-1"));
        let role = Role {
            name: name.into(),
            words: words.to_vec(),
            keeps: keeps.parse().ok()?,
            running: None,
            due: Some(0),
            quick: 0,
            served: false,
            crashed: false,
        };
        (!words.is_empty()).then(|| options.roles.push(role))?;
    }
    (options.pids.is_absolute() && options.logs.is_absolute() && !options.roles.is_empty()).then_some(options)
}

/// Entry point of `dsec-runtime supervise`; returns the exit status.
pub fn main(args: &[String]) -> i32 {
    let Some(options) = parse(args) else {
        sys::say(format_args!("{USAGE}"));
        return 2;
    };
    match Supervisor::start(options) {
        Ok(mut supervisor) => supervisor.run(),
        Err(failure) => {
            sys::say(format_args!("supervisor: {failure}"));
            1
        }
    }
}

struct Supervisor {
    pids: PathBuf,
    logs: PathBuf,
    /// Who started us, until everything serves.
    ready: Option<File>,
    lifeline: RawFd,
    signals: OwnedFd,
    roles: Vec<Role>,
}

/// What there is to wait for.
#[derive(Clone, Copy)]
enum Source {
    Signal,
    Lifeline,
    Ready(usize),
    End(usize),
}

impl Supervisor {
    fn start(options: Options) -> Result<Self, Failure> {
        let Options { pids, logs, ready, lifeline, roles } = options;
        for fd in roles.iter().map(|role| role.keeps).chain([ready, lifeline]).filter(|fd| *fd >= 0) {
            inherit(fd, false).at("start", || format!("descriptor {fd}"))?;
        }
        let signals = watch_signals().at("start", || "signalfd".into())?;
        // SAFETY: the number was given to us to use.
        let ready = (ready >= 0).then(|| unsafe { File::from_raw_fd(ready) });
        let mut supervisor = Supervisor { pids, logs, ready, lifeline, signals, roles };
        let own = std::process::id() as i32;
        supervisor.write_pid("supervisor", own, process::start_time(own).unwrap_or(0));
        let _ = std::fs::remove_file(supervisor.pids.join("given-up"));
        for at in 0..supervisor.roles.len() {
            supervisor.take_over(at);
        }
        Ok(supervisor)
    }

    /// Until it is told to end, or nothing is left to watch.
    fn run(&mut self) -> i32 {
        loop {
            for at in 0..self.roles.len() {
                if self.roles[at].due.is_some_and(|due| due <= now_us()) {
                    self.spawn(at);
                }
            }
            if self.roles.iter().all(|role| role.running.is_none() && role.due.is_none()) {
                self.remove_pid("supervisor");
                return 1;
            }
            let due = self.roles.iter().filter_map(|role| role.due).min();
            for source in self.wait(due) {
                match source {
                    Source::Signal | Source::Lifeline => return self.end(),
                    Source::Ready(at) => self.hear(at),
                    Source::End(at) => {
                        if !self.died(at) {
                            return self.end_unstarted(at);
                        }
                    }
                }
            }
        }
    }

    fn wait(&self, until: Option<u64>) -> Vec<Source> {
        let mut polls = vec![poll(self.signals.as_raw_fd())];
        let mut sources = vec![Source::Signal];
        if self.lifeline >= 0 {
            polls.push(poll(self.lifeline));
            sources.push(Source::Lifeline);
        }
        for (at, role) in self.roles.iter().enumerate() {
            let Some(running) = &role.running else { continue };
            if let Some(ready) = &running.ready {
                polls.push(poll(ready.as_raw_fd()));
                sources.push(Source::Ready(at));
            }
            polls.push(poll(running.pidfd.as_raw_fd()));
            sources.push(Source::End(at));
        }
        let us = until.map(|until| until.saturating_sub(now_us()));
        let limit =
            us.map(|us| libc::timespec { tv_sec: (us / 1_000_000) as i64, tv_nsec: (us % 1_000_000 * 1000) as i64 });
        let limit = limit.as_ref().map_or(std::ptr::null(), std::ptr::from_ref);
        let _ = unsafe { crate::sys!(SYS_ppoll, polls.as_mut_ptr(), polls.len(), limit, 0, 8) };
        polls.iter().zip(sources).filter(|(poll, _)| poll.revents != 0).map(|(_, source)| source).collect()
    }

    // -- lives --

    /// One that an earlier supervisor started, and that lives.
    fn take_over(&mut self, at: usize) {
        let name = self.roles[at].name.clone();
        let Ok(text) = std::fs::read_to_string(self.pids.join(&name)) else { return };
        let Some((pid, start)) = parse_pid(&text) else { return };
        let role = &mut self.roles[at];
        match process::open_started(pid, start).filter(|pidfd| !process::has_ended(pidfd)) {
            Some(pidfd) => {
                role.running = Some(Running { pidfd, started_us: now_us(), ready: None, said: Vec::new() });
                role.due = None;
                role.served = true;
                self.say_ready();
            }
            None => role.crashed = true,
        }
    }

    fn spawn(&mut self, at: usize) {
        self.roles[at].due = None;
        match self.try_spawn(at) {
            Ok((running, pid)) => {
                let start = process::start_time(pid).unwrap_or(0);
                self.write_pid(&self.roles[at].name, pid, start);
                self.roles[at].running = Some(running);
            }
            Err(error) => {
                sys::say(format_args!("supervisor: cannot start the {}: {error}", self.roles[at].name));
                self.again(at, true);
            }
        }
    }

    fn try_spawn(&self, at: usize) -> std::io::Result<(Running, i32)> {
        let role = &self.roles[at];
        let log = OpenOptions::new()
            .append(true)
            .create(true)
            .mode(0o600)
            .open(self.logs.join(format!("{}.log", role.name)))?;
        let (ours, theirs) = pipe()?; // what it starts may have its end for longer than it lives
        let mut command = Command::new(&role.words[0]);
        command.args(&role.words[1..]).args(["--ready", &theirs.as_raw_fd().to_string()]);
        if self.lifeline >= 0 {
            command.args(["--lifeline", &self.lifeline.to_string()]);
        }
        let inherited: Vec<RawFd> =
            [theirs.as_raw_fd(), self.lifeline, role.keeps].into_iter().filter(|fd| *fd >= 0).collect();
        command.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
        // SAFETY: system calls only.
        unsafe {
            command.pre_exec(move || {
                let (_, none) = (crate::sys!(SYS_setsid), 0u64);
                let _ = crate::sys!(SYS_rt_sigprocmask, libc::SIG_SETMASK, &raw const none, 0, 8);
                inherited
                    .iter()
                    .try_for_each(|fd| inherit(*fd, true))
                    .map_err(|e| std::io::Error::from_raw_os_error(e.0))
            });
        }
        let pid = command.spawn()?.id() as i32;
        let pidfd = process::pidfd_open(pid).map_err(|e| std::io::Error::from_raw_os_error(e.0))?;
        Ok((Running { pidfd, started_us: now_us(), ready: Some(ours), said: Vec::new() }, pid))
    }

    /// It says that it serves, or why it cannot.
    fn hear(&mut self, at: usize) {
        let role = &mut self.roles[at];
        let Some(running) = &mut role.running else { return };
        let Some(ready) = &running.ready else { return };
        let mut buffer = [0; 4096];
        match sys::read(ready.as_raw_fd(), &mut buffer) {
            Err(Errno(libc::EAGAIN)) => {}
            Ok(count) if count > 0 && running.said.len() < buffer.len() => running.said.extend(&buffer[..count]),
            _ => running.ready = None,
        }
        if running.said == b"ok" {
            running.ready = None;
            role.served = true;
            self.say_ready();
        }
    }

    /// Tells who started us, once all serve.
    fn say_ready(&mut self) {
        if self.roles.iter().all(|role| role.served) {
            if let Some(mut ready) = self.ready.take() {
                let _ = ready.write_all(b"ok");
            }
        }
    }

    /// False when it never came to serve at all, and somebody waits to hear why.
    fn died(&mut self, at: usize) -> bool {
        self.hear(at);
        let role = &mut self.roles[at];
        let Some(running) = &role.running else { return true };
        let status = process::reap(&running.pidfd).ok().flatten();
        role.crashed = status != Some(0);
        let unready = running.ready.is_some() || !running.said.is_empty() && running.said != b"ok";
        let at_once = unready || running.started_us + YOUNG_US > now_us();
        sys::say(format_args!("supervisor: the {} ended ({})", role.name, describe(status)));
        if !role.served && self.ready.is_some() {
            return false;
        }
        role.running = None;
        self.again(at, at_once);
        true
    }

    /// Starts it again after a pause that grows, or gives up.
    fn again(&mut self, at: usize, at_once: bool) {
        let role = &mut self.roles[at];
        role.quick = if at_once { role.quick + 1 } else { 1 };
        if role.quick >= GIVE_UP {
            let text = format!(
                "the {} died {GIVE_UP} times in a row right after its start: not tried again; see {}",
                role.name,
                self.logs.join(format!("{}.log", role.name)).display()
            );
            sys::say(format_args!("supervisor: {text}"));
            let _ = std::fs::write(self.pids.join("given-up"), text);
            return;
        }
        let pause = if role.quick == 1 { 0 } else { (FIRST_PAUSE_US << (role.quick - 2)).min(LAST_PAUSE_US) };
        role.due = Some(now_us() + pause);
    }

    // -- ends --

    /// A first start that failed: its own words go to who waits for them.
    fn end_unstarted(&mut self, at: usize) -> i32 {
        let role = &mut self.roles[at];
        let said = role.running.take().map(|running| running.said).unwrap_or_default();
        let text = format!("{}\n{}", role.name, String::from_utf8_lossy(&said));
        role.crashed = false; // what it had made it has removed, or the next start will
        let ready = self.ready.take();
        self.end();
        if let Some(mut ready) = ready {
            let _ = ready.write_all(text.as_bytes());
        }
        1
    }

    /// All of them, the last started first. One that crashed is started once more, since only it can remove what it left.
    fn end(&mut self) -> i32 {
        self.ready = None;
        for at in (0..self.roles.len()).rev() {
            self.roles[at].due = None;
            if self.roles[at].running.is_none() && self.roles[at].crashed && self.roles[at].name == "edge" {
                self.spawn(at);
                self.roles[at].due = None;
            }
            self.await_ready(at); // before that a signal would end it without its cleaning up
            let Some(running) = self.roles[at].running.take() else { continue };
            for (signal, patience) in [(libc::SIGTERM, PATIENCE_US), (libc::SIGKILL, 10_000_000)] {
                let _ = process::send_signal(&running.pidfd, signal);
                process::wait_readable(&running.pidfd, patience);
                if is_readable(&running.pidfd) {
                    break;
                }
            }
            if matches!(process::reap(&running.pidfd), Ok(Some(0)) | Err(_)) {
                self.remove_pid(&self.roles[at].name);
            }
        }
        self.remove_pid("supervisor");
        0
    }

    fn await_ready(&mut self, at: usize) {
        let deadline = now_us() + START_US;
        while now_us() < deadline {
            let Some(Running { pidfd, ready: Some(ready), .. }) = &self.roles[at].running else { return };
            let mut polls = [poll(ready.as_raw_fd()), poll(pidfd.as_raw_fd())];
            let limit = libc::timespec { tv_sec: 1, tv_nsec: 0 };
            let _ = unsafe { crate::sys!(SYS_ppoll, polls.as_mut_ptr(), polls.len(), &raw const limit, 0, 8) };
            if polls[0].revents != 0 {
                self.hear(at);
            } else if polls[1].revents != 0 {
                return;
            }
        }
    }

    // -- records --

    fn write_pid(&self, role: &str, pid: i32, start: u64) {
        let beside = self.pids.join(format!("{role}.new"));
        let written = std::fs::write(&beside, format!("{{\"pid\":{pid},\"start\":{start}}}"));
        if let Err(error) = written.and_then(|()| std::fs::rename(&beside, self.pids.join(role))) {
            sys::say(format_args!("supervisor: cannot record the {role}: {error}"));
        }
    }

    fn remove_pid(&self, role: &str) {
        let _ = std::fs::remove_file(self.pids.join(role));
    }
}

fn poll(fd: RawFd) -> libc::pollfd {
    libc::pollfd { fd, events: libc::POLLIN, revents: 0 }
}

fn is_readable(fd: &OwnedFd) -> bool {
    let mut one = poll(fd.as_raw_fd());
    let now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    let _ = unsafe { crate::sys!(SYS_ppoll, &raw mut one, 1, &raw const now, 0, 8) };
    one.revents != 0
}

/// Whether programs that we execute get the descriptor.
fn inherit(fd: RawFd, yes: bool) -> sys::Result<()> {
    let flags = if yes { 0 } else { libc::FD_CLOEXEC };
    unsafe { crate::sys!(SYS_fcntl, fd, libc::F_SETFD, flags) }.map(drop)
}

/// Both ends close on exec; the reading one does not block.
fn pipe() -> std::io::Result<(OwnedFd, OwnedFd)> {
    let error = |e: Errno| std::io::Error::from_raw_os_error(e.0);
    let mut fds = [0i32; 2];
    unsafe { crate::sys!(SYS_pipe2, fds.as_mut_ptr(), libc::O_CLOEXEC) }.map_err(error)?;
    let (reader, writer) = (sys::own(fds[0] as usize), sys::own(fds[1] as usize));
    unsafe { crate::sys!(SYS_fcntl, reader.as_raw_fd(), libc::F_SETFL, libc::O_NONBLOCK) }.map_err(error)?;
    Ok((reader, writer))
}

/// TERM, INT and HUP, by descriptor.
fn watch_signals() -> sys::Result<OwnedFd> {
    let set: u64 = [libc::SIGTERM, libc::SIGINT, libc::SIGHUP].iter().map(|signal| 1u64 << (signal - 1)).sum();
    unsafe {
        crate::sys!(SYS_rt_sigprocmask, libc::SIG_BLOCK, &raw const set, 0, 8)?;
        crate::sys!(SYS_signalfd4, usize::MAX, &raw const set, 8, libc::SFD_CLOEXEC).map(sys::own)
    }
}

/// `{"pid":1,"start":2}`, as this process and `dsec.cluster` write it.
fn parse_pid(text: &str) -> Option<(i32, u64)> {
    let field = |name: &str| {
        let rest = text.split_once(&format!("\"{name}\":"))?.1.trim_start();
        rest.split(|c: char| !c.is_ascii_digit()).next().map(str::to_string)
    };
    Some((field("pid")?.parse().ok()?, field("start")?.parse().ok()?))
}

fn describe(status: Option<i32>) -> String {
    match status {
        None => "how is not known".into(),
        Some(status) if status & 0x7f != 0 => format!("signal {}", status & 0x7f),
        Some(status) => format!("status {}", status >> 8),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(text: &str) -> Vec<String> {
        text.split(' ').map(str::to_string).collect()
    }

    #[test]
    fn roles_are_told_apart() {
        let options = parse(&words("--pids /p --logs /l --lifeline 5 --role edge a -b c --role api:9 d")).unwrap();
        let roles: Vec<_> = options.roles.iter().map(|r| (r.name.as_str(), r.keeps, r.words.join(" "))).collect();
        assert_eq!(roles, [("edge", -1, "a -b c".into()), ("api", 9, "d".into())]);
        assert_eq!((options.ready, options.lifeline), (-1, 5));
        for wrong in
            ["--pids /p --logs /l", "--pids p --logs /l --role a b", "--pids /p --logs /l --role a", "--x y --role a b"]
        {
            assert!(parse(&words(wrong)).is_none(), "{wrong}");
        }
    }

    #[test]
    fn records_are_read_as_they_are_written() {
        assert_eq!(parse_pid("{\"pid\":12,\"start\":345}"), Some((12, 345)));
        assert_eq!(parse_pid("{\"pid\": 12, \"start\": 345}"), Some((12, 345)));
        assert_eq!(parse_pid("nonsense"), None);
    }
}
