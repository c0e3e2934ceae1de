//! `dsec-runtime`: the part of DSec that must be small, static and fast.
//!
//! One binary, one subcommand for each process role; see ARCHITECTURE.md for who starts whom.

mod birth;
mod link;
mod msgpack;

fn main() {
    let mut args = std::env::args_os().skip(1);
    match args.next().and_then(|a| a.into_string().ok()).as_deref() {
        Some("version") => println!("{}", env!("CARGO_PKG_VERSION")),
        _ => {
            eprintln!("usage: dsec-runtime launcher|aether|helper|version ...");
            std::process::exit(2);
        }
    }
}
