//! The unpacker under fuzzing: whatever an archive says, nothing appears or changes outside its directory.
//!
//! It works on a thread whose root is a scratch directory, so that even a fault could not reach the machine, and a link to an
//! absolute path leads to where it is seen.

use super::conn::Job;
use super::tar::BLOCK;
use super::untar::Untar;
use super::users::User;
use std::fs;
use std::io;
use std::os::unix::fs::{symlink, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{channel, Receiver, Sender};
use std::sync::{Mutex, OnceLock};

const TARGET: &str = "/target";
const MARK: &str = "outside";

type Lines = (Sender<Vec<u8>>, Receiver<Result<(), String>>);

/// Unpacks `data`, whole and cut, as root and as a user; panics when anything outside the target is touched.
pub fn untar(data: &[u8]) {
    static LINES: OnceLock<Mutex<Lines>> = OnceLock::new();
    let lines = LINES.get_or_init(|| Mutex::new(start())).lock().expect("lines");
    lines.0.send(repaired(data)).expect("worker");
    if let Err(what) = lines.1.recv().expect("worker") {
        panic!("{what}");
    }
}

/// Check sums that fit, so that changes of a head get further than the head.
fn repaired(data: &[u8]) -> Vec<u8> {
    let mut data = data.to_vec();
    for block in data.chunks_exact_mut(BLOCK).filter(|block| block[257..262] == *b"ustar") {
        block[148..156].fill(b' ');
        let sum: u32 = block.iter().map(|b| u32::from(*b)).sum();
        block[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
    }
    data
}

fn start() -> Lines {
    let (inputs, received) = channel::<Vec<u8>>();
    let (answers, lines) = channel();
    let base = if Path::new("/dev/shm").is_dir() { PathBuf::from("/dev/shm") } else { std::env::temp_dir() };
    let scratch = base.join(format!("dsec-untar-{}", std::process::id()));
    fs::create_dir(&scratch).expect("scratch");
    let root = std::ffi::CString::new(scratch.as_os_str().as_encoded_bytes()).expect("scratch");
    std::thread::spawn(move || {
        // SAFETY: only this thread's root changes.
        unsafe {
            assert_eq!(libc::unshare(libc::CLONE_FS), 0, "needs root");
            // nothing is left of it when the process ends, however that comes: it lives as long as this thread's root
            assert_eq!(libc::unshare(libc::CLONE_NEWNS), 0);
            let (none, private) = (c"none".as_ptr(), libc::MS_PRIVATE | libc::MS_REC);
            assert_eq!(libc::mount(none, c"/".as_ptr(), std::ptr::null(), private, std::ptr::null()), 0);
            assert_eq!(libc::mount(none, root.as_ptr(), c"tmpfs".as_ptr(), 0, std::ptr::null()), 0);
            assert_eq!(libc::chroot(root.as_ptr()), 0);
            assert_eq!(libc::chdir(c"/".as_ptr()), 0);
        }
        answers.send(prepare().map_err(|error| error.to_string())).expect("starter");
        for data in received {
            if answers.send(checked(&data).map_err(|error| error.to_string())).is_err() {
                return;
            }
        }
    });
    let ready = lines.recv().expect("worker");
    fs::remove_dir(&scratch).expect("scratch"); // the thread's own mount over it is seen by nobody else
    ready.expect("scratch");
    (inputs, lines)
}

/// What must stay as it is.
fn prepare() -> io::Result<()> {
    fs::create_dir(format!("/{MARK}"))?;
    fs::write(format!("/{MARK}/file"), b"contents")?;
    symlink("/target", "/link")?;
    Ok(())
}

/// Every file outside the target, with all that an escape could change of it.
fn outside() -> io::Result<Vec<String>> {
    let mut found = Vec::new();
    let mut open = vec![PathBuf::from("/")];
    while let Some(directory) = open.pop() {
        for entry in fs::read_dir(&directory)? {
            let path = entry?.path();
            if path == Path::new(TARGET) {
                continue;
            }
            let meta = fs::symlink_metadata(&path)?;
            let contents = if meta.is_file() { fs::read(&path)? } else { Vec::new() };
            let (mode, owner, links) = (meta.permissions().mode(), (meta.uid(), meta.gid()), meta.nlink());
            found.push(format!(
                "{path:?} {mode:o} {owner:?} {links} {:?} {contents:?}",
                (meta.mtime(), meta.mtime_nsec())
            ));
            if meta.is_dir() {
                open.push(path);
            }
        }
    }
    found.sort();
    Ok(found)
}

fn checked(data: &[u8]) -> io::Result<()> {
    let before = outside()?;
    let user = |id: u32| User {
        name: b"fuzz".to_vec(),
        uid: id,
        gid: id,
        groups: Vec::new(),
        home: Vec::new(),
        shell: Vec::new(),
    };
    for (id, piece) in [(0, data.len().max(1)), (0, 97), (1000, 300)] {
        fs::create_dir(TARGET)?;
        std::os::unix::fs::chown(TARGET, Some(id), Some(id))?;
        unpack(data, user(id), piece);
        let after = outside()?;
        assert_eq!(before, after, "something outside the target changed");
        fs::remove_dir_all(TARGET)?;
    }
    Ok(())
}

fn unpack(data: &[u8], user: User, piece: usize) {
    let Ok(mut job) = Untar::open(c"/target", user) else { return };
    for bytes in data.chunks(piece) {
        if job.data(bytes).is_err() {
            return;
        }
    }
    let _ = job.end();
}
