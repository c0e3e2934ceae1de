//! What a launcher tells a newborn aether, once, over the control socket (descriptor 3, SOCK_SEQPACKET).
//!
//! The launcher clones and executes PID 1 long before it knows which sandbox it will be (pool); the process waits in
//! `recvmsg` on descriptor 3. One message with one `Birth` (msgpack map) and all descriptors turns it into a sandbox.
//! `inside::enter` consumes the descriptors, builds the root, drops privilege and answers with one `BirthReply`.

use serde::{Deserialize, Serialize};

/// Descriptors come in the ancillary data of the message, in the order of the fields marked `fd`.
#[derive(Serialize, Deserialize, Debug)]
pub struct Birth {
    /// Sandbox id, also the default host name.
    pub sandbox: String,
    pub hostname: String,
    /// Incarnation of the sandbox, repeated in every hello.
    pub incarnation: u64,
    /// Number of id-mapped layer mounts that follow the fixed descriptors, uppermost layer LAST (base first).
    pub layers: u32,
    /// Absolute paths (in the mount namespace inherited from the launcher) of this sandbox's upper and work directory.
    pub upper: String,
    pub work: String,
    /// Directory on the same filesystem that becomes /dev/shm.
    pub shm: String,
    /// Which cgroup files commands must join; see `cgroup.rs`. v1 `tasks` files come as descriptors, after the layers.
    pub cgroup_tasks: u32,
    /// Default user of commands (name or numeric id), default environment and working directory.
    pub init_user: String,
    pub env: Vec<(String, String)>,
    pub workdir: String,
    /// Bytes of output one stream of a command may keep before aether refuses more, whatever the command asked.
    pub max_output: u64,
}

/// Order of the fixed descriptors in the ancillary data; then `layers` mounts; then `cgroup_tasks` v1 task files.
pub const FD_LISTENER: usize = 0; // listening Unix stream socket, the only way in
pub const FD_OOM_ADJ: usize = 1; // own /proc/self/oom_score_adj, opened while it was still writable
pub const FD_SPILL: usize = 2; // O_PATH-free directory descriptor, outside the overlay, for spilled output (O_TMPFILE)
pub const FD_CGROUP2: usize = 3; // cgroup v2 directory of this sandbox's commands, delegated
pub const FD_DEV: usize = 4; // detached mount of the node's shared /dev
pub const FIXED_FDS: usize = 5;

#[derive(Serialize, Deserialize, Debug)]
pub struct BirthReply {
    pub ready: bool,
    /// Where it failed: "layers", "overlay", "proc", "dev", "pivot", "user", "privileges".
    pub stage: String,
    pub error: String,
}

/// What `inside::enter` leaves for `aether::serve` once the process is in its sandbox without privilege.
#[derive(Debug)]
pub struct Sandbox {
    pub birth: Birth,
    pub listener: i32,
    pub oom_adj: i32,
    pub spill: i32,
    pub cgroup2: i32,
    pub cgroup_tasks: Vec<i32>,
}
