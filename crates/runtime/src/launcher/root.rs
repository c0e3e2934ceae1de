//! The launcher's private root: a mount namespace with a handful of mounts, since every clone copies them all.
//!
//! | path | what |
//! |---|---|
//! | `/u` | the uppers filesystem |
//! | `/d` | devices that all sandboxes share, read-only |
//! | `/proc` | the host's processes |
//! | `/aether` | the program that the zygote executes (`zygote`) |
//! | `/l/0` to `/l/255`, `/m`, `/p`, `/e` | empty: where a newborn sandbox puts its root together |
//!
//! Everything else (cgroups, the run directory) is held by descriptor, opened before.

use crate::sys::mount::{self, attach, clone_tree};
use crate::sys::{self, c, At, Errno, Failure};
use std::ffi::CStr;
use std::os::fd::{AsRawFd, OwnedFd};

const STAGE: &str = "root";
pub const MAX_LAYERS: usize = 200;

const DEVICES: [(&CStr, u32, u32); 6] =
    [(c"null", 1, 3), (c"zero", 1, 5), (c"full", 1, 7), (c"random", 1, 8), (c"urandom", 1, 9), (c"tty", 5, 0)];
const LINKS: [(&CStr, &CStr); 5] = [
    (c"/proc/self/fd", c"fd"),
    (c"/proc/self/fd/0", c"stdin"),
    (c"/proc/self/fd/1", c"stdout"),
    (c"/proc/self/fd/2", c"stderr"),
    (c"pts/ptmx", c"ptmx"),
];

/// Leaves the host's mount namespace; nothing mounted from here on shows there.
pub fn leave_host() -> Result<(), Failure> {
    unsafe { crate::sys!(SYS_unshare, libc::CLONE_NEWNS) }.at(STAGE, || "new mount namespace".into())?;
    let flags = libc::MS_REC | libc::MS_PRIVATE;
    mount::mount(c"none", c"/", c"", flags, None).at(STAGE, || "make mounts private".into())
}

/// Builds the root and moves into it. `uppers` is a detached mount.
pub fn build(uppers: &OwnedFd) -> Result<(), Failure> {
    let small = [(c"mode", Some(c"0711")), (c"size", Some(c"64m"))];
    let root = mount::new_filesystem(c"tmpfs", &small, 0)?;
    for index in 0..MAX_LAYERS {
        if index == 0 {
            make(&root, c"l")?;
        }
        make(&root, &c(format!("l/{index}")))?;
    }
    for name in [c"u", c"d", c"proc", c"m", c"p", c"e"] {
        make(&root, name)?;
    }
    let devices = shared_devices()?;
    // Any directory will do to hang it on: this namespace is ours, and the old root goes away.
    attach(root.as_raw_fd(), c"/proc").at(STAGE, || "attach the new root".into())?;
    unsafe { crate::sys!(SYS_fchdir, root.as_raw_fd()) }.at(STAGE, || "enter the new root".into())?;
    mount::pivot_here().at(STAGE, || "pivot_root".into())?;
    mount::mount(c"proc", c"/proc", c"proc", libc::MS_NOSUID | libc::MS_NODEV | libc::MS_NOEXEC, None)
        .at(STAGE, || "mount /proc".into())?;
    attach(uppers.as_raw_fd(), c"/u").at(STAGE, || "attach the uppers".into())?;
    attach(devices.as_raw_fd(), c"/d").at(STAGE, || "attach the devices".into())
}

fn make(root: &OwnedFd, name: &CStr) -> Result<(), Failure> {
    sys::mkdirat(root.as_raw_fd(), name, 0o755).at(STAGE, || format!("mkdir {name:?}"))
}

fn shared_devices() -> Result<OwnedFd, Failure> {
    let small = [(c"mode", Some(c"0755")), (c"size", Some(c"64k"))];
    let tmpfs = mount::new_filesystem(c"tmpfs", &small, 0)?;
    let fd = tmpfs.as_raw_fd();
    for (name, major, minor) in DEVICES {
        let made = unsafe { crate::sys!(SYS_mknodat, fd, name.as_ptr(), libc::S_IFCHR, libc::makedev(major, minor)) };
        made.and_then(|_| unsafe { crate::sys!(SYS_fchmodat, fd, name.as_ptr(), 0o666) })
            .at(STAGE, || format!("make device {name:?}"))?;
    }
    for (target, name) in LINKS {
        unsafe { crate::sys!(SYS_symlinkat, target.as_ptr(), fd, name.as_ptr()) }
            .at(STAGE, || format!("link {name:?}"))?;
    }
    for name in [c"pts", c"shm", c"mqueue"] {
        make(&tmpfs, name)?;
    }
    let flags = mount::ATTR_RDONLY | mount::ATTR_NOSUID | mount::ATTR_NOATIME;
    mount::add_flags(&tmpfs, flags).at(STAGE, || "make the devices read-only".into())?;
    Ok(tmpfs)
}

/// The directory of the sandboxes' sockets becomes the working directory: sockets are bound by name alone.
pub fn open_sockets(run: &str) -> Result<OwnedFd, Failure> {
    let path = format!("{run}/sb");
    match sys::mkdirat(libc::AT_FDCWD, &c(path.as_str()), 0o700) {
        Err(Errno(libc::EEXIST)) => Ok(()),
        other => other.at(STAGE, || format!("create {path}")),
    }?;
    // A mount of its own, so that it does not go with the old root; opened again because a tree's descriptor cannot be read.
    let tree = clone_tree(libc::AT_FDCWD, &c(path.as_str())).at(STAGE, || format!("open {path}"))?;
    let directory = libc::O_RDONLY | libc::O_DIRECTORY;
    let opened = sys::openat(tree.as_raw_fd(), c".", directory, 0).at(STAGE, || format!("open {path}"))?;
    lock(&opened).at(STAGE, || format!("lock {path}: another launcher uses it"))?;
    Ok(opened)
}

pub fn try_lock(directory: &OwnedFd) -> bool {
    unsafe { crate::sys!(SYS_flock, directory.as_raw_fd(), libc::LOCK_EX | libc::LOCK_NB) }.is_ok()
}

pub fn unlock(directory: &OwnedFd) {
    let _ = unsafe { crate::sys!(SYS_flock, directory.as_raw_fd(), libc::LOCK_UN) };
}

/// One launcher at a time: a second would take the first one's sandboxes for leftovers. The first may just be leaving.
fn lock(directory: &OwnedFd) -> sys::Result<()> {
    let give_up = sys::now_us() + 10_000_000;
    loop {
        match unsafe { crate::sys!(SYS_flock, directory.as_raw_fd(), libc::LOCK_EX | libc::LOCK_NB) } {
            Err(Errno(libc::EAGAIN)) if sys::now_us() < give_up => {
                std::thread::sleep(std::time::Duration::from_millis(5));
            }
            other => return other.map(drop),
        }
    }
}
