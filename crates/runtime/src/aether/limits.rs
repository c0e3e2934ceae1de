//! Resource limits of one command (setrlimit): asked with `exec`, checked before the start, set in the child.

use super::fault::Fault;
use super::os;
use crate::msgpack::Value;

const MIB: u64 = 1 << 20;

/// A limit that can be asked for: its name, the kernel's, bytes or so to one of the unit, and the least that makes sense.
struct Known {
    name: &'static str,
    resource: libc::__rlimit_resource_t,
    unit: u64,
    least: u64,
}

const fn known(name: &'static str, resource: libc::__rlimit_resource_t, unit: u64, least: u64) -> Known {
    Known { name, resource, unit, least }
}

const KNOWN: [Known; 7] = [
    known("cpu_s", libc::RLIMIT_CPU, 1, 1),
    known("memory_mb", libc::RLIMIT_AS, MIB, 1),
    known("file_mb", libc::RLIMIT_FSIZE, MIB, 0),
    known("open_files", libc::RLIMIT_NOFILE, 1, 3),
    known("processes", libc::RLIMIT_NPROC, 1, 1),
    known("core_mb", libc::RLIMIT_CORE, MIB, 0),
    known("stack_mb", libc::RLIMIT_STACK, MIB, 1),
];

pub struct Limits(Vec<(libc::__rlimit_resource_t, libc::rlimit)>);

impl Limits {
    /// From the parameter `limits`, a map. What is not named keeps the sandbox's own limit, which cannot be raised.
    pub fn new(params: Value) -> Result<Limits, Fault> {
        // No core files unless asked for: they land in the working directory, as large as the process was.
        let mut limits = vec![(libc::RLIMIT_CORE, libc::rlimit { rlim_cur: 0, ..own(libc::RLIMIT_CORE) })];
        let Some(asked) = params.get("limits") else { return Ok(Limits(limits)) };
        let mut entries = asked.entries().ok_or_else(|| Fault::invalid("limits must be a map"))?;
        while let (Some(name), Some(value)) = (entries.next(), entries.next()) {
            if !value.is_nil() {
                limits.push(limit(name.str().unwrap_or_default(), value)?);
            }
        }
        Ok(Limits(limits))
    }

    /// In the child. False: the kernel refused one.
    pub unsafe fn set(&self) -> bool {
        self.0.iter().all(|(resource, limit)| unsafe {
            libc::syscall(libc::SYS_prlimit64, 0, *resource, limit, std::ptr::null_mut::<libc::rlimit>()) == 0
        })
    }
}

fn own(resource: libc::__rlimit_resource_t) -> libc::rlimit {
    let mut own = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    let _ = os::check(unsafe { libc::getrlimit(resource, &mut own) });
    own
}

fn limit(name: &str, value: Value) -> Result<(libc::__rlimit_resource_t, libc::rlimit), Fault> {
    let known = KNOWN.iter().find(|known| known.name == name);
    let known = known.ok_or_else(|| Fault::invalid(format!("limits: {name:?} is no limit of commands")))?;
    let amount = value.u64().filter(|amount| *amount >= known.least);
    let Some(amount) = amount.and_then(|amount| amount.checked_mul(known.unit)) else {
        return Err(Fault::invalid(format!("limits: {name} must be a whole number, {} or more", known.least)));
    };
    let most = own(known.resource).rlim_max;
    // A second for the signal at the soft limit to be dealt with, before the kernel kills at the hard one.
    let grace = u64::from(known.resource == libc::RLIMIT_CPU);
    if amount.checked_add(grace).is_none_or(|hard| hard > most) {
        let most = most / known.unit;
        return Err(Fault::invalid(format!("limits: {name} is above what the sandbox itself may have, {most}")));
    }
    Ok((known.resource, libc::rlimit { rlim_cur: amount, rlim_max: amount + grace }))
}
