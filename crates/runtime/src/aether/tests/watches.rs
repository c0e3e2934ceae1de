//! Watching what somebody changes as fast as he can.

use super::*;
use std::time::Instant;

const DIRECTORIES: usize = 8000;
const WATCHERS: usize = 16;
const MOVES: usize = 1500;
const PATIENCE: Duration = Duration::from_secs(1);

/// The records in a stream of them: kind and last name of each.
fn changes(mut bytes: &[u8]) -> Vec<(String, String)> {
    let mut changes = Vec::new();
    while let Some((size, rest)) = bytes.split_first_chunk() {
        let Some((record, rest)) = rest.split_at_checked(u32::from_le_bytes(*size) as usize) else { break };
        let record = Value::check(record).expect("msgpack");
        let path = record.get("path").and_then(Value::bytes).expect("path");
        let kind = record.get("kind").and_then(Value::str).expect("kind");
        let name = String::from_utf8_lossy(path).rsplit('/').next().unwrap_or_default().to_owned();
        changes.push((kind.to_owned(), name));
        bytes = rest;
    }
    changes
}

/// Each move of a directory is a look at everything that is watched, and the kernel holds thousands of them.
#[test]
fn a_storm_of_moves_keeps_aether_from_nobody_and_stays_one_of_moves() {
    let inside = Inside::start();
    let mut client = inside.connect(1);
    let top = inside.path("watched");
    (0..DIRECTORIES).for_each(|at| std::fs::create_dir_all(top.join(at.to_string())).expect("directory"));
    let mut streams = Vec::new();
    for _ in 0..WATCHERS {
        let path = Pack::default().bin(top.as_os_str().as_encoded_bytes());
        let params = Fields::default().with("path", path).with("recursive", Pack::default().bool(true));
        streams.push(client.open("fs.watch", params.into()));
        assert_eq!(client.frame().expect("ready").0, Kind::Data);
    }
    inside.stopped(|| {
        for _ in 0..MOVES / 2 {
            std::fs::rename(top.join("0"), top.join("moved")).expect("away");
            std::fs::rename(top.join("moved"), top.join("0")).expect("back");
        }
        std::fs::write(top.join("last"), "").expect("file");
    });
    let (asked, mut answered) = (Instant::now(), None);
    let hello = client.open("hello", Pack::default().map(0));
    let mut heard = Vec::new();
    while answered.is_none() || !changes(&heard).iter().any(|(_, name)| name == "last") {
        match client.frame().expect("connection is open") {
            (Kind::Reply, of, _) if of == hello => {
                answered = Some(asked.elapsed());
                streams[1..].iter().for_each(|stream| client.send(Kind::Cancel, *stream, b""));
            }
            (Kind::Data, of, payload) if of == streams[0] => heard.extend_from_slice(&payload[1..]),
            _ => {}
        }
    }
    assert!(answered.is_some_and(|after| after < PATIENCE), "{answered:?}");
    let changes = changes(&heard);
    let moves = changes.iter().filter(|(kind, _)| kind == "moved").count();
    assert_eq!((moves, &*changes[moves].1), (MOVES / 2 * 2, "last"), "{:?}", &changes[moves..]);
}
