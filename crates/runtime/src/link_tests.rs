//! The server's side of link against the shared vectors, and against random bytes.

use super::*;
use serde_json::Value as Json;

fn vectors() -> Json {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/vectors/link.json");
    serde_json::from_str(&std::fs::read_to_string(path).expect("vectors")).expect("JSON")
}

fn hex(text: &Json) -> Vec<u8> {
    let text = text.as_str().expect("hex string");
    (0..text.len() / 2).map(|i| u8::from_str_radix(&text[2 * i..2 * i + 2], 16).expect("hex")).collect()
}

fn long(parts: &Json) -> Vec<u8> {
    let parts = parts.as_array().expect("list of [hex, times]");
    parts.iter().flat_map(|p| hex(&p[0]).repeat(p[1].as_u64().expect("times") as usize)).collect()
}

fn list<'a>(vectors: &'a Json, name: &str) -> &'a Vec<Json> {
    vectors[name].as_array().expect("list")
}

fn preamble(vector: &Json) -> Preamble {
    let epoch = vector["epoch"].as_str().and_then(|e| e.parse().ok()).expect("epoch");
    Preamble { nonce: hex(&vector["nonce"]).try_into().expect("16 bytes"), epoch }
}

/// Everything a server does with bytes behind the preamble; the number of accepted frames.
fn serve(bytes: &[u8], ledger: &mut Ledger) -> Result<usize, ProtocolError> {
    let (mut at, mut frames, mut out) = (0, 0, Vec::new());
    while let Some((frame, size)) = Frame::parse(&bytes[at..])? {
        ledger.admit(frame, &mut out)?;
        at += size;
        frames += 1;
    }
    Ok(frames)
}

#[test]
fn constants_are_the_shared_ones() {
    let constants = vectors()["constants"].clone();
    for (name, ours) in [
        ("MAX_PAYLOAD", MAX_PAYLOAD),
        ("STREAM_CREDIT", STREAM_CREDIT as usize),
        ("CONNECTION_CREDIT", CONNECTION_CREDIT as usize),
        ("DATA_CHUNK", DATA_CHUNK),
        ("MAX_NOTE", MAX_NOTE),
        ("MAX_PING", MAX_PING),
        ("MAX_DROPPED", MAX_DROPPED),
        ("MAX_DEPTH", crate::msgpack::MAX_DEPTH),
        ("MAX_ELEMENTS", crate::msgpack::MAX_ELEMENTS as usize),
    ] {
        assert_eq!(constants[name], ours, "{name}");
    }
}

#[test]
fn preambles_and_what_comes_before_them() {
    let vectors = vectors();
    for vector in list(&vectors, "preambles") {
        let bytes = hex(&vector["bytes"]);
        assert_eq!(preamble(vector).bytes()[..], bytes, "{}", vector["name"]);
        assert_eq!(Preamble::find(&bytes), (32, Some(preamble(vector))), "{}", vector["name"]);
    }
    for vector in list(&vectors, "resync") {
        let input = hex(&vector["input"]);
        let (used, found) = Preamble::find(&input);
        assert_eq!(found, Some(preamble(vector)), "{}", vector["name"]);
        assert_eq!(used - PREAMBLE, vector["dropped"].as_u64().expect("dropped") as usize, "{}", vector["name"]);
        assert_eq!(input[used..], hex(&vector["rest"]), "{}", vector["name"]);
        let (mut held, mut found) = (Vec::new(), None); // the same, one byte at a time
        for byte in &input[..used] {
            assert_eq!(found, None, "{}", vector["name"]);
            held.push(*byte);
            let (used, seen) = Preamble::find(&held);
            held.drain(..used);
            found = seen;
        }
        assert_eq!(found, Some(preamble(vector)), "{}", vector["name"]);
    }
}

#[test]
fn frames_both_ways() {
    let vectors = vectors();
    for vector in list(&vectors, "frames") {
        let bytes = hex(&vector["bytes"]);
        let payload = hex(&vector["payload"]);
        let kind = Kind::of(vector["type"].as_u64().expect("type") as u8).expect("known type");
        let frame = Frame { kind, stream: vector["stream"].as_u64().expect("stream") as u32, payload: &payload };
        assert_eq!(Frame::parse(&bytes), Ok(Some((frame, bytes.len()))), "{}", vector["name"]);
        let mut out = Vec::new();
        frame.put(&mut out);
        assert_eq!(out, bytes, "{}", vector["name"]);
        for cut in 0..bytes.len() {
            assert_eq!(Frame::parse(&bytes[..cut]), Ok(None), "{} cut at {cut}", vector["name"]);
        }
    }
}

#[test]
fn malformed_frames_and_payloads() {
    let vectors = vectors();
    for vector in list(&vectors, "malformed") {
        assert!(Frame::parse(&long(&vector["bytes"])).is_err(), "{}", vector["name"]);
    }
    for vector in list(&vectors, "msgpack") {
        assert_eq!(Value::check(&long(&vector["bytes"])).is_some(), vector["ok"] == true, "{}", vector["name"]);
    }
}

#[test]
fn sequences_a_server_sees() {
    let vectors = vectors();
    for vector in list(&vectors, "sequences").iter().filter(|v| v["to"] == "server") {
        let bytes: Vec<u8> = list(vector, "frames").iter().flat_map(long).collect();
        let result = serve(&bytes, &mut Ledger::new());
        assert_eq!(result.is_err(), vector["error"] == true, "{}: {result:?}", vector["name"]);
    }
}

fn opened() -> (Ledger, Vec<u8>) {
    let mut ledger = Ledger::new();
    let payload = crate::msgpack::Pack::default().map(2).str("m").str("x").str("p").map(0).0;
    ledger.admit(Frame { kind: Kind::Open, stream: 1, payload: &payload }, &mut Vec::new()).map(|_| ()).expect("open");
    (ledger, Vec::new())
}

#[test]
fn credit_comes_back_in_steps_and_all_of_it() {
    let (mut ledger, mut out) = opened();
    let chunk = vec![0u8; DATA_CHUNK];
    let mut returned = [0u64; 2];
    for _ in 0..1000 {
        ledger
            .admit(Frame { kind: Kind::Data, stream: 1, payload: &chunk }, &mut out)
            .map(|_| ())
            .expect("within credit");
        ledger.consumed(1, DATA_CHUNK as u32, &mut out);
        while let Some((frame, size)) = Frame::parse(&out).expect("well formed") {
            assert_eq!(frame.kind, Kind::Credit);
            returned[frame.stream as usize] += u64::from(u32_at(frame.payload, 0).expect("u32"));
            out.drain(..size);
        }
    }
    let sent = 1000 * DATA_CHUNK as u64;
    assert!(sent - returned[1] < u64::from(STREAM_CREDIT / 4) && sent - returned[0] < u64::from(CONNECTION_CREDIT / 4));
}

#[test]
fn closing_returns_what_was_held_once() {
    let (mut ledger, mut out) = opened();
    let chunk = vec![0u8; STREAM_CREDIT as usize / 4];
    for _ in 0..4 {
        ledger
            .admit(Frame { kind: Kind::Data, stream: 1, payload: &chunk }, &mut out)
            .map(|_| ())
            .expect("within credit");
    }
    ledger.consumed(1, 1000, &mut out);
    ledger.close(1, &mut out);
    ledger.close(1, &mut out);
    assert_eq!((ledger.held, ledger.unreturned, out.len()), (STREAM_CREDIT, STREAM_CREDIT, 0));
}

#[test]
fn data_is_cut_to_credit() {
    let (mut ledger, mut out) = opened();
    let mut sent = 0;
    loop {
        let size = ledger.put_data(1, 1, &mut out, usize::MAX, |room| room.len());
        if size == 0 {
            break;
        }
        sent += 1 + size;
    }
    assert_eq!(sent, STREAM_CREDIT as usize);
    ledger
        .admit(Frame { kind: Kind::Credit, stream: 1, payload: &10u32.to_le_bytes() }, &mut out)
        .map(|_| ())
        .expect("credit");
    out.clear();
    assert_eq!(ledger.put_data(1, 2, &mut out, 100, |room| room.len()), 9);
    assert_eq!(Frame::parse(&out).map(|f| f.map(|(f, n)| (f.payload.len(), n))), Ok(Some((10, 19))));
}

/// xorshift64: the same bytes in every run.
fn random(seed: u64) -> impl FnMut() -> u64 {
    let mut state = seed * 2 + 1;
    move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    }
}

#[test]
fn random_bytes_never_panic() {
    for seed in 1..3000 {
        let mut next = random(seed);
        let mut bytes = Vec::new();
        while bytes.len() < 400 {
            let size = next() % 40;
            if !next().is_multiple_of(4) {
                bytes.extend_from_slice(&(5 + size as u32).to_le_bytes()); // a plausible header, so that it gets further
                bytes.extend_from_slice(&[(next() % 11) as u8, (next() % 6) as u8, 0, 0, 0]);
            }
            bytes.extend((0..size).map(|_| next() as u8));
        }
        let _ = serve(&bytes, &mut Ledger::new());
        let _ = Preamble::find(&bytes);
    }
}

#[test]
fn mutated_frames_never_panic() {
    let vectors = vectors();
    let whole: Vec<u8> = list(&vectors, "frames").iter().flat_map(|v| hex(&v["bytes"])).collect();
    for seed in 1..3000 {
        let mut next = random(seed);
        let mut bytes = whole.clone();
        for _ in 0..1 + next() % 4 {
            let at = next() as usize % bytes.len();
            bytes[at] = next() as u8;
        }
        if let Some(value) = Value::check(&bytes[HEADER..]) {
            let _ = (value.get("m"), value.get("p"), value.array().map(Iterator::count));
        }
        let _ = serve(&bytes, &mut Ledger::new());
    }
}
