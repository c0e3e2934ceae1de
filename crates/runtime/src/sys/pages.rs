//! Pages of other processes: which are in memory, and advice about them.

use super::{c, openat, own, Errno, Result};
use crate::sys;
use std::os::fd::{AsRawFd, OwnedFd};

/// A range of addresses of another process: start, length.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Range {
    pub start: u64,
    pub length: u64,
}

/// What to do about pages (madvise(2)).
#[derive(Clone, Copy)]
pub enum Advice {
    /// Bring them in, without waiting.
    WillNeed,
    /// Let them go: to swap, or where their file has them.
    PageOut,
}

/// The kernel's `struct pm_scan_arg`.
#[repr(C)]
#[derive(Default)]
struct Scan {
    size: u64,
    flags: u64,
    start: u64,
    end: u64,
    walk_end: u64,
    vec: u64,
    vec_len: u64,
    max_pages: u64,
    category_inverted: u64,
    category_mask: u64,
    category_anyof_mask: u64,
    return_mask: u64,
}

const PAGEMAP_SCAN: u64 = 0xc060_6610; // _IOWR('f', 16, struct pm_scan_arg)
const PRESENT: u64 = 1 << 3;
const ZERO_PAGE: u64 = 1 << 5;
const HIGHEST: u64 = 0x7fff_ffff_f000;
/// Ranges with gaps up to this are one: what is not there needs no advice, and every range has its price.
const GAP: u64 = 64 * 1024;
const BATCH: usize = 512;

/// Ranges of a process that hold pages in memory now, in order of address; at most `most`. `ENOTTY` before Linux 6.7.
pub fn present(pid: i32, most: usize) -> Result<Vec<Range>> {
    let pagemap = openat(libc::AT_FDCWD, &c(format!("/proc/{pid}/pagemap")), libc::O_RDONLY, 0)?;
    let mut found: Vec<Range> = Vec::new();
    let mut regions = [[0u64; 3]; BATCH]; // start, end, categories
    let mut start = 0;
    while start < HIGHEST {
        let mut scan = Scan {
            size: std::mem::size_of::<Scan>() as u64,
            start,
            end: HIGHEST,
            vec: regions.as_mut_ptr() as u64,
            vec_len: BATCH as u64,
            category_mask: PRESENT | ZERO_PAGE,
            category_inverted: ZERO_PAGE,
            return_mask: PRESENT,
            ..Scan::default()
        };
        let count = unsafe { sys!(SYS_ioctl, pagemap.as_raw_fd(), PAGEMAP_SCAN, &raw mut scan) }?;
        for [from, to, _] in &regions[..count.min(BATCH)] {
            join(&mut found, *from, *to);
        }
        if found.len() > most {
            found.truncate(most);
            break;
        }
        if count == 0 || scan.walk_end <= start {
            break;
        }
        start = scan.walk_end;
    }
    Ok(found)
}

/// Appends a range, as part of the last one where it is near enough.
fn join(found: &mut Vec<Range>, from: u64, to: u64) {
    match found.last_mut() {
        Some(last) if from - (last.start + last.length) <= GAP => last.length = to - last.start,
        _ => found.push(Range { start: from, length: to - from }),
    }
}

/// Advice for one range of the process behind a pidfd. `EINVAL`, `EBUSY`: not possible for what is mapped there.
pub fn advise(pidfd: &OwnedFd, range: Range, advice: Advice) -> Result<usize> {
    let advice = match advice {
        Advice::WillNeed => libc::MADV_WILLNEED,
        Advice::PageOut => libc::MADV_PAGEOUT,
    };
    unsafe { sys!(SYS_process_madvise, pidfd.as_raw_fd(), &raw const range, 1, advice, 0) }
}

/// A counter that another thread can make readable.
pub fn eventfd() -> Result<OwnedFd> {
    unsafe { sys!(SYS_eventfd2, 0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) }.map(own)
}

/// Whether an error of `advise` says that the process is gone.
pub fn is_gone(error: Errno) -> bool {
    error == Errno(libc::ESRCH)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn near_ranges_are_one() {
        let mut found = Vec::new();
        for (from, to) in [(0, 4096), (8192, 12288), (12288 + GAP, 20480 + GAP), (1 << 30, (1 << 30) + 4096)] {
            join(&mut found, from, to);
        }
        let expected = [(0, 20480 + GAP), (1 << 30, 4096)].map(|(start, length)| Range { start, length });
        assert_eq!(found, expected);
    }

    #[test]
    fn touched_pages_of_this_process_are_found() {
        let block = vec![1u8; 4 << 20];
        let (start, end) = (block.as_ptr() as u64 + 4096, block.as_ptr() as u64 + (4 << 20) - 4096);
        let found = match present(std::process::id() as i32, 100_000) {
            Err(Errno(libc::ENOTTY)) => return, // an older kernel
            found => found.unwrap(),
        };
        assert!(found.iter().any(|range| range.start <= start && range.start + range.length >= end), "{found:?}");
        assert!(found.windows(2).all(|pair| pair[0].start + pair[0].length <= pair[1].start));
    }
}
