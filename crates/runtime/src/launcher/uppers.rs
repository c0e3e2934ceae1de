//! Uppers: what sandboxes write. One filesystem of the node that DSec owns, mounted for nobody else to see.
//!
//! btrfs in an image file: a subvolume per sandbox, made and destroyed in a tenth of a millisecond, with a hard limit.
//! Plain directories where that is not to be had: no hard limit, usage by walking (the edge watches).

use super::log;
use crate::sys::{self, btrfs, c, loopdev, mount, At, Errno, Failure};
use std::collections::HashMap;
use std::ffi::CStr;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::process::Command;

const STAGE: &str = "upper";
/// Nothing here outlives the machine's next start, so nothing is flushed for its sake.
/// Usage is known as of the last commit, so commits are frequent.
const OPTIONS: [(&CStr, Option<&CStr>); 5] = [
    (c"commit", Some(c"5")),
    (c"nobarrier", None),
    (c"nodatasum", None),
    (c"discard", Some(c"async")),
    (c"space_cache", Some(c"v2")),
];

pub enum Uppers {
    Btrfs {
        root: OwnedFd,
        spill: OwnedFd,
        groups: Option<OwnedFd>,
        quota: &'static str,
        /// Empty subvolumes that wait for the next tenant of their slot.
        idle: HashMap<u32, Upper>,
    },
    Directory {
        root: OwnedFd,
        spill: OwnedFd,
    },
}

/// A filesystem that is ready to be attached at `/u`.
pub struct Prepared {
    pub mount: OwnedFd,
    groups: Option<OwnedFd>,
    btrfs: bool,
}

/// What `--uppers` says: `btrfs:IMAGE:SIZE` or `dir:DIRECTORY`. In the host's mount namespace: loop devices keep the mount
/// of their file.
pub fn attach_device(option: &str) -> Result<Device, Failure> {
    let usage = || {
        Failure::new(STAGE, format!("--uppers must be btrfs:IMAGE:SIZE or dir:DIRECTORY, not {option:?}"), libc::EINVAL)
    };
    match option.split_once(':').ok_or_else(usage)? {
        ("dir", path) => {
            std::fs::create_dir_all(path).map_err(Errno::from).at(STAGE, || format!("create {path}"))?;
            Ok(Device::Directory(path.into()))
        }
        ("btrfs", rest) => {
            let (path, size) = rest.rsplit_once(':').ok_or_else(usage)?;
            let size: u64 = size.parse().map_err(|_| usage())?;
            let image = open_image(path, size)?;
            let attached = loopdev::attach(&image, path).at(STAGE, || format!("attach {path} to a loop device"))?;
            Ok(Device::Loop { image: path.into(), attached })
        }
        _ => Err(usage()),
    }
}

pub enum Device {
    Directory(String),
    Loop { image: String, attached: loopdev::Attached },
}

fn open_image(path: &str, size: u64) -> Result<std::fs::File, Failure> {
    let mut options = std::fs::OpenOptions::new();
    options.read(true).write(true).create(true).truncate(false).mode(0o600);
    let image = options.open(path).map_err(Errno::from).at(STAGE, || format!("open {path}"))?;
    let length = image.metadata().map_err(Errno::from).at(STAGE, || format!("stat {path}"))?.len();
    if length == 0 {
        image.set_len(size).map_err(Errno::from).at(STAGE, || format!("extend {path} to {size} bytes"))?;
        make_filesystem(path).inspect_err(|_| {
            let _ = std::fs::remove_file(path);
        })?;
    }
    Ok(image)
}

fn make_filesystem(path: &str) -> Result<(), Failure> {
    // Single copies: nothing here is worth a second one.
    let made =
        Command::new("mkfs.btrfs").args(["-q", "-f", "-m", "single", "-d", "single", "-n", "16k", path]).output();
    let output = match made {
        Ok(output) => output,
        Err(error) => {
            let text = format!("run mkfs.btrfs: {error}; install it with: apt-get install btrfs-progs");
            return Err(Failure::new(STAGE, text, error.raw_os_error().unwrap_or(libc::EIO)));
        }
    };
    if !output.status.success() {
        let text = format!("mkfs.btrfs {path}: {}", String::from_utf8_lossy(&output.stderr).trim());
        return Err(Failure::new(STAGE, text, libc::EIO));
    }
    Ok(())
}

/// Mounts the filesystem, detached.
pub fn prepare(device: &Device) -> Result<Prepared, Failure> {
    let flags = mount::ATTR_NODEV | mount::ATTR_NOSUID | mount::ATTR_NOATIME;
    match device {
        Device::Directory(path) => {
            let tree = mount::clone_tree(libc::AT_FDCWD, &c(path.as_str())).at(STAGE, || format!("open {path}"))?;
            mount::add_flags(&tree, flags).at(STAGE, || format!("set mount flags of {path}"))?;
            Ok(Prepared { mount: tree, groups: None, btrfs: false })
        }
        Device::Loop { image, attached } => {
            let mounted = mount_device(&attached.path, flags).or_else(|failure| {
                if !attached.fresh || !is_btrfs(attached) {
                    return Err(failure);
                }
                // Damaged by a crash of the machine, or of a newer kernel: what was in it ended with its sandboxes.
                log(&failure.at(STAGE, format!("made {image} anew, for it could not be mounted")));
                make_filesystem(&attached.path)?;
                mount_device(&attached.path, flags)
            });
            let text = || format!("mount btrfs of {image} ({}); if it is damaged, remove the file", attached.path);
            let mount = mounted.map_err(|failure| failure.at(STAGE, text()))?;
            Ok(Prepared { mount, groups: quota_groups(&attached.path), btrfs: true })
        }
    }
}

fn mount_device(device: &str, flags: u64) -> Result<OwnedFd, Failure> {
    let source = c(device);
    let mut options = vec![(c"source", Some(source.as_c_str()))];
    options.extend(OPTIONS);
    mount::new_filesystem(c"btrfs", &options, flags)
}

/// Whether the device holds what was a btrfs once: only that is ours to make anew.
fn is_btrfs(attached: &loopdev::Attached) -> bool {
    const MAGIC: (u64, &[u8; 8]) = (0x1_0040, b"_BHRfS_M");
    let mut found = [0; 8];
    let read = std::fs::File::open(&attached.path).and_then(|device| device.read_exact_at(&mut found, MAGIC.0));
    read.is_ok() && found == *MAGIC.1
}

/// Where the kernel shows the quota groups of the filesystem on a device: `/sys/fs/btrfs/<id>/qgroups` comes with quotas.
fn quota_groups(device: &str) -> Option<OwnedFd> {
    let name = device.strip_prefix("/dev/")?;
    let filesystems = std::fs::read_dir("/sys/fs/btrfs").ok()?;
    let ours = filesystems.flatten().find(|fs| fs.path().join("devices").join(name).exists())?;
    sys::openat(libc::AT_FDCWD, &c(ours.path().to_string_lossy().into_owned()), libc::O_RDONLY | libc::O_DIRECTORY, 0)
        .ok()
}

/// What is known of one upper.
#[derive(Debug, Clone, Copy)]
pub struct Upper {
    /// Number of the subvolume; 0 for a directory.
    pub id: u64,
}

/// Of a quota group: its limit; bytes on disk, then those that wait for the next commit.
const LIMIT: &str = "max_referenced";
const USED: [&str; 4] = ["referenced", "rsv_data", "rsv_meta_pertrans", "rsv_meta_prealloc"];

const UPPER: &CStr = c"u";
const WORK: &CStr = c"w";
const SHM: &CStr = c"s";
/// Directories that uppers wait in to be removed, behind it the number of the slot.
const ASIDE: &str = "g";

fn name(slot: u32) -> String {
    format!("s{slot}")
}

impl Uppers {
    /// After the filesystem has been attached at `/u`.
    pub fn open(prepared: Prepared) -> Result<Self, Failure> {
        let root =
            sys::openat(libc::AT_FDCWD, c"/u", libc::O_RDONLY | libc::O_DIRECTORY, 0).at(STAGE, || "open /u".into())?;
        sys::fchmod(&root, 0o711).at(STAGE, || "chmod /u".into())?;
        match sys::mkdirat(root.as_raw_fd(), c"spill", 0o1733) {
            Err(Errno(libc::EEXIST)) => Ok(()),
            other => other,
        }
        .and_then(|()| unsafe { crate::sys!(SYS_fchmodat, root.as_raw_fd(), c"spill".as_ptr(), 0o1733) })
        .at(STAGE, || "create the spill directory".into())?;
        // A mount of its own: no way leads up from there to the uppers of others, should an aether have been taken over.
        let spill = mount::clone_tree(root.as_raw_fd(), c"spill").at(STAGE, || "open the spill directory".into())?;
        let uppers = if prepared.btrfs {
            let quota = btrfs::enable_quota(&root).at(STAGE, || "enable quotas of the uppers".into())?;
            Uppers::Btrfs { root, spill, groups: prepared.groups, quota, idle: HashMap::new() }
        } else {
            Uppers::Directory { root, spill }
        };
        uppers.remove_aside();
        Ok(uppers)
    }

    fn root(&self) -> &OwnedFd {
        match self {
            Uppers::Btrfs { root, .. } | Uppers::Directory { root, .. } => root,
        }
    }

    pub fn kind(&self) -> &'static str {
        match self {
            Uppers::Btrfs { .. } => "btrfs",
            Uppers::Directory { .. } => "dir",
        }
    }

    pub fn quota(&self) -> &'static str {
        match self {
            Uppers::Btrfs { quota, .. } => quota,
            Uppers::Directory { .. } => "none",
        }
    }

    /// Path of a slot's upper in the private root.
    pub fn path(slot: u32) -> String {
        format!("/u/{}", name(slot))
    }

    pub fn make(&mut self, slot: u32, owner: u32) -> Result<Upper, Failure> {
        let name = name(slot);
        let at = || format!("create upper {name}");
        let mut known = None;
        match self {
            Uppers::Btrfs { root, idle, .. } => {
                known = idle.remove(&slot);
                if known.is_none() {
                    btrfs::create_subvolume(root, &name).at(STAGE, at)?;
                }
            }
            Uppers::Directory { root, .. } => sys::mkdirat(root.as_raw_fd(), &c(name.as_str()), 0o711).at(STAGE, at)?,
        }
        let own = self.open_slot(&name).at(STAGE, at)?;
        for (directory, mode) in [(UPPER, 0o755), (WORK, 0o700), (SHM, 0o777)] {
            sys::mkdirat(own.as_raw_fd(), directory, mode).at(STAGE, at)?;
            sys::fchownat(own.as_raw_fd(), directory, owner, owner).at(STAGE, at)?;
        }
        unsafe { crate::sys!(SYS_fchmodat, own.as_raw_fd(), SHM.as_ptr(), 0o1777) }.at(STAGE, at)?;
        match (self, known) {
            (_, Some(upper)) => Ok(upper),
            (Uppers::Btrfs { .. }, None) => Ok(Upper { id: btrfs::subvolume_id(&own).at(STAGE, at)? }),
            (Uppers::Directory { .. }, None) => Ok(Upper { id: 0 }),
        }
    }

    fn open_slot(&self, name: &str) -> sys::Result<OwnedFd> {
        let flags = libc::O_RDONLY | libc::O_DIRECTORY | libc::O_NOFOLLOW;
        sys::openat(self.root().as_raw_fd(), &c(name), flags, 0)
    }

    /// An upper that is there already.
    pub fn find(&self, slot: u32) -> Result<Upper, Failure> {
        let name = name(slot);
        let at = || format!("open upper {name}");
        let own = self.open_slot(&name).at(STAGE, at)?;
        let id = match self {
            Uppers::Btrfs { .. } => btrfs::subvolume_id(&own).at(STAGE, at)?,
            Uppers::Directory { .. } => 0,
        };
        Ok(Upper { id })
    }

    pub fn limit(&self, slot: u32, bytes: u64) -> Result<(), Failure> {
        let Uppers::Btrfs { root, .. } = self else { return Ok(()) };
        let name = name(slot);
        let at = || format!("limit {name} to {bytes} bytes");
        let own =
            sys::openat(root.as_raw_fd(), &c(name.as_str()), libc::O_RDONLY | libc::O_DIRECTORY, 0).at(STAGE, at)?;
        btrfs::limit(&own, bytes).at(STAGE, at)
    }

    /// Bytes that count against the limit, -1 where that is not known without walking: what is on disk, and what was taken
    /// for it since the last commit.
    pub fn usage(&self, upper: Upper) -> i64 {
        let Uppers::Btrfs { groups: Some(groups), .. } = self else { return -1 };
        let number = |file: &str| -> Option<i64> {
            let path = c(format!("qgroups/0_{}/{file}", upper.id));
            sys::read_file(groups.as_raw_fd(), &path).ok()?.trim().parse().ok()
        };
        let Some(written) = number(USED[0]) else { return -1 };
        written + USED[1..].iter().filter_map(|file| number(file)).sum::<i64>()
    }

    /// The kernel's files of an upper's quota: the limit, then those whose numbers together are the use of it. None where
    /// there is no quota.
    pub fn open_quota(&self, upper: Upper) -> Vec<OwnedFd> {
        let Uppers::Btrfs { groups: Some(groups), .. } = self else { return Vec::new() };
        let open = |file: &&str| {
            sys::openat(groups.as_raw_fd(), &c(format!("qgroups/0_{}/{file}", upper.id)), libc::O_RDONLY, 0).ok()
        };
        let Some(limit) = open(&LIMIT) else { return Vec::new() };
        std::iter::once(limit).chain(USED.iter().filter_map(open)).collect()
    }

    /// The directory that holds what the sandbox wrote.
    pub fn open_upper(&self, slot: u32) -> Result<OwnedFd, Failure> {
        let path = c(format!("{}/u", name(slot)));
        sys::openat(self.root().as_raw_fd(), &path, libc::O_RDONLY | libc::O_DIRECTORY | libc::O_NOFOLLOW, 0)
            .at(STAGE, || format!("open upper of slot {slot}"))
    }

    /// Where every aether puts output that is too long for memory: a directory to make unnamed files in.
    pub fn spill(&self) -> &OwnedFd {
        match self {
            Uppers::Btrfs { spill, .. } | Uppers::Directory { spill, .. } => spill,
        }
    }

    /// Removes what a tenant wrote. The emptied subvolume is kept for the slot's next one if that took little: the kernel
    /// needs half a millisecond, later and in the background, for each subvolume that it has to destroy. What is left to do is
    /// for a thread.
    pub fn empty(&mut self, slot: u32, upper: Upper) -> Result<Option<Removal>, Failure> {
        let name = name(slot);
        let emptied = matches!(self, Uppers::Btrfs { .. })
            && self.open_slot(&name).is_ok_and(|own| clear(own.as_raw_fd(), &mut EMPTY_BY_HAND.clone()).is_ok());
        match self {
            Uppers::Btrfs { idle, .. } if emptied => {
                idle.insert(slot, upper);
                Ok(None)
            }
            _ => self.set_aside(slot).or_else(|_| self.remove(slot).map(|()| None)),
        }
    }

    /// Takes an upper out of the way, into a directory of its own: who removes what is in a directory holds its lock all the
    /// while. None when there is no such upper.
    fn set_aside(&mut self, slot: u32) -> Result<Option<Removal>, Failure> {
        let (name, aside) = (name(slot), format!("{ASIDE}{slot}"));
        let at = || format!("set upper {name} aside");
        let root = self.root().try_clone().map_err(Errno::from).at(STAGE, at)?;
        match sys::mkdirat(root.as_raw_fd(), &c(aside.as_str()), 0o700) {
            Err(Errno(libc::EEXIST)) => Ok(()),
            other => other.at(STAGE, at),
        }?;
        let target = c(format!("{aside}/{name}"));
        let fd = root.as_raw_fd();
        match unsafe { crate::sys!(SYS_renameat, fd, c(name.as_str()).as_ptr(), fd, target.as_ptr()) } {
            Ok(_) => Ok(Some(Removal { root, aside, name, btrfs: matches!(self, Uppers::Btrfs { .. }) })),
            Err(Errno(libc::ENOENT)) => {
                let _ = sys::unlinkat(fd, &c(aside.as_str()), libc::AT_REMOVEDIR);
                Ok(None)
            }
            Err(errno) => Err(errno).at(STAGE, at),
        }
    }

    /// Removes what an earlier launcher set aside and could not remove any more.
    fn remove_aside(&self) {
        let root = self.root();
        for (aside, _) in sys::list(root.as_raw_fd()).unwrap_or_default() {
            let Ok(aside) = aside.into_string() else { continue };
            let Some(slot) = aside.strip_prefix(ASIDE).and_then(|slot| slot.parse().ok()) else { continue };
            let Ok(root) = root.try_clone() else { continue };
            let removal = Removal { root, aside, name: name(slot), btrfs: matches!(self, Uppers::Btrfs { .. }) };
            if let Err(failure) = removal.run() {
                log(&failure);
            }
        }
    }

    /// Removes an upper; one that is not there is no error.
    pub fn remove(&mut self, slot: u32) -> Result<(), Failure> {
        let name = name(slot);
        let removed = match self {
            Uppers::Btrfs { root, idle, .. } => {
                idle.remove(&slot);
                btrfs::destroy_subvolume(root, &name)
            }
            Uppers::Directory { root, .. } => remove_tree(root.as_raw_fd(), &c(name.as_str())),
        };
        match removed {
            Err(Errno(libc::ENOENT)) => Ok(()),
            other => other.at(STAGE, || format!("remove upper {name}")),
        }
    }

    /// Removes what only waits to be used again.
    pub fn remove_idle(&mut self) {
        if let Uppers::Btrfs { root, idle, .. } = self {
            for (slot, _) in idle.drain() {
                let _ = btrfs::destroy_subvolume(root, &name(slot));
            }
        }
    }

    /// Slots that have an upper.
    pub fn slots(&self) -> Vec<u32> {
        let names = sys::list(self.root().as_raw_fd()).unwrap_or_default();
        let slots = names.iter().filter_map(|(name, _)| name.to_str().ok()?.strip_prefix('s')?.parse().ok());
        slots.filter(|slot| !matches!(self, Uppers::Btrfs { idle, .. } if idle.contains_key(slot))).collect()
    }

    /// Bytes in all and free.
    pub fn space(&self) -> (u64, u64) {
        let mut stat: libc::statfs = unsafe { std::mem::zeroed() };
        match unsafe { crate::sys!(SYS_fstatfs, self.root().as_raw_fd(), &raw mut stat) } {
            Ok(_) => (stat.f_blocks * stat.f_bsize as u64, stat.f_bavail * stat.f_bsize as u64),
            Err(_) => (0, 0),
        }
    }
}

/// An upper that is out of the way and has to go; may take its time.
pub struct Removal {
    root: OwnedFd,
    aside: String,
    name: String,
    btrfs: bool,
}

impl Removal {
    pub fn run(self) -> Result<(), Failure> {
        let (fd, aside) = (self.root.as_raw_fd(), c(self.aside.as_str()));
        let flags = libc::O_RDONLY | libc::O_DIRECTORY | libc::O_NOFOLLOW;
        let removed = sys::openat(fd, &aside, flags, 0).and_then(|directory| {
            match self.btrfs {
                true => btrfs::destroy_subvolume(&directory, &self.name),
                false => remove_tree(directory.as_raw_fd(), &c(self.name.as_str())),
            }
            .or_else(|errno| if errno == Errno(libc::ENOENT) { Ok(()) } else { Err(errno) })?;
            sys::unlinkat(fd, &aside, libc::AT_REMOVEDIR)
        });
        removed.at(STAGE, || format!("remove upper {}", self.name))
    }
}

/// What is removed one by one; a larger upper is destroyed whole. Freeing a file in a thousand pieces takes its time, in
/// which the launcher does nothing else.
const EMPTY_BY_HAND: Budget = Budget { entries: 48, blocks: (8 << 20) / 512 };

#[derive(Clone)]
struct Budget {
    entries: u32,
    /// Of 512 bytes, on disk.
    blocks: u64,
}

impl Budget {
    /// Counts one entry. E2BIG when it is one too many, or too large.
    fn take(&mut self, directory: RawFd, name: &CStr) -> sys::Result<()> {
        let mut stat: libc::stat = unsafe { std::mem::zeroed() };
        let flags = libc::AT_SYMLINK_NOFOLLOW;
        unsafe { crate::sys!(SYS_newfstatat, directory, name.as_ptr(), &raw mut stat, flags) }?;
        self.entries = self.entries.checked_sub(1).ok_or(Errno(libc::E2BIG))?;
        self.blocks = self.blocks.checked_sub(stat.st_blocks as u64).ok_or(Errno(libc::E2BIG))?;
        Ok(())
    }
}

/// Empties a directory that a sandbox has written, if it holds no more than `budget` (which it counts down); never
/// follows a link. E2BIG when it holds more.
fn clear(directory: RawFd, budget: &mut Budget) -> sys::Result<()> {
    let mut buffer = [0; 4096];
    loop {
        let n = unsafe { crate::sys!(SYS_getdents64, directory, buffer.as_mut_ptr(), buffer.len()) }?;
        if n == 0 {
            return Ok(());
        }
        for sys::Entry { name, kind, .. } in sys::entries(&buffer[..n]) {
            budget.take(directory, name)?;
            if kind != libc::DT_DIR {
                sys::unlinkat(directory, name, 0)?;
            } else if sys::unlinkat(directory, name, libc::AT_REMOVEDIR).is_err() {
                let flags = libc::O_RDONLY | libc::O_DIRECTORY | libc::O_NOFOLLOW;
                clear(sys::openat(directory, name, flags, 0)?.as_raw_fd(), budget)?;
                sys::unlinkat(directory, name, libc::AT_REMOVEDIR)?;
            }
        }
    }
}

/// Removes a tree of any depth that a sandbox has written, without following a link: directories that are not empty move up
/// to its top, one by one, until there is nothing left to move.
fn remove_tree(parent: RawFd, name: &CStr) -> sys::Result<()> {
    let flags = libc::O_RDONLY | libc::O_DIRECTORY | libc::O_NOFOLLOW;
    let top = sys::openat(parent, name, flags, 0)?;
    let mut moved = 0u64;
    loop {
        let entries = sys::list(top.as_raw_fd())?;
        if entries.is_empty() {
            return sys::unlinkat(parent, name, libc::AT_REMOVEDIR);
        }
        for (entry, kind) in entries {
            if kind != libc::DT_DIR {
                sys::unlinkat(top.as_raw_fd(), &entry, 0)?;
                continue;
            }
            let directory = sys::openat(top.as_raw_fd(), &entry, flags, 0)?;
            for (below, kind) in sys::list(directory.as_raw_fd())? {
                let (from, to) = (directory.as_raw_fd(), top.as_raw_fd());
                if kind != libc::DT_DIR {
                    sys::unlinkat(from, &below, 0)?;
                } else if sys::unlinkat(from, &below, libc::AT_REMOVEDIR).is_err() {
                    moved += 1;
                    let unique = c(format!(".removed-{moved}"));
                    unsafe { crate::sys!(SYS_renameat2, from, below.as_ptr(), to, unique.as_ptr(), RENAME_NOREPLACE) }?;
                }
            }
            sys::unlinkat(top.as_raw_fd(), &entry, libc::AT_REMOVEDIR)?;
        }
    }
}

const RENAME_NOREPLACE: u32 = 1;

#[cfg(test)]
mod tests {
    use super::*;

    fn scratch(name: &str) -> std::path::PathBuf {
        let path = std::env::temp_dir().join(format!("dsec-uppers-{}-{name}", std::process::id()));
        std::fs::create_dir(&path).unwrap();
        path
    }

    fn open(path: &std::path::Path) -> OwnedFd {
        std::fs::File::open(path).unwrap().into()
    }

    #[test]
    fn trees_of_any_depth_go_and_links_are_not_followed() {
        let scratch = scratch("deep");
        let kept = scratch.join("kept");
        std::fs::write(&kept, "x").unwrap();
        let mut here = open(&scratch);
        sys::mkdirat(here.as_raw_fd(), c"tree", 0o755).unwrap();
        here = sys::openat(here.as_raw_fd(), c"tree", libc::O_RDONLY, 0).unwrap();
        std::os::unix::fs::symlink("..", scratch.join("tree/up")).unwrap();
        std::fs::create_dir(scratch.join("tree/.removed-1")).unwrap();
        for _ in 0..3000 {
            sys::mkdirat(here.as_raw_fd(), c"d", 0o755).unwrap();
            here = sys::openat(here.as_raw_fd(), c"d", libc::O_RDONLY, 0).unwrap();
            drop(sys::openat(here.as_raw_fd(), c"file", libc::O_CREAT | libc::O_WRONLY, 0o600).unwrap());
        }
        remove_tree(open(&scratch).as_raw_fd(), c"tree").unwrap();
        assert!(kept.exists() && !scratch.join("tree").exists());
        std::fs::remove_dir_all(scratch).unwrap();
    }

    #[test]
    fn an_upper_is_out_of_the_way_before_it_is_removed() {
        let scratch = scratch("aside");
        let mut uppers = Uppers::Directory { root: open(&scratch), spill: open(&scratch) };
        for slot in [3, 4] {
            uppers.make(slot, 0).unwrap();
            std::fs::write(scratch.join(format!("s{slot}/u/file")), "x").unwrap();
        }
        let removal = uppers.empty(3, Upper { id: 0 }).unwrap().unwrap();
        assert_eq!(uppers.slots(), [4]);
        assert!(scratch.join("g3/s3/u/file").exists());
        removal.run().unwrap();
        drop(uppers.empty(4, Upper { id: 0 }).unwrap()); // a launcher that dies over it
        uppers.make(4, 0).unwrap();
        uppers.remove_aside();
        let left: Vec<_> = std::fs::read_dir(&scratch).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        assert_eq!(left, ["s4"]);
        assert!(uppers.empty(9, Upper { id: 0 }).unwrap().is_none());
        std::fs::remove_dir_all(scratch).unwrap();
    }

    #[test]
    fn clearing_by_hand_stops_at_its_budget() {
        let scratch = scratch("budget");
        std::fs::create_dir_all(scratch.join("a/b")).unwrap();
        for number in 0..20 {
            std::fs::write(scratch.join(format!("a/b/{number}")), "x").unwrap();
        }
        let cleared = |entries, blocks| clear(open(&scratch).as_raw_fd(), &mut Budget { entries, blocks });
        assert_eq!(cleared(10, 1 << 20), Err(Errno(libc::E2BIG)));
        std::fs::write(scratch.join("a/large"), vec![1; 1 << 20]).unwrap();
        assert_eq!(cleared(23, (1 << 20) / 512 - 1), Err(Errno(libc::E2BIG)));
        assert_eq!(cleared(23, 1 << 20), Ok(()));
        std::fs::remove_dir(scratch).unwrap();
    }
}
