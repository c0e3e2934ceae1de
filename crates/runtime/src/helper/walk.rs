//! `walk`: what is in an upper directory, as a stream of records (ARCHITECTURE.md) on standard output.
//!
//! The content is hostile. The process is locked into the directory and can only read; it follows no link, opens nothing
//! but directories and regular files, and needs memory for one buffer per level.

use super::glob::Glob;
use crate::sys::{self, process, Errno};
use serde::Serialize;
use std::ffi::{CStr, CString};
use std::io::{BufWriter, StdoutLock, Write};
use std::os::fd::{AsRawFd, OwnedFd, RawFd};

/// Below this nothing is walked; the stream says that it is not whole.
pub(super) const MAX_DEPTH: usize = 512;
const DATA_FRAME: usize = 256 * 1024;
pub(super) const DAC_READ_SEARCH: u64 = 1 << 2;
/// Ids are mapped in ranges of this size (`launcher::ids`).
const RANGE: u32 = 65_536;
const FIRST_BASE: u32 = 100_000;
const NOBODY: u32 = 65_534;

struct Options {
    directory: RawFd,
    base: Option<u32>,
    data: u64,
    include: Vec<Glob>,
    contents: Vec<Glob>,
    bare: Vec<Glob>,
}

#[derive(Serialize)]
struct Entry<'a> {
    #[serde(with = "serde_bytes")]
    path: &'a [u8],
    kind: &'static str,
    mode: u32,
    uid: u32,
    gid: u32,
    size: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    target: Option<serde_bytes::ByteBuf>,
    opaque: bool,
    /// Names of the same file.
    links: u64,
    /// It has attributes that are not the overlay's.
    xattrs: bool,
}

#[derive(Serialize)]
struct Data<'a> {
    #[serde(with = "serde_bytes")]
    path: &'a [u8],
    #[serde(with = "serde_bytes")]
    data: &'a [u8],
}

#[derive(Serialize)]
struct End {
    end: bool,
    count: u64,
    truncated: bool,
}

pub fn main(args: &[String]) -> Result<(), String> {
    let options = parse(args).ok_or(super::USAGE)?;
    let directory = enter(options.directory).map_err(|e| format!("enter the directory: {e}"))?;
    let root = stat(directory.as_raw_fd(), c"").map_err(|e| format!("stat the directory: {e}"))?;
    // Ranges are aligned, so any id of the sandbox tells its range, should it have given its root away.
    let derived = root.st_uid.checked_sub(FIRST_BASE).map_or(0, |above| FIRST_BASE + above / RANGE * RANGE);
    let mut walk = Walk {
        out: BufWriter::with_capacity(64 * 1024, std::io::stdout().lock()),
        base: options.base.unwrap_or(derived),
        left: options.data,
        include: options.include,
        contents: options.contents,
        bare: options.bare,
        path: Vec::new(),
        count: 0,
        truncated: false,
        frame: vec![0; DATA_FRAME],
    };
    let sent = walk.directory(&directory, 0).and_then(|()| walk.end());
    sent.map_err(|e| format!("write the stream: {e}"))
}

fn parse(args: &[String]) -> Option<Options> {
    let (include, contents, bare) = (Vec::new(), Vec::new(), Vec::new());
    let mut options = Options { directory: -1, base: None, data: 0, include, contents, bare };
    for pair in args.chunks(2) {
        let [key, value] = pair else { return None };
        match key.as_str() {
            "--dir-fd" => options.directory = value.parse().ok()?,
            "--idbase" => options.base = Some(value.parse().ok()?),
            "--data" => options.data = value.parse().ok()?,
            "--include" => options.include.push(Glob::new(value)),
            "--contents" => options.contents.push(Glob::new(value)),
            "--bare" => options.bare.push(Glob::new(value)),
            _ => return None,
        }
    }
    (options.directory >= 0).then_some(options)
}

/// Locks the process into the directory, with the right to read and no other.
fn enter(fd: RawFd) -> sys::Result<OwnedFd> {
    unsafe {
        crate::sys!(SYS_fchdir, fd)?;
        crate::sys!(SYS_chroot, c".".as_ptr())?;
        crate::sys!(SYS_close_range, 3, u32::MAX, 0)?;
    }
    process::bound_capabilities(DAC_READ_SEARCH)?;
    process::set_capabilities(DAC_READ_SEARCH)?;
    process::prctl(libc::PR_SET_NO_NEW_PRIVS, 1)?;
    sys::openat(libc::AT_FDCWD, c".", libc::O_RDONLY | libc::O_DIRECTORY, 0)
}

pub(super) fn stat(dir: RawFd, name: &CStr) -> sys::Result<libc::stat> {
    let mut stat: libc::stat = unsafe { std::mem::zeroed() };
    let flags = libc::AT_SYMLINK_NOFOLLOW | libc::AT_EMPTY_PATH;
    unsafe { crate::sys!(SYS_newfstatat, dir, name.as_ptr(), &raw mut stat, flags) }.map(|_| stat)
}

struct Walk<'a> {
    out: BufWriter<StdoutLock<'a>>,
    base: u32,
    /// Bytes of data that may still be sent.
    left: u64,
    include: Vec<Glob>,
    /// Whose data is sent; that of all when there is none.
    contents: Vec<Glob>,
    /// Whose data is not, whatever `contents` says.
    bare: Vec<Glob>,
    path: Vec<u8>,
    count: u64,
    truncated: bool,
    frame: Vec<u8>,
}

impl Walk<'_> {
    /// In order of name, as far as one buffer of names goes.
    fn directory(&mut self, directory: &OwnedFd, depth: usize) -> std::io::Result<()> {
        let mut names = Names::new();
        while let Some(chunk) = names.next(directory.as_raw_fd()) {
            for name in chunk {
                let length = self.path.len();
                if length > 0 {
                    self.path.push(b'/');
                }
                self.path.extend_from_slice(name.as_bytes());
                let walked = self.entry(directory, &name, depth);
                self.path.truncate(length);
                walked?;
            }
        }
        Ok(())
    }

    /// What vanishes while we look (the sandbox may live) is passed over.
    fn entry(&mut self, parent: &OwnedFd, name: &CStr, depth: usize) -> std::io::Result<()> {
        let Ok(stat) = stat(parent.as_raw_fd(), name) else { return Ok(()) };
        let kind = stat.st_mode & libc::S_IFMT;
        if kind == libc::S_IFDIR {
            return self.subdirectory(parent, name, &stat, depth);
        }
        if kind == libc::S_IFREG {
            return self.file(parent, name, &stat);
        }
        let target = if kind == libc::S_IFLNK { read_link(parent, name) } else { None };
        let word = match kind {
            libc::S_IFLNK => "symlink",
            libc::S_IFCHR if stat.st_rdev == 0 => "delete",
            _ => "special",
        };
        self.send(word, &stat, target, false, false)
    }

    fn subdirectory(&mut self, parent: &OwnedFd, name: &CStr, stat: &libc::stat, depth: usize) -> std::io::Result<()> {
        let flags = libc::O_RDONLY | libc::O_DIRECTORY | libc::O_NOFOLLOW;
        let Ok(directory) = sys::openat(parent.as_raw_fd(), name, flags, 0) else { return Ok(()) };
        self.send("mkdir", stat, None, is_opaque(&directory), has_attributes(&directory))?;
        if !self.include.is_empty() && !self.include.iter().any(|glob| glob.reaches_below(&self.path)) {
            return Ok(());
        }
        if depth >= MAX_DEPTH {
            self.truncated = true;
            return Ok(());
        }
        self.directory(&directory, depth + 1)
    }

    fn file(&mut self, parent: &OwnedFd, name: &CStr, stat: &libc::stat) -> std::io::Result<()> {
        if !self.wanted("write", false) {
            return Ok(());
        }
        let flags = libc::O_RDONLY | libc::O_NOFOLLOW | libc::O_NONBLOCK;
        let file = sys::openat(parent.as_raw_fd(), name, flags, 0);
        self.send("write", stat, None, false, file.as_ref().is_ok_and(has_attributes))?;
        let named = |globs: &[Glob]| globs.iter().any(|glob| glob.matches(&self.path));
        if (!self.contents.is_empty() && !named(&self.contents)) || named(&self.bare) {
            return Ok(());
        }
        let size = stat.st_size as u64;
        if size > self.left {
            self.truncated = true;
            return Ok(());
        }
        let Ok(file) = file else { return Ok(()) };
        let mut rest = size;
        while rest > 0 {
            let want = self.frame.len().min(rest as usize);
            let n = sys::read(file.as_raw_fd(), &mut self.frame[..want]).unwrap_or(0);
            if n == 0 {
                break; // shorter than it was
            }
            let data = Data { path: &self.path, data: &self.frame[..n] };
            write(&mut self.out, &data)?;
            rest -= n as u64;
        }
        self.left -= size - rest;
        Ok(())
    }

    /// A directory is of interest when the patterns name it; what took the place of a directory, also when they would name
    /// something below it, for that is gone.
    fn wanted(&self, kind: &str, opaque: bool) -> bool {
        let replaces = kind != "mkdir" || opaque;
        let named = |glob: &Glob| glob.matches(&self.path) || (replaces && glob.reaches_below(&self.path));
        self.include.is_empty() || self.include.iter().any(named)
    }

    fn send(
        &mut self,
        kind: &'static str,
        stat: &libc::stat,
        target: Option<Vec<u8>>,
        opaque: bool,
        xattrs: bool,
    ) -> std::io::Result<()> {
        if !self.wanted(kind, opaque) {
            return Ok(());
        }
        let inside = |id: u32| id.checked_sub(self.base).filter(|id| *id < RANGE).unwrap_or(NOBODY);
        let entry = Entry {
            path: &self.path,
            kind,
            mode: stat.st_mode & 0o7777,
            uid: inside(stat.st_uid),
            gid: inside(stat.st_gid),
            size: if kind == "write" { stat.st_size as u64 } else { 0 },
            target: target.map(serde_bytes::ByteBuf::from),
            opaque,
            links: if kind == "write" { stat.st_nlink } else { 1 },
            xattrs,
        };
        self.count += 1;
        write(&mut self.out, &entry)
    }

    fn end(&mut self) -> std::io::Result<()> {
        write(&mut self.out, &End { end: true, count: self.count, truncated: self.truncated })?;
        self.out.flush()
    }
}

/// One record: its length, then the map.
fn write(out: &mut impl Write, value: &impl Serialize) -> std::io::Result<()> {
    let record = rmp_serde::to_vec_named(value).map_err(std::io::Error::other)?;
    out.write_all(&(record.len() as u32).to_le_bytes())?;
    out.write_all(&record)
}

fn read_link(parent: &OwnedFd, name: &CStr) -> Option<Vec<u8>> {
    let mut buffer = vec![0u8; 4096];
    let (fd, length) = (parent.as_raw_fd(), buffer.len());
    let n = unsafe { crate::sys!(SYS_readlinkat, fd, name.as_ptr(), buffer.as_mut_ptr(), length) }.ok()?;
    buffer.truncate(n);
    Some(buffer)
}

fn is_opaque(directory: &OwnedFd) -> bool {
    let mut value = [0u8; 8];
    let (fd, name) = (directory.as_raw_fd(), c"user.overlay.opaque");
    let n = unsafe { crate::sys!(SYS_fgetxattr, fd, name.as_ptr(), value.as_mut_ptr(), value.len()) };
    n == Ok(1) && value[0] == b'y'
}

/// Whether a file has extended attributes that are not the overlay's own.
fn has_attributes(file: &OwnedFd) -> bool {
    let mut names = [0u8; 4096];
    match unsafe { crate::sys!(SYS_flistxattr, file.as_raw_fd(), names.as_mut_ptr(), names.len()) } {
        Ok(n) => {
            let mut names = names[..n].split(|b| *b == 0).filter(|name| !name.is_empty());
            names.any(|name| !name.starts_with(b"user.overlay."))
        }
        Err(Errno(libc::ERANGE)) => true,
        Err(_) => false,
    }
}

/// The names of a directory, one buffer of the kernel's at a time, each sorted.
pub(super) struct Names {
    buffer: Vec<u8>,
}

impl Names {
    pub(super) fn new() -> Self {
        Names { buffer: vec![0; 64 * 1024] }
    }

    pub(super) fn next(&mut self, directory: RawFd) -> Option<Vec<CString>> {
        let length = self.buffer.len();
        let read = unsafe { crate::sys!(SYS_getdents64, directory, self.buffer.as_mut_ptr(), length) };
        match read {
            Ok(0) | Err(Errno(_)) => None,
            Ok(n) => {
                let mut names: Vec<CString> =
                    sys::entries(&self.buffer[..n]).map(|entry| entry.name.to_owned()).collect();
                names.sort_unstable();
                Some(names)
            }
        }
    }
}
