//! Cloning PID 1 of a sandbox: what happens between clone3 and the execution of aether.
//!
//! The newborn runs on the launcher's memory, like after vfork but beside the launcher, since copying page tables costs a
//! tenth of a millisecond. So it makes bare system calls only: no allocation, no locks, no thread-local storage.

use crate::sys::process::{self, clone_onto_stack, CloneArgs, CLONE_INTO_CGROUP};
use crate::sys::{self, c, At, Errno, Failure, Result};
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::ptr::null;

const STAGE: &str = "clone";
const STACK: usize = 16 * 1024;

/// What the newborn reads; on the launcher's heap until it has executed aether.
struct Errand {
    control: RawFd,
    program: RawFd,
    null: RawFd,
}

/// Memory that a newborn runs on. May be reused or freed only when that newborn has executed or died.
pub struct Cradle {
    stack: Box<[u128]>,
    errand: Box<Errand>,
}

impl Cradle {
    pub fn new() -> Self {
        let errand = Box::new(Errand { control: -1, program: -1, null: -1 });
        Cradle { stack: vec![0; STACK / 16].into_boxed_slice(), errand }
    }
}

/// A cloned PID 1 that waits for the first message on its control socket.
pub struct Newborn {
    pub pid: i32,
    pub pidfd: OwnedFd,
}

impl Newborn {
    /// Kills it and waits until it no longer uses its cradle.
    pub fn abandon(&self) {
        let _ = process::send_signal(&self.pidfd, libc::SIGKILL);
        let _ = process::wait(&self.pidfd);
    }
}

/// Clones a PID 1 in new namespaces whose root is the host's id `root`, and writes its id maps.
pub fn clone(
    cradle: &mut Cradle,
    control: &OwnedFd,
    program: &OwnedFd,
    null: &OwnedFd,
    cgroup: Option<&OwnedFd>,
    root: u32,
) -> std::result::Result<Newborn, Failure> {
    let namespaces = libc::CLONE_NEWUSER | libc::CLONE_NEWPID | libc::CLONE_NEWNS | libc::CLONE_NEWUTS | libc::CLONE_NEWIPC;
    let mut pidfd: i32 = -1;
    *cradle.errand =
        Errand { control: control.as_raw_fd(), program: program.as_raw_fd(), null: null.as_raw_fd() };
    let args = CloneArgs {
        flags: (namespaces | libc::CLONE_VM | libc::CLONE_PIDFD) as u64 | cgroup.map_or(0, |_| CLONE_INTO_CGROUP),
        pidfd: &raw mut pidfd as u64,
        exit_signal: libc::SIGCHLD as u64,
        stack: cradle.stack.as_mut_ptr() as u64,
        stack_size: STACK as u64,
        cgroup: cgroup.map_or(0, |fd| fd.as_raw_fd() as u64),
        ..CloneArgs::default()
    };
    // SAFETY: `newborn` keeps to system calls; stack and errand live in the cradle, which the caller keeps.
    let pid = unsafe { clone_onto_stack(&args, newborn, &raw const *cradle.errand) }.at(STAGE, || "clone3".into())?;
    let newborn = Newborn { pid, pidfd: sys::own(pidfd as usize) };
    let map = format!("0 {root} {}\n", super::ids::RANGE);
    for file in ["uid_map", "gid_map"] {
        let path = c(format!("/proc/{pid}/{file}"));
        let written = sys::write_file(libc::AT_FDCWD, &path, map.as_bytes());
        if let Err(failure) = written.at(STAGE, || format!("write {file}")) {
            newborn.abandon();
            return Err(failure);
        }
    }
    Ok(newborn)
}

/// Runs in the newborn. Its exit status, when it fails, is the number of the step.
extern "C" fn newborn(errand: *const Errand) -> ! {
    // SAFETY: the launcher keeps the errand until we have executed or died.
    let errand = unsafe { &*errand };
    let step = match become_aether(errand) {
        Ok(()) => 0,
        Err(step) => step,
    };
    loop {
        let _ = unsafe { crate::sys!(SYS_exit_group, step) };
    }
}

fn become_aether(errand: &Errand) -> std::result::Result<(), i32> {
    let step = |number: i32, result: Result<usize>| result.map_err(|_| number);
    // SAFETY: plain system calls on our own descriptors and on memory that outlives us.
    unsafe {
        step(10, crate::sys!(SYS_unshare, libc::CLONE_NEWNET))?;
        raise_loopback().map_err(|_| 11)?;
        // The first message: the id maps are written. Left in the socket for aether to read.
        let mut first = 0u8;
        if crate::sys!(SYS_recvfrom, errand.control, &raw mut first, 1, libc::MSG_PEEK, 0, 0) != Ok(1) {
            return Err(0);
        }
        step(12, crate::sys!(SYS_setgroups, 0, null::<u32>()))?;
        step(13, crate::sys!(SYS_setresgid, 0, 0, 0))?;
        step(14, crate::sys!(SYS_setresuid, 0, 0, 0))?;
        // Any user inside may listen on any port: the namespace is the sandbox's own.
        let ports = c"/proc/sys/net/ipv4/ip_unprivileged_port_start";
        sys::write_static(ports, b"0").map_err(|_| 15)?;
        arrange_descriptors(errand)?;
        let arguments = [c"aether".as_ptr(), c"aether".as_ptr(), null()];
        let environment = [null::<i8>()];
        let (program, flags) = (PROGRAM, libc::AT_EMPTY_PATH);
        step(17, crate::sys!(SYS_execveat, program, c"".as_ptr(), arguments.as_ptr(), environment.as_ptr(), flags))?;
    }
    Ok(())
}

/// Where the program's descriptor lies for the moment of its execution (it is close-on-exec).
const PROGRAM: RawFd = 4;

/// /dev/null at 0 to 2, the control socket at 3, nothing else but the program.
fn arrange_descriptors(errand: &Errand) -> std::result::Result<(), i32> {
    // Sources may lie where targets will: the launcher keeps its descriptors above all targets (`launcher::run`).
    for target in 0..3 {
        duplicate(errand.null, target, 0)?;
    }
    duplicate(errand.control, 3, 0)?;
    duplicate(errand.program, PROGRAM, libc::O_CLOEXEC)?;
    unsafe { crate::sys!(SYS_close_range, PROGRAM + 1, u32::MAX, 0) }.map(drop).map_err(|_| 16)
}

fn duplicate(from: RawFd, to: RawFd, flags: i32) -> std::result::Result<(), i32> {
    unsafe { crate::sys!(SYS_dup3, from, to, flags) }.map(drop).map_err(|_| 16)
}

fn raise_loopback() -> Result<()> {
    /// `struct ifreq` with flags.
    #[repr(C)]
    struct Request {
        name: [u8; 16],
        flags: i16,
        rest: [u8; 22],
    }
    let mut request = Request { name: *b"lo\0\0\0\0\0\0\0\0\0\0\0\0\0\0", flags: libc::IFF_UP as i16, rest: [0; 22] };
    unsafe {
        let socket = crate::sys!(SYS_socket, libc::AF_INET, libc::SOCK_DGRAM | libc::SOCK_CLOEXEC, 0)?;
        let raised = crate::sys!(SYS_ioctl, socket, libc::SIOCSIFFLAGS, &raw mut request);
        crate::sys!(SYS_close, socket)?;
        raised.map(drop)
    }
}

/// A copy of this binary that the ids of sandboxes may execute but not read, so that no process inside can look into a
/// process that runs it: the kernel does not let it be dumped or traced without privilege over the host.
pub fn guarded_program() -> std::result::Result<OwnedFd, Failure> {
    let stage = "start";
    let image = std::fs::read("/proc/self/exe").map_err(Errno::from).at(stage, || "read own program".into())?;
    let flags = libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING | libc::MFD_EXEC;
    let create = |flags: u32| unsafe { crate::sys!(SYS_memfd_create, c"aether".as_ptr(), flags) };
    // Kernels before 6.3 do not know MFD_EXEC and need no such word.
    let memory = create(flags).or_else(|_| create(flags & !libc::MFD_EXEC)).at(stage, || "memfd_create".into())?;
    let memory = sys::own(memory);
    let mut rest = &image[..];
    while !rest.is_empty() {
        let n = sys::write(memory.as_raw_fd(), rest).at(stage, || "copy own program".into())?;
        rest = &rest[n..];
    }
    sys::fchmod(&memory, 0o711).at(stage, || "chmod the copy".into())?;
    let seals = libc::F_SEAL_WRITE | libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_SEAL;
    unsafe { crate::sys!(SYS_fcntl, memory.as_raw_fd(), libc::F_ADD_SEALS, seals) }.at(stage, || "seal the copy".into())?;
    Ok(memory)
}
