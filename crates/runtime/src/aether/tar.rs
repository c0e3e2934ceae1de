//! Trees as tar streams, made in constant memory: ustar heads, pax records for what does not fit them.

use super::fault::Fault;
use super::files::{kind, open_regular};
use super::os::{self, Fd, BENEATH, SAFE};
use super::walk::{open_to_list, Entry, Source, Walk, Walked};
use crate::msgpack::Pack;
use std::collections::BTreeMap;
use std::ffi::CStr;

pub const BLOCK: usize = 512;
const MAX_OCTAL: u64 = 0o77777777777;
const MAX_ID: u32 = 0o7777777;
/// Memory for the first names of files that have several; beyond it they are sent as files of their own.
const MAX_LINKS: usize = 1 << 20;
const FILE_PIECE: usize = 256 * 1024;
const ENTRIES_A_STEP: usize = 64;
const BYTES_A_STEP: usize = 48 * 1024;
const PROC: i64 = 0x9fa0;

/// A file whose bytes are being sent: as many as its head promised, whatever becomes of it.
struct Open {
    file: Fd,
    left: u64,
    size: u64,
}

pub struct Tar {
    walk: Walk,
    /// A file or link that is all there is: (directory, entry).
    single: Option<(Fd, Entry)>,
    open: Option<Open>,
    /// Names of files with more than one, by device and number.
    links: BTreeMap<(u64, u64), Vec<u8>>,
    links_size: usize,
    entries: u64,
}

impl Tar {
    pub fn open(path: &CStr) -> Result<Tar, Fault> {
        let fault = |errno| Fault::file(errno, path.to_bytes());
        let (links, links_size, entries, open) = (BTreeMap::new(), 0, 0, None);
        match open_to_list(libc::AT_FDCWD, path, SAFE) {
            Ok(dir) => Ok(Tar { walk: Walk::new(dir).map_err(fault)?, single: None, open, links, links_size, entries }),
            Err(libc::ENOTDIR) => {
                let place = super::files::Place::of(path, false)?;
                let (name, path) = (place.name.clone(), place.name.to_bytes().to_vec());
                let entry = Entry { stat: os::lstat(place.dir.0, &name).map_err(fault)?, name, path };
                Ok(Tar { walk: Walk::empty(), single: Some((place.dir, entry)), open, links, links_size, entries })
            }
            Err(errno) => Err(fault(errno)),
        }
    }

    /// The head of an entry, and what follows from it: a file to send, a directory to go into.
    fn entry(&mut self, dir: i32, entry: &Entry, out: &mut Vec<u8>) -> Result<(), Fault> {
        let fault = |errno| Fault::file(errno, &entry.path);
        let stat = &entry.stat;
        let identity = (stat.st_dev, stat.st_ino);
        match kind(stat) {
            libc::S_IFDIR => {
                put_head(out, &[&entry.path[..], b"/"].concat(), b'5', stat, 0, b"");
                if !is_proc(dir, &entry.name) {
                    self.walk.descend(&entry.name)?;
                }
            }
            libc::S_IFLNK => match os::readlink(dir, &entry.name) {
                Ok(target) => put_head(out, &entry.path, b'2', stat, 0, &target),
                Err(libc::ENOENT | libc::EINVAL) => return Ok(()), // replaced meanwhile
                Err(errno) => return Err(fault(errno)),
            },
            libc::S_IFREG if stat.st_nlink > 1 && self.links.contains_key(&identity) => {
                put_head(out, &entry.path, b'1', stat, 0, &self.links[&identity]);
            }
            libc::S_IFREG => {
                let (file, stat) = match open_regular(dir, &entry.name, BENEATH) {
                    Ok(opened) => opened,
                    Err(libc::ENOENT | libc::ELOOP | libc::ENXIO | libc::EISDIR) => return Ok(()), // replaced meanwhile
                    Err(errno) => return Err(fault(errno)),
                };
                if stat.st_nlink > 1 && self.links_size < MAX_LINKS {
                    self.links_size += entry.path.len() + 64;
                    self.links.insert(identity, entry.path.clone());
                }
                let size = stat.st_size.max(0) as u64;
                put_head(out, &entry.path, b'0', &stat, size, b"");
                self.open = Some(Open { file, left: size, size });
            }
            _ => return Ok(()), // sockets, FIFOs and devices are not files to carry away
        }
        self.entries += 1;
        Ok(())
    }
}

fn is_proc(dir: i32, name: &CStr) -> bool {
    let Ok(fd) = os::open(dir, name, libc::O_PATH | libc::O_DIRECTORY, 0, BENEATH) else { return true };
    let mut stat: libc::statfs = unsafe { std::mem::zeroed() };
    unsafe { libc::fstatfs(fd.0, &mut stat) == 0 && stat.f_type == PROC }
}

impl Open {
    /// The next bytes; zeros in the place of bytes that a shrinking file no longer has. False: all were sent.
    fn piece(&mut self, out: &mut Vec<u8>) -> os::Result<bool> {
        let start = out.len();
        let most = self.left.min(FILE_PIECE as u64) as usize;
        out.resize(start + most, 0);
        os::pread(self.file.0, &mut out[start..], self.size - self.left)?;
        self.left -= most as u64;
        if self.left == 0 {
            let padding = self.size.next_multiple_of(BLOCK as u64) - self.size;
            out.resize(out.len() + padding as usize, 0);
        }
        Ok(self.left > 0)
    }
}

impl Source for Tar {
    fn produce(&mut self, out: &mut Vec<u8>) -> Result<Option<Vec<u8>>, Fault> {
        for _ in 0..ENTRIES_A_STEP {
            if let Some(open) = &mut self.open {
                let more = open.piece(out).map_err(|errno| Fault::file(errno, b"a file being read"))?;
                if !more {
                    self.open = None;
                }
            } else if let Some((dir, entry)) = self.single.take() {
                self.entry(dir.0, &entry, out)?;
            } else {
                match self.walk.next()? {
                    Walked::Entry(entry) => self.entry(self.walk.dir(), &entry, out)?,
                    Walked::Busy => return Ok(None),
                    Walked::End => {
                        out.resize(out.len() + 2 * BLOCK, 0);
                        return Ok(Some(Pack::default().map(1).str("entries").uint(self.entries).0));
                    }
                }
            }
            if out.len() >= BYTES_A_STEP {
                break;
            }
        }
        Ok(None)
    }
}

/// `length key=value\n`, where the length counts itself.
fn put_record(records: &mut Vec<u8>, key: &str, value: &[u8]) {
    let rest = key.len() + value.len() + 3;
    let mut length = rest + 1;
    while length != rest + length.to_string().len() {
        length = rest + length.to_string().len();
    }
    records.extend_from_slice(format!("{length} {key}=").as_bytes());
    records.extend_from_slice(value);
    records.push(b'\n');
}

fn put_head(out: &mut Vec<u8>, name: &[u8], flag: u8, stat: &libc::stat, size: u64, link: &[u8]) {
    let mut records = Vec::new();
    for (key, value) in [("path", name), ("linkpath", link)] {
        if value.len() > 100 {
            put_record(&mut records, key, value);
        }
    }
    if !records.is_empty() && (std::str::from_utf8(name).is_err() || std::str::from_utf8(link).is_err()) {
        put_record(&mut records, "hdrcharset", b"BINARY");
    }
    if size > MAX_OCTAL {
        put_record(&mut records, "size", size.to_string().as_bytes());
    }
    if !records.is_empty() {
        // once there are records, readers expect the whole time in them
        let mtime = format!("{}.{:09}", stat.st_mtime.max(0), stat.st_mtime_nsec);
        put_record(&mut records, "mtime", mtime.as_bytes());
        put_block(out, b"././@PaxHeader", b'x', 0o644, (0, 0), records.len() as u64, 0, b"");
        let padded = records.len().next_multiple_of(BLOCK);
        records.resize(padded, 0);
        out.extend_from_slice(&records);
    }
    let ids = (stat.st_uid.min(MAX_ID), stat.st_gid.min(MAX_ID));
    put_block(out, name, flag, stat.st_mode & 0o7777, ids, size, stat.st_mtime.max(0) as u64, link);
}

#[allow(clippy::too_many_arguments)] // the fields of the head, one each
pub fn put_block(
    out: &mut Vec<u8>,
    name: &[u8],
    flag: u8,
    mode: u32,
    ids: (u32, u32),
    size: u64,
    mtime: u64,
    link: &[u8],
) {
    let mut block = [0u8; BLOCK];
    let mut put = |at: usize, width: usize, bytes: &[u8]| {
        let length = bytes.len().min(width);
        block[at..at + length].copy_from_slice(&bytes[..length]);
    };
    put(0, 100, name);
    put(100, 8, format!("{mode:07o}").as_bytes());
    put(108, 8, format!("{:07o}", ids.0).as_bytes());
    put(116, 8, format!("{:07o}", ids.1).as_bytes());
    put(124, 12, format!("{:011o}", size.min(MAX_OCTAL)).as_bytes());
    put(136, 12, format!("{:011o}", mtime.min(MAX_OCTAL)).as_bytes());
    put(148, 8, b"        ");
    put(156, 1, &[flag]);
    put(157, 100, link);
    put(257, 8, b"ustar\x0000");
    let sum: u32 = block.iter().map(|b| u32::from(*b)).sum();
    block[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
    out.extend_from_slice(&block);
}
