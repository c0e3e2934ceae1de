//! A slot: everything of a sandbox that does not depend on which sandbox it will be, made ahead.

use super::ids::{root_of, RANGE};
use super::uppers::{Upper, Uppers};
use super::zygote::{Newborn, Zygote};
use crate::birth::{Birth, FIXED_FDS, GROUPS, SUCCESSOR};
use crate::cgroup::{Cgroups, Group, Limits};
use crate::sys::{mount, socket, At, Failure};
use std::os::fd::{AsRawFd, OwnedFd, RawFd};

/// What the launcher itself brings to every slot.
pub struct Tools {
    pub cgroups: Cgroups,
    pub uppers: Uppers,
    pub zygote: Zygote,
    pub null: OwnedFd,
    /// Directory of the sockets, also the working directory.
    pub sockets: OwnedFd,
}

/// What has been promised to a slot, so that it is not written again.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Promise {
    pub limits: Limits,
    pub disk: u64,
}

/// Descriptors that go to PID 1, or are needed only until it is born.
struct Kit {
    userns: OwnedFd,
    listener: OwnedFd,
    oom_adj: OwnedFd,
    commands: Option<OwnedFd>,
}

pub struct Slot {
    pub number: u32,
    pub pid: i32,
    pub start: u64,
    pub pidfd: OwnedFd,
    pub upper: Upper,
    /// Socket to PID 1 until it has become a sandbox. Its closing ends a PID 1 that waits.
    pub control: Option<OwnedFd>,
    /// File name of the listening socket; says slot, pid and start time to a later launcher.
    pub socket: String,
    promise: Option<Promise>,
    kit: Option<Result<Kit, Failure>>,
}

/// A slot whose PID 1 the zygote is making.
pub struct Begun {
    pub number: u32,
    control: OwnedFd,
    upper: Upper,
    group: Group,
}

/// Names in the sockets' directory that belong to slots, not sandboxes.
pub const SOCKET_PREFIX: &str = ".s";

/// Slot, pid and start time out of a socket's name.
pub fn parse_socket_name(name: &str) -> Option<(u32, i32, u64)> {
    let mut fields = name.strip_prefix(SOCKET_PREFIX)?.split('.');
    let parsed = (fields.next()?.parse().ok()?, fields.next()?.parse().ok()?, fields.next()?.parse().ok()?);
    fields.next().is_none().then_some(parsed)
}

impl Begun {
    /// Makes groups and upper, and orders a PID 1. On failure what was made lies under the slot's number, for the launcher
    /// to remove.
    pub fn begin(number: u32, tools: &mut Tools) -> Result<Self, Failure> {
        let root = root_of(number);
        let group = tools.cgroups.make(number, root)?;
        let upper = tools.uppers.make(number, root)?;
        let (control, theirs) = socket::pair().at("clone", || "socketpair".into())?;
        tools.zygote.order(root, RANGE, &theirs, group.birth.as_ref())?;
        Ok(Begun { number, control, upper, group })
    }

    /// PID 1 is there: gives it its socket and tells it where its upper is. It answers on `control`.
    pub fn equip(self, born: Newborn, tools: &Tools, promise: Option<Promise>) -> Slot {
        let Newborn { pid, start, pidfd, userns, oom_adj } = born;
        let Begun { number, control, upper, group } = self;
        let name = format!("{SOCKET_PREFIX}{number}.{pid}.{start}");
        // What fails here shows when the slot is used, or by the answer of PID 1 that never comes.
        let listener = socket::listen(&name).at("socket", || format!("bind {name}"));
        let kit = listener.map(|listener| Kit { userns, listener, oom_adj, commands: group.commands });
        let _ = socket::send(control.as_raw_fd(), Uppers::path(number).as_bytes(), &[]);
        let control = Some(control);
        let mut slot = Slot { number, pid, start, pidfd, upper, control, socket: name, promise: None, kit: Some(kit) };
        if let Some(promise) = promise {
            // Only a guess: what cannot be written now is written, or reported, when it is asked for.
            let _ = slot.promise(tools, promise);
        }
        slot
    }
}

impl Slot {
    /// A slot that an earlier launcher made into a sandbox.
    pub fn adopted(number: u32, pid: i32, start: u64, pidfd: OwnedFd, upper: Upper, socket: String) -> Self {
        Slot { number, pid, start, pidfd, upper, control: None, socket, promise: None, kit: None }
    }

    /// What an adopted sandbox was promised. A PID 1 that may still ask for its groups gets a socket to ask by.
    pub fn succeed(&mut self, promise: Promise) -> Result<bool, Failure> {
        let first = self.promise.replace(promise).is_none();
        if !first {
            return Ok(false);
        }
        let at = || format!("hand a socket to PID 1 of slot {}", self.number);
        let (ours, theirs) = socket::pair().at("adopt", at)?;
        let connection = socket::connect(&self.socket).at("adopt", at)?;
        socket::send_now(connection.as_raw_fd(), SUCCESSOR, &[theirs.as_raw_fd()]).at("adopt", at)?;
        self.control = Some(ours);
        Ok(true)
    }

    /// PID 1 has answered that it is ready to be told who it is.
    pub fn prepared(&self, tools: &Tools) -> Result<(), Failure> {
        tools.cgroups.settle_newborn(self.number, self.pid)
    }

    /// Writes limits, unless they are what was written ahead.
    fn promise(&mut self, tools: &Tools, promise: Promise) -> Result<(), Failure> {
        let before = self.promise.take();
        if before.is_none_or(|p| p.limits != promise.limits) {
            tools.cgroups.set_limits(self.number, &promise.limits)?;
        }
        if before.is_none_or(|p| p.disk != promise.disk) {
            tools.uppers.limit(self.number, promise.disk)?;
        }
        self.promise = Some(promise);
        Ok(())
    }

    /// Tells PID 1 which sandbox it is. It answers on `control`.
    pub fn bear(&mut self, tools: &Tools, layers: &[&OwnedFd], promise: Promise, birth: Birth) -> Result<(), Failure> {
        self.promise(tools, promise)?;
        let kit = self.kit.take().ok_or_else(|| Failure::new("birth", "slot used twice", libc::EALREADY))??;
        let mut mapped: Vec<OwnedFd> = Vec::with_capacity(layers.len());
        for layer in layers {
            let tree = mount::clone_tree(layer.as_raw_fd(), c"").at("layers", || "clone a layer's mount".into())?;
            mount::id_map(&tree, &kit.userns).at("layers", || "id-map a layer".into())?;
            mapped.push(tree);
        }
        let spill = tools.uppers.spill();
        let commands = kit.commands.as_ref().unwrap_or(&tools.null);
        let mut fds: Vec<RawFd> = Vec::with_capacity(FIXED_FDS + mapped.len());
        fds.extend([kit.listener.as_raw_fd(), kit.oom_adj.as_raw_fd(), spill.as_raw_fd(), commands.as_raw_fd()]);
        fds.extend(mapped.iter().map(AsRawFd::as_raw_fd));
        let birth = Birth { has_cgroup2: kit.commands.is_some(), ..birth };
        let message = rmp_serde::to_vec_named(&birth).unwrap_or_default();
        let control = self.control.as_ref().map_or(-1, AsRawFd::as_raw_fd);
        socket::send(control, &message, &fds).at("birth", || "send to PID 1".into())
    }

    /// Makes the v1 groups and gives them, and the counters, to PID 1, which has asked.
    pub fn give_groups(&mut self, cgroups: &mut Cgroups, uppers: &Uppers) -> Result<(), Failure> {
        let (Some(control), Some(promise)) = (self.control.take(), self.promise) else { return Ok(()) };
        let made = cgroups.make_v1(self.number, &promise.limits);
        let (answer, files) = match &made {
            Ok(tasks) => {
                let mut counters = cgroups.open_counters(self.number);
                counters.extend(if counters.is_empty() { Vec::new() } else { uppers.open_quota(self.upper) });
                ([GROUPS, &[tasks.len() as u8]].concat(), counters)
            }
            Err(failure) => (failure.what.as_bytes().to_vec(), Vec::new()),
        };
        let tasks = made.iter().flatten();
        let fds: Vec<RawFd> = tasks.chain(&files).map(AsRawFd::as_raw_fd).collect();
        // It may have died: then nobody needs them, and they go with the slot.
        let _ = socket::send_now(control.as_raw_fd(), &answer, &fds);
        if made.is_err() {
            self.control = Some(control); // it may ask again
        }
        made.map(drop)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn socket_names_say_who() {
        assert_eq!(parse_socket_name(".s12.345.6789"), Some((12, 345, 6789)));
        for wrong in ["s12.345.6789", ".s12.345", ".s12.345.6.7", "sb-edge-0.sock", ".s.1.2"] {
            assert_eq!(parse_socket_name(wrong), None, "{wrong}");
        }
    }
}
