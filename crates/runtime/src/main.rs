//! `dsec-runtime`: the part of DSec that must be small, static and fast.
//!
//! One binary, one subcommand for each process role; see ARCHITECTURE.md for who starts whom.

mod aether;
mod birth;
mod cgroup;
mod inside;
mod launcher;
mod link;
mod msgpack;
mod sys;

fn main() {
    let args: Vec<String> = std::env::args_os().skip(1).map(|arg| arg.to_string_lossy().into_owned()).collect();
    match args.first().map(String::as_str) {
        Some("launcher") => std::process::exit(launcher::main(&args[1..])),
        Some("aether") => aether::serve(inside::enter()),
        Some("version") => println!("{}", env!("CARGO_PKG_VERSION")),
        _ => {
            eprintln!("usage: dsec-runtime launcher|aether|helper|version ...");
            std::process::exit(2);
        }
    }
}
