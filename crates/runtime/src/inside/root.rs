//! The root filesystem of a sandbox: layers under an upper, /proc, /dev.
//!
//! Paths here are those of the launcher's private root, which vanishes at the end with all its mounts; so nothing of the
//! host shows in the mount table inside but the words of these paths.

use crate::sys::mount::{attach, bind, make_read_only, mount, pivot_here, relocate};
use crate::sys::{self, c, At, Errno, Failure, Result};
use std::ffi::CStr;
use std::os::fd::{AsRawFd, OwnedFd};

/// Where things are put together before the sandbox is known.
const PROC: &CStr = c"/p";
const DEV: &CStr = c"/e";
const ROOT: &CStr = c"/m";
/// Where the launcher has the shared devices: a read-only mount, which binds of it inherit.
const DEV_TEMPLATE: &CStr = c"/d";

/// Files of /proc that tell about, or reach, the machine. Root inside is refused most of them by their mode already.
const MASKED: [&CStr; 12] = [
    c"/p/kcore",
    c"/p/kpagecount",
    c"/p/kpageflags",
    c"/p/kpagecgroup",
    c"/p/sysrq-trigger",
    c"/p/timer_list",
    c"/p/keys",
    c"/p/key-users",
    c"/p/kmsg",
    c"/p/kallsyms",
    c"/p/sched_debug",
    c"/p/latency_stats",
];
/// Writable by an owner of the network or ipc namespace, that is by root inside.
const READ_ONLY: [&CStr; 4] = [c"/p/sys", c"/p/irq", c"/p/bus", c"/p/fs"];

fn unless_missing(result: Result<()>) -> Result<()> {
    if result == Err(Errno(libc::ENOENT)) {
        Ok(())
    } else {
        result
    }
}

/// Makes /proc and /dev aside; `upper` is the slot's directory on the uppers filesystem.
pub fn prepare(upper: &str) -> std::result::Result<(), Failure> {
    let stage = "root";
    let flags = libc::MS_NOSUID | libc::MS_NODEV | libc::MS_NOEXEC;
    mount(c"proc", PROC, c"proc", flags, None).at(stage, || "mount /proc".into())?;
    for path in MASKED {
        unless_missing(bind(c"/d/null", path)).at(stage, || format!("mask {path:?}"))?;
    }
    for path in READ_ONLY {
        let result = bind(path, path).and_then(|()| make_read_only(path, flags));
        unless_missing(result).at(stage, || format!("make {path:?} read-only"))?;
    }
    bind(DEV_TEMPLATE, DEV).at(stage, || "bind /dev".into())?;
    bind(&c(format!("{upper}/s")), c"/e/shm").at(stage, || "bind /dev/shm".into())
}

/// Attaches the id-mapped layers; the overlay does not take detached ones in a user namespace.
pub fn attach_layers(layers: &[OwnedFd]) -> std::result::Result<(), Failure> {
    for (index, layer) in layers.iter().enumerate() {
        let target = c(format!("/l/{index}"));
        attach(layer.as_raw_fd(), &target).at("layers", || format!("attach layer {index}"))?;
    }
    Ok(())
}

/// Mounts the overlay; the layer with the highest number is uppermost.
pub fn mount_overlay(layers: usize, upper: &str) -> std::result::Result<(), Failure> {
    let lower: Vec<String> = (0..layers).rev().map(|index| format!("/l/{index}")).collect();
    let options = format!("lowerdir={},upperdir={upper}/u,workdir={upper}/w,userxattr,volatile", lower.join(":"));
    let flags = libc::MS_NODEV | libc::MS_NOSUID;
    mount(c"overlay", ROOT, c"overlay", flags, Some(&c(options)))
        .at("overlay", || format!("mount overlay of {layers} layers"))
}

/// Moves /proc and /dev into the new root, sees that /tmp is there, and makes it the root.
pub fn enter() -> std::result::Result<(), Failure> {
    let stage = "root";
    unsafe { crate::sys!(SYS_chdir, ROOT.as_ptr()) }.at(stage, || "enter the new root".into())?;
    for (from, to) in [(PROC, c"proc"), (DEV, c"dev")] {
        let moved = match relocate(from, to) {
            Err(Errno(libc::ENOENT)) => sys::mkdirat(libc::AT_FDCWD, to, 0o755).and_then(|()| relocate(from, to)),
            other => other,
        };
        moved.at(stage, || format!("mount /{}", to.to_string_lossy()))?;
    }
    let tmp = sys::mkdirat(libc::AT_FDCWD, c"tmp", 0o1777);
    if tmp.is_ok() {
        unsafe { crate::sys!(SYS_fchmodat, libc::AT_FDCWD, c"tmp".as_ptr(), 0o1777) }
            .at(stage, || "open up /tmp".into())?;
    }
    pivot_here().at(stage, || "pivot_root".into())
}
