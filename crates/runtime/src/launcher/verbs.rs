//! The edge's requests.

use super::slot::Promise;
use super::wire::{Reply, Request, UppersStatus, Verb};
use super::{Entering, Launcher, Phase};
use crate::birth::Birth;
use crate::cgroup::{Kind, Limits};
use crate::sys::{c, now_us, At, Failure};
use std::collections::BTreeMap;
use std::os::fd::{AsRawFd, OwnedFd};

/// A freeze or thaw whose processes have not all followed yet.
pub struct Freeze {
    request: i64,
    slot: u32,
    frozen: bool,
    deadline: u64,
}

/// What a verb is answered with; nothing yet when it is answered by an event.
pub type Answer = Result<Option<Reply>, Failure>;

const FREEZE_DEADLINE_US: u64 = 10_000_000;

/// Names become file names and parts of messages.
fn valid_name(name: &str) -> bool {
    let plain = |b: u8| b.is_ascii_alphanumeric() || b == b'-' || b == b'_';
    (1..=64).contains(&name.len()) && name.bytes().all(plain)
}

impl Launcher {
    pub fn serve(&mut self, request: Box<Request>, fds: Vec<OwnedFd>) {
        let id = request.id;
        let done = match request.v {
            Some(Verb::Create) => return self.create(request),
            Some(Verb::Layer) => self.layer(&request, fds),
            Some(Verb::Unlayer) => {
                self.layers.remove(&request.digest);
                Ok(Some(Reply::ok(id)))
            }
            Some(Verb::Stop) => self.stop(&request),
            Some(Verb::Usage) => self.find(&request.sandbox).map(|slot| self.usage(id, slot)),
            Some(Verb::Upper) => self.upper(&request),
            Some(Verb::Freeze) => self.freeze(&request, true),
            Some(Verb::Thaw) => self.freeze(&request, false),
            Some(Verb::Reclaim | Verb::Prefetch) => self.move_memory(&request),
            Some(Verb::Kill) => self
                .find(&request.sandbox)
                .and_then(|slot| self.tools.cgroups.kill_commands(slot))
                .map(|()| Some(Reply::ok(id))),
            Some(Verb::Keep) => Ok(Some(self.keep(&request))),
            Some(Verb::Sweep) => self.sweep(&request),
            Some(Verb::Status) => Ok(Some(self.status(id))),
            None => Err(Failure::new("request", "no verb", libc::EINVAL)),
        };
        match done {
            Ok(Some(reply)) => self.control.send(&reply, None),
            Ok(None) => {} // answered, or to be answered by an event
            Err(failure) => self.control.send(&Reply::failed(id, &failure), None),
        }
    }

    pub fn find(&self, sandbox: &str) -> Result<u32, Failure> {
        let found = self.names.get(sandbox).copied();
        found.ok_or_else(|| Failure::new("unknown", format!("no sandbox {sandbox:?} here"), libc::ENOENT))
    }

    fn layer(&mut self, request: &Request, fds: Vec<OwnedFd>) -> Result<Option<Reply>, Failure> {
        let fd = fds.into_iter().next();
        let fd = fd.ok_or_else(|| Failure::new("layers", "the message has no descriptor", libc::EBADF))?;
        self.layers.insert(request.digest.clone(), fd);
        Ok(Some(Reply::ok(request.id)))
    }

    /// Checks what can be checked at once, then takes a slot or waits for one.
    fn create(&mut self, request: Box<Request>) {
        if let Err(failure) = self.check(&request) {
            return self.control.send(&Reply::failed(request.id, &failure), None);
        }
        self.refill_failed = false;
        self.last_create_us = now_us();
        if self.pool.is_empty() {
            self.queue.push_back((request, now_us()));
        } else {
            self.create_in_slot(*request, now_us());
        }
    }

    fn check(&self, request: &Request) -> Result<(), Failure> {
        let name = &request.sandbox;
        let wrong = |text: String, errno| Err(Failure::new("request", text, errno));
        if !valid_name(name) {
            return wrong(format!("{name:?} is no name of a sandbox"), libc::EINVAL);
        }
        let queued = self.queue.iter().any(|(waiting, _)| waiting.sandbox == *name);
        if queued || self.names.contains_key(name) {
            return wrong(format!("{name} exists"), libc::EEXIST);
        }
        let count = request.layers.len();
        if !(1..=super::root::MAX_LAYERS).contains(&count) {
            return wrong(format!("{count} layers; 1 to {} are possible", super::root::MAX_LAYERS), libc::EINVAL);
        }
        if let Some(digest) = request.layers.iter().find(|digest| !self.layers.contains_key(*digest)) {
            return Err(Failure::new(
                "layers",
                format!("layer {digest} is not known here; send it first"),
                libc::ENOENT,
            ));
        }
        if self.socket_name(&request.socket).is_none() {
            return wrong(format!("{:?} is not a file in {}/sb", request.socket, self.run), libc::EINVAL);
        }
        if !valid_hostname(&request.hostname) {
            return wrong(format!("{:?} is no host name", request.hostname), libc::EINVAL);
        }
        Ok(())
    }

    /// The file name of a socket that lies in the sockets' directory.
    fn socket_name(&self, path: &str) -> Option<String> {
        let name = path.strip_prefix(self.run.as_str())?.strip_prefix("/sb/")?;
        let fits = !name.is_empty() && !name.starts_with('.') && !name.contains(['/', '\0']);
        fits.then(|| name.to_string())
    }

    /// There is a slot in the pool.
    pub fn create_in_slot(&mut self, request: Request, received_us: u64) {
        let Some(number) = self.pool.pop_front() else { return };
        let id = request.id;
        if let Err(failure) = self.bear(number, request, received_us) {
            self.control.send(&Reply::failed(id, &failure), None);
            self.dispose(number);
        }
    }

    fn bear(&mut self, number: u32, request: Request, received_us: u64) -> Result<(), Failure> {
        let lost = || Failure::new("slot", "the slot is gone", libc::ESRCH);
        let promise = Promise { limits: Limits::new(request.memory, request.cpu, request.pids), disk: request.disk };
        self.usual = Some(promise);
        let link = self.socket_name(&request.socket).ok_or_else(lost)?;
        let tenant = self.tenants.get_mut(&number).ok_or_else(lost)?;
        let (socket, name) = (c(tenant.slot.socket.as_str()), c(link.as_str()));
        let sockets = self.tools.sockets.as_raw_fd();
        unsafe { crate::sys!(SYS_linkat, sockets, socket.as_ptr(), sockets, name.as_ptr(), 0) }
            .at("socket", || format!("link {}", request.socket))?;
        tenant.sandbox = Some((request.sandbox.clone(), link));
        self.names.insert(request.sandbox.clone(), number);
        let layers: Vec<&OwnedFd> = request.layers.iter().filter_map(|digest| self.layers.get(digest)).collect();
        if layers.len() != request.layers.len() {
            return Err(Failure::new("layers", "a layer was withdrawn while the creation waited", libc::ENOENT));
        }
        let hostname = if request.hostname.is_empty() { request.sandbox.clone() } else { request.hostname };
        let birth = Birth {
            hostname,
            sandbox: request.sandbox,
            incarnation: request.incarnation,
            layers: layers.len() as u32,
            has_cgroup2: false,
            init_user: request.init_user,
            env: request.env,
            workdir: request.workdir.unwrap_or_default(),
            max_output: request.max_output,
        };
        tenant.slot.bear(&self.tools, &layers, promise, birth)?;
        tenant.phase = Phase::Entering(Entering { request: request.id, received_us, sent_us: now_us() });
        self.entering += 1;
        self.set_deadline(number);
        Ok(())
    }

    /// Answered when all is gone. A creation under way is undone and answered as failed.
    fn stop(&mut self, request: &Request) -> Result<Option<Reply>, Failure> {
        let undone = Failure::new("stopped", "stopped while it was being created", libc::ECANCELED);
        if let Some(at) = self.queue.iter().position(|(waiting, _)| waiting.sandbox == request.sandbox) {
            if let Some((waiting, _)) = self.queue.remove(at) {
                self.control.send(&Reply::failed(waiting.id, &undone), None);
            }
            return Ok(Some(Reply::ok(request.id)));
        }
        let number = self.find(&request.sandbox)?;
        let Some(tenant) = self.tenants.get_mut(&number) else { return Ok(Some(Reply::ok(request.id))) };
        if let Phase::Entering(entering) = &tenant.phase {
            self.control.send(&Reply::failed(entering.request, &undone), None);
        }
        self.dispose_for(number, Some(request.id));
        Ok(None)
    }

    fn usage(&self, id: i64, slot: u32) -> Option<Reply> {
        let mut usage = self.tools.cgroups.usage(slot);
        usage.disk = self.tenants.get(&slot).map_or(-1, |tenant| self.tools.uppers.usage(tenant.slot.upper));
        Some(Reply { usage: Some(usage), ..Reply::ok(id) })
    }

    fn upper(&mut self, request: &Request) -> Result<Option<Reply>, Failure> {
        let directory = self.tools.uppers.open_upper(self.find(&request.sandbox)?)?;
        self.control.send(&Reply::ok(request.id), Some(directory));
        Ok(None)
    }

    fn freeze(&mut self, request: &Request, frozen: bool) -> Result<Option<Reply>, Failure> {
        let slot = self.find(&request.sandbox)?;
        self.memory.cancel(slot);
        if !frozen {
            self.tools.cgroups.forbid_swap(slot);
        }
        self.tools.cgroups.freeze(slot, frozen)?;
        self.freezes.push(Freeze { request: request.id, slot, frozen, deadline: now_us() + FREEZE_DEADLINE_US });
        self.check_freezes(now_us());
        Ok(None)
    }

    /// Answers the freezes and thaws that have taken hold, or never will.
    pub fn check_freezes(&mut self, now: u64) {
        let (cgroups, control, tenants) = (&self.tools.cgroups, &mut self.control, &self.tenants);
        self.freezes.retain(|freeze| {
            if cgroups.frozen(freeze.slot) == freeze.frozen {
                control.send(&Reply::ok(freeze.request), None);
                return false;
            }
            if !tenants.get(&freeze.slot).is_some_and(|tenant| matches!(tenant.phase, Phase::Live)) {
                let failure = Failure::new("freeze", "the sandbox has ended", libc::ESRCH);
                control.send(&Reply::failed(freeze.request, &failure), None);
                return false;
            }
            if freeze.deadline <= now {
                let failure = Failure::new("freeze", "processes did not stop in 10 s", libc::ETIMEDOUT);
                control.send(&Reply::failed(freeze.request, &failure), None);
            }
            freeze.deadline > now
        });
    }

    fn status(&self, id: i64) -> Reply {
        let (total, free) = self.tools.uppers.space();
        let live = self.tenants.values().filter(|t| matches!(t.phase, Phase::Live)).count();
        let features = BTreeMap::from([("quota", self.tools.uppers.quota().to_string())]);
        let cgroup = match self.tools.cgroups.kind {
            Kind::V1 => "v1",
            Kind::Hybrid => "hybrid",
            Kind::V2 => "v2",
        };
        Reply {
            pool: Some(self.pool.len()),
            live: Some(live),
            uppers: Some(UppersStatus { kind: self.tools.uppers.kind(), total, free }),
            cgroup: Some(cgroup),
            features: Some(features),
            ..Reply::ok(id)
        }
    }
}

fn valid_hostname(name: &str) -> bool {
    name.len() <= 64 && name.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-' || b == b'.')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_plain() {
        assert!(valid_name("sb-edge-0123456789ab"));
        for wrong in ["", "..", "a/b", "a b", "a\0", &"x".repeat(65)] {
            assert!(!valid_name(wrong), "{wrong:?}");
        }
    }
}
