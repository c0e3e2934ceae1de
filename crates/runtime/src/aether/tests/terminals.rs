//! Commands on a terminal: what they see, what reaches them, how it ends.

use super::*;

fn size(cols: u64, rows: u64) -> Pack {
    Fields::default().with("cols", Pack::default().uint(cols)).with("rows", Pack::default().uint(rows)).into()
}

fn on_terminal(line: &str) -> Exec {
    Exec::line(line.as_bytes()).with("pty", size(80, 24))
}

/// A command on a terminal whose output is read as it comes.
struct Typing<'a> {
    client: &'a mut Client,
    stream: u32,
    id: &'static str,
    shown: String,
}

impl Typing<'_> {
    fn start<'a>(client: &'a mut Client, id: &'static str, line: &str) -> Typing<'a> {
        let command = Exec::new(id).with("line", bytes(line.as_bytes())).with("pty", size(80, 24));
        let stream = client.open("exec", command.0.into());
        Typing { client, stream, id, shown: String::new() }
    }

    fn until(&mut self, word: &str) {
        while !self.shown.contains(word) {
            let (kind, of, payload) = self.client.frame().expect("connection is open");
            assert!(of != self.stream || kind != Kind::Reply, "ended after {:?}", self.shown);
            if (kind, of) == (Kind::Data, self.stream) {
                assert_eq!(payload[0], 1, "all of it is stdout");
                self.shown += &String::from_utf8_lossy(&payload[1..]);
                self.client.credit(of, payload.len());
            }
        }
    }

    fn keys(&mut self, keys: &[u8]) {
        self.client.data(self.stream, keys);
    }

    fn resize(&mut self, cols: u64, rows: u64) {
        let fields = Fields::default().with("exec_id", text(self.id));
        let fields = fields.with("cols", Pack::default().uint(cols)).with("rows", Pack::default().uint(rows));
        self.client.open("exec.resize", fields.into());
    }

    fn end(self) -> Result {
        self.client.finish(self.stream)
    }
}

fn stdout(result: &Result) -> String {
    String::from_utf8_lossy(&result.streams[1]).into_owned()
}

#[test]
fn a_command_has_its_own() {
    let inside = Inside::start();
    let mut client = inside.connect(1);
    let seen =
        client.exec(on_terminal("tty; stty size; echo $TERM; echo err >&2; ps -o tty= -p $$; stat -c %a:%g $(tty)"));
    assert_eq!(stdout(&seen), "/dev/pts/0\r\n24 80\r\nxterm-256color\r\nerr\r\npts/0\r\n620:5\r\n");
    assert_eq!((seen.code(), seen.number("stderr_bytes"), &seen.streams[2][..]), (0, 0, &b""[..]));
    let other = client.exec(on_terminal("stat -c %u $(tty)").with("user", text("nobody")));
    assert_eq!(stdout(&other), "65534\r\n");
    let missing = client.exec(Exec::argv(&[b"nothing-there"]).with("pty", size(80, 24)));
    assert_eq!((missing.code(), stdout(&missing).as_str()), (127, "dsec: nothing-there: command not found\r\n"));
}

#[test]
fn keys_and_sizes_reach_the_foreground() {
    let inside = Inside::start();
    let mut client = inside.connect(1);
    let mut typing = Typing::start(&mut client, "t", "trap 'stty size' WINCH; echo ready; while :; do :; done");
    typing.until("ready");
    typing.resize(211, 53);
    typing.until("53 211\r\n");
    typing.keys(b"\x03");
    let ended = typing.end();
    assert_eq!((ended.code(), ended.text("signal")), (130, Some("INT")));
}

#[test]
fn the_end_of_input_is_typed() {
    let inside = Inside::start();
    let mut client = inside.connect(1);
    for (id, typed) in [("a", ""), ("b", "whole\n"), ("c", "part")] {
        let mut typing = Typing::start(&mut client, id, "echo ready; cat | tr a-z A-Z; echo over");
        typing.until("ready");
        typing.keys(typed.as_bytes());
        typing.client.send(Kind::End, typing.stream, b"");
        let ended = typing.end();
        assert_eq!(ended.code(), 0);
        let shown = stdout(&ended);
        assert!(
            shown.contains(&typed.trim_end().to_uppercase()) && shown.ends_with("over\r\n"),
            "{typed:?}: {shown:?}"
        );
    }
}

#[test]
fn a_full_terminal_holds_its_writer_up() {
    let inside = Inside::start();
    let mut client = inside.connect(1);
    let data: Vec<u8> = (0..200_000u32).map(|i| b'a' + (i * i % 23) as u8).collect();
    std::fs::write(inside.path("data"), &data).expect("data");
    let line =
        "stty raw -echo; echo ready; until [ -e go ]; do sleep 0.01; done; head -c 200000 | cmp - data && echo same";
    let mut typing = Typing::start(&mut client, "t", line);
    typing.until("ready");
    data.chunks(50_000).for_each(|chunk| typing.keys(chunk));
    std::fs::write(inside.path("go"), "").expect("go");
    typing.until("same");
    assert_eq!(typing.end().code(), 0);
}

#[test]
fn the_end_of_the_main_process_hangs_up() {
    let inside = Inside::start();
    let mut client = inside.connect(1);
    let front = "(trap 'echo > hup; exit' HUP; echo > set; while :; do sleep 0.01; done) 2> /dev/null &
        until [ -e set ]; do sleep 0.01; done; echo last";
    let ended = client.exec(on_terminal(front));
    assert_eq!((ended.code(), stdout(&ended).as_str()), (0, "last\r\n"));
    inside.await_file("hup");
    let deaf = "trap '' HUP; (until ! echo x; do sleep 0.01; done; echo > gone) 2> /dev/null & exit 0";
    assert_eq!(client.exec(on_terminal(deaf)).code(), 0);
    inside.await_file("gone");
}

#[test]
fn output_that_waits_is_all_there() {
    let inside = Inside::start();
    let mut client = inside.connect(1);
    for _ in 0..20 {
        let ended = client.exec(on_terminal("seq 5000"));
        assert_eq!(stdout(&ended), (1..=5000).map(|i| format!("{i}\r\n")).collect::<String>());
    }
    let ended = client.exec(on_terminal("exec 0<&- 1>&- 2>&-; sleep 0.05; echo back > /dev/tty"));
    assert_eq!(stdout(&ended), "back\r\n", "closed for a moment is not closed");
}

#[test]
fn refusals() {
    let inside = Inside::start();
    let mut client = inside.connect(1);
    for wrong in [size(0, 24), size(80, 4097), Pack::default().bool(true), Pack::default().map(0)] {
        assert_eq!(client.exec(Exec::line(b"true").with("pty", wrong)).fault().0, "invalid_request");
    }
    let started = client.call(
        "exec",
        Exec::new("piped")
            .with("line", bytes(b"exec sleep 100"))
            .with("detached", yes())
            .with("follow", Pack::default().bool(false))
            .0
            .into(),
    );
    assert!(started.number("pid") > 1);
    let resize = |id: &str| -> Pack {
        let fields = Fields::default().with("exec_id", text(id));
        fields.with("cols", Pack::default().uint(80)).with("rows", Pack::default().uint(24)).into()
    };
    assert_eq!(client.call("exec.resize", resize("piped")).fault().0, "conflict");
    assert_eq!(client.call("exec.resize", resize("nobody")).fault().0, "not_found");
    let hold = |id: &str| {
        Exec::new(id)
            .with("line", bytes(b"exec sleep 100"))
            .with("pty", size(80, 24))
            .with("detached", yes())
            .with("follow", Pack::default().bool(false))
    };
    for id in ["a", "b", "c"] {
        assert!(client.exec(hold(id)).number("pid") > 1);
    }
    assert_eq!(client.exec(on_terminal("true")).fault().0, "capacity");
}
