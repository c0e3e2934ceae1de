//! The few ioctls of btrfs that uppers need: subvolumes and quotas.

use super::{Errno, Result};
use crate::sys;
use std::os::fd::{AsRawFd, OwnedFd};

const fn request(direction: u64, number: u64, size: usize) -> u64 {
    direction << 30 | (size as u64) << 16 | 0x94 << 8 | number
}
const WRITE: u64 = 1;
const READ_WRITE: u64 = 3;

/// `struct btrfs_ioctl_vol_args`: a name that becomes (or is) an entry of the directory.
#[repr(C)]
struct VolumeArgs {
    fd: i64,
    name: [u8; 4088],
}

#[repr(C)]
struct LimitArgs {
    group: u64,
    flags: u64,
    max_referenced: u64,
    max_exclusive: u64,
    reserved: [u64; 2],
}

#[repr(C)]
struct LookupArgs {
    tree: u64,
    object: u64,
    name: [u8; 4080],
}

/// `cmd` of BTRFS_IOC_QUOTA_CTL: simple quotas (Linux 6.7) count an extent where it was allocated, and cost almost nothing.
const ENABLE: u64 = 1;
const ENABLE_SIMPLE: u64 = 4;
const LIMIT_REFERENCED: u64 = 1;

fn ioctl<T>(fd: &OwnedFd, request: u64, args: &mut T) -> Result<()> {
    unsafe { sys!(SYS_ioctl, fd.as_raw_fd(), request, args as *mut T) }.map(drop)
}

fn by_name(name: &str) -> Result<Box<VolumeArgs>> {
    let mut args = Box::new(VolumeArgs { fd: 0, name: [0; 4088] });
    args.name.get_mut(..name.len()).ok_or(Errno(libc::ENAMETOOLONG))?.copy_from_slice(name.as_bytes());
    Ok(args)
}

pub fn create_subvolume(parent: &OwnedFd, name: &str) -> Result<()> {
    ioctl(parent, request(WRITE, 14, size_of::<VolumeArgs>()), by_name(name)?.as_mut())
}

/// The name is gone at once; the kernel frees the contents in the background.
pub fn destroy_subvolume(parent: &OwnedFd, name: &str) -> Result<()> {
    ioctl(parent, request(WRITE, 15, size_of::<VolumeArgs>()), by_name(name)?.as_mut())
}

/// Number of the subvolume that a directory lies in; also the number of its quota group.
pub fn subvolume_id(directory: &OwnedFd) -> Result<u64> {
    let mut args = Box::new(LookupArgs { tree: 0, object: 256, name: [0; 4080] });
    ioctl(directory, request(READ_WRITE, 18, size_of::<LookupArgs>()), args.as_mut())?;
    Ok(args.tree)
}

/// Turns quotas on, simple ones where the kernel has them. Says which; quotas that are on already are left as they are.
pub fn enable_quota(fs: &OwnedFd) -> Result<&'static str> {
    for (command, name) in [(ENABLE_SIMPLE, "simple"), (ENABLE, "full")] {
        let mut args: [u64; 2] = [command, 0];
        match ioctl(fs, request(READ_WRITE, 40, 16), &mut args) {
            Ok(()) => return Ok(name),
            Err(Errno(libc::EEXIST)) => return Ok("kept"),
            Err(Errno(libc::EINVAL)) => continue,
            Err(other) => return Err(other),
        }
    }
    Err(Errno(libc::EOPNOTSUPP))
}

/// Sets the hard limit in bytes of the subvolume that a directory is the root of.
pub fn limit(subvolume: &OwnedFd, bytes: u64) -> Result<()> {
    // READ in the number's direction bits: the header says _IOR although the kernel reads.
    let mut args =
        LimitArgs { group: 0, flags: LIMIT_REFERENCED, max_referenced: bytes, max_exclusive: 0, reserved: [0; 2] };
    ioctl(subvolume, request(2, 43, size_of::<LimitArgs>()), &mut args)
}
