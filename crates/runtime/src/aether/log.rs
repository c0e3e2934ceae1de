//! The output of one command: the bytes of both streams in the order in which they were read, small in memory.
//!
//! A log is a row of records, `varint(length << 1 | stream)` then the bytes, first in memory, then in an unnamed file
//! outside the sandbox. The cursor of a reader counts output bytes, not record heads; a mark every 64 KiB finds it again.

use super::os::{self, Fd, Scratch};

/// Encoded bytes that stay in memory before the log moves to a file.
pub const IN_MEMORY: usize = 64 * 1024;
/// The longest record; what one read of a pipe brings.
pub const MAX_RECORD: usize = 64 * 1024;
const MAX_HEAD: usize = 3;
const MARK_EVERY: u64 = 64 * 1024;

/// Where logs go that are too long for memory, and how many bytes of files may still come to be there.
#[derive(Clone, Copy)]
pub struct Spill {
    pub directory: i32,
    pub room: u64,
}

#[derive(Default)]
pub struct Log {
    memory: Vec<u8>,
    file: Option<Fd>,
    /// Encoded size, and output bytes in it.
    size: u64,
    bytes: u64,
    /// (output bytes before, encoded position) of some record heads.
    marks: Vec<(u64, u64)>,
}

/// Where a reader is: at a record's head when `left` is 0, else inside a record of `stream`.
#[derive(Clone, Copy, Debug, Default)]
pub struct Place {
    pub cursor: u64,
    at: u64,
    left: u64,
    stream: u8,
}

/// Length, stream and size of the head that `encoded` begins with.
fn head(encoded: &[u8]) -> Option<(u64, u8, usize)> {
    let mut value = 0u64;
    for (i, byte) in encoded.iter().take(MAX_HEAD).enumerate() {
        value |= u64::from(byte & 0x7f) << (7 * i);
        if byte & 0x80 == 0 {
            return Some((value >> 1, (value & 1) as u8, i + 1));
        }
    }
    None
}

fn put_head(length: usize, stream: u8, out: &mut [u8; MAX_HEAD]) -> usize {
    let mut value = length << 1 | usize::from(stream & 1);
    let mut size = 0;
    while value >= 0x80 && size < MAX_HEAD - 1 {
        out[size] = value as u8 | 0x80;
        value >>= 7;
        size += 1;
    }
    out[size] = value as u8;
    size + 1
}

impl Log {
    /// What the log takes: (memory, file).
    pub fn weight(&self) -> (usize, u64) {
        (self.memory.capacity() + 16 * self.marks.capacity(), if self.file.is_some() { self.size } else { 0 })
    }

    /// Ends the growth of a log: memory beyond its contents goes back.
    pub fn seal(&mut self) {
        self.memory.shrink_to_fit();
    }

    /// Appends what was read from stream 0 (stdout) or 1 (stderr). False: it could not be kept.
    pub fn append(&mut self, stream: u8, bytes: &[u8], mut spill: Spill) -> bool {
        bytes.chunks(MAX_RECORD).all(|record| self.append_record(stream, record, &mut spill).is_ok())
    }

    fn append_record(&mut self, stream: u8, bytes: &[u8], spill: &mut Spill) -> os::Result<()> {
        let mut encoded = [0; MAX_HEAD];
        let size = put_head(bytes.len(), stream, &mut encoded);
        let moves = self.file.is_none() && self.memory.len() + size + bytes.len() > IN_MEMORY;
        if moves || self.file.is_some() {
            let more = (size + bytes.len() + if moves { self.memory.len() } else { 0 }) as u64;
            spill.room = spill.room.checked_sub(more).ok_or(libc::EDQUOT)?;
        }
        if moves {
            let file = os::open(spill.directory, c".", libc::O_TMPFILE | libc::O_EXCL | libc::O_RDWR, 0o600, 0)?;
            os::write_all(file.0, &self.memory)?;
            self.file = Some(file);
            self.memory = Vec::new();
        }
        match &self.file {
            Some(file) => write_record(file.0, &encoded[..size], bytes, self.size)?,
            None => {
                self.memory.extend_from_slice(&encoded[..size]);
                self.memory.extend_from_slice(bytes);
            }
        }
        if self.marks.last().map_or(self.bytes, |mark| self.bytes - mark.0) >= MARK_EVERY {
            self.marks.push((self.bytes, self.size));
        }
        self.size += (size + bytes.len()) as u64;
        self.bytes += bytes.len() as u64;
        Ok(())
    }

    /// The encoded bytes at a position, some of them: from memory as they are, from the file through `scratch`.
    fn encoded<'a>(&'a self, at: u64, most: usize, scratch: &'a mut Scratch) -> os::Result<&'a [u8]> {
        match &self.file {
            None => Ok(self.memory.get(at as usize..).unwrap_or(&[])),
            Some(file) => {
                let left = self.size.saturating_sub(at) as usize;
                scratch.pread(file.0, left.min(most), at)
            }
        }
    }

    /// The place of a cursor; beyond the end it is the end.
    pub fn locate(&self, cursor: u64, scratch: &mut Scratch) -> os::Result<Place> {
        let cursor = cursor.min(self.bytes);
        let before = self.marks.partition_point(|mark| mark.0 <= cursor);
        let (bytes, at) = before.checked_sub(1).map_or((0, 0), |i| self.marks[i]);
        let mut place = Place { cursor: bytes, at, left: 0, stream: 0 };
        while place.cursor < cursor {
            // As many records as there are at hand: a command can write them a byte long, and thousands to a mark.
            let (encoded, start) = (self.encoded(place.at, MAX_RECORD + MAX_HEAD, scratch)?, place.at);
            while place.cursor < cursor {
                let Some((length, stream, size)) = encoded.get((place.at - start) as usize..).and_then(head) else {
                    break;
                };
                let skipped = length.min(cursor - place.cursor);
                let (cursor, at) = (place.cursor + skipped, place.at + size as u64 + skipped);
                place = Place { cursor, at, left: length - skipped, stream };
            }
            if place.at == start {
                return Err(libc::EIO);
            }
        }
        Ok(place)
    }

    /// Output bytes that a reader at `place` has not had.
    pub fn behind(&self, place: &Place) -> u64 {
        self.bytes - place.cursor
    }

    /// The stream whose bytes come next at `place`, which there must be.
    pub fn next_stream(&self, place: &mut Place, scratch: &mut Scratch) -> os::Result<u8> {
        if place.left == 0 {
            let (length, stream, size) = head(self.encoded(place.at, MAX_HEAD, scratch)?).ok_or(libc::EIO)?;
            *place = Place { cursor: place.cursor, at: place.at + size as u64, left: length, stream };
        }
        Ok(place.stream)
    }

    /// Copies bytes of one stream (the one `next_stream` named) from `place` on, as many as there are in a row and fit.
    pub fn read(&self, place: &mut Place, out: &mut [u8], scratch: &mut Scratch) -> os::Result<usize> {
        let (stream, mut copied) = (place.stream, 0);
        while copied < out.len() && self.behind(place) > 0 && self.next_stream(place, scratch)? == stream {
            copied += self.read_at_hand(place, &mut out[copied..], scratch)?;
        }
        Ok(copied)
    }

    /// Over as many records as one look at the log brings.
    fn read_at_hand(&self, place: &mut Place, out: &mut [u8], scratch: &mut Scratch) -> os::Result<usize> {
        let encoded = self.encoded(place.at, MAX_RECORD + MAX_HEAD, scratch)?;
        if encoded.is_empty() {
            return Err(libc::EIO);
        }
        let (mut taken, mut copied) = (0, 0);
        loop {
            let count = (place.left as usize).min(out.len() - copied).min(encoded.len() - taken);
            out[copied..copied + count].copy_from_slice(&encoded[taken..taken + count]);
            (taken, copied) = (taken + count, copied + count);
            place.left -= count as u64;
            if place.left > 0 || copied == out.len() {
                break;
            }
            match head(&encoded[taken..]) {
                Some((length, stream, size)) if stream == place.stream => (place.left, taken) = (length, taken + size),
                _ => break,
            }
        }
        place.at += taken as u64;
        place.cursor += copied as u64;
        Ok(copied)
    }
}

fn write_record(file: i32, head: &[u8], bytes: &[u8], at: u64) -> os::Result<()> {
    let part = |part: &[u8]| libc::iovec { iov_base: part.as_ptr().cast_mut().cast(), iov_len: part.len() };
    let parts = [part(head), part(bytes)];
    let written = os::check(unsafe { libc::pwritev(file, parts.as_ptr(), 2, at as i64) } as i64)?;
    if written as usize == head.len() + bytes.len() {
        Ok(())
    } else {
        Err(libc::ENOSPC) // a full disk: the torn record lies behind `size`, where nobody reads
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read_all(log: &Log, cursor: u64, step: usize, scratch: &mut Scratch) -> [Vec<u8>; 2] {
        let mut streams = [Vec::new(), Vec::new()];
        let mut place = log.locate(cursor, scratch).expect("locate");
        assert_eq!(place.cursor, cursor.min(log.bytes));
        while log.behind(&place) > 0 {
            let stream = log.next_stream(&mut place, scratch).expect("head");
            let mut buffer = vec![0; step];
            let size = log.read(&mut place, &mut buffer, scratch).expect("read");
            assert!(size > 0);
            streams[usize::from(stream)].extend_from_slice(&buffer[..size]);
        }
        streams
    }

    fn spill() -> Spill {
        let directory = os::open(libc::AT_FDCWD, c"/tmp", libc::O_RDONLY | libc::O_DIRECTORY, 0, 0).expect("/tmp");
        let spill = Spill { directory: directory.0, room: u64::MAX };
        std::mem::forget(directory);
        spill
    }

    #[test]
    fn both_streams_come_back_from_any_cursor() {
        let (spill, mut scratch) = (spill(), Scratch::new(MAX_RECORD + MAX_HEAD).expect("scratch"));
        for (records, size) in [(300, 7), (3000, 1), (500, 1000), (5, 200_000), (200, 63)] {
            let (mut log, mut order) = (Log::default(), Vec::new());
            for i in 0..records {
                let stream = (i * i % 7 % 2) as u8;
                let bytes: Vec<u8> = (0..size).map(|j| (i * 31 + j) as u8).collect();
                assert!(log.append(stream, &bytes, spill));
                order.extend(bytes.iter().map(|b| (stream, *b)));
            }
            assert_eq!(log.file.is_some(), order.len() > IN_MEMORY, "{records} x {size}");
            for cursor in [0, 1, order.len() / 3, order.len() / 2 + 1, order.len() - 1, order.len(), order.len() + 9] {
                let streams = read_all(&log, cursor as u64, 1 + 65_535 / records as usize, &mut scratch);
                for stream in 0..2 {
                    let rest = order.iter().skip(cursor).filter(|(s, _)| *s == stream).map(|(_, b)| *b);
                    assert!(rest.eq(streams[usize::from(stream)].iter().copied()), "{records} x {size} from {cursor}");
                }
            }
        }
    }

    #[test]
    fn one_byte_records_cost_at_most_twice_their_bytes() {
        let (spill, mut log) = (spill(), Log::default());
        for i in 0..200_000u32 {
            assert!(log.append((i % 2) as u8, b"x", spill));
        }
        assert_eq!((log.size, log.bytes), (400_000, 200_000));
        assert!(log.weight().0 < 1024);
    }

    #[test]
    fn what_cannot_be_spilled_is_refused_and_the_rest_stays() {
        let (mut log, mut scratch) = (Log::default(), Scratch::new(MAX_RECORD + MAX_HEAD).expect("scratch"));
        let nowhere = Spill { directory: -1, room: u64::MAX };
        assert!(log.append(0, &[7; 40_000], nowhere));
        assert!(!log.append(0, &[8; 40_000], nowhere));
        assert_eq!(read_all(&log, 0, 999, &mut scratch)[0], vec![7; 40_000]);
    }

    #[test]
    fn files_do_not_outgrow_their_room() {
        let (mut log, mut scratch) = (Log::default(), Scratch::new(MAX_RECORD + MAX_HEAD).expect("scratch"));
        let spill = |room| Spill { room, ..spill() };
        assert!(log.append(0, &[7; 60_000], spill(0)), "what is in memory needs none");
        assert!(!log.append(0, &[8; 10_000], spill(70_000)), "heads and what moves count, too");
        assert!(log.append(0, &[8; 10_000], spill(70_006)));
        assert_eq!(log.weight(), (0, 70_006));
        assert!(!log.append(0, &[9; 100], spill(101)) && log.append(0, &[9; 100], spill(102)));
        assert_eq!(read_all(&log, 60_000, 999, &mut scratch)[0], [vec![8; 10_000], vec![9; 100]].concat());
    }
}
