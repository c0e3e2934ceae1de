//! The root filesystem of a sandbox: layers under an upper, /proc, /dev.
//!
//! Paths here are those of the launcher's private root, which vanishes at the end with all its mounts; so nothing of the
//! host shows in the mount table inside but the words of these paths.

use crate::sys::mount::{attach, bind, make_read_only, mount, pivot_here, relocate};
use crate::sys::{self, c, At, Errno, Failure};
use std::ffi::{CStr, CString};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;

/// Where things are put together before the sandbox is known.
const PROC: &CStr = c"/p";
const DEV: &CStr = c"/e";
const ROOT: &CStr = c"/m";
/// Where the launcher has the shared devices: a read-only mount, which binds of it inherit.
const DEV_TEMPLATE: &CStr = c"/d";

/// The kernel itself then refuses user namespaces inside, whatever the filter lets pass; and any user inside may listen on
/// any port, since the network namespace is the sandbox's alone.
const SETTINGS: [(&CStr, &[u8]); 2] =
    [(c"/p/sys/user/max_user_namespaces", b"0"), (c"/p/sys/net/ipv4/ip_unprivileged_port_start", b"0")];

/// Files of /proc that tell about, or reach, the machine.
const SENSITIVE: [&CStr; 17] = [
    c"/proc/kcore",
    c"/proc/kpagecount",
    c"/proc/kpageflags",
    c"/proc/kpagecgroup",
    c"/proc/sysrq-trigger",
    c"/proc/timer_list",
    c"/proc/keys",
    c"/proc/key-users",
    c"/proc/kmsg",
    c"/proc/kallsyms",
    c"/proc/sched_debug",
    c"/proc/latency_stats",
    c"/proc/slabinfo",
    c"/proc/vmallocinfo",
    c"/proc/mtrr",
    c"/proc/config.gz",
    c"/proc/cmdline",
];

/// Those of the sensitive files that must be covered: the ones whose mode lets others in. The rest are the host's root's
/// alone, whom nobody inside can be. (Each cover is a mount to make and to keep, in every sandbox.)
pub fn files_to_mask() -> Vec<CString> {
    let open_to_others = |path: &&CStr| {
        let metadata = std::fs::metadata(std::ffi::OsStr::from_bytes(path.to_bytes()));
        metadata.is_ok_and(|m| m.mode() & 0o007 != 0 || m.uid() != 0)
    };
    let inside = |path: &CStr| [PROC.to_bytes(), path.to_bytes().strip_prefix(b"/proc").unwrap_or_default()].concat();
    SENSITIVE.into_iter().filter(open_to_others).map(|path| c(inside(path))).collect()
}

/// Makes /proc and /dev aside; `upper` is the slot's directory on the uppers filesystem.
pub fn prepare(upper: &str, masked: &[CString]) -> std::result::Result<(), Failure> {
    let stage = "root";
    let flags = libc::MS_NOSUID | libc::MS_NODEV | libc::MS_NOEXEC;
    mount(c"proc", PROC, c"proc", flags, None).at(stage, || "mount /proc".into())?;
    // In the sandbox's own /proc: in the launcher's, which all share, each namespace adds to the same chain of look-ups.
    for (path, value) in SETTINGS {
        sys::write_file(libc::AT_FDCWD, path, value).at(stage, || format!("write {path:?}"))?;
    }
    for path in masked {
        bind(c"/d/null", path).at(stage, || format!("mask {path:?}"))?;
    }
    // Much in it belongs to the owner of the network or ipc namespace, that is to root inside.
    let sysctl = c"/p/sys";
    bind(sysctl, sysctl)
        .and_then(|()| make_read_only(sysctl, flags))
        .at(stage, || "make /proc/sys read-only".into())?;
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
