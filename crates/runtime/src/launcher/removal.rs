//! Uppers with much in them are removed by a thread: the kernel forgets every name in them one by one, half a second for some
//! hundred thousand files, and nobody's creation is to wait for that.

use super::uppers::Removal;
use super::{log, Launcher};
use crate::sys::{self, At, Failure};
use std::collections::{HashSet, VecDeque};
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::mpsc::{channel, Receiver, Sender};

/// At work at once.
const THREADS: usize = 2;
const STACK: usize = 256 * 1024;

pub struct Removals {
    /// Written when one is done.
    bell: OwnedFd,
    sender: Sender<(u32, Result<(), Failure>)>,
    receiver: Receiver<(u32, Result<(), Failure>)>,
    busy: HashSet<u32>,
    at_work: usize,
    queue: VecDeque<(u32, Removal)>,
}

impl Removals {
    pub fn new(bell: &OwnedFd) -> Result<Self, Failure> {
        let (sender, receiver) = channel();
        let bell = bell.try_clone().map_err(sys::Errno::from).at("start", || "clone an eventfd".into())?;
        Ok(Removals { bell, sender, receiver, busy: HashSet::new(), at_work: 0, queue: VecDeque::new() })
    }

    /// Whether the slot's upper is not gone yet.
    pub fn is_busy(&self, slot: u32) -> bool {
        self.busy.contains(&slot)
    }

    pub fn begin(&mut self, slot: u32, removal: Removal) {
        self.busy.insert(slot);
        self.queue.push_back((slot, removal));
        self.start();
    }

    fn start(&mut self) {
        while self.at_work < THREADS {
            let Some((slot, removal)) = self.queue.pop_front() else { return };
            let (sender, bell) = (self.sender.clone(), self.bell.as_raw_fd());
            let work = move || {
                let _ = sender.send((slot, removal.run()));
                let _ = sys::write(bell, &1u64.to_ne_bytes()); // open as long as the launcher lives
            };
            self.at_work += 1;
            if std::thread::Builder::new().stack_size(STACK).spawn(work).is_err() {
                let failure = Failure::new("upper", "no thread to remove it; the next start does", libc::EAGAIN);
                let _ = self.sender.send((slot, Err(failure)));
                let _ = sys::write(self.bell.as_raw_fd(), &1u64.to_ne_bytes());
            }
        }
    }
}

impl Launcher {
    /// The ends of slots that waited for it go on.
    pub fn uppers_removed(&mut self) {
        while let Ok((slot, removed)) = self.removals.receiver.try_recv() {
            if let Err(failure) = removed {
                log(&failure);
            }
            self.removals.at_work -= 1;
            self.removals.busy.remove(&slot);
            self.tear_down(slot);
        }
        self.removals.start();
    }
}
