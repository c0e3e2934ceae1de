//! What commands run under, asked of the launcher when it is first needed: cgroup v1 groups, and the counters of all limits.

use crate::birth::GROUPS;
use crate::sys::{self, process, socket, At, Errno, Failure};
use std::os::fd::{AsRawFd, IntoRawFd, OwnedFd, RawFd};

const STAGE: &str = "cgroup";
/// The launcher may be at work on a burst of creations.
const PATIENCE_US: u64 = 10_000_000;

/// Files that a command writes "0" to before it executes; none where cgroup v2 does it all.
#[derive(Debug)]
pub struct Groups {
    files: Vec<RawFd>,
    /// Files that count how often limits were met, in the order of `aether::reasons`; none where nobody counts.
    counters: Vec<RawFd>,
    /// Socket to the launcher, until it has answered.
    launcher: Option<OwnedFd>,
}

impl Groups {
    pub fn new(launcher: Option<OwnedFd>) -> Self {
        Groups { files: Vec::new(), counters: Vec::new(), launcher }
    }

    /// Another launcher takes the place of the one that made us; `false` when there is nothing to ask of it any more.
    pub fn succeed(&mut self, launcher: OwnedFd) -> bool {
        let Some(former) = &self.launcher else { return false };
        // Under the same number, see `occupy`.
        unsafe { crate::sys!(SYS_dup3, launcher.as_raw_fd(), former.as_raw_fd(), libc::O_CLOEXEC) }.is_ok()
    }

    /// Sees to it that `files` has them. Waits for the launcher, the first time.
    pub fn fetch(&mut self) -> Result<(), Failure> {
        let Some(launcher) = &self.launcher else { return Ok(()) };
        let mut answer = [0; 512];
        let early = socket::receive(launcher.as_raw_fd(), &mut answer, libc::MSG_DONTWAIT);
        let (length, fds) = match early {
            Ok((length, fds)) if length > 0 => (length, fds),
            Err(Errno(libc::EAGAIN)) => ask(launcher, &mut answer)?,
            _ => return Err(Failure::new(STAGE, "the launcher is gone", libc::EPIPE)),
        };
        let tasks = match answer[..length].strip_prefix(GROUPS) {
            Some(&[count]) => usize::from(count),
            _ => return Err(Failure::new(STAGE, String::from_utf8_lossy(&answer[..length]), libc::EIO)),
        };
        self.files = fds.into_iter().map(IntoRawFd::into_raw_fd).collect();
        self.counters = self.files.split_off(tasks.min(self.files.len()));
        self.launcher.take().map_or(Ok(()), occupy)
    }

    pub fn files(&self) -> &[RawFd] {
        &self.files
    }

    pub fn counters(&self) -> &[RawFd] {
        &self.counters
    }
}

/// Closes the socket but keeps its number in use: the low ones are where a child puts its own descriptors, and what aether
/// opens for a child must not lie there.
fn occupy(launcher: OwnedFd) -> Result<(), Failure> {
    let at = || "close the socket to the launcher".to_string();
    let nothing = sys::openat(libc::AT_FDCWD, c"/", libc::O_PATH, 0).at(STAGE, at)?;
    let number = launcher.into_raw_fd();
    unsafe { crate::sys!(SYS_dup3, nothing.as_raw_fd(), number, libc::O_CLOEXEC) }.at(STAGE, at).map(drop)
}

fn ask(launcher: &OwnedFd, answer: &mut [u8]) -> Result<(usize, Vec<OwnedFd>), Failure> {
    let at = || "ask the launcher for groups".to_string();
    let gone = || Failure::new(STAGE, "the launcher is gone", libc::EPIPE);
    match socket::send(launcher.as_raw_fd(), GROUPS, &[]) {
        Err(Errno(libc::EPIPE | libc::ECONNRESET)) => return Err(gone()),
        sent => sent.at(STAGE, at)?,
    }
    process::wait_readable(launcher, PATIENCE_US);
    match socket::receive(launcher.as_raw_fd(), answer, libc::MSG_DONTWAIT) {
        Ok((0, _)) | Err(Errno(libc::ECONNRESET)) => Err(gone()),
        received => received.at(STAGE, at),
    }
}
