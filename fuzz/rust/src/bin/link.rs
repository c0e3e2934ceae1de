#![no_main]
#![allow(dead_code, unused_imports, macro_expanded_macro_exports_accessed_by_absolute_paths)]

include!("../runtime.rs");

libfuzzer_sys::fuzz_target!(|data: &[u8]| fuzzing::link(data));
