//! Helpers: short-lived, one verb each, started by the edge for what takes privilege.

mod devpts;
mod glob;
mod mount_layer;
mod usage;
mod walk;

const USAGE: &str = "usage: dsec-runtime helper devpts --pidfd N
       dsec-runtime helper mount-layer --fd N META [DATA...]
       dsec-runtime helper usage FD...
       dsec-runtime helper walk --dir-fd N [--idbase B] [--data MAX_BYTES] [--include GLOB]... [--contents GLOB]... [--bare GLOB]...";

/// Entry point of `dsec-runtime helper`; returns the exit status.
pub fn main(args: &[String]) -> i32 {
    let done = match args.split_first() {
        Some((verb, rest)) if verb == "devpts" => devpts::main(rest),
        Some((verb, rest)) if verb == "mount-layer" => mount_layer::main(rest),
        Some((verb, rest)) if verb == "usage" => usage::main(rest),
        Some((verb, rest)) if verb == "walk" => walk::main(rest),
        _ => Err(USAGE.to_string()),
    };
    match done {
        Ok(()) => 0,
        Err(error) => {
            crate::sys::say(format_args!("{error}"));
            1
        }
    }
}
