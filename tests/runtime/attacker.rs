//! A static program for the inside of test sandboxes: makes the system calls it is told to and says what came of them.
//!
//!     attacker call NUMBER ARGUMENT...   integers, `s:text` for a string, `x:0a0b` for bytes; prints "ok VALUE" or "errno NUMBER"
//!     attacker cat PATH                  prints the bytes, or "errno NUMBER" and exit status 1
//!     attacker put PATH MEGABYTES        writes that much; prints how many were taken and the last errno
//!     attacker eat MEGABYTES             touches that much memory, prints "done"
//!     attacker fds                       prints the open descriptors that are not its own directory
//!     attacker forks                     forks until refused; prints how often it could
use std::arch::asm;
use std::io::Write;

fn call(number: isize, args: [usize; 6]) -> isize {
    let result: isize;
    unsafe {
        asm!("syscall", inlateout("rax") number => result, in("rdi") args[0], in("rsi") args[1], in("rdx") args[2],
            in("r10") args[3], in("r8") args[4], in("r9") args[5], lateout("rcx") _, lateout("r11") _);
    }
    result
}

fn errno(error: &std::io::Error) -> i32 {
    error.raw_os_error().unwrap_or(-1)
}

fn raw(args: &[String]) {
    let mut texts: Vec<Vec<u8>> = Vec::new();
    let mut values = [0usize; 6];
    for (value, arg) in values.iter_mut().zip(&args[1..]) {
        let bytes = match arg.split_once(':') {
            Some(("s", text)) => format!("{text}\0").into_bytes(),
            Some((_, hex)) => (0..hex.len()).step_by(2).map(|i| u8::from_str_radix(&hex[i..i + 2], 16).unwrap()).collect(),
            None => {
                *value = arg.parse::<i64>().unwrap() as usize;
                continue;
            }
        };
        texts.push(bytes);
        *value = texts[texts.len() - 1].as_ptr() as usize;
    }
    let result = call(args[0].parse().unwrap(), values);
    if result < 0 { println!("errno {}", -result) } else { println!("ok {result}") }
}

fn cat(path: &str) {
    match std::fs::read(path) {
        Ok(bytes) => std::io::stdout().write_all(&bytes).unwrap(),
        Err(error) => {
            println!("errno {}", errno(&error));
            std::process::exit(1);
        }
    }
}

fn put(path: &str, megabytes: usize) {
    let block = vec![0x5a_u8; 1 << 20];
    let mut file = match std::fs::File::create(path) {
        Ok(file) => file,
        Err(error) => return println!("0 {}", errno(&error)),
    };
    let mut last = 0;
    let mut taken = 0;
    for _ in 0..megabytes {
        if let Err(error) = file.write_all(&block) {
            last = errno(&error);
            break;
        }
        taken += 1;
    }
    println!("{taken} {last}");
}

fn forks() {
    let mut count = 0;
    loop {
        match call(57, [0; 6]) {
            0 => loop {
                call(34, [0; 6]); // pause
            },
            pid if pid > 0 => count += 1,
            _ => break,
        }
    }
    println!("{count}");
}

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    match args[0].as_str() {
        "call" => raw(&args[1..]),
        "cat" => cat(&args[1]),
        "put" => put(&args[1], args[2].parse().unwrap()),
        "eat" => {
            let memory = vec![1u8; args[1].parse::<usize>().unwrap() << 20];
            println!("done {}", memory.iter().step_by(4096).count() & 1);
        }
        "fds" => {
            for fd in 0..1024 {
                if call(72, [fd, 1, 0, 0, 0, 0]) >= 0 {
                    println!("{fd}");
                }
            }
        }
        "forks" => forks(),
        other => panic!("unknown verb {other}"),
    }
}
