//! Parameters of `exec` that are too large for one message, sent ahead in pieces: a command line of megabytes, say.

use super::fault::Fault;
use crate::msgpack::Value;

/// Bytes of one command's parameters, and commands whose parameters wait here; the oldest give way.
const MOST: usize = 4 << 20;
const WAITING: usize = 4;

/// Blobs by exec id: msgpack maps with `line`, or `argv` (each argument with its NUL), and `env` (each `name=value` too).
#[derive(Default)]
pub struct Stage(Vec<(String, Vec<u8>)>);

impl Stage {
    /// `exec.stage`: a piece, in order; one that is sent again replaces what is behind it.
    pub fn put(&mut self, exec_id: &str, params: Value) -> Result<(), Fault> {
        let data = params.get("data").and_then(Value::bytes).ok_or_else(|| Fault::invalid("data must be bytes"))?;
        let offset = params.get("offset").and_then(Value::u64).unwrap_or(0) as usize;
        if offset.saturating_add(data.len()) > MOST {
            return Err(Fault::new("too_large", format!("parameters of more than {MOST} bytes"))
                .hint("pass large input through stdin or a file"));
        }
        let mut blob = match self.0.iter().position(|(id, _)| id == exec_id) {
            Some(at) => self.0.remove(at).1,
            None => Vec::new(),
        };
        if offset > blob.len() {
            return Err(Fault::new("conflict", format!("parameters up to {offset} are missing")));
        }
        blob.truncate(offset);
        blob.extend_from_slice(data);
        if self.0.len() >= WAITING {
            self.0.remove(0);
        }
        self.0.push((exec_id.to_owned(), blob));
        Ok(())
    }

    /// The parameters of the command that starts now, `size` bytes of them.
    pub fn take(&mut self, exec_id: &str, size: u64) -> Result<Vec<u8>, Fault> {
        let at = self.0.iter().position(|(id, blob)| id == exec_id && blob.len() as u64 == size);
        let at = at.ok_or_else(|| {
            Fault::new("conflict", "the parameters that were sent ahead are not there (any more)").retryable()
        })?;
        let blob = self.0.remove(at).1;
        Value::check(&blob).ok_or_else(|| Fault::invalid("the parameters that were sent ahead are not msgpack"))?;
        Ok(blob)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::msgpack::Pack;

    fn piece(offset: u64, data: &[u8]) -> Vec<u8> {
        Pack::default().map(2).str("offset").uint(offset).str("data").bin(data).0
    }

    #[test]
    fn pieces_come_together_even_when_one_is_repeated() {
        let blob = Pack::default().map(1).str("line").bin(&[b'x'; 1000]).0;
        let mut stage = Stage::default();
        for (from, to) in [(0, 400), (400, 800), (400, 800), (800, blob.len())] {
            let piece = piece(from as u64, &blob[from..to]);
            stage.put("a", Value::check(&piece).expect("msgpack")).expect("put");
        }
        assert!(stage.take("a", 7).is_err() && stage.take("b", blob.len() as u64).is_err());
        assert_eq!(stage.take("a", blob.len() as u64).ok(), Some(blob));
        assert!(stage.take("a", 1).is_err(), "taken once");
    }

    #[test]
    fn what_waits_is_bounded() {
        let mut stage = Stage::default();
        let large = piece(0, &vec![0; MOST]);
        for number in 0..9 {
            stage.put(&number.to_string(), Value::check(&large).expect("msgpack")).expect("put");
        }
        assert_eq!(stage.0.len(), WAITING);
        let more = piece(MOST as u64, b"x");
        assert_eq!(stage.put("8", Value::check(&more).expect("msgpack")).map_err(|f| f.kind), Err("too_large"));
        let gap = piece(5, b"x");
        assert_eq!(stage.put("new", Value::check(&gap).expect("msgpack")).map_err(|f| f.kind), Err("conflict"));
    }
}
