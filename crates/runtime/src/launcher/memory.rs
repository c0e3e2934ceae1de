//! Memory of paused sandboxes: given back at a pause (`reclaim`), brought in again at the resume (`prefetch`).
//!
//! Both take as long as the swap device does, so they are done by a few threads of their own: the launcher goes on. A job
//! ends early when its sandbox is thawed or removed; a slot's groups are not removed while one is at work on them, since
//! the kernel would hold the launcher until it is through.

use super::verbs::Answer;
use super::wire::{Reclaimed, Reply, Request, Verb};
use super::{log, Launcher, Phase};
use crate::cgroup::Members;
use crate::sys::pages::{self, Advice, Range};
use crate::sys::{self, process, At, Failure};
use std::collections::{HashMap, VecDeque};
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{channel, Receiver, Sender};
use std::sync::Arc;
use std::time::Duration;

/// Jobs at work at once: they wait for the disk more than they compute.
const THREADS: usize = 2;
const STACK: usize = 256 * 1024;
/// What is let go in one call, so that a job can end between two.
const CHUNK: u64 = 16 << 20;
/// What is asked for in one call once the first bytes are on their way, and the pause after it: pages that a process waits
/// for must not stand behind all the others in the disk's queue.
const PREFETCH_FIRST: u64 = 8 << 20;
const PREFETCH_CHUNK: u64 = 2 << 20;
const PREFETCH_PAUSE: Duration = Duration::from_millis(2);
/// The most of a sandbox that a resume brings in ahead; the rest comes as it is touched.
const PREFETCH_MOST: u64 = 256 << 20;
/// The same while so many others wait for theirs: a crowd that resumes together is served by what each needs first, and
/// reading all that they ever had would hold up the first answer of every one of them.
const CROWD: usize = 4;
const PREFETCH_IN_A_CROWD: u64 = 1 << 20;
/// Ranges remembered of one process, and of all of a sandbox.
const RANGES: usize = 4096;
const NOTE_RANGES: usize = 8192;

/// What was in memory at the pause, by process: what a resume will need.
type Note = Vec<Remembered>;

struct Remembered {
    pid: i32,
    start: u64,
    ranges: Vec<Range>,
}

struct Job {
    request: i64,
    slot: u32,
    /// PID 1, whose memory is not the sandbox's.
    pid1: i32,
    members: Members,
    /// For a prefetch: what to bring in, and the most of it.
    note: Option<Note>,
    most: u64,
    cancelled: Arc<AtomicBool>,
}

struct Done {
    request: i64,
    slot: u32,
    answer: Reclaimed,
    note: Option<Note>,
}

pub struct Memory {
    /// Readable when a job is done.
    bell: OwnedFd,
    sender: Sender<Done>,
    receiver: Receiver<Done>,
    /// Of the slots with a job that waits or is at work: how to end it.
    busy: HashMap<u32, Arc<AtomicBool>>,
    at_work: usize,
    queue: VecDeque<Job>,
    notes: HashMap<u32, Note>,
}

impl Memory {
    pub fn new() -> Result<Self, Failure> {
        let (sender, receiver) = channel();
        let bell = pages::eventfd().at("start", || "make an eventfd".into())?;
        let (busy, notes, queue) = (HashMap::new(), HashMap::new(), VecDeque::new());
        Ok(Memory { bell, sender, receiver, busy, at_work: 0, queue, notes })
    }

    pub fn fd(&self) -> RawFd {
        self.bell.as_raw_fd()
    }

    /// For other threads: `memory_moved` looks after them, too.
    pub fn bell(&self) -> &OwnedFd {
        &self.bell
    }

    pub fn is_busy(&self, slot: u32) -> bool {
        self.busy.contains_key(&slot)
    }

    /// The slot's job, if there is one, ends as soon as it can.
    pub fn cancel(&self, slot: u32) {
        if let Some(cancelled) = self.busy.get(&slot) {
            cancelled.store(true, Ordering::Relaxed);
        }
    }

    pub fn cancel_all(&self) {
        self.busy.values().for_each(|cancelled| cancelled.store(true, Ordering::Relaxed));
    }

    pub fn forget(&mut self, slot: u32) {
        self.notes.remove(&slot);
    }

    fn start_jobs(&mut self) {
        while self.at_work < THREADS {
            let Some(mut job) = self.queue.pop_front() else { return };
            job.most = if self.queue.len() < CROWD { PREFETCH_MOST } else { PREFETCH_IN_A_CROWD };
            let (request, slot, sender) = (job.request, job.slot, self.sender.clone());
            let Ok(bell) = self.bell.try_clone() else { return self.queue.push_front(job) };
            let work = move || {
                let _ = sender.send(job.run());
                let _ = sys::write(bell.as_raw_fd(), &1u64.to_ne_bytes());
            };
            self.at_work += 1;
            if std::thread::Builder::new().stack_size(STACK).spawn(work).is_err() {
                // Nothing was moved; that is the truth, and the sandbox is paused all the same.
                let _ = self.sender.send(Done { request, slot, answer: Reclaimed::default(), note: None });
                let _ = sys::write(self.bell.as_raw_fd(), &1u64.to_ne_bytes());
            }
        }
    }
}

impl Launcher {
    /// `reclaim`, `prefetch`: answered when the job is done.
    pub fn move_memory(&mut self, request: &Request) -> Answer {
        let slot = self.find(&request.sandbox)?;
        let Some(tenant) = self.tenants.get(&slot) else { return Ok(Some(Reply::ok(request.id))) };
        if !matches!(tenant.phase, Phase::Live) || self.memory.is_busy(slot) {
            return Err(Failure::new("memory", "the sandbox's memory is being moved, or it ends", libc::EBUSY));
        }
        let note = match request.v {
            Some(Verb::Prefetch) => Some(self.memory.notes.remove(&slot).unwrap_or_default()),
            _ => None,
        };
        let members = self.tools.cgroups.members(slot)?;
        let cancelled = Arc::new(AtomicBool::new(false));
        self.memory.busy.insert(slot, cancelled.clone());
        let job =
            Job { request: request.id, slot, pid1: tenant.slot.pid, members, note, most: PREFETCH_MOST, cancelled };
        self.memory.queue.push_back(job);
        self.memory.start_jobs();
        Ok(None)
    }

    pub fn memory_moved(&mut self) {
        let mut count = [0; 8];
        let _ = sys::read(self.memory.bell.as_raw_fd(), &mut count);
        while let Ok(Done { request, slot, answer, note }) = self.memory.receiver.try_recv() {
            self.memory.at_work -= 1;
            self.memory.busy.remove(&slot);
            if let Some(note) = note {
                self.memory.notes.insert(slot, note);
            }
            self.control.send(&Reply { reclaimed: Some(answer), ..Reply::ok(request) }, None);
            self.tear_down(slot); // which waits for this, if it has begun
        }
        self.memory.start_jobs();
        self.uppers_removed();
    }
}

impl Job {
    fn run(self) -> Done {
        let Job { request, slot, .. } = self;
        if self.note.is_some() {
            return Done { request, slot, answer: self.prefetch(), note: None };
        }
        let (answer, note) = self.reclaim();
        Done { request, slot, answer, note: Some(note) }
    }

    fn goes_on(&self) -> bool {
        !self.cancelled.load(Ordering::Relaxed)
    }

    /// Process by process first, which is quick and tells what was there; then what the group still has: files, shared
    /// memory, pages of several processes.
    fn reclaim(&self) -> (Reclaimed, Note) {
        let before = self.members.memory();
        let (mut note, mut remembered) = (Note::new(), 0);
        for pid in self.members.processes().into_iter().filter(|pid| *pid != self.pid1) {
            let Ok(pidfd) = process::pidfd_open(pid) else { continue };
            let Ok(ranges) = pages::present(pid, RANGES) else { continue };
            let Ok(start) = process::start_time(pid) else { continue };
            if process::send_signal(&pidfd, 0).is_err() {
                continue; // it has ended, and the ranges may be those of another one of its number
            }
            self.let_go(&pidfd, &ranges);
            remembered += ranges.len();
            if remembered <= NOTE_RANGES {
                note.push(Remembered { pid, start, ranges });
            }
        }
        if self.goes_on() {
            if let Err(failure) = self.members.reclaim() {
                log(&failure);
            }
        }
        let (before, after) = (before, self.members.memory());
        (Reclaimed { before, after, swap: self.members.swap(), prefetched: 0 }, note)
    }

    /// Small ranges first: stacks, the libraries' data, what every program needs to do anything.
    fn prefetch(&self) -> Reclaimed {
        let before = self.members.memory();
        let processes = self.note.iter().flatten();
        let opened = processes.filter_map(|p| Some((process::open_started(p.pid, p.start)?, &p.ranges)));
        let opened: Vec<_> = opened.collect();
        let mut ranges: Vec<_> = opened.iter().flat_map(|(pidfd, all)| all.iter().map(move |r| (r, pidfd))).collect();
        ranges.sort_by_key(|(range, _)| range.length);
        let mut asked = 0;
        for (range, pidfd) in ranges {
            asked += self.ask_for(pidfd, *range, asked);
        }
        Reclaimed { before, after: self.members.memory(), swap: self.members.swap(), prefetched: asked as i64 }
    }

    fn let_go(&self, pidfd: &OwnedFd, ranges: &[Range]) {
        for chunk in ranges.iter().flat_map(|range| chunks(*range, CHUNK)) {
            if !self.goes_on() {
                return;
            }
            match pages::advise(pidfd, chunk, Advice::PageOut) {
                Err(error) if pages::is_gone(error) => return,
                _ => {} // mappings that cannot be advised stay as they are
            }
        }
    }

    /// How many bytes were asked for, after so many others.
    fn ask_for(&self, pidfd: &OwnedFd, range: Range, before: u64) -> u64 {
        let mut asked = 0;
        for chunk in chunks(range, PREFETCH_CHUNK) {
            if !self.goes_on() || before + asked + chunk.length > self.most {
                break;
            }
            let _ = pages::advise(pidfd, chunk, Advice::WillNeed);
            asked += chunk.length;
            if before + asked > PREFETCH_FIRST && chunk.length == PREFETCH_CHUNK {
                std::thread::sleep(PREFETCH_PAUSE);
            }
        }
        asked
    }
}

fn chunks(range: Range, most: u64) -> impl Iterator<Item = Range> {
    let starts = (0..range.length).step_by(most as usize);
    starts.map(move |at| Range { start: range.start + at, length: most.min(range.length - at) })
}
