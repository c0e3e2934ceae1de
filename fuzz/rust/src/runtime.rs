// The modules of the runtime, which is a program and not a library, as they are.

#[path = "../../../crates/runtime/src/aether/mod.rs"]
mod aether;
#[path = "../../../crates/runtime/src/birth.rs"]
mod birth;
#[path = "../../../crates/runtime/src/cgroup.rs"]
mod cgroup;
#[path = "../../../crates/runtime/src/fuzzing.rs"]
mod fuzzing;
#[path = "../../../crates/runtime/src/helper/mod.rs"]
mod helper;
#[path = "../../../crates/runtime/src/inside/mod.rs"]
mod inside;
#[path = "../../../crates/runtime/src/launcher/mod.rs"]
mod launcher;
#[path = "../../../crates/runtime/src/link.rs"]
mod link;
#[path = "../../../crates/runtime/src/msgpack.rs"]
mod msgpack;
#[path = "../../../crates/runtime/src/sys/mod.rs"]
mod sys;
#[path = "../../../crates/runtime/src/supervise.rs"]
mod supervise;
