//! `dsec-runtime`: the part of DSec that must be small, static and fast.
//!
//! One binary, one subcommand for each process role; see ARCHITECTURE.md for who starts whom.

mod aether;
mod birth;
mod cgroup;
#[cfg(any(test, fuzzing))]
mod fuzzing;
mod helper;
mod inside;
mod launcher;
mod link;
mod msgpack;
mod supervise;
mod sys;

fn main() {
    let mut args = std::env::args_os().map(|arg| arg.to_string_lossy().into_owned());
    if args.next().is_some_and(|name| name == launcher::zygote::NAME) {
        aether::serve(launcher::zygote::run());
    }
    let args: Vec<String> = args.collect();
    match args.first().map(String::as_str) {
        Some("launcher") => std::process::exit(launcher::main(&args[1..])),
        Some("helper") => std::process::exit(helper::main(&args[1..])),
        Some("supervise") => std::process::exit(supervise::main(&args[1..])),
        Some("version") => println!("{}", env!("CARGO_PKG_VERSION")),
        _ => {
            sys::say(format_args!("usage: dsec-runtime launcher|helper|supervise|version ..."));
            std::process::exit(2);
        }
    }
}
