//! Chronus: the commands of a sandbox, from start to result.
//!
//! A command is its process, its log and its limits. It depends on no connection: followers read the log from a cursor,
//! and a command that nobody follows runs on. One place (`reap`) learns how processes ended.

pub mod session;

use super::fault::Fault;
use super::feed::{Fed, From};
use super::log::{Log, Spill};
use super::os::{self, Epoll, Fd, Scratch, Watched};
use super::reasons::{self, End, Reason, Reasons, Seen};
use super::spawn::{self, Ends, Failed, Plan, Setting};
use super::stage::Stage;
use super::terminal::{Size, Terminal};
use super::token;
use crate::birth::Birth;
use crate::msgpack::{Pack, Value};
use session::Session;
use std::collections::{BTreeMap, VecDeque};
use std::hash::{Hash, Hasher};

/// After the main process ended, output is awaited while it comes, but not for longer than this.
const DRAIN: f64 = 0.2;
/// ... and a pipe that a background process holds but that stays silent is drained after this.
const QUIET: f64 = 0.05;
/// Ended commands kept for those who come back for the result: number, bytes in files, bytes in memory.
const KEPT: (usize, u64, usize) = (256, 64 << 20, 2 << 20);
/// Ids of ended commands that are remembered longer, so that none of them is run a second time by who asks late.
const REMEMBERED: usize = 8192;
/// Bytes queued for a command's stdin before a writer has to wait.
const STDIN_QUEUE: usize = 1 << 20;
/// A command that writes more than it may keep is read at this pace, so that it cannot keep aether busy.
const DISCARD_BURST: u64 = 1 << 20;
const DISCARD_PAUSE: f64 = 0.005;
/// Seconds after which groups that were not empty are tried again, first and last.
const GROUPS_AGAIN: (f64, f64) = (0.02, 10.0);
const REAPS_A_TURN: usize = 512;
const TITLE: usize = 512;

struct Stdin {
    fd: Watched,
    queue: Vec<u8>,
    written: usize,
    close_after: bool,
}

#[derive(Default, Clone, Copy)]
struct Output {
    seen: u64,
    kept: u64,
    truncated: bool,
    open: bool,
}

/// What a command is until it is known to execute.
pub struct Start {
    /// Closed by a successful exec, else it carries a report.
    status: Watched,
    /// For the message about a failure.
    cwd: Vec<u8>,
    user: String,
}

pub enum State {
    Starting(Box<Start>),
    Running,
    Done,
    Failed(Fault),
}

pub struct Command {
    exec_id: String,
    /// Arguments, or as much of them as is worth keeping, each with its NUL.
    title: Vec<u8>,
    detached: bool,
    pid: i32,
    pub state: State,
    pub log: Log,
    outputs: [Output; 2],
    merged: bool,
    limit: u64,
    started: f64,
    started_unix: f64,
    deadline: Option<f64>,
    idle: Option<f64>,
    last_output: f64,
    stdin: Option<Stdin>,
    /// Until the result stands.
    terminal: Option<Terminal>,
    /// The last byte of what was written to stdin.
    last_key: u8,
    fed: Fed,
    /// DATA bytes of a stream that reached the pipe (or nobody any more): credit to give back.
    stdin_taken: u32,
    stdin_owed: u32,
    killed: Option<&'static str>,
    /// A client sent it KILL.
    kill_asked: bool,
    /// The limits' counters when it started, and what they said when it had ended.
    seen: Seen,
    reason: Option<Reason>,
    /// Wait status and time of the main process's end.
    ended: Option<(i32, f64)>,
    /// Exit code of a command that could not be executed (126, 127).
    unexecuted: Option<i32>,
    /// The session whose shell runs it; 0: it is a process of its own.
    session: u32,
    /// What tells its request from others.
    spec: Option<u64>,
}

struct Pipe {
    fd: Watched,
    command: u32,
    stream: u8,
    discarded: u64,
}

pub struct Chronus {
    pub birth: &'static Birth,
    pub setting: Setting,
    spill: i32,
    commands: BTreeMap<u32, Box<Command>>,
    /// Digests of the ids of commands that were forgotten.
    forgotten: VecDeque<u64>,
    pipes: BTreeMap<u32, Pipe>,
    /// By the number of their shells, which are counted with the commands.
    sessions: BTreeMap<u32, Box<Session>>,
    /// Pipes that are not read until some time.
    paused: Vec<(f64, u32)>,
    /// Control groups that still had processes in them when their command ended.
    groups: VecDeque<u32>,
    /// When to look at them again, and how long after that the next time.
    groups_again: Option<(f64, f64)>,
    next: u32,
    pub stage: Stage,
    reasons: Reasons,
    /// A command failed to start since the last tick.
    failed: bool,
}

/// Seconds, or None for no limit. Defaults are the client's: what is not there has no limit.
fn seconds(params: Value, name: &str) -> Result<Option<f64>, Fault> {
    let Some(value) = params.get(name) else { return Ok(None) };
    let seconds = value.f64().filter(|s| s.is_finite() && *s >= 0.0);
    seconds.map(Some).ok_or_else(|| Fault::invalid(format!("{name} must be seconds, zero or more")))
}

fn flag(params: Value, name: &str) -> bool {
    params.get(name).and_then(Value::bool).unwrap_or(false)
}

pub fn exec_id(params: Value<'_>) -> Result<&str, Fault> {
    let fits = |id: &&str| {
        (1..=64).contains(&id.len()) && id.bytes().all(|b| b.is_ascii_alphanumeric() || b"._:-".contains(&b))
    };
    let id = params.get("exec_id").and_then(Value::str).filter(fits);
    id.ok_or_else(|| Fault::invalid("exec_id must be 1 to 64 characters of A-Z a-z 0-9 . _ : -"))
}

fn digest(exec_id: &str) -> u64 {
    let mut hasher = std::hash::DefaultHasher::new();
    exec_id.hash(&mut hasher);
    hasher.finish()
}

fn unknown(exec_id: &str) -> Fault {
    Fault::new("not_found", format!("no command {exec_id:?} in this sandbox (or it ended long ago and was dropped)"))
}

/// Bytes of output in files. All commands together may have as many as both streams of one, so that many at once, each
/// within its own limit, do not fill the node's disk.
fn filed(commands: &BTreeMap<u32, Box<Command>>) -> u64 {
    commands.values().map(|command| command.log.weight().1).sum()
}

/// Aether's ends of a command's pipes.
struct Ours {
    status: Watched,
    pipes: Vec<(u32, Pipe)>,
    stdin: Option<Watched>,
    terminal: Option<Terminal>,
}

/// Watches an end that a command's output comes from; the id of it.
fn watch_output(fd: Fd, number: u32, stream: u8, epoll: &Epoll) -> os::Result<(u32, Pipe)> {
    let id = 2 * number + u32::from(stream);
    epoll.watch(fd.0, libc::EPOLLIN, token::make(token::PIPE, id))?;
    Ok((id, Pipe { fd: epoll.own(fd), command: number, stream, discarded: 0 }))
}

/// A terminal for everything: what is written to it is stdin, and all output comes as stdout.
fn make_terminal(terminal: Terminal, number: u32, epoll: &Epoll) -> os::Result<(Ends, Ours)> {
    let (status, status_end) = os::pipe(true, false)?;
    let (stdin, stdout) = (terminal.theirs()?, terminal.theirs()?);
    let ends = Ends { stdin, stdout, stderr: None, status: status_end, more: Vec::new(), terminal: true };
    let pipes = vec![watch_output(terminal.ours()?, number, 0, epoll)?];
    let stdin = Some(epoll.own(terminal.ours()?));
    Ok((ends, Ours { status: epoll.own(status), pipes, stdin, terminal: Some(terminal) }))
}

fn make_pipes(params: Value, number: u32, epoll: &Epoll) -> os::Result<(Ends, Ours)> {
    let (status, status_end) = os::pipe(true, false)?;
    let mut pipes = Vec::with_capacity(2);
    let mut output = |stream: u8| {
        let (reader, writer) = os::pipe(true, false)?;
        pipes.push(watch_output(reader, number, stream, epoll)?);
        os::Result::Ok(writer)
    };
    let stdout = output(0)?;
    let stderr = if flag(params, "merge_stderr") { None } else { Some(output(1)?) };
    let (stdin, stdin_end) = match params.get("stdin").is_some() || flag(params, "stdin_open") {
        true => os::pipe(false, true).map(|(reader, writer)| (Some(epoll.own(writer)), reader))?,
        false => (None, os::open(libc::AT_FDCWD, c"/dev/null", libc::O_RDONLY, 0, os::SAFE)?),
    };
    let ends = Ends { stdin: stdin_end, stdout, stderr, status: status_end, more: Vec::new(), terminal: false };
    Ok((ends, Ours { status: epoll.own(status), pipes, stdin, terminal: None }))
}

impl Chronus {
    pub fn new(birth: &'static Birth, setting: Setting, spill: i32) -> Chronus {
        let (commands, pipes) = (BTreeMap::new(), BTreeMap::new());
        Chronus {
            birth,
            setting,
            spill,
            commands,
            forgotten: VecDeque::new(),
            pipes,
            sessions: BTreeMap::new(),
            paused: Vec::new(),
            groups: VecDeque::new(),
            groups_again: None,
            next: 1,
            stage: Stage::default(),
            reasons: Reasons::default(),
            failed: false,
        }
    }

    pub fn get(&self, number: u32) -> Option<&Command> {
        self.commands.get(&number).map(|command| &**command)
    }

    pub fn find(&self, exec_id: &str) -> Result<u32, Fault> {
        let mut started = self.commands.iter().rev().filter(|(_, command)| !matches!(command.state, State::Failed(_)));
        let found = started.find(|(_, command)| command.exec_id == exec_id);
        found.map(|(number, _)| *number).ok_or_else(|| unknown(exec_id))
    }

    /// The command that `exec` names, if it was started before. A fault when it was, and is not there any more, or when
    /// what is asked for now is another one: `spec` tells requests apart.
    pub fn started(&self, exec_id: &str, spec: Option<u64>) -> Result<Option<u32>, Fault> {
        match self.find(exec_id) {
            Ok(command) if spec.is_some() && self.get(command).is_some_and(|c| c.spec.is_some() && c.spec != spec) => {
                Err(Fault::new("conflict", format!("exec_id {exec_id:?} is that of another command"))
                    .hint("repeat the request as it was, or give each command an id of its own"))
            }
            Ok(command) => Ok(Some(command)),
            Err(_) if self.forgotten.contains(&digest(exec_id)) => {
                let text = format!("command {exec_id:?} ended long ago, and what came of it was dropped");
                Err(Fault::new("outcome_unknown", text)
                    .hint("it is not run again; give a new command an id of its own"))
            }
            Err(_) => Ok(None),
        }
    }

    /// Starts the command that `exec` asks for; its number.
    pub fn start(&mut self, params: Value, epoll: &Epoll) -> Result<u32, Fault> {
        let exec_id = exec_id(params)?.to_owned();
        let staged = match params.get("staged").and_then(Value::u64) {
            Some(size) => self.stage.take(&exec_id, size)?,
            None => Vec::new(),
        };
        let plan = Plan::new(params, Value::check(&staged).unwrap_or(params), self.birth)?;
        let now = os::now();
        let limit = params.get("max_output_bytes").and_then(Value::u64).unwrap_or(16 << 20).min(self.birth.max_output);
        let deadline = seconds(params, "timeout")?.map(|s| now + s);
        let idle = seconds(params, "idle_timeout")?;
        let number = self.next;
        self.next += 1;
        let terminal = Size::wanted(params)?.map(|size| Terminal::open(size, plan.uid())).transpose()?;
        let on_terminal = terminal.is_some();
        let made = match terminal {
            Some(terminal) => make_terminal(terminal, number, epoll),
            None => make_pipes(params, number, epoll),
        };
        let (ends, ours) = made
            .map_err(|errno| Fault::new("capacity", format!("cannot make pipes: {}", super::fault::describe(errno))))?;
        self.fetch_groups()?;
        let seen = reasons::look(self.setting.groups.counters());
        let pid = plan.start(number, &self.setting, &ends)?;
        drop(ends);

        let mut outputs = [Output::default(); 2];
        ours.pipes.iter().for_each(|(_, pipe)| outputs[usize::from(pipe.stream)].open = true);
        self.pipes.extend(ours.pipes);
        let mut fed = Fed::default();
        fed.take(&From::default(), params.get("stdin").and_then(Value::bytes).map_or(0, <[u8]>::len));
        let queue = params.get("stdin").and_then(Value::bytes).unwrap_or_default().to_vec();
        let close_after = !flag(params, "stdin_open") && !on_terminal;
        let (cwd, user) = (plan.cwd().to_vec(), plan.user_name());
        let command = Command {
            exec_id,
            title: plan.title(TITLE),
            detached: flag(params, "detached"),
            pid,
            state: State::Starting(Box::new(Start { status: ours.status, cwd, user })),
            log: Log::default(),
            outputs,
            merged: flag(params, "merge_stderr") || on_terminal,
            limit,
            started: now,
            started_unix: os::unix_time(),
            deadline,
            idle,
            last_output: now,
            last_key: queue.last().copied().unwrap_or(b'\n'),
            stdin: ours.stdin.map(|fd| Stdin { fd, queue, written: 0, close_after }),
            terminal: ours.terminal,
            fed,
            stdin_taken: 0,
            stdin_owed: 0,
            killed: None,
            kill_asked: false,
            seen,
            reason: None,
            ended: None,
            unexecuted: None,
            session: 0,
            spec: params.get("spec").and_then(Value::u64),
        };
        self.commands.insert(number, Box::new(command));
        self.push_stdin(number, epoll);
        Ok(number)
    }

    fn fetch_groups(&mut self) -> Result<(), Fault> {
        let fetched = self.setting.groups.fetch();
        fetched.map_err(|f| match f.errno {
            // Between two launchers; the next one will be here in a moment, and nothing of the command has begun.
            libc::EPIPE => Fault::new("connection_lost", format!("no control groups yet: {}", f.what)).retryable(),
            errno => Fault::internal(&format!("no control groups for commands: {}", f.what), errno),
        })
    }

    // -- what the kernel tells --

    /// The status pipe: closed by a successful exec, else it carries the report of what failed.
    pub fn on_status(&mut self, number: u32) {
        let Some(command) = self.commands.get_mut(&number) else { return };
        let State::Starting(start) = &command.state else { return };
        let mut report = [0; spawn::REPORT];
        match os::read(start.status.raw(), &mut report) {
            Err(libc::EAGAIN | libc::EINTR) => return,
            Ok(spawn::REPORT) => {}
            _ => {
                command.state = State::Running;
                return;
            }
        }
        let name = command.title.split(|b| *b == 0).next().unwrap_or_default();
        match spawn::explain(&report, name, &start.cwd, &start.user) {
            Failed::Fault(fault) => {
                command.state = State::Failed(fault);
                command.terminal = None;
                self.failed = true;
            }
            Failed::Shell { code, message } => {
                command.unexecuted = Some(code);
                command.state = State::Running;
                let message = if command.terminal.is_some() { message.replace('\n', "\r\n") } else { message };
                command.keep(1, message.as_bytes(), Spill { directory: self.spill, room: 0 });
            }
        }
    }

    /// Someone wants to know as soon as the command executes. (Else it is learned with its first output or its end.)
    pub fn watch_start(&self, number: u32, epoll: &Epoll) {
        if let Some(State::Starting(start)) = self.get(number).map(|command| &command.state) {
            let _ = epoll.watch(start.status.raw(), libc::EPOLLIN, token::make(token::STATUS, number));
        }
    }

    pub fn on_pipe(&mut self, id: u32, epoll: &Epoll, scratch: &mut Scratch) {
        let Some(number) = self.pipes.get(&id).map(|pipe| pipe.command) else { return };
        self.on_status(number);
        let spill = self.spill();
        let Some(pipe) = self.pipes.get_mut(&id) else { return };
        let bytes = match scratch.read(pipe.fd.raw()) {
            Err(libc::EAGAIN | libc::EINTR) => return,
            Ok(bytes) if !bytes.is_empty() => bytes,
            _ => {
                let stream = usize::from(pipe.stream);
                self.pipes.remove(&id);
                if let Some(command) = self.commands.get_mut(&number) {
                    command.outputs[stream].open = false;
                }
                return;
            }
        };
        let kept = match self.commands.get_mut(&number) {
            Some(command) if !matches!(command.state, State::Done) => {
                command.last_output = os::now();
                command.keep(pipe.stream, bytes, spill)
            }
            None => self.sessions.get_mut(&number).is_some_and(|session| session.keep(pipe.stream, bytes)),
            _ => false,
        };
        if !kept {
            pipe.discarded += bytes.len() as u64;
        }
        if pipe.discarded >= DISCARD_BURST {
            pipe.discarded = 0;
            let _ = epoll.watch(pipe.fd.raw(), 0, token::make(token::PIPE, id));
            self.paused.push((os::now() + DISCARD_PAUSE, id));
        }
    }

    /// Where output goes that is too much for memory, and how much more of it.
    fn spill(&self) -> Spill {
        Spill { directory: self.spill, room: (2 * self.birth.max_output).saturating_sub(filed(&self.commands)) }
    }

    /// Learns how processes ended, commands and the orphans of all. True: there may be more.
    pub fn reap(&mut self, scratch: &mut Scratch) -> bool {
        for _ in 0..REAPS_A_TURN {
            let mut status = 0;
            let mut used: libc::rusage = unsafe { std::mem::zeroed() };
            let pid = unsafe { libc::wait4(-1, &mut status, libc::WNOHANG | libc::__WALL, &mut used) };
            if pid <= 0 {
                return false;
            }
            let peak = used.ru_maxrss.max(0) as u64 * 1024;
            let main = |(_, command): &(&u32, &mut Box<Command>)| {
                command.pid == pid && command.session == 0 && command.ended.is_none()
            };
            if let Some((number, command)) = self.commands.iter_mut().find(main) {
                command.ended = Some((status, os::now()));
                command.terminal.as_mut().into_iter().for_each(Terminal::let_go);
                let number = *number;
                self.on_status(number); // whatever it had to say about its start is in the pipe
                self.find_reason(number, peak);
            } else if !self.shell_ended(pid, status, scratch)
                && libc::WIFSIGNALED(status)
                && libc::WTERMSIG(status) == libc::SIGKILL
            {
                self.reasons.orphan(self.setting.groups.counters(), peak);
            }
        }
        true
    }

    /// Which limit a command met that has just ended. `peak`: the most memory that one of its processes had, bytes.
    fn find_reason(&mut self, number: u32, peak: u64) {
        let others = self.commands.iter().any(|(other, command)| *other != number && command.active());
        let alone = !others && self.groups.is_empty();
        let Some(command) = self.commands.get_mut(&number) else { return };
        let failed = command.outcome().0 != 0;
        let end = End { failed, asked: command.kill_asked, alone, peak };
        command.reason = self.reasons.of(self.setting.groups.counters(), command.seen, &end);
    }

    // -- time --

    /// When `tick` has something to do, on the clock of `os::now`.
    pub fn next_tick(&self) -> Option<f64> {
        let alarms = self.commands.values().filter_map(|command| command.alarm());
        let others = self.paused.iter().map(|(until, _)| *until).chain(self.groups_again.map(|(at, _)| at));
        alarms.chain(others).chain(self.session_alarms()).min_by(f64::total_cmp)
    }

    /// Ends what is over its time, and completes what ended. True: there is something to forget.
    pub fn tick(&mut self, epoll: &Epoll) -> bool {
        let now = os::now();
        self.paused.retain(|(until, id)| {
            let wake = *until <= now;
            if let (true, Some(pipe)) = (wake, self.pipes.get(id)) {
                let _ = epoll.watch(pipe.fd.raw(), libc::EPOLLIN, token::make(token::PIPE, *id));
            }
            !wake
        });
        if let Some((_, pause)) = self.groups_again.filter(|(at, _)| *at <= now) {
            self.try_groups(pause);
        }
        let mut completed = std::mem::take(&mut self.failed);
        let mut of_sessions = Vec::new();
        for (number, command) in &mut self.commands {
            if let Some(why) = command.overdue(now) {
                command.killed = Some(why);
                match command.session {
                    0 => spawn::kill_tree(self.setting.cgroup2, *number, Some(command.pid)),
                    session => of_sessions.push(session),
                }
            }
            if command.complete(now) {
                completed = true;
                if command.terminal.take().is_some() {
                    self.pipes.remove(&(2 * *number)); // hung up, whoever still has it
                }
                self.groups.push_back(*number);
            }
        }
        of_sessions.into_iter().for_each(|session| self.kill_foreground(session));
        self.session_tick(now);
        completed
    }

    /// After processes ended: removes the groups of ended commands that are empty now.
    pub fn remove_groups(&mut self) {
        self.try_groups(GROUPS_AGAIN.0);
    }

    /// A few at a time. Those with background processes in them are tried again when a process ends, and some times after a
    /// while: the kernel empties a group a moment after it tells that the last process ended.
    fn try_groups(&mut self, pause: f64) {
        for _ in 0..self.groups.len().min(8) {
            if let Some(number) = self.groups.pop_front() {
                if !spawn::remove_group(self.setting.cgroup2, number) {
                    self.groups.push_back(number);
                }
            }
        }
        let again = !self.groups.is_empty() && pause <= GROUPS_AGAIN.1;
        self.groups_again = again.then(|| (os::now() + pause, 4.0 * pause));
    }

    /// Forgets the oldest ended commands beyond what is kept, or only their output where that is too much; but none that is
    /// followed.
    pub fn forget(&mut self, followed: &dyn Fn(u32) -> bool) {
        let (mut count, mut filed, mut memory) = (0, 0u64, 0usize);
        // When running ones need the room, the output of ended ones goes, but for the newest.
        let most = if self::filed(&self.commands) > self.birth.max_output { 0 } else { KEPT.1 };
        let mut dropped = Vec::new();
        for (number, command) in self.commands.iter_mut().rev() {
            let over = match command.state {
                State::Starting(_) | State::Running => false,
                State::Failed(_) => true, // worth nothing to those who come later
                State::Done => {
                    let weight = command.log.weight();
                    (count, memory, filed) = (count + 1, memory + weight.0, filed + weight.1);
                    // the newest may be larger than all that is kept: whoever asked for so much is still fetching it
                    let heavy = count > 1 && (filed > most || memory > KEPT.2);
                    if heavy && weight != (0, 0) && !followed(*number) {
                        (memory, filed) = (memory - weight.0, filed - weight.1);
                        command.lose_output();
                    }
                    count > KEPT.0
                }
            };
            if over && !followed(*number) {
                dropped.push(*number);
            }
        }
        for command in dropped.iter().filter_map(|number| self.commands.remove(number)) {
            if matches!(command.state, State::Done) {
                self.forgotten.push_back(digest(&command.exec_id));
            }
        }
        self.forgotten.drain(..self.forgotten.len().saturating_sub(REMEMBERED));
    }

    // -- stdin --

    pub fn stdin_write(&mut self, number: u32, bytes: &[u8], of_stream: bool, epoll: &Epoll) {
        let Some(command) = self.commands.get_mut(&number) else { return };
        if of_stream {
            command.stdin_owed += 1 + bytes.len() as u32;
            command.fed.take(&From::default(), bytes.len());
        }
        match &mut command.stdin {
            Some(stdin) if !stdin.close_after => {
                stdin.queue.extend_from_slice(bytes);
                command.last_key = bytes.last().copied().unwrap_or(command.last_key);
            }
            _ => {}
        }
        self.push_stdin(number, epoll);
    }

    /// `exec.write`: takes what of `bytes` was not taken before. None: there is no room yet.
    pub fn feed(&mut self, number: u32, from: &From, bytes: &[u8], epoll: &Epoll) -> Result<Option<Vec<u8>>, Fault> {
        let command = self.commands.get(&number).ok_or_else(|| unknown("of this stdin"))?;
        let rest = &bytes[command.fed.known(from, bytes.len())?..];
        if !rest.is_empty() {
            if !self.stdin_is_open(number) {
                return Err(Fault::new("conflict", "the command's stdin is closed, or nobody reads it any more")
                    .hint("only a command that was started with stdin_open takes more"));
            }
            if !self.stdin_room(number, rest.len()) {
                return Ok(None);
            }
            self.stdin_write(number, rest, false, epoll);
        }
        let open = self.stdin_is_open(number);
        let Some(command) = self.commands.get_mut(&number) else { return Ok(None) };
        if !rest.is_empty() {
            command.fed.take(from, rest.len());
        }
        Ok(Some(command.fed.reply(from, open)))
    }

    /// `exec.close_stdin`: nothing comes after the writer's bytes up to its offset.
    pub fn finish_stdin(&mut self, params: Value, epoll: &Epoll) -> Result<(), Fault> {
        let number = self.find(exec_id(params)?)?;
        let Some(command) = self.commands.get(&number) else { return Ok(()) };
        command.fed.known(&From::new(params)?, 0)?;
        self.stdin_close(number, epoll);
        Ok(())
    }

    pub fn stdin_close(&mut self, number: u32, epoll: &Epoll) {
        let Some(command) = self.commands.get_mut(&number) else { return };
        if let Some(stdin) = command.stdin.as_mut().filter(|stdin| !stdin.close_after) {
            if let Some(terminal) = &command.terminal {
                stdin.queue.extend(terminal.end_of_input(command.last_key));
            }
            stdin.close_after = true;
        }
        self.push_stdin(number, epoll);
    }

    /// Is there room in the queue? An empty queue takes anything; a stdin that is closed swallows it.
    pub fn stdin_room(&self, number: u32, size: usize) -> bool {
        let stdin = self.commands.get(&number).and_then(|command| command.stdin.as_ref());
        let queued = stdin.map_or(0, |stdin| stdin.queue.len() - stdin.written);
        queued == 0 || queued + size <= STDIN_QUEUE
    }

    pub fn stdin_is_open(&self, number: u32) -> bool {
        let stdin = self.commands.get(&number).and_then(|command| command.stdin.as_ref());
        stdin.is_some_and(|stdin| !stdin.close_after)
    }

    /// Payload bytes of the feeding stream whose credit may go back.
    pub fn stdin_taken(&mut self, number: u32) -> u32 {
        self.commands.get_mut(&number).map_or(0, |command| std::mem::take(&mut command.stdin_taken))
    }

    /// Moves queued bytes into the pipe, as far as it takes them.
    pub fn push_stdin(&mut self, number: u32, epoll: &Epoll) {
        let Some(command) = self.commands.get_mut(&number) else { return };
        let open = command.stdin.as_mut().is_some_and(|stdin| stdin.push(token::make(token::STDIN, number), epoll));
        if !open {
            command.stdin = None;
        }
        command.settle_stdin();
    }

    /// The last reader of a command's stdin is gone: nothing written to it arrives any more.
    pub fn stdin_gone(&mut self, number: u32) {
        if let Some(command) = self.commands.get_mut(&number) {
            command.stdin = None;
            command.settle_stdin();
        }
    }

    // -- requests about commands --

    pub fn signal(&mut self, params: Value) -> Result<(), Fault> {
        let number = self.find(exec_id(params)?)?;
        let signal = params.get("signal").and_then(Value::u64).filter(|s| (1..=64).contains(s));
        let signal = signal.ok_or_else(|| Fault::invalid("signal must be a number from 1 to 64"))? as i32;
        let Some(command) = self.commands.get_mut(&number) else { return Ok(()) };
        command.kill_asked |= signal == libc::SIGKILL;
        if command.session != 0 {
            self.session_signal(number, signal);
        } else if signal == libc::SIGKILL {
            spawn::kill_tree(self.setting.cgroup2, number, command.ended.is_none().then_some(command.pid));
        } else if command.ended.is_none() {
            unsafe { libc::kill(-command.pid, signal) };
        }
        Ok(())
    }

    /// `exec.resize`: another size for a command's terminal.
    pub fn resize(&self, params: Value) -> Result<(), Fault> {
        let size = Size::of(params)?;
        let command = self.get(self.find(exec_id(params)?)?).ok_or_else(|| unknown("of this terminal"))?;
        let Some(terminal) = &command.terminal else {
            return Err(Fault::new("conflict", format!("command {:?} has no terminal, or has ended", command.exec_id))
                .hint("only a command that was started with pty has a size"));
        };
        terminal.resize(size).map_err(|errno| Fault::internal("cannot resize the terminal", errno))
    }

    pub fn list(&self) -> Vec<u8> {
        let shown = || self.commands.values().filter(|command| !matches!(command.state, State::Failed(_)));
        shown().fold(Pack::default().array(shown().count()), |pack, command| command.pack_info(pack)).0
    }
}

impl Stdin {
    /// False: this stdin is over.
    fn push(&mut self, token: u64, epoll: &Epoll) -> bool {
        while self.written < self.queue.len() {
            match os::write(self.fd.raw(), &self.queue[self.written..]) {
                Ok(size) => self.written += size,
                Err(libc::EINTR) => {}
                Err(libc::EAGAIN) => return epoll.watch(self.fd.raw(), libc::EPOLLOUT, token).is_ok(),
                Err(_) => return false, // nobody reads any more
            }
        }
        self.queue = Vec::new();
        self.written = 0;
        // without events, but the kernel still says when the last reader is gone
        !self.close_after && epoll.watch(self.fd.raw(), 0, token).is_ok()
    }
}

impl Command {
    pub fn pid(&self) -> i32 {
        self.pid
    }

    pub fn detached(&self) -> bool {
        self.detached
    }

    /// Books what left the queue of stdin as credit that may go back.
    fn settle_stdin(&mut self) {
        let queued = self.stdin.as_ref().map_or(0, |stdin| stdin.queue.len() - stdin.written) as u32;
        let taken = self.stdin_owed.saturating_sub(queued);
        self.stdin_owed -= taken;
        self.stdin_taken += taken;
    }

    /// Counts output, and keeps it as far as the limit goes. False: nothing of it was kept.
    fn keep(&mut self, stream: u8, bytes: &[u8], spill: Spill) -> bool {
        let stream = if self.merged { 0 } else { stream };
        let output = &mut self.outputs[usize::from(stream)];
        output.seen += bytes.len() as u64;
        let room = bytes.len().min((self.limit - output.kept) as usize);
        let kept = !output.truncated && room > 0 && self.log.append(stream, &bytes[..room], spill);
        if kept {
            output.kept += room as u64;
        }
        output.truncated |= !kept || room < bytes.len();
        kept
    }

    /// Gives up what was kept of its output; how it ended, and how much it wrote, stays.
    fn lose_output(&mut self) {
        self.log = Log::default();
        self.outputs.iter_mut().for_each(|output| output.truncated |= output.seen > 0);
    }

    fn active(&self) -> bool {
        matches!(self.state, State::Starting(_) | State::Running)
    }

    /// The next moment at which time alone changes something.
    fn alarm(&self) -> Option<f64> {
        if !self.active() {
            return None;
        }
        match self.ended {
            Some((_, at)) => Some((at + DRAIN).min(at.max(self.last_output) + QUIET)),
            None if self.killed.is_some() => None,
            None => [self.deadline, self.idle.map(|idle| self.last_output + idle)]
                .into_iter()
                .flatten()
                .min_by(f64::total_cmp),
        }
    }

    /// Why the command must be killed now, if it must.
    fn overdue(&self, now: f64) -> Option<&'static str> {
        if !self.active() || self.ended.is_some() || self.killed.is_some() {
            return None;
        }
        let late = self.deadline.filter(|deadline| *deadline <= now).map(|_| "deadline");
        late.or(self.idle.filter(|idle| self.last_output + idle <= now).map(|_| "idle"))
    }

    /// The main process ended and its output is drained (or waited for long enough): the result stands from now on.
    fn complete(&mut self, now: f64) -> bool {
        let drained = self.outputs.iter().all(|output| !output.open) || self.alarm().is_some_and(|alarm| alarm <= now);
        if self.ended.is_none() || !matches!(self.state, State::Running) || !drained {
            return false;
        }
        self.state = State::Done;
        self.stdin = None;
        self.settle_stdin();
        self.log.seal();
        true
    }

    /// Exit code and signal, as a shell tells them.
    fn outcome(&self) -> (u64, Option<String>) {
        match (self.unexecuted, self.ended) {
            (Some(code), _) => (code as u64, None),
            (None, Some((status, _))) if libc::WIFSIGNALED(status) => {
                let signal = libc::WTERMSIG(status);
                (128 + signal as u64, Some(signal_name(signal)))
            }
            (None, Some((status, _))) => (libc::WEXITSTATUS(status) as u64, None),
            (None, None) => (0, None),
        }
    }

    /// The reply to those who follow: `ExecDone`.
    pub fn pack_done(&self, incarnation: u64) -> Vec<u8> {
        let (code, signal) = self.outcome();
        let timed_out = self.killed.filter(|_| signal.as_deref() == Some("KILL"));
        let [stdout, stderr] = self.outputs;
        let duration = self.ended.map_or(0.0, |(_, at)| at - self.started);
        let text = |pack: Pack, text: Option<&str>| match text {
            Some(text) => pack.str(text),
            None => pack.nil(),
        };
        let pack = Pack::default().map(12).str("exec_id").str(&self.exec_id).str("exit_code").uint(code);
        let pack = text(pack.str("signal"), signal.as_deref());
        let pack = pack.str("stdout_bytes").uint(stdout.seen).str("stderr_bytes").uint(stderr.seen);
        let pack = pack.str("stdout_truncated").bool(stdout.truncated).str("stderr_truncated").bool(stderr.truncated);
        let pack = text(pack.str("timed_out"), timed_out);
        let pack = text(pack.str("reason"), self.reason.map(|reason| reason.name));
        let pack = pack.str("amount").uint(self.reason.map_or(0, |reason| reason.amount));
        pack.str("duration_s").float(duration).str("incarnation").uint(incarnation).0
    }

    fn pack_info(&self, pack: Pack) -> Pack {
        let (code, signal) = self.outcome();
        let done = matches!(self.state, State::Done);
        let arguments =
            || self.title.split_inclusive(|b| *b == 0).map(|argument| argument.strip_suffix(b"\0").unwrap_or(argument));
        let pack = pack.map(11).str("exec_id").str(&self.exec_id).str("argv").array(arguments().count());
        let mut pack = arguments().fold(pack, |pack, argument| pack.bin(argument));
        pack = pack.str("running").bool(!done).str("started_at").float(self.started_unix);
        pack = pack.str("detached").bool(self.detached).str("pid").uint(self.pid as u64).str("exit_code");
        pack = if done { pack.uint(code) } else { pack.nil() }.str("signal");
        pack = match signal {
            Some(name) if done => pack.str(&name),
            _ => pack.nil(),
        };
        pack = pack.str("stdout_bytes").uint(self.outputs[0].seen).str("stderr_bytes").uint(self.outputs[1].seen);
        pack.str("stdin_bytes").uint(self.fed.total)
    }
}

/// A signal's name without SIG; real-time ones by number.
fn signal_name(signal: i32) -> String {
    const NAMES: [&str; 31] = [
        "HUP", "INT", "QUIT", "ILL", "TRAP", "ABRT", "BUS", "FPE", "KILL", "USR1", "SEGV", "USR2", "PIPE", "ALRM",
        "TERM", "STKFLT", "CHLD", "CONT", "STOP", "TSTP", "TTIN", "TTOU", "URG", "XCPU", "XFSZ", "VTALRM", "PROF",
        "WINCH", "IO", "PWR", "SYS",
    ];
    match NAMES.get(signal as usize - 1) {
        Some(name) => (*name).to_owned(),
        None => format!("RTMIN+{}", signal - 34),
    }
}
