//! Loop devices that vanish with their last user.

use super::{c, openat, Errno, Result};
use crate::sys;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::MetadataExt;

const LOOP_SET_DIRECT_IO: u64 = 0x4C08;
const LOOP_CONFIGURE: u64 = 0x4C0A;
const LOOP_CTL_GET_FREE: u64 = 0x4C82;
const AUTOCLEAR: u32 = 4;

/// `struct loop_config`, of which we set the descriptor and the flags.
#[repr(C)]
struct Config {
    fd: u32,
    block_size: u32,
    before_flags: [u64; 5],
    sizes: [u32; 4],
    rest: [u8; 64 + 64 + 32 + 16 + 64],
}

/// A loop device, held open until a mount holds it.
pub struct Attached {
    _device: OwnedFd,
    pub path: String,
    /// Nobody else has it.
    pub fresh: bool,
}

/// Attaches a file to a loop device. When live sandboxes of an earlier launcher still hold a
/// device on this file, that one is taken: a second device on the file would destroy the filesystem.
pub fn attach(image: &std::fs::File, path: &str) -> Result<Attached> {
    if let Some(number) = attached(path, image)? {
        let (device, path) = open_device(number)?;
        return Ok(Attached { _device: device, path, fresh: false });
    }
    let control = openat(libc::AT_FDCWD, c"/dev/loop-control", libc::O_RDWR, 0)?;
    for _ in 0..64 {
        let number = unsafe { sys!(SYS_ioctl, control.as_raw_fd(), LOOP_CTL_GET_FREE, 0) }? as u32;
        let (device, name) = open_device(number)?;
        match configure(&device, image) {
            Err(Errno(libc::EBUSY)) => continue, // someone else was faster with this number
            other => other?,
        }
        // Best effort: without it every block is cached twice.
        let _ = unsafe { sys!(SYS_ioctl, device.as_raw_fd(), LOOP_SET_DIRECT_IO, 1) };
        return Ok(Attached { _device: device, path: name, fresh: true });
    }
    Err(Errno(libc::EBUSY))
}

fn configure(device: &OwnedFd, image: &std::fs::File) -> Result<()> {
    let mut config: Config = unsafe { std::mem::zeroed() };
    config.fd = image.as_raw_fd() as u32;
    config.sizes[3] = AUTOCLEAR;
    unsafe { sys!(SYS_ioctl, device.as_raw_fd(), LOOP_CONFIGURE, &config as *const Config) }.map(drop)
}

fn open_device(number: u32) -> Result<(OwnedFd, String)> {
    let name = format!("/dev/loop{number}");
    match openat(libc::AT_FDCWD, &c(name.as_str()), libc::O_RDWR, 0) {
        Err(Errno(libc::ENOENT)) => {
            let device = libc::makedev(7, number);
            unsafe { sys!(SYS_mknodat, libc::AT_FDCWD, c(name.as_str()).as_ptr(), libc::S_IFBLK | 0o600, device) }?;
            Ok((openat(libc::AT_FDCWD, &c(name.as_str()), libc::O_RDWR, 0)?, name))
        }
        other => Ok((other?, name)),
    }
}

/// The number of the loop device that this file is attached to, if it is.
fn attached(path: &str, image: &std::fs::File) -> Result<Option<u32>> {
    let wanted = image.metadata()?;
    let Ok(devices) = std::fs::read_dir("/sys/block") else { return Ok(None) };
    for device in devices.flatten() {
        let name = device.file_name().to_string_lossy().into_owned();
        let Some(number) = name.strip_prefix("loop").and_then(|n| n.parse().ok()) else { continue };
        let Ok(backing) = std::fs::read_to_string(device.path().join("loop/backing_file")) else { continue };
        let same =
            std::fs::metadata(backing.trim_end()).is_ok_and(|m| m.ino() == wanted.ino() && m.dev() == wanted.dev());
        if same || backing.trim_end() == path {
            return Ok(Some(number));
        }
    }
    Ok(None)
}
