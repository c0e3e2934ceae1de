//! Starting a command: everything is looked up and laid out before clone; between clone and exec only system calls.

use super::fault::{describe, Fault};
use super::limits::Limits;
use super::os::{self, check, errno, Errno, Fd};
use super::terminal;
use super::users::{self, User};
use crate::birth::Birth;
use crate::inside::groups::Groups;
use crate::inside::seccomp;
use crate::msgpack::Value;
use std::collections::BTreeMap;
use std::ffi::{c_char, CStr};

const CLONE_INTO_CGROUP: u64 = 0x2_0000_0000;
/// The longest argument that the kernel takes, with its NUL; a longer shell line goes through a descriptor.
const MAX_ARGUMENT: usize = 128 * 1024;
const DEFAULT_PATH: &[u8] = b"/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// C strings side by side, as execve wants them.
#[derive(Default)]
struct Strings {
    bytes: Vec<u8>,
    starts: Vec<usize>,
}

impl Strings {
    /// Adds the parts as one string. False: there is a NUL in them.
    fn push(&mut self, parts: &[&[u8]]) -> bool {
        self.starts.push(self.bytes.len());
        parts.iter().for_each(|part| self.bytes.extend_from_slice(part));
        let clean = !self.bytes[self.starts[self.starts.len() - 1]..].contains(&0);
        self.bytes.push(0);
        clean
    }

    fn pointers(&self) -> Vec<*const c_char> {
        let start = |at: &usize| self.bytes[*at..].as_ptr().cast();
        self.starts.iter().map(start).chain([std::ptr::null()]).collect()
    }

    fn get(&self, index: usize) -> &[u8] {
        let start = self.starts.get(index).copied().unwrap_or(self.bytes.len());
        CStr::from_bytes_until_nul(&self.bytes[start..]).map_or(&[], CStr::to_bytes)
    }
}

/// A command, ready to start.
pub struct Plan {
    user: User,
    argv: Strings,
    env: Strings,
    /// What to execute: the first of these that exists and may be executed.
    programs: Strings,
    /// Where to start: the first of these that can be entered.
    cwds: Strings,
    /// Where to go from there, if anywhere.
    onwards: Strings,
    limits: Limits,
    /// A shell line that is too long to be an argument.
    script: Option<Fd>,
}

impl Plan {
    /// From the parameters of `exec`, and those that were sent ahead of it (or the same again).
    pub fn new(params: Value, ahead: Value, birth: &Birth) -> Result<Plan, Fault> {
        Plan::make(params, ahead, birth, &[])
    }

    /// A shell with the user, environment and directory of the parameters.
    pub fn of_shell(params: Value, birth: &Birth, argv: &[&[u8]]) -> Result<Plan, Fault> {
        Plan::make(params, params, birth, argv)
    }

    fn make(params: Value, ahead: Value, birth: &Birth, fixed: &[&[u8]]) -> Result<Plan, Fault> {
        let wanted = params.get("user").and_then(Value::str).unwrap_or(&birth.init_user);
        let user = users::look_up(if wanted.is_empty() { "root" } else { wanted })?;
        let owner = user.clone();
        let env = environment(params, ahead, birth, &owner)?;
        let mut plan = Plan {
            user,
            argv: Strings::default(),
            env: Strings::default(),
            programs: Strings::default(),
            cwds: Strings::default(),
            onwards: Strings::default(),
            limits: Limits::new(params)?,
            script: None,
        };
        for (name, value) in &env {
            plan.env.push(&[name, b"=", value]);
        }
        match params.get("line").or(ahead.get("line")).map(|line| line.bytes().ok_or(())) {
            _ if !fixed.is_empty() => {
                plan.programs.push(&fixed[..1]);
                for argument in fixed {
                    plan.argv.push(&[argument]);
                }
            }
            Some(line) => plan.shell(line.map_err(|()| Fault::invalid("line must be bytes"))?)?,
            None => {
                let sent_ahead = ahead.get("argv").and_then(Value::bytes);
                plan.arguments(params, sent_ahead, env.get(&b"PATH"[..]).copied().unwrap_or(DEFAULT_PATH))?;
            }
        }
        plan.directories(params, birth)?;
        Ok(plan)
    }

    fn shell(&mut self, line: &[u8]) -> Result<(), Fault> {
        let bash = unsafe { libc::access(c"/bin/bash".as_ptr(), libc::X_OK) } == 0;
        let shell: &[u8] = if bash { b"/bin/bash" } else { b"/bin/sh" };
        self.programs.push(&[shell]);
        self.argv.push(&[shell]);
        self.argv.push(&[b"-c"]);
        if line.contains(&0) {
            return Err(Fault::invalid("the command line has a NUL byte in it"));
        }
        if line.len() < MAX_ARGUMENT {
            self.argv.push(&[line]);
            return Ok(());
        }
        let script = script(line).map_err(|e| Fault::internal("cannot hold the command line", e))?;
        self.script = Some(script);
        self.argv.push(&[READ_SCRIPT]);
        Ok(())
    }

    fn arguments(&mut self, params: Value, ahead: Option<&[u8]>, path: &[u8]) -> Result<(), Fault> {
        for argument in ahead.unwrap_or_default().split_inclusive(|b| *b == 0) {
            self.argv.push(&[argument.strip_suffix(b"\0").unwrap_or(argument)]);
        }
        let argv = params.get("argv").and_then(Value::array).ok_or_else(|| Fault::invalid("argv must be a list"))?;
        for (index, argument) in argv.enumerate() {
            let bytes = argument.bytes().ok_or_else(|| Fault::invalid(format!("argument {index} must be bytes")))?;
            if !self.argv.push(&[bytes]) {
                return Err(Fault::invalid(format!("argument {index} has a NUL byte in it")));
            }
        }
        if self.argv.starts.is_empty() {
            return Err(Fault::invalid("argv is empty").hint("give at least the program to run"));
        }
        let name = self.argv.get(0);
        if name.contains(&b'/') {
            self.programs.push(&[name]);
        } else if !name.is_empty() {
            for directory in path.split(|b| *b == b':') {
                let directory = if directory.is_empty() { b"." } else { directory };
                self.programs.push(&[directory, b"/", name]);
            }
        }
        Ok(())
    }

    fn directories(&mut self, params: Value, birth: &Birth) -> Result<(), Fault> {
        let asked = params.get("cwd").and_then(Value::bytes).unwrap_or_default();
        if !asked.starts_with(b"/") {
            let home = Some(self.user.home.as_slice()).filter(|home| home.starts_with(b"/"));
            let starts =
                if birth.workdir.is_empty() { [home, Some(b"/")] } else { [Some(birth.workdir.as_bytes()), None] };
            for start in starts.into_iter().flatten() {
                self.cwds.push(&[start]);
            }
        }
        let place = if asked.starts_with(b"/") { &mut self.cwds } else { &mut self.onwards };
        if !asked.is_empty() && !place.push(&[asked]) {
            return Err(Fault::invalid("cwd has a NUL byte in it"));
        }
        Ok(())
    }

    /// The arguments, each with its NUL, cut to about `most` bytes.
    pub fn title(&self, most: usize) -> Vec<u8> {
        self.argv.bytes[..self.argv.bytes.len().min(most)].to_vec()
    }
}

/// The shell reads all of it at once, as it would an argument; its first command closes the descriptor.
const READ_SCRIPT: &[u8] = b". /proc/self/fd/4";
const CLOSE_SCRIPT: &[u8] = b"exec 4<&-; ";
const SCRIPT: i32 = 4;

/// A file without a name that holds a shell line.
fn script(line: &[u8]) -> os::Result<Fd> {
    let file = check(unsafe { libc::memfd_create(c"line".as_ptr(), libc::MFD_CLOEXEC) }).map(|fd| Fd(fd as i32))?;
    os::write_all(file.0, CLOSE_SCRIPT)?;
    os::write_all(file.0, line)?;
    os::write_all(file.0, b"\n")?;
    Ok(file)
}

/// PATH, what passwd says of the user, the sandbox's own variables, the command's: the later wins.
fn environment<'a>(
    params: Value<'a>,
    ahead: Value<'a>,
    birth: &'a Birth,
    user: &'a User,
) -> Result<BTreeMap<&'a [u8], &'a [u8]>, Fault> {
    let shell: &[u8] = if user.shell.is_empty() { b"/bin/sh" } else { &user.shell };
    let home: &[u8] = if user.home.is_empty() { b"/" } else { &user.home };
    let name = &user.name[..];
    let mut env = BTreeMap::<&[u8], &[u8]>::from([
        (&b"PATH"[..], DEFAULT_PATH),
        (b"HOME", home),
        (b"USER", name),
        (b"LOGNAME", name),
        (b"SHELL", shell),
    ]);
    if params.get("pty").is_some() {
        env.insert(b"TERM", b"xterm-256color");
    }
    env.extend(birth.env.iter().map(|(name, value)| (name.as_bytes(), value.as_bytes())));
    if let Some(entries) = params.get("env") {
        let mut entries = entries.entries().ok_or_else(|| Fault::invalid("env must be a map"))?;
        while let (Some(name), Some(value)) = (entries.next(), entries.next()) {
            let (Some(name), Some(value)) = (name.bytes(), value.bytes()) else {
                return Err(Fault::invalid("names and values of env must be text"));
            };
            env.insert(name, value);
        }
    }
    let sent_ahead = ahead.get("env").and_then(Value::bytes).unwrap_or_default();
    for variable in sent_ahead.split(|b| *b == 0).filter(|variable| !variable.is_empty()) {
        let equals = variable.iter().position(|b| *b == b'=').unwrap_or(variable.len());
        env.insert(&variable[..equals], variable.get(equals + 1..).unwrap_or_default());
    }
    for (name, value) in &env {
        if name.is_empty() || name.contains(&b'=') || name.contains(&0) || value.contains(&0) {
            let name = String::from_utf8_lossy(name);
            return Err(Fault::invalid(format!("environment variable {name:?} is empty or has '=' or NUL in it")));
        }
    }
    Ok(env)
}

/// What commands get from aether, and what aether itself must not keep in them.
pub struct Setting {
    pub oom_adj: i32,
    pub cgroup2: i32,
    pub groups: Groups,
    files: libc::rlimit,
    schedule: SchedAttr,
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
struct SchedAttr {
    size: u32,
    policy: u32,
    flags: u64,
    nice: i32,
    priority: u32,
    /// The slice asked for, in nanoseconds; 0: the default.
    runtime: u64,
    deadline: u64,
    period: u64,
}

impl Setting {
    /// Also raises aether's own limit of open files to what it may have; commands get the former one back.
    pub fn new(oom_adj: i32, cgroup2: i32, groups: Groups) -> Setting {
        let mut files = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
        let mut schedule = SchedAttr::default();
        unsafe {
            libc::getrlimit(libc::RLIMIT_NOFILE, &mut files);
            libc::setrlimit(libc::RLIMIT_NOFILE, &libc::rlimit { rlim_cur: files.rlim_max, ..files });
            libc::syscall(libc::SYS_sched_getattr, 0, &mut schedule, std::mem::size_of::<SchedAttr>(), 0);
        }
        schedule.runtime = 0;
        Setting { oom_adj, cgroup2, groups, files, schedule }
    }

    /// Commands start as the kernel's first choice when memory runs out; aether itself must not be.
    fn raise_oom(&self, raised: bool) {
        if self.oom_adj >= 0 {
            let _ = os::write(self.oom_adj, if raised { b"500" } else { b"0" });
        }
    }
}

fn group_path(number: u32, file: &str) -> Vec<u8> {
    format!("c-{number}{file}\0").into_bytes()
}

fn c_path(path: &[u8]) -> &CStr {
    CStr::from_bytes_until_nul(path).unwrap_or(c"")
}

/// Makes the cgroup of a command below the sandbox's.
fn make_group(cgroup2: i32, number: u32) -> os::Result<Fd> {
    let path = group_path(number, "");
    match check(unsafe { libc::mkdirat(cgroup2, c_path(&path).as_ptr(), 0o755) }) {
        Err(error) if error != libc::EEXIST => Err(error),
        _ => os::open(cgroup2, c_path(&path), libc::O_PATH | libc::O_DIRECTORY, 0, 0),
    }
}

/// Removes the cgroup of a command. False: something still runs in it.
pub fn remove_group(cgroup2: i32, number: u32) -> bool {
    let path = group_path(number, "");
    let removed = check(unsafe { libc::unlinkat(cgroup2, c_path(&path).as_ptr(), libc::AT_REMOVEDIR) });
    cgroup2 < 0 || !matches!(removed, Err(libc::EBUSY))
}

/// Processes in the group of a command. Empty where there are no groups.
pub fn members(cgroup2: i32, number: u32) -> Vec<i32> {
    let path = group_path(number, "/cgroup.procs");
    let file = os::open(cgroup2, c_path(&path), libc::O_RDONLY, 0, 0);
    let (mut text, mut pids) = (Vec::new(), Vec::new());
    let Ok(file) = file else { return pids };
    while text.len() < MAX_MEMBERS && os::read_onto(file.0, &mut text, 4096).is_ok_and(|size| size > 0) {}
    let numbers = text.split(|byte| *byte == b'\n').filter_map(|line| std::str::from_utf8(line).ok());
    pids.extend(numbers.filter_map(|line| line.parse::<i32>().ok()).filter(|pid| *pid > 1));
    pids
}

/// Bytes of `cgroup.procs` that are looked at: some thousand processes.
const MAX_MEMBERS: usize = 64 * 1024;

/// Moves a process into the group of a number, which is made when it is not there.
pub fn move_to(cgroup2: i32, number: u32, pid: i32) -> os::Result<()> {
    let group = make_group(cgroup2, number)?;
    let file = os::open(group.0, c"cgroup.procs", libc::O_WRONLY, 0, 0)?;
    os::write_all(file.0, format!("{pid}").as_bytes())
}

/// Kills everything that descends from a command, whatever sessions and parents it made for itself. `main` is the pid of
/// its main process as long as that is ours: it names the process group where there are no control groups.
pub fn kill_tree(cgroup2: i32, number: u32, main: Option<i32>) {
    if cgroup2 >= 0 {
        let path = group_path(number, "/cgroup.kill");
        let file = os::open(cgroup2, c_path(&path), libc::O_WRONLY, 0, 0);
        if file.and_then(|file| os::write_all(file.0, b"1")).is_ok() {
            return;
        }
    }
    if let Some(main) = main {
        unsafe { libc::kill(-main, libc::SIGKILL) };
    }
}

/// Descriptors of a new command: its ends, which aether closes after the start.
pub struct Ends {
    pub stdin: Fd,
    pub stdout: Fd,
    /// None: the same as stdout.
    pub stderr: Option<Fd>,
    pub status: Fd,
    /// Others, with their numbers in the child in rising order.
    pub more: Vec<(Fd, i32)>,
    /// All three are a terminal, which becomes the command's own.
    pub terminal: bool,
}

#[derive(Clone, Copy)]
#[repr(u32)]
enum Stage {
    Cgroup = 1,
    Descriptors,
    User,
    Cwd,
    Limits,
    Filter,
    Exec,
}

/// A child that could not execute its command says so in this many bytes: stage, errno.
pub const REPORT: usize = 8;

/// What a report means: a command that "ran" with this exit code and message, or one that never came to be.
pub enum Failed {
    Shell { code: i32, message: String },
    Fault(Fault),
}

pub fn explain(report: &[u8; REPORT], plan_name: &[u8], cwd: &[u8], user: &str) -> Failed {
    let word = |at: usize| u32::from_le_bytes([report[at], report[at + 1], report[at + 2], report[at + 3]]);
    let (stage, errno) = (word(0), word(4) as Errno);
    let name = String::from_utf8_lossy(plan_name);
    if stage == Stage::Exec as u32 {
        return match errno {
            libc::E2BIG => Failed::Fault(
                Fault::new("too_large", format!("{name}: an argument, or all with the environment, is longer than the kernel takes"))
                    .hint("one argument may have 128 KiB, all together with the environment 2 MiB (or a quarter of stack_mb); pass more through stdin or a file"),
            ),
            libc::ENOENT if !plan_name.contains(&b'/') => {
                Failed::Shell { code: 127, message: format!("dsec: {name}: command not found\n") }
            }
            libc::ENOENT | libc::ENOTDIR => {
                Failed::Shell { code: 127, message: format!("dsec: {name}: {}\n", describe(errno)) }
            }
            _ => Failed::Shell { code: 126, message: format!("dsec: {name}: {}\n", describe(errno)) },
        };
    }
    Failed::Fault(match stage {
        s if s == Stage::Cwd as u32 => {
            let fault = Fault::file(errno, cwd);
            Fault { message: format!("cwd {}", fault.message), ..fault }
        }
        s if s == Stage::User as u32 => Fault::invalid(format!("cannot become user {user:?}: {}", describe(errno)))
            .hint("its id is not one of the sandbox's"),
        s if s == Stage::Cgroup as u32 => Fault::internal("cannot put the command under the sandbox's limits", errno),
        _ => Fault::internal("cannot prepare the command", errno),
    })
}

impl Plan {
    pub fn cwd(&self) -> &[u8] {
        if self.onwards.starts.is_empty() { &self.cwds } else { &self.onwards }.get(0)
    }

    pub fn uid(&self) -> u32 {
        self.user.uid
    }

    pub fn user_name(&self) -> String {
        String::from_utf8_lossy(&self.user.name).into_owned()
    }

    /// Clones and executes; the pid. Failures after the clone come as a report on `ends.status`.
    pub fn start(&self, number: u32, setting: &Setting, ends: &Ends) -> Result<i32, Fault> {
        let argv = self.argv.pointers();
        let env = self.env.pointers();
        let programs = self.programs.pointers();
        let cwds = self.cwds.pointers();
        let onwards = self.onwards.pointers()[0];
        let mut arguments: libc::clone_args = unsafe { std::mem::zeroed() };
        arguments.exit_signal = libc::SIGCHLD as u64;
        let group = match setting.cgroup2 {
            none if none < 0 => None,
            cgroup2 => {
                Some(make_group(cgroup2, number).map_err(|e| Fault::internal("cannot make a control group", e))?)
            }
        };
        if let Some(group) = &group {
            arguments.flags |= CLONE_INTO_CGROUP;
            arguments.cgroup = group.0 as u64;
        }
        setting.raise_oom(true);
        // SAFETY: aether has one thread; the child runs on a copy of the memory and calls nothing but the kernel.
        let pid = unsafe { libc::syscall(libc::SYS_clone3, &arguments, std::mem::size_of_val(&arguments)) };
        if pid == 0 {
            let (argv, env, programs, cwds) = (&argv, &env, &programs, &cwds);
            let child = Child { plan: self, setting, ends, argv, env, programs, cwds, onwards };
            unsafe { child.run() }
        }
        let failure = errno();
        setting.raise_oom(false);
        match pid {
            -1 => {
                remove_group(setting.cgroup2, number);
                Err(Fault::new("capacity", format!("cannot start a process: {}", describe(failure))).retryable())
            }
            pid => Ok(pid as i32),
        }
    }
}

/// The child between clone and exec. No allocation, no formatting, no lock: another's memory could be in any state.
struct Child<'a> {
    plan: &'a Plan,
    setting: &'a Setting,
    ends: &'a Ends,
    argv: &'a [*const c_char],
    env: &'a [*const c_char],
    programs: &'a [*const c_char],
    cwds: &'a [*const c_char],
    onwards: *const c_char,
}

const STATUS: i32 = 3;

impl Child<'_> {
    unsafe fn run(&self) -> ! {
        unsafe {
            self.must(Stage::Descriptors, libc::syscall(libc::SYS_dup3, self.ends.status.0, STATUS, libc::O_CLOEXEC));
            self.join_limits();
            self.reset_process();
            self.set_descriptors();
            if self.ends.terminal {
                self.must(Stage::Descriptors, terminal::take_control());
            }
            self.become_user();
            self.enter_directory();
            if !self.plan.limits.set() {
                self.fail(Stage::Limits, *libc::__errno_location());
            }
            if let Err(error) = seccomp::install_command_filter() {
                self.fail(Stage::Filter, error.0);
            }
            let failure = self.execute();
            self.fail(Stage::Exec, failure)
        }
    }

    /// Into the sandbox's memory, CPU and pids groups, where aether itself is not.
    unsafe fn join_limits(&self) {
        for file in self.setting.groups.files() {
            self.must(Stage::Cgroup, unsafe { libc::write(*file, c"0\n".as_ptr().cast(), 2) } as i64);
        }
    }

    unsafe fn reset_process(&self) {
        unsafe {
            libc::setsid();
            let none = 0u64;
            libc::syscall(libc::SYS_rt_sigprocmask, libc::SIG_SETMASK, &none, 0, 8);
            libc::syscall(libc::SYS_sched_setattr, 0, &self.setting.schedule, 0);
            libc::syscall(libc::SYS_prlimit64, 0, libc::RLIMIT_NOFILE, &self.setting.files, 0);
        }
    }

    unsafe fn set_descriptors(&self) {
        let stderr = self.ends.stderr.as_ref().unwrap_or(&self.ends.stdout);
        for (from, to) in [(self.ends.stdin.0, 0), (self.ends.stdout.0, 1), (stderr.0, 2)] {
            self.must(Stage::Descriptors, unsafe { libc::syscall(libc::SYS_dup3, from, to, 0) });
        }
        let mut unused = STATUS + 1;
        if let Some(script) = &self.plan.script {
            let copied = match script.0 {
                SCRIPT => unsafe { libc::syscall(libc::SYS_fcntl, SCRIPT, libc::F_SETFD, 0) },
                other => unsafe { libc::syscall(libc::SYS_dup3, other, SCRIPT, 0) },
            };
            self.must(Stage::Descriptors, copied);
            unused = SCRIPT + 1;
        }
        for (fd, place) in &self.ends.more {
            unsafe {
                self.must(Stage::Descriptors, libc::syscall(libc::SYS_dup3, fd.0, *place, 0));
                if *place > unused {
                    self.must(Stage::Descriptors, libc::syscall(libc::SYS_close_range, unused, *place - 1, 0));
                }
            }
            unused = *place + 1;
        }
        self.must(Stage::Descriptors, unsafe { libc::syscall(libc::SYS_close_range, unused, u32::MAX, 0) });
    }

    /// The raw calls: the C library's would signal threads that do not exist.
    unsafe fn become_user(&self) {
        let user = &self.plan.user;
        let (uid, gid) = (user.uid, user.gid);
        unsafe {
            self.must(Stage::User, libc::syscall(libc::SYS_setgroups, user.groups.len(), user.groups.as_ptr()));
            self.must(Stage::User, libc::syscall(libc::SYS_setresgid, gid, gid, gid));
            self.must(Stage::User, libc::syscall(libc::SYS_setresuid, uid, uid, uid));
            // The change makes a process traceable by a setting of the machine; this one still has aether's memory.
            libc::syscall(libc::SYS_prctl, libc::PR_SET_DUMPABLE, 0, 0, 0, 0);
        }
    }

    unsafe fn enter_directory(&self) {
        let mut first = 0;
        for path in self.cwds.iter().take_while(|path| !path.is_null()) {
            if unsafe { libc::syscall(libc::SYS_chdir, *path) } == 0 {
                if !self.onwards.is_null() {
                    self.must(Stage::Cwd, unsafe { libc::syscall(libc::SYS_chdir, self.onwards) });
                }
                return;
            }
            if first == 0 {
                first = unsafe { *libc::__errno_location() };
            }
        }
        self.fail(Stage::Cwd, first)
    }

    /// execvp's rule: the first that can be executed; one that may not be is remembered, one that is not there is passed.
    unsafe fn execute(&self) -> Errno {
        let mut failure = libc::ENOENT;
        for program in self.programs.iter().take_while(|program| !program.is_null()) {
            match unsafe { self.execute_one(*program) } {
                libc::ENOENT | libc::ENOTDIR if self.programs.len() > 2 => {}
                libc::EACCES => failure = libc::EACCES,
                other => return other,
            }
        }
        failure
    }

    /// A file that is still open for writing is tried again for a while: another child of aether, on its own way to exec,
    /// may hold the descriptor with which the file was just uploaded.
    unsafe fn execute_one(&self, program: *const c_char) -> Errno {
        let pause = libc::timespec { tv_sec: 0, tv_nsec: 2_000_000 };
        for _ in 0..50 {
            unsafe {
                libc::syscall(libc::SYS_execve, program, self.argv.as_ptr(), self.env.as_ptr());
                if *libc::__errno_location() != libc::ETXTBSY {
                    return *libc::__errno_location();
                }
                libc::syscall(libc::SYS_nanosleep, &pause, 0);
            }
        }
        libc::ETXTBSY
    }

    fn must(&self, stage: Stage, result: i64) {
        if result < 0 {
            self.fail(stage, unsafe { *libc::__errno_location() });
        }
    }

    fn fail(&self, stage: Stage, errno: Errno) -> ! {
        let words = [stage as u32, errno as u32];
        unsafe {
            libc::syscall(libc::SYS_write, STATUS, words.as_ptr(), REPORT);
            libc::_exit(127)
        }
    }
}
