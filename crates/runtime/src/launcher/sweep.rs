//! Sandboxes of earlier launchers: taken over while they live, removed when nobody claims them.
//!
//! The directory of sockets is the record. `.s<slot>.<pid>.<start>` is the listening socket of a slot, and says which
//! process serves it; `<sandbox>.sock` is another name of it, given before PID 1 is told who it is.

use super::poller::Token;
use super::slot::{parse_socket_name, Promise, Slot};
use super::wire::{Reply, Request};
use super::{log, Launcher, Phase, Tenant};
use crate::cgroup::Limits;
use crate::sys::{self, c, now_us, process, At, Failure};
use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::AsRawFd;

/// A sweep that waits for the end of sandboxes of this launcher.
pub struct Sweep {
    request: i64,
    removed: BTreeMap<&'static str, u64>,
    waiting: BTreeSet<u32>,
}

/// Longest wait for what was killed to be gone.
const PATIENCE_US: u64 = 10_000_000;
const SUFFIX: &str = ".sock";

impl Launcher {
    /// At the start: claims the numbers of all that earlier launchers left, and takes over the sandboxes that live.
    pub fn adopt(&mut self) {
        for number in self.leftover_slots() {
            self.ids.reserve(number);
        }
        let found = self.sockets();
        for (link, inode) in &found.sandboxes {
            let Some(socket) = found.slots.get(inode) else { continue };
            let Some((number, pid, start)) = parse_socket_name(socket) else { continue };
            let Ok(upper) = self.tools.uppers.find(number) else { continue };
            let (pidfd, phase) = match process::open_started(pid, start) {
                Some(pidfd) if self.poller.add(pidfd.as_raw_fd(), Token::End(number)).is_ok() => (pidfd, Phase::Live),
                Some(_) => continue,
                // It ended while nobody looked. Its groups still tell how, until `stop`.
                None => match self.tools.null.try_clone() {
                    Ok(no_process) => (no_process, Phase::Ended),
                    Err(_) => continue,
                },
            };
            let name = link.trim_end_matches(SUFFIX).to_string();
            let slot = Slot::adopted(number, pid, start, pidfd, upper, socket.clone());
            self.names.insert(name.clone(), number);
            let sandbox = Some((name, link.clone()));
            self.tenants.insert(
                number,
                Tenant { slot, phase, sandbox, deadline: 0, child: false, kept: false, agent_oom: false },
            );
        }
    }

    /// Sandboxes that the edge knows, some at a time: no sweep removes them, and their PID 1s can ask again.
    pub fn keep(&mut self, request: &Request) -> Reply {
        let mut kept = Vec::with_capacity(request.keep_with.len());
        for (name, memory, cpu, pids, disk) in &request.keep_with {
            let Some(number) = self.names.get(name).copied() else { continue };
            let Some(tenant) = self.tenants.get_mut(&number) else { continue };
            tenant.kept = true; // one that ended too: `stop` will ask how
            if !matches!(tenant.phase, Phase::Live) {
                continue;
            }
            kept.push(name.clone());
            let promise = Promise { limits: Limits::new(*memory, *cpu, *pids), disk: *disk };
            self.usual = Some(promise);
            let handed = tenant.slot.succeed(promise).and_then(|handed| match &tenant.slot.control {
                Some(control) if handed => {
                    self.poller.add(control.as_raw_fd(), Token::Answer(number)).at("adopt", || "watch PID 1".into())
                }
                _ => Ok(()),
            });
            if let Err(failure) = handed {
                log(&failure); // its first command will say so
            }
        }
        Reply { kept: Some(kept), ..Reply::ok(request.id) }
    }

    /// Removes all that is not in `keep`: what earlier launchers left, at once; what is this launcher's, in its own time.
    pub fn sweep(&mut self, request: &Request) -> Result<Option<Reply>, Failure> {
        let keep: BTreeSet<&str> = request.keep.iter().map(String::as_str).collect();
        let mut sweep = Sweep { request: request.id, removed: BTreeMap::new(), waiting: BTreeSet::new() };
        let kept = |number: &u32| self.tenants.get(number).is_some_and(|tenant| tenant.kept);
        let unwanted = self.names.iter().filter(|(name, number)| !keep.contains(name.as_str()) && !kept(number));
        let unwanted: Vec<u32> = unwanted.map(|(_, number)| *number).collect();
        for number in unwanted {
            self.dispose(number);
            sweep.count("sandboxes", 1);
            if self.tenants.contains_key(&number) {
                sweep.waiting.insert(number);
            }
        }
        self.sweep_processes(&mut sweep);
        for number in self.leftover_slots() {
            self.sweep_slot(number, &mut sweep)?;
        }
        if sweep.waiting.is_empty() {
            return Ok(Some(Reply { removed: Some(sweep.removed), ..Reply::ok(request.id) }));
        }
        self.sweeps.push(sweep);
        Ok(None)
    }

    /// A slot of this launcher is gone: is a sweep done by that?
    pub fn check_sweeps(&mut self, number: u32) {
        let control = &mut self.control;
        self.sweeps.retain_mut(|sweep| {
            sweep.waiting.remove(&number);
            if sweep.waiting.is_empty() {
                let removed = Some(std::mem::take(&mut sweep.removed));
                control.send(&Reply { removed, ..Reply::ok(sweep.request) }, None);
            }
            !sweep.waiting.is_empty()
        });
    }

    /// Whether this launcher has a use for the slot, be it one that is only being made.
    fn is_ours(&self, slot: u32) -> bool {
        self.tenants.contains_key(&slot) || self.begun.iter().any(|begun| begun.number == slot)
    }

    /// Slots with groups, an upper or a socket that are not ours.
    fn leftover_slots(&self) -> BTreeSet<u32> {
        let mut slots: BTreeSet<u32> = self.tools.cgroups.slots().into_iter().collect();
        slots.extend(self.tools.uppers.slots());
        slots.extend(self.sockets().slots.values().filter_map(|name| parse_socket_name(name)).map(|(slot, _, _)| slot));
        slots.retain(|slot| !self.is_ours(*slot));
        slots
    }

    /// Kills the PID 1s that nobody has, and removes their sockets and the names of sandboxes that have none.
    fn sweep_processes(&mut self, sweep: &mut Sweep) {
        let Sockets { slots, sandboxes } = self.sockets();
        let named = slots.iter().filter_map(|(inode, name)| Some((*inode, parse_socket_name(name)?)));
        let ours: BTreeSet<u64> =
            named.clone().filter(|(_, (slot, _, _))| self.is_ours(*slot)).map(|(i, _)| i).collect();
        for (_, (_, pid, start)) in named.filter(|(inode, _)| !ours.contains(inode)) {
            if let Some(pidfd) = process::open_started(pid, start) {
                let _ = process::send_signal(&pidfd, libc::SIGKILL);
                process::wait_readable(&pidfd, PATIENCE_US);
                sweep.count("processes", 1);
            }
        }
        let names = slots.into_iter().chain(sandboxes.into_iter().map(|(name, inode)| (inode, name)));
        for (_, name) in names.filter(|(inode, _)| !ours.contains(inode)) {
            let _ = sys::unlinkat(self.tools.sockets.as_raw_fd(), &c(name), 0);
            sweep.count("sockets", 1);
        }
    }

    /// Kills what is in a slot's groups and removes groups and upper.
    fn sweep_slot(&mut self, number: u32, sweep: &mut Sweep) -> Result<(), Failure> {
        sweep.count("uppers", u64::from(self.tools.uppers.find(number).is_ok()));
        let deadline = now_us() + PATIENCE_US;
        loop {
            let killed = self.tools.cgroups.kill_all(number);
            if self.tools.cgroups.remove(number)? {
                break;
            }
            if now_us() > deadline {
                let text = format!("groups of slot {number} are still busy ({killed} processes killed)");
                return Err(Failure::new("sweep", text, libc::EBUSY));
            }
            self.poller.pause_ms(1);
        }
        sweep.count("groups", 1);
        self.tools.uppers.remove(number)?;
        self.ids.give_back(number);
        Ok(())
    }

    fn sockets(&self) -> Sockets {
        let mut found = Sockets::default();
        for (name, inode) in sys::list_files(self.tools.sockets.as_raw_fd()).unwrap_or_default() {
            match name.into_string() {
                Ok(name) if name.ends_with(SUFFIX) => found.sandboxes.push((name, inode)),
                Ok(name) if parse_socket_name(&name).is_some() => drop(found.slots.insert(inode, name)),
                _ => {} // none of ours
            }
        }
        found
    }
}

/// What is in the directory of sockets, by the numbers of the files.
#[derive(Default)]
struct Sockets {
    slots: BTreeMap<u64, String>,
    sandboxes: Vec<(String, u64)>,
}

impl Sweep {
    fn count(&mut self, kind: &'static str, number: u64) {
        *self.removed.entry(kind).or_default() += number;
    }
}
