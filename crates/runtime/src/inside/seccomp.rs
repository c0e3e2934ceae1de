//! The seccomp filter of a sandbox, compiled here to a binary tree over system call numbers.
//!
//! The kernel runs the filter for every call whose verdict depends on arguments and, at installation, once for each number
//! to learn which are always allowed; a tree makes both cheap. One filter, in two parts, serves aether and commands.

use crate::sys::{self, process::prctl};

const ALLOW: u32 = 0x7fff_0000;
const ERRNO: u32 = 0x0005_0000;
const ARCH_X86_64: u32 = 0xC000_003E;
/// The last call that has been reviewed; whatever newer kernels add answers ENOSYS until it has.
const LAST_KNOWN: i64 = 469; // file_setattr

// Classic BPF operations.
const LOAD: u16 = 0x20;
const JUMP: u16 = 0x05;
const JUMP_EQUAL: u16 = 0x15;
const JUMP_AT_LEAST: u16 = 0x35;
const JUMP_ANY_BIT: u16 = 0x45;
const AND: u16 = 0x54;
const RETURN: u16 = 0x06;
const NUMBER: u32 = 0;
const ARCH: u32 = 4;
/// Offset of the low half of an argument (all arguments checked here are 32-bit integers to the kernel).
const fn argument(index: u32) -> u32 {
    16 + 8 * index
}

/// The kernel's `struct sock_filter`.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Debug)]
struct Op {
    code: u16,
    yes: u8,
    no: u8,
    value: u32,
}

const fn op(code: u16, value: u32) -> Op {
    Op { code, yes: 0, no: 0, value }
}

const fn deny(errno: i32) -> Op {
    op(RETURN, ERRNO | errno as u32)
}

/// What happens with a call.
#[derive(Clone, Copy, PartialEq, Debug)]
enum Verdict {
    Allow,
    Errno(i32),
    /// Decided by arguments.
    Check(Check),
}

#[derive(Clone, Copy, PartialEq, Debug)]
enum Check {
    /// Refused when any of these bits is set in the argument.
    Bits {
        index: u32,
        mask: u32,
    },
    /// Refused when the argument is 1: PID 1, whom root inside could otherwise limit or starve.
    First {
        index: u32,
    },
    /// setpriority and ioprio_set: refused for PID 1, its group, and whole users (`user` is the kind's number).
    Priority {
        user: u32,
    },
    Personality,
    Ioctl,
    Socket,
}

const NAMESPACES: u32 = 0x7E02_0000;
const NEWTIME: u32 = 0x80;
const ADDR_NO_RANDOMIZE: u32 = 0x0004_0000;
const TIOCSETD: u32 = 0x5423;

/// Refused outright. Most need capabilities that a sandbox has not; they are here because the kernel's code behind them
/// should not even be reached.
const REFUSED: [i64; 65] = [
    libc::SYS_mount,
    libc::SYS_umount2,
    libc::SYS_pivot_root,
    libc::SYS_open_tree,
    libc::SYS_move_mount,
    libc::SYS_fsopen,
    libc::SYS_fsconfig,
    libc::SYS_fsmount,
    libc::SYS_fspick,
    libc::SYS_mount_setattr,
    467, // open_tree_attr
    libc::SYS_setns,
    libc::SYS_bpf,
    libc::SYS_perf_event_open,
    libc::SYS_userfaultfd,
    libc::SYS_io_uring_setup,
    libc::SYS_io_uring_enter,
    libc::SYS_io_uring_register,
    libc::SYS_add_key,
    libc::SYS_request_key,
    libc::SYS_keyctl,
    libc::SYS_init_module,
    libc::SYS_finit_module,
    libc::SYS_delete_module,
    libc::SYS_kexec_load,
    libc::SYS_kexec_file_load,
    libc::SYS_reboot,
    libc::SYS_swapon,
    libc::SYS_swapoff,
    libc::SYS_acct,
    libc::SYS_quotactl,
    libc::SYS_quotactl_fd,
    libc::SYS_syslog,
    libc::SYS_iopl,
    libc::SYS_ioperm,
    libc::SYS_modify_ldt,
    libc::SYS_open_by_handle_at,
    libc::SYS_fanotify_init,
    libc::SYS_fanotify_mark,
    libc::SYS_settimeofday,
    libc::SYS_clock_settime,
    libc::SYS_clock_adjtime,
    libc::SYS_adjtimex,
    libc::SYS_process_madvise,
    448, // process_mrelease
    libc::SYS_vhangup,
    libc::SYS_nfsservctl,
    libc::SYS_lookup_dcookie,
    libc::SYS_uselib,
    libc::SYS_ustat,
    libc::SYS_sysfs,
    libc::SYS__sysctl,
    libc::SYS_sethostname,
    libc::SYS_setdomainname,
    libc::SYS_getpmsg,
    libc::SYS_putpmsg,
    libc::SYS_afs_syscall,
    libc::SYS_tuxcall,
    libc::SYS_security,
    libc::SYS_vserver,
    459, // lsm_get_self_attr
    460, // lsm_set_self_attr
    461, // lsm_list_modules
    457, // statmount
    458, // listmount
];

/// Not there, as far as programs can tell; they then do without. Contexts of io_setup are counted for the machine as a
/// whole, and one sandbox could hold them all.
const ABSENT: [i64; 1] = [libc::SYS_io_setup];

const CHECKED: [(i64, Check); 15] = [
    (libc::SYS_clone, Check::Bits { index: 0, mask: NAMESPACES }),
    (libc::SYS_unshare, Check::Bits { index: 0, mask: NAMESPACES | NEWTIME }),
    (libc::SYS_prlimit64, Check::First { index: 0 }),
    (libc::SYS_sched_setaffinity, Check::First { index: 0 }),
    (libc::SYS_sched_setscheduler, Check::First { index: 0 }),
    (libc::SYS_sched_setparam, Check::First { index: 0 }),
    (libc::SYS_sched_setattr, Check::First { index: 0 }),
    (libc::SYS_migrate_pages, Check::First { index: 0 }),
    (libc::SYS_move_pages, Check::First { index: 0 }),
    (libc::SYS_setpriority, Check::Priority { user: libc::PRIO_USER }),
    (libc::SYS_ioprio_set, Check::Priority { user: 3 }),
    (libc::SYS_personality, Check::Personality),
    (libc::SYS_ioctl, Check::Ioctl),
    (libc::SYS_socket, Check::Socket),
    (libc::SYS_socketpair, Check::Socket),
];

impl Check {
    /// Straight code that ends in verdicts. Jumps count the operations they skip.
    fn code(self) -> Vec<Op> {
        let equal = |value, yes, no| Op { code: JUMP_EQUAL, yes, no, value };
        let allow = op(RETURN, ALLOW);
        match self {
            Check::Bits { index, mask } => {
                let test = Op { code: JUMP_ANY_BIT, yes: 0, no: 1, value: mask };
                vec![op(LOAD, argument(index)), test, deny(libc::EPERM), allow]
            }
            Check::First { index } => {
                vec![op(LOAD, argument(index)), equal(1, 0, 1), deny(libc::EPERM), allow]
            }
            Check::Priority { user } => vec![
                op(LOAD, argument(0)),
                equal(user, 2, 0),
                op(LOAD, argument(1)),
                equal(1, 0, 1),
                deny(libc::EPERM),
                allow,
            ],
            Check::Personality => vec![
                op(LOAD, argument(0)),
                equal(0, 3, 0),
                equal(ADDR_NO_RANDOMIZE, 2, 0),
                equal(u32::MAX, 1, 0),
                deny(libc::EPERM),
                allow,
            ],
            Check::Ioctl => vec![
                op(LOAD, argument(1)),
                equal(libc::TIOCSTI as u32, 6, 0),
                equal(libc::TIOCLINUX as u32, 5, 0),
                equal(TIOCSETD, 4, 0), // other line disciplines: modules of the kernel, and seconds under a terminal's lock
                op(AND, 0xff00),
                equal(0x9400, 3, 0), // btrfs: a subvolume made in /dev/shm would escape the quota
                equal(0x5800, 2, 0), // XFS and freezing of filesystems
                allow,
                deny(libc::EPERM),
                deny(libc::ENOTTY),
            ],
            Check::Socket => vec![
                op(LOAD, argument(0)),
                equal(libc::AF_UNIX as u32, 6, 0),
                equal(libc::AF_INET as u32, 5, 0),
                equal(libc::AF_INET6 as u32, 4, 0),
                equal(libc::AF_NETLINK as u32, 0, 2),
                op(LOAD, argument(2)),
                equal(libc::NETLINK_ROUTE as u32, 1, 0),
                deny(libc::EAFNOSUPPORT),
                allow,
            ],
        }
    }
}

impl Verdict {
    fn code(self) -> Vec<Op> {
        match self {
            Verdict::Allow => vec![op(RETURN, ALLOW)],
            Verdict::Errno(errno) => vec![deny(errno)],
            Verdict::Check(check) => check.code(),
        }
    }
}

/// Ranges of numbers with the same verdict: each starts where the one before ends.
fn ranges(mut rules: Vec<(i64, Verdict)>) -> Vec<(u32, Verdict)> {
    rules.sort_by_key(|(number, _)| *number);
    let mut ranges: Vec<(u32, Verdict)> = vec![(0, Verdict::Allow)];
    let mut push = |start: i64, verdict: Verdict| {
        match ranges.last_mut() {
            Some(last) if i64::from(last.0) == start => last.1 = verdict,
            Some(last) if last.1 == verdict => {}
            _ => ranges.push((start as u32, verdict)),
        };
    };
    for (number, verdict) in rules {
        push(number, verdict);
        push(number + 1, Verdict::Allow);
    }
    push(LAST_KNOWN + 1, Verdict::Errno(libc::ENOSYS));
    ranges
}

fn tree(ranges: &[(u32, Verdict)]) -> Vec<Op> {
    if let [(_, verdict)] = ranges {
        return verdict.code();
    }
    let (low, high) = ranges.split_at(ranges.len() / 2);
    let (left, right) = (tree(low), tree(high));
    let test = |yes: usize, no: u8| Op { code: JUMP_AT_LEAST, yes: yes as u8, no, value: high[0].0 };
    let mut code =
        if left.len() <= 255 { vec![test(left.len(), 0)] } else { vec![test(0, 1), op(JUMP, left.len() as u32)] };
    code.extend(left);
    code.extend(right);
    code
}

/// Other ABIs of the processor (32-bit, x32) are refused wholesale; then the tree over `rules` decides.
fn program(rules: Vec<(i64, Verdict)>) -> Vec<Op> {
    let mut code = vec![
        op(LOAD, ARCH),
        Op { code: JUMP_EQUAL, yes: 1, no: 0, value: ARCH_X86_64 },
        deny(libc::ENOSYS),
        op(LOAD, NUMBER),
    ];
    code.extend(tree(&ranges(rules)));
    code
}

/// What PID 1 still needs between its birth and serving.
const LATE: [i64; 6] = [
    libc::SYS_mount,
    libc::SYS_umount2,
    libc::SYS_move_mount,
    libc::SYS_pivot_root,
    libc::SYS_unshare,
    libc::SYS_sethostname,
];

fn rules(late: bool) -> Vec<(i64, Verdict)> {
    let refused = REFUSED.iter().map(|n| (*n, Verdict::Errno(libc::EPERM)));
    let checked = CHECKED.iter().map(|(n, check)| (*n, Verdict::Check(*check)));
    let absent = ABSENT.iter().map(|n| (*n, Verdict::Errno(libc::ENOSYS)));
    refused.chain(absent).chain(checked).filter(|(n, _)| LATE.contains(n) == late).collect()
}

fn install(code: &[Op]) -> sys::Result<()> {
    #[repr(C)]
    struct Program {
        length: u16,
        code: *const Op,
    }
    let program = Program { length: code.len() as u16, code: code.as_ptr() };
    const SET_MODE_FILTER: u32 = 1;
    unsafe { crate::sys!(SYS_seccomp, SET_MODE_FILTER, 0, &program as *const Program) }.map(drop)
}

/// Installs nearly all of the filter, in the zygote: its copies share it, which saves time and memory in each.
pub fn install_early_filter() -> sys::Result<()> {
    prctl(libc::PR_SET_NO_NEW_PRIVS, 1)?;
    install(&program(rules(false)))
}

/// The rest of the filter, compiled ahead of the moment that counts.
pub struct LateFilter(Vec<Op>);

impl LateFilter {
    pub fn compile() -> Self {
        LateFilter(program(rules(true)))
    }

    /// Refuses what PID 1 itself needed until now. From here on the whole filter holds.
    pub fn install(&self) -> sys::Result<()> {
        install(&self.0)
    }
}

/// For commands, before they execute: clone3 answers ENOSYS, so that C libraries fall back to clone, whose flags a filter
/// can see. Aether itself needs clone3 to start commands in their own group.
pub fn install_command_filter() -> sys::Result<()> {
    const CODE: [Op; 5] = [
        op(LOAD, NUMBER),
        Op { code: JUMP_EQUAL, yes: 0, no: 1, value: libc::SYS_clone3 as u32 },
        deny(libc::ENOSYS),
        op(RETURN, ALLOW),
        op(RETURN, ALLOW),
    ];
    install(&CODE[..4])
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs both parts of the filter as the kernel would: the stricter verdict holds.
    fn run(number: i64, arguments: [u64; 6]) -> u32 {
        let parts = [false, true].map(|late| run_on(&program(rules(late)), ARCH_X86_64, number, arguments));
        parts.into_iter().min().unwrap_or(ALLOW)
    }

    fn run_on(code: &[Op], arch: u32, number: i64, arguments: [u64; 6]) -> u32 {
        let load = |offset: u32| match offset {
            NUMBER => number as u32,
            ARCH => arch,
            _ => arguments[(offset as usize - 16) / 8] as u32,
        };
        let (mut at, mut a) = (0, 0);
        loop {
            let op = code[at];
            at += 1;
            let mut branch = |taken: bool| at += usize::from(if taken { op.yes } else { op.no });
            match op.code {
                LOAD => a = load(op.value),
                AND => a &= op.value,
                JUMP => at += op.value as usize,
                JUMP_EQUAL => branch(a == op.value),
                JUMP_AT_LEAST => branch(a >= op.value),
                JUMP_ANY_BIT => branch(a & op.value != 0),
                RETURN => return op.value,
                other => panic!("operation {other:#x}"),
            }
        }
    }

    const EPERM: u32 = ERRNO | libc::EPERM as u32;
    const ENOSYS: u32 = ERRNO | libc::ENOSYS as u32;

    #[test]
    fn every_number_has_its_verdict() {
        assert!(program(rules(false)).len() < 1000 && program(rules(true)).len() < 50);
        for number in 0..600 {
            if CHECKED.iter().any(|(n, _)| *n == number) {
                continue;
            }
            let expected = if number > LAST_KNOWN || ABSENT.contains(&number) {
                ENOSYS
            } else if REFUSED.contains(&number) {
                EPERM
            } else {
                ALLOW
            };
            assert_eq!(run(number, [0; 6]), expected, "call {number}");
        }
        assert_eq!(run(0x4000_0000 | libc::SYS_read, [0; 6]), ENOSYS, "x32");
        assert_eq!(run_on(&program(rules(false)), 0x4000_0003, 0, [0; 6]), ENOSYS, "32-bit");
    }

    #[test]
    fn arguments_decide() {
        let verdict = |number, arguments: &[u64]| {
            let mut all = [0; 6];
            all[..arguments.len()].copy_from_slice(arguments);
            run(number, all)
        };
        for flag in
            [libc::CLONE_NEWUSER, libc::CLONE_NEWNS, libc::CLONE_NEWPID, libc::CLONE_NEWNET, libc::CLONE_NEWCGROUP]
        {
            assert_eq!(verdict(libc::SYS_clone, &[flag as u32 as u64 | 17]), EPERM);
            assert_eq!(verdict(libc::SYS_unshare, &[flag as u32 as u64]), EPERM);
        }
        assert_eq!(verdict(libc::SYS_clone, &[0x1200011]), ALLOW);
        assert_eq!(verdict(libc::SYS_unshare, &[libc::CLONE_FILES as u64]), ALLOW);
        assert_eq!(verdict(libc::SYS_prlimit64, &[1]), EPERM);
        assert_eq!(verdict(libc::SYS_prlimit64, &[1 << 32 | 1]), EPERM, "the kernel ignores the high half");
        assert_eq!(verdict(libc::SYS_prlimit64, &[0]), ALLOW);
        assert_eq!(verdict(libc::SYS_setpriority, &[0, 1]), EPERM);
        assert_eq!(verdict(libc::SYS_setpriority, &[1, 1]), EPERM);
        assert_eq!(verdict(libc::SYS_setpriority, &[2, 0]), EPERM);
        assert_eq!(verdict(libc::SYS_setpriority, &[0, 0]), ALLOW);
        assert_eq!(verdict(libc::SYS_ioprio_set, &[3, 0]), EPERM);
        assert_eq!(verdict(libc::SYS_ioprio_set, &[1, 0]), ALLOW);
        assert_eq!(verdict(libc::SYS_personality, &[0]), ALLOW);
        assert_eq!(verdict(libc::SYS_personality, &[u64::from(ADDR_NO_RANDOMIZE)]), ALLOW);
        assert_eq!(verdict(libc::SYS_personality, &[8]), EPERM);
        assert_eq!(verdict(libc::SYS_ioctl, &[0, 0x5000_940e]), ERRNO | libc::ENOTTY as u32);
        assert_eq!(verdict(libc::SYS_ioctl, &[0, 0x8004_587d]), ERRNO | libc::ENOTTY as u32);
        for refused in [libc::TIOCSTI, libc::TIOCLINUX, u64::from(TIOCSETD)] {
            assert_eq!(verdict(libc::SYS_ioctl, &[0, refused]), EPERM);
            assert_eq!(verdict(libc::SYS_ioctl, &[0, 1 << 32 | refused]), EPERM, "the kernel ignores the high half");
        }
        let sizes = [libc::TIOCGWINSZ, libc::TIOCSWINSZ];
        let modes = [libc::TCGETS, libc::TCSETS, libc::TCSETSW, libc::TCSETSF, libc::TIOCGPGRP, libc::TIOCSPGRP];
        let pairs = [libc::TIOCSCTTY, libc::TIOCNOTTY, libc::TIOCGPTN, libc::TIOCSPTLCK, libc::TIOCGPTPEER];
        for allowed in sizes.into_iter().chain(modes).chain(pairs) {
            assert_eq!(verdict(libc::SYS_ioctl, &[0, allowed]), ALLOW, "{allowed:x}");
        }
        for family in [libc::AF_UNIX, libc::AF_INET, libc::AF_INET6, libc::AF_NETLINK] {
            assert_eq!(verdict(libc::SYS_socket, &[family as u64, 1, 0]), ALLOW);
        }
        for family in [libc::AF_VSOCK, libc::AF_PACKET, libc::AF_ALG, libc::AF_BLUETOOTH, 0] {
            assert_eq!(verdict(libc::SYS_socket, &[family as u64, 1, 0]), ERRNO | libc::EAFNOSUPPORT as u32);
        }
        assert_eq!(verdict(libc::SYS_socket, &[libc::AF_NETLINK as u64, 3, 9]), ERRNO | libc::EAFNOSUPPORT as u32);
    }
}
