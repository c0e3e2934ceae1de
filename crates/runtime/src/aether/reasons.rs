//! Which limit of the sandbox a failed command met, from the kernel's counters of the whole sandbox.
//!
//! The counters are read when a command starts and when it ends. Only a command that failed has a reason, and only for what
//! was counted while it ran. Kills for want of memory are given to one command each: to the only one that ran, or to
//! one that had come to a size which the kernel may choose, so that `kill -9` beside somebody else's end is not taken for one.

use super::os;

/// In the presence of other commands a victim has at least this part of the memory limit, within these bounds.
const VICTIM_SHARE: u64 = 16;
const VICTIM_LEAST: u64 = 8 << 20;
const VICTIM_MOST_SHARE: u64 = 4;
/// A write fails when it does not fit, not only when nothing does: this close to the limit the disk counts as full.
const DISK_SLACK: u64 = 128 << 10;
static ZEROS: [u8; DISK_SLACK as usize] = [0; DISK_SLACK as usize];

/// Files of the kernel, in the order in which the launcher gives them; the last ones only where uppers have quotas.
pub const MEMORY_EVENTS: usize = 0;
pub const MEMORY_LIMIT: usize = 1;
pub const PIDS_EVENTS: usize = 2;
pub const DISK_LIMIT: usize = 3;
pub const DISK_USED: usize = 4;

/// What was counted when a command started.
#[derive(Clone, Copy, Default)]
pub struct Seen {
    kills: u64,
    refused: u64,
}

/// How a command ended, as far as it matters here.
pub struct End {
    pub failed: bool,
    /// The client itself killed it.
    pub asked: bool,
    /// No other command's process lived meanwhile.
    pub alone: bool,
    /// The most memory that it or a child it waited for had at once, bytes.
    pub peak: u64,
}

/// A limit's name in results, and how much: processes killed, forks refused, bytes on disk.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Reason {
    pub name: &'static str,
    pub amount: u64,
}

pub struct Reasons {
    /// Kills up to this count have found their command.
    explained: u64,
    /// Whether the disk takes no more.
    refuses: fn() -> bool,
}

impl Default for Reasons {
    fn default() -> Reasons {
        Reasons { explained: 0, refuses }
    }
}

/// The number in a file, behind a word when there is one.
fn number(file: Option<&i32>, word: &str) -> Option<u64> {
    let mut text = [0; 256];
    let size = os::pread(*file?, &mut text, 0).ok()?;
    let text = std::str::from_utf8(&text[..size]).ok()?;
    text.lines().find_map(|line| line.strip_prefix(word)?.trim().parse().ok())
}

pub fn look(files: &[i32]) -> Seen {
    let kills = number(files.get(MEMORY_EVENTS), "oom_kill ").unwrap_or(0);
    Seen { kills, refused: number(files.get(PIDS_EVENTS), "max ").unwrap_or(0) }
}

/// What was removed is counted until the next commit, so a full disk is believed only when it takes no more.
fn full_disk(files: &[i32], is_refused: fn() -> bool) -> Option<Reason> {
    let limit = number(files.get(DISK_LIMIT), "").filter(|limit| *limit > 0)?;
    let used: u64 = files.get(DISK_USED..)?.iter().filter_map(|file| number(Some(file), "")).sum();
    (used + DISK_SLACK >= limit && is_refused()).then_some(Reason { name: "disk_full", amount: used })
}

/// Whether a file without a name can be made and written. The kernel commits what it has before it refuses.
fn refuses() -> bool {
    let full = |result: os::Result<()>| matches!(result, Err(libc::EDQUOT | libc::ENOSPC));
    match os::open(libc::AT_FDCWD, c"/", libc::O_TMPFILE | libc::O_WRONLY, 0o600, 0) {
        Ok(file) => full(os::write_all(file.0, &ZEROS)),
        Err(errno) => full(Err(errno)),
    }
}

impl Reasons {
    /// Of a command that has ended just now.
    pub fn of(&mut self, files: &[i32], start: Seen, end: &End) -> Option<Reason> {
        let now = look(files);
        let kills = now.kills.saturating_sub(start.kills.max(self.explained));
        let limit = || number(files.get(MEMORY_LIMIT), "").unwrap_or(u64::MAX);
        let killed = kills > 0 && (end.alone || end.peak >= least_victim(limit()));
        if killed {
            self.explained = now.kills;
        }
        if !end.failed || end.asked {
            return None;
        }
        if killed {
            return Some(Reason { name: "oom", amount: kills });
        }
        if now.refused > start.refused {
            return Some(Reason { name: "pids", amount: now.refused - start.refused });
        }
        full_disk(files, self.refuses)
    }

    /// A process without a command's main process to wait for it was killed by somebody: the kernel's doing if it was large.
    pub fn orphan(&mut self, files: &[i32], peak: u64) {
        let now = look(files).kills;
        if now > self.explained && peak >= least_victim(number(files.get(MEMORY_LIMIT), "").unwrap_or(u64::MAX)) {
            self.explained = now;
        }
    }
}

fn least_victim(limit: u64) -> u64 {
    (limit / VICTIM_SHARE).max(VICTIM_LEAST).min(limit / VICTIM_MOST_SHARE)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write as _;
    use std::os::fd::IntoRawFd;

    struct Kernel(Vec<std::fs::File>, Vec<i32>);

    impl Kernel {
        fn new(texts: &[&str]) -> Kernel {
            let file = |name: &str| {
                let path = std::env::temp_dir().join(format!("dsec-reasons-{}-{name}", std::process::id()));
                let file =
                    std::fs::OpenOptions::new().read(true).write(true).create_new(true).open(&path).expect("file");
                std::fs::remove_file(path).expect("remove");
                file
            };
            let name = |i: usize| format!("{:p}-{i}", texts);
            let files: Vec<_> = (0..texts.len()).map(|i| file(&name(i))).collect();
            let fds = files.iter().map(|file| file.try_clone().expect("clone").into_raw_fd()).collect();
            let kernel = Kernel(files, fds);
            texts.iter().enumerate().for_each(|(i, text)| kernel.set(i, text));
            kernel
        }

        fn set(&self, file: usize, text: &str) {
            use std::os::unix::fs::FileExt as _;
            self.0[file].set_len(0).expect("truncate");
            self.0[file].write_all_at(text.as_bytes(), 0).expect("write");
            (&self.0[file]).flush().expect("flush");
        }
    }

    fn kernel() -> Kernel {
        Kernel::new(&[
            "oom_kill_disable 0\nunder_oom 0\noom_kill 3\n",
            "67108864\n",
            "max 0\n",
            "41943040\n",
            "4096",
            "0",
        ])
    }

    const FAILED: End = End { failed: true, asked: false, alone: true, peak: 4 << 20 };

    #[test]
    fn only_what_grew_while_it_ran_counts() {
        let (kernel, mut reasons) = (kernel(), Reasons::default());
        let start = look(&kernel.1);
        assert_eq!(reasons.of(&kernel.1, start, &FAILED), None, "three kills of before");
        kernel.set(MEMORY_EVENTS, "oom_kill 5\n");
        let end = End { failed: false, ..FAILED };
        assert_eq!(reasons.of(&kernel.1, start, &end), None);
        assert_eq!(reasons.of(&kernel.1, start, &FAILED), None, "the one that did not mind had them");
        kernel.set(MEMORY_EVENTS, "oom_kill 6\n");
        let asked = End { asked: true, ..FAILED };
        assert_eq!(reasons.of(&kernel.1, start, &asked), None);
    }

    #[test]
    fn a_kill_belongs_to_one_command_and_that_was_large_or_alone() {
        let (kernel, mut reasons) = (kernel(), Reasons::default());
        let start = look(&kernel.1);
        kernel.set(MEMORY_EVENTS, "oom_kill 4\n");
        let small = End { alone: false, ..FAILED };
        assert_eq!(reasons.of(&kernel.1, start, &small), None, "a user's own kill -9 beside a hog");
        let large = End { alone: false, peak: 50 << 20, ..FAILED };
        assert_eq!(reasons.of(&kernel.1, start, &large), Some(Reason { name: "oom", amount: 1 }));
        assert_eq!(reasons.of(&kernel.1, start, &large), None, "given already");
        kernel.set(MEMORY_EVENTS, "oom_kill 5\n");
        reasons.orphan(&kernel.1, 1 << 20);
        assert_eq!(reasons.of(&kernel.1, start, &FAILED), Some(Reason { name: "oom", amount: 1 }));
        kernel.set(MEMORY_EVENTS, "oom_kill 6\n");
        reasons.orphan(&kernel.1, 50 << 20);
        assert_eq!(reasons.of(&kernel.1, start, &FAILED), None);
    }

    #[test]
    fn refused_forks_and_a_full_disk() {
        let (kernel, mut reasons) = (kernel(), Reasons::default());
        let start = look(&kernel.1);
        kernel.set(DISK_USED, "41900000");
        reasons.refuses = || false;
        assert_eq!(reasons.of(&kernel.1, start, &FAILED), None, "what was removed still counts for a while");
        reasons.refuses = || true;
        assert_eq!(reasons.of(&kernel.1, start, &FAILED), Some(Reason { name: "disk_full", amount: 41_900_000 }));
        kernel.set(PIDS_EVENTS, "max 7\n");
        assert_eq!(reasons.of(&kernel.1, start, &FAILED), Some(Reason { name: "pids", amount: 7 }));
        assert_eq!(reasons.of(&[], start, &FAILED), None, "a machine that counts nothing");
    }
}
