//! epoll, with what the launcher waits for as tokens.

use crate::sys::{self, Result};
use std::os::fd::{AsRawFd, OwnedFd, RawFd};

#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Token {
    Edge,
    Zygote,
    /// A thread that moves memory or removes an upper is done.
    Memory,
    /// PID 1 of the slot said something.
    Answer(u32),
    /// PID 1 of the slot has ended.
    End(u32),
}

impl Token {
    fn encode(self) -> u64 {
        match self {
            Token::Edge => u64::MAX,
            Token::Zygote => u64::MAX - 1,
            Token::Memory => u64::MAX - 2,
            Token::Answer(slot) => u64::from(slot) << 1,
            Token::End(slot) => u64::from(slot) << 1 | 1,
        }
    }

    fn decode(value: u64) -> Self {
        match value {
            u64::MAX => Token::Edge,
            v if v == u64::MAX - 1 => Token::Zygote,
            v if v == u64::MAX - 2 => Token::Memory,
            v if v & 1 == 0 => Token::Answer((v >> 1) as u32),
            v => Token::End((v >> 1) as u32),
        }
    }
}

pub struct Poller {
    epoll: OwnedFd,
}

const BATCH: usize = 64;

impl Poller {
    pub fn new() -> Result<Self> {
        unsafe { crate::sys!(SYS_epoll_create1, libc::EPOLL_CLOEXEC) }.map(|fd| Poller { epoll: sys::own(fd) })
    }

    /// Reports the descriptor as long as it is readable. Closing it ends that.
    pub fn add(&self, fd: RawFd, token: Token) -> Result<()> {
        let mut event = libc::epoll_event { events: libc::EPOLLIN as u32, u64: token.encode() };
        unsafe { crate::sys!(SYS_epoll_ctl, self.epoll.as_raw_fd(), libc::EPOLL_CTL_ADD, fd, &raw mut event) }.map(drop)
    }

    /// For a descriptor that stays open, here or in a copy at the other end of a socket.
    pub fn remove(&self, fd: RawFd) {
        let _ = unsafe { crate::sys!(SYS_epoll_ctl, self.epoll.as_raw_fd(), libc::EPOLL_CTL_DEL, fd, 0) };
    }

    /// What has happened; empty after so many microseconds (`None`: no limit) or an interrupt.
    pub fn wait(&self, timeout_us: Option<u64>) -> Vec<Token> {
        let mut events = [libc::epoll_event { events: 0, u64: 0 }; BATCH];
        let us = timeout_us.unwrap_or(0);
        let limit = libc::timespec { tv_sec: (us / 1_000_000) as i64, tv_nsec: (us % 1_000_000 * 1000) as i64 };
        let limit = timeout_us.map_or(std::ptr::null(), |_| &raw const limit);
        let fd = self.epoll.as_raw_fd();
        let n = unsafe { crate::sys!(SYS_epoll_pwait2, fd, events.as_mut_ptr(), BATCH, limit, 0, 8) }.unwrap_or(0);
        events[..n].iter().map(|event| Token::decode(event.u64)).collect()
    }

    /// Lets other processes run.
    pub fn pause_ms(&self, ms: u64) {
        std::thread::sleep(std::time::Duration::from_millis(ms));
    }
}
