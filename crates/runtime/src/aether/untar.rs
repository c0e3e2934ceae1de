//! Unpacking tar streams under a directory, as they come, in constant memory.
//!
//! An archive may say anything. Names lose their leading slash, `..` is refused, and every directory on the way is opened
//! by name from its parent without following a link: nothing is ever made outside the target. Owners are the user's who
//! asks; sockets, FIFOs and devices are skipped.

use super::conn::{Job, Sink, Step};
use super::fault::Fault;
use super::files::{Acting, Place};
use super::os::{self, check, cstring, Fd, BENEATH};
use super::patch::Patching;
use super::tar::BLOCK;
use super::users::User;
use crate::msgpack::Pack;
use std::ffi::{CStr, CString};

/// The longest pax record block or GNU long name.
const MAX_META: usize = 1 << 20;

fn malformed(what: impl std::fmt::Display) -> Fault {
    Fault::new("file_invalid", format!("malformed tar archive: {what}"))
}

/// A number of a head: octal, or base 256 when the first bit is set.
fn number(field: &[u8]) -> Option<u64> {
    match field.split_first() {
        Some((first, rest)) if first & 0x80 != 0 => {
            let start = u64::from(first & 0x7f);
            rest.iter().try_fold(start, |n, b| Some(n.checked_mul(256)? | u64::from(*b)))
        }
        _ => {
            let digits = field.iter().skip_while(|b| **b == b' ').take_while(|b| !matches!(b, 0 | b' '));
            digits.copied().try_fold(0u64, |n, b| match b {
                b'0'..=b'7' => Some(n.checked_mul(8)? | u64::from(b - b'0')),
                _ => None,
            })
        }
    }
    .filter(|n| *n <= i64::MAX as u64)
}

/// `seconds.fraction` as seconds and nanoseconds.
fn time(value: &[u8]) -> Option<(i64, i64)> {
    let value = std::str::from_utf8(value).ok()?;
    let (seconds, fraction) = value.split_once('.').unwrap_or((value, ""));
    let digits = fraction.bytes().chain(std::iter::repeat(b'0')).take(9);
    let nanoseconds =
        digits.map(|b| char::from(b).to_digit(10)).try_fold(0, |n, digit| Some(n * 10 + i64::from(digit?)))?;
    Some((seconds.parse().ok()?, nanoseconds))
}

fn text(field: &[u8]) -> &[u8] {
    field.split(|b| *b == 0).next().unwrap_or_default()
}

/// What extension heads say about the entry that follows them.
#[derive(Default)]
struct Extended {
    path: Option<Vec<u8>>,
    link: Option<Vec<u8>>,
    size: Option<u64>,
    mtime: Option<(i64, i64)>,
}

/// Calls `each` with key and value of the records of a pax head: `length key=value\n`. None: it is malformed, or refused.
pub fn records(mut records: &[u8], mut each: impl FnMut(&[u8], &[u8]) -> Option<()>) -> Option<()> {
    while records.first().is_some_and(|b| *b != 0) {
        let space = records.iter().position(|b| *b == b' ')?;
        let length: usize = std::str::from_utf8(&records[..space]).ok()?.parse().ok()?;
        let record = records.get(space + 1..length)?.strip_suffix(b"\n")?;
        let equals = record.iter().position(|b| *b == b'=')?;
        each(&record[..equals], &record[equals + 1..])?;
        records = &records[length..];
    }
    Some(())
}

impl Extended {
    fn read(&mut self, body: &[u8]) -> Option<()> {
        records(body, |key, value| {
            match key {
                b"path" => self.path = Some(value.to_vec()),
                b"linkpath" => self.link = Some(value.to_vec()),
                b"size" => self.size = Some(time(value).and_then(|(size, _)| u64::try_from(size).ok())?),
                b"mtime" => self.mtime = time(value),
                _ if key.starts_with(b"GNU.sparse.") => return None,
                _ => {}
            }
            Some(())
        })
    }
}

/// What the heads say of one entry.
pub struct Entry {
    pub flag: u8,
    pub name: Vec<u8>,
    link: Vec<u8>,
    mode: u32,
    mtime: (i64, i64),
}

/// A file being written.
struct Writing {
    file: Fd,
    name: CString,
    mode: u32,
    /// Seconds and nanoseconds.
    mtime: (i64, i64),
}

enum State {
    /// Collecting a head block.
    Head,
    /// Collecting the body of an extension head of this flag.
    Meta(u8),
    File(Writing),
    Skip,
    End,
}

pub struct Untar {
    user: User,
    root: Fd,
    state: State,
    /// Bytes of the head or the extension body so far.
    held: Vec<u8>,
    /// Bytes of the body, and of its padding, still to come.
    left: u64,
    padding: u64,
    extended: Extended,
    /// The directory of the last entry and its path: archives go directory by directory.
    parent: Option<(Vec<u8>, Fd)>,
    entries: u64,
    complete: bool,
    /// The archive is a difference: some of its names say that something is gone.
    patching: Option<Patching>,
}

impl Untar {
    pub fn open(path: &CStr, user: User) -> Result<Untar, Fault> {
        let root = Place::directory(path)?;
        let (held, extended, state) = (Vec::new(), Extended::default(), State::Head);
        let (parent, patching) = (None, None);
        let (left, padding, entries, complete) = (0, 0, 0, false);
        Ok(Untar { user, root, state, held, left, padding, extended, parent, entries, complete, patching })
    }

    /// The same for a difference (`patch.rs`).
    pub fn patch(path: &CStr, user: User, patching: Patching) -> Result<Untar, Fault> {
        let mut untar = Untar::open(path, user)?;
        untar.patching = Some(patching);
        Ok(untar)
    }

    /// Takes what it can of `bytes`, until something has to be removed first; how many.
    pub fn feed(&mut self, bytes: &[u8]) -> Result<usize, Fault> {
        let user = self.user.clone();
        let _acting = Acting::new(&user)?;
        let mut taken = 0;
        while taken < bytes.len() && !self.patching.as_ref().is_some_and(Patching::is_clearing) {
            taken += self.take(&bytes[taken..])?;
            self.settle()?;
        }
        Ok(taken)
    }

    /// A piece of a removal, and then the entry that waited for it. False: none is under way.
    pub fn clear(&mut self) -> Result<bool, Fault> {
        let user = self.user.clone();
        let _acting = Acting::new(&user)?;
        let Some(patching) = self.patching.as_mut().filter(|patching| patching.is_clearing()) else { return Ok(false) };
        if let Some(entry) = patching.advance()? {
            self.state = self.make(entry)?;
        }
        self.settle()?;
        Ok(true)
    }

    /// Takes some of `bytes`; how many.
    fn take(&mut self, bytes: &[u8]) -> Result<usize, Fault> {
        if self.left == 0 && self.padding > 0 {
            let count = self.padding.min(bytes.len() as u64);
            self.padding -= count;
            return Ok(count as usize);
        }
        let count = match self.state {
            State::Head => (BLOCK - self.held.len()).min(bytes.len()),
            _ => self.left.min(bytes.len() as u64) as usize,
        };
        let piece = &bytes[..count];
        match &mut self.state {
            State::End => return Ok(bytes.len()),
            State::Head => {
                self.held.extend_from_slice(piece);
                if self.held.len() == BLOCK {
                    let head = std::mem::take(&mut self.held);
                    self.head(&head)?;
                }
                return Ok(count);
            }
            State::Meta(_) => self.held.extend_from_slice(piece),
            State::File(writing) => {
                os::write_all(writing.file.0, piece).map_err(|errno| Fault::file(errno, writing.name.to_bytes()))?;
            }
            State::Skip => {}
        }
        self.left -= count as u64;
        Ok(count)
    }

    /// Ends the body that has come whole, padding included.
    fn settle(&mut self) -> Result<(), Fault> {
        let waits = self.patching.as_ref().is_some_and(Patching::is_clearing);
        if waits || self.left > 0 || self.padding > 0 || matches!(self.state, State::Head | State::End) {
            return Ok(());
        }
        let body = std::mem::take(&mut self.held);
        match std::mem::replace(&mut self.state, State::Head) {
            State::Meta(b'x') => self.extended.read(&body).ok_or_else(|| malformed("extended head"))?,
            State::Meta(b'g') => {
                let kept = self.patching.as_mut().map_or(Some(()), |patching| patching.keep_more(&body));
                kept.ok_or_else(|| malformed("global head"))?;
            }
            State::Meta(b'L') => self.extended.path = Some(text(&body).to_vec()),
            State::Meta(b'K') => self.extended.link = Some(text(&body).to_vec()),
            State::File(writing) => finish_file(&writing)?,
            _ => {}
        }
        Ok(())
    }

    fn head(&mut self, head: &[u8]) -> Result<(), Fault> {
        if head.iter().all(|b| *b == 0) {
            self.state = State::End;
            return Ok(());
        }
        let sum: u64 =
            head.iter().enumerate().map(|(i, b)| if (148..156).contains(&i) { 32 } else { u64::from(*b) }).sum();
        if number(&head[148..156]) != Some(sum) {
            return Err(malformed("a head's checksum is wrong"));
        }
        let size = self.extended.size.or(number(&head[124..136])).ok_or_else(|| malformed("size"))?;
        let flag = head[156];
        let extension = matches!(flag, b'x' | b'g' | b'L' | b'K');
        let has_body = extension || !matches!(flag, b'1'..=b'6');
        self.left = if has_body { size } else { 0 };
        self.padding = self.left.wrapping_neg() % BLOCK as u64;
        if extension {
            if size > MAX_META as u64 {
                return Err(malformed("an extended head is too long"));
            }
            self.state = State::Meta(flag);
            return self.settle();
        }
        let extended = std::mem::take(&mut self.extended);
        let prefix = if &head[257..263] == b"ustar\0" { text(&head[345..500]) } else { b"" };
        let short = match prefix {
            b"" => text(&head[..100]).to_vec(),
            prefix => [prefix, b"/", text(&head[..100])].concat(),
        };
        let name = extended.path.unwrap_or(short);
        let link = extended.link.unwrap_or_else(|| text(&head[157..257]).to_vec());
        let mode = number(&head[100..108]).ok_or_else(|| malformed("mode"))? as u32 & 0o7777;
        let mtime = extended.mtime.or(number(&head[136..148]).map(|n| (n as i64, 0))).unwrap_or((0, 0));
        let flag = if name.ends_with(b"/") && matches!(flag, b'0' | 0) { b'5' } else { flag };
        self.state = self.make(Entry { flag, name, link, mode, mtime })?;
        self.settle()
    }

    /// Makes an entry; the state in which its body is taken.
    fn make(&mut self, entry: Entry) -> Result<State, Fault> {
        let Some((parent, last)) = split(&entry.name)? else { return Ok(State::Skip) }; // the target itself
        let entry = match &mut self.patching {
            None => entry,
            Some(patching) => match patching.make_way(self.root.0, &parent, &last, entry, &mut self.parent)? {
                Some(entry) => entry,
                None => return Ok(State::Skip),
            },
        };
        let Entry { flag, name, link, mode, mtime } = entry;
        let (name, link) = (&name[..], &link[..]);
        let fault = |errno| Fault::file(errno, name);
        if !matches!(flag, b'0' | 0 | b'7' | b'1' | b'2' | b'5') {
            return match flag {
                b'3' | b'4' | b'6' => Ok(State::Skip),
                flag => Err(malformed(format!("entry of kind {:?} is not supported", char::from(flag)))),
            };
        }
        self.entries += 1;
        let dir = self.directory(&parent, name)?;
        match flag {
            b'5' => make_directory(dir, &last, mode, self.user.uid == 0).map_err(fault)?,
            b'2' => {
                let target = cstring(link).map_err(fault)?;
                replacing(dir, &last, || check(unsafe { libc::symlinkat(target.as_ptr(), dir, last.as_ptr()) }))
                    .map_err(fault)?;
            }
            b'1' => {
                let (from, source) = split(link)?.ok_or_else(|| malformed("a link to the target itself"))?;
                let from = open_below(self.root.0, &from, false).map_err(|errno| Fault::file(errno, link))?;
                let make = || check(unsafe { libc::linkat(from.0, source.as_ptr(), dir, last.as_ptr(), 0) });
                let there = identity(dir, &last);
                if there.is_none() || there != identity(from.0, &source) {
                    replacing(dir, &last, make).map_err(fault)?;
                }
            }
            _ => {
                let flags = libc::O_WRONLY | libc::O_CREAT | libc::O_EXCL | libc::O_NOFOLLOW;
                let file = replacing(dir, &last, || os::open(dir, &last, flags, 0o600, BENEATH)).map_err(fault)?;
                return Ok(State::File(Writing { file, name: last, mode, mtime }));
            }
        }
        Ok(State::Skip)
    }

    /// The directory of an entry, made as far as it is missing.
    fn directory(&mut self, path: &[u8], name: &[u8]) -> Result<i32, Fault> {
        if self.parent.as_ref().is_none_or(|(known, _)| known != path) {
            let dir = open_below(self.root.0, path, true).map_err(|errno| Fault::file(errno, name))?;
            self.parent = Some((path.to_vec(), dir));
        }
        Ok(self.parent.as_ref().map_or(-1, |(_, dir)| dir.0))
    }
}

/// Device and number of a file, if it is there.
fn identity(dir: i32, name: &CStr) -> Option<(u64, u64)> {
    os::lstat(dir, name).ok().map(|stat| (stat.st_dev, stat.st_ino))
}

/// Directory part and last part of an entry's name; None when it names the target itself.
fn split(name: &[u8]) -> Result<Option<(Vec<u8>, CString)>, Fault> {
    let parts: Vec<&[u8]> = name.split(|b| *b == b'/').filter(|part| !part.is_empty() && *part != b".").collect();
    if parts.contains(&&b".."[..]) {
        return Err(Fault::new("file_invalid", format!("entry {:?} leaves the target", String::from_utf8_lossy(name))));
    }
    let Some((last, parents)) = parts.split_last() else { return Ok(None) };
    let last = cstring(last).map_err(|_| malformed("a name has a NUL byte in it"))?;
    Ok(Some((parents.join(&b'/'), last)))
}

/// Opens a directory below another, name by name and through no link.
pub fn open_below(root: i32, path: &[u8], make: bool) -> os::Result<Fd> {
    let flags = libc::O_PATH | libc::O_DIRECTORY | libc::O_NOFOLLOW;
    let mut at = os::open(root, c".", flags, 0, BENEATH)?;
    for part in path.split(|b| *b == b'/').filter(|part| !part.is_empty()) {
        let name = cstring(part)?;
        at = match os::open(at.0, &name, flags, 0, BENEATH) {
            Err(libc::ENOENT) if make => {
                check(unsafe { libc::mkdirat(at.0, name.as_ptr(), 0o755) })?;
                os::open(at.0, &name, flags, 0, BENEATH)?
            }
            Err(libc::ELOOP) => return Err(libc::ENOTDIR), // a link in the place of a directory
            other => other?,
        };
    }
    Ok(at)
}

/// Makes something under a name; what is there gives way, unless it is a directory. Nothing is ever written through it.
pub fn replacing<T>(dir: i32, name: &CStr, mut make: impl FnMut() -> os::Result<T>) -> os::Result<T> {
    match make() {
        Err(libc::EEXIST) => {
            check(unsafe { libc::unlinkat(dir, name.as_ptr(), 0) })?;
            make()
        }
        other => other,
    }
}

fn make_directory(dir: i32, name: &CStr, mode: u32, is_root: bool) -> os::Result<()> {
    // one who is not root must still be able to fill it
    let mode = if is_root { mode } else { mode | 0o700 };
    let is_new = match check(unsafe { libc::mkdirat(dir, name.as_ptr(), 0o700) }) {
        Ok(_) => true,
        Err(libc::EEXIST) => false,
        Err(errno) => return Err(errno),
    };
    let made = os::open(dir, name, libc::O_RDONLY | libc::O_DIRECTORY | libc::O_NOFOLLOW, 0, BENEATH);
    let made = made.map_err(|errno| if errno == libc::ELOOP { libc::ENOTDIR } else { errno })?;
    match check(unsafe { libc::fchmod(made.0, mode) }) {
        Err(libc::EPERM) if !is_new => Ok(()), // another's directory, as good as any to put things in
        other => other.map(|_| ()),
    }
}

fn finish_file(writing: &Writing) -> Result<(), Fault> {
    let times = [libc::timespec { tv_sec: writing.mtime.0, tv_nsec: writing.mtime.1 }; 2];
    let result = unsafe {
        check(libc::fchmod(writing.file.0, writing.mode))
            .and_then(|_| check(libc::futimens(writing.file.0, times.as_ptr())))
    };
    result.map(|_| ()).map_err(|errno| Fault::file(errno, writing.name.to_bytes()))
}

impl Job for Untar {
    fn data(&mut self, bytes: &[u8]) -> Result<(), Fault> {
        self.feed(bytes).map(|_| ())
    }

    fn end(&mut self) -> Result<(), Fault> {
        let whole = match self.state {
            State::End => true,
            State::Head => self.held.is_empty(),
            _ => false,
        };
        self.complete = true;
        if whole {
            Ok(())
        } else {
            Err(malformed("it ends in the middle of an entry"))
        }
    }

    fn step(&mut self, _: &mut Sink) -> Result<Step, Fault> {
        match self.complete {
            true => Ok(Step::Done(Pack::default().map(1).str("entries").uint(self.entries).0)),
            false => Ok(Step::Wait),
        }
    }
}

impl Drop for Untar {
    /// A file that did not come whole does not stay.
    fn drop(&mut self) {
        let (State::File(writing), Some((_, dir))) = (&self.state, &self.parent) else { return };
        if let Ok(_acting) = Acting::new(&self.user) {
            unsafe { libc::unlinkat(dir.0, writing.name.as_ptr(), 0) };
        }
    }
}
