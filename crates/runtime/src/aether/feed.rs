//! How far a command's stdin got: what was taken of each writer, so that a write can be sent again without harm.
//!
//! A writer is a name of the client's choice; the nameless one is the stream that started the command and whoever names
//! none. Offsets count the bytes of one writer, so that two that append to the same stdin do not take each other's bytes for
//! their own sent twice.

use super::fault::Fault;
use crate::msgpack::{Pack, Value};

/// Writers remembered; the one that has been silent longest is forgotten, and can then no longer repeat itself.
const WRITERS: usize = 16;

#[derive(Default)]
pub struct Fed {
    /// Bytes of all writers.
    pub total: u64,
    /// By writer; the last to write is the last here.
    writers: Vec<(String, u64)>,
}

/// Who writes, and from which of its bytes on (None: behind all before).
#[derive(Default, Clone)]
pub struct From {
    writer: String,
    offset: Option<u64>,
}

impl From {
    pub fn new(params: Value) -> Result<From, Fault> {
        let writer = match params.get("writer") {
            None => "",
            Some(writer) => {
                writer.str().filter(|w| w.len() <= 64).ok_or_else(|| Fault::invalid("writer must be text"))?
            }
        };
        let offset = match params.get("offset") {
            None => None,
            Some(at) => Some(at.u64().ok_or_else(|| Fault::invalid("offset must be a byte count"))?),
        };
        Ok(From { writer: writer.to_owned(), offset })
    }
}

impl Fed {
    fn of(&self, writer: &str) -> u64 {
        self.writers.iter().find(|(name, _)| name == writer).map_or(0, |(_, count)| *count)
    }

    /// How many of `size` bytes were taken before. A fault when bytes in between are missing.
    pub fn known(&self, from: &From, size: usize) -> Result<usize, Fault> {
        let taken = self.of(&from.writer);
        match from.offset {
            None => Ok(0),
            Some(offset) if offset > taken => {
                let text = format!("stdin has {taken} bytes of this writer, those up to {offset} are missing");
                Err(Fault::new("conflict", text).hint("go on from there: an empty write tells how far it got"))
            }
            Some(offset) => Ok((taken - offset).min(size as u64) as usize),
        }
    }

    pub fn take(&mut self, from: &From, size: usize) {
        self.total += size as u64;
        let mut entry = match self.writers.iter().position(|(name, _)| *name == from.writer) {
            Some(at) => self.writers.remove(at),
            None => (from.writer.clone(), 0),
        };
        entry.1 += size as u64;
        if self.writers.len() >= WRITERS {
            self.writers.remove(0);
        }
        self.writers.push(entry);
    }

    /// `{accepted, open}`: bytes of this writer, and whether more may come.
    pub fn reply(&self, from: &From, open: bool) -> Vec<u8> {
        Pack::default().map(2).str("accepted").uint(self.of(&from.writer)).str("open").bool(open).0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(writer: &str, offset: u64) -> From {
        From { writer: writer.into(), offset: Some(offset) }
    }

    #[test]
    fn bytes_sent_again_are_known_and_a_gap_is_a_fault() {
        let mut fed = Fed::default();
        fed.take(&From::default(), 100);
        assert_eq!(fed.known(&at("", 0), 60).ok(), Some(60));
        assert_eq!(fed.known(&at("", 90), 60).ok(), Some(10));
        assert_eq!(fed.known(&at("", 100), 60).ok(), Some(0));
        assert_eq!(fed.known(&at("", 101), 60).map_err(|fault| fault.kind), Err("conflict"));
        assert_eq!(fed.known(&From::default(), 60).ok(), Some(0));
    }

    #[test]
    fn writers_do_not_take_each_others_bytes_for_their_own() {
        let mut fed = Fed::default();
        fed.take(&at("a", 0), 10);
        fed.take(&at("b", 0), 5);
        assert_eq!((fed.known(&at("b", 0), 9).ok(), fed.known(&at("a", 5), 9).ok(), fed.total), (Some(5), Some(5), 15));
        for other in 0..WRITERS {
            fed.take(&at(&other.to_string(), 0), 1);
        }
        assert!(fed.known(&at("a", 10), 1).is_err(), "forgotten, so not taken on trust");
    }
}
