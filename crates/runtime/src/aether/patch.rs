//! Applying a difference: a tar stream in which `.wh.NAME` says that NAME is gone, and `.wh..wh..opq` that what its directory
//! held before is (the names of OCI layers).
//!
//! Some paths are to be kept whatever comes behind them: they are neither removed with a directory around them nor replaced.
//! Global pax heads name them (`DSEC.keep=PATH`, from the target and without a leading slash). Removals go in bounded pieces; the data behind them waits, on its sender's credit.

use super::conn::{Job, Sink, Step};
use super::fault::Fault;
use super::os::{self, check, cstring, Fd, BENEATH};
use super::untar::{open_below, records, Entry, Untar};
use super::users::User;
use super::walk::{open_to_list, read_names};
use std::collections::{HashSet, VecDeque};
use std::ffi::{CStr, CString};

const WHITEOUT: &[u8] = b".wh.";
const KEEP: &[u8] = b"DSEC.keep";
const OPAQUE: &[u8] = b".wh..wh..opq";
/// Directories inside directories that are removed; each holds a descriptor meanwhile.
const MAX_DEPTH: usize = 512;
const REMOVED_A_STEP: usize = 128;
const TAKEN_A_STEP: usize = 128 * 1024;
const CREDIT_STEP: u32 = 64 * 1024;

/// What a difference does beyond what any archive does.
#[derive(Default)]
pub struct Patching {
    keep: HashSet<Vec<u8>>,
    clearing: Option<Clearing>,
    /// The entry whose place is being cleared.
    waiting: Option<Entry>,
}

impl Patching {
    /// Takes the paths to be kept from a global head.
    pub fn keep_more(&mut self, body: &[u8]) -> Option<()> {
        records(body, |key, value| {
            if key == KEEP {
                self.keep.insert(value.to_vec());
            }
            Some(())
        })
    }

    pub fn is_clearing(&self) -> bool {
        self.clearing.is_some()
    }

    /// A piece of the removal at hand; when that ends, the entry that waited for it.
    pub fn advance(&mut self) -> Result<Option<Entry>, Fault> {
        let Some(clearing) = &mut self.clearing else { return Ok(None) };
        if clearing.advance(&self.keep)? {
            return Ok(None);
        }
        self.clearing = None;
        Ok(self.waiting.take())
    }

    /// Removes what an entry says is gone, or what stands where it belongs. None: there is nothing to make (now).
    pub fn make_way(
        &mut self,
        root: i32,
        parent: &[u8],
        last: &CStr,
        entry: Entry,
        known: &mut Option<(Vec<u8>, Fd)>,
    ) -> Result<Option<Entry>, Fault> {
        let name = last.to_bytes();
        if name == OPAQUE {
            *known = None;
            let (above, of) = match parent.iter().rposition(|b| *b == b'/') {
                Some(slash) => (&parent[..slash], &parent[slash + 1..]),
                None => (&b""[..], parent),
            };
            self.remove(root, above, of, false)?;
            return Ok(None);
        }
        if let Some(gone) = name.strip_prefix(WHITEOUT) {
            if matches!(gone, b"" | b"." | b"..") {
                return Err(Fault::new("file_invalid", "a whiteout of nothing"));
            }
            *known = None;
            self.remove(root, parent, gone, true)?;
            return Ok(None);
        }
        let path = joined(parent, name);
        if self.keeps(&path) && entry.flag != b'5' {
            return Err(Fault::file(libc::EEXIST, &path).hint("it is one of those to be kept"));
        }
        let Ok(dir) = open_below(root, parent, false) else { return Ok(Some(entry)) }; // made, or complained of, in a moment
        match (os::lstat(dir.0, last).map(|stat| stat.st_mode & libc::S_IFMT), entry.flag) {
            (Ok(libc::S_IFDIR), b'5') | (Err(_), _) => Ok(Some(entry)),
            (Ok(libc::S_IFDIR), _) => {
                self.remove(root, parent, name, true)?;
                self.waiting = Some(entry);
                Ok(None)
            }
            (Ok(_), b'5') => {
                check(unsafe { libc::unlinkat(dir.0, last.as_ptr(), 0) }).map_err(|errno| Fault::file(errno, &path))?;
                Ok(Some(entry))
            }
            (Ok(_), _) => Ok(Some(entry)),
        }
    }

    /// Whether a path, or a directory above it, is to be kept.
    fn keeps(&self, path: &[u8]) -> bool {
        !self.keep.is_empty()
            && (self.keep.contains(path)
                || path.iter().enumerate().any(|(at, b)| *b == b'/' && self.keep.contains(&path[..at])))
    }

    /// Begins to remove something, or only (`whole` false) what a directory holds; what is not there is gone already.
    fn remove(&mut self, root: i32, parent: &[u8], name: &[u8], whole: bool) -> Result<(), Fault> {
        let path = joined(parent, name);
        let fault = |errno| Fault::file(errno, &path);
        let (of, whole) =
            if name.is_empty() { (c".".to_owned(), false) } else { (cstring(name).map_err(fault)?, whole) };
        if self.keeps(&path) {
            return Ok(());
        }
        let dir = match open_below(root, parent, false) {
            Ok(dir) => dir,
            Err(libc::ENOENT | libc::ENOTDIR) => return Ok(()),
            Err(errno) => return Err(fault(errno)),
        };
        match os::lstat(dir.0, &of) {
            Err(libc::ENOENT) => Ok(()),
            Err(errno) => Err(fault(errno)),
            Ok(stat) if stat.st_mode & libc::S_IFMT == libc::S_IFDIR => {
                self.clearing = Some(Clearing::open(dir, of, path, whole)?);
                Ok(())
            }
            Ok(_) => check(unsafe { libc::unlinkat(dir.0, of.as_ptr(), 0) }).map(|_| ()).map_err(fault),
        }
    }
}

fn joined(parent: &[u8], name: &[u8]) -> Vec<u8> {
    if parent.is_empty() {
        name.to_vec()
    } else {
        [parent, b"/", name].concat()
    }
}

/// A directory being emptied.
struct Level {
    dir: Fd,
    name: CString,
    path: Vec<u8>,
    names: Vec<CString>,
    /// Something stays in it, so it stays.
    keeps: bool,
}

impl Level {
    fn open(parent: i32, name: CString, path: Vec<u8>) -> Result<Level, Fault> {
        let fault = |errno| Fault::file(errno, &path);
        let dir = open_to_list(parent, &name, BENEATH).map_err(fault)?;
        let mut names = Vec::new();
        while read_names(dir.0, |name, _| names.push(name.to_owned())).map_err(fault)? {}
        Ok(Level { dir, name, path, names, keeps: false })
    }
}

/// The removal of a directory, but for what is to be kept.
struct Clearing {
    parent: Fd,
    levels: Vec<Level>,
    /// The outermost directory goes too.
    whole: bool,
}

impl Clearing {
    fn open(parent: Fd, name: CString, path: Vec<u8>, whole: bool) -> Result<Clearing, Fault> {
        let levels = vec![Level::open(parent.0, name, path)?];
        Ok(Clearing { parent, levels, whole })
    }

    /// Removes some entries. False: there is nothing left to do.
    fn advance(&mut self, keep: &HashSet<Vec<u8>>) -> Result<bool, Fault> {
        for _ in 0..REMOVED_A_STEP {
            let depth = self.levels.len();
            let Some(level) = self.levels.last_mut() else { return Ok(false) };
            let Some(name) = level.names.pop() else {
                self.leave()?;
                continue;
            };
            let path = joined(&level.path, name.to_bytes());
            if keep.contains(&path) {
                level.keeps = true;
                continue;
            }
            match check(unsafe { libc::unlinkat(level.dir.0, name.as_ptr(), 0) }) {
                Ok(_) | Err(libc::ENOENT) => {}
                Err(libc::EISDIR) if depth < MAX_DEPTH => {
                    let below = Level::open(level.dir.0, name, path)?;
                    self.levels.push(below);
                }
                Err(libc::EISDIR) => {
                    return Err(Fault::new("file_invalid", format!("more than {MAX_DEPTH} directories deep")))
                }
                Err(errno) => return Err(Fault::file(errno, &path)),
            }
        }
        Ok(!self.levels.is_empty())
    }

    /// Removes the innermost directory, which is empty but for what is to be kept.
    fn leave(&mut self) -> Result<(), Fault> {
        let Some(level) = self.levels.pop() else { return Ok(()) };
        match self.levels.last_mut() {
            Some(above) if level.keeps => above.keeps = true,
            None if level.keeps || !self.whole => {}
            above => {
                let parent = above.map_or(self.parent.0, |above| above.dir.0);
                check(unsafe { libc::unlinkat(parent, level.name.as_ptr(), libc::AT_REMOVEDIR) })
                    .map_err(|errno| Fault::file(errno, &level.path))?;
            }
        }
        Ok(())
    }
}

/// `fs.untar` with `whiteouts`.
pub struct Patch {
    untar: Untar,
    pending: VecDeque<u8>,
    /// Credit to give back: a frame's length, and how much of the pending data is before its end.
    frames: VecDeque<(u32, usize)>,
    ended: bool,
}

impl Patch {
    pub fn open(path: &CStr, user: User) -> Result<Patch, Fault> {
        let untar = Untar::patch(path, user, Patching::default())?;
        Ok(Patch { untar, pending: VecDeque::new(), frames: VecDeque::new(), ended: false })
    }

    /// So much has been taken; the credit of the frames that are through with it.
    fn taken(&mut self, mut count: usize) -> u32 {
        self.pending.drain(..count);
        let mut credit = 0;
        while let Some((charged, left)) = self.frames.front_mut() {
            if *left > count {
                *left -= count;
                break;
            }
            count -= *left;
            credit += *charged;
            self.frames.pop_front();
        }
        credit
    }
}

impl Job for Patch {
    fn holds_credit(&self) -> bool {
        true
    }

    fn data(&mut self, bytes: &[u8]) -> Result<(), Fault> {
        self.frames.push_back((1 + bytes.len() as u32, bytes.len()));
        self.pending.extend(bytes);
        Ok(())
    }

    fn end(&mut self) -> Result<(), Fault> {
        self.ended = true;
        Ok(())
    }

    fn step(&mut self, sink: &mut Sink) -> Result<Step, Fault> {
        if self.untar.clear()? {
            return Ok(Step::More);
        }
        let (piece, _) = self.pending.as_slices();
        let size = piece.len().min(TAKEN_A_STEP);
        if size > 0 {
            let taken = self.untar.feed(&piece[..size])?;
            sink.consumed(self.taken(taken), CREDIT_STEP);
            return Ok(Step::More);
        }
        if self.ended {
            self.ended = false;
            self.untar.end()?;
        }
        self.untar.step(sink)
    }
}
