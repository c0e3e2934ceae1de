//! System calls as aether needs them: owned descriptors, errno as a value, no libc function that could load anything.

use std::ffi::{CStr, CString};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

pub type Errno = i32;
pub type Result<T> = std::result::Result<T, Errno>;

pub fn errno() -> Errno {
    std::io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO)
}

/// The result of a libc call that answers -1 for failure.
pub fn check(result: impl Into<i64>) -> Result<i64> {
    match result.into() {
        -1 => Err(errno()),
        value => Ok(value),
    }
}

/// An owned descriptor.
#[derive(Debug)]
pub struct Fd(pub i32);

impl Drop for Fd {
    fn drop(&mut self) {
        unsafe { libc::close(self.0) };
    }
}

/// What `openat2` may not pass through: the links of /proc that lead anywhere, whoever put them there.
pub const SAFE: u64 = libc::RESOLVE_NO_MAGICLINKS;
/// Not through any link either, and not above the directory: for paths that an archive or a walk made up.
pub const BENEATH: u64 = libc::RESOLVE_NO_MAGICLINKS | libc::RESOLVE_NO_SYMLINKS | libc::RESOLVE_BENEATH;

pub fn open(dir: i32, path: &CStr, flags: i32, mode: u32, resolve: u64) -> Result<Fd> {
    let mut how: libc::open_how = unsafe { std::mem::zeroed() };
    how.flags = (flags | libc::O_CLOEXEC) as u64;
    how.mode = if flags & (libc::O_CREAT | libc::O_TMPFILE) & !libc::O_DIRECTORY != 0 { mode.into() } else { 0 };
    how.resolve = resolve;
    let size = std::mem::size_of_val(&how);
    for _ in 0..64 {
        match check(unsafe { libc::syscall(libc::SYS_openat2, dir, path.as_ptr(), &how, size) }) {
            Ok(fd) => return Ok(Fd(fd as i32)),
            Err(libc::EAGAIN) => {} // a rename raced the look-up; the kernel asks to try again
            Err(error) => return Err(error),
        }
    }
    Err(libc::EAGAIN)
}

pub fn fstat(fd: i32) -> Result<libc::stat> {
    let mut stat = unsafe { std::mem::zeroed() };
    check(unsafe { libc::fstat(fd, &mut stat) }).map(|_| stat)
}

pub fn lstat(dir: i32, name: &CStr) -> Result<libc::stat> {
    let mut stat = unsafe { std::mem::zeroed() };
    check(unsafe { libc::fstatat(dir, name.as_ptr(), &mut stat, libc::AT_SYMLINK_NOFOLLOW) }).map(|_| stat)
}

/// EACCES for what lies on procfs: aether, asked to look there, would see itself with its own eyes. A command may.
pub fn not_of_proc(fd: i32) -> Result<()> {
    const PROC_SUPER_MAGIC: libc::c_long = 0x9fa0;
    let mut about: libc::statfs = unsafe { std::mem::zeroed() };
    check(unsafe { libc::fstatfs(fd, &mut about) } as i64)?;
    if about.f_type == PROC_SUPER_MAGIC {
        Err(libc::EACCES)
    } else {
        Ok(())
    }
}

/// Where a link points; with an empty name the link that `dir` itself is (opened with O_PATH | O_NOFOLLOW).
pub fn readlink(dir: i32, name: &CStr) -> Result<Vec<u8>> {
    if dir >= 0 {
        not_of_proc(dir)?;
    }
    let mut target = vec![0; libc::PATH_MAX as usize];
    let size = check(unsafe { libc::readlinkat(dir, name.as_ptr(), target.as_mut_ptr().cast(), target.len()) } as i64)?;
    target.truncate(size as usize);
    Ok(target)
}

pub fn read(fd: i32, buffer: &mut [u8]) -> Result<usize> {
    check(unsafe { libc::read(fd, buffer.as_mut_ptr().cast(), buffer.len()) } as i64).map(|n| n as usize)
}

/// Reads at most `most` bytes behind those that are there already.
pub fn read_onto(fd: i32, bytes: &mut Vec<u8>, most: usize) -> Result<usize> {
    bytes.reserve_exact(most);
    let room = bytes.spare_capacity_mut();
    let count = most.min(room.len());
    let size = check(unsafe { libc::read(fd, room.as_mut_ptr().cast(), count) } as i64)? as usize;
    // SAFETY: the kernel wrote `size` bytes behind the length, at most the capacity.
    unsafe { bytes.set_len(bytes.len() + size) };
    Ok(size)
}

/// Best effort: how much the kernel holds of what is sent on a socket.
pub fn buffer_to_send(socket: i32, size: i32) {
    let length = std::mem::size_of_val(&size) as libc::socklen_t;
    unsafe { libc::setsockopt(socket, libc::SOL_SOCKET, libc::SO_SNDBUF, (&raw const size).cast(), length) };
}

pub fn write(fd: i32, bytes: &[u8]) -> Result<usize> {
    check(unsafe { libc::write(fd, bytes.as_ptr().cast(), bytes.len()) } as i64).map(|n| n as usize)
}

pub fn write_all(fd: i32, mut bytes: &[u8]) -> Result<()> {
    while !bytes.is_empty() {
        match write(fd, bytes) {
            Ok(0) => return Err(libc::EIO),
            Ok(size) => bytes = &bytes[size..],
            Err(libc::EINTR) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

pub fn pread(fd: i32, buffer: &mut [u8], at: u64) -> Result<usize> {
    check(unsafe { libc::pread(fd, buffer.as_mut_ptr().cast(), buffer.len(), at as i64) } as i64).map(|n| n as usize)
}

/// Read end and write end, both closed on exec; only the given ends do not block.
pub fn pipe(nonblocking_read: bool, nonblocking_write: bool) -> Result<(Fd, Fd)> {
    let mut ends = [0; 2];
    check(unsafe { libc::pipe2(ends.as_mut_ptr(), libc::O_CLOEXEC) })?;
    let (reader, writer) = (Fd(ends[0]), Fd(ends[1]));
    for (fd, wanted) in [(&reader, nonblocking_read), (&writer, nonblocking_write)] {
        if wanted {
            check(unsafe { libc::fcntl(fd.0, libc::F_SETFL, libc::O_NONBLOCK) })?;
        }
    }
    Ok((reader, writer))
}

/// Another descriptor of the same open file, above all that a new process has at fixed places.
pub fn duplicate(fd: &Fd) -> Result<Fd> {
    check(unsafe { libc::fcntl(fd.0, libc::F_DUPFD_CLOEXEC, 64) }).map(|fd| Fd(fd as i32))
}

/// Undoes what a process that had the same open file may have done to it.
pub fn set_blocking(fd: &Fd) {
    unsafe {
        let flags = libc::fcntl(fd.0, libc::F_GETFL);
        if flags & (libc::O_NONBLOCK | libc::O_ASYNC) != 0 {
            libc::fcntl(fd.0, libc::F_SETFL, flags & !(libc::O_NONBLOCK | libc::O_ASYNC));
        }
    }
}

/// What the kernel says of a process.
pub struct Status {
    pub name: String,
    pub parent: i32,
    /// Signals that it catches or ignores, as a mask.
    handled: u64,
}

impl Status {
    /// None when it has ended.
    pub fn of(pid: i32) -> Option<Status> {
        let mut status = Vec::new();
        let path = cstring(format!("/proc/{pid}/status").as_bytes()).ok()?;
        let file = open(libc::AT_FDCWD, &path, libc::O_RDONLY, 0, 0).ok()?;
        read_onto(file.0, &mut status, 8192).ok()?;
        let text = String::from_utf8_lossy(&status);
        let value = |name: &str| text.lines().find_map(|line| line.strip_prefix(name)).map(str::trim);
        let mask = |name: &str| u64::from_str_radix(value(name)?, 16).ok();
        Some(Status {
            name: value("Name:")?.into(),
            parent: value("PPid:")?.parse().ok()?,
            handled: mask("SigIgn:")? | mask("SigCgt:")?,
        })
    }

    /// Whether it neither catches nor ignores a signal.
    pub fn dies_of(&self, signal: i32) -> bool {
        self.handled >> (signal - 1) & 1 == 0
    }
}

/// Bytes that can be read at once.
pub fn readable(fd: i32) -> usize {
    let mut count: i32 = 0;
    unsafe { libc::ioctl(fd, libc::FIONREAD, &mut count) };
    count.max(0) as usize
}

/// The bytes as a C string; EINVAL when there is a NUL in them.
pub fn cstring(bytes: &[u8]) -> Result<CString> {
    CString::new(bytes).map_err(|_| libc::EINVAL)
}

/// Microseconds for which the clock stood still, and since when it does (0: it goes).
static STOOD: AtomicU64 = AtomicU64::new(0);
static STOPPED_AT: AtomicU64 = AtomicU64::new(0);

/// Seconds on a clock that nobody sets, and that stands still while the sandbox is paused.
pub fn now() -> f64 {
    let micros = match STOPPED_AT.load(Relaxed) {
        0 => crate::sys::now_us(),
        at => at,
    };
    (micros - STOOD.load(Relaxed)) as f64 / 1e6
}

/// Until `start_clock`: a sandbox that is frozen does not know when. Both may be said twice.
pub fn stop_clock() {
    let _ = STOPPED_AT.compare_exchange(0, crate::sys::now_us(), Relaxed, Relaxed);
}

pub fn start_clock() {
    let at = STOPPED_AT.swap(0, Relaxed);
    if at > 0 {
        STOOD.fetch_add(crate::sys::now_us() - at, Relaxed);
    }
}

pub fn unix_time() -> f64 {
    let mut time: libc::timespec = unsafe { std::mem::zeroed() };
    unsafe { libc::clock_gettime(libc::CLOCK_REALTIME, &mut time) };
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}

pub struct Epoll(Fd);

impl Epoll {
    /// Of the set behind a descriptor.
    pub fn of(fd: Fd) -> Epoll {
        Epoll(fd)
    }

    /// A descriptor that leaves the set when it is closed.
    pub fn own(&self, fd: Fd) -> Watched {
        Watched { fd, epoll: self.0 .0 }
    }

    /// Adds or changes what is waited for.
    pub fn watch(&self, fd: i32, events: i32, token: u64) -> Result<()> {
        let mut event = libc::epoll_event { events: events as u32, u64: token };
        let mut control = |operation| check(unsafe { libc::epoll_ctl(self.0 .0, operation, fd, &mut event) });
        match control(libc::EPOLL_CTL_ADD) {
            Err(libc::EEXIST) => control(libc::EPOLL_CTL_MOD).map(|_| ()),
            other => other.map(|_| ()),
        }
    }

    /// Waits for at most `seconds` (None: for ever) and hands over up to `buffer.len()` events.
    pub fn wait<'a>(&self, buffer: &'a mut [libc::epoll_event], seconds: Option<f64>) -> &'a [libc::epoll_event] {
        let timeout = seconds.map_or(-1, |s| (s.clamp(0.0, 3600.0) * 1000.0).ceil() as i32);
        let count = unsafe { libc::epoll_wait(self.0 .0, buffer.as_mut_ptr(), buffer.len() as i32, timeout) };
        &buffer[..count.max(0) as usize]
    }
}

/// A descriptor that may be in an epoll set. Closing alone would not take it out: a child on its way to exec has copies of
/// all descriptors, and a stopped one would keep aether awake with events of files that it closed long ago.
pub struct Watched {
    fd: Fd,
    epoll: i32,
}

impl Watched {
    pub fn raw(&self) -> i32 {
        self.fd.0
    }

    /// Another descriptor for the same set.
    pub fn beside(&self, fd: Fd) -> Watched {
        Watched { fd, epoll: self.epoll }
    }

    /// Adds it to the set.
    pub fn watch(&self, events: i32, token: u64) -> Result<()> {
        let mut event = libc::epoll_event { events: events as u32, u64: token };
        check(unsafe { libc::epoll_ctl(self.epoll, libc::EPOLL_CTL_ADD, self.fd.0, &mut event) }).map(drop)
    }
}

impl Drop for Watched {
    fn drop(&mut self) {
        unsafe { libc::epoll_ctl(self.epoll, libc::EPOLL_CTL_DEL, self.fd.0, std::ptr::null_mut()) };
    }
}

/// Memory for bytes in passing. Mapped, not allocated: an idle aether gives the touched pages back.
pub struct Scratch {
    bytes: &'static mut [u8],
    touched: usize,
}

impl Scratch {
    pub fn new(size: usize) -> Result<Scratch> {
        let (access, kind) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        let start = unsafe { libc::mmap(std::ptr::null_mut(), size, access, kind, -1, 0) };
        if start == libc::MAP_FAILED {
            return Err(errno());
        }
        // SAFETY: a fresh private mapping of `size` zeroed bytes that is never unmapped and owned by this value alone.
        Ok(Scratch { bytes: unsafe { std::slice::from_raw_parts_mut(start.cast(), size) }, touched: 0 })
    }

    pub fn read(&mut self, fd: i32) -> Result<&[u8]> {
        let size = read(fd, self.bytes)?;
        self.touched = self.touched.max(size);
        Ok(&self.bytes[..size])
    }

    pub fn pread(&mut self, fd: i32, most: usize, at: u64) -> Result<&[u8]> {
        let most = most.min(self.bytes.len());
        let size = pread(fd, &mut self.bytes[..most], at)?;
        self.touched = self.touched.max(size);
        Ok(&self.bytes[..size])
    }

    /// Gives the pages back to the kernel when it is worth a call.
    pub fn release(&mut self) {
        if self.touched > 16 * 1024 {
            unsafe { libc::madvise(self.bytes.as_mut_ptr().cast(), self.bytes.len(), libc::MADV_DONTNEED) };
            self.touched = 0;
        }
    }
}
