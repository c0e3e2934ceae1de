//! Thin, typed wrappers over the system calls that the standard library does not have.
//!
//! They enter the kernel themselves and return the error as a value, never through `errno`.

pub mod btrfs;
pub mod loopdev;
pub mod mount;
pub mod pages;
pub mod process;
pub mod socket;

use std::ffi::{CStr, CString};
use std::fmt;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};

/// An error number of the kernel.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Errno(pub i32);

pub type Result<T> = std::result::Result<T, Errno>;

impl fmt::Display for Errno {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        std::io::Error::from_raw_os_error(self.0).fmt(f)
    }
}

impl From<std::io::Error> for Errno {
    fn from(error: std::io::Error) -> Self {
        Errno(error.raw_os_error().unwrap_or(libc::EIO))
    }
}

/// What failed, where, and why: everything a caller at the other end of a socket can use.
#[derive(Clone, Debug)]
pub struct Failure {
    /// One word for the phase: `cgroup`, `upper`, `layers`, ...
    pub stage: &'static str,
    pub what: String,
    pub errno: i32,
}

impl Failure {
    pub fn new(stage: &'static str, what: impl Into<String>, errno: i32) -> Self {
        Failure { stage, what: what.into(), errno }
    }
}

impl Failure {
    /// The same failure, in the words of the caller.
    pub fn at(self, stage: &'static str, what: String) -> Self {
        Failure { stage, what: format!("{what}: {}", self.what), errno: self.errno }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.stage, self.what)
    }
}

/// Adds the phase and the object to a bare error number.
pub trait At<T> {
    fn at(self, stage: &'static str, what: impl FnOnce() -> String) -> std::result::Result<T, Failure>;
}

impl<T> At<T> for Result<T> {
    fn at(self, stage: &'static str, what: impl FnOnce() -> String) -> std::result::Result<T, Failure> {
        self.map_err(|e| Failure { stage, what: format!("{}: {e}", what()), errno: e.0 })
    }
}

/// One system call with up to six arguments.
///
/// # Safety
/// As the system call itself: pointers among the arguments must be what the kernel expects.
#[inline(always)]
pub unsafe fn raw(number: libc::c_long, args: [usize; 6]) -> Result<usize> {
    let result: isize;
    // SAFETY: the x86-64 system call convention; the caller vouches for the arguments.
    unsafe {
        std::arch::asm!("syscall", inlateout("rax") number as isize => result, in("rdi") args[0], in("rsi") args[1],
            in("rdx") args[2], in("r10") args[3], in("r8") args[4], in("r9") args[5],
            lateout("rcx") _, lateout("r11") _, options(nostack));
    }
    if (-4095..0).contains(&result) {
        Err(Errno(-result as i32))
    } else {
        Ok(result as usize)
    }
}

/// `sys!(SYS_x, a, b)`: one system call; integers and pointers alike are cast. Unsafe like `raw`.
#[macro_export]
macro_rules! sys {
    ($name:ident $(, $argument:expr)* $(,)?) => {
        $crate::sys::raw(libc::$name, $crate::sys::padded([$($argument as usize),*]))
    };
}

/// Arguments, filled up with zeros.
#[inline(always)]
pub fn padded<const N: usize>(given: [usize; N]) -> [usize; 6] {
    let mut all = [0; 6];
    all[..N].copy_from_slice(&given);
    all
}

/// A path or name for the kernel. NUL bytes cannot occur in what we build; a caller's are refused before.
pub fn c(text: impl Into<Vec<u8>>) -> CString {
    CString::new(text).unwrap_or_default()
}

pub fn own(fd: usize) -> OwnedFd {
    // SAFETY: the kernel has just given us this descriptor and nobody else knows it.
    unsafe { OwnedFd::from_raw_fd(fd as RawFd) }
}

pub fn openat(dir: RawFd, path: &CStr, flags: i32, mode: u32) -> Result<OwnedFd> {
    unsafe { sys!(SYS_openat, dir, path.as_ptr(), flags | libc::O_CLOEXEC, mode) }.map(own)
}

pub fn mkdirat(dir: RawFd, path: &CStr, mode: u32) -> Result<()> {
    unsafe { sys!(SYS_mkdirat, dir, path.as_ptr(), mode) }.map(drop)
}

/// `flags`: 0 for files, `AT_REMOVEDIR` for directories.
pub fn unlinkat(dir: RawFd, path: &CStr, flags: i32) -> Result<()> {
    unsafe { sys!(SYS_unlinkat, dir, path.as_ptr(), flags) }.map(drop)
}

pub fn fchownat(dir: RawFd, path: &CStr, uid: u32, gid: u32) -> Result<()> {
    unsafe { sys!(SYS_fchownat, dir, path.as_ptr(), uid, gid, libc::AT_SYMLINK_NOFOLLOW) }.map(drop)
}

pub fn fchmod(fd: &impl AsRawFd, mode: u32) -> Result<()> {
    unsafe { sys!(SYS_fchmod, fd.as_raw_fd(), mode) }.map(drop)
}

pub fn write(fd: RawFd, data: &[u8]) -> Result<usize> {
    unsafe { sys!(SYS_write, fd, data.as_ptr(), data.len()) }
}

pub fn read(fd: RawFd, buffer: &mut [u8]) -> Result<usize> {
    unsafe { sys!(SYS_read, fd, buffer.as_mut_ptr(), buffer.len()) }
}

/// Opens, writes once, closes: for files of cgroupfs and procfs.
pub fn write_file(dir: RawFd, path: &CStr, value: &[u8]) -> Result<()> {
    let fd = openat(dir, path, libc::O_WRONLY, 0)?;
    write(fd.as_raw_fd(), value).map(drop)
}

/// Reads a small file of cgroupfs or procfs whole (up to 4 KiB).
pub fn read_file(dir: RawFd, path: &CStr) -> Result<String> {
    let fd = openat(dir, path, libc::O_RDONLY, 0)?;
    let mut buffer = [0u8; 4096];
    let n = read(fd.as_raw_fd(), &mut buffer)?;
    Ok(String::from_utf8_lossy(&buffer[..n]).into_owned())
}

/// Writes a line to the log, which is standard error. One that cannot be written is lost, and no more than that.
pub fn say(line: std::fmt::Arguments) {
    use std::io::Write;
    let _ = std::io::stderr().write_all(format!("{line}\n").as_bytes());
}

/// Reads a file of cgroupfs or procfs to its end.
pub fn read_whole(dir: RawFd, path: &CStr) -> Result<String> {
    let fd = openat(dir, path, libc::O_RDONLY, 0)?;
    let (mut text, mut buffer) = (Vec::new(), [0u8; 4096]);
    loop {
        match read(fd.as_raw_fd(), &mut buffer)? {
            0 => return Ok(String::from_utf8_lossy(&text).into_owned()),
            n => text.extend_from_slice(&buffer[..n]),
        }
    }
}

/// Names and kinds of a directory's entries.
pub fn list(fd: RawFd) -> Result<Vec<(CString, u8)>> {
    gather(fd, |entry| (entry.name.to_owned(), entry.kind))
}

/// Names of a directory's entries, and the numbers of the files they name.
pub fn list_files(fd: RawFd) -> Result<Vec<(CString, u64)>> {
    gather(fd, |entry| (entry.name.to_owned(), entry.inode))
}

fn gather<T>(fd: RawFd, take: impl Fn(Entry) -> T) -> Result<Vec<T>> {
    let mut found = Vec::new();
    let mut buffer = vec![0u8; 32 * 1024];
    unsafe { sys!(SYS_lseek, fd, 0, libc::SEEK_SET) }?;
    loop {
        match unsafe { sys!(SYS_getdents64, fd, buffer.as_mut_ptr(), buffer.len()) }? {
            0 => return Ok(found),
            n => found.extend(entries(&buffer[..n]).map(&take)),
        }
    }
}

pub struct Entry<'a> {
    pub name: &'a CStr,
    pub kind: u8,
    pub inode: u64,
}

/// The entries in what getdents64 has filled, without `.` and `..`.
pub fn entries(buffer: &[u8]) -> impl Iterator<Item = Entry<'_>> {
    const NAME: usize = 19;
    let mut rest = buffer;
    std::iter::from_fn(move || {
        let inode = u64::from_ne_bytes(rest.get(..8)?.try_into().ok()?);
        let length = u16::from_ne_bytes([*rest.get(16)?, *rest.get(17)?]) as usize;
        let (entry, after) = rest.split_at_checked(length)?;
        rest = after;
        let name = CStr::from_bytes_until_nul(&entry[NAME..]).unwrap_or_default();
        Some(Entry { name, kind: entry[NAME - 1], inode })
    })
    .filter(|entry| entry.name != c"." && entry.name != c"..")
}

/// Microseconds of the monotonic clock.
pub fn now_us() -> u64 {
    let mut t = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: fills the structure given.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &mut t) };
    t.tv_sec as u64 * 1_000_000 + t.tv_nsec as u64 / 1000
}
