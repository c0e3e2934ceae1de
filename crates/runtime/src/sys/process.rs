//! Processes: clone3, pidfds, capabilities, scheduling.

use super::{own, Result};
use crate::sys;
use std::os::fd::{AsRawFd, OwnedFd};
use std::ptr::null;

pub const CLONE_INTO_CGROUP: u64 = 0x2_0000_0000;

/// The kernel's `struct clone_args`.
#[repr(C)]
#[derive(Default)]
pub struct CloneArgs {
    pub flags: u64,
    pub pidfd: u64,
    pub child_tid: u64,
    pub parent_tid: u64,
    pub exit_signal: u64,
    pub stack: u64,
    pub stack_size: u64,
    pub tls: u64,
    pub set_tid: u64,
    pub set_tid_size: u64,
    pub cgroup: u64,
}

pub fn pidfd_open(pid: i32) -> Result<OwnedFd> {
    unsafe { sys!(SYS_pidfd_open, pid, 0) }.map(own)
}

pub fn send_signal(pidfd: &OwnedFd, signal: i32) -> Result<()> {
    unsafe { sys!(SYS_pidfd_send_signal, pidfd.as_raw_fd(), signal, null::<u8>(), 0) }.map(drop)
}

/// Reaps our child behind a pidfd without waiting: `None` while it runs, else its wait status as waitpid(2) has it.
pub fn reap(pidfd: &OwnedFd) -> Result<Option<i32>> {
    let mut info: libc::siginfo_t = unsafe { std::mem::zeroed() };
    let flags = libc::WEXITED | libc::WNOHANG;
    unsafe { sys!(SYS_waitid, libc::P_PIDFD, pidfd.as_raw_fd(), &mut info as *mut _, flags, 0) }?;
    // SAFETY: waitid has filled the fields of a child, or left the pid 0.
    let (pid, status) = unsafe { (info.si_pid(), info.si_status()) };
    Ok((pid != 0).then_some(if info.si_code == libc::CLD_EXITED { status << 8 } else { status & 0x7f }))
}

/// Waits up to so many microseconds for a descriptor to be readable; a pidfd is when its process has ended.
pub fn wait_readable(fd: &OwnedFd, patience_us: u64) {
    let mut poll = libc::pollfd { fd: fd.as_raw_fd(), events: libc::POLLIN, revents: 0 };
    let patience = libc::timespec { tv_sec: (patience_us / 1_000_000) as i64, tv_nsec: 0 };
    let _ = unsafe { sys!(SYS_ppoll, &raw mut poll, 1, &raw const patience, 0, 8) };
}

/// Whether the process is over, be it reaped or not.
pub fn has_ended(pidfd: &OwnedFd) -> bool {
    let mut poll = libc::pollfd { fd: pidfd.as_raw_fd(), events: libc::POLLIN, revents: 0 };
    let at_once = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    matches!(unsafe { sys!(SYS_ppoll, &raw mut poll, 1, &raw const at_once, 0, 8) }, Ok(1))
}

/// Start time of a process in clock ticks since boot; with the pid it names a process for ever.
pub fn start_time(pid: i32) -> Result<u64> {
    let stat = super::read_file(libc::AT_FDCWD, &super::c(format!("/proc/{pid}/stat")))?;
    let after_name = stat.rsplit_once(')').map_or("", |(_, rest)| rest);
    Ok(after_name.split_whitespace().nth(19).and_then(|field| field.parse().ok()).unwrap_or(0))
}

/// A pidfd of the process, if it still is the one that started then.
pub fn open_started(pid: i32, start: u64) -> Option<OwnedFd> {
    let pidfd = pidfd_open(pid).ok()?;
    // Read after the pidfd is there: if it is the right one now, the pidfd is of the right one.
    (start_time(pid).ok()? == start).then_some(pidfd)
}

/// Asks the scheduler for time slices of this length in nanoseconds (0: the default) for this thread and its future
/// children. Shorter slices, earlier turns: on a busy machine a newborn otherwise waits milliseconds for its first one.
pub fn time_slice(nanoseconds: u64) -> Result<()> {
    // struct sched_attr: size and policy, flags, nice and priority, runtime, deadline, period
    let attr: [u64; 6] = [48, 0, 0, nanoseconds, 0, 0];
    unsafe { sys!(SYS_sched_setattr, 0, attr.as_ptr(), 0) }.map(drop)
}

pub fn prctl(option: i32, argument: u64) -> Result<()> {
    unsafe { sys!(SYS_prctl, option, argument, 0, 0, 0) }.map(drop)
}

/// Sets the permitted and effective capability sets to the bits of `keep` and empties the inheritable one.
pub fn set_capabilities(keep: u64) -> Result<()> {
    let header: [u32; 2] = [0x2008_0522, 0];
    let (low, high) = (keep as u32, (keep >> 32) as u32);
    let sets: [u32; 6] = [low, low, 0, high, high, 0];
    unsafe { sys!(SYS_capset, header.as_ptr(), sets.as_ptr()) }.map(drop)
}

/// Removes every capability that is not in `keep` from the bounding set.
pub fn bound_capabilities(keep: u64) -> Result<()> {
    for capability in 0..64 {
        if keep >> capability & 1 == 0 {
            match prctl(libc::PR_CAPBSET_DROP, capability) {
                Err(super::Errno(libc::EINVAL)) => break, // past the last one this kernel knows
                other => other?,
            }
        }
    }
    Ok(())
}
