//! `usage`: how much disk the uppers of some sandboxes take, a line of bytes each, where the filesystem keeps no count.
//!
//! The content is hostile: directories are opened one below the other, no link is followed, nothing else is opened.

use super::walk::{stat, Names, DAC_READ_SEARCH, MAX_DEPTH};
use crate::sys::{self, process};
use std::ffi::CStr;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};

const BLOCK: u64 = 512;

pub fn main(args: &[String]) -> Result<(), String> {
    let fds: Option<Vec<RawFd>> = args.iter().map(|fd| fd.parse().ok()).collect();
    let fds = fds.filter(|fds| !fds.is_empty()).ok_or(super::USAGE)?;
    process::bound_capabilities(DAC_READ_SEARCH)
        .and_then(|()| process::set_capabilities(DAC_READ_SEARCH))
        .map_err(|e| format!("give up privilege: {e}"))?;
    for fd in fds {
        // Beside the upper lie the overlay's work directory and what backs /dev/shm.
        let root = sys::openat(fd, c"..", libc::O_RDONLY | libc::O_DIRECTORY, 0);
        println!("{}", root.map_or(0, |root| below(&root, 0)));
    }
    Ok(())
}

/// Bytes on disk of everything in a directory; what vanishes meanwhile counts nothing.
fn below(directory: &OwnedFd, depth: usize) -> u64 {
    let mut names = Names::new();
    let mut bytes = 0;
    while let Some(chunk) = names.next(directory.as_raw_fd()) {
        bytes += chunk.iter().map(|name| of(directory, name, depth)).sum::<u64>();
    }
    bytes
}

fn of(parent: &OwnedFd, name: &CStr, depth: usize) -> u64 {
    let Ok(stat) = stat(parent.as_raw_fd(), name) else { return 0 };
    let own = stat.st_blocks as u64 * BLOCK;
    if stat.st_mode & libc::S_IFMT != libc::S_IFDIR || depth == MAX_DEPTH {
        return own;
    }
    let flags = libc::O_RDONLY | libc::O_DIRECTORY | libc::O_NOFOLLOW;
    own + sys::openat(parent.as_raw_fd(), name, flags, 0).map_or(0, |inner| below(&inner, depth + 1))
}
