//! The zygote: a small, clean process whose copies become PID 1 of sandboxes.
//!
//! Starting a program built with glibc costs half a millisecond of CPUID traps in a virtual machine, more than all else
//! that a sandbox needs; copying one that has started costs a tenth of that. The zygote is executed afresh at the start
//! (so that nothing of the launcher's memory is ever in a sandbox), knows no secret, holds no descriptor but its socket,
//! and makes each copy a child of the launcher.
//!
//! A copy cannot be looked into from inside its sandbox: it is not dumpable, and its memory belongs to the host's user
//! namespace, so that tracing it takes privilege over the host (`inside`).

use crate::birth::Sandbox;
use crate::inside;
use crate::sys::process::{self, CloneArgs, CLONE_INTO_CGROUP};
use crate::sys::{self, c, socket, At, Errno, Failure};
use serde::{Deserialize, Serialize};
use std::ffi::CStr;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};

const STAGE: &str = "clone";
/// The zygote's socket to the launcher, and then a newborn's: both processes find it at the same place.
const CONTROL: RawFd = 3;
/// Name of the process, also inside.
pub const NAME: &str = "aether";

/// One clone to make. Descriptors: the newborn's socket and, if there is one, the v2 group to be born into.
#[derive(Serialize, Deserialize)]
struct Order {
    /// The host's id of the sandbox's root.
    root: u32,
    ids: u32,
}

/// Descriptors: pidfd, user namespace, oom_score_adj open for writing. With an error: the pidfd alone, or nothing.
#[derive(Serialize, Deserialize)]
struct Answer {
    pid: i32,
    start: u64,
    error: String,
    errno: i32,
}

/// A cloned PID 1. It waits for the first message on its socket.
pub struct Newborn {
    pub pid: i32,
    pub start: u64,
    pub pidfd: OwnedFd,
    pub userns: OwnedFd,
    pub oom_adj: OwnedFd,
}

/// The launcher's end. Orders are answered in their order.
pub struct Zygote {
    socket: OwnedFd,
    pid: i32,
}

impl Zygote {
    /// Starts the process, in the launcher's mount namespace and groups. `null` becomes its input and output.
    pub fn start(null: &OwnedFd) -> Result<Self, Failure> {
        let (ours, theirs) = socket::pair().at(STAGE, || "socketpair".into())?;
        copy_program().map_err(Errno::from).at(STAGE, || "copy the program into the private root".into())?;
        // SAFETY: this process has one thread; the child makes system calls only.
        match unsafe { libc::fork() } {
            0 => execute(&theirs, null),
            -1 => Err(Failure::new(STAGE, "fork the zygote", libc::EAGAIN)),
            pid => Ok(Zygote { socket: ours, pid }),
        }
    }

    pub fn pid(&self) -> i32 {
        self.pid
    }

    pub fn fd(&self) -> RawFd {
        self.socket.as_raw_fd()
    }

    /// Ends the process: it finds its socket closed.
    pub fn end(&self) {
        unsafe {
            let _ = crate::sys!(SYS_shutdown, self.socket.as_raw_fd(), libc::SHUT_RDWR);
            let _ = crate::sys!(SYS_wait4, self.pid, 0, 0, 0);
        }
    }

    pub fn order(&self, root: u32, ids: u32, control: &OwnedFd, cgroup: Option<&OwnedFd>) -> Result<(), Failure> {
        let data = rmp_serde::to_vec(&Order { root, ids }).unwrap_or_default();
        let fds: Vec<RawFd> = std::iter::once(control).chain(cgroup).map(AsRawFd::as_raw_fd).collect();
        socket::send(self.socket.as_raw_fd(), &data, &fds).at(STAGE, || "send to the zygote".into())
    }

    /// The answer to the oldest order, which has come; `None` when the zygote has died.
    pub fn take(&self) -> Option<Result<Newborn, Failure>> {
        let mut buffer = [0; 1024];
        let (length, mut fds) = socket::receive(self.socket.as_raw_fd(), &mut buffer, 0).ok()?;
        let answer: Answer = rmp_serde::from_slice(&buffer[..length]).ok()?;
        if answer.errno != 0 {
            if let Some(stillborn) = fds.pop() {
                let _ = process::send_signal(&stillborn, libc::SIGKILL);
                process::wait_readable(&stillborn, 1_000_000);
                let _ = process::reap(&stillborn);
            }
            return Some(Err(Failure::new(STAGE, answer.error, answer.errno)));
        }
        let (oom_adj, userns, pidfd) = (fds.pop()?, fds.pop()?, fds.pop()?);
        Some(Ok(Newborn { pid: answer.pid, start: answer.start, pidfd, userns, oom_adj }))
    }
}

/// What the zygote executes, in the private root. A link to /proc/self/exe in the place of a program makes commands execute
/// it too: they learn no path of the host from that, and may not read it.
const PROGRAM: &CStr = c"/aether";

fn copy_program() -> std::io::Result<()> {
    use std::os::unix::ffi::OsStrExt;
    use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
    let path = std::ffi::OsStr::from_bytes(PROGRAM.to_bytes());
    let mut copy = std::fs::OpenOptions::new().write(true).create_new(true).mode(0o700).open(path)?;
    std::io::copy(&mut std::fs::File::open("/proc/self/exe")?, &mut copy)?;
    copy.set_permissions(std::fs::Permissions::from_mode(0o711))
}

/// In the forked child: becomes the zygote.
fn execute(socket: &OwnedFd, null: &OwnedFd) -> ! {
    let name = c(NAME);
    let arguments = [name.as_ptr(), std::ptr::null()];
    let environment = [std::ptr::null::<i8>()];
    // The launcher keeps its descriptors above all targets here (`launcher::arrange_descriptors`).
    unsafe {
        for target in 0..2 {
            let _ = crate::sys!(SYS_dup3, null.as_raw_fd(), target, 0);
        }
        let _ = crate::sys!(SYS_dup3, socket.as_raw_fd(), CONTROL, 0);
        let _ = crate::sys!(SYS_close_range, CONTROL + 1, u32::MAX, 0);
        let _ = crate::sys!(SYS_execve, PROGRAM.as_ptr(), arguments.as_ptr(), environment.as_ptr());
        libc::_exit(127)
    }
}

/// Entry point of the zygote. Returns in every sandbox, once it is one; never in the zygote itself.
pub fn run() -> Sandbox {
    let ahead = inside::Ahead::new().unwrap_or_else(|failure| {
        crate::sys::say(format_args!("zygote: {failure}"));
        std::process::exit(1)
    });
    let mut buffer = [0; 256];
    loop {
        let Ok((length, fds)) = socket::receive(CONTROL, &mut buffer, 0) else { std::process::exit(1) };
        if length == 0 {
            std::process::exit(0); // the launcher is gone
        }
        match serve(&buffer[..length], fds) {
            Ok(Born::Inside) => return inside::enter(&ahead),
            Ok(Born::Outside(answer, fds)) => send(&answer, &fds),
            Err(Failure { what, errno, .. }) => send(&Answer { pid: 0, start: 0, error: what, errno }, &[]),
        }
    }
}

fn send(answer: &Answer, fds: &[OwnedFd]) {
    let raw: Vec<RawFd> = fds.iter().map(AsRawFd::as_raw_fd).collect();
    if socket::send(CONTROL, &rmp_serde::to_vec(answer).unwrap_or_default(), &raw).is_err() {
        std::process::exit(1);
    }
}

enum Born {
    /// We are the newborn.
    Inside,
    Outside(Answer, Vec<OwnedFd>),
}

fn serve(order: &[u8], fds: Vec<OwnedFd>) -> Result<Born, Failure> {
    let malformed = |error: String| Failure::new(STAGE, error, libc::EPROTO);
    let order: Order = rmp_serde::from_slice(order).map_err(|e| malformed(format!("order: {e}")))?;
    let mut fds = fds.into_iter();
    let control = fds.next().ok_or_else(|| malformed("order without a socket".into()))?;
    let group = fds.next();
    let Some((pid, pidfd)) = clone(group.as_ref()).at(STAGE, || "clone3".into())? else {
        arrange_descriptors(control).at(STAGE, || "arrange descriptors".into()).unwrap_or_else(|failure| {
            let Failure { what, errno, .. } = failure;
            inside::refuse("clone", what, errno)
        });
        return Ok(Born::Inside);
    };
    Ok(match equip(&order, pid) {
        Ok((start, userns, oom_adj)) => {
            let answer = Answer { pid, start, error: String::new(), errno: 0 };
            Born::Outside(answer, vec![pidfd, userns, oom_adj])
        }
        // Only its parent, the launcher, can reap it.
        Err(Failure { what, errno, .. }) => Born::Outside(Answer { pid, start: 0, error: what, errno }, vec![pidfd]),
    })
}

/// Two processes come back: in the newborn with `None`.
fn clone(group: Option<&OwnedFd>) -> sys::Result<Option<(i32, OwnedFd)>> {
    let namespaces =
        libc::CLONE_NEWUSER | libc::CLONE_NEWPID | libc::CLONE_NEWNS | libc::CLONE_NEWUTS | libc::CLONE_NEWIPC;
    let mut pidfd: i32 = -1;
    let args = CloneArgs {
        flags: (namespaces | libc::CLONE_PARENT | libc::CLONE_PIDFD) as u64 | group.map_or(0, |_| CLONE_INTO_CGROUP),
        pidfd: &raw mut pidfd as u64,
        cgroup: group.map_or(0, |fd| fd.as_raw_fd() as u64),
        ..CloneArgs::default()
    };
    let pid = unsafe { crate::sys!(SYS_clone3, &raw const args, size_of::<CloneArgs>()) }?;
    Ok((pid != 0).then(|| (pid as i32, sys::own(pidfd as usize))))
}

/// In the newborn: its own socket takes the place of the zygote's; nothing else stays open but /dev/null at 0 to 2.
fn arrange_descriptors(control: OwnedFd) -> sys::Result<()> {
    unsafe {
        crate::sys!(SYS_dup3, control.as_raw_fd(), CONTROL, libc::O_CLOEXEC)?;
        std::mem::forget(control); // closed with all the others
        crate::sys!(SYS_dup3, 0, 2, 0)?;
        crate::sys!(SYS_close_range, CONTROL + 1, u32::MAX, 0).map(drop)
    }
}

/// Writes the id maps of a newborn, and opens what the launcher needs of it: its start time, user namespace, oom_score_adj.
fn equip(order: &Order, pid: i32) -> Result<(u64, OwnedFd, OwnedFd), Failure> {
    let process = sys::openat(libc::AT_FDCWD, &c(format!("/proc/{pid}")), libc::O_PATH | libc::O_DIRECTORY, 0);
    let process = process.at(STAGE, || "open /proc of PID 1".into())?;
    let process = process.as_raw_fd();
    let map = format!("0 {} {}\n", order.root, order.ids);
    for file in ["uid_map", "gid_map"] {
        let written = sys::write_file(process, &c(file), map.as_bytes());
        written.at(STAGE, || format!("write {file}"))?;
    }
    let open =
        |file: &str, flags: i32| sys::openat(process, &c(file), flags, 0).at(STAGE, || format!("open {file} of PID 1"));
    let start = process::start_time(pid).at(STAGE, || "read the start time of PID 1".into())?;
    Ok((start, open("ns/user", libc::O_RDONLY)?, open("oom_score_adj", libc::O_WRONLY)?))
}
