//! Walking trees of the sandbox in bounded pieces: listing and removing. Links are never followed, nothing is trusted to
//! stay what it was, and depth and memory have limits whatever the tree holds.

use super::conn::{Job, Sink, Step};
use super::fault::Fault;
use super::files::{kind, pack_info, Acting, Place};
use super::os::{self, check, Fd, BENEATH, SAFE};
use super::users::User;
use crate::msgpack::Pack;
use std::ffi::{CStr, CString};

/// Directories inside directories that hold a descriptor while they are walked; those above are opened again on the way back.
const HELD: usize = 64;
const MAX_DEPTH: usize = 1 << 16;
/// The longest path from the root of a walk.
const MAX_PATH: usize = 1 << 18;
/// How often a removal comes back to a directory that somebody fills meanwhile.
const PATIENCE: u32 = 16;
/// Bytes of names that a walk keeps in order to sort them.
const MAX_NAMES: usize = 16 << 20;
/// One call to the kernel brings so many bytes of directory entries.
const BATCH: usize = 32 * 1024;
/// A piece of a walk ends after so many entries or so many bytes.
const ENTRIES_A_STEP: usize = 128;
const BYTES_A_STEP: usize = 48 * 1024;

fn fault(errno: i32, path: &[u8]) -> Fault {
    match errno {
        libc::ENOTDIR | libc::ELOOP => Fault::file(libc::ENOTDIR, path),
        other => Fault::file(other, path),
    }
}

/// Opens a directory to read its entries.
pub fn open_to_list(dir: i32, name: &CStr, resolve: u64) -> os::Result<Fd> {
    let opened = open_any(dir, name, resolve)?;
    os::not_of_proc(opened.0)?;
    Ok(opened)
}

fn open_any(dir: i32, name: &CStr, resolve: u64) -> os::Result<Fd> {
    os::open(dir, name, libc::O_RDONLY | libc::O_DIRECTORY | libc::O_NONBLOCK, 0, resolve)
}

/// Calls `each` with the names and kinds (DT_*) of the next entries of a directory. False: there were none.
pub fn read_names(dir: i32, mut each: impl FnMut(&CStr, u8)) -> os::Result<bool> {
    let mut buffer = Vec::<u8>::with_capacity(BATCH);
    let size = check(unsafe { libc::syscall(libc::SYS_getdents64, dir, buffer.as_mut_ptr(), BATCH) })? as usize;
    // SAFETY: the kernel wrote `size` bytes, at most the capacity.
    unsafe { buffer.set_len(size) };
    let mut rest = &buffer[..];
    while let Some((head, _)) = rest.split_at_checked(19) {
        let length = usize::from(u16::from_ne_bytes([head[16], head[17]]));
        let Some((entry, behind)) = rest.split_at_checked(length) else { break };
        let name = entry.get(19..).and_then(|name| CStr::from_bytes_until_nul(name).ok());
        if let Some(name) = name.filter(|name| *name != c"." && *name != c"..") {
            each(name, entry[18]);
        }
        rest = behind;
    }
    Ok(size > 0)
}

/// The way down to a directory, with few descriptors however deep it is.
#[derive(Default)]
struct Way {
    dirs: Vec<(Option<Fd>, Identity)>,
}

/// Device and number.
type Identity = (u64, u64);

fn identity(dir: i32) -> os::Result<Identity> {
    os::fstat(dir).map(|stat| (stat.st_dev, stat.st_ino))
}

impl Way {
    fn push(&mut self, dir: Fd) -> os::Result<()> {
        let identity = identity(dir.0)?;
        self.dirs.push((Some(dir), identity));
        if let Some(far) = self.dirs.len().checked_sub(HELD + 1) {
            self.dirs[far].0 = None;
        }
        Ok(())
    }

    fn dir(&self) -> i32 {
        self.dirs.last().and_then(|(dir, _)| dir.as_ref()).map_or(-1, |dir| dir.0)
    }

    /// Back to the directory above, which must still be the one it was. The one below.
    fn pop(&mut self) -> os::Result<Option<Fd>> {
        let Some((below, _)) = self.dirs.pop() else { return Ok(None) };
        if let (Some((above @ None, known)), Some(below)) = (self.dirs.last_mut(), &below) {
            let dir = open_any(below.0, c"..", SAFE)?;
            if identity(dir.0)? != *known {
                return Err(libc::ESTALE);
            }
            *above = Some(dir);
        }
        Ok(below)
    }
}

struct Level {
    /// Names, each with its NUL; where each starts, in order once all are there.
    names: Vec<u8>,
    starts: Vec<u32>,
    next: usize,
    complete: bool,
    /// Length of the path down to here.
    path: usize,
}

pub struct Entry {
    pub name: CString,
    /// From the walk's root.
    pub path: Vec<u8>,
    pub stat: libc::stat,
}

pub enum Walked {
    Entry(Entry),
    /// Still reading a large directory.
    Busy,
    End,
}

/// A tree in the order of its names, directories before what is in them.
pub struct Walk {
    way: Way,
    levels: Vec<Level>,
    path: Vec<u8>,
    names: usize,
}

impl Walk {
    pub fn new(dir: Fd) -> os::Result<Walk> {
        let mut walk = Walk::empty();
        walk.push(dir)?;
        Ok(walk)
    }

    pub fn empty() -> Walk {
        Walk { way: Way::default(), levels: Vec::new(), path: Vec::new(), names: 0 }
    }

    fn push(&mut self, dir: Fd) -> os::Result<()> {
        self.way.push(dir)?;
        let (names, starts, path) = (Vec::new(), Vec::new(), self.path.len());
        self.levels.push(Level { names, starts, next: 0, complete: false, path });
        Ok(())
    }

    /// The directory of the entry that came last.
    pub fn dir(&self) -> i32 {
        self.way.dir()
    }

    pub fn depth(&self) -> usize {
        self.levels.len()
    }

    pub fn next(&mut self) -> Result<Walked, Fault> {
        loop {
            let dir = self.way.dir();
            let Some(level) = self.levels.last_mut() else { return Ok(Walked::End) };
            self.path.truncate(level.path);
            if !level.complete {
                let read = level.fill(dir).map_err(|errno| fault(errno, &self.path))?;
                self.names += read;
                return match self.names > MAX_NAMES {
                    true => {
                        Err(Fault::new("too_large", format!("{}: too many names", String::from_utf8_lossy(&self.path))))
                    }
                    false => Ok(Walked::Busy),
                };
            }
            let Some(start) = level.starts.get(level.next) else {
                self.names -= level.names.len();
                self.levels.pop();
                self.way.pop().map_err(|errno| fault(errno, &self.path))?;
                continue;
            };
            level.next += 1;
            let name = CStr::from_bytes_until_nul(&level.names[*start as usize..]).unwrap_or(c"").to_owned();
            if level.path > 0 {
                self.path.push(b'/');
            }
            self.path.extend_from_slice(name.to_bytes());
            match os::lstat(dir, &name) {
                Ok(stat) => return Ok(Walked::Entry(Entry { name, path: self.path.clone(), stat })),
                Err(libc::ENOENT) => {} // gone since it was listed
                Err(errno) => return Err(fault(errno, &self.path)),
            }
        }
    }

    /// Goes into the directory that came last.
    pub fn descend(&mut self, name: &CStr) -> Result<(), Fault> {
        if self.levels.len() >= MAX_DEPTH || self.path.len() >= MAX_PATH {
            let what = format!("deeper than {MAX_DEPTH} directories, or paths longer than {MAX_PATH} bytes");
            return Err(Fault::new("file_invalid", what));
        }
        match open_any(self.dir(), name, BENEATH) {
            Ok(dir) if os::not_of_proc(dir.0).is_err() => {} // a walk over everything passes it by
            Ok(dir) => self.push(dir).map_err(|errno| fault(errno, &self.path))?,
            Err(libc::ENOENT | libc::ENOTDIR | libc::ELOOP) => {} // it was replaced: no directory any more
            Err(errno) => return Err(fault(errno, &self.path)),
        }
        Ok(())
    }
}

impl Level {
    /// Reads some names; sorts them when there are no more. How many bytes came.
    fn fill(&mut self, dir: i32) -> os::Result<usize> {
        let (names, starts) = (&mut self.names, &mut self.starts);
        let before = names.len();
        let more = read_names(dir, |name, _| {
            starts.push(names.len() as u32);
            names.extend_from_slice(name.to_bytes_with_nul());
        })?;
        if !more {
            self.complete = true;
            let name = |start: &u32| CStr::from_bytes_until_nul(&self.names[*start as usize..]).unwrap_or(c"");
            self.starts.sort_unstable_by(|a, b| name(a).cmp(name(b)));
        }
        Ok(self.names.len() - before)
    }
}

/// Something that makes a stream of bytes, a piece at a time.
pub trait Source {
    /// Adds to `out`; the reply once there is no more.
    fn produce(&mut self, out: &mut Vec<u8>) -> Result<Option<Vec<u8>>, Fault>;
}

/// Sends what a source makes, as the user who asked.
pub struct Streamed {
    user: User,
    source: Box<dyn Source>,
    pending: Vec<u8>,
    sent: usize,
    reply: Option<Vec<u8>>,
}

impl Streamed {
    pub fn new(user: User, source: impl Source + 'static) -> Streamed {
        Streamed { user, source: Box::new(source), pending: Vec::new(), sent: 0, reply: None }
    }
}

impl Job for Streamed {
    fn step(&mut self, sink: &mut Sink) -> Result<Step, Fault> {
        if self.sent == self.pending.len() {
            if let Some(reply) = self.reply.take() {
                return Ok(Step::Done(reply));
            }
            self.pending.clear();
            self.sent = 0;
            let _acting = Acting::new(&self.user)?;
            self.reply = self.source.produce(&mut self.pending)?;
            return Ok(Step::More);
        }
        Ok(sink.drain(&self.pending, &mut self.sent))
    }
}

/// A record of a stream of records: its length, u32, before it.
pub fn put_record(out: &mut Vec<u8>, record: &[u8]) {
    out.extend_from_slice(&(record.len() as u32).to_le_bytes());
    out.extend_from_slice(record);
}

/// `FileInfo` of what is in a directory, down to some depth.
pub struct List {
    walk: Walk,
    base: Vec<u8>,
    depth: usize,
    count: u64,
}

impl List {
    pub fn open(path: &CStr, depth: usize) -> Result<List, Fault> {
        let dir = open_to_list(libc::AT_FDCWD, path, SAFE).map_err(|errno| Fault::file(errno, path.to_bytes()))?;
        let mut base = path.to_bytes().to_vec();
        while base.last() == Some(&b'/') {
            base.pop();
        }
        base.push(b'/');
        let walk = Walk::new(dir).map_err(|errno| Fault::file(errno, path.to_bytes()))?;
        Ok(List { walk, base, depth, count: 0 })
    }
}

impl Source for List {
    fn produce(&mut self, out: &mut Vec<u8>) -> Result<Option<Vec<u8>>, Fault> {
        for _ in 0..ENTRIES_A_STEP {
            let entry = match self.walk.next()? {
                Walked::Entry(entry) => entry,
                Walked::Busy => return Ok(None),
                Walked::End => return Ok(Some(Pack::default().map(1).str("count").uint(self.count).0)),
            };
            let target = match kind(&entry.stat) {
                libc::S_IFLNK => os::readlink(self.walk.dir(), &entry.name).ok(),
                _ => None,
            };
            let path = [&self.base[..], &entry.path].concat();
            put_record(out, &pack_info(Pack::default(), &path, &entry.stat, target.as_deref()).0);
            self.count += 1;
            if kind(&entry.stat) == libc::S_IFDIR && self.walk.depth() < self.depth {
                self.walk.descend(&entry.name)?;
            }
            if out.len() >= BYTES_A_STEP {
                break;
            }
        }
        Ok(None)
    }
}

/// Removes a directory with all that is in it.
pub struct Remove {
    user: User,
    path: CString,
    place: Place,
    /// The directories being emptied, and the name of each in the one before.
    way: Way,
    names: Vec<CString>,
    refilled: u32,
}

impl Remove {
    pub fn open(path: &CStr, place: Place, user: User) -> Result<Remove, Fault> {
        let resolve = BENEATH;
        let dir = open_to_list(place.dir.0, &place.name, resolve).map_err(|errno| fault(errno, path.to_bytes()))?;
        let names = vec![place.name.clone()];
        let mut way = Way::default();
        way.push(dir).map_err(|errno| fault(errno, path.to_bytes()))?;
        Ok(Remove { user, path: path.to_owned(), place, way, names, refilled: 0 })
    }

    fn fault(&self, errno: i32, name: &CStr) -> Fault {
        let within = self.names.iter().skip(1).take(HELD).map(|name| name.to_bytes()); // enough to find it
        let parts: Vec<&[u8]> = [self.path.to_bytes()].into_iter().chain(within).chain([name.to_bytes()]).collect();
        Fault::file(errno, &parts.join(&b'/'))
    }

    /// Removes one batch of entries of the innermost directory, or that directory when it is empty. False: all is gone.
    fn advance(&mut self) -> Result<bool, Fault> {
        if self.names.is_empty() {
            return Ok(false);
        }
        let dir = self.way.dir();
        unsafe { libc::lseek(dir, 0, libc::SEEK_SET) };
        let (mut below, mut failure, mut found) = (None, None, false);
        let unlink = |name: &CStr, flag| check(unsafe { libc::unlinkat(dir, name.as_ptr(), flag) });
        let read = read_names(dir, |name, _| {
            found = true;
            if below.is_some() || failure.is_some() {
                return;
            }
            match unlink(name, 0) {
                Ok(_) | Err(libc::ENOENT) => {}
                Err(libc::EISDIR) => below = Some(name.to_owned()),
                Err(errno) => failure = Some((errno, name.to_owned())),
            }
        });
        read.map_err(|errno| self.fault(errno, c""))?;
        if let Some((errno, name)) = failure {
            return Err(self.fault(errno, &name));
        }
        match below {
            Some(name) if self.names.len() < MAX_DEPTH => match open_to_list(dir, &name, BENEATH) {
                Ok(inner) => {
                    self.way.push(inner).map_err(|errno| self.fault(errno, &name))?;
                    self.names.push(name);
                }
                Err(libc::ENOENT | libc::ENOTDIR | libc::ELOOP) => {} // gone or replaced: the next look tells
                Err(errno) => return Err(self.fault(errno, &name)),
            },
            Some(_) => {
                let fault = Fault::new("file_invalid", format!("more than {MAX_DEPTH} directories deep"));
                return Err(fault.hint("remove it with rm -rf in the sandbox"));
            }
            None if !found => self.leave()?,
            None => {}
        }
        Ok(!self.names.is_empty())
    }

    /// Removes the innermost directory, or comes back to it when somebody has filled it again.
    fn leave(&mut self) -> Result<(), Fault> {
        let Some(name) = self.names.pop() else { return Ok(()) };
        let below = self.way.pop().map_err(|errno| self.fault(errno, &name))?;
        let parent = if self.names.is_empty() { self.place.dir.0 } else { self.way.dir() };
        match (check(unsafe { libc::unlinkat(parent, name.as_ptr(), libc::AT_REMOVEDIR) }), below) {
            (Ok(_) | Err(libc::ENOENT), _) => Ok(()),
            (Err(libc::ENOTEMPTY), Some(below)) if self.refilled < PATIENCE => {
                self.refilled += 1;
                self.way.push(below).map_err(|errno| self.fault(errno, &name))?;
                self.names.push(name);
                Ok(())
            }
            (Err(errno), _) => Err(self.fault(errno, &name)),
        }
    }
}

impl Job for Remove {
    fn step(&mut self, _: &mut Sink) -> Result<Step, Fault> {
        let user = self.user.clone();
        let _acting = Acting::new(&user)?;
        match self.advance()? {
            true => Ok(Step::More),
            false => Ok(Step::Done(Pack::default().map(0).0)),
        }
    }
}
