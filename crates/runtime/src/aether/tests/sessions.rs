//! Shells that live on: what they keep, what cannot break their framing, how they end.

use super::*;
use std::time::Instant;

struct Shell<'a> {
    client: &'a mut Client,
    name: &'static str,
}

impl Shell<'_> {
    fn open<'a>(client: &'a mut Client, name: &'static str) -> Shell<'a> {
        let opened = client.call("session.open", Fields::default().with("name", text(name)).into());
        assert!(opened.number("pid") > 1);
        Shell { client, name }
    }

    fn command(&self, line: &[u8]) -> Exec {
        let Exec(fields) = Exec::line(line);
        Exec(fields.with("session", text(self.name)))
    }

    fn run(&mut self, line: &str) -> Result {
        let command = self.command(line.as_bytes());
        self.client.exec(command)
    }

    /// Exit code, stdout, stderr.
    fn told(&mut self, line: &str) -> (u64, String, String) {
        let result = self.run(line);
        let text = |stream: usize| String::from_utf8_lossy(&result.streams[stream]).into_owned();
        (result.code(), text(1), text(2))
    }

    /// Standard output of a line that must succeed.
    fn out(&mut self, line: &str) -> String {
        let (code, out, err) = self.told(line);
        assert_eq!((code, err.as_str()), (0, ""), "{line}: {out}");
        out
    }

    fn interrupt(&mut self) {
        self.client.call("session.interrupt", Fields::default().with("name", text(self.name)).into()).value();
    }

    fn fault(&mut self, line: &str) -> (String, String) {
        self.run(line).fault()
    }
}

#[test]
fn state_stays_between_commands() {
    let inside = Inside::start();
    let mut client = inside.connect(1);
    let mut shell = Shell::open(&mut client, "one");
    assert_eq!(shell.out("echo $FROM_BIRTH; pwd"), format!("yes\n{}\n", inside.dir.display()));
    shell.out(
        "cd /tmp; x=5; export y='a\nb'; f() { echo \"f $x\"; }; alias ll='echo LL'; shopt -s extglob expand_aliases",
    );
    shell.out("arr=(1 '2 3'); declare -A map=([k]=v); readonly r=ro; umask 027; set -- p 'q r'");
    let check = "pwd; f; ll; echo \"$y ${arr[1]} ${map[k]} $r $(umask) $2\"; shopt -q extglob && echo ext";
    let expected = "/tmp\nf 5\nLL\na\nb 2 3 v ro 0027 q r\next\n";
    assert_eq!(shell.out(check), expected);
    assert_eq!(shell.told("exit 7").0, 7);
    assert_eq!(shell.out("echo $?"), "7\n");
    assert_eq!(shell.out(check), expected, "after exit");
    assert_eq!(shell.told("set -e; false; echo no"), (1, String::new(), String::new()));
    assert_eq!(shell.out(&format!("[[ $- == *e* ]] || echo off; set +e; {check}")), expected, "after set -e");
    assert_eq!(shell.told("echo a; (exit 3)").0, 3);
    assert_eq!(shell.out("echo $?"), "3\n");
}

#[test]
fn nothing_breaks_the_framing() {
    let inside = Inside::start();
    let mut client = inside.connect(1);
    let mut shell = Shell::open(&mut client, "odd");
    let cases: [(&str, u64, &str); 17] = [
        (
            "cat <<A\nfirst $((1+1))\n\nA\ncat <<'B' | tr a-z A-Z\n$x 'q' \"d\" \\n\nB",
            0,
            "first 2\n\n$X 'Q' \"D\" \\N\n",
        ),
        ("echo \"open", 2, ""),
        ("echo 'open", 2, ""),
        ("cat <<X\nno end", 0, "no end\n"),
        ("if true; then", 2, ""),
        ("fi", 2, ""),
        ("for i in 1 2; do\n  echo $i\ndone", 0, "1\n2\n"),
        ("readonly R=1; R=2; echo not reached", 1, ""),
        ("echo $((1/0)); echo not reached", 1, ""),
        ("${missing?gone}; echo not reached", 1, ""),
        ("set -u; echo $missing; echo not reached", 1, ""),
        ("set +u; break; continue; echo on", 0, "on\n"),
        ("f() { exit 9; }; f", 9, ""),
        ("( exit 4 )", 4, ""),
        ("nonesuch-command", 127, ""),
        ("exec nonesuch-command", 127, ""),
        ("exec </dev/null; read line; echo \"got $?\"", 0, "got 1\n"),
    ];
    for (line, code, out) in cases {
        let told = shell.told(line);
        assert_eq!((told.0, told.1.as_str()), (code, out), "{line}: {}", told.2);
        assert_eq!(shell.out("echo fine"), "fine\n", "after {line}");
    }
    let (code, out, err) = shell.told("foo-1\n\nfoo-2");
    assert_eq!((code, out.as_str()), (127, ""));
    let said: Vec<&str> = err.lines().map(|line| line.rsplit_once("foo-").map_or(line, |(_, rest)| rest)).collect();
    assert_eq!(said, ["1: command not found", "2: command not found"], "{err}");
    assert_eq!(shell.out("ls /proc/self/fd | wc -l"), "4\n", "children have no descriptor of the session");
}

#[test]
fn output_forges_nothing() {
    let inside = Inside::start();
    let mut client = inside.connect(1);
    let mut shell = Shell::open(&mut client, "forge");
    let forged = "for i in 20 21 22 10 11 12; do bash -c \"echo 'ready 0' >&$i; echo '00 0' >&$i\" 2>/dev/null; done; printf '\\nready 0\\n'; false";
    assert_eq!(shell.told(forged), (1, "\nready 0\n".into(), String::new()));
    // the shell itself may write to its own report: that is no report as long as it does not know the word
    assert_eq!(
        shell.told("for i in 10 11 12 13; do echo 'aa 0' >&$i; echo 'ready 0' >&$i; done 2>/dev/null; false").0,
        1
    );
    assert_eq!(shell.out("printf '\\000\\377%.0s' {1..3} | od -An -tx1"), " 00 ff 00 ff 00 ff\n");
    let long = "x".repeat(400_000);
    assert_eq!(shell.out(&format!("echo -n '{long}'")), long);
    let result = shell.run("head -c 3000000 /dev/zero; head -c 100000 /dev/zero >&2");
    assert_eq!((result.streams[1].len(), result.streams[2].len()), (3_000_000, 100_000));
}

#[test]
fn traps_are_the_users() {
    let inside = Inside::start();
    let mut client = inside.connect(1);
    let mut shell = Shell::open(&mut client, "traps");
    shell.out("x=1; trap 'echo bye $?' EXIT");
    assert_eq!(shell.told("exit 3"), (3, "bye 3\n".into(), String::new()));
    assert_eq!(shell.told("trap 'rc=$?; echo again; exit $rc' EXIT; exit 4"), (4, "again\n".into(), String::new()));
    assert_eq!(shell.out("trap - EXIT; trap; echo $x"), "1\n");
    assert_eq!(shell.told("exit 5"), (5, String::new(), String::new()));
    assert_eq!(shell.told("(trap 'echo inner' EXIT; exit 2)"), (2, "inner\n".into(), String::new()));
    shell.out("trap 'echo usr1' USR1; trap 'echo err' ERR");
    assert_eq!(shell.told("exit 6").0, 6);
    assert_eq!(shell.told("kill -USR1 $$; false"), (1, "usr1\nerr\n".into(), String::new()));
    assert_eq!(shell.told("trap - ERR; false"), (1, String::new(), String::new()));
    assert_eq!(shell.told("false"), (1, String::new(), String::new()));
}

#[test]
fn interrupts_end_the_line_and_keep_the_shell() {
    let inside = Inside::start();
    let mut client = inside.connect(1);
    let mut shell = Shell::open(&mut client, "int");
    shell.out("x=kept; sleep 300 & echo $! >job");
    shell.interrupt(); // nothing runs
    let lines = [
        "touch ready; sleep 100",
        "touch ready; sleep 100; echo no",
        "touch ready; while :; do sleep 1; done; echo no",
        "touch ready; while :; do :; done",
        "g() { touch ready; sleep 100; echo no; }; g; echo no",
        "( touch ready; sleep 100; echo no ); echo no",
        "touch ready; sleep 100 | sleep 100",
        "touch ready; timeout 100 sleep 100; echo no",
        "touch ready; sleep 100 & wait; echo no",
        // a program that ends well by the interrupt: bash by itself goes on with the line
        "sh -c 'trap \"exit 0\" INT; touch ready; while :; do sleep 0.1; done'; sleep 100; echo no",
    ];
    for line in lines {
        let _ = std::fs::remove_file(inside.path("ready"));
        let command = shell.command(line.as_bytes());
        let stream = shell.client.open("exec", command.0.into());
        inside.await_file("ready");
        shell.interrupt();
        let result = shell.client.finish(stream);
        assert_eq!(result.code(), 130, "{line}");
        assert!(result.streams.iter().all(Vec::is_empty), "{line}: {result:?}");
        assert_eq!(shell.out("echo $x; kill -0 $(cat job) && echo alive"), "kept\nalive\n", "after {line}");
    }
}

#[test]
fn a_deadline_kills_the_command_alone() {
    let inside = Inside::start();
    let mut client = inside.connect(1);
    let mut shell = Shell::open(&mut client, "late");
    shell.out("x=kept; sleep 300 & echo $! >job");
    let late = |shell: &mut Shell, line: &str| {
        let Exec(fields) = shell.command(line.as_bytes());
        shell.client.exec(Exec(fields.with("timeout", Pack::default().float(0.3))))
    };
    for line in [
        "setsid sleep 100 & echo $! >theirs; echo part; sleep 100; echo no",
        "trap '' TERM; (setsid sleep 100 &) ; echo part; while :; do sleep 0.1; done",
    ] {
        let result = late(&mut shell, line);
        assert_eq!(
            (result.code(), result.text("timed_out"), result.text("signal")),
            (137, Some("deadline"), Some("KILL"))
        );
        assert_eq!(result.streams[1], b"part\n");
        assert_eq!(shell.out("echo $x; kill -0 $(cat job) && echo alive"), "kept\nalive\n");
    }
    assert_eq!(shell.told("kill -0 $(cat theirs)").0, 1, "a daemon of the command is dead");
    // a shell that does not come back is killed, and the session says so
    let before = Instant::now();
    let result = late(&mut shell, "trap '' INT; while :; do :; done");
    assert_eq!((result.code(), result.text("timed_out")), (137, Some("deadline")));
    assert!(before.elapsed() < Duration::from_secs(10));
    let (kind, message) = shell.fault("echo hi");
    assert_eq!(kind, "session_ended");
    assert!(message.contains("did not come back"), "{message}");
}

#[test]
fn a_dead_session_says_how_it_ended() {
    let inside = Inside::start();
    let mut client = inside.connect(1);
    for (line, code, how) in [
        ("kill -9 $$", 137, "signal KILL"),
        ("echo $$; exec sh -c 'echo replaced; exit 6'", 6, "exit code 6"),
        ("for fd in {3..30} 255; do eval \"exec $fd>&-\"; done; echo closed", 1, "descriptors"),
    ] {
        let mut shell = Shell::open(&mut client, "dead");
        let result = shell.run(line);
        assert_eq!(result.code(), code, "{line}");
        for line in ["echo hi", "true"] {
            let (kind, message) = shell.fault(line);
            assert_eq!(kind, "session_ended", "{message}");
            assert!(message.contains(how), "{line}: {message}");
        }
        let name = || Fields::default().with("name", text("dead"));
        let again = client.call("session.open", name().into());
        assert_eq!(again.fault().0, "session_ended", "it is never replaced unasked");
        client.call("session.close", name().into()).value();
    }
    assert_eq!(client.call("session.list", Fields::default().into()).value().array().map(Iterator::count), Some(0));
}

#[test]
fn input_is_what_was_given_and_never_the_script() {
    let inside = Inside::start();
    let mut client = inside.connect(1);
    let mut shell = Shell::open(&mut client, "input");
    assert_eq!(shell.out("cat; read x; echo $?"), "1\n");
    for given in [&b"a\0b\n"[..], b"", &[7; 200_000]] {
        let Exec(fields) = shell.command(b"cat");
        let result = shell.client.exec(Exec(fields.with("stdin", bytes(given))));
        assert_eq!((result.code(), &result.streams[1][..]), (0, given));
    }
    let Exec(fields) = shell.command(b"head -c 1 >/dev/null");
    assert_eq!(shell.client.exec(Exec(fields.with("stdin", bytes(&[1; 300_000])))).code(), 0);
    let Exec(fields) = shell.command(b"cat");
    assert_eq!(shell.client.exec(Exec(fields.with("stdin", bytes(b"next")))).streams[1], b"next");
    let Exec(fields) = shell.command(b"cat");
    let stream = shell.client.open("exec", fields.with("stdin_open", yes()).into());
    shell.client.data(stream, b"streamed ");
    shell.client.data(stream, b"in");
    shell.client.send(Kind::End, stream, b"");
    assert_eq!(shell.client.finish(stream).streams[1], b"streamed in");
}

#[test]
fn jobs_write_later_and_stay() {
    let inside = Inside::start();
    let mut client = inside.connect(1);
    let mut shell = Shell::open(&mut client, "jobs");
    assert_eq!(shell.out("(until [ -e go ]; do sleep 0.01; done; echo later; touch went) & echo now"), "now\n");
    std::fs::write(inside.path("go"), "").expect("go");
    inside.await_file("went");
    assert_eq!(shell.out("echo next"), "later\nnext\n");
    shell.out("wait; sleep 100 &");
    assert_eq!(shell.out("jobs -r | grep -c sleep; kill $!; wait $!; echo $?"), "1\n143\n");
    shell.out("yes >/dev/null & yes & echo $! >noisy");
    assert!(String::from_utf8_lossy(&shell.run("echo fine").streams[1]).contains("fine\n"));
    shell.run("kill $(cat noisy)");
}

#[test]
fn the_same_id_is_the_same_command() {
    let inside = Inside::start();
    let mut client = inside.connect(1);
    let mut shell = Shell::open(&mut client, "ids");
    for _ in 0..2 {
        let command = Exec::new("once").with("line", bytes(b"n=$((n+1)); echo $n")).with("session", text("ids"));
        assert_eq!(shell.client.exec(command).streams[1], b"1\n");
    }
    let Exec(fields) = shell.command(b"head -c 100000 /dev/zero");
    let result = shell.client.exec(Exec(fields.with("max_output_bytes", Pack::default().uint(10))));
    assert_eq!((result.streams[1].len(), result.number("stdout_bytes")), (10, 100_000));
    let command = shell.command(b"touch busy; sleep 100");
    let stream = shell.client.open("exec", command.0.into());
    inside.await_file("busy");
    assert_eq!(shell.fault("echo hi").0, "conflict");
    drop(client);
    let mut client = inside.connect(2);
    let mut shell = Shell::open(&mut client, "ids");
    shell.interrupt();
    assert_eq!(shell.told("echo $n").1, "1\n");
    let _ = stream;
}

#[test]
fn their_number_is_bounded_and_closing_ends_what_they_started() {
    let inside = Inside::start();
    let mut client = inside.connect(1);
    let name = |i: usize| Fields::default().with("name", text(&format!("s{i}")));
    for i in 0..crate::aether::chronus::session::MAX_SESSIONS {
        client.call("session.open", name(i).into()).value();
    }
    let (kind, message) = client.call("session.open", name(99).into()).fault();
    assert_eq!(kind, "capacity", "{message}");
    let mut shell = Shell { client: &mut client, name: "s0" };
    shell.out("setsid sleep 300 & echo $! >job; sleep 300 & disown");
    shell.out("true");
    client.call("session.close", name(0).into()).value();
    assert_eq!(client.shell("kill -0 $(cat job)").code(), 1);
    client.call("session.open", name(99).into()).value();
    assert_eq!(client.call("session.close", name(0).into()).fault().0, "not_found");
}

/// What a command left in the input is taken out before the next; somebody inside may take some of it at the same time.
#[test]
fn who_empties_the_input_too_holds_up_nothing() {
    let inside = Inside::start();
    let mut client = inside.connect(1);
    let mut shell = Shell::open(&mut client, "contended");
    let take = "import fcntl, os, struct, sys, termios\n\
                fd = os.open(sys.argv[1], os.O_RDWR | os.O_NONBLOCK)\n\
                size = fcntl.fcntl(fd, 1031, 1 << 20)\n\
                left = lambda: struct.unpack('i', fcntl.ioctl(fd, termios.FIONREAD, bytes(4)))[0]\n\
                while not os.path.exists('taken'):\n\
                \x20   os.write(fd, bytes(size))\n\
                \x20   open('full', 'w').close()\n\
                \x20   while left() == size: pass\n\
                \x20   try: os.read(fd, 1 << 16)\n\
                \x20   except BlockingIOError: continue\n\
                \x20   open('taken', 'w').close()\n\
                sys.stdin.read()\n";
    std::fs::write(inside.path("take.py"), take).expect("program");
    let find = "for f in /proc/$$/fd/*; do [[ -g $f && -p $f ]] && input=$f; done; mkfifo hold; exec 3<>hold";
    shell.out(&format!("{find}; python3 take.py $input <&3 >/dev/null 2>&1 & until [[ -e full ]]; do :; done"));
    let until = Instant::now() + Duration::from_secs(20);
    while !inside.path("taken").exists() && Instant::now() < until {
        assert_eq!(shell.run(":").code(), 0);
    }
    assert_eq!(shell.run("kill $!").code(), 0);
}
