//! Sessions: shells that live on between commands and keep what those change.
//!
//! The shell is a process of aether like a command's, in a control group of its own. It reads its script from a pipe: each
//! command as one quoted word for `eval`, so that nothing in it is ever seen by the parser of the script, and behind it a line
//! that reports a random word and the exit code on another pipe. What commands write goes elsewhere, so it can forge nothing.
//! When the report comes, all that the command itself wrote is in the pipes of its output: they are emptied, and it has ended.

use super::{flag, seconds, Chronus, Command, Output, Pipe, State, Stdin};
use crate::aether::fault::{describe, Fault};
use crate::aether::feed::{Fed, From};
use crate::aether::os::{self, Epoll, Fd, Scratch, Status, Watched};
use crate::aether::reasons;
use crate::aether::spawn::{self, Ends, Plan};
use crate::aether::token;
use crate::msgpack::{Pack, Value};

/// Sessions of one sandbox: each is a shell that waits, and some descriptors here.
pub const MAX_SESSIONS: usize = 32;
/// Bytes that background jobs write while no command runs: they come with the next command, up to so many.
const BETWEEN: usize = 64 * 1024;
/// ... in so many pieces: a piece is what comes of one stream before something comes of the other.
const PIECES: usize = 1024;
/// A shell has so long to say that it is ready, and to come back after what it ran was killed.
const PATIENCE: (f64, f64) = (10.0, 1.0);
/// An interrupted process that should be dead after so long has missed the signal.
const AGAIN: f64 = 0.05;
/// The group of earlier commands' processes has the number of the shell's and this.
const JOBS: u32 = 1;
/// Of what comes on the report pipe, at a time and without an end of line.
const REPORT: usize = 256;
const MAX_REPORT: usize = 16 * REPORT;

const BASH: &[u8] = b"/bin/bash";
const BASH_START: &[u8] = include_bytes!("session.bash");
const SH_START: &[u8] = include_bytes!("session.sh");

/// Which shell, and at which descriptors it has its report pipe, the input of commands, and the file of its state.
struct Shell {
    argv: &'static [&'static [u8]],
    start: &'static [u8],
    reports: i32,
    input: i32,
    state: Option<i32>,
}

const SHELLS: [Shell; 2] = [
    Shell {
        argv: &[BASH, b"--norc", b"--noprofile", b"/dev/stdin"],
        start: BASH_START,
        reports: 20,
        input: 21,
        state: Some(22),
    },
    Shell { argv: &[b"/bin/sh", b"/dev/stdin"], start: SH_START, reports: 7, input: 8, state: None },
];

#[derive(Clone, PartialEq)]
enum Phase {
    /// Until it says that it is ready, at the latest at this time.
    Opening(f64),
    Idle,
    /// The command that it runs.
    Busy(u32),
    /// How it ended.
    Ended(String),
}

pub struct Session {
    name: String,
    pid: i32,
    shell: &'static Shell,
    phase: Phase,
    started_unix: f64,
    /// The script of the shell, as a queue before its pipe.
    script: Option<Stdin>,
    reports: Option<Watched>,
    report: Vec<u8>,
    /// Carries a report when the shell could not be executed.
    status: Fd,
    /// Both ends of commands' input and the writing ends of their output: kept, since what one command sets on an open file
    /// (not to block) the next would inherit.
    input: Fd,
    outputs: Option<[Fd; 2]>,
    /// The word that the report of the running command begins with.
    word: String,
    /// Its command was killed at this time, and why; the shell has to come back.
    killed: Option<f64>,
    /// Somebody waits for the end of the interrupted command: until when, and when to look whether the signal arrived.
    awaited: Option<(f64, f64)>,
    /// How often the shell has been told to give up the command that runs.
    interrupts: u32,
    /// Processes of earlier commands are in the group of this number.
    jobs: u32,
    between: Vec<(u8, Vec<u8>)>,
    between_bytes: usize,
    /// Bytes of each stream that were too many for `between`.
    lost: [u64; 2],
    closing: bool,
    /// The shell cannot report any more.
    mute: bool,
    /// Why the shell was killed by us, until it is reaped.
    lost_by: Option<String>,
}

fn cannot(what: &str, errno: i32) -> Fault {
    Fault::new("capacity", format!("cannot {what}: {}", describe(errno)))
}

/// The name of a session, checked.
pub fn name(value: Value<'_>) -> Result<&str, Fault> {
    let fits = |name: &&str| {
        (1..=64).contains(&name.len()) && name.bytes().all(|b| b.is_ascii_alphanumeric() || b"._:-".contains(&b))
    };
    value
        .str()
        .filter(fits)
        .ok_or_else(|| Fault::invalid("the name of a session is 1 to 64 characters of A-Z a-z 0-9 . _ : -"))
}

fn name_of(params: Value<'_>) -> Result<&str, Fault> {
    name(params.get("name").ok_or_else(|| Fault::invalid("which session? there is no name"))?)
}

/// The text as one word of the shell. In bash it holds no end of line, so that messages number the command's own lines.
fn quote(text: &[u8], bash: bool, out: &mut Vec<u8>) {
    out.extend_from_slice(if bash { b"$'" } else { b"'" });
    for byte in text {
        match byte {
            b'\'' if bash => out.extend_from_slice(b"\\'"),
            b'\\' if bash => out.extend_from_slice(b"\\\\"),
            b'\n' if bash => out.extend_from_slice(b"\\n"),
            b'\'' => out.extend_from_slice(b"'\\''"),
            _ => out.push(*byte),
        }
    }
    out.push(b'\'');
}

impl Shell {
    /// The script of one command.
    fn script(&self, line: &[u8], word: &str, input: bool) -> Vec<u8> {
        let mut out = Vec::with_capacity(2 * line.len() + 512);
        let input = if input { format!(" 0<&{}", self.input) } else { " 0</dev/null".into() };
        let Some(state) = self.state else {
            out.extend_from_slice(b"\\eval ");
            quote(line, false, &mut out);
            out.extend_from_slice(format!("{input} {}>&- {}<&-\n\n", self.reports, self.input).as_bytes());
            out.extend_from_slice(format!("printf '{word} %d\\n' \"$?\" >&{}\n", self.reports).as_bytes());
            return out;
        };
        let mut inner = b"\\builtin \\eval ".to_vec();
        quote(line, true, &mut inner);
        inner.extend_from_slice(format!("{input} {}>&- {}<&- {state}>&-", self.reports, self.input).as_bytes());
        let before =
            format!("{{ builtin eval \"${{__dsec_settle-. /proc/self/fd/{state}}}\"; __dsec_back; }} 2>/dev/null\n");
        out.extend_from_slice(before.as_bytes());
        out.extend_from_slice(b"\\builtin \\eval ");
        quote(&inner, true, &mut out);
        let after = format!("\n\n{{ __dsec_save \"$?\" || . /proc/self/fd/{state}; __dsec_word={word}; builtin eval \"$__dsec_settle\"; __dsec_done; }} 2>/dev/null\n");
        out.extend_from_slice(after.as_bytes());
        out
    }
}

/// A word that nothing inside can guess.
fn random_word() -> String {
    let mut bytes = [0u8; 12];
    unsafe { libc::syscall(libc::SYS_getrandom, bytes.as_mut_ptr(), bytes.len(), 0) };
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The shell's ends, beside those of every command.
struct Pipes {
    ends: Ends,
    script: Fd,
    reports: Fd,
    status: Fd,
    input: Fd,
    readers: [Fd; 2],
    outputs: [Fd; 2],
}

/// Marks for the shell to know a descriptor by, and for other users of the sandbox to be let in.
const STICKY: u32 = 0o1666;
const SET_GID: u32 = 0o2666;

fn make_pipes(shell: &Shell) -> os::Result<Pipes> {
    let mark = |fd: &Fd, mode: u32| os::check(unsafe { libc::fchmod(fd.0, mode) }).map(drop);
    let (status, status_end) = os::pipe(true, false)?; // first, as for commands: it may get the number that it has in the child
    let (script_end, script) = os::pipe(false, true)?;
    let (reports, reports_end) = os::pipe(true, false)?;
    let (input, _) = os::pipe(false, false)?;
    let (stdout, stdout_end) = os::pipe(true, false)?;
    let (stderr, stderr_end) = os::pipe(true, false)?;
    mark(&script_end, 0o666)?;
    mark(&reports, STICKY)?;
    mark(&input, SET_GID)?;
    let outputs = [os::duplicate(&stdout_end)?, os::duplicate(&stderr_end)?];
    outputs.iter().try_for_each(|fd| mark(fd, 0o666))?;
    let mut more = vec![(os::duplicate(&reports_end)?, shell.reports), (os::duplicate(&input)?, shell.input)];
    if let Some(place) = shell.state {
        let state = Fd(os::check(unsafe { libc::memfd_create(c"session".as_ptr(), libc::MFD_CLOEXEC) })? as i32);
        mark(&state, STICKY)?;
        more.push((os::duplicate(&state)?, place));
    }
    let ends = Ends {
        stdin: script_end,
        stdout: stdout_end,
        stderr: Some(stderr_end),
        status: status_end,
        more,
        terminal: false,
    };
    Ok(Pipes { ends, script, reports, status, input, readers: [stdout, stderr], outputs })
}

impl Session {
    fn describe(&self) -> Fault {
        let Phase::Ended(how) = &self.phase else { return Fault::new("internal", "the session lives") };
        let name = &self.name;
        Fault::new("session_ended", format!("session {name:?} has ended: {how}"))
            .hint("close it and open a new one: what its shell had kept is gone")
    }

    fn pack(&self, pack: Pack, running: Option<&str>) -> Pack {
        let ended = match &self.phase {
            Phase::Ended(how) => Some(how.as_str()),
            _ => None,
        };
        let text = |pack: Pack, text: Option<&str>| match text {
            Some(text) => pack.str(text),
            None => pack.nil(),
        };
        let pack = pack.map(6).str("name").str(&self.name).str("pid").uint(self.pid as u64);
        let pack = pack.str("shell").str(&String::from_utf8_lossy(self.shell.argv[0]));
        let pack = pack.str("started_at").float(self.started_unix).str("exec_id");
        text(text(pack, running).str("ended"), ended)
    }

    /// Keeps what was written while no command ran.
    pub(super) fn keep(&mut self, stream: u8, bytes: &[u8]) -> bool {
        let (pieces, last) = (self.between.len(), self.between.last_mut().filter(|(of, _)| *of == stream));
        let room = if last.is_some() || pieces < PIECES { BETWEEN - self.between_bytes } else { 0 };
        let kept = room.min(bytes.len());
        match last {
            Some((_, piece)) => piece.extend_from_slice(&bytes[..kept]),
            None if kept > 0 => self.between.push((stream, bytes[..kept].to_vec())),
            None => {}
        }
        self.between_bytes += kept;
        self.lost[usize::from(stream)] += (bytes.len() - kept) as u64;
        kept > 0
    }
}

impl Chronus {
    fn session(&self, name: &str) -> Result<u32, Fault> {
        let found = self.sessions.iter().find(|(_, session)| session.name == name && !session.closing);
        let missing = || Fault::new("not_found", format!("no session {name:?} in this sandbox")).hint("open it first");
        found.map(|(number, _)| *number).ok_or_else(missing)
    }

    /// The session of `session.open`: the one of that name, else a new one. Its number.
    pub fn session_open(&mut self, params: Value, epoll: &Epoll) -> Result<u32, Fault> {
        let name = name_of(params)?;
        if let Ok(number) = self.session(name) {
            return match &self.sessions[&number] {
                session if matches!(session.phase, Phase::Ended(_)) => Err(session.describe()),
                _ => Ok(number),
            };
        }
        if self.sessions.len() >= MAX_SESSIONS {
            let full = format!("this sandbox has {MAX_SESSIONS} sessions, which is the most");
            return Err(Fault::new("capacity", full).hint("close one of them"));
        }
        let bash = unsafe { libc::access(c"/bin/bash".as_ptr(), libc::X_OK) } == 0;
        let shell = &SHELLS[usize::from(!bash)];
        let plan = Plan::of_shell(params, self.birth, shell.argv)?;
        let pipes = make_pipes(shell).map_err(|errno| cannot("make pipes", errno))?;
        let (number, jobs) = (self.next, self.next + JOBS);
        self.next += 2;
        self.fetch_groups()?;
        for (stream, reader) in pipes.readers.into_iter().enumerate() {
            let id = 2 * number + stream as u32;
            epoll
                .watch(reader.0, libc::EPOLLIN, token::make(token::PIPE, id))
                .map_err(|errno| cannot("watch a pipe", errno))?;
            self.pipes.insert(id, Pipe { fd: epoll.own(reader), command: number, stream: stream as u8, discarded: 0 });
        }
        epoll
            .watch(pipes.reports.0, libc::EPOLLIN, token::make(token::REPORT, number))
            .map_err(|errno| cannot("watch a pipe", errno))?;
        let pid = plan.start(number, &self.setting, &pipes.ends).inspect_err(|_| {
            self.pipes.retain(|_, pipe| pipe.command != number);
        })?;
        let script = Stdin { fd: epoll.own(pipes.script), queue: shell.start.to_vec(), written: 0, close_after: false };
        let session = Session {
            name: name.to_owned(),
            pid,
            shell,
            phase: Phase::Opening(os::now() + PATIENCE.0),
            started_unix: os::unix_time(),
            script: Some(script),
            reports: Some(epoll.own(pipes.reports)),
            report: Vec::new(),
            status: pipes.status,
            input: pipes.input,
            outputs: Some(pipes.outputs),
            word: "ready".into(),
            killed: None,
            awaited: None,
            interrupts: 0,
            jobs,
            between: Vec::new(),
            between_bytes: 0,
            lost: [0; 2],
            closing: false,
            mute: false,
            lost_by: None,
        };
        self.sessions.insert(number, Box::new(session));
        self.push_script(number, epoll);
        Ok(number)
    }

    /// What a session is, once it is open. None: it is not ready yet.
    pub fn session_opened(&self, number: u32) -> Option<Result<Vec<u8>, Fault>> {
        let Some(session) = self.sessions.get(&number) else {
            return Some(Err(Fault::new("not_found", "the session was closed while it was opened")));
        };
        match session.phase {
            Phase::Opening(_) => None,
            Phase::Ended(_) => Some(Err(session.describe())),
            _ => Some(Ok(session.pack(Pack::default(), self.running_in(session)).0)),
        }
    }

    fn running_in(&self, session: &Session) -> Option<&str> {
        match session.phase {
            Phase::Busy(command) => self.get(command).map(|command| command.exec_id.as_str()),
            _ => None,
        }
    }

    pub fn session_list(&self) -> Vec<u8> {
        let shown = || self.sessions.values().filter(|session| !session.closing);
        let pack = Pack::default().array(shown().count());
        shown().fold(pack, |pack, session| session.pack(pack, self.running_in(session))).0
    }

    /// Kills its shell and all that it started. The session is gone when that was reaped (`session_is_there`).
    pub fn session_close(&mut self, params: Value) -> Result<u32, Fault> {
        let number = self.session(name_of(params)?)?;
        let Some(session) = self.sessions.get_mut(&number) else { return Ok(number) };
        session.closing = true;
        let (shell, jobs) = (matches!(session.phase, Phase::Ended(_)), session.jobs);
        spawn::kill_tree(self.setting.cgroup2, number, (!shell).then_some(session.pid));
        spawn::kill_tree(self.setting.cgroup2, jobs, None);
        if shell {
            self.drop_session(number);
        }
        Ok(number)
    }

    /// Until its shell was reaped and nothing that it started runs.
    pub fn session_is_there(&self, number: u32) -> bool {
        let runs = |group| !spawn::members(self.setting.cgroup2, group).is_empty();
        self.sessions.contains_key(&number) || runs(number) || runs(number + JOBS)
    }

    fn drop_session(&mut self, number: u32) {
        if let Some(session) = self.sessions.remove(&number) {
            self.groups.extend([number, session.jobs]);
            self.groups_again = Some((os::now(), super::GROUPS_AGAIN.0));
        }
        self.pipes.remove(&(2 * number));
        self.pipes.remove(&(2 * number + 1));
    }

    // -- commands --

    /// Starts the command that `exec` asks for in a session; its number.
    pub fn session_exec(&mut self, name: &str, params: Value, epoll: &Epoll) -> Result<u32, Fault> {
        let exec_id = super::exec_id(params)?.to_owned();
        let staged = match params.get("staged").and_then(Value::u64) {
            Some(size) => self.stage.take(&exec_id, size)?,
            None => Vec::new(),
        };
        let ahead = Value::check(&staged).and_then(|ahead| ahead.get("line")).and_then(Value::bytes);
        let line =
            params.get("line").and_then(Value::bytes).or(ahead.map(|line| line.strip_suffix(b"\0").unwrap_or(line)));
        let line = line.ok_or_else(|| Fault::invalid("a session runs lines, not argv"))?.to_vec();
        if line.contains(&0) {
            return Err(Fault::invalid("the command line has a NUL byte in it"));
        }
        for field in ["cwd", "user", "env", "limits", "pty"] {
            if params.get(field).is_some_and(|value| value.entries().is_none_or(|mut map| map.next().is_some())) {
                return Err(Fault::invalid(format!(
                    "{field} is given when a session is opened, not with its commands"
                )));
            }
        }
        let (deadline, idle) = (seconds(params, "timeout")?, seconds(params, "idle_timeout")?);
        let session_number = self.session(name)?;
        let now = os::now();
        let command = self.next;
        let limit = params.get("max_output_bytes").and_then(Value::u64).unwrap_or(16 << 20).min(self.birth.max_output);
        let Some(session) = self.sessions.get_mut(&session_number) else { return Err(Fault::invalid("no session")) };
        match session.phase {
            Phase::Ended(_) => return Err(session.describe()),
            Phase::Busy(_) | Phase::Opening(_) => {
                let busy = format!("session {name:?} runs another command");
                return Err(Fault::new("conflict", busy).hint("wait for it or interrupt it, or open another session"));
            }
            Phase::Idle => {}
        }
        let wants_input = params.get("stdin").is_some() || flag(params, "stdin_open");
        let stdin = match wants_input {
            true => Some(session.open_input(epoll).map_err(|errno| cannot("open the input", errno))?),
            false => None,
        };
        for fd in session.outputs.iter().flatten().chain([&session.input]) {
            os::set_blocking(fd);
        }
        self.next += 1;
        session.word = random_word();
        session.phase = Phase::Busy(command);
        session.killed = None;
        session.awaited = None;
        session.interrupts = 0;
        let script = session.shell.script(&line, &session.word, wants_input);
        if let Some(queue) = &mut session.script {
            queue.queue.extend_from_slice(&script);
        }
        session.between_bytes = 0;
        let (between, lost) = (std::mem::take(&mut session.between), std::mem::take(&mut session.lost));
        let pid = session.pid;
        let queue = params.get("stdin").and_then(Value::bytes).unwrap_or_default().to_vec();
        let mut fed = Fed::default();
        fed.take(&From::default(), queue.len());
        let close_after = !flag(params, "stdin_open");
        let mut title = line;
        title.truncate(super::TITLE);
        title.push(0);
        let mut made = Command {
            exec_id,
            title,
            detached: flag(params, "detached"),
            pid,
            state: State::Running,
            log: super::Log::default(),
            outputs: [Output { open: true, ..Output::default() }; 2],
            merged: false,
            limit,
            started: now,
            started_unix: os::unix_time(),
            deadline: deadline.map(|s| now + s),
            idle,
            last_output: now,
            stdin: stdin.map(|fd| Stdin { fd, queue, written: 0, close_after }),
            terminal: None,
            last_key: b'\n',
            fed,
            stdin_taken: 0,
            stdin_owed: 0,
            killed: None,
            kill_asked: false,
            seen: reasons::look(self.setting.groups.counters()),
            reason: None,
            ended: None,
            unexecuted: None,
            session: session_number,
            spec: params.get("spec").and_then(Value::u64),
        };
        let spill = self.spill();
        for (stream, bytes) in between {
            made.keep(stream, &bytes, spill);
        }
        for (output, lost) in made.outputs.iter_mut().zip(lost) {
            output.seen += lost;
            output.truncated |= lost > 0;
        }
        self.commands.insert(command, Box::new(made));
        self.set_aside(session_number);
        for stream in 0..2 {
            if let Some(pipe) = self.pipes.get_mut(&(2 * session_number + stream)) {
                pipe.command = command;
            }
        }
        self.push_stdin(command, epoll);
        self.push_script(session_number, epoll);
        Ok(command)
    }

    /// Moves what earlier commands left running out of the shell's group, so that the next one can be killed alone.
    fn set_aside(&mut self, number: u32) {
        let Some(session) = self.sessions.get(&number) else { return };
        let left = spawn::members(self.setting.cgroup2, number);
        for pid in left.into_iter().filter(|pid| *pid != session.pid) {
            let _ = spawn::move_to(self.setting.cgroup2, session.jobs, pid);
        }
    }

    pub fn push_script(&mut self, number: u32, epoll: &Epoll) {
        let Some(session) = self.sessions.get_mut(&number) else { return };
        let open = session.script.as_mut().is_some_and(|script| script.push(token::make(token::SCRIPT, number), epoll));
        if !open {
            session.script = None;
        }
    }

    /// The shell reads its script no more: it ends, or has.
    pub fn script_gone(&mut self, number: u32) {
        if let Some(session) = self.sessions.get_mut(&number) {
            session.script = None;
        }
    }

    /// The report pipe has something to say: that the shell is ready, or that its command has ended, and how.
    pub fn on_report(&mut self, number: u32, scratch: &mut Scratch) {
        let Some(session) = self.sessions.get_mut(&number) else { return };
        let Some(reports) = &session.reports else { return };
        let mut bytes = [0; REPORT];
        match os::read(reports.raw(), &mut bytes) {
            Err(libc::EAGAIN | libc::EINTR) => return,
            Ok(size) if size > 0 && session.report.len() + size <= MAX_REPORT => {
                session.report.extend_from_slice(&bytes[..size]);
            }
            // Closed, or no report at all: the shell was replaced by a program, or can say nothing any more. Without a script
            // it ends with what it runs now.
            _ => {
                (session.reports, session.script, session.mute) = (None, None, true);
                return;
            }
        }
        while let Some(line) = self.next_report(number) {
            self.reported(number, &line, scratch);
        }
    }

    fn next_report(&mut self, number: u32) -> Option<String> {
        let report = &mut self.sessions.get_mut(&number)?.report;
        let end = report.iter().position(|byte| *byte == b'\n')?;
        Some(String::from_utf8_lossy(&report.drain(..=end).collect::<Vec<u8>>()).trim_end().to_owned())
    }

    /// A line on the report pipe: of what the shell was asked last, or of nobody who knows the word.
    fn reported(&mut self, number: u32, line: &str, scratch: &mut Scratch) {
        let Some(session) = self.sessions.get_mut(&number) else { return };
        let (word, code) = line.split_once(' ').unwrap_or((line, "0"));
        if session.word.is_empty() || word != session.word {
            return;
        }
        session.word.clear();
        match session.phase {
            Phase::Opening(_) => session.phase = Phase::Idle,
            Phase::Busy(command) => {
                session.phase = Phase::Idle;
                let code = code.parse::<u8>().unwrap_or(1);
                self.finish(number, command, i32::from(code) << 8, scratch);
            }
            _ => {}
        }
    }

    /// The command has ended: what it wrote is in the pipes, and with it what others go on writing.
    fn finish(&mut self, number: u32, command: u32, status: i32, scratch: &mut Scratch) {
        for stream in 0..2 {
            self.empty_pipe(2 * number + stream, scratch);
            if let Some(pipe) = self.pipes.get_mut(&(2 * number + stream)) {
                pipe.command = number;
            }
        }
        let killed = self.sessions.get(&number).is_some_and(|session| session.killed.is_some());
        let found = command;
        let Some(command) = self.commands.get_mut(&found) else { return };
        let just = command.ended.is_none();
        if just {
            command.ended = Some((if killed { libc::SIGKILL } else { status }, os::now()));
        }
        command.outputs.iter_mut().for_each(|output| output.open = false);
        command.stdin = None;
        command.settle_stdin();
        if let Some(session) = self.sessions.get(&number) {
            let _ = session.drain_input();
        }
        if just {
            self.find_reason(found, 0);
        }
    }

    fn empty_pipe(&mut self, id: u32, scratch: &mut Scratch) {
        let spill = self.spill();
        let Some(pipe) = self.pipes.get(&id) else { return };
        let mut left = os::readable(pipe.fd.raw());
        while left > 0 {
            let Ok(bytes) = scratch.read(pipe.fd.raw()) else { return };
            if bytes.is_empty() {
                return;
            }
            left = left.saturating_sub(bytes.len());
            if let Some(command) = self.commands.get_mut(&pipe.command) {
                command.keep(pipe.stream, bytes, spill);
            }
        }
    }

    /// The shell is of no use any more: killed, and reaped later.
    fn lose_shell(&mut self, number: u32, how: &str) {
        let Some(session) = self.sessions.get_mut(&number) else { return };
        if matches!(session.phase, Phase::Ended(_)) || session.closing {
            return;
        }
        unsafe { libc::kill(session.pid, libc::SIGKILL) };
        spawn::kill_tree(self.setting.cgroup2, number, Some(session.pid));
        session.lost_by = Some(how.to_owned());
    }

    /// A process was reaped: was it the shell of a session?
    pub(super) fn shell_ended(&mut self, pid: i32, status: i32, scratch: &mut Scratch) -> bool {
        let ours =
            |(_, session): &(&u32, &mut Box<Session>)| session.pid == pid && !matches!(session.phase, Phase::Ended(_));
        let Some((number, session)) = self.sessions.iter_mut().find(ours) else { return false };
        let number = *number;
        let mut report = [0; spawn::REPORT];
        let unexecuted = os::read(session.status.0, &mut report) == Ok(spawn::REPORT);
        let how = match session.lost_by.take() {
            Some(how) => how,
            None if unexecuted => format!("{} could not be executed", String::from_utf8_lossy(session.shell.argv[0])),
            None if libc::WIFSIGNALED(status) => {
                format!("its shell was killed by signal {}", super::signal_name(libc::WTERMSIG(status)))
            }
            None if session.mute => format!(
                "a program took its shell's place (`exec`) or closed its descriptors, and ended with exit code {}",
                libc::WEXITSTATUS(status)
            ),
            None => format!("its shell ended with exit code {}", libc::WEXITSTATUS(status)),
        };
        let before = std::mem::replace(&mut session.phase, Phase::Ended(how));
        (session.script, session.reports, session.outputs) = (None, None, None);
        let closing = session.closing;
        if let Phase::Busy(command) = before {
            self.finish(number, command, status, scratch);
        }
        if closing {
            self.drop_session(number);
        }
        true
    }

    // -- signals --

    /// Interrupts the command that runs in a session, as a terminal's Ctrl-C does. Its number; 0 when nothing runs.
    pub fn session_interrupt(&mut self, params: Value) -> Result<u32, Fault> {
        let number = self.session(name_of(params)?)?;
        let Some(session) = self.sessions.get_mut(&number) else { return Ok(0) };
        match session.phase {
            Phase::Ended(_) => Err(session.describe()),
            Phase::Busy(command) => {
                session.awaited = Some((os::now() + PATIENCE.1, os::now() + AGAIN));
                self.signal_foreground(number, libc::SIGINT, false);
                self.interrupt_shell(number);
                Ok(command)
            }
            Phase::Opening(_) | Phase::Idle => Ok(0),
        }
    }

    /// Whether an interrupted command has ended. None: it still may.
    pub fn session_interrupted(&self, command: u32) -> Option<bool> {
        match self.get(command).map(|command| (&command.state, self.sessions.get(&command.session))) {
            Some((State::Running, Some(session))) if session.awaited.is_some() => None,
            Some((State::Running, Some(_))) => Some(false),
            _ => Some(true),
        }
    }

    /// To what the running command started and what did not leave the shell's (kernel) session. `missed`: only to those that
    /// would have died of it. A child of the shell that is not yet the program it will be loses a signal.
    pub(super) fn signal_foreground(&mut self, number: u32, signal: i32, missed: bool) {
        let Some(session) = self.sessions.get(&number) else { return };
        for pid in spawn::members(self.setting.cgroup2, number) {
            let foreground = pid != session.pid && unsafe { libc::getsid(pid) } == session.pid;
            if foreground && (!missed || Status::of(pid).is_some_and(|process| process.dies_of(signal))) {
                unsafe { libc::kill(pid, signal) };
            }
        }
    }

    /// Once a command: a second one could meet the shell while it starts itself anew, and end it.
    fn interrupt_shell(&mut self, number: u32) {
        if let Some(session) = self.sessions.get_mut(&number).filter(|session| session.interrupts == 0) {
            session.interrupts = 1;
            unsafe { libc::kill(session.pid, libc::SIGINT) };
        }
    }

    /// A bash whose program ends by itself just when the interrupt comes takes it for that program's, and goes on with the
    /// line. Whether it did is certain once it waits for another program: then it is told once more.
    fn remind_shell(&mut self, number: u32) {
        let cgroup2 = self.setting.cgroup2;
        let Some(session) = self.sessions.get_mut(&number).filter(|session| session.interrupts == 1) else { return };
        let Some(shell) = Status::of(session.pid) else { return };
        let went_on = spawn::members(cgroup2, number).into_iter().filter_map(Status::of).any(|process| {
            process.parent == session.pid && process.name != shell.name && process.dies_of(libc::SIGINT)
        });
        if went_on {
            session.interrupts = 2;
            unsafe { libc::kill(session.pid, libc::SIGINT) };
        }
    }

    /// Kills what the running command started, and makes the shell come back; it has a second for that.
    pub(super) fn kill_foreground(&mut self, number: u32) {
        let Some(session) = self.sessions.get_mut(&number) else { return };
        session.killed.get_or_insert(os::now() + PATIENCE.1);
        let (pid, jobs, cgroup2) = (session.pid, session.jobs, self.setting.cgroup2);
        if cgroup2 < 0 {
            return self.lose_shell(number, "its command was killed, and nothing tells that from its shell here");
        }
        unsafe { libc::kill(pid, libc::SIGSTOP) };
        if spawn::move_to(cgroup2, jobs, pid).is_ok() {
            spawn::kill_tree(cgroup2, number, None);
            let _ = spawn::move_to(cgroup2, number, pid);
        }
        // While it stands still: it must not see the end of what it waited for and go on with the line before the interrupt.
        self.interrupt_shell(number);
        unsafe { libc::kill(pid, libc::SIGCONT) };
    }

    /// A signal for a command of a session: for what it started, and the shell gives up when it is INT or KILL.
    pub(super) fn session_signal(&mut self, command: u32, signal: i32) {
        let Some(number) = self.get(command).map(|command| command.session) else { return };
        if self.sessions.get(&number).is_none_or(|session| session.phase != Phase::Busy(command)) {
            return;
        }
        match signal {
            libc::SIGKILL => self.kill_foreground(number),
            _ => self.signal_foreground(number, signal, false),
        }
        if signal == libc::SIGINT {
            self.interrupt_shell(number);
        }
    }

    /// When `session_tick` has something to do.
    pub(super) fn session_alarms(&self) -> impl Iterator<Item = f64> + '_ {
        self.sessions.values().filter_map(|session| match session.phase {
            Phase::Opening(until) if session.lost_by.is_none() => Some(until),
            Phase::Busy(_) if session.lost_by.is_none() => {
                [session.killed, session.awaited.map(|(until, again)| until.min(again))]
                    .into_iter()
                    .flatten()
                    .min_by(f64::total_cmp)
            }
            _ => None,
        })
    }

    pub(super) fn session_tick(&mut self, now: f64) {
        let mut again = Vec::new();
        for (number, session) in &mut self.sessions {
            session.awaited = session.awaited.filter(|(until, _)| *until > now);
            if let Some((_, at)) = session.awaited.as_mut().filter(|(_, at)| *at <= now) {
                *at = now + AGAIN;
                again.push(*number);
            }
        }
        for number in again {
            self.remind_shell(number);
            self.signal_foreground(number, libc::SIGINT, true);
        }
        let late = self.sessions.iter().filter(|(_, session)| match session.phase {
            Phase::Opening(until) => until <= now,
            Phase::Busy(_) => session.killed.is_some_and(|until| until <= now),
            _ => false,
        });
        let late: Vec<u32> = late.map(|(number, _)| *number).collect();
        for number in late {
            let opening = self.sessions.get(&number).is_some_and(|session| matches!(session.phase, Phase::Opening(_)));
            let how = match opening {
                true => "its shell was not ready in time",
                false => "its shell did not come back from a command that was killed",
            };
            self.lose_shell(number, how);
        }
    }
}

impl Session {
    /// Another open file of the pipe that commands read: what they set on theirs is not set on it, and it does not block.
    fn reopen_input(&self, access: i32) -> os::Result<Fd> {
        let path = os::cstring(format!("/proc/self/fd/{}", self.input.0).as_bytes())?;
        let flags = access | libc::O_NONBLOCK | libc::O_CLOEXEC;
        os::check(unsafe { libc::open(path.as_ptr(), flags) }).map(|fd| Fd(fd as i32))
    }

    /// A new writing end of it, emptied first.
    fn open_input(&self, epoll: &Epoll) -> os::Result<Watched> {
        self.drain_input()?;
        self.reopen_input(libc::O_WRONLY).map(|fd| epoll.own(fd))
    }

    /// What a command left unread must not be read by the next. Others may read it, and write, at the same time.
    fn drain_input(&self) -> os::Result<()> {
        let mut left = os::readable(self.input.0);
        if left == 0 {
            return Ok(());
        }
        let (input, mut buffer) = (self.reopen_input(libc::O_RDONLY)?, [0; 4096]);
        while left > 0 {
            match os::read(input.0, &mut buffer) {
                Ok(0) | Err(libc::EAGAIN) => return Ok(()),
                size => left = left.saturating_sub(size?),
            }
        }
        Ok(())
    }
}
