//! What PID 1 of a sandbox does between its birth and serving: mounts, pivot, privileges, seccomp.
//!
//! It starts as a copy of the zygote (`launcher::zygote`) on the launcher's private root (`launcher::root`), with every
//! capability in a user namespace of its own, and ends in the sandbox's root with the few that aether needs.

pub mod groups;
mod network;
mod root;
pub mod seccomp;

use crate::birth::{Birth, BirthReply, Sandbox, FD_CGROUP2, FD_LISTENER, FD_OOM_ADJ, FD_SPILL, FIXED_FDS, PREPARED};
use crate::inside::groups::Groups;
use crate::sys::{self, now_us, process, socket, At, Failure};
use std::ffi::CString;
use std::os::fd::{IntoRawFd, OwnedFd, RawFd};

/// The socket to the launcher.
const CONTROL: RawFd = 3;
const MAX_MESSAGE: usize = 128 * 1024;

/// CHOWN, DAC_OVERRIDE, FOWNER, FSETID, KILL, SETGID, SETUID, NET_BIND_SERVICE, SYS_CHROOT: what aether keeps, and the most
/// that commands can have.
const CAPABILITIES: u64 = 1 | 1 << 1 | 1 << 3 | 1 << 4 | 1 << 5 | 1 << 6 | 1 << 7 | 1 << 10 | 1 << 18;

/// What the zygote finds out once for all sandboxes.
pub struct Ahead {
    filter: seccomp::LateFilter,
    masked: Vec<CString>,
}

impl Ahead {
    /// Also puts on what every copy of this process shall inherit.
    pub fn new() -> Result<Self, Failure> {
        seccomp::install_early_filter().at("privileges", || "install the seccomp filter".into())?;
        Ok(Ahead { filter: seccomp::LateFilter::compile(), masked: root::files_to_mask() })
    }
}

/// Becomes a sandbox, or ends the process: with status 0 when the launcher has gone before it asked for one.
pub fn enter(ahead: &Ahead) -> Sandbox {
    let ready = match prepare(ahead) {
        Ok(Some(ready)) => ready,
        Ok(None) => std::process::exit(0),
        Err(Failure { stage, what, errno }) => refuse(stage, what, errno),
    };
    let mut buffer = vec![0; MAX_MESSAGE];
    let (length, fds) = match socket::receive(CONTROL, &mut buffer, 0) {
        Ok((0, _)) | Err(_) => std::process::exit(0),
        Ok(message) => message,
    };
    let mut clock = Clock { last: now_us(), us: Vec::new() };
    match become_sandbox(&buffer[..length], fds, ready, &ahead.filter, &mut clock) {
        Ok(sandbox) => {
            reply(&BirthReply { ready: true, stage: String::new(), error: String::new(), errno: 0, us: clock.us });
            sandbox
        }
        Err(Failure { stage, what, errno }) => refuse(stage, what, errno),
    }
}

/// Ends the process, with last words for the launcher.
pub fn refuse(stage: &str, error: String, errno: i32) -> ! {
    reply(&BirthReply { ready: false, stage: stage.into(), error, errno, us: Vec::new() });
    std::process::exit(1);
}

fn reply(reply: &BirthReply) {
    // Nobody is left to tell when this fails: the launcher is gone and will sweep us.
    let _ = socket::send(CONTROL, &rmp_serde::to_vec_named(reply).unwrap_or_default(), &[]);
}

struct Clock {
    last: u64,
    us: Vec<(String, u64)>,
}

impl Clock {
    fn stage(&mut self, name: &str) {
        let now = now_us();
        self.us.push((name.into(), now - self.last));
        self.last = now;
    }
}

/// What does not depend on the sandbox.
struct Ready {
    /// The slot's directory on the uppers filesystem.
    upper: String,
    epoll: OwnedFd,
}

/// None when the launcher is gone.
fn prepare(ahead: &Ahead) -> Result<Option<Ready>, Failure> {
    process::prctl(libc::PR_SET_NAME, c"aether".as_ptr() as u64).at("network", || "set own name".into())?;
    // Before the first message, since the launcher's work goes on meanwhile.
    network::make()?;
    let epoll = unsafe { crate::sys!(SYS_epoll_create1, libc::EPOLL_CLOEXEC) };
    let epoll = sys::own(epoll.at("privileges", || "make an epoll set".into())?);
    let mut path = [0; 256];
    let length = match socket::receive(CONTROL, &mut path, 0) {
        Ok((length, _)) if length > 0 => length,
        _ => return Ok(None),
    };
    let upper = String::from_utf8_lossy(&path[..length]).into_owned();
    become_root()?;
    root::prepare(&upper, &ahead.masked)?;
    let stage = "privileges";
    process::bound_capabilities(CAPABILITIES).at(stage, || "drop the bounding set".into())?;
    Ok(socket::send(CONTROL, PREPARED, &[]).is_ok().then_some(Ready { upper, epoll }))
}

/// Takes the ids of the sandbox's root, once they are mapped, and cuts what else ties us to the launcher.
fn become_root() -> Result<(), Failure> {
    let stage = "privileges";
    let ids = unsafe {
        crate::sys!(SYS_setgroups, 0, std::ptr::null::<u32>())
            .and_then(|_| crate::sys!(SYS_setresgid, 0, 0, 0))
            .and_then(|_| crate::sys!(SYS_setresuid, 0, 0, 0))
    };
    ids.at(stage, || "become root of the sandbox".into())?;
    // Nobody inside may look into this process. Its memory belongs to the host's user namespace, so this cannot be undone
    // from inside; after the change of ids, which sets it by a rule of the machine.
    process::prctl(libc::PR_SET_DUMPABLE, 0).at(stage, || "forbid dumping".into())?;
    // A session and group of its own: a signal to "my group" must never reach the launcher's.
    unsafe { crate::sys!(SYS_setsid) }.at(stage, || "setsid".into())?;
    unsafe { crate::sys!(SYS_unshare, libc::CLONE_NEWCGROUP) }.at(stage, || "new cgroup namespace".into()).map(drop)
}

fn become_sandbox(
    message: &[u8],
    fds: Vec<OwnedFd>,
    ready: Ready,
    filter: &seccomp::LateFilter,
    clock: &mut Clock,
) -> Result<Sandbox, Failure> {
    let birth: Birth = rmp_serde::from_slice(message)
        .map_err(|e| Failure::new("message", format!("decode birth: {e}"), libc::EPROTO))?;
    let layers = birth.layers as usize;
    if fds.len() != FIXED_FDS + layers {
        return Err(Failure::new("message", format!("{} descriptors came with the birth", fds.len()), libc::EPROTO));
    }
    clock.stage("decode");
    root::attach_layers(&fds[FIXED_FDS..FIXED_FDS + layers])?;
    clock.stage("layers");
    root::mount_overlay(layers, &ready.upper)?;
    clock.stage("overlay");
    root::enter()?;
    clock.stage("pivot");
    drop_privileges(&birth.hostname, filter)?;
    clock.stage("privileges");
    let fixed: Vec<RawFd> = fds.into_iter().take(FIXED_FDS).map(IntoRawFd::into_raw_fd).collect();
    let launcher = sys::own(CONTROL as usize);
    Ok(Sandbox {
        listener: fixed[FD_LISTENER],
        epoll: ready.epoll.into_raw_fd(),
        oom_adj: fixed[FD_OOM_ADJ],
        spill: fixed[FD_SPILL],
        cgroup2: if birth.has_cgroup2 { fixed[FD_CGROUP2] } else { -1 },
        groups: Groups::new(Some(launcher)),
        birth,
    })
}

fn drop_privileges(hostname: &str, filter: &seccomp::LateFilter) -> Result<(), Failure> {
    let stage = "privileges";
    unsafe { crate::sys!(SYS_sethostname, hostname.as_ptr(), hostname.len()) }
        .at(stage, || format!("set the host name to {hostname:?}"))?;
    process::set_capabilities(CAPABILITIES).at(stage, || "drop capabilities".into())?;
    filter.install().at(stage, || "install the seccomp filter".into())
}
