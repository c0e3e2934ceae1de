//! Unix sockets: packets with descriptors.

use super::{own, Errno, Result};
use crate::sys;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};

/// The kernel passes at most this many descriptors with one message.
pub const MAX_FDS: usize = 253;
const CONTROL: usize = 24 + MAX_FDS * 4;

/// A connected pair of SOCK_SEQPACKET sockets.
pub fn pair() -> Result<(OwnedFd, OwnedFd)> {
    let mut fds = [0i32; 2];
    let kind = libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC;
    unsafe { sys!(SYS_socketpair, libc::AF_UNIX, kind, 0, fds.as_mut_ptr()) }?;
    Ok((own(fds[0] as usize), own(fds[1] as usize)))
}

/// Sends one packet and descriptors; never raises SIGPIPE.
pub fn send(socket: RawFd, data: &[u8], fds: &[RawFd]) -> Result<()> {
    send_flags(socket, data, fds, libc::MSG_NOSIGNAL)
}

/// As `send`, but EAGAIN when there is no room.
pub fn send_now(socket: RawFd, data: &[u8], fds: &[RawFd]) -> Result<()> {
    send_flags(socket, data, fds, libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT)
}

fn send_flags(socket: RawFd, data: &[u8], fds: &[RawFd], flags: i32) -> Result<()> {
    if fds.len() > MAX_FDS {
        return Err(Errno(libc::E2BIG));
    }
    let mut control = [0u64; CONTROL / 8 + 1];
    let mut iov = libc::iovec { iov_base: data.as_ptr() as *mut _, iov_len: data.len() };
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = &mut iov;
    message.msg_iovlen = 1;
    if !fds.is_empty() {
        message.msg_control = control.as_mut_ptr().cast();
        message.msg_controllen = 16 + fds.len() * 4;
        control[0] = message.msg_controllen as u64;
        control[1] = libc::SOL_SOCKET as u64 | (libc::SCM_RIGHTS as u64) << 32;
        // SAFETY: the buffer has room for MAX_FDS descriptors after the 16 bytes of the header.
        unsafe { std::ptr::copy_nonoverlapping(fds.as_ptr(), control.as_mut_ptr().add(2).cast(), fds.len()) };
    }
    unsafe { sys!(SYS_sendmsg, socket, &message as *const _, flags) }.map(drop)
}

/// Receives one packet into `buffer` (its length is the limit); an empty one means that the other end is closed.
/// `flags`: 0, or `MSG_DONTWAIT`. A packet that was cut is an error.
pub fn receive(socket: RawFd, buffer: &mut [u8], flags: i32) -> Result<(usize, Vec<OwnedFd>)> {
    let mut control = [0u64; CONTROL / 8 + 1];
    let mut iov = libc::iovec { iov_base: buffer.as_mut_ptr().cast(), iov_len: buffer.len() };
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = &mut iov;
    message.msg_iovlen = 1;
    message.msg_control = control.as_mut_ptr().cast();
    message.msg_controllen = CONTROL;
    let n = unsafe { sys!(SYS_recvmsg, socket, &mut message as *mut _, flags | libc::MSG_CMSG_CLOEXEC) }?;
    let fds = received(&control, message.msg_controllen);
    if message.msg_flags & (libc::MSG_TRUNC | libc::MSG_CTRUNC) != 0 {
        return Err(Errno(libc::EMSGSIZE));
    }
    Ok((n, fds))
}

/// Descriptors of the one SCM_RIGHTS header that a packet has, if it has one.
fn received(control: &[u64], length: usize) -> Vec<OwnedFd> {
    let rights = libc::SOL_SOCKET as u64 | (libc::SCM_RIGHTS as u64) << 32;
    if length < 16 || control[1] != rights {
        return Vec::new();
    }
    let count = (control[0] as usize).saturating_sub(16) / 4;
    let first: *const RawFd = control[2..].as_ptr().cast();
    // SAFETY: the kernel has written `count` new descriptors after the header, within the buffer it was given.
    (0..count.min(MAX_FDS)).map(|i| own(unsafe { *first.add(i) } as usize)).collect()
}

/// A listening stream socket bound to `name` in the current directory.
pub fn listen(name: &str) -> Result<OwnedFd> {
    let socket = own(unsafe { sys!(SYS_socket, libc::AF_UNIX, libc::SOCK_STREAM | libc::SOCK_CLOEXEC, 0) }?);
    let (address, length) = address(name)?;
    unsafe { sys!(SYS_bind, socket.as_raw_fd(), &address as *const _, length) }?;
    unsafe { sys!(SYS_listen, socket.as_raw_fd(), 64) }?;
    Ok(socket)
}

/// A connection to the stream socket `name` in the current directory; EAGAIN when its backlog is full.
pub fn connect(name: &str) -> Result<OwnedFd> {
    let kind = libc::SOCK_STREAM | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
    let socket = own(unsafe { sys!(SYS_socket, libc::AF_UNIX, kind, 0) }?);
    let (address, length) = address(name)?;
    unsafe { sys!(SYS_connect, socket.as_raw_fd(), &address as *const _, length) }?;
    Ok(socket)
}

fn address(name: &str) -> Result<(libc::sockaddr_un, usize)> {
    let mut address: libc::sockaddr_un = unsafe { std::mem::zeroed() };
    if name.len() >= address.sun_path.len() {
        return Err(Errno(libc::ENAMETOOLONG));
    }
    address.sun_family = libc::AF_UNIX as u16;
    for (to, from) in address.sun_path.iter_mut().zip(name.bytes()) {
        *to = from as i8;
    }
    Ok((address, 2 + name.len() + 1))
}
