//! Operations that say who they are, so that none is done twice by who asks again: what came of the last of them.
//!
//! A connection that breaks takes what runs on it along: that did not happen (a file is written whole or not at all), and whoever
//! asks again has it done. What only waited for something that goes on without it is waited for again.

use super::chronus::Chronus;
use super::fault::Fault;
use crate::msgpack::{Pack, Value};
use std::cell::RefCell;
use std::collections::{BTreeMap, VecDeque};
use std::hash::{Hash, Hasher};
use std::rc::Rc;

const METHODS: [&str; 10] = [
    "fs.write",
    "fs.mkdir",
    "fs.move",
    "fs.remove",
    "fs.untar",
    "exec.signal",
    "exec.write",
    "session.open",
    "session.close",
    "session.interrupt",
];
/// Operations whose result is kept: so many, and so many bytes of names and results; one is kept in any case.
const KEPT: (usize, usize) = (256, 64 * 1024);
/// Operations of which only this is remembered, that there were such.
const REMEMBERED: usize = 8192;

pub type Result = std::result::Result<Vec<u8>, Fault>;

/// What an operation waits for, and what goes on by itself.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Rest {
    Opened(u32),
    Interrupted(u32),
    Closed(u32),
}

impl Rest {
    /// The result, once it is there.
    pub fn result(self, chronus: &Chronus) -> Option<Result> {
        match self {
            Rest::Opened(session) => chronus.session_opened(session),
            Rest::Interrupted(command) => {
                let ended = chronus.session_interrupted(command)?;
                Some(Ok(Pack::default().map(1).str("ended").bool(ended).0))
            }
            Rest::Closed(session) => (!chronus.session_is_there(session)).then(|| Ok(Pack::default().map(0).0)),
        }
    }
}

enum State {
    Running,
    /// Its connection broke while it waited.
    Left(Rest),
    Done(Result),
}

#[derive(Default)]
struct Table {
    known: BTreeMap<String, State>,
    /// Those that are done, the oldest first, and how many bytes they are.
    done: VecDeque<String>,
    bytes: usize,
    /// Digests of the names of those that were done and forgotten.
    forgotten: VecDeque<u64>,
}

/// All operations of a sandbox; a handle, of which each copy is the same.
#[derive(Clone, Default)]
pub struct Ops(Rc<RefCell<Table>>);

/// What is known of an operation.
#[derive(Debug)]
pub enum Known {
    Nothing,
    Forgotten,
    Running,
    Left(Rest),
    Done(Result),
}

/// An operation that runs. Dropped without a result it did not happen.
pub struct Running {
    ops: Ops,
    name: Option<String>,
    pub rest: Option<Rest>,
}

/// The name of the operation that a request is, if it is one.
pub fn name<'a>(method: &str, params: Value<'a>) -> std::result::Result<Option<&'a str>, Fault> {
    let Some(op) = params.get("op").filter(|_| METHODS.contains(&method)) else { return Ok(None) };
    let fits = |op: &&str| (1..=64).contains(&op.len()) && op.bytes().all(|b| b.is_ascii_graphic());
    let name = op.str().filter(fits);
    name.map(Some).ok_or_else(|| Fault::invalid("op must be 1 to 64 printable characters"))
}

fn digest(name: &str) -> u64 {
    let mut hasher = std::hash::DefaultHasher::new();
    name.hash(&mut hasher);
    hasher.finish()
}

fn weight(name: &str, result: &Result) -> usize {
    2 * name.len() + result.as_ref().map_or_else(|fault| fault.message.len(), Vec::len)
}

/// An operation of which all that is left is that it was there.
pub fn forgotten() -> Fault {
    Fault::new("outcome_unknown", "it was done long ago, and what came of it was dropped")
}

impl Ops {
    pub fn known(&self, name: &str) -> Known {
        let table = self.0.borrow();
        match table.known.get(name) {
            Some(State::Running) => Known::Running,
            Some(State::Left(rest)) => Known::Left(*rest),
            Some(State::Done(result)) => Known::Done(result.clone()),
            None if table.forgotten.contains(&digest(name)) => Known::Forgotten,
            None => Known::Nothing,
        }
    }

    /// It runs from now on, for as long as this lives.
    pub fn begin(&self, name: &str) -> Running {
        self.0.borrow_mut().known.insert(name.to_owned(), State::Running);
        Running { ops: self.clone(), name: Some(name.to_owned()), rest: None }
    }

    /// What came of one. What may be tried again did not happen.
    pub fn ended(&self, name: &str, result: &Result) {
        let mut table = self.0.borrow_mut();
        if result.as_ref().is_err_and(|fault| fault.retryable) {
            table.known.remove(name);
            return;
        }
        table.bytes += weight(name, result);
        table.known.insert(name.to_owned(), State::Done(result.clone()));
        table.done.push_back(name.to_owned());
        while table.done.len() > 1 && (table.done.len() > KEPT.0 || table.bytes > KEPT.1) {
            let Some(oldest) = table.done.pop_front() else { break };
            if let Some(State::Done(result)) = table.known.remove(&oldest) {
                table.bytes -= weight(&oldest, &result);
            }
            table.forgotten.push_back(digest(&oldest));
        }
        let over = table.forgotten.len().saturating_sub(REMEMBERED);
        table.forgotten.drain(..over);
    }
}

impl Running {
    pub fn ended(mut self, result: &Result) {
        if let Some(name) = self.name.take() {
            self.ops.ended(&name, result);
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let Some(name) = self.name.take() else { return };
        let mut table = self.ops.0.borrow_mut();
        match self.rest {
            Some(rest) => drop(table.known.insert(name, State::Left(rest))),
            None => drop(table.known.remove(&name)),
        }
    }
}

/// `op.wait`'s reply: `{state}`, and when that is "done" `{reply}` or `{error}`, packed.
pub fn told(state: &str, result: Option<&Result>) -> Vec<u8> {
    let pack = Pack::default().map(1 + usize::from(result.is_some())).str("state").str(state);
    match result {
        None => pack.0,
        Some(Ok(reply)) => pack.str("reply").bin(reply).0,
        Some(Err(fault)) => pack.str("error").bin(&fault.pack()).0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn done(ops: &Ops, name: &str, reply: &[u8]) {
        ops.begin(name).ended(&Ok(reply.to_vec()));
    }

    #[test]
    fn what_came_of_it_is_known() {
        let ops = Ops::default();
        assert!(matches!(ops.known("a"), Known::Nothing));
        let running = ops.begin("a");
        assert!(matches!(ops.known("a"), Known::Running));
        running.ended(&Ok(b"reply".to_vec()));
        assert!(matches!(ops.known("a"), Known::Done(Ok(reply)) if reply == b"reply"));
        ops.begin("b").ended(&Err(Fault::new("file_not_found", "no")));
        assert!(matches!(ops.known("b"), Known::Done(Err(fault)) if fault.kind == "file_not_found"));
    }

    #[test]
    fn what_broke_off_or_may_be_tried_again_did_not_happen() {
        let ops = Ops::default();
        drop(ops.begin("a"));
        assert!(matches!(ops.known("a"), Known::Nothing));
        ops.begin("b").ended(&Err(Fault::new("capacity", "full").retryable()));
        assert!(matches!(ops.known("b"), Known::Nothing));
        let mut waiting = ops.begin("c");
        waiting.rest = Some(Rest::Closed(7));
        drop(waiting);
        assert!(matches!(ops.known("c"), Known::Left(Rest::Closed(7))));
    }

    #[test]
    fn what_is_kept_is_bounded_and_what_is_forgotten_is_known_to_have_been() {
        let ops = Ops::default();
        let first = ops.begin("running");
        (0..2 * KEPT.0).for_each(|n| done(&ops, &n.to_string(), b"r"));
        assert!(matches!(ops.known("0"), Known::Forgotten));
        assert!(matches!(ops.known(&(2 * KEPT.0 - 1).to_string()), Known::Done(Ok(_))));
        assert!(matches!(ops.known("running"), Known::Running), "none that runs is forgotten");
        done(&ops, "large", &vec![0; 2 * KEPT.1]);
        assert!(matches!(ops.known("large"), Known::Done(Ok(_))));
        done(&ops, "next", b"r");
        assert!(matches!(ops.known("large"), Known::Forgotten));
        (0..REMEMBERED).for_each(|n| done(&ops, &format!("more{n}"), b"r"));
        let table = ops.0.borrow();
        assert!(table.forgotten.len() <= REMEMBERED && table.known.len() <= KEPT.0 + 1);
        drop(table);
        first.ended(&Ok(Vec::new()));
        assert!(matches!(ops.known("running"), Known::Done(Ok(_))));
    }
}
