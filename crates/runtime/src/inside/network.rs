//! The sandbox's own network namespace: a loopback interface, and nothing to reach.

use crate::sys::{own, At, Failure, Result};
use std::os::fd::AsRawFd;

const STAGE: &str = "network";

pub fn make() -> std::result::Result<(), Failure> {
    unsafe { crate::sys!(SYS_unshare, libc::CLONE_NEWNET) }.at(STAGE, || "new network namespace".into())?;
    raise_loopback().at(STAGE, || "raise the loopback interface".into())
}

fn raise_loopback() -> Result<()> {
    /// `struct ifreq` with flags.
    #[repr(C)]
    struct Request {
        name: [u8; 16],
        flags: i16,
        rest: [u8; 22],
    }
    let mut request = Request { name: [0; 16], flags: libc::IFF_UP as i16, rest: [0; 22] };
    request.name[..2].copy_from_slice(b"lo");
    let socket = own(unsafe { crate::sys!(SYS_socket, libc::AF_INET, libc::SOCK_DGRAM | libc::SOCK_CLOEXEC, 0) }?);
    unsafe { crate::sys!(SYS_ioctl, socket.as_raw_fd(), libc::SIOCSIFFLAGS, &raw mut request) }.map(drop)
}
