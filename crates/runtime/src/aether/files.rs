//! Files of the sandbox, served by aether itself, as the user who asks.
//!
//! Every path is walked by `openat2`, which refuses the magic links of /proc: they would lead to aether's own descriptors.
//! Ordinary links are followed, since aether's root is the sandbox's. What changes a directory is done by (directory
//! descriptor, last name), never by path.

use super::conn::{Job, Sink, Step};
use super::fault::Fault;
use super::os::{self, check, cstring, Fd, BENEATH, SAFE};
use super::patch::Patch;
use super::tar::Tar;
use super::untar::Untar;
use super::users::{self, User};
use super::walk::{List, Remove, Streamed};
use crate::birth::Birth;
use crate::msgpack::{Pack, Value};
use std::ffi::{CStr, CString};

const MAX_LINKS: usize = 40;

pub enum Answer {
    Reply(Vec<u8>),
    Job(Box<dyn Job>),
}

fn job(job: impl Job + 'static) -> Result<Answer, Fault> {
    Ok(Answer::Job(Box::new(job)))
}

fn nothing() -> Result<Answer, Fault> {
    Ok(Answer::Reply(Pack::default().map(0).0))
}

pub fn request(method: &str, params: Value, birth: &Birth) -> Result<Answer, Fault> {
    if !method.starts_with("fs.") {
        return Err(Fault::new("unsupported", format!("method {method:?} is not one of aether's")));
    }
    let user = user(params, birth)?;
    let path = |name: &str| path(params, name, birth, &user);
    let flag = |name: &str, default| params.get(name).and_then(Value::bool).unwrap_or(default);
    let _acting = Acting::new(&user)?;
    match method {
        "fs.stat" => stat(&path("path")?, flag("follow", true)),
        "fs.read" => {
            job(ReadFile::open(&path("path")?, number(params, "offset")?.unwrap_or(0), number(params, "length")?)?)
        }
        "fs.write" => job(WriteFile::open(&path("path")?, mode(params)?, owner(params)?, user.clone())?),
        "fs.mkdir" => make_directory(&path("path")?, mode(params)?, flag("parents", false)),
        "fs.list" => {
            let depth = number(params, "depth")?.unwrap_or(1).clamp(1, 1024) as usize;
            job(Streamed::new(user.clone(), List::open(&path("path")?, depth)?))
        }
        "fs.remove" => remove(&path("path")?, flag("recursive", false), user.clone()),
        "fs.tar" => job(Streamed::new(user.clone(), Tar::open(&path("path")?)?)),
        "fs.untar" if flag("whiteouts", false) => job(Patch::open(&path("path")?, user.clone())?),
        "fs.untar" => job(Untar::open(&path("path")?, user.clone())?),
        "fs.move" => rename(&path("source")?, &path("target")?, user.clone()),
        _ => Err(Fault::new("unsupported", format!("method {method:?} is not one of aether's"))),
    }
}

// -- parameters --

/// Who asks: the user named, else the sandbox's.
pub fn user(params: Value, birth: &Birth) -> Result<User, Fault> {
    let wanted = params.get("user").and_then(Value::str).unwrap_or(&birth.init_user);
    users::look_up(if wanted.is_empty() { "root" } else { wanted })
}

/// A path, absolute or seen from where a command of this user, as whom we act already, starts.
pub fn path(params: Value, name: &str, birth: &Birth, user: &User) -> Result<CString, Fault> {
    let bytes =
        params.get(name).and_then(Value::bytes).ok_or_else(|| Fault::invalid(format!("{name} must be bytes")))?;
    if bytes.is_empty() {
        return Err(Fault::new("file_not_found", format!("{name} is empty")));
    }
    let whole = match bytes.starts_with(b"/") {
        true => bytes.to_vec(),
        false => [start(birth, user), b"/", bytes].concat(),
    };
    cstring(&whole).map_err(|_| {
        Fault::new("file_invalid", format!("{name} {:?} has a NUL byte in it", String::from_utf8_lossy(bytes)))
    })
}

/// The working directory of the sandbox, else the user's home if it can be entered, else "/" (which is nothing, before a slash).
fn start<'a>(birth: &'a Birth, user: &'a User) -> &'a [u8] {
    if !birth.workdir.is_empty() {
        return birth.workdir.as_bytes();
    }
    let flags = libc::O_PATH | libc::O_DIRECTORY;
    let inside = cstring(&[&user.home, &b"/."[..]].concat());
    let entered = inside.is_ok_and(|path| os::open(libc::AT_FDCWD, &path, flags, 0, SAFE).is_ok());
    if entered && user.home.starts_with(b"/") {
        &user.home
    } else {
        b""
    }
}

fn number(params: Value, name: &str) -> Result<Option<u64>, Fault> {
    let whole = |value: Value| value.u64().filter(|n| *n <= i64::MAX as u64);
    let wrong = || Fault::invalid(format!("{name} must be a whole number, zero or more"));
    params.get(name).map(|value| whole(value).ok_or_else(wrong)).transpose()
}

fn mode(params: Value) -> Result<Option<u32>, Fault> {
    match number(params, "mode")? {
        Some(mode) if mode > 0o7777 => Err(Fault::invalid("mode must be permission bits, at most 0o7777")),
        mode => Ok(mode.map(|mode| mode as u32)),
    }
}

/// `user` (its own group) or `user:group`, as ids.
fn owner(params: Value) -> Result<Option<(u32, u32)>, Fault> {
    let Some(owner) = params.get("owner") else { return Ok(None) };
    let owner = owner.str().ok_or_else(|| Fault::invalid("owner must be \"user\" or \"user:group\""))?;
    users::look_up(owner).map(|user| Some((user.uid, user.gid)))
}

// -- who --

/// While it lives, files are accessed as that user: the kernel takes the capabilities over files away with the id.
pub struct Acting {
    changed: bool,
}

impl Acting {
    pub fn new(user: &User) -> Result<Acting, Fault> {
        if user.uid == 0 {
            return Ok(Acting { changed: false });
        }
        let acting = Acting { changed: true };
        let ids = unsafe {
            libc::syscall(libc::SYS_setgroups, user.groups.len(), user.groups.as_ptr());
            libc::syscall(libc::SYS_setfsgid, user.gid);
            libc::syscall(libc::SYS_setfsuid, user.uid);
            stay_hidden();
            // these calls tell no failure, only what is in force
            (libc::syscall(libc::SYS_setfsuid, u32::MAX), libc::syscall(libc::SYS_setfsgid, u32::MAX))
        };
        match ids == (user.uid.into(), user.gid.into()) {
            true => Ok(acting),
            false => {
                Err(Fault::invalid(format!("cannot act as user {}:{}: not ids of the sandbox", user.uid, user.gid)))
            }
        }
    }
}

/// A change of ids can make a process traceable, by a setting of the machine; aether must never be.
unsafe fn stay_hidden() {
    unsafe { libc::prctl(libc::PR_SET_DUMPABLE, 0) };
}

impl Drop for Acting {
    fn drop(&mut self) {
        if self.changed {
            unsafe {
                libc::syscall(libc::SYS_setfsuid, 0);
                libc::syscall(libc::SYS_setfsgid, 0);
                libc::syscall(libc::SYS_setgroups, 0, std::ptr::null::<u32>());
                stay_hidden();
            }
        }
    }
}

// -- where --

/// Directory and last name of a path; directories that are missing are made when asked for.
pub struct Place {
    pub dir: Fd,
    pub name: CString,
}

impl Place {
    pub fn of(path: &CStr, make_parents: bool) -> Result<Place, Fault> {
        Place::below(libc::AT_FDCWD, path, make_parents).map_err(|errno| Fault::file(errno, path.to_bytes()))
    }

    /// Opens a directory itself; it is made, with all above it, when it is missing.
    pub fn directory(path: &CStr) -> Result<Fd, Fault> {
        let opened = match open_directory(libc::AT_FDCWD, path) {
            Err(libc::ENOENT) => make_directories(libc::AT_FDCWD, path.to_bytes()),
            other => other,
        };
        opened.map_err(|errno| Fault::file(errno, path.to_bytes()))
    }

    fn below(dir: i32, path: &CStr, make_parents: bool) -> os::Result<Place> {
        let bytes = path.to_bytes();
        let end = bytes.iter().rposition(|b| *b != b'/').map_or(0, |last| last + 1);
        let start = bytes[..end].iter().rposition(|b| *b == b'/').map_or(0, |slash| slash + 1);
        let (parent, name) = (&bytes[..start], &bytes[start..end]);
        if name.is_empty() || name == b"." || name == b".." {
            return Err(libc::EISDIR);
        }
        let parent = cstring(if parent.is_empty() { b"." } else { parent })?;
        let dir = match open_directory(dir, &parent) {
            Err(libc::ENOENT) if make_parents => make_directories(dir, parent.to_bytes())?,
            other => other?,
        };
        Ok(Place { dir, name: cstring(name)? })
    }

    /// Where a write to the path really goes: a link as last name is followed.
    pub fn of_target(path: &CStr, make_parents: bool) -> Result<Place, Fault> {
        let fault = |errno| Fault::file(errno, path.to_bytes());
        let mut place = Place::of(path, make_parents)?;
        for _ in 0..MAX_LINKS {
            match os::lstat(place.dir.0, &place.name) {
                Ok(stat) if kind(&stat) == libc::S_IFLNK => {
                    let target = os::readlink(place.dir.0, &place.name).and_then(|target| cstring(&target));
                    let target = target.map_err(fault)?;
                    place = Place::below(place.dir.0, &target, make_parents).map_err(fault)?;
                }
                _ => return Ok(place),
            }
        }
        Err(fault(libc::ELOOP))
    }
}

fn open_directory(dir: i32, path: &CStr) -> os::Result<Fd> {
    os::open(dir, path, libc::O_PATH | libc::O_DIRECTORY, 0, SAFE)
}

/// `mkdir -p`, name by name: a path as a whole could lead through a magic link.
fn make_directories(dir: i32, path: &[u8]) -> os::Result<Fd> {
    let mut at = open_directory(dir, if path.starts_with(b"/") { c"/" } else { c"." })?;
    for name in path.split(|b| *b == b'/').filter(|name| !name.is_empty()) {
        let name = cstring(name)?;
        at = match open_directory(at.0, &name) {
            Err(libc::ENOENT) => match check(unsafe { libc::mkdirat(at.0, name.as_ptr(), 0o755) }) {
                Ok(_) | Err(libc::EEXIST) => open_directory(at.0, &name)?,
                Err(errno) => return Err(errno),
            },
            other => other?,
        };
    }
    Ok(at)
}

pub fn kind(stat: &libc::stat) -> u32 {
    stat.st_mode & libc::S_IFMT
}

/// Opens a regular file and nothing else. Looked at before it is opened: opening alone moves FIFOs and devices.
pub fn open_regular(dir: i32, path: &CStr, resolve: u64) -> os::Result<(Fd, libc::stat)> {
    let is_regular = |stat: &libc::stat| match kind(stat) {
        libc::S_IFREG => Ok(()),
        libc::S_IFDIR => Err(libc::EISDIR),
        _ => Err(libc::ENXIO),
    };
    let seen = os::open(dir, path, libc::O_PATH, 0, resolve)?;
    is_regular(&os::fstat(seen.0)?)?;
    os::not_of_proc(seen.0)?;
    let file = os::open(dir, path, libc::O_RDONLY | libc::O_NONBLOCK | libc::O_NOCTTY, 0, resolve)?;
    let stat = os::fstat(file.0)?;
    is_regular(&stat)?;
    Ok((file, stat))
}

fn not_regular(errno: i32, path: &CStr) -> Fault {
    let fault = Fault::file(errno, path.to_bytes());
    match errno {
        libc::ENXIO => Fault { message: format!("{}: Not a regular file", path.to_string_lossy()), ..fault },
        _ => fault,
    }
}

// -- requests --

/// A `FileInfo`.
pub fn pack_info(pack: Pack, path: &[u8], stat: &libc::stat, target: Option<&[u8]>) -> Pack {
    let name = match kind(stat) {
        libc::S_IFREG => "file",
        libc::S_IFDIR => "directory",
        libc::S_IFLNK => "symlink",
        libc::S_IFIFO => "fifo",
        libc::S_IFSOCK => "socket",
        libc::S_IFCHR => "char_device",
        _ => "block_device",
    };
    let mtime = stat.st_mtime as f64 + stat.st_mtime_nsec as f64 / 1e9;
    let pack = pack.map(8).str("path").bin(path).str("kind").str(name).str("size").uint(stat.st_size as u64);
    let pack = pack.str("mode").uint((stat.st_mode & 0o7777).into()).str("uid").uint(stat.st_uid.into());
    let pack = pack.str("gid").uint(stat.st_gid.into()).str("mtime").float(mtime).str("target");
    match target {
        Some(target) => pack.bin(target),
        None => pack.nil(),
    }
}

fn stat(path: &CStr, follow: bool) -> Result<Answer, Fault> {
    let fault = |errno| Fault::file(errno, path.to_bytes());
    let flags = libc::O_PATH | if follow { 0 } else { libc::O_NOFOLLOW };
    let fd = os::open(libc::AT_FDCWD, path, flags, 0, SAFE).map_err(fault)?;
    let stat = os::fstat(fd.0).map_err(fault)?;
    let target = match kind(&stat) {
        libc::S_IFLNK => Some(os::readlink(fd.0, c"").map_err(fault)?),
        _ => None,
    };
    Ok(Answer::Reply(pack_info(Pack::default(), path.to_bytes(), &stat, target.as_deref()).0))
}

fn make_directory(path: &CStr, mode: Option<u32>, parents: bool) -> Result<Answer, Fault> {
    let fault = |errno| Fault::file(errno, path.to_bytes());
    let place = match Place::of(path, parents) {
        Err(fault) if fault.kind == "is_a_directory" && parents => return nothing(), // "/", "/a/."
        other => other?,
    };
    match check(unsafe { libc::mkdirat(place.dir.0, place.name.as_ptr(), 0o755) }) {
        Err(libc::EEXIST) if parents => {
            return open_directory(place.dir.0, &place.name).map_err(fault).and_then(|_| nothing())
        }
        other => other.map_err(fault)?,
    };
    if let Some(mode) = mode {
        let flags = libc::O_RDONLY | libc::O_DIRECTORY | libc::O_NOFOLLOW;
        let made = os::open(place.dir.0, &place.name, flags, 0, SAFE).map_err(fault)?;
        check(unsafe { libc::fchmod(made.0, mode) }).map_err(fault)?;
    }
    nothing()
}

fn remove(path: &CStr, recursive: bool, user: User) -> Result<Answer, Fault> {
    let fault = |errno| Fault::file(errno, path.to_bytes());
    let place = Place::of(path, false)?;
    let is_directory = kind(&os::lstat(place.dir.0, &place.name).map_err(fault)?) == libc::S_IFDIR;
    if is_directory && recursive {
        return job(Remove::open(path, place, user)?);
    }
    let flag = if is_directory { libc::AT_REMOVEDIR } else { 0 };
    match check(unsafe { libc::unlinkat(place.dir.0, place.name.as_ptr(), flag) }) {
        Err(libc::ENOTEMPTY) => Err(fault(libc::ENOTEMPTY).hint("remove it with recursive=True")),
        other => other.map_err(fault).and_then(|_| nothing()),
    }
}

fn rename(source: &CStr, target: &CStr, user: User) -> Result<Answer, Fault> {
    let (from, to) = (Place::of(source, false)?, Place::of(target, false)?);
    let result = unsafe { libc::renameat(from.dir.0, from.name.as_ptr(), to.dir.0, to.name.as_ptr()) };
    match check(result) {
        Ok(_) => nothing(),
        Err(libc::EXDEV) => copy_away(source, from, target, to, user),
        Err(errno) => {
            let fault = Fault::file(errno, source.to_bytes());
            Err(Fault { message: format!("{} (moving to {})", fault.message, target.to_string_lossy()), ..fault })
        }
    }
}

/// A move across mounts: a copy, then the source goes. Directories are left to mv.
fn copy_away(source: &CStr, from: Place, target: &CStr, to: Place, user: User) -> Result<Answer, Fault> {
    let fault = |errno| not_regular(errno, source);
    let stat = os::lstat(from.dir.0, &from.name).map_err(fault)?;
    match kind(&stat) {
        libc::S_IFREG => {
            let (file, stat) = open_regular(from.dir.0, &from.name, BENEATH).map_err(fault)?;
            let owner = (user.uid == 0).then_some((stat.st_uid, stat.st_gid));
            let copy = WriteFile::at(to, target, Some(stat.st_mode & 0o7777), owner, user)?;
            job(MoveFile { from, file, copy })
        }
        libc::S_IFLNK => {
            let link = os::readlink(from.dir.0, &from.name).and_then(|link| cstring(&link)).map_err(fault)?;
            let make = || check(unsafe { libc::symlinkat(link.as_ptr(), to.dir.0, to.name.as_ptr()) });
            super::untar::replacing(to.dir.0, &to.name, make).map_err(|errno| Fault::file(errno, target.to_bytes()))?;
            check(unsafe { libc::unlinkat(from.dir.0, from.name.as_ptr(), 0) }).map_err(fault).and_then(|_| nothing())
        }
        _ => {
            let message = format!("{} cannot be renamed across layers or mounts", source.to_string_lossy());
            Err(Fault::new("unsupported", message).hint("run mv in the sandbox: it copies"))
        }
    }
}

/// A regular file on its way to another mount.
struct MoveFile {
    from: Place,
    file: Fd,
    copy: WriteFile,
}

impl Job for MoveFile {
    fn step(&mut self, _: &mut Sink) -> Result<Step, Fault> {
        let (source, target) = (self.file.0, self.copy.file.0);
        let null = std::ptr::null_mut();
        let copied = check(unsafe { libc::sendfile(target, source, null, 1 << 20) } as i64);
        match copied.map_err(|errno| self.copy.fault(errno))? {
            0 => {
                self.copy.end()?;
                let user = self.copy.user.clone();
                let _acting = Acting::new(&user)?;
                let removed = check(unsafe { libc::unlinkat(self.from.dir.0, self.from.name.as_ptr(), 0) });
                removed.map_err(|errno| Fault::file(errno, self.from.name.to_bytes()))?;
                Ok(Step::Done(Pack::default().map(0).0))
            }
            _ => Ok(Step::More),
        }
    }
}

/// A file, or a range of it, as long as it was when it was opened: one that keeps growing comes to an end too.
struct ReadFile {
    file: Fd,
    path: CString,
    at: u64,
    end: u64,
    sent: u64,
    told: bool,
}

impl ReadFile {
    fn open(path: &CStr, offset: u64, length: Option<u64>) -> Result<ReadFile, Fault> {
        let (file, stat) = open_regular(libc::AT_FDCWD, path, SAFE).map_err(|errno| not_regular(errno, path))?;
        let end = length.map_or(u64::MAX, |length| offset.saturating_add(length)).min(stat.st_size.max(0) as u64);
        Ok(ReadFile { file, path: path.to_owned(), at: offset, end, sent: 0, told: false })
    }
}

impl Job for ReadFile {
    fn step(&mut self, sink: &mut Sink) -> Result<Step, Fault> {
        let left = self.end.saturating_sub(self.at);
        if !std::mem::replace(&mut self.told, true) {
            sink.note(&Pack::default().map(1).str("size").uint(left).0);
        }
        if left > 0 && !sink.has_room() {
            return Ok(Step::Wait);
        }
        let mut failure = None;
        let most = usize::try_from(left).unwrap_or(usize::MAX);
        let size = sink.data(0, most, |room| {
            os::pread(self.file.0, room, self.at).unwrap_or_else(|errno| {
                failure = Some(errno);
                0
            })
        });
        if let Some(errno) = failure {
            return Err(Fault::file(errno, self.path.to_bytes()));
        }
        self.at += size as u64;
        self.sent += size as u64;
        match size {
            0 => Ok(Step::Done(Pack::default().map(1).str("size").uint(self.sent).0)),
            _ => Ok(Step::More),
        }
    }
}

/// A file being written beside its name; it takes the name at the end, whole, or disappears.
struct WriteFile {
    user: User,
    path: CString,
    place: Place,
    file: Fd,
    temporary: Option<CString>,
    mode: u32,
    owner: Option<(u32, u32)>,
    size: u64,
    complete: bool,
}

/// A name that nothing else has: 64 random bits.
fn temporary_name() -> os::Result<CString> {
    let mut random = [0u8; 8];
    check(unsafe { libc::getrandom(random.as_mut_ptr().cast(), random.len(), 0) } as i64)?;
    cstring(format!(".dsec-{:016x}.tmp", u64::from_le_bytes(random)).as_bytes())
}

impl WriteFile {
    fn open(path: &CStr, mode: Option<u32>, owner: Option<(u32, u32)>, user: User) -> Result<WriteFile, Fault> {
        let fault = |errno| not_regular(errno, path);
        if path.to_bytes().ends_with(b"/") {
            return Err(fault(libc::EISDIR));
        }
        WriteFile::at(Place::of_target(path, true)?, path, mode, owner, user)
    }

    fn at(
        place: Place,
        path: &CStr,
        mode: Option<u32>,
        owner: Option<(u32, u32)>,
        user: User,
    ) -> Result<WriteFile, Fault> {
        let fault = |errno| not_regular(errno, path);
        let existing = match os::lstat(place.dir.0, &place.name) {
            Ok(stat) => Some(stat),
            Err(libc::ENOENT) => None,
            Err(errno) => return Err(fault(errno)),
        };
        if let Some(stat) = &existing {
            may_replace(&place, stat).map_err(fault)?;
        }
        let temporary = temporary_name().map_err(fault)?;
        let flags = libc::O_WRONLY | libc::O_CREAT | libc::O_EXCL | libc::O_NOFOLLOW;
        let file = os::open(place.dir.0, &temporary, flags, 0o600, SAFE).map_err(fault)?;
        // root writing over another's file leaves it theirs, as writing in place would
        let kept = existing.as_ref().filter(|_| user.uid == 0).map(|stat| (stat.st_uid, stat.st_gid));
        let mode = mode.unwrap_or(existing.map_or(0o644, |stat| stat.st_mode & 0o7777));
        let (temporary, path) = (Some(temporary), path.to_owned());
        Ok(WriteFile { user, path, place, file, temporary, mode, owner: owner.or(kept), size: 0, complete: false })
    }

    fn fault(&self, errno: i32) -> Fault {
        Fault::file(errno, self.path.to_bytes())
    }

    fn commit(&mut self) -> os::Result<()> {
        let Some(temporary) = &self.temporary else { return Ok(()) };
        if let Some((uid, gid)) = self.owner {
            check(unsafe { libc::fchown(self.file.0, uid, gid) })?;
        }
        check(unsafe { libc::fchmod(self.file.0, self.mode) })?;
        let (dir, name) = (self.place.dir.0, self.place.name.as_ptr());
        check(unsafe { libc::renameat(dir, temporary.as_ptr(), dir, name) })?;
        self.temporary = None;
        Ok(())
    }
}

/// Replacing a file by renaming asks nothing of the file itself; writing to it would.
fn may_replace(place: &Place, stat: &libc::stat) -> os::Result<()> {
    match kind(stat) {
        libc::S_IFREG => {}
        libc::S_IFDIR => return Err(libc::EISDIR),
        _ => return Err(libc::ENXIO),
    }
    let (dir, name) = (place.dir.0, place.name.as_ptr());
    let flags = libc::AT_EACCESS | libc::AT_SYMLINK_NOFOLLOW;
    check(unsafe { libc::syscall(libc::SYS_faccessat2, dir, name, libc::W_OK, flags) }).map(|_| ())
}

impl Job for WriteFile {
    fn data(&mut self, bytes: &[u8]) -> Result<(), Fault> {
        os::write_all(self.file.0, bytes).map_err(|errno| self.fault(errno))?;
        self.size += bytes.len() as u64;
        Ok(())
    }

    fn end(&mut self) -> Result<(), Fault> {
        let user = self.user.clone();
        let _acting = Acting::new(&user)?;
        self.commit().map_err(|errno| self.fault(errno))?;
        self.complete = true;
        Ok(())
    }

    fn step(&mut self, _: &mut Sink) -> Result<Step, Fault> {
        match self.complete {
            true => Ok(Step::Done(Pack::default().map(1).str("size").uint(self.size).0)),
            false => Ok(Step::Wait),
        }
    }
}

impl Drop for WriteFile {
    fn drop(&mut self) {
        if let (Some(temporary), Ok(_acting)) = (&self.temporary, Acting::new(&self.user)) {
            unsafe { libc::unlinkat(self.place.dir.0, temporary.as_ptr(), 0) };
        }
    }
}
