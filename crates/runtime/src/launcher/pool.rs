//! Slots from their making to the moment they are a sandbox.

use super::poller::Token;
use super::slot::Begun;
use super::wire::Reply;
use super::{log, Entering, Launcher, Phase, Tenant, CREATE_DEADLINE_US};
use crate::birth::{BirthReply, GROUPS, PREPARED};
use crate::sys::{now_us, process, socket, At, Errno, Failure};
use std::os::fd::AsRawFd;

/// PID 1s that get themselves ready at the same time. One keeps the other processor busy; more only wait for each other.
const MAX_PREPARING: usize = 3;

/// Time for a first command.
const QUIET_US: u64 = 4_000;

impl Launcher {
    pub fn wants_slot(&self) -> bool {
        let wanted = self.pool_size + self.queue.len();
        self.preparing < MAX_PREPARING && self.pool.len() + self.preparing < wanted && !self.refill_failed
    }

    /// Spare v1 groups wait for first commands as slots wait for creations.
    pub fn wants_spare(&self) -> bool {
        let cgroups = &self.tools.cgroups;
        cgroups.has_v1() && self.usual.is_some() && cgroups.spares() < self.pool_size && !self.refill_failed
    }

    /// Who asked for a sandbox wants its first command's result next, and making slots would take the processor from it: so
    /// they are made a little later, unless they run short.
    pub fn leisure_in_us(&self) -> u64 {
        if self.pool.len() < self.pool_size / 2 {
            return 0;
        }
        (self.last_create_us + QUIET_US).saturating_sub(now_us())
    }

    /// Makes at most one slot: at once when a creation waits for it, else only when nothing else is to do.
    pub fn refill(&mut self, idle: bool) {
        let urgent = self.queue.len() > self.preparing;
        let at_leisure = idle && self.entering == 0 && self.leisure_in_us() == 0;
        if self.wants_slot() && (urgent || at_leisure) {
            return self.begin_slot();
        }
        if let (true, true, Some(usual)) = (at_leisure, self.wants_spare(), self.usual) {
            if let Err(failure) = self.tools.cgroups.make_spare(&usual.limits) {
                log(&failure);
                self.refill_failed = true;
            }
        }
    }

    fn begin_slot(&mut self) {
        let Some(number) = self.ids.take() else {
            return self.slot_failed(Failure::new("slot", "all id ranges are taken", libc::EUSERS));
        };
        match Begun::begin(number, &mut self.tools) {
            Ok(begun) => {
                self.preparing += 1;
                self.begun.push_back(begun);
            }
            Err(failure) => {
                self.remove_remains(number);
                self.slot_failed(failure);
            }
        }
    }

    /// The zygote has made the oldest PID 1 that was ordered; false when it has died.
    pub fn zygote_answered(&mut self) -> bool {
        let (Some(answer), Some(begun)) = (self.tools.zygote.take(), self.begun.pop_front()) else { return false };
        let number = begun.number;
        let born = match answer {
            Ok(born) => born,
            Err(failure) => {
                self.preparing -= 1;
                self.remove_remains(number);
                self.slot_failed(failure);
                return true;
            }
        };
        let slot = begun.equip(born, &self.tools, self.usual);
        let watched = self.poller.add(slot.pidfd.as_raw_fd(), Token::End(number));
        let control = slot.control.as_ref().map_or(-1, AsRawFd::as_raw_fd);
        let watched = watched.and_then(|()| self.poller.add(control, Token::Answer(number)));
        let tenant = Tenant {
            slot,
            phase: Phase::Preparing,
            sandbox: None,
            deadline: 0,
            child: true,
            kept: false,
            agent_oom: false,
        };
        self.tenants.insert(number, tenant);
        self.set_deadline(number);
        if let Err(failure) = watched.at("slot", || "watch PID 1".into()) {
            self.slot_failed(failure);
            self.dispose(number);
        }
        true
    }

    /// The first creation that waits gets the error; without one, nothing is tried until the next creation.
    pub fn slot_failed(&mut self, failure: Failure) {
        log(&failure);
        match self.queue.pop_front() {
            Some((request, _)) => self.control.send(&Reply::failed(request.id, &failure), None),
            None => self.refill_failed = true,
        }
    }

    /// PID 1 is prepared, has become a sandbox, or says why not.
    pub fn pid1_answered(&mut self, number: u32) {
        let Some(tenant) = self.tenants.get_mut(&number) else { return };
        let Some(control) = &tenant.slot.control else { return };
        if matches!(tenant.phase, Phase::Live) {
            return self.sandbox_asked(number);
        }
        let mut buffer = [0; 4096];
        let answer = match socket::receive(control.as_raw_fd(), &mut buffer, libc::MSG_DONTWAIT) {
            Err(Errno(libc::EAGAIN | libc::EINTR)) => return,
            Ok((length, _)) if length > 0 => &buffer[..length],
            _ => {
                // It has closed its end: its death will say why.
                self.poller.remove(control.as_raw_fd());
                return;
            }
        };
        if matches!(tenant.phase, Phase::Preparing) && answer == PREPARED {
            return self.slot_prepared(number);
        }
        let reply = rmp_serde::from_slice::<BirthReply>(answer).unwrap_or_else(|error| BirthReply {
            ready: false,
            stage: "birth".into(),
            error: format!("PID 1 answered nonsense: {error}"),
            errno: libc::EPROTO,
            us: Vec::new(),
        });
        if reply.ready && matches!(tenant.phase, Phase::Entering(_)) {
            return self.sandbox_ready(number, reply);
        }
        self.fail_birth(number, &reply.stage, reply.error, reply.errno);
    }

    /// A sandbox may ask for one thing, once. It is hostile by now: anything else closes its socket.
    fn sandbox_asked(&mut self, number: u32) {
        let Some(Tenant { slot, .. }) = self.tenants.get_mut(&number) else { return };
        let Some(control) = &slot.control else { return };
        let mut buffer = [0; GROUPS.len()];
        let asked = socket::receive(control.as_raw_fd(), &mut buffer, libc::MSG_DONTWAIT);
        if !matches!(&asked, Ok((length, fds)) if buffer[..*length] == *GROUPS && fds.is_empty()) {
            slot.control = None;
            return;
        }
        if let Err(failure) = slot.give_groups(&mut self.tools.cgroups, &self.tools.uppers) {
            log(&failure);
        }
    }

    fn slot_prepared(&mut self, number: u32) {
        let Some(tenant) = self.tenants.get_mut(&number) else { return };
        self.preparing -= 1;
        tenant.phase = Phase::Pooled;
        if let Err(failure) = tenant.slot.prepared(&self.tools) {
            self.slot_failed(failure);
            return self.dispose(number);
        }
        self.pool.push_back(number);
        if let Some((request, received)) = self.queue.pop_front() {
            self.create_in_slot(*request, received);
        }
    }

    fn sandbox_ready(&mut self, number: u32, reply: BirthReply) {
        let Some(tenant) = self.tenants.get_mut(&number) else { return };
        let Phase::Entering(entering) = std::mem::replace(&mut tenant.phase, Phase::Live) else { return };
        self.entering -= 1;
        let now = now_us();
        let Entering { request, received_us, sent_us } = entering;
        let mut answer = Reply::ok(request);
        answer.pid = Some(tenant.slot.pid);
        answer.start = Some(tenant.slot.start);
        let mut us: std::collections::BTreeMap<String, u64> = reply.us.into_iter().collect();
        us.insert("launcher".into(), sent_us - received_us);
        us.insert("enter".into(), now - sent_us);
        us.insert("total".into(), now - received_us);
        answer.create_us = Some(us);
        let copy = tenant.slot.pidfd.try_clone().ok();
        self.control.send(&answer, copy);
    }

    /// Ends a slot that could not be made or could not become a sandbox, and answers whoever waited.
    pub fn fail_birth(&mut self, number: u32, stage: &str, error: String, errno: i32) {
        let Some(tenant) = self.tenants.get_mut(&number) else { return };
        match &tenant.phase {
            Phase::Preparing => {
                let failure = Failure::new("slot", format!("PID 1 could not prepare: {stage}: {error}"), errno);
                self.slot_failed(failure);
            }
            Phase::Entering(entering) => {
                let mut reply = Reply::failed(entering.request, &Failure::new("birth", error, errno));
                reply.stage = Some(stage.into());
                self.control.send(&reply, None);
            }
            _ => {}
        }
        self.dispose(number);
    }

    /// From now the slot has so long to get where it is going.
    pub fn set_deadline(&mut self, number: u32) {
        let when = now_us() + CREATE_DEADLINE_US;
        if let Some(tenant) = self.tenants.get_mut(&number) {
            tenant.deadline = when;
            self.deadlines.push_back((when, number));
        }
    }

    /// The slot's deadline has come.
    pub fn expire(&mut self, number: u32) {
        let late = |t: &Tenant| matches!(t.phase, Phase::Preparing | Phase::Entering(_));
        if self.tenants.get(&number).is_some_and(late) {
            let text = "PID 1 was not ready in 30 s; the machine is overloaded";
            self.fail_birth(number, "birth", text.into(), libc::ETIMEDOUT);
        }
    }

    /// PID 1 is dead: of itself, or because it is being removed.
    pub fn pid1_ended(&mut self, number: u32) {
        let Some(tenant) = self.tenants.get_mut(&number) else { return };
        let status = if tenant.child {
            match process::reap(&tenant.slot.pidfd) {
                Ok(Some(status)) => status,
                Ok(None) => return,
                Err(_) => -1,
            }
        } else {
            -1
        };
        self.poller.remove(tenant.slot.pidfd.as_raw_fd());
        let killed = status & 0x7f == libc::SIGKILL || !tenant.child;
        tenant.agent_oom = killed && self.tools.cgroups.agent_oom(number);
        match &mut tenant.phase {
            Phase::Dying(dying) => {
                dying.reaped = true;
                self.tear_down(number);
            }
            Phase::Live => {
                tenant.phase = Phase::Ended;
                let event = Reply {
                    event: Some("died"),
                    sandbox: tenant.sandbox.as_ref().map(|(name, _)| name.clone()),
                    status: Some(status),
                    oom_kills: Some(self.tools.cgroups.oom_kills(number)),
                    ..Reply::default()
                };
                self.control.send(&event, None);
            }
            Phase::Ended => {}
            Phase::Preparing | Phase::Pooled | Phase::Entering(_) => {
                let text = format!("PID 1 ended with wait status {status:#x}");
                self.died_early(number, text);
            }
        }
    }

    /// Its last words, if there are any, say more than its status.
    fn died_early(&mut self, number: u32, text: String) {
        self.pid1_answered(number);
        let unanswered = self.tenants.get(&number).is_some_and(|t| !matches!(t.phase, Phase::Dying(_)));
        if unanswered {
            self.fail_birth(number, "birth", text, libc::ECHILD);
        }
        if let Some(Tenant { phase: Phase::Dying(dying), .. }) = self.tenants.get_mut(&number) {
            dying.reaped = true;
            self.tear_down(number);
        }
    }
}
