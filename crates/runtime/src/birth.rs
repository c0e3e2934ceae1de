//! How a pre-born PID 1 becomes a sandbox: two messages over descriptor 3 (SOCK_SEQPACKET), and two answers.
//!
//! 1. PID 1 is cloned long before anybody knows which sandbox it will be (pool). The first message is the path of the
//!    slot's directory on the uppers filesystem (`u`pper, `w`ork, `s`hm); its coming means that the id maps are written.
//!    PID 1 makes all that does not depend on the sandbox and answers `PREPARED`.
//! 2. One `Birth` (msgpack map) with all descriptors. `inside::enter` builds the root, drops privilege and answers with one
//!    `BirthReply`.

use crate::inside::groups::Groups;
use serde::{Deserialize, Serialize};

/// The whole of the first answer.
pub const PREPARED: &[u8] = b"prepared";

/// What PID 1 asks over descriptor 3 when its first command is about to start: the launcher makes the cgroup v1 groups then,
/// where there are any (thousands of idle sandboxes should not pay for them), and answers with the same word, a byte that
/// says how many, and the descriptors of their `tasks` files, then those of the files that count how often limits were met
/// (`aether::reasons`); or with an error as text.
pub const GROUPS: &[u8] = b"groups";

/// What a launcher that adopts a sandbox sends to its listening socket, whole and first, with one descriptor: a socket that
/// takes the place of descriptor 3, whose other end died with an earlier launcher. Only the host's root reaches that socket.
pub const SUCCESSOR: &[u8] = b"\xD5ECLG\x01\r\n";

/// Descriptors come in the ancillary data of the message: the fixed ones, then `layers` mounts.
#[derive(Serialize, Deserialize, Debug)]
pub struct Birth {
    /// Sandbox id, also the default host name.
    pub sandbox: String,
    pub hostname: String,
    /// Incarnation of the sandbox, repeated in every hello.
    pub incarnation: u64,
    /// Number of id-mapped layer mounts, uppermost layer LAST (base first).
    pub layers: u32,
    /// Whether `FD_CGROUP2` is there (false: no cgroup v2 tree on this machine, the descriptor is of /dev/null).
    pub has_cgroup2: bool,
    /// Default user of commands (name or numeric id), default environment and working directory ("": /).
    pub init_user: String,
    pub env: Vec<(String, String)>,
    pub workdir: String,
    /// Bytes of output one stream of a command may keep before aether refuses more, whatever the command asked.
    pub max_output: u64,
}

/// Order of the fixed descriptors in the ancillary data.
pub const FD_LISTENER: usize = 0; // listening Unix stream socket, the only way in
pub const FD_OOM_ADJ: usize = 1; // PID 1's oom_score_adj, open for writing
pub const FD_SPILL: usize = 2; // directory outside the overlay and its quota, for spilled output (O_TMPFILE | O_EXCL)
pub const FD_CGROUP2: usize = 3; // O_PATH: cgroup v2 directory under which aether makes one group per command
pub const FIXED_FDS: usize = 4;

#[derive(Serialize, Deserialize, Debug)]
pub struct BirthReply {
    pub ready: bool,
    /// Where it failed: "message", "layers", "overlay", "root", "privileges".
    pub stage: String,
    pub error: String,
    pub errno: i32,
    /// Microseconds by stage.
    pub us: Vec<(String, u64)>,
}

/// What `inside::enter` leaves for `aether::serve` once the process is in its sandbox without privilege. Descriptors are
/// all close-on-exec; `cgroup2` is -1 where there is none.
#[derive(Debug)]
pub struct Sandbox {
    pub birth: Birth,
    pub listener: i32,
    /// An epoll set that was made before the change of ids: the kernel counts what is watched by the user who made the set,
    /// and root inside could use up all that its own user may watch.
    pub epoll: i32,
    pub oom_adj: i32,
    pub spill: i32,
    pub cgroup2: i32,
    pub groups: Groups,
}
