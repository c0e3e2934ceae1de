//! Control groups: v1, hybrid (v1 controllers beside a v2 tree without any) and v2, behind one interface.
//!
//! All groups lie under one parent per hierarchy, `dsec-<name>`; a sandbox's are called by its slot, `s12`.
//!
//! Aether must stay outside the limits of the commands it runs, so no limit is ever on a group that it is in:
//! - v1 and hybrid: PID 1 stays in the zygote's groups (memory, pids: the shared `aethers`; cpu: the parent); commands write "0" to the
//!   `tasks` files of the limited groups, which are opened here because v1 checks the opener's rights.
//! - v2 tree of hybrid: `s12` (PID 1) and its children, one per command, made by aether; for kill, freeze and CPU time.
//! - v2: `s12` holds `init` (PID 1) and `cmds` (limits; children, one per command, made by aether).
//!
//! No cgroup filesystem is mounted inside, and limit files are never owned by the sandbox.

use crate::sys::{self, c, process, At, Errno, Failure};
use serde::Serialize;
use std::ffi::CStr;
use std::os::fd::{AsRawFd, OwnedFd};

const STAGE: &str = "cgroup";
const CONTROLLERS: [&str; 3] = ["memory", "cpu", "pids"];
/// Length of the period that CPU limits are counted in.
const PERIOD_US: u64 = 100_000;

/// v1 counts what waits in sockets apart from other memory, and only where that has a limit of its own: this part of the
/// memory limit, but not less than some sockets with usual buffers need.
const SOCKETS_SHARE: u64 = 8;
const SOCKETS_LEAST: u64 = 16 << 20;

/// Process numbers are the whole machine's: this part of them, but not less than this many, is never for sandboxes.
const NUMBERS_SHARE: u64 = 8;
const NUMBERS_LEAST: u64 = 2048;

/// First letter of the names of spare groups.
const SPARE: char = 'g';

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    V1,
    Hybrid,
    V2,
}

#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Limits {
    pub memory: u64,
    /// Cores, as microseconds of CPU time per period.
    pub cpu_quota: u64,
    pub pids: u64,
}

impl Limits {
    pub fn new(memory: u64, cores: f64, pids: u64) -> Self {
        let quota = (cores * PERIOD_US as f64) as u64;
        Limits { memory, cpu_quota: quota.max(1000), pids }
    }
}

/// -1 where the kernel cannot tell.
#[derive(Serialize, Debug, Clone)]
pub struct Usage {
    pub memory: i64,
    pub memory_peak: i64,
    pub swap: i64,
    pub cpu_ns: i64,
    pub pids: i64,
    pub disk: i64,
    pub oom_kills: i64,
    pub pids_hits: i64,
    pub agent_oom: bool,
}

/// What a newborn PID 1 needs of its groups.
pub struct Group {
    /// The v2 group that PID 1 is born into.
    pub birth: Option<OwnedFd>,
    /// The v2 group under which aether makes one for each command.
    pub commands: Option<OwnedFd>,
}

pub struct Cgroups {
    pub kind: Kind,
    /// `dsec-<name>` of the v2 tree.
    unified: Option<OwnedFd>,
    /// `dsec-<name>` of the memory, cpu and pids hierarchies of v1.
    v1: Vec<OwnedFd>,
    parent: String,
    /// v1 `cgroup.procs` files of the groups this process came from.
    origin: Vec<OwnedFd>,
    spares: Vec<Spare>,
    spares_made: u64,
    /// PID 1s ended by the kernel for want of memory, as far as they have been told.
    told_ooms: i64,
}

/// v1 groups made ahead, called `g7` until a slot gets them.
struct Spare {
    name: String,
    limits: Limits,
    tasks: Vec<OwnedFd>,
}

fn group(slot: u32) -> String {
    format!("s{slot}")
}

impl Cgroups {
    /// Finds the hierarchies, makes the parents, and moves this process out of any limit of its surroundings.
    pub fn open(name: &str) -> Result<Self, Failure> {
        let mounts = std::fs::read_to_string("/proc/self/mountinfo").map_err(Errno::from);
        let (unified, v1) = find_hierarchies(&mounts.at(STAGE, || "read /proc/self/mountinfo".into())?);
        let parent = format!("dsec-{name}");
        let kind = match (&unified, v1.len()) {
            (Some(_), 0) => Kind::V2,
            (Some(_), 3) => Kind::Hybrid,
            (None, 3) => Kind::V1,
            _ => {
                let text = "memory, cpu and pids controllers are neither all in cgroup v1 nor in v2; mount them";
                return Err(Failure::new(STAGE, text, libc::ENOSYS));
            }
        };
        let mut opened = Vec::new();
        for path in v1.iter().chain(&unified) {
            if kind == Kind::V2 {
                enable_controllers(libc::AT_FDCWD, path)?;
            }
            opened.push(make_and_open(&format!("{path}/{parent}"))?);
        }
        let unified = unified.and_then(|_| opened.pop());
        let mut groups = Cgroups {
            kind,
            unified,
            v1: opened,
            parent,
            origin: Vec::new(),
            spares: Vec::new(),
            spares_made: 0,
            told_ooms: 0,
        };
        groups.remove_spares();
        groups.settle(&v1)?;
        groups.told_ooms = groups.agent_ooms("aethers/memory.oom_control");
        Ok(groups)
    }

    /// v1: this process, and so all it starts, goes to `aethers` in memory and pids. v2: controllers are handed down to the
    /// sandboxes' groups.
    fn settle(&mut self, mount_points: &[String]) -> Result<(), Failure> {
        if let (Kind::V2, Some(unified)) = (self.kind, &self.unified) {
            enable_controllers(unified.as_raw_fd(), ".")?;
            return keep_process_numbers(unified);
        }
        keep_process_numbers(&self.v1[2])?;
        let own = std::fs::read_to_string("/proc/self/cgroup").map_err(Errno::from);
        let own = own.at(STAGE, || "read /proc/self/cgroup".into())?;
        for index in [0, 2] {
            let tasks = format!("{}{}/cgroup.procs", mount_points[index], own_group(&own, CONTROLLERS[index]));
            self.origin.extend(sys::openat(libc::AT_FDCWD, &c(tasks), libc::O_WRONLY, 0));
            let parent = self.v1[index].as_raw_fd();
            ignore_existing(sys::mkdirat(parent, c"aethers", 0o755)).at(STAGE, || "create group aethers".into())?;
            sys::write_file(parent, c"aethers/tasks", b"0").at(STAGE, || "join group aethers".into())?;
        }
        Ok(())
    }

    /// v1: the zygote, and so every PID 1, runs beside the sandboxes' groups, so that no group outside of ours can show in
    /// their cgroup namespaces; the launcher itself keeps the weight of a platform process.
    pub fn place_zygote(&self, pid: i32) -> Result<(), Failure> {
        let Some(cpu) = self.v1.get(1) else { return Ok(()) };
        sys::write_file(cpu.as_raw_fd(), c"tasks", pid.to_string().as_bytes()).at(STAGE, || "place the zygote".into())
    }

    /// Goes back where this process came from and removes what is empty: all, unless sandboxes live on.
    pub fn leave(&self) {
        self.remove_spares();
        for tasks in &self.origin {
            let _ = sys::write(tasks.as_raw_fd(), b"0");
        }
        let own = c(format!("../{}", self.parent));
        for parent in self.v1.iter().chain(&self.unified) {
            let _ = sys::unlinkat(parent.as_raw_fd(), c"aethers", libc::AT_REMOVEDIR);
            let _ = sys::unlinkat(parent.as_raw_fd(), &own, libc::AT_REMOVEDIR);
        }
    }

    /// Whether commands are limited by groups that `make_v1` makes.
    pub fn has_v1(&self) -> bool {
        !self.v1.is_empty()
    }

    /// The v1 groups of a slot, with limits; their `tasks` files, open for writing. Takes spare ones if there are any.
    pub fn make_v1(&mut self, slot: u32, limits: &Limits) -> Result<Vec<OwnedFd>, Failure> {
        if !self.has_v1() {
            return Ok(Vec::new());
        }
        let name = group(slot);
        let made = self.v1.iter().any(|parent| exists(parent, &name)); // for an earlier launcher, which died over it
        let Some(spare) = (if made { None } else { self.spares.pop() }) else {
            return self.make_v1_groups(&name, limits);
        };
        let (from, to) = (c(spare.name.as_str()), c(name.as_str()));
        for parent in &self.v1 {
            let fd = parent.as_raw_fd();
            unsafe { crate::sys!(SYS_renameat, fd, from.as_ptr(), fd, to.as_ptr()) }
                .at(STAGE, || format!("rename group {} to {name}", spare.name))?;
        }
        if spare.limits != *limits {
            self.set_v1_limits(&name, limits)?;
        }
        Ok(spare.tasks)
    }

    fn make_v1_groups(&self, name: &str, limits: &Limits) -> Result<Vec<OwnedFd>, Failure> {
        let at = || format!("create groups {name}");
        let mut tasks = Vec::with_capacity(self.v1.len());
        for parent in &self.v1 {
            ignore_existing(sys::mkdirat(parent.as_raw_fd(), &c(name), 0o755)).at(STAGE, at)?;
            tasks.push(sys::openat(parent.as_raw_fd(), &c(format!("{name}/tasks")), libc::O_WRONLY, 0).at(STAGE, at)?);
        }
        self.set_v1_limits(name, limits)?;
        Ok(tasks)
    }

    pub fn spares(&self) -> usize {
        self.spares.len()
    }

    /// Makes one set of spare groups, with the limits that are expected.
    pub fn make_spare(&mut self, limits: &Limits) -> Result<(), Failure> {
        let name = format!("{SPARE}{}", self.spares_made);
        self.spares_made += 1;
        let tasks = self.make_v1_groups(&name, limits)?;
        self.spares.push(Spare { name, limits: *limits, tasks });
        Ok(())
    }

    /// Spare groups are in nobody's name: those of a launcher that was killed go when the next one starts.
    fn remove_spares(&self) {
        for parent in &self.v1 {
            for name in children(parent, ".").unwrap_or_default().iter().filter(|name| name.starts_with(SPARE)) {
                let _ = remove_group(parent, name);
            }
        }
    }

    /// Makes the v2 groups of a slot; `root` is the host's id of the sandbox's root, to whom the v2 tree is delegated.
    pub fn make(&self, slot: u32, root: u32) -> Result<Group, Failure> {
        let name = group(slot);
        let at = || format!("create groups {name}");
        let mut made = Group { birth: None, commands: None };
        if let Some(unified) = &self.unified {
            let parent = unified.as_raw_fd();
            let mut directories = vec![name.clone()];
            if self.kind == Kind::V2 {
                directories.extend([format!("{name}/init"), format!("{name}/cmds")]);
            }
            for directory in &directories {
                ignore_existing(sys::mkdirat(parent, &c(directory.as_str()), 0o755)).at(STAGE, at)?;
            }
            let delegated = directories.last().unwrap_or(&name).clone();
            for path in [delegated.clone(), format!("{delegated}/cgroup.procs"), format!("{name}/cgroup.procs")] {
                sys::fchownat(parent, &c(path), root, root).at(STAGE, at)?;
            }
            let open = |path: &str| sys::openat(parent, &c(path), libc::O_PATH | libc::O_DIRECTORY, 0).at(STAGE, at);
            made.birth = Some(open(&name)?);
            made.commands = Some(open(&delegated)?);
        }
        Ok(made)
    }

    /// After PID 1 has made its cgroup namespace (whose root must be `s12`): v2 only, moves it to `init` and hands the
    /// controllers down, which is not possible while a process is in `s12` itself.
    pub fn settle_newborn(&self, slot: u32, pid: i32) -> Result<(), Failure> {
        let (Kind::V2, Some(unified)) = (self.kind, &self.unified) else { return Ok(()) };
        let name = group(slot);
        let procs = c(format!("{name}/init/cgroup.procs"));
        let moved = sys::write_file(unified.as_raw_fd(), &procs, pid.to_string().as_bytes());
        moved.at(STAGE, || format!("move PID 1 to {name}/init"))?;
        enable_controllers(unified.as_raw_fd(), &name)
    }

    /// Writes the limits of a slot's v2 groups (those of v1 are written when they are made).
    pub fn set_limits(&self, slot: u32, limits: &Limits) -> Result<(), Failure> {
        let (Kind::V2, Some(unified)) = (self.kind, &self.unified) else { return Ok(()) };
        let file = |file: &str| format!("{}/cmds/{file}", group(slot));
        set(unified, file("memory.max"), limits.memory.to_string())?;
        let _ = set(unified, file("memory.swap.max"), "0".into()); // not there without swap accounting
        set(unified, file("cpu.max"), format!("{} {PERIOD_US}", limits.cpu_quota))?;
        set(unified, file("pids.max"), limits.pids.to_string())
    }

    fn set_v1_limits(&self, name: &str, limits: &Limits) -> Result<(), Failure> {
        self.set_v1_memory(name, limits.memory)?;
        self.set_v1_sockets(name, limits.memory)?;
        set(&self.v1[1], format!("{name}/cpu.cfs_quota_us"), limits.cpu_quota.to_string())?;
        set(&self.v1[2], format!("{name}/pids.max"), limits.pids.to_string())
    }

    /// memory+swap may never be below memory: when the limit grows memsw is written first, else last.
    fn set_v1_memory(&self, name: &str, bytes: u64) -> Result<(), Failure> {
        let value = bytes.to_string();
        // The kernel gives up while a signal waits, a debugger's too; the order below would then take it for a limit that shrinks.
        let write = |file: &str| loop {
            match sys::write_file(self.v1[0].as_raw_fd(), &c(format!("{name}/{file}")), value.as_bytes()) {
                Err(Errno(libc::EINTR)) => continue,
                other => return other,
            }
        };
        let swap = |result: sys::Result<()>| if result == Err(Errno(libc::ENOENT)) { Ok(()) } else { result };
        let at = || format!("write {value} to memory.limit_in_bytes of {name}");
        if write("memory.limit_in_bytes").is_ok() {
            return swap(write("memory.memsw.limit_in_bytes")).at(STAGE, at);
        }
        swap(write("memory.memsw.limit_in_bytes")).at(STAGE, at)?;
        write("memory.limit_in_bytes").at(STAGE, at)
    }

    fn set_v1_sockets(&self, name: &str, memory: u64) -> Result<(), Failure> {
        let bytes = (memory / SOCKETS_SHARE).max(SOCKETS_LEAST);
        let file = c(format!("{name}/memory.kmem.tcp.limit_in_bytes")); // of all kinds of sockets, for all its name
        match sys::write_file(self.v1[0].as_raw_fd(), &file, bytes.to_string().as_bytes()) {
            Err(Errno(libc::ENOENT)) => Ok(()), // a kernel without it
            other => other.at(STAGE, || format!("write {bytes} to memory.kmem.tcp.limit_in_bytes of {name}")),
        }
    }

    /// Files in which the kernel counts kills for want of memory, the memory limit, and forks refused (the order of
    /// `aether::reasons`), of a slot that has its groups. None unless all are there.
    pub fn open_counters(&self, slot: u32) -> Vec<OwnedFd> {
        let name = group(slot);
        let files = match self.kind {
            Kind::V2 => ["cmds/memory.events", "cmds/memory.max", "cmds/pids.events"],
            _ => ["memory.oom_control", "memory.limit_in_bytes", "pids.events"],
        };
        let (memory, pids) = self.counters();
        let open = |(parent, file): (Option<&OwnedFd>, &str)| {
            sys::openat(parent?.as_raw_fd(), &c(format!("{name}/{file}")), libc::O_RDONLY, 0).ok()
        };
        let opened: Option<Vec<OwnedFd>> = [memory, memory, pids].into_iter().zip(files).map(open).collect();
        opened.unwrap_or_default()
    }

    /// Before the first command there is nothing to count; what the kernel does not tell is -1.
    pub fn usage(&self, slot: u32) -> Usage {
        let name = group(slot);
        let text = |parent: Option<&OwnedFd>, file: &str| {
            parent.map(|p| sys::read_file(p.as_raw_fd(), &c(format!("{name}/{file}"))))
        };
        let files = match self.kind {
            Kind::V2 => [
                "cmds/memory.current",
                "cmds/memory.peak",
                "cmds/memory.events",
                "cmds/pids.current",
                "cmds/pids.events",
            ],
            _ => [
                "memory.usage_in_bytes",
                "memory.max_usage_in_bytes",
                "memory.oom_control",
                "pids.current",
                "pids.events",
            ],
        };
        let (memory, pids) = self.counters();
        let unused = self.has_v1() && !memory.is_some_and(|m| exists(m, &name));
        let value = |parent, file, word: Option<&str>| match text(parent, file) {
            Some(Ok(text)) => word.map_or_else(|| text.trim().parse().unwrap_or(-1), |word| field(&text, word)),
            _ if unused => 0,
            _ => -1,
        };
        let cpu = text(self.unified.as_ref(), "cpu.stat").and_then(Result::ok).map_or(-1, |t| field(&t, "usage_usec"));
        let in_memory = value(memory, files[0], None);
        let swap = match self.kind {
            Kind::V2 => value(memory, "cmds/memory.swap.current", None),
            _ => swapped(value(memory, "memory.memsw.usage_in_bytes", None), in_memory),
        };
        Usage {
            memory: in_memory,
            swap,
            memory_peak: value(memory, files[1], None),
            cpu_ns: if cpu < 0 { -1 } else { cpu * 1000 },
            pids: value(pids, files[3], None),
            disk: -1,
            oom_kills: value(memory, files[2], Some("oom_kill")),
            pids_hits: value(pids, files[4], Some("max")),
            agent_oom: false,
        }
    }

    /// The hierarchies that have memory and pids.
    fn counters(&self) -> (Option<&OwnedFd>, Option<&OwnedFd>) {
        match self.kind {
            Kind::V2 => (self.unified.as_ref(), self.unified.as_ref()),
            _ => (self.v1.first(), self.v1.get(2)),
        }
    }

    /// Whether a PID 1 that was killed was so by the kernel, for want of memory on the node. v1 counts those of all
    /// sandboxes together: each one that is counted is told of one that died.
    pub fn agent_oom(&mut self, slot: u32) -> bool {
        if self.kind == Kind::V2 {
            return self.agent_ooms(&format!("{}/init/memory.events", group(slot))) > 0;
        }
        let counted = self.agent_ooms("aethers/memory.oom_control") > self.told_ooms;
        self.told_ooms += i64::from(counted);
        counted
    }

    fn agent_ooms(&self, file: &str) -> i64 {
        let (memory, _) = self.counters();
        let text = memory.and_then(|memory| sys::read_file(memory.as_raw_fd(), &c(file)).ok());
        text.map_or(0, |text| field(&text, "oom_kill"))
    }

    pub fn oom_kills(&self, slot: u32) -> i64 {
        self.usage(slot).oom_kills
    }

    /// Removes a slot's groups; `false` when the kernel has not finished with them yet (ask again).
    pub fn remove(&self, slot: u32) -> Result<bool, Failure> {
        let name = group(slot);
        let mut gone = true;
        for parent in &self.v1 {
            gone &= remove_group(parent, &name)?;
        }
        if let Some(unified) = &self.unified {
            gone &= remove_tree(unified, &name)?;
        }
        Ok(gone)
    }

    /// Kills everything in a slot's groups, PID 1 too, and says how many tasks of v1 groups it found. (v2 groups die whole;
    /// v1 ones task by task, so ask again until they can be removed.)
    pub fn kill_all(&self, slot: u32) -> usize {
        let name = group(slot);
        if let Some(unified) = &self.unified {
            // Fails when the group is gone already, which is as good.
            let _ = sys::write_file(unified.as_raw_fd(), &c(format!("{name}/cgroup.kill")), b"1");
        }
        let tasks =
            |parent: &OwnedFd| sys::read_file(parent.as_raw_fd(), &c(format!("{name}/tasks"))).unwrap_or_default();
        let mut found = 0;
        for parent in &self.v1 {
            for pid in tasks(parent).lines().filter_map(|line| line.parse::<i32>().ok()) {
                let Ok(pidfd) = process::pidfd_open(pid) else { continue };
                // Looked at again with the pidfd in hand: a number that still is in the group is the same process.
                if tasks(parent).lines().any(|line| line.parse() == Ok(pid)) {
                    let _ = process::send_signal(&pidfd, libc::SIGKILL);
                    found += 1;
                }
            }
        }
        found
    }

    /// Kills every command's group, and leaves PID 1 alone.
    pub fn kill_commands(&self, slot: u32) -> Result<(), Failure> {
        let Some(unified) = &self.unified else {
            return Err(Failure::new(STAGE, "kill needs the cgroup v2 tree (cgroup.kill); mount it", libc::ENOSYS));
        };
        let name = group(slot);
        let at = || format!("kill the commands of {name}");
        if self.kind == Kind::V2 {
            return sys::write_file(unified.as_raw_fd(), &c(format!("{name}/cmds/cgroup.kill")), b"1").at(STAGE, at);
        }
        for child in children(unified, &name).at(STAGE, at)? {
            match sys::write_file(unified.as_raw_fd(), &c(format!("{name}/{child}/cgroup.kill")), b"1") {
                Err(Errno(libc::ENOENT | libc::ENODEV)) => continue, // aether has just removed it
                other => other.at(STAGE, at)?,
            }
        }
        Ok(())
    }

    pub fn freeze(&self, slot: u32, frozen: bool) -> Result<(), Failure> {
        let Some(unified) = &self.unified else {
            return Err(Failure::new(STAGE, "freeze needs the cgroup v2 tree (cgroup.freeze); mount it", libc::ENOSYS));
        };
        let path = c(format!("{}/cgroup.freeze", group(slot)));
        let written = sys::write_file(unified.as_raw_fd(), &path, if frozen { b"1" } else { b"0" });
        written.at(STAGE, || format!("freeze {}", group(slot)))
    }

    /// Whether all processes of the slot are frozen now.
    pub fn frozen(&self, slot: u32) -> bool {
        let path = c(format!("{}/cgroup.events", group(slot)));
        let events = self.unified.as_ref().and_then(|u| sys::read_file(u.as_raw_fd(), &path).ok());
        events.is_some_and(|text| field(&text, "frozen") == 1)
    }

    /// The slot's processes and memory, for a thread to work on.
    pub fn members(&self, slot: u32) -> Result<Members, Failure> {
        let Some(unified) = &self.unified else {
            return Err(Failure::new(STAGE, "pausing needs the cgroup v2 tree; mount it", libc::ENOSYS));
        };
        let (name, flags) = (group(slot), libc::O_RDONLY | libc::O_DIRECTORY);
        let open = |parent: &OwnedFd, path: &str| sys::openat(parent.as_raw_fd(), &c(path), flags, 0);
        let tree = open(unified, &name).at(STAGE, || format!("open group {name}"))?;
        let memory = match self.v1.first() {
            Some(memory) => open(memory, &name).ok(), // not there before the first command
            None => open(unified, &format!("{name}/cmds")).ok(),
        };
        Ok(Members { tree, memory, kind: self.kind })
    }

    /// v2: what is not in memory yet may not go to swap again (what is there may stay until it is touched).
    pub fn forbid_swap(&self, slot: u32) {
        if let (Kind::V2, Some(unified)) = (self.kind, &self.unified) {
            let _ = set(unified, format!("{}/cmds/memory.swap.max", group(slot)), "0".into());
        }
    }

    /// Slots that have a group in any hierarchy.
    pub fn slots(&self) -> Vec<u32> {
        let mut slots: Vec<u32> = Vec::new();
        for parent in self.v1.iter().chain(&self.unified) {
            let names = children(parent, ".").unwrap_or_default();
            slots.extend(names.iter().filter_map(|name| name.strip_prefix('s').and_then(|n| n.parse::<u32>().ok())));
        }
        slots.sort_unstable();
        slots.dedup();
        slots
    }
}

/// One sandbox's processes and memory.
pub struct Members {
    tree: OwnedFd,
    memory: Option<OwnedFd>,
    kind: Kind,
}

impl Members {
    /// Every process of the sandbox, PID 1 too.
    pub fn processes(&self) -> Vec<i32> {
        let mut found = Vec::new();
        gather(&self.tree, ".", &mut found);
        found
    }

    fn value(&self, file: &CStr) -> i64 {
        let Some(memory) = &self.memory else { return 0 };
        let text = sys::read_file(memory.as_raw_fd(), file);
        text.ok().and_then(|text| text.trim().parse().ok()).unwrap_or(-1)
    }

    /// Bytes in memory, -1 where unknown.
    pub fn memory(&self) -> i64 {
        self.value(if self.kind == Kind::V2 { c"memory.current" } else { c"memory.usage_in_bytes" })
    }

    /// Bytes in swap, -1 where unknown.
    pub fn swap(&self) -> i64 {
        match self.kind {
            Kind::V2 => self.value(c"memory.swap.current"),
            _ => swapped(self.value(c"memory.memsw.usage_in_bytes"), self.memory()),
        }
    }

    /// Gives back whatever the kernel can: files to where they are, the rest to swap, where there is any.
    pub fn reclaim(&self) -> Result<(), Failure> {
        let Some(memory) = &self.memory else { return Ok(()) };
        let write = |file: &CStr, value: &[u8]| sys::write_file(memory.as_raw_fd(), file, value);
        let written = match self.kind {
            Kind::V2 => {
                let _ = write(c"memory.swap.max", b"max");
                write(c"memory.reclaim", self.memory().max(1).to_string().as_bytes())
            }
            _ => write(c"memory.force_empty", b"1"),
        };
        match written {
            // less than asked for; a signal; a group that is just removed
            Err(Errno(libc::EAGAIN | libc::EINTR | libc::ENODEV | libc::ENOENT)) => Ok(()),
            other => other.at(STAGE, || "reclaim memory".into()),
        }
    }
}

/// memory+swap and memory are read one after the other, so their difference may be a little off.
fn swapped(both: i64, memory: i64) -> i64 {
    if both < 0 || memory < 0 {
        -1
    } else {
        (both - memory).max(0)
    }
}

fn gather(parent: &OwnedFd, name: &str, found: &mut Vec<i32>) {
    let text = sys::read_whole(parent.as_raw_fd(), &c(format!("{name}/cgroup.procs"))).unwrap_or_default();
    found.extend(text.lines().filter_map(|line| line.parse::<i32>().ok()));
    for child in children(parent, name).unwrap_or_default() {
        gather(parent, &format!("{name}/{child}"), found);
    }
}

/// The mount point of the v2 tree, and those of the three v1 hierarchies in the order of `CONTROLLERS`, where they are.
fn find_hierarchies(mountinfo: &str) -> (Option<String>, Vec<String>) {
    let mut unified = None;
    let mut v1 = [const { None }; 3];
    for line in mountinfo.lines() {
        let Some((before, after)) = line.split_once(" - ") else { continue };
        let mut fields = before.split(' ');
        let (Some("/"), Some(point)) = (fields.nth(3), fields.next()) else { continue };
        let mut kind = after.split(' ');
        match (kind.next(), kind.nth(1)) {
            (Some("cgroup2"), _) => unified = unified.or(Some(point.to_string())),
            (Some("cgroup"), Some(options)) => {
                for (controller, found) in CONTROLLERS.iter().zip(&mut v1) {
                    if options.split(',').any(|option| option == *controller) {
                        *found = Some(point.to_string());
                    }
                }
            }
            _ => {}
        }
    }
    (unified, v1.into_iter().flatten().collect())
}

/// The group of a v1 hierarchy in the text of /proc/self/cgroup.
fn own_group<'a>(text: &'a str, controller: &str) -> &'a str {
    let group = text.lines().find_map(|line| {
        let (controllers, path) = line.split_once(':')?.1.split_once(':')?;
        controllers.split(',').any(|c| c == controller).then_some(path)
    });
    group.unwrap_or("/")
}

fn make_and_open(path: &str) -> Result<OwnedFd, Failure> {
    ignore_existing(sys::mkdirat(libc::AT_FDCWD, &c(path), 0o755)).at(STAGE, || format!("create {path}"))?;
    sys::openat(libc::AT_FDCWD, &c(path), libc::O_RDONLY | libc::O_DIRECTORY, 0).at(STAGE, || format!("open {path}"))
}

fn enable_controllers(dir: i32, path: &str) -> Result<(), Failure> {
    let written = sys::write_file(dir, &c(format!("{path}/cgroup.subtree_control")), b"+memory +cpu +pids");
    written.at(STAGE, || format!("enable memory, cpu and pids in {path}"))
}

/// However many sandboxes fill their limits: the machine goes on starting processes.
fn keep_process_numbers(parent: &OwnedFd) -> Result<(), Failure> {
    let most = sys::read_file(libc::AT_FDCWD, c"/proc/sys/kernel/pid_max").at(STAGE, || "read pid_max".into())?;
    set(parent, "pids.max".into(), numbers_for_sandboxes(most.trim().parse().unwrap_or(32_768)).to_string())
}

fn numbers_for_sandboxes(most: u64) -> u64 {
    most.saturating_sub((most / NUMBERS_SHARE).max(NUMBERS_LEAST)).max(most / 2)
}

fn set(parent: &OwnedFd, file: String, value: String) -> Result<(), Failure> {
    let at = || format!("write {value} to {file}");
    sys::write_file(parent.as_raw_fd(), &c(file.as_str()), value.as_bytes()).at(STAGE, at)
}

fn ignore_existing(result: sys::Result<()>) -> sys::Result<()> {
    if result == Err(Errno(libc::EEXIST)) {
        Ok(())
    } else {
        result
    }
}

/// The number after a word at the start of a line, as in `oom_kill 3`.
fn field(text: &str, word: &str) -> i64 {
    let value = text.lines().find_map(|line| line.strip_prefix(word)?.strip_prefix(' ')?.trim().parse().ok());
    value.unwrap_or(-1)
}

fn exists(parent: &OwnedFd, name: &str) -> bool {
    unsafe { crate::sys!(SYS_faccessat, parent.as_raw_fd(), c(name).as_ptr(), libc::F_OK) }.is_ok()
}

fn children(parent: &OwnedFd, name: &str) -> sys::Result<Vec<String>> {
    let directory = sys::openat(parent.as_raw_fd(), &c(name), libc::O_RDONLY | libc::O_DIRECTORY, 0)?;
    let entries = sys::list(directory.as_raw_fd())?;
    let directories = entries.into_iter().filter(|(_, kind)| *kind == libc::DT_DIR);
    Ok(directories.filter_map(|(name, _)| name.into_string().ok()).collect())
}

fn remove_group(parent: &OwnedFd, name: &str) -> Result<bool, Failure> {
    let path = c(name);
    let path: &CStr = &path;
    match sys::unlinkat(parent.as_raw_fd(), path, libc::AT_REMOVEDIR) {
        Ok(()) | Err(Errno(libc::ENOENT)) => Ok(true),
        Err(Errno(libc::EBUSY)) => Ok(false),
        other => other.map(|()| true).at(STAGE, || format!("remove group {name}")),
    }
}

/// Children are aether's, one per command, and gone already unless it was killed; so the group itself is tried first.
fn remove_tree(parent: &OwnedFd, name: &str) -> Result<bool, Failure> {
    if remove_group(parent, name)? {
        return Ok(true);
    }
    for child in children(parent, name).unwrap_or_default() {
        remove_tree(parent, &format!("{name}/{child}"))?;
    }
    remove_group(parent, name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_hybrid_hierarchies() {
        let text = "31 25 0:27 / /sys/fs/cgroup/cpu rw,relatime - cgroup cgroup rw,cpu,cpuacct\n\
                    32 25 0:28 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n\
                    33 25 0:29 / /sys/fs/cgroup/pids rw shared:4 - cgroup cgroup rw,pids\n\
                    34 25 0:30 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n\
                    35 25 0:30 /deep /mnt rw - cgroup2 cgroup2 rw\n";
        let (unified, v1) = find_hierarchies(text);
        assert_eq!(unified.as_deref(), Some("/sys/fs/cgroup/unified"));
        assert_eq!(v1, ["/sys/fs/cgroup/memory", "/sys/fs/cgroup/cpu", "/sys/fs/cgroup/pids"]);
    }

    #[test]
    fn finds_own_group() {
        let text = "8:pids:/a\n4:memory:/b/c\n1:cpu,cpuacct:/d\n0::/e\n";
        assert_eq!(own_group(text, "memory"), "/b/c");
        assert_eq!(own_group(text, "cpu"), "/d");
        assert_eq!(own_group(text, "freezer"), "/");
    }

    #[test]
    fn reads_fields() {
        assert_eq!(field("oom 4\noom_kill 3\n", "oom_kill"), 3);
        assert_eq!(field("oom 4\noom_kill 3\n", "oom"), 4);
        assert_eq!(field("", "max"), -1);
    }

    #[test]
    fn some_process_numbers_are_kept() {
        assert_eq!(numbers_for_sandboxes(32_768), 28_672);
        assert_eq!(numbers_for_sandboxes(4_194_304), 3_670_016);
        assert_eq!(numbers_for_sandboxes(4_096), 2_048);
    }

    #[test]
    fn limits_never_round_to_nothing() {
        assert_eq!(Limits::new(1, 0.0, 1).cpu_quota, 1000);
        assert_eq!(Limits::new(1, 1.5, 1).cpu_quota, 150_000);
    }
}
