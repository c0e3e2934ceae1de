//! An error with a kind of the closed set (`dsec.protocol.errors`), as it crosses the link.

use super::os::Errno;
use crate::msgpack::Pack;

#[derive(Debug, Clone)]
pub struct Fault {
    pub kind: &'static str,
    pub message: String,
    pub hint: &'static str,
    pub retryable: bool,
}

impl Fault {
    pub fn new(kind: &'static str, message: impl Into<String>) -> Fault {
        Fault { kind, message: message.into(), hint: "", retryable: false }
    }

    pub fn invalid(message: impl Into<String>) -> Fault {
        Fault::new("invalid_request", message)
    }

    pub fn internal(what: &str, errno: Errno) -> Fault {
        Fault::new("internal", format!("{what}: {}", describe(errno)))
    }

    pub fn hint(mut self, hint: &'static str) -> Fault {
        self.hint = hint;
        self
    }

    pub fn retryable(mut self) -> Fault {
        self.retryable = true;
        self
    }

    /// What became of an operation on a file.
    pub fn file(errno: Errno, path: &[u8]) -> Fault {
        let kind = match errno {
            libc::ENOENT => "file_not_found",
            libc::EISDIR => "is_a_directory",
            libc::ENOTDIR => "not_a_directory",
            libc::EACCES | libc::EPERM | libc::EROFS => "file_permission",
            libc::ENOSPC | libc::EDQUOT => "no_space",
            libc::EEXIST | libc::ENOTEMPTY => "file_exists",
            libc::ELOOP | libc::EINVAL | libc::ENAMETOOLONG | libc::ENXIO | libc::ENODEV => "file_invalid",
            _ => "file_io",
        };
        let hint = match kind {
            "file_permission" => "act as another user (user=), or let a command do it, as with all of /proc",
            "no_space" => "the sandbox's disk limit (disk_limit_mb) is reached, or the node's disk is full",
            _ => "",
        };
        Fault::new(kind, format!("{}: {}", String::from_utf8_lossy(path), describe(errno))).hint(hint)
    }

    /// The payload of an ERROR frame.
    pub fn pack(&self) -> Vec<u8> {
        let pack = Pack::default().map(5).str("kind").str(self.kind).str("message").str(&self.message);
        pack.str("hint").str(self.hint).str("retryable").bool(self.retryable).str("details").map(0).0
    }
}

/// The text of an errno. Ours, since the C library's passes through translations.
pub fn describe(errno: Errno) -> String {
    let text = match errno {
        libc::ENOENT => "No such file or directory",
        libc::EISDIR => "Is a directory",
        libc::ENOTDIR => "Not a directory",
        libc::EACCES => "Permission denied",
        libc::EPERM => "Operation not permitted",
        libc::EROFS => "Read-only file system",
        libc::ENOSPC => "No space left on device",
        libc::EDQUOT => "Disk quota exceeded",
        libc::EEXIST => "File exists",
        libc::ENOTEMPTY => "Directory not empty",
        libc::ELOOP => "Too many levels of symbolic links",
        libc::ESTALE => "Directory was moved meanwhile",
        libc::EINVAL => "Invalid argument",
        libc::ENAMETOOLONG => "File name too long",
        libc::ENOEXEC => "Exec format error",
        libc::ETXTBSY => "Text file busy",
        libc::EIO => "Input/output error",
        libc::ENOMEM => "Cannot allocate memory",
        libc::EAGAIN => "Resource temporarily unavailable",
        libc::EMFILE | libc::ENFILE => "Too many open files",
        libc::EXDEV => "Invalid cross-device link",
        libc::EMLINK => "Too many links",
        libc::EFBIG => "File too large",
        libc::ENOBUFS => "No buffer space available",
        libc::EADDRINUSE => "Address already in use",
        libc::EADDRNOTAVAIL => "Cannot assign requested address",
        _ => return format!("errno {errno}"),
    };
    text.to_owned()
}
