//! The end of a slot: kill, reap, remove groups, upper and sockets, take the id range back.

use super::poller::Token;
use super::wire::Reply;
use super::{log, root, Launcher, Phase, Tenant};
use crate::cgroup::Usage;
use crate::sys::{self, c, now_us, process};
use std::os::fd::AsRawFd;

#[derive(Default)]
pub struct Dying {
    /// `stop` requests to answer when all is gone.
    pub waiting: Vec<i64>,
    pub reaped: bool,
    usage: Option<Usage>,
    remains_removed: bool,
    tries: u32,
}

/// A group whose last task is just leaving is busy for a moment; how long to wait before another try.
const RETRY_US: u64 = 50;
const MAX_RETRY_US: u64 = 100_000;
/// How long the sandboxes of a private platform wait for another launcher.
const SUCCESSION_US: u64 = 15_000_000;

impl Launcher {
    /// Begins the removal of a slot in any phase. The rest happens as events come.
    pub fn dispose(&mut self, number: u32) {
        self.dispose_for(number, None);
    }

    /// The same, with a `stop` request to answer in the end.
    pub fn dispose_for(&mut self, number: u32, request: Option<i64>) {
        let Some(tenant) = self.tenants.get_mut(&number) else { return };
        match &mut tenant.phase {
            Phase::Dying(dying) => return dying.waiting.extend(request),
            Phase::Preparing => self.preparing -= 1,
            Phase::Entering(_) => self.entering -= 1,
            Phase::Pooled => self.pool.retain(|n| *n != number),
            Phase::Live | Phase::Ended => {}
        }
        let reaped = matches!(tenant.phase, Phase::Ended);
        // With the init of a pid namespace the kernel kills every process in it before that init can be reaped.
        let _ = process::send_signal(&tenant.slot.pidfd, libc::SIGKILL);
        self.memory.cancel(number);
        let waiting = request.into_iter().collect();
        tenant.phase = Phase::Dying(Dying { reaped, waiting, ..Dying::default() });
        if reaped {
            self.tear_down(number);
        }
    }

    /// Removes what is left of a slot whose PID 1 has been reaped, as far as the kernel allows now.
    pub fn tear_down(&mut self, number: u32) {
        let Some(Tenant { slot, phase: Phase::Dying(dying), sandbox, agent_oom, .. }) = self.tenants.get_mut(&number)
        else {
            return;
        };
        if !dying.reaped || self.memory.is_busy(number) {
            return;
        }
        if !dying.waiting.is_empty() && dying.usage.is_none() {
            let mut usage = self.tools.cgroups.usage(number);
            usage.disk = self.tools.uppers.usage(slot.upper);
            usage.agent_oom = *agent_oom;
            dying.usage = Some(usage);
        }
        if !dying.remains_removed {
            dying.remains_removed = true;
            slot.control = None;
            let sockets = self.tools.sockets.as_raw_fd();
            let _ = sys::unlinkat(sockets, &c(slot.socket.as_str()), 0);
            if let Some((_, link)) = sandbox {
                let _ = sys::unlinkat(sockets, &c(link.as_str()), 0);
            }
            match self.tools.uppers.empty(number, slot.upper) {
                Ok(None) => {}
                Ok(Some(removal)) => self.removals.begin(number, removal),
                Err(failure) => log(&failure),
            }
        }
        match self.tools.cgroups.remove(number) {
            Ok(true) => {}
            Ok(false) => {
                dying.tries += 1;
                let wait = (RETRY_US << dying.tries.min(12)).min(MAX_RETRY_US);
                return self.retry_at(now_us() + wait, number);
            }
            Err(failure) => log(&failure),
        }
        if !self.removals.is_busy(number) {
            self.gone(number);
        }
    }

    fn retry_at(&mut self, when: u64, number: u32) {
        let at = self.retries.partition_point(|(w, _)| *w <= when);
        self.retries.insert(at, (when, number));
    }

    fn gone(&mut self, number: u32) {
        let Some(tenant) = self.tenants.remove(&number) else { return };
        self.ids.give_back(number);
        self.memory.forget(number);
        if let Some((name, _)) = &tenant.sandbox {
            self.names.remove(name);
        }
        if let Phase::Dying(dying) = tenant.phase {
            for id in dying.waiting {
                let reply = Reply { usage: dying.usage.clone(), ..Reply::ok(id) };
                self.control.send(&reply, None);
            }
        }
        self.check_sweeps(number);
    }

    /// After a slot that failed before it had a PID 1.
    pub fn remove_remains(&mut self, number: u32) {
        let upper = self.tools.uppers.remove(number);
        let groups = self.tools.cgroups.remove(number);
        match (upper, groups) {
            (Ok(()), Ok(true)) => self.ids.give_back(number),
            // The number stays taken until a sweep succeeds.
            (Err(failure), _) | (_, Err(failure)) => log(&failure),
            (Ok(()), Ok(false)) => {}
        }
    }

    /// The edge is gone: what is not a sandbox yet ends with us; sandboxes live on for the next launcher. That of a private
    /// platform may never come, since its owner may have died with the edge: it is waited for, and else they end too.
    pub fn leave(&mut self) {
        self.poller.remove(self.control.fd());
        self.control.hang_up(); // so that the edge, if it is there, starts the next launcher now
        self.memory.cancel_all();
        self.end_tenants(5_000_000, false);
        self.tools.uppers.remove_idle();
        self.poller.remove(self.tools.zygote.fd());
        self.tools.zygote.end();
        self.tools.cgroups.leave();
        if self.ephemeral && self.nobody_takes_over() {
            self.end_tenants(60_000_000, true);
            self.tools.cgroups.leave();
        }
    }

    /// Gives the sandboxes up; true when nobody wanted them in time, and they are ours again.
    fn nobody_takes_over(&mut self) -> bool {
        let deadline = now_us() + SUCCESSION_US;
        for tenant in self.tenants.values_mut() {
            tenant.slot.control = None; // who asks now is told at once that nobody answers
        }
        while self.tenants.values().any(|tenant| matches!(tenant.phase, Phase::Live)) && now_us() < deadline {
            root::unlock(&self.tools.sockets);
            for token in self.poller.wait(Some(20_000)) {
                match token {
                    Token::End(number) => self.pid1_ended(number),
                    Token::Memory => self.memory_moved(),
                    _ => {}
                }
            }
            if !root::try_lock(&self.tools.sockets) {
                return false;
            }
        }
        true
    }

    /// Ends what is in the making, or sandboxes too.
    fn end_tenants(&mut self, patience_us: u64, sandboxes: bool) {
        let deadline = now_us() + patience_us;
        loop {
            let ends = |t: &Tenant| sandboxes || !matches!(t.phase, Phase::Live | Phase::Ended);
            let numbers: Vec<u32> = self.tenants.iter().filter(|(_, t)| ends(t)).map(|(n, _)| *n).collect();
            if (numbers.is_empty() && self.begun.is_empty()) || now_us() > deadline {
                break;
            }
            numbers.into_iter().for_each(|number| self.dispose(number));
            for token in self.poller.wait(Some(2000)) {
                match token {
                    Token::End(number) => self.pid1_ended(number),
                    Token::Memory => self.memory_moved(),
                    Token::Zygote if !self.zygote_answered() => self.begun.clear(),
                    _ => {}
                }
            }
            self.run_timers();
        }
    }
}
