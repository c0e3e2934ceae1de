//! What fuzzers feed with bytes, and what must hold whatever the bytes are. Tests replay the kept corpus with the same functions.

use crate::link::{Event, Frame, Ledger, Preamble, ProtocolError, HEADER};
use crate::msgpack::Value;

/// Every value below one, looked at in every way; how many there were.
fn visit(value: Value, most: &mut u32) {
    *most = most.saturating_sub(1);
    if *most == 0 {
        return;
    }
    let _ = (value.bool(), value.u64(), value.f64(), value.str(), value.bytes(), value.is_nil(), value.get("m"));
    let children = value.array().into_iter().flatten().chain(value.entries().into_iter().flatten());
    children.for_each(|child| visit(child, most));
}

/// What a server makes of a stream that it gets in pieces of these sizes: frames taken, and why it hung up.
fn serve(bytes: &[u8], mut piece: impl FnMut() -> usize) -> (usize, Option<ProtocolError>) {
    let (mut ledger, mut out) = (Ledger::new(), Vec::new());
    let (mut at, mut have, mut frames) = (0, 0, 0);
    while have < bytes.len() {
        have = (have + piece()).min(bytes.len());
        loop {
            let (frame, size) = match Frame::parse(&bytes[at..have]) {
                Ok(Some(found)) => found,
                Ok(None) => break,
                Err(error) => return (frames, Some(error)),
            };
            assert!(size >= HEADER && at + size <= have, "a frame ends behind what there is");
            let mut again = Vec::new();
            frame.put(&mut again);
            assert_eq!(again, &bytes[at..at + size], "a frame is not what it was made from");
            let payload = frame.payload.len();
            match ledger.admit(frame, &mut out) {
                Ok(Event::Open { params, .. }) => visit(params, &mut 10_000),
                Ok(Event::Data { stream, bytes }) => {
                    assert_eq!(bytes.len() + 1, payload);
                    if stream % 4 == 1 {
                        ledger.consumed(stream, payload as u32, &mut out); // the others' readers are slow
                    }
                }
                Ok(_) => {}
                Err(error) => return (frames, Some(error)),
            }
            (at, frames) = (at + size, frames + 1);
        }
        assert!(out.len() <= frames * 2 * (HEADER + 4), "more is answered than was asked");
    }
    (frames, None)
}

/// The decoder of link: preamble, frames, values, credit. Cuts in the stream must make no difference.
pub fn link(data: &[u8]) {
    let (used, preamble) = Preamble::find(data);
    assert!(used <= data.len());
    if let Some(preamble) = preamble {
        assert_eq!(preamble.bytes(), data[used - 32..used]);
    }
    let whole = serve(data, || usize::MAX / 2);
    let mut seed = data.len() as u32 | 1;
    let cut = serve(data, || {
        seed = seed.wrapping_mul(1_103_515_245).wrapping_add(12_345);
        1 + (seed >> 16) as usize % 37
    });
    assert_eq!(whole, cut, "cuts make a difference");
    if let Some(value) = Value::check(data) {
        visit(value, &mut 10_000);
    }
}

pub use crate::aether::fuzzing::untar;

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    fn corpus(name: &str) -> Vec<(PathBuf, Vec<u8>)> {
        let directory = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus").join(name);
        let entries = std::fs::read_dir(directory).expect("corpus").map(|entry| entry.expect("entry").path());
        let found: Vec<_> = entries.map(|path| (path.clone(), std::fs::read(path).expect("input"))).collect();
        assert!(found.len() > 20, "the corpus is not there");
        found
    }

    #[test]
    fn the_kept_inputs_of_the_link_decoder() {
        for (path, bytes) in corpus("link") {
            crate::sys::say(format_args!("{}", path.display())); // shown when it fails
            super::link(&bytes);
        }
    }

    /// Needs root, as everything that aether unpacks does.
    #[test]
    fn the_kept_inputs_of_the_unpacker() {
        for (path, bytes) in corpus("tar") {
            crate::sys::say(format_args!("{}", path.display()));
            super::untar(&bytes);
        }
    }
}
