//! `mount-layer`: one EROFS image, straight from its file, as a detached mount sent over a socket.

use crate::sys::{c, mount, socket, Errno, Failure};
use serde::Serialize;
use std::ffi::CString;
use std::io::{Read, Seek, SeekFrom};
use std::os::fd::{AsRawFd, RawFd};

#[derive(Serialize)]
struct Answer<'a> {
    ok: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<&'a str>,
}

pub fn main(args: &[String]) -> Result<(), String> {
    let [flag, fd, meta, data @ ..] = args else { return Err(super::USAGE.into()) };
    let socket: RawFd = fd.parse().map_err(|_| super::USAGE.to_string())?;
    if flag != "--fd" {
        return Err(super::USAGE.into());
    }
    let made = check(meta).and_then(|()| mount(meta, data).map_err(|failure| failure.what));
    let error = made.as_ref().err().map(String::as_str);
    let answer = rmp_serde::to_vec_named(&Answer { ok: error.is_none(), error }).unwrap_or_default();
    let fds: Vec<RawFd> = made.iter().map(AsRawFd::as_raw_fd).collect();
    socket::send(socket, &answer, &fds).map_err(|e| format!("send over descriptor {socket}: {e}"))?;
    made.map(drop)
}

/// Device nodes in a layer cannot be opened (whiteouts, which the overlay only looks at, work all the same).
fn mount(meta: &str, data: &[String]) -> Result<std::os::fd::OwnedFd, Failure> {
    let mut parameters = vec![(c"source", Some(c(meta)))];
    parameters.extend(data.iter().map(|path| (c"device", Some(c(path.as_str())))));
    parameters.push((c"ro", None::<CString>));
    let borrowed: Vec<_> = parameters.iter().map(|(key, value)| (*key, value.as_deref())).collect();
    let flags = mount::ATTR_RDONLY | mount::ATTR_NOSUID | mount::ATTR_NODEV;
    let at = || format!("mount {meta} with {} data blobs", data.len());
    mount::new_filesystem(c"erofs", &borrowed, flags).map_err(|failure| failure.at("layer", at()))
}

/// Offset and value of the magic number of EROFS.
const MAGIC: (u64, [u8; 4]) = (1024, [0xe2, 0xe1, 0xf5, 0xe0]);

/// The kernel says "invalid argument" to whatever is not an image; this says more.
fn check(meta: &str) -> Result<(), String> {
    let told = |error: std::io::Error| format!("{meta}: {}", Errno::from(error));
    let mut file = std::fs::File::open(meta).map_err(told)?;
    if !file.metadata().map_err(told)?.is_file() {
        return Err(format!("{meta}: not a regular file"));
    }
    let mut magic = [0; 4];
    let read = file.seek(SeekFrom::Start(MAGIC.0)).and_then(|_| file.read_exact(&mut magic));
    match read {
        Ok(()) if magic == MAGIC.1 => Ok(()),
        _ => Err(format!("{meta}: not an EROFS image")),
    }
}
