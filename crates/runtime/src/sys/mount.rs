//! The mount interfaces, old and new.

use super::{own, At, Failure, Result};
use crate::sys;
use std::ffi::CStr;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::ptr::null;

const OPEN_TREE_CLONE: u32 = 1;
const MOVE_MOUNT_F_EMPTY_PATH: u32 = 4;
const MOVE_MOUNT_T_EMPTY_PATH: u32 = 0x40;
const FSCONFIG_SET_FLAG: u32 = 0;
const FSCONFIG_SET_STRING: u32 = 1;
const FSCONFIG_CMD_CREATE: u32 = 6;
pub const ATTR_RDONLY: u64 = 1;
pub const ATTR_NOSUID: u64 = 2;
pub const ATTR_NODEV: u64 = 4;
pub const ATTR_NOEXEC: u64 = 8;
pub const ATTR_NOATIME: u64 = 0x10;
const ATTR_ATIME_MASK: u64 = 0x70;
const ATTR_IDMAP: u64 = 0x10_0000;

#[repr(C)]
struct MountAttr {
    set: u64,
    clear: u64,
    propagation: u64,
    userns: u64,
}

/// A detached copy of the mount at a path, or of the mount behind a descriptor when the path is empty.
pub fn clone_tree(dir: RawFd, path: &CStr) -> Result<OwnedFd> {
    let flags = OPEN_TREE_CLONE | libc::O_CLOEXEC as u32 | libc::AT_EMPTY_PATH as u32;
    unsafe { sys!(SYS_open_tree, dir, path.as_ptr(), flags) }.map(own)
}

/// Shows the files of a detached mount with the owners that a user namespace maps them to.
pub fn id_map(tree: &OwnedFd, userns: &OwnedFd) -> Result<()> {
    let attr = MountAttr { set: ATTR_IDMAP, clear: 0, propagation: 0, userns: userns.as_raw_fd() as u64 };
    set_attr(tree.as_raw_fd(), &attr)
}

pub fn add_flags(tree: &OwnedFd, set: u64) -> Result<()> {
    // The ways to keep access times exclude each other: asking for one means clearing all.
    let clear = if set & ATTR_NOATIME != 0 { ATTR_ATIME_MASK } else { 0 };
    set_attr(tree.as_raw_fd(), &MountAttr { set, clear, propagation: 0, userns: 0 })
}

fn set_attr(fd: RawFd, attr: &MountAttr) -> Result<()> {
    let size = size_of::<MountAttr>();
    unsafe { sys!(SYS_mount_setattr, fd, c"".as_ptr(), libc::AT_EMPTY_PATH, attr as *const MountAttr, size) }.map(drop)
}

/// Attaches a detached mount at a path.
pub fn attach(tree: RawFd, target: &CStr) -> Result<()> {
    let (empty, flags) = (c"".as_ptr(), MOVE_MOUNT_F_EMPTY_PATH);
    unsafe { sys!(SYS_move_mount, tree, empty, libc::AT_FDCWD, target.as_ptr(), flags) }.map(drop)
}

/// Attaches a detached mount on a directory that was opened before.
pub fn attach_on(tree: RawFd, target: &OwnedFd) -> Result<()> {
    let (empty, flags) = (c"".as_ptr(), MOVE_MOUNT_F_EMPTY_PATH | MOVE_MOUNT_T_EMPTY_PATH);
    unsafe { sys!(SYS_move_mount, tree, empty, target.as_raw_fd(), empty, flags) }.map(drop)
}

/// Moves the mount at one path, with all that is mounted in it, to another.
pub fn relocate(from: &CStr, to: &CStr) -> Result<()> {
    unsafe { sys!(SYS_move_mount, libc::AT_FDCWD, from.as_ptr(), libc::AT_FDCWD, to.as_ptr(), 0) }.map(drop)
}

/// `mount(2)`.
pub fn mount(source: &CStr, target: &CStr, kind: &CStr, flags: u64, data: Option<&CStr>) -> Result<()> {
    let data = data.map_or(null(), |d| d.as_ptr());
    unsafe { sys!(SYS_mount, source.as_ptr(), target.as_ptr(), kind.as_ptr(), flags, data) }.map(drop)
}

pub fn bind(source: &CStr, target: &CStr) -> Result<()> {
    mount(source, target, c"", libc::MS_BIND, None)
}

/// Makes the mount at a path read-only, for this mount only; `flags` are what it must keep.
pub fn make_read_only(target: &CStr, flags: u64) -> Result<()> {
    mount(c"", target, c"", libc::MS_BIND | libc::MS_REMOUNT | libc::MS_RDONLY | flags, None)
}

pub fn detach(target: &CStr) -> Result<()> {
    unsafe { sys!(SYS_umount2, target.as_ptr(), libc::MNT_DETACH) }.map(drop)
}

/// Makes the current directory the root of this mount namespace and lets go of the old root.
pub fn pivot_here() -> Result<()> {
    unsafe { sys!(SYS_pivot_root, c".".as_ptr(), c".".as_ptr()) }?;
    detach(c".")?;
    unsafe { sys!(SYS_chdir, c"/".as_ptr()) }.map(drop)
}

/// A new filesystem as a detached mount: every parameter with a value, or alone. A failure has what the kernel logged.
pub fn new_filesystem(
    kind: &CStr,
    parameters: &[(&CStr, Option<&CStr>)],
    flags: u64,
) -> std::result::Result<OwnedFd, Failure> {
    let at = || format!("new {}", kind.to_string_lossy());
    let fs = own(unsafe { sys!(SYS_fsopen, kind.as_ptr(), 1) }.at("filesystem", at)?);
    let config = |command: u32, key: *const i8, value: *const i8| unsafe {
        sys!(SYS_fsconfig, fs.as_raw_fd(), command, key, value, 0)
    };
    let configured = parameters.iter().try_for_each(|(key, value)| {
        let set = match value {
            Some(value) => config(FSCONFIG_SET_STRING, key.as_ptr(), value.as_ptr()),
            None => config(FSCONFIG_SET_FLAG, key.as_ptr(), null()),
        };
        set.map(drop).at("filesystem", || key.to_string_lossy().into_owned())
    });
    let created = configured.and_then(|()| config(FSCONFIG_CMD_CREATE, null(), null()).at("filesystem", at));
    created.map_err(|failure| Failure { what: format!("{}{}", failure.what, kernel_log(&fs)), ..failure })?;
    unsafe { sys!(SYS_fsmount, fs.as_raw_fd(), 1, flags) }.map(own).at("filesystem", at)
}

/// What the kernel has written down for the owner of a filesystem context.
fn kernel_log(fs: &OwnedFd) -> String {
    let mut log = String::new();
    let mut line = [0; 512];
    while let Ok(n) = super::read(fs.as_raw_fd(), &mut line) {
        log += &format!("; {}", String::from_utf8_lossy(&line[..n]).trim_end());
    }
    log
}
