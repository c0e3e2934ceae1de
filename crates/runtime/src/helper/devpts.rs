//! `devpts`: terminals for a sandbox, a filesystem of its own at its /dev/pts.
//!
//! Its root is hostile. This process joins its user and mount namespaces but never its pid namespace, so that nobody inside
//! can name it; it executes nothing there, follows no link and holds nothing of the host but where it reports to.

use crate::sys::{self, mount, own, process, At, Errno, Failure};
use std::ffi::CStr;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};

const STAGE: &str = "devpts";
const TARGET: &CStr = c"/dev/pts";
const DEVPTS_SUPER_MAGIC: libc::c_long = 0x1cd1;
const NAMESPACES: i32 = libc::CLONE_NEWUSER | libc::CLONE_NEWNS;

/// tty's number in every distribution, and the terminals that one sandbox may have: the machine counts them all together.
const OPTIONS: [(&CStr, Option<&CStr>); 4] =
    [(c"gid", Some(c"5")), (c"mode", Some(c"0620")), (c"ptmxmode", Some(c"0666")), (c"max", Some(c"64"))];

pub fn main(args: &[String]) -> Result<(), String> {
    let [flag, fd] = args else { return Err(super::USAGE.into()) };
    let pidfd: RawFd = fd.parse().map_err(|_| super::USAGE.to_string())?;
    if flag != "--pidfd" || pidfd < 3 {
        return Err(super::USAGE.into());
    }
    enter(pidfd).and_then(|()| ensure()).map_err(|failure| failure.to_string())
}

/// Becomes root of the sandbox behind a pidfd, in its mounts.
fn enter(pidfd: RawFd) -> Result<(), Failure> {
    let pidfd = own(pidfd as usize);
    hide()?;
    unsafe { crate::sys!(SYS_setns, pidfd.as_raw_fd(), NAMESPACES) }.at(STAGE, || "enter the sandbox".into())?;
    drop(pidfd);
    let ids = unsafe {
        crate::sys!(SYS_setgroups, 0, std::ptr::null::<u32>())
            .and_then(|_| crate::sys!(SYS_setresgid, 0, 0, 0))
            .and_then(|_| crate::sys!(SYS_setresuid, 0, 0, 0))
    };
    ids.at(STAGE, || "become root of the sandbox".into())?;
    hide() // the change of ids makes a process traceable by a setting of the machine
}

fn hide() -> Result<(), Failure> {
    process::prctl(libc::PR_SET_DUMPABLE, 0).at(STAGE, || "forbid dumping".into())
}

/// Mounts it unless it is there.
fn ensure() -> Result<(), Failure> {
    let at = || TARGET.to_string_lossy().into_owned();
    let target = open_target().at(STAGE, at)?;
    if is_devpts(&target).at(STAGE, at)? {
        return Ok(());
    }
    let devpts = mount::new_filesystem(c"devpts", &OPTIONS, mount::ATTR_NOSUID | mount::ATTR_NOEXEC)?;
    mount::attach_on(devpts.as_raw_fd(), &target).at(STAGE, at)
}

/// The directory itself, through no link at any place of its path.
fn open_target() -> sys::Result<OwnedFd> {
    let mut how: libc::open_how = unsafe { std::mem::zeroed() };
    how.flags = (libc::O_PATH | libc::O_NOFOLLOW | libc::O_DIRECTORY | libc::O_CLOEXEC) as u64;
    how.resolve = libc::RESOLVE_NO_SYMLINKS | libc::RESOLVE_NO_MAGICLINKS;
    let size = size_of::<libc::open_how>();
    for _ in 0..64 {
        match unsafe { crate::sys!(SYS_openat2, libc::AT_FDCWD, TARGET.as_ptr(), &raw const how, size) } {
            Err(Errno(libc::EAGAIN)) => {} // a rename raced the look-up
            other => return other.map(own),
        }
    }
    Err(Errno(libc::EAGAIN))
}

fn is_devpts(directory: &OwnedFd) -> sys::Result<bool> {
    let mut about: libc::statfs = unsafe { std::mem::zeroed() };
    unsafe { crate::sys!(SYS_fstatfs, directory.as_raw_fd(), &raw mut about) }?;
    Ok(about.f_type == DEVPTS_SUPER_MAGIC)
}
