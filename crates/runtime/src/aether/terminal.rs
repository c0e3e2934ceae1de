//! Terminals: both ends of a pseudo-terminal of the sandbox's own devpts.
//!
//! Aether keeps the other end, too, until the main process has ended: a program that closes its descriptors for a moment
//! is no end of output, and the kernel does not report a hang-up for ever.

use super::fault::{describe, Fault};
use super::os::{self, check, Fd};
use crate::msgpack::Value;
use std::ffi::CStr;

/// Where the edge has mounted the sandbox's own devpts. Not /dev/ptmx, which is a link.
const MULTIPLEXER: &CStr = c"/dev/pts/ptmx";
const DEVPTS_SUPER_MAGIC: libc::c_long = 0x1cd1;
const MOST: u64 = 4096;

/// Of a screen, in characters.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Size {
    cols: u16,
    rows: u16,
}

impl Size {
    /// What `exec` asks for with `pty`; None: no terminal.
    pub fn wanted(params: Value) -> Result<Option<Size>, Fault> {
        params.get("pty").map(Size::of).transpose()
    }

    pub fn of(fields: Value) -> Result<Size, Fault> {
        let side = |name: &str| {
            let side = fields.get(name).and_then(Value::u64).filter(|side| (1..=MOST).contains(side));
            let side = side.and_then(|side| u16::try_from(side).ok());
            side.ok_or_else(|| Fault::invalid(format!("pty: {name} must be a number from 1 to {MOST}")))
        };
        Ok(Size { cols: side("cols")?, rows: side("rows")? })
    }
}

pub struct Terminal {
    master: Fd,
    /// The command's end, as long as its main process lives.
    slave: Option<Fd>,
}

impl Terminal {
    /// A new one that belongs to a user inside.
    pub fn open(size: Size, uid: u32) -> Result<Terminal, Fault> {
        Terminal::open_at(MULTIPLEXER, size, uid)
    }

    fn open_at(multiplexer: &CStr, size: Size, uid: u32) -> Result<Terminal, Fault> {
        let missing = |why: &str| {
            Fault::new("unsupported", format!("no terminals in this sandbox: {} {why}", multiplexer.to_string_lossy()))
                .hint("its devpts is mounted when a command first asks for a terminal; without one, leave out pty")
        };
        let flags = libc::O_RDWR | libc::O_NOCTTY | libc::O_NONBLOCK;
        let resolve = libc::RESOLVE_NO_SYMLINKS | libc::RESOLVE_NO_MAGICLINKS;
        let master = os::open(libc::AT_FDCWD, multiplexer, flags, 0, resolve).map_err(|errno| match errno {
            libc::ENOSPC => Fault::new("capacity", "all terminals of this sandbox, or of the machine, are in use")
                .hint("a sandbox may have 64; end commands that hold one"),
            libc::EMFILE | libc::ENFILE | libc::ENOMEM => {
                Fault::new("capacity", format!("cannot open a terminal: {}", describe(errno))).retryable()
            }
            errno => missing(&describe(errno)),
        })?;
        let mut about: libc::statfs = unsafe { std::mem::zeroed() };
        if unsafe { libc::fstatfs(master.0, &mut about) } != 0 || about.f_type != DEVPTS_SUPER_MAGIC {
            return Err(missing("is not of a devpts"));
        }
        let cannot = |errno| Fault::internal("cannot set up the terminal", errno);
        let mut terminal = Terminal { master, slave: None };
        terminal.resize(size).map_err(cannot)?;
        let slave = terminal.open_slave().map_err(cannot)?;
        // Its group (tty) and mode are those of the mount.
        check(unsafe { libc::fchown(slave.0, uid, u32::MAX) }).map_err(|errno| match errno {
            libc::EINVAL => Fault::invalid(format!("user id {uid} is not one of the sandbox's")),
            errno => cannot(errno),
        })?;
        terminal.slave = Some(slave);
        Ok(terminal)
    }

    /// Straight from the master: whatever lies at its path is not looked at.
    fn open_slave(&self) -> os::Result<Fd> {
        let unlocked: libc::c_int = 0;
        check(unsafe { libc::ioctl(self.master.0, libc::TIOCSPTLCK, &unlocked) })?;
        let flags = libc::O_RDWR | libc::O_NOCTTY | libc::O_CLOEXEC;
        check(unsafe { libc::ioctl(self.master.0, libc::TIOCGPTPEER, flags) }).map(|fd| Fd(fd as i32))
    }

    /// The kernel tells the foreground group by SIGWINCH when it is another size.
    pub fn resize(&self, size: Size) -> os::Result<()> {
        let size = libc::winsize { ws_row: size.rows, ws_col: size.cols, ws_xpixel: 0, ws_ypixel: 0 };
        check(unsafe { libc::ioctl(self.master.0, libc::TIOCSWINSZ, &size) }).map(drop)
    }

    /// Another descriptor of aether's end.
    pub fn ours(&self) -> os::Result<Fd> {
        os::duplicate(&self.master)
    }

    /// Another descriptor of the command's end.
    pub fn theirs(&self) -> os::Result<Fd> {
        self.slave.as_ref().ok_or(libc::EIO).and_then(os::duplicate)
    }

    /// From here on the last process that lets go of the terminal ends its output.
    pub fn let_go(&mut self) {
        self.slave = None;
    }

    /// What to type for the end of input after `last`: the end-of-file character counts as such at the start of a line only,
    /// elsewhere the first one just hands the line over. A program that reads key by key gets it as a key.
    pub fn end_of_input(&self, last: u8) -> Vec<u8> {
        let mut modes: libc::termios = unsafe { std::mem::zeroed() };
        if unsafe { libc::tcgetattr(self.master.0, &mut modes) } != 0 {
            return Vec::new();
        }
        let key = modes.c_cc[libc::VEOF];
        let within_line = modes.c_lflag & libc::ICANON != 0 && !matches!(last, b'\n' | b'\r') && last != key;
        match key {
            0 => Vec::new(), // it has none
            key => vec![key; 1 + usize::from(within_line)],
        }
    }
}

/// In a child that leads a session of its own: the terminal on its standard input becomes that session's.
pub unsafe fn take_control() -> i64 {
    unsafe { libc::syscall(libc::SYS_ioctl, 0, libc::TIOCSCTTY, 0) }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SIZE: Size = Size { cols: 80, rows: 24 };

    #[test]
    fn only_a_devpts_gives_terminals() {
        let dir = std::env::temp_dir().join(format!("dsec-terminal-{}", std::process::id()));
        std::fs::create_dir_all(&dir).expect("directory");
        let path = |name: &str| os::cstring(dir.join(name).as_os_str().as_encoded_bytes()).expect("path");
        std::fs::write(dir.join("file"), "").expect("file");
        std::os::unix::fs::symlink("/dev/pts/ptmx", dir.join("link")).expect("link");
        assert_eq!(unsafe { libc::mkfifo(path("fifo").as_ptr(), 0o600) }, 0);
        for name in ["file", "link", "fifo", "nothing", "file/below", ""] {
            let fault = Terminal::open_at(&path(name), SIZE, 0).err().expect("no terminal");
            assert_eq!(fault.kind, "unsupported", "{name}: {}", fault.message);
        }
        assert_eq!(Terminal::open_at(c"/dev/null", SIZE, 0).err().expect("no terminal").kind, "unsupported");
        std::fs::remove_dir_all(&dir).expect("remove");
    }
}
