//! What edge and launcher say to each other; ARCHITECTURE.md has the table of verbs.

use crate::cgroup::Usage;
use crate::sys::{socket, Errno, Failure, Result};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, VecDeque};
use std::os::fd::{AsRawFd, OwnedFd, RawFd};

pub const MAX_MESSAGE: usize = 64 * 1024;

#[derive(Deserialize, Clone, Copy, PartialEq, Eq, Debug)]
#[serde(rename_all = "lowercase")]
pub enum Verb {
    Layer,
    Unlayer,
    Create,
    Stop,
    Usage,
    Upper,
    Freeze,
    Thaw,
    Reclaim,
    Prefetch,
    Kill,
    Keep,
    Sweep,
    Status,
}

/// Every request; a field that its verb does not have is its default.
#[derive(Deserialize, Debug)]
#[serde(default)]
pub struct Request {
    pub id: i64,
    pub v: Option<Verb>,
    pub digest: String,
    pub sandbox: String,
    pub layers: Vec<String>,
    pub memory: u64,
    pub cpu: f64,
    pub pids: u64,
    pub disk: u64,
    pub hostname: String,
    pub incarnation: u64,
    pub socket: String,
    pub init_user: String,
    pub env: Vec<(String, String)>,
    pub workdir: Option<String>,
    pub max_output: u64,
    pub keep: Vec<String>,
    /// Name, memory, cores, pids, disk.
    pub keep_with: Vec<(String, u64, f64, u64, u64)>,
}

impl Default for Request {
    fn default() -> Self {
        Request {
            id: 0,
            v: None,
            digest: String::new(),
            sandbox: String::new(),
            layers: Vec::new(),
            memory: 1 << 30,
            cpu: 1.0,
            pids: 512,
            disk: 4 << 30,
            hostname: String::new(),
            incarnation: 0,
            socket: String::new(),
            init_user: "root".into(),
            env: Vec::new(),
            workdir: None,
            max_output: 64 << 20,
            keep: Vec::new(),
            keep_with: Vec::new(),
        }
    }
}

/// Every reply and event; fields that are not set are not sent.
#[derive(Serialize, Default, Debug)]
pub struct Reply {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub id: Option<i64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ok: Option<bool>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub event: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sandbox: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stage: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub errno: Option<i32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pid: Option<i32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub start: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub create_us: Option<BTreeMap<String, u64>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub usage: Option<Usage>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reclaimed: Option<Reclaimed>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub removed: Option<BTreeMap<&'static str, u64>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kept: Option<Vec<String>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub status: Option<i32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub oom_kills: Option<i64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pool: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub live: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub uppers: Option<UppersStatus>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cgroup: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub features: Option<BTreeMap<&'static str, String>>,
}

/// Bytes that a sandbox had in memory before and after, what of it is in swap now, what was asked to be brought in.
#[derive(Serialize, Default, Debug)]
pub struct Reclaimed {
    pub before: i64,
    pub after: i64,
    pub swap: i64,
    pub prefetched: i64,
}

#[derive(Serialize, Debug)]
pub struct UppersStatus {
    pub kind: &'static str,
    pub total: u64,
    pub free: u64,
}

impl Reply {
    pub fn ok(id: i64) -> Self {
        Reply { id: Some(id), ok: Some(true), ..Reply::default() }
    }

    pub fn failed(id: i64, failure: &Failure) -> Self {
        Reply {
            id: Some(id),
            ok: Some(false),
            stage: Some(failure.stage.into()),
            error: Some(failure.what.clone()),
            errno: Some(failure.errno),
            ..Reply::default()
        }
    }
}

/// The launcher's end of the connection. Never waits: what the edge does not take yet is kept.
pub struct Control {
    socket: OwnedFd,
    unsent: VecDeque<(Vec<u8>, Option<OwnedFd>)>,
    buffer: Vec<u8>,
}

pub enum Incoming {
    Request(Box<Request>, Vec<OwnedFd>),
    Malformed(String),
    Nothing,
    Closed,
}

impl Control {
    pub fn new(socket: OwnedFd) -> Self {
        Control { socket, unsent: VecDeque::new(), buffer: vec![0; MAX_MESSAGE] }
    }

    pub fn fd(&self) -> RawFd {
        self.socket.as_raw_fd()
    }

    pub fn receive(&mut self) -> Incoming {
        match socket::receive(self.socket.as_raw_fd(), &mut self.buffer, libc::MSG_DONTWAIT) {
            Ok((0, _)) | Err(Errno(libc::ECONNRESET)) => Incoming::Closed,
            Ok((length, fds)) => match rmp_serde::from_slice::<Request>(&self.buffer[..length]) {
                Ok(request) => Incoming::Request(Box::new(request), fds),
                Err(error) => Incoming::Malformed(format!("malformed request: {error}")),
            },
            Err(Errno(libc::EAGAIN | libc::EINTR)) => Incoming::Nothing,
            Err(error) => Incoming::Malformed(format!("receive: {error}")),
        }
    }

    pub fn send(&mut self, reply: &Reply, fd: Option<OwnedFd>) {
        let data = rmp_serde::to_vec_named(reply).unwrap_or_default();
        if !self.unsent.is_empty() || self.try_send(&data, fd.as_ref()).is_err() {
            self.unsent.push_back((data, fd));
        }
    }

    /// Ends the connection; what is sent from now on goes nowhere.
    pub fn hang_up(&self) {
        let _ = unsafe { crate::sys!(SYS_shutdown, self.socket.as_raw_fd(), libc::SHUT_RDWR) };
    }

    /// Whether there is something that the edge had no room for.
    pub fn waits(&self) -> bool {
        !self.unsent.is_empty()
    }

    pub fn flush(&mut self) {
        while let Some((data, fd)) = self.unsent.front() {
            if self.try_send(data, fd.as_ref()).is_err() {
                return;
            }
            self.unsent.pop_front();
        }
    }

    /// Fails only when there is no room; a closed connection shows at the next receive.
    fn try_send(&self, data: &[u8], fd: Option<&OwnedFd>) -> Result<()> {
        let fds: Vec<RawFd> = fd.iter().map(|fd| fd.as_raw_fd()).collect();
        match socket::send_now(self.socket.as_raw_fd(), data, &fds) {
            Err(Errno(libc::EAGAIN | libc::ENOBUFS)) => Err(Errno(libc::EAGAIN)),
            _ => Ok(()),
        }
    }
}
