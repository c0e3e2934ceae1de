//! Operations with a name are done once, whatever becomes of the connections that they come on.

use super::*;

fn named(fields: Fields, op: &str) -> Fields {
    fields.with("op", Pack::default().str(op))
}

fn waited(client: &mut Client, op: &str) -> Result {
    client.call("op.wait", Fields::default().with("op", Pack::default().str(op)).into())
}

fn state(client: &mut Client, op: &str) -> String {
    waited(client, op).text("state").expect("state").to_owned()
}

#[test]
fn one_that_is_done_is_answered_again() {
    let inside = Inside::start();
    let mut client = inside.connect(1);
    let made = |client: &mut Client, op| client.call("fs.mkdir", named(path(&inside.path("d")), op).into());
    made(&mut client, "a").value();
    made(&mut client, "a").value();
    assert_eq!(made(&mut client, "b").fault().0, "file_exists");
    std::fs::remove_dir(inside.path("d")).expect("remove");
    assert_eq!(made(&mut client, "b").fault().0, "file_exists", "an error is an answer, too");
    assert!(!inside.path("d").exists());
    let mut other = inside.connect(2);
    made(&mut other, "a").value();
    assert!(!inside.path("d").exists());
    assert_eq!((state(&mut other, "a"), state(&mut other, "none")), ("done".into(), "unknown".into()));
    let told = waited(&mut other, "b");
    let error = Value::check(told.value().get("error").and_then(Value::bytes).expect("error")).expect("msgpack");
    assert_eq!(error.get("kind").and_then(Value::str), Some("file_exists"));
}

#[test]
fn one_whose_connection_breaks_in_the_middle_did_not_happen() {
    let inside = Inside::start();
    let mut client = inside.connect(1);
    let file = inside.path("f");
    let stream = client.open("fs.write", named(path(&file), "w").into());
    client.data(stream, b"half");
    assert_eq!(state(&mut inside.connect(2), "w"), "unknown");
    assert!(!file.exists());
    let mut client = inside.connect(3);
    assert_eq!(client.upload("fs.write", named(path(&file), "w"), b"whole").number("size"), 5);
    std::fs::remove_file(&file).expect("remove");
    assert_eq!(client.upload("fs.write", named(path(&file), "w"), b"whole").number("size"), 5);
    assert!(!file.exists(), "it was done once");
}

#[test]
fn one_that_came_whole_is_done_although_another_connection_takes_over_at_once() {
    let inside = Inside::start();
    let mut client = inside.connect(1);
    let file = inside.path("f");
    let stream = client.open("fs.write", named(path(&file), "w").into());
    waited(&mut client, "none");
    let mut other = inside.stopped(|| {
        client.data(stream, b"whole");
        client.send(Kind::End, stream, b"");
        let mut socket = UnixStream::connect(inside.path("sock")).expect("connect");
        socket.set_read_timeout(Some(Duration::from_secs(20))).expect("timeout");
        socket.write_all(&Preamble { nonce: *b"0123456789abcdef", epoch: 2 }.bytes()).expect("preamble");
        Client { socket, input: Vec::new(), next: 1, epoch: 2, returns_credit: true }
    });
    other.socket.read_exact(&mut [0; PREAMBLE]).expect("answer");
    let state = state(&mut other, "w");
    assert_eq!(file.exists(), state == "done", "what is in the file system is what is told: {state}");
    assert_eq!(state, "done");
}

#[test]
fn one_that_waits_is_waited_for_by_all_who_ask() {
    let inside = Inside::start();
    let mut client = inside.connect(1);
    let fields = |op: &str| named(Fields::default().with("name", Pack::default().str("s")), op);
    let (one, two) = (client.open("session.open", fields("o").into()), client.open("session.open", fields("o").into()));
    let first = client.finish(one).number("pid");
    assert_eq!(client.finish(two).number("pid"), first);
    client.open("session.close", fields("c").into());
    let mut other = inside.connect(2);
    other.call("session.close", fields("c").into()).value();
    other.call("session.close", fields("c").into()).value();
    assert_eq!(other.call("session.close", fields("d").into()).fault().0, "not_found");
}

#[test]
fn signals_and_writes_arrive_once() {
    let inside = Inside::start();
    let mut client = inside.connect(1);
    let line = b"trap 'echo usr' USR1; echo ready; while read l; do echo got $l; done";
    let fields = Fields::default().with("exec_id", Pack::default().str("cat"));
    let exec = fields.with("line", bytes(line)).with("stdin_open", Pack::default().bool(true));
    let running = client.open("exec", exec.into());
    loop {
        let (kind, of, payload) = client.frame().expect("frame");
        if kind == Kind::Data && of == running && payload[1..].starts_with(b"ready") {
            break;
        }
    }
    let to = |op: &str| named(Fields::default().with("exec_id", Pack::default().str("cat")), op);
    for _ in 0..3 {
        let write = to("w").with("data", bytes(b"one\n"));
        let stream = client.open("exec.write", write.into());
        while client.frame().is_some_and(|(kind, of, _)| kind != Kind::Reply || of != stream) {}
    }
    let close = client.open("exec.close_stdin", to("x").into());
    while client.frame().is_some_and(|(kind, of, _)| kind != Kind::Reply || of != close) {}
    let attach = Fields::default().with("exec_id", Pack::default().str("cat"));
    let result = client.call("exec.attach", attach.into());
    assert_eq!(result.streams[1], b"ready\ngot one\n");
}

#[test]
fn an_exec_id_is_that_of_one_request() {
    let inside = Inside::start();
    let mut client = inside.connect(1);
    let asked = |spec: Option<u64>| {
        let fields = Fields::default().with("exec_id", Pack::default().str("e")).with("line", bytes(b"echo x"));
        match spec {
            Some(spec) => fields.with("spec", Pack::default().uint(spec)),
            None => fields,
        }
    };
    assert_eq!(client.call("exec", asked(Some(1)).into()).streams[1], b"x\n");
    assert_eq!(client.call("exec", asked(Some(1)).into()).streams[1], b"x\n");
    assert_eq!(client.call("exec", asked(None).into()).streams[1], b"x\n");
    assert_eq!(client.call("exec", asked(Some(2)).into()).fault().0, "conflict");
}

#[test]
fn a_name_that_is_none_is_refused() {
    let inside = Inside::start();
    let mut client = inside.connect(1);
    for op in ["", " ", "\n", &"x".repeat(65)] {
        assert_eq!(client.call("fs.mkdir", named(path(&inside.path("d")), op).into()).fault().0, "invalid_request");
    }
    assert!(!inside.path("d").exists());
}
